// The list of the conversations that this browser keeps; on a narrow screen it covers the chat.

import { button, byId, element } from "./dom.js";
import { conversations, deleteConversation, restoreConversation } from "./storage.js";
import { UndoLine } from "./undo.js";

const deletion = new UndoLine("deleted");
let actions;

export function drawList(currentId) {
  const items = conversations().map((chat) => {
    const item = element("li");
    const open = button(chat.title, "chat-name", () => {
      setOpen(false);
      actions.open(chat);
    });
    if (chat.id === currentId) open.setAttribute("aria-current", "true");
    const remove = button("×", "small remove", () => deleteAll([chat], `Deleted “${chat.title}”.`));
    remove.setAttribute("aria-label", `Delete ${chat.title}`);
    item.append(open, remove);
    return item;
  });
  byId("conversations").replaceChildren(...items);
  byId("forget").parentElement.hidden = !items.length;
}

function deleteAll(chats, text) {
  for (const { id } of chats) deleteConversation(id);
  const reopen = actions.deleted(chats.map((chat) => chat.id));
  byId("new-chat").focus();
  deletion.offer(text, () => {
    const areKept = chats.map(restoreConversation).every(Boolean);
    if (!areKept) actions.say("This browser has no room for all chats: close other tabs of this server, and delete other chats.");
    reopen();
    byId("new-chat").focus();
  });
}

function setOpen(isOpen) {
  byId("history").classList.toggle("is-open", isOpen);
  byId("open-history").setAttribute("aria-expanded", isOpen);
  byId(isOpen ? "new-chat" : "open-history").focus();
}

// `given` has open(chat), create(), say(text), and deleted(ids), which returns a function for when they are back.
export function setUpList(given) {
  actions = given;
  byId("open-history").addEventListener("click", () => setOpen(true));
  byId("close-history").addEventListener("click", () => setOpen(false));
  byId("history").addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !byId("history").classList.contains("is-open")) return;
    // Elsewhere Escape stops the answer.
    event.stopPropagation();
    setOpen(false);
  });
  byId("new-chat").addEventListener("click", () => {
    setOpen(false);
    actions.create();
  });
  byId("forget").addEventListener("click", () => {
    const all = conversations();
    deleteAll(all, all.length === 1 ? "Deleted the chat." : `Deleted ${all.length} chats.`);
  });
}
