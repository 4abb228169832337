// What this browser keeps: settings, and conversations up to a limit. Pictures are not kept.

// A reverse proxy may serve several servers on one origin, each below its own path.
export const PREFIX = `gaudiserve:${location.pathname}:`;
const CHAT = `${PREFIX}chat:`;
export const MAX_CONVERSATIONS = 50;
export const MAX_CHARACTERS = 500_000;
export const PICTURE_NOT_KEPT = "(The picture is not saved.)";
const DEFAULTS = { system: "", temperature: "", maxTokens: 1024, endsRepeats: true, tools: "", others: "", model: "", theme: "auto" };

export const loadSettings = () => ({ ...DEFAULTS, ...read(`${PREFIX}settings`) });
export const saveSettings = (settings) => write(`${PREFIX}settings`, settings);

// All conversations, the newest first.
export function conversations() {
  const found = Object.keys(localStorage).filter((name) => name.startsWith(CHAT)).map(read);
  return found.filter((chat) => Array.isArray(chat?.messages)).sort((a, b) => b.updated - a.updated);
}

// Keeps a conversation as it was before it was deleted. Returns whether there was room.
export const restoreConversation = (chat) => write(CHAT + chat.id, chat);
export const deleteConversation = (id) => localStorage.removeItem(CHAT + id);

// Keeps a conversation, and deletes the oldest others beyond the limits. Returns whether there was room.
export function saveConversation(chat) {
  const kept = { ...chat, updated: Date.now(), messages: chat.messages.map(withoutPictures) };
  if (JSON.stringify(kept).length > MAX_CHARACTERS) return false;
  const others = conversations().filter((other) => other.id !== chat.id);
  while (others.length >= MAX_CONVERSATIONS) deleteConversation(others.pop().id);
  // Another page of this origin may have filled the storage.
  while (!write(CHAT + chat.id, kept)) {
    if (!others.length) return false;
    deleteConversation(others.pop().id);
  }
  return true;
}

function withoutPictures(message) {
  if (!Array.isArray(message.content)) return message;
  const parts = message.content.map((part) => (part.type === "text" ? part.text : PICTURE_NOT_KEPT));
  return { ...message, content: parts.join("\n") };
}

// Null for what is not there, or was spoilt.
function read(name) {
  try {
    return JSON.parse(localStorage.getItem(name));
  } catch {
    return null;
  }
}

function write(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}
