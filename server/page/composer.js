// The box in which a message is written, the line of hints below it, and the failure above it.

import { byId, isComposing } from "./dom.js";
import { hasPictures, putPictures, setUpPictures, takePictures } from "./pictures.js";

const HINT_MS = 8000;
const IS_WRITING = "An answer is being written. Stop it (Escape) or wait; your message stays in the box.";
const box = byId("question");
const isTouch = matchMedia("(hover: none) and (pointer: coarse)");
let hintTimer = 0;
let isStreaming = () => false;

export function hint(text) {
  byId("hint").textContent = text;
  clearTimeout(hintTimer);
  hintTimer = setTimeout(() => (byId("hint").textContent = ""), HINT_MS);
}

export function showFailure(text) {
  byId("failure").hidden = !text;
  byId("failure-text").textContent = text;
}

// Text alone stays a string: templates of models without images may take no list of parts.
export function takeContent() {
  const text = box.value.trim(), urls = takePictures();
  box.value = "";
  hint("");
  fit();
  if (!urls.length) return text;
  const parts = urls.map((url) => ({ type: "image_url", image_url: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

// A message that was not taken returns to the box, before what was written since.
export function putContent(content) {
  const parts = typeof content === "string" ? [{ type: "text", text: content }] : content;
  const texts = parts.filter((part) => part.type === "text").map((part) => part.text);
  box.value = [...texts, box.value].filter(Boolean).join("\n");
  putPictures([...parts.filter((part) => part.type === "image_url").map((part) => part.image_url.url), ...takePictures()]);
  fit();
  box.focus();
}

export function setStreaming(isWriting) {
  byId("send").textContent = isWriting ? "Stop" : "Send";
  byId("send").title = isWriting ? "Stop the answer (Escape)" : "";
  byId("send").classList.toggle("stop", isWriting);
  if (!isWriting && byId("hint").textContent === IS_WRITING) hint("");
}

// The box grows with its text; the style sheet bounds it.
function fit() {
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
}

// `actions` has send(), stop() and isStreaming().
export function setUpComposer(actions) {
  isStreaming = actions.isStreaming;
  setUpPictures(hint);
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if (isStreaming()) actions.stop();
    else if (box.value.trim() || hasPictures()) actions.send();
  });
  box.addEventListener("input", fit);
  box.addEventListener("keydown", (event) => {
    // The keyboard of a phone has no Shift for a second key: there Enter begins a line, and the button sends.
    if (event.key !== "Enter" || event.shiftKey || isComposing(event) || isTouch.matches) return;
    event.preventDefault();
    if (isStreaming()) hint(IS_WRITING);
    else byId("ask").requestSubmit();
  });
  document.addEventListener("keydown", (event) => {
    // Escape closes a dialog, a list and an input method before it stops an answer.
    const isTaken = isComposing(event) || event.target.closest?.("dialog, select");
    if (event.key === "Escape" && !isTaken && !byId("chat-view").hidden && isStreaming()) actions.stop();
  });
  byId("failure-close").addEventListener("click", () => showFailure(""));
  window.addEventListener("resize", fit);
  fit();
}
