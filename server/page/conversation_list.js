// The list of the conversations that this browser keeps; on a narrow screen it covers the chat.

import { button, byId, element } from "./dom.js";
import { textOf } from "./message_view.js";
import { conversations, deleteConversation, restoreConversation } from "./storage.js";
import { UndoLine } from "./undo.js";

const deletion = new UndoLine("deleted");
let actions;
let current = "";
// The chat in the dialog.
let named = null;

export function drawList(currentId) {
  current = currentId;
  const all = conversations(), find = byId("find-chat");
  if (!all.length) find.value = "";
  const items = all.filter((chat) => contains(chat, find.value.trim().toLowerCase())).map((chat) => {
    const item = element("li");
    const open = button(chat.title, "chat-name", () => {
      setOpen(false);
      actions.open(chat);
    });
    if (chat.id === currentId) open.setAttribute("aria-current", "true");
    const remove = button("×", "small remove", () => deleteAll([chat], `Deleted “${chat.title}”.`));
    remove.setAttribute("aria-label", `Delete ${chat.title}`);
    const rename = button("✎", "small remove", () => askName(chat));
    rename.setAttribute("aria-label", `Rename ${chat.title}`);
    rename.dataset.id = chat.id;
    item.append(open, rename, remove);
    return item;
  });
  byId("conversations").replaceChildren(...items);
  byId("no-chat").textContent = all.length && !items.length ? "No chat has these words." : "";
  find.hidden = byId("forget").parentElement.hidden = !all.length;
}

function contains(chat, words) {
  return !words || [chat.title, ...chat.messages.map(textOf)].some((text) => String(text).toLowerCase().includes(words));
}

function askName(chat) {
  named = chat;
  byId("chat-title").value = chat.title;
  byId("rename").showModal();
  byId("chat-title").select();
}

function setName() {
  const title = byId("chat-title").value.trim();
  if (title) actions.renamed({ ...named, title, isNamed: true });
}

// The list, and with it the button that opened the dialog, may have been drawn again.
function focusNamed() {
  byId("conversations").querySelector(`[data-id="${CSS.escape(named.id)}"]`)?.focus();
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

// `given` has open(chat), create(), say(text), renamed(chat), and deleted(ids), which returns a function for when
// they are back.
export function setUpList(given) {
  actions = given;
  byId("find-chat").addEventListener("input", () => drawList(current));
  byId("rename").querySelector("form").addEventListener("submit", setName);
  byId("rename").addEventListener("close", focusNamed);
  byId("cancel-rename").addEventListener("click", () => byId("rename").close());
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
