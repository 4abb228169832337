// Recent requests: a bar for each on a logarithmic scale, so that a long one flattens no other, and a table.

import { byId, element } from "./dom.js";
import { count, rate, seconds } from "./format.js";

const SHORTEST_S = 0.01;

// A stream that broke off has the status 200. A status from 400 to 499 is an error of the client, whatever the end.
export const isFailed = ({ status, end }) => status >= 500 || (status < 400 && end.split(",").includes("error"));

// A request is {ended, route, status, ttft_s, seconds, prompt_tokens, output_tokens, end}; `recent` is null if unknown.
export function drawRecent(known) {
  const recent = known ?? [];
  const longest = Math.max(1, ...recent.map((request) => request.seconds));
  const decades = Math.ceil(Math.log10(longest / SHORTEST_S));
  // The height of a duration, from 0 to 1.
  const height = (time) => Math.max(0, Math.log10(Math.max(time, SHORTEST_S) / SHORTEST_S) / decades);
  drawTicks(decades);
  byId("bars").style.setProperty("--decades", decades);
  byId("ages").hidden = !recent.length;
  byId("bars").replaceChildren(...recent.map((request) => bar(request, height)));
  byId("latencies").textContent = recent.length ? medians(recent) : "";
  const rows = [...recent].reverse().map(row);
  byId("recent").replaceChildren(...(rows.length ? rows : [emptyRow(known ? "No requests yet." : "–")]));
}

function drawTicks(decades) {
  byId("ticks").replaceChildren(...Array.from({ length: decades + 1 }, (_, decade) => {
    const tick = element("span", seconds(SHORTEST_S * 10 ** decade).replace(/\.0+ /, " "));
    tick.style.setProperty("--at", decade / decades);
    return tick;
  }));
}

function bar(request, height) {
  const whole = Math.max(0.02, height(request.seconds));
  const made = element("span", "", isFailed(request) ? "failed" : "");
  made.style.setProperty("--whole", whole);
  made.style.setProperty("--first", request.ttft_s === null ? 0 : Math.min(1, height(request.ttft_s) / whole));
  made.title = `${request.route}: ${seconds(request.ttft_s)} to the first token, ${seconds(request.seconds)} in all`;
  return made;
}

function medians(recent) {
  const median = (values) => values.sort((a, b) => a - b)[Math.floor(values.length / 2)] ?? null;
  const first = median(recent.map((request) => request.ttft_s).filter((time) => time !== null));
  const whole = median(recent.map((request) => request.seconds));
  return `Median of ${recent.length}: first token ${seconds(first)}, whole ${seconds(whole)}`;
}

function row(request) {
  const made = element("tr");
  const decoding = request.ttft_s === null ? 0 : request.seconds - request.ttft_s;
  made.append(...[
    new Date(request.ended * 1000).toLocaleTimeString(), request.route, seconds(request.ttft_s), seconds(request.seconds),
    count(request.prompt_tokens), count(request.output_tokens), rate(request.output_tokens - 1, decoding),
    endOf(request),
  ].map((text) => element("td", text)));
  return made;
}

// The ends of all choices in words, or the status of a refused request.
function endOf(request) {
  const end = request.end.split(",").map((word) => (word === "abort" ? "stopped by the client" : word)).join(", ");
  return end || `${request.status}`;
}

function emptyRow(text) {
  const made = element("tr");
  made.append(element("td", text, "quiet", { colspan: 8 }));
  return made;
}
