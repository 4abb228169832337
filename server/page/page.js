// Asks the server for its figures every two seconds while the page is seen, draws them, and talks
// to the model. Texts stay in this page; an API key stays in this tab's session storage.
"use strict";

const EVERY_MS = 2000, MOST_ROWS = 12, KEY = "gaudiserve-key";
const at = (id) => document.getElementById(id);
const talk = [];
let shown = "launches", shapes = [], answering = null, model = null;

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

function made(tag, text = "", classes = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  element.className = classes;
  return element;
}

const percent = (part, whole) => (whole ? `${(100 * part / whole).toFixed(part === whole ? 0 : 1)} %` : "–");
const count = (value) => value.toLocaleString("en");
const total = (numbers) => Object.values(numbers).reduce((sum, one) => sum + one, 0);
const seconds = (value) =>
  value === null ? "–" : value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(value < 10 ? 2 : 1)} s`;

async function refresh() {
  let answer;
  try {
    answer = await fetch("page/state", { headers: headers(), cache: "no-store" });
  } catch {
    return tell("unreachable");
  }
  at("key-form").hidden = answer.status !== 401;
  if (answer.status === 401) return tell("key needed");
  if (!answer.ok) return tell("unreachable");
  draw(await answer.json());
}

function tell(state) {
  at("status").textContent = state;
  at("status").dataset.state = state;
}

function draw(state) {
  model = state.model;
  tell(state.status);
  document.title = `${state.model} · gaudiserve`;
  at("model").textContent = state.model;
  at("facts").textContent = [
    `gaudiserve ${state.version}`, state.device, state.dtype,
    state.max_model_len && `context ${count(state.max_model_len)}`, state.progress,
  ].filter(Boolean).join(" · ");
  at("emulated").hidden = state.device !== "hpu-emulator";
  at("chat").hidden = state.pools;
  const load = state.load;
  at("running").textContent = count(load.running);
  at("open").textContent = `${count(load.open)} over HTTP`;
  at("waiting").textContent = count(load.waiting);
  at("waiting-tokens").textContent = `${count(load.waiting_prompt_tokens)} prompt tokens`;
  at("kv").textContent = percent(load.blocks_used, load.blocks_total);
  at("kv-bar").value = load.blocks_total ? load.blocks_used / load.blocks_total : 0;
  const launches = total(state.lookups);
  const hits = Object.keys(state.lookups).filter((name) => name.endsWith(".hit"));
  const hit = hits.reduce((sum, name) => sum + state.lookups[name], 0);
  at("hits").textContent = percent(hit, launches);
  at("misses").textContent = `${count(launches - hit)} of ${count(launches)} missed`;
  const padding = total(state.padding_tokens), useful = total(state.useful_tokens);
  at("padding").textContent = percent(padding, padding + useful);
  at("padded").textContent = `of ${count(padding + useful)} tokens`;
  at("graphs").textContent = count(state.graphs);
  at("compiled").textContent = `${count(state.compilations)} compiled while serving`;
  if (state.shapes) shapes = state.shapes;
  drawMaps();
  drawRecent(state.recent);
}

function drawMaps() {
  drawMap("prefill", (shape) => shape[2]);
  drawMap("decode", (shape) => shape[3]);
}

// A shape is [phase, batch, query, blocks, launches, hits, useful tokens, padding].
function drawMap(phase, width) {
  const cells = new Map(), batches = new Set(), widths = new Set();
  for (const shape of shapes.filter((one) => one[0] === phase)) {
    const place = `${shape[1]}/${width(shape)}`;
    batches.add(shape[1]);
    widths.add(width(shape));
    const sums = cells.get(place) ?? [0, 0, 0, 0];
    cells.set(place, sums.map((sum, index) => sum + shape[4 + index]));
  }
  const rising = (numbers) => [...numbers].sort((one, other) => one - other);
  const columns = rising(widths);
  const most = Math.max(1, ...[...cells.values()].map((sums) => sums[0]));
  const table = at(phase);
  table.className = `map ${shown}`;
  const rows = rising(batches).reverse().map((batch) => {
    const row = made("tr");
    row.append(made("th", batch || "others"));
    for (const column of columns) row.append(cellOf(cells.get(`${batch}/${column}`), most, `${batch} × ${column || "others"}`));
    return row;
  });
  const foot = made("tr");
  foot.append(made("th"), ...columns.map((column) => made("th", column || "others")));
  table.replaceChildren(...(rows.length ? [...rows, foot] : []));
  if (!rows.length) table.append(made("caption", "No launches yet.", "quiet"));
}

function cellOf(sums, most, name) {
  const cell = made("td");
  if (!sums) return cell;
  const [launches, hits, useful, padding] = sums, wasted = padding / (useful + padding || 1);
  // Few launches of one shape beside thousands of another are still seen.
  const share = shown === "padding" ? wasted : Math.log1p(launches) / Math.log1p(most);
  cell.textContent = shown === "padding" ? `${Math.round(100 * wasted)}%` : short(launches);
  cell.dataset.share = share.toFixed(2);
  cell.style.setProperty("--share", share.toFixed(2));
  cell.classList.toggle("deep", share > 0.6);
  cell.title = `${name}: ${count(launches)} launches, ${count(hits)} hits, ` +
    `${count(useful)} tokens, ${count(padding)} of padding (${Math.round(100 * wasted)} %)`;
  return cell;
}

const short = (value) => (value < 1000 ? `${value}` : value < 1e6 ? `${(value / 1000).toFixed(value < 1e4 ? 1 : 0)}k` : `${(value / 1e6).toFixed(1)}M`);

// A request is {ended, route, status, ttft_s, seconds, prompt_tokens, output_tokens, end}.
function drawRecent(recent) {
  if (!recent.length) return;
  const longest = Math.max(...recent.map((one) => one.seconds), 0.001);
  at("bars").replaceChildren(...recent.map((one) => {
    const bar = made("span");
    bar.style.setProperty("--whole", Math.max(one.seconds / longest, 0.02));
    bar.style.setProperty("--first", one.ttft_s === null ? 0 : one.ttft_s / one.seconds);
    bar.title = `${seconds(one.ttft_s)} to the first token, ${seconds(one.seconds)} in all`;
    return bar;
  }));
  const middle = (values) => values.sort((one, other) => one - other)[Math.floor(values.length / 2)] ?? null;
  const firsts = recent.map((one) => one.ttft_s).filter((value) => value !== null);
  at("latencies").textContent = `Median of ${recent.length}: first token ${seconds(middle(firsts))}, ` +
    `whole ${seconds(middle(recent.map((one) => one.seconds)))}`;
  at("recent").replaceChildren(...recent.slice(-MOST_ROWS).reverse().map((one) => {
    const decoding = one.seconds - (one.ttft_s ?? 0);
    const pace = one.ttft_s !== null && one.output_tokens > 1 && decoding > 0 ? ((one.output_tokens - 1) / decoding).toFixed(1) : "–";
    const row = made("tr");
    row.append(...[
      new Date(one.ended * 1000).toLocaleTimeString(), one.route, seconds(one.ttft_s), seconds(one.seconds),
      count(one.prompt_tokens), count(one.output_tokens), pace, one.end || one.status,
    ].map((text) => made("td", text)));
    return row;
  }));
}

async function ask(question) {
  if (!talk.length) at("talk").replaceChildren();
  talk.push({ role: "user", content: question });
  const said = made("div", "", "open");
  const thought = made("span", "", "thought"), words = made("span");
  said.append(thought, words);
  at("talk").append(made("div", question, "mine"), said);
  answering = new AbortController();
  at("send").textContent = "Stop";
  try {
    const answer = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...headers() },
      body: JSON.stringify({ model, messages: talk, stream: true }),
      signal: answering.signal,
    });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    for await (const event of events(answer.body)) {
      if (event.error) throw new Error(event.error.message);
      const delta = event.choices[0]?.delta ?? {};
      thought.textContent += delta.reasoning ?? "";
      words.textContent += delta.content ?? "";
      at("talk").scrollTop = at("talk").scrollHeight;
    }
  } catch (error) {
    if (error.name !== "AbortError") said.append(made("span", error.message, "fault"));
  }
  said.classList.remove("open");
  if (words.textContent) talk.push({ role: "assistant", content: words.textContent });
  else talk.pop();
  answering = null;
  at("send").textContent = "Send";
  refresh();
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
    }
  }
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = at("question").value.trim();
  if (answering) return answering.abort();
  if (!question || !model) return;
  at("question").value = "";
  ask(question);
});
at("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!answering) at("ask").requestSubmit();
  }
});
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, at("key").value);
  at("key").value = "";
  refresh();
});
for (const button of document.querySelectorAll("[data-shows]")) {
  button.addEventListener("click", () => {
    shown = button.dataset.shows;
    for (const one of document.querySelectorAll("[data-shows]")) one.setAttribute("aria-pressed", one === button);
    drawMaps();
  });
}
for (const type of ["mouseover", "click"]) {
  document.querySelector(".maps").addEventListener(type, (event) => {
    if (event.target.title) at("cell").textContent = event.target.title;
  });
}
refresh();
setInterval(() => document.hidden || refresh(), EVERY_MS);
