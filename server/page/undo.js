// A line that says what was deleted, replaced or is edited, with a button that brings the former state back.

import { button, byId, element } from "./dom.js";

export class UndoLine {
  constructor(id, name = "Undo") {
    this.root = byId(id);
    this.name = name;
  }

  // The offer stays until the next one or `clear`: nobody has to be quick.
  offer(text, undo) {
    const act = button(this.name, "small", () => {
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
