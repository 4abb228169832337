// A conversation: its id, title and messages.

import { completeCalls } from "./request_body.js";

export function newChat() {
  // Other origins than https and localhost have no randomUUID.
  const id = [...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  return { id, title: "New chat", updated: 0, messages: [] };
}

// The first tool call of the last answer without a result: the next message is its result.
export function pendingCall({ messages }) {
  const results = messages.filter((message) => message.role === "tool").map((message) => message.tool_call_id);
  const last = messages.findLast((message) => message.role === "assistant");
  const isAnswered = messages.at(-1)?.role === "user";
  return isAnswered || !last ? undefined : completeCalls(last).find((call) => !results.includes(call.id));
}
