// Elements by id, and new elements. Text is always set as text: no string becomes markup here.

const REDRAW_MS = 30;
// Drawing takes at most a sixth of the time, however long the answer is.
const REDRAW_COST = 5;

export const byId = (id) => document.getElementById(id);

/** Whether a key belongs to an input method. Safari ends a composition before the event of the key that ended it. */
export const isComposing = (event) => event.isComposing || event.keyCode === 229;

export function element(tag, text = "", classes = "", attributes = {}) {
  const made = document.createElement(tag);
  made.textContent = text;
  made.className = classes;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

export function button(text, classes, act) {
  const made = element("button", text, classes, { type: "button" });
  made.addEventListener("click", act);
  return made;
}

// A button that copies what `read` returns, and says so for two seconds.
export function copyButton(text, classes, read) {
  const made = button(text, classes, async () => {
    made.textContent = (await copy(read())) ? "Copied" : "Not copied";
    setTimeout(() => (made.textContent = text), 2000);
  });
  return made;
}

export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Browsers have the clipboard API on https and localhost only.
    const area = element("textarea", text, "offscreen");
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    if (!copied) showText(text);
    return copied;
  }
}

// A dialog with a text that could not be copied, selected.
function showText(text) {
  const dialog = element("dialog", "", "text-dialog", { "aria-label": "Text to copy" });
  const area = element("textarea", text, "", { readonly: "", rows: "16", cols: "60", "aria-label": "Text to copy" });
  dialog.append(area, button("Close", "small", () => dialog.close()));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  area.select();
}

// Calls `act` soon, and leaves time between two calls.
export function paced(act) {
  let isDue = false, cost = 0;
  return () => {
    if (isDue) return;
    isDue = true;
    setTimeout(() => {
      isDue = false;
      const start = performance.now();
      act();
      cost = performance.now() - start;
    }, Math.max(REDRAW_MS, REDRAW_COST * cost));
  };
}
