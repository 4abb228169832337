// Output tokens per second over the last minutes, from the engine's counters at each poll.

import { byId, element } from "./dom.js";
import { abbreviated, count } from "./format.js";

const SPAN_S = 300;
// The end of each answer polls, too: over so short a time, a rate would be chance.
const MIN_S = 1;
const SVG = document.querySelector("svg").namespaceURI;
const WIDTH = 300, HEIGHT = 100;
// Each poll: { time in seconds, counters, output and prompt tokens per second since the poll before }.
// The rates are null for the first poll, and after a restart of an engine or a server that did not answer.
let polls = [];

const counters = ({ useful_tokens: { prefill = 0, decode = 0 } }) => ({ prefill, decode });

// `facts` is null if the server did not answer.
export function drawCourse(facts) {
  const time = performance.now() / 1000;
  polls = polls.filter((poll) => time - poll.time < SPAN_S);
  const last = polls.at(-1);
  if (!facts || !last?.now || time - last.time >= MIN_S) polls.push(measured(last, time, facts && counters(facts)));
  const { output, prompt } = polls.at(-1);
  byId("output-rate").textContent = text(output);
  byId("prompt-rate").textContent = text(prompt);
  drawLines(time);
}

function measured(before, time, now) {
  const poll = { time, now, output: null, prompt: null };
  if (!now || !before?.now) return poll;
  const passed = time - before.time;
  const [output, prompt] = [now.decode - before.now.decode, now.prefill - before.now.prefill];
  if (passed <= 0 || output < 0 || prompt < 0) return poll;
  return { ...poll, output: output / passed, prompt: prompt / passed };
}

const text = (value) => (value === null ? "–" : value < 10 ? value.toFixed(1) : count(Math.round(value)));

// A line for each run of known rates: a gap stays a gap.
function drawLines(time) {
  const known = polls.map((poll) => poll.output).filter((value) => value !== null);
  const highest = Math.max(0, ...known), top = roundedUp(highest);
  const runs = [[]];
  for (const { time: at, output } of polls) {
    if (output === null) runs.push([]);
    else runs.at(-1).push(`${(WIDTH * (1 - (time - at) / SPAN_S)).toFixed(1)},${(HEIGHT * (1 - output / top)).toFixed(1)}`);
  }
  byId("course-lines").replaceChildren(...runs.filter((run) => run.length).map((run) => {
    const line = document.createElementNS(SVG, "polyline");
    line.setAttribute("points", run.join(" "));
    return line;
  }));
  byId("course-figures").textContent = known.length ? `Now ${text(polls.at(-1).output)}, highest ${text(highest)}` : "";
  byId("course-ticks").replaceChildren(...[0, 0.5, 1].map((share) => {
    const tick = element("span", abbreviated(share * top));
    tick.style.setProperty("--at", share);
    return tick;
  }));
}

// The end of the axis: 2, 4 or 10 times a power of ten.
function roundedUp(value) {
  const decade = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return decade * [2, 4, 10].find((step) => value <= step * decade);
}
