// Polls the server's state every two seconds while the page is visible, renders it, and sends chat
// messages. Messages stay in this page; an API key stays in this tab's session storage.
"use strict";

const POLL_INTERVAL_MS = 2000, MAX_RECENT_ROWS = 12, MAX_PICTURE_BYTES = 20 * 2 ** 20, KEY_STORAGE_NAME = "gaudiserve-key";
const byId = (id) => document.getElementById(id);
const messages = [], pictures = [];
let tableMode = "launches", shapes = [], abortController = null, model = null;

function headers() {
  const key = sessionStorage.getItem(KEY_STORAGE_NAME);
  // fetch refuses characters above U+00FF in a header: send the bytes of UTF-8, which the server compares.
  return key ? { Authorization: `Bearer ${String.fromCharCode(...new TextEncoder().encode(key))}` } : {};
}

function createElement(tag, text = "", classes = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  element.className = classes;
  return element;
}

const formatPercent = (part, whole) => (whole ? `${(100 * part / whole).toFixed(part === whole ? 0 : 1)} %` : "–");
const formatCount = (value) => value.toLocaleString("en");
const sumOf = (numbers) => Object.values(numbers).reduce((sum, one) => sum + one, 0);
const formatSeconds = (value) =>
  value === null ? "–" : value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(value < 10 ? 2 : 1)} s`;

async function refresh() {
  let answer, state;
  try {
    answer = await fetch("page/state", { headers: headers(), cache: "no-store" });
    // A proxy may answer with a page of its own.
    if (answer.ok) state = await answer.json();
  } catch {
    return showStatus("unreachable");
  }
  byId("key-form").hidden = answer.status !== 401;
  if (answer.status === 401) return showStatus("key needed");
  if (!answer.ok) return showStatus("unreachable");
  render(state);
}

function showStatus(state) {
  byId("status").textContent = state;
  byId("status").dataset.state = state;
}

function render(state) {
  model = state.model;
  showStatus(state.status);
  document.title = `${state.model} · gaudiserve`;
  byId("model").textContent = state.model;
  byId("facts").textContent = [
    `gaudiserve ${state.version}`, state.device, state.dtype,
    state.max_model_len && `context ${formatCount(state.max_model_len)}`, state.progress,
  ].filter(Boolean).join(" · ");
  byId("emulated").hidden = state.device !== "hpu-emulator";
  byId("chat").hidden = state.pools;
  byId("attach").hidden = !state.takes_images;
  const load = state.load;
  byId("running").textContent = formatCount(load.running);
  byId("open").textContent = `${formatCount(load.open)} over HTTP`;
  byId("waiting").textContent = formatCount(load.waiting);
  byId("waiting-tokens").textContent = `${formatCount(load.waiting_prompt_tokens)} prompt tokens`;
  byId("kv").textContent = formatPercent(load.blocks_used, load.blocks_total);
  byId("kv-bar").value = load.blocks_total ? load.blocks_used / load.blocks_total : 0;
  const launches = sumOf(state.lookups);
  const hitNames = Object.keys(state.lookups).filter((name) => name.endsWith(".hit"));
  const hits = hitNames.reduce((sum, name) => sum + state.lookups[name], 0);
  byId("hits").textContent = formatPercent(hits, launches);
  byId("misses").textContent = `${formatCount(launches - hits)} of ${formatCount(launches)} missed`;
  const padding = sumOf(state.padding_tokens), useful = sumOf(state.useful_tokens);
  byId("padding").textContent = formatPercent(padding, padding + useful);
  byId("padded").textContent = `of ${formatCount(padding + useful)} tokens`;
  byId("graphs").textContent = formatCount(state.graphs);
  byId("compiled").textContent = `${formatCount(state.compilations)} compiled while serving`;
  if (state.shapes) shapes = state.shapes;
  renderShapeTables();
  renderRecentRequests(state.recent);
}

function renderShapeTables() {
  renderShapeTable("prefill", (shape) => shape[2]);
  renderShapeTable("decode", (shape) => shape[3]);
}

// A shape is [phase, batch, query, blocks, launches, hits, useful tokens, padding].
function renderShapeTable(phase, width) {
  const cells = new Map(), batches = new Set(), widths = new Set();
  for (const shape of shapes.filter((one) => one[0] === phase)) {
    const key = `${shape[1]}/${width(shape)}`;
    batches.add(shape[1]);
    widths.add(width(shape));
    const sums = cells.get(key) ?? [0, 0, 0, 0];
    cells.set(key, sums.map((sum, index) => sum + shape[4 + index]));
  }
  const ascending = (numbers) => [...numbers].sort((one, other) => one - other);
  const columns = ascending(widths);
  const maxLaunches = Math.max(1, ...[...cells.values()].map((sums) => sums[0]));
  const table = byId(phase);
  table.className = `map ${tableMode}`;
  const rows = ascending(batches).reverse().map((batch) => {
    const row = createElement("tr");
    row.append(createElement("th", batch || "others"));
    for (const column of columns) row.append(createShapeCell(cells.get(`${batch}/${column}`), maxLaunches, `${batch} × ${column || "others"}`));
    return row;
  });
  const footerRow = createElement("tr");
  footerRow.append(createElement("th"), ...columns.map((column) => createElement("th", column || "others")));
  table.replaceChildren(...(rows.length ? [...rows, footerRow] : []));
  if (!rows.length) table.append(createElement("caption", "No launches yet.", "quiet"));
}

function createShapeCell(sums, maxLaunches, name) {
  const cell = createElement("td");
  if (!sums) return cell;
  const [launches, hits, useful, padding] = sums, paddingShare = padding / (useful + padding || 1);
  // A logarithm keeps a shape of few launches visible beside one of thousands.
  const share = tableMode === "padding" ? paddingShare : Math.log1p(launches) / Math.log1p(maxLaunches);
  cell.textContent = tableMode === "padding" ? `${Math.round(100 * paddingShare)}%` : abbreviate(launches);
  cell.dataset.share = share.toFixed(2);
  cell.style.setProperty("--share", share.toFixed(2));
  cell.classList.toggle("deep", share > 0.6);
  cell.title = `${name}: ${formatCount(launches)} launches, ${formatCount(hits)} hits, ` +
    `${formatCount(useful)} tokens, ${formatCount(padding)} of padding (${Math.round(100 * paddingShare)} %)`;
  return cell;
}

const abbreviate = (value) => (value < 1000 ? `${value}` : value < 1e6 ? `${(value / 1000).toFixed(value < 1e4 ? 1 : 0)}k` : `${(value / 1e6).toFixed(1)}M`);

// A request is {ended, route, status, ttft_s, seconds, prompt_tokens, output_tokens, end}.
function renderRecentRequests(recent) {
  if (!recent.length) return;
  const longest = Math.max(...recent.map((one) => one.seconds), 0.001);
  byId("bars").replaceChildren(...recent.map((one) => {
    const bar = createElement("span");
    bar.style.setProperty("--whole", Math.max(one.seconds / longest, 0.02));
    bar.style.setProperty("--first", one.ttft_s === null ? 0 : one.ttft_s / one.seconds);
    bar.title = `${formatSeconds(one.ttft_s)} to the first token, ${formatSeconds(one.seconds)} in all`;
    return bar;
  }));
  const median = (values) => values.sort((one, other) => one - other)[Math.floor(values.length / 2)] ?? null;
  const firstTokenTimes = recent.map((one) => one.ttft_s).filter((value) => value !== null);
  byId("latencies").textContent = `Median of ${recent.length}: first token ${formatSeconds(median(firstTokenTimes))}, ` +
    `whole ${formatSeconds(median(recent.map((one) => one.seconds)))}`;
  byId("recent").replaceChildren(...recent.slice(-MAX_RECENT_ROWS).reverse().map((one) => {
    const decodeSeconds = one.seconds - (one.ttft_s ?? 0);
    const tokensPerSecond = one.ttft_s !== null && one.output_tokens > 1 && decodeSeconds > 0 ? ((one.output_tokens - 1) / decodeSeconds).toFixed(1) : "–";
    const row = createElement("tr");
    row.append(...[
      new Date(one.ended * 1000).toLocaleTimeString(), one.route, formatSeconds(one.ttft_s), formatSeconds(one.seconds),
      formatCount(one.prompt_tokens), formatCount(one.output_tokens), tokensPerSecond, one.end || one.status,
    ].map((text) => createElement("td", text)));
    return row;
  }));
}

// Text alone stays a string: templates of models without images may take no list of parts.
function contentOf(text, urls) {
  if (!urls.length) return text;
  const parts = urls.map((url) => ({ type: "image_url", image_url: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

function createPicture(url) {
  const image = createElement("img");
  image.src = url;
  image.alt = "Picture of the message";
  return image;
}

async function addPictures(files) {
  if (byId("attach").hidden) return showNote("This model takes no pictures.");
  let note = "";
  for (const file of files) {
    if (!file.type.startsWith("image/")) note = `${file.name} is no picture.`;
    else if (file.size > MAX_PICTURE_BYTES) note = `${file.name} has ${formatCount(file.size)} bytes, at most ${formatCount(MAX_PICTURE_BYTES)} are taken.`;
    else pictures.push(await readUrl(file));
  }
  renderPictures();
  if (note) showNote(note);
}

function readUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

function showNote(text) {
  byId("pictures").append(createElement("span", text, "quiet"));
  setTimeout(renderPictures, 5000);
}

function renderPictures() {
  byId("pictures").replaceChildren(...pictures.map((url, index) => {
    const button = createElement("button");
    button.type = "button";
    button.title = "Remove this picture";
    button.append(createPicture(url));
    button.addEventListener("click", () => {
      pictures.splice(index, 1);
      renderPictures();
    });
    return button;
  }));
}

async function sendMessage(text, urls) {
  if (!messages.length) byId("messages").replaceChildren();
  messages.push({ role: "user", content: contentOf(text, urls) });
  const answerElement = createElement("div", "", "open");
  const reasoningElement = createElement("span", "", "reasoning"), textElement = createElement("span");
  answerElement.append(reasoningElement, textElement);
  const userElement = createElement("div", text, "user");
  if (urls.length) {
    const shown = createElement("span", "", "pictures");
    shown.append(...urls.map(createPicture));
    userElement.prepend(shown);
  }
  byId("messages").append(userElement, answerElement);
  abortController = new AbortController();
  byId("send").textContent = "Stop";
  try {
    const answer = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...headers() },
      body: JSON.stringify({ model, messages, stream: true }),
      signal: abortController.signal,
    });
    if (!answer.ok) throw new Error(await errorMessage(answer));
    for await (const event of readEvents(answer.body)) {
      if (event.error) throw new Error(event.error.message);
      const delta = event.choices[0]?.delta ?? {};
      reasoningElement.textContent += delta.reasoning ?? "";
      textElement.textContent += delta.content ?? "";
      byId("messages").scrollTop = byId("messages").scrollHeight;
    }
  } catch (error) {
    if (error.name !== "AbortError") answerElement.append(createElement("span", error.message, "error"));
  }
  answerElement.classList.remove("open");
  if (textElement.textContent) messages.push({ role: "assistant", content: textElement.textContent });
  else messages.pop();
  abortController = null;
  byId("send").textContent = "Send";
  refresh();
}

// A proxy's own error is no JSON.
async function errorMessage(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `The server answered ${answer.status}.`;
  }
}

async function* readEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let buffered = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (buffered + value).split("\n");
    buffered = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
    }
  }
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("question").value.trim();
  if (abortController) return abortController.abort();
  if (!(text || pictures.length) || !model) return;
  byId("question").value = "";
  const urls = pictures.splice(0);
  renderPictures();
  sendMessage(text, urls);
});
byId("attach").addEventListener("click", () => byId("files").click());
byId("files").addEventListener("change", () => {
  addPictures([...byId("files").files]);
  byId("files").value = "";
});
byId("chat").addEventListener("dragover", (event) => event.preventDefault());
byId("chat").addEventListener("drop", (event) => {
  event.preventDefault();
  addPictures([...event.dataTransfer.files]);
});
byId("question").addEventListener("paste", (event) => {
  if (event.clipboardData.files.length) addPictures([...event.clipboardData.files]);
});
byId("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!abortController) byId("ask").requestSubmit();
  }
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  // Control characters, which fetch refuses in a header, are in no key.
  sessionStorage.setItem(KEY_STORAGE_NAME, byId("key").value.replace(/[\x00-\x1f\x7f]/g, ""));
  byId("key").value = "";
  refresh();
});
for (const button of document.querySelectorAll("[data-shows]")) {
  button.addEventListener("click", () => {
    tableMode = button.dataset.shows;
    for (const one of document.querySelectorAll("[data-shows]")) one.setAttribute("aria-pressed", one === button);
    renderShapeTables();
  });
}
for (const type of ["mouseover", "click"]) {
  document.querySelector(".maps").addEventListener(type, (event) => {
    if (event.target.title) byId("cell").textContent = event.target.title;
  });
}
refresh();
setInterval(() => document.hidden || refresh(), POLL_INTERVAL_MS);
