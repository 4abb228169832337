// The list of the conversations that this browser keeps; on a narrow screen it covers the chat.

import { button, byId, element } from "./dom.js";
import { conversations, deleteConversation } from "./storage.js";

let actions;

export function drawList(currentId) {
  const items = conversations().map((chat) => {
    const item = element("li");
    const open = button(chat.title, "chat-name", () => {
      setOpen(false);
      actions.open(chat);
    });
    if (chat.id === currentId) open.setAttribute("aria-current", "true");
    const remove = button("×", "small remove", () => {
      deleteConversation(chat.id);
      actions.deleted(chat.id);
      byId("new-chat").focus();
    });
    remove.setAttribute("aria-label", `Delete ${chat.title}`);
    item.append(open, remove);
    return item;
  });
  byId("conversations").replaceChildren(...items);
  byId("forget").parentElement.hidden = !items.length;
}

function setOpen(isOpen) {
  byId("history").classList.toggle("is-open", isOpen);
  byId("open-history").setAttribute("aria-expanded", isOpen);
  byId(isOpen ? "new-chat" : "open-history").focus();
}

// `given` has open(chat), deleted(id) and create().
export function setUpList(given) {
  actions = given;
  byId("open-history").addEventListener("click", () => setOpen(true));
  byId("close-history").addEventListener("click", () => setOpen(false));
  byId("history").addEventListener("keydown", (event) => event.key === "Escape" && setOpen(false));
  byId("new-chat").addEventListener("click", () => {
    setOpen(false);
    actions.create();
  });
  byId("forget").addEventListener("click", () => {
    for (const { id } of conversations()) {
      deleteConversation(id);
      actions.deleted(id);
    }
    byId("new-chat").focus();
  });
}
