// The view of the server: its load, and what its launches and requests did. Without fresh data it shows none.

import { byId, element } from "./dom.js";
import { drawCourse } from "./course.js";
import { count, duration, percent, seconds } from "./format.js";
import { drawRecent, isFailed } from "./recent.js";
import { onServer, server } from "./server_state.js";
import { drawShapes, setUpShapes } from "./shapes.js";

const sum = (numbers) => Object.values(numbers).reduce((total, value) => total + value, 0);

// A figure and the line below it.
function figures({ load, lookups, padding_tokens, useful_tokens, graphs, compilations, recent, restarts, uptime_s }) {
  const launches = sum(lookups);
  const hits = sum(Object.fromEntries(Object.entries(lookups).filter(([name]) => name.endsWith(".hit"))));
  const padding = sum(padding_tokens), computed = padding + sum(useful_tokens);
  return {
    running: count(load.running),
    open: `sequences; ${count(load.open)} ${load.open === 1 ? "request" : "requests"} over HTTP`,
    waiting: count(load.waiting),
    "waiting-tokens": `sequences; ${count(load.waiting_prompt_tokens)} prompt ${load.waiting_prompt_tokens === 1 ? "token" : "tokens"}`,
    kv: percent(load.blocks_used, load.blocks_total),
    "kv-blocks": `${count(load.blocks_used)} of ${count(load.blocks_total)} blocks`,
    hits: percent(hits, launches),
    misses: `${count(launches - hits)} of ${count(launches)} launches missed`,
    padding: percent(padding, computed),
    padded: `of ${count(computed)} computed tokens`,
    graphs: count(graphs),
    compiled: `${count(compilations)} compiled while serving`,
    failed: count(recent.filter(isFailed).length),
    "failed-of": `of the last ${count(recent.length)} ${recent.length === 1 ? "request" : "requests"}`,
    uptime: duration(uptime_s),
    restarted: restarts.length ? `${count(restarts.length)} engine ${restarts.length === 1 ? "restart" : "restarts"}` : "",
  };
}

const FIGURES = "running open waiting waiting-tokens kv kv-blocks hits misses padding padded graphs compiled failed failed-of uptime restarted".split(" ");

const restart = ({ engine, ended, seconds: pause, reason }) =>
  element("li", `${new Date(ended * 1000).toLocaleTimeString()}: engine ${engine} was back after ${seconds(pause)}: ${reason}`);

// The device that the server named last.
let device = "";

function draw() {
  const { facts } = server;
  device = facts?.device || device;
  const shown = facts ? figures(facts) : {};
  for (const id of FIGURES) byId(id).textContent = shown[id] ?? (byId(id).tagName === "OUTPUT" ? "–" : "");
  byId("kv-bar").value = facts?.load.blocks_total ? facts.load.blocks_used / facts.load.blocks_total : 0;
  for (const link of document.querySelectorAll("[data-docs]")) link.hidden = facts !== null && !facts.has_docs;
  // The CPU has neither prepared shapes nor graphs.
  for (const part of document.querySelectorAll("[data-buckets]")) part.hidden = !device || device === "cpu";
  byId("restarts").hidden = !facts?.restarts.length;
  byId("restart-list").replaceChildren(...[...(facts?.restarts ?? [])].reverse().map(restart));
  drawCourse(facts);
  // A busy engine may not report its launches in time: the last ones stay.
  if (!facts || facts.shapes) drawShapes(facts?.shapes ?? null);
  drawRecent(facts?.recent ?? null);
}

// The explanation of a word is in the list at the end: a tooltip needs a mouse.
function explain(word) {
  const explanation = byId(`term-${word.dataset.term}`);
  word.title = explanation.textContent;
  explanation.tabIndex = -1;
  word.addEventListener("click", () => {
    byId("glossary").open = true;
    explanation.focus();
  });
}

export function setUpDashboard() {
  document.querySelectorAll("[data-term]").forEach(explain);
  setUpShapes();
  onServer(draw);
  draw();
}
