// The question that is edited in the box: its index in the conversation, and what was in the box before.

import { putContent, takeContent } from "./composer.js";
import { byId, isComposing } from "./dom.js";
import { UndoLine } from "./undo.js";

const line = new UndoLine("edited", "Cancel");
let edited = null;

byId("question").addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !isComposing(event)) cancelEdit();
});

export const isEditing = () => edited !== null;

export function startEdit(index, draft) {
  edited = { index, draft };
  line.offer("You edit an earlier message. Sending replaces it and all messages after it.", () => {
    cancelEdit();
    byId("question").focus();
  });
}

export function cancelEdit() {
  if (!edited) return;
  const { draft } = takeEdit();
  takeContent();
  if (draft) putContent(draft);
}

// Ends the edit and returns it: { index, draft }.
export function takeEdit() {
  const taken = edited;
  edited = null;
  line.clear();
  return taken;
}
