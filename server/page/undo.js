// A line that says what was deleted or replaced, with a button that brings it back.

import { button, byId, element } from "./dom.js";

export class UndoLine {
  constructor(id) {
    this.root = byId(id);
  }

  // The offer stays until the next one or `clear`: nobody has to be quick.
  offer(text, undo) {
    const act = button("Undo", "small", () => {
      this.clear();
      undo();
    });
    this.root.replaceChildren(element("span", text, "quiet"), act);
    this.root.hidden = false;
    byId("announcement").textContent = text;
  }

  clear() {
    this.root.replaceChildren();
    this.root.hidden = true;
  }
}
