// Numbers as text with their units.

export const count = (value) => value.toLocaleString("en");

export function percent(part, whole) {
  if (!whole) return "–";
  // A miss among millions is not 100 %.
  return part === whole ? "100 %" : `${Math.min(99.9, (100 * part) / whole).toFixed(1)} %`;
}

export function seconds(value) {
  if (value === null) return "–";
  return value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

// A time in its two largest units, with no line break between a number and its unit.
export function duration(seconds) {
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const first = units.findIndex(([, size]) => seconds >= size);
  if (first < 0) return "0 s";
  const [[name, size], next] = units.slice(first);
  const whole = `${Math.floor(seconds / size)}\u00a0${name}`;
  return next ? `${whole} ${Math.floor((seconds % size) / next[1])}\u00a0${next[0]}` : whole;
}

export function abbreviated(value) {
  if (value < 1000) return `${value}`;
  return value < 1e6 ? `${(value / 1000).toFixed(value < 1e4 ? 1 : 0)}k` : `${(value / 1e6).toFixed(1)}M`;
}

// The last part of a path: a model that is served from a folder is named by its path.
export const shortName = (model) => (model.startsWith("/") ? model.slice(model.lastIndexOf("/") + 1) || model : model);

// At most `most` characters, which end with a whole word where there are several, and a sign that text is missing.
export function shorten(text, most) {
  const characters = [...text];
  if (characters.length <= most) return text;
  const start = characters.slice(0, most - 1).join("");
  return `${/\s/.test(start.trim()) ? start.replace(/\s+\S*$/, "") : start}…`;
}

export const rate = (tokens, time) => (tokens > 0 && time > 0 ? (tokens / time).toFixed(1) : "–");
