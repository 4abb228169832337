// Launches by bucket, as two tables of coloured cells.

import { byId, element } from "./dom.js";
import { abbreviated, count } from "./format.js";

let mode = "launches", shapes = [], known = null;

// A shape is [phase, batch, query, blocks, launches, hits, useful tokens, padding]; `given` is null if unknown.
export function drawShapes(given) {
  known = given;
  shapes = known ?? [];
  drawTable("prefill", (shape) => shape[2]);
  drawTable("decode", (shape) => shape[3]);
}

function drawTable(phase, width) {
  const cells = new Map(), batches = new Set(), widths = new Set();
  for (const shape of shapes.filter((candidate) => candidate[0] === phase)) {
    const key = `${shape[1]}/${width(shape)}`;
    batches.add(shape[1]);
    widths.add(width(shape));
    const sums = cells.get(key) ?? [0, 0, 0, 0];
    cells.set(key, sums.map((sum, index) => sum + shape[4 + index]));
  }
  const ascending = (numbers) => [...numbers].sort((a, b) => a - b);
  const columns = ascending(widths);
  const maxLaunches = Math.max(1, ...[...cells.values()].map((sums) => sums[0]));
  const rows = ascending(batches).reverse().map((batch) => {
    const row = element("tr");
    row.append(element("th", batch || "others", "", { scope: "row" }));
    for (const column of columns) {
      row.append(cell(cells.get(`${batch}/${column}`), maxLaunches, `${batch || "other"} × ${column || "others"}`));
    }
    return row;
  });
  const head = element("tr");
  head.append(element("td"), ...columns.map((column) => element("th", column || "others", "", { scope: "col" })));
  const table = byId(phase);
  // A redraw must not take the focus from the cell that the reader is at.
  const focused = [...table.querySelectorAll("[data-share]")].indexOf(document.activeElement);
  table.className = `map ${mode}`;
  table.replaceChildren(...(rows.length ? [...rows, head] : []));
  table.querySelectorAll("[data-share]")[focused]?.focus();
  byId(`no-${phase}`).textContent = known ? "No launches yet." : "–";
  byId(`no-${phase}`).hidden = rows.length > 0;
}

function cell(sums, maxLaunches, name) {
  if (!sums) return element("td");
  const [launches, hits, useful, padding] = sums, paddingShare = padding / (useful + padding || 1);
  // A logarithm keeps a shape of few launches visible beside a shape of thousands.
  const share = mode === "padding" ? paddingShare : Math.log1p(launches) / Math.log1p(maxLaunches);
  const made = element("td", mode === "padding" ? `${Math.round(100 * paddingShare)}%` : abbreviated(launches));
  made.tabIndex = 0;
  made.dataset.share = share.toFixed(2);
  made.style.setProperty("--share", share.toFixed(2));
  made.title = `${name}: ${count(launches)} launches, ${count(hits)} hits, ` +
    `${count(useful)} tokens, ${count(padding)} of padding (${Math.round(100 * paddingShare)} %)`;
  return made;
}

function choose(button) {
  mode = button.dataset.shows;
  for (const choice of document.querySelectorAll("[data-shows]")) choice.setAttribute("aria-pressed", choice === button);
  const texts = mode === "padding" ? ["padding", "0 %", "100 % of the tokens"] : ["launches", "few", "many"];
  ["scale-name", "scale-low", "scale-high"].forEach((id, index) => (byId(id).textContent = texts[index]));
  byId("scale").className = `scale ${mode}`;
  drawShapes(known);
}

export function setUpShapes() {
  for (const button of document.querySelectorAll("[data-shows]")) button.addEventListener("click", () => choose(button));
  for (const type of ["mouseover", "click", "focusin"]) {
    document.querySelector(".maps").addEventListener(type, (event) => {
      if (event.target.title) byId("cell").textContent = event.target.title;
    });
  }
}
