// The list of messages follows an answer only while its end is in view.

import { byId } from "./dom.js";

const NEAR_PX = 60;
const list = byId("messages");
let follows = true;
let lastTop = 0;
// Where the list is in the window.
let place = null;

const isAtEnd = () => list.scrollHeight - list.scrollTop - list.clientHeight < NEAR_PX;

// The examples of an empty chat are read from their start.
export function toEnd() {
  list.scrollTop = list.querySelector(".welcome") ? 0 : list.scrollHeight;
  lastTop = list.scrollTop;
  follows = true;
  byId("to-end").hidden = true;
}

// Call after each change of the list.
export function follow() {
  if (follows) toEnd();
  else byId("to-end").hidden = isAtEnd();
}

// A notice above the list moves the list: the text that is being read stays in its place.
function resized() {
  const { top, height } = list.getBoundingClientRect();
  if (height) {
    list.scrollTop += top - (place ?? top);
    place = top;
  }
  follow();
}

export function setUpScrolling() {
  list.addEventListener("scroll", () => {
    // A list that became lower, or an answer that grew, moves the end away although nobody scrolled.
    follows = isAtEnd() || (follows && list.scrollTop >= lastTop);
    lastTop = list.scrollTop;
    byId("to-end").hidden = follows;
  });
  byId("to-end").addEventListener("click", toEnd);
  new ResizeObserver(resized).observe(list);
}
