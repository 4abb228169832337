// The body of a chat request from a conversation and the settings.

import { request } from "./api.js";
import { parseOthers, parseTools } from "./settings.js";

// The tool calls of an answer. An answer that broke off has none: their arguments may not be complete.
export const completeCalls = (message) => (message.end === "tool_calls" ? message.tool_calls : []);

// Messages as the API takes them, without what the page alone knows.
function apiMessages(messages, system) {
  const sent = messages.map((message) => {
    const { role, content, tool_call_id } = message, tool_calls = completeCalls(message);
    return { role, content, ...(tool_calls.length && { tool_calls }), ...(tool_call_id && { tool_call_id }) };
  });
  return system.trim() ? [{ role: "system", content: system }, ...sent] : sent;
}

export function chatBody(model, messages, settings) {
  const tools = parseTools(settings.tools);
  return {
    model,
    messages: apiMessages(messages, settings.system),
    max_tokens: settings.maxTokens,
    ...(settings.temperature !== "" && { temperature: Number(settings.temperature) }),
    ...(tools.length && { tools }),
    ...parseOthers(settings.others),
  };
}

// Lowers max_tokens to what the context leaves. Only a conversation that may not fit is counted by the server.
export async function fitToContext(body, maxModelLen, signal) {
  const { model, messages, tools } = body;
  const hasPictures = messages.some((message) => Array.isArray(message.content));
  // A token of text has at least a byte, and the marks of a template are about as long as those of JSON.
  const bytes = new TextEncoder().encode(JSON.stringify({ messages, tools })).length;
  if (!maxModelLen || (!hasPictures && bytes + body.max_tokens <= maxModelLen)) return;
  let room;
  try {
    room = maxModelLen - (await (await request("tokenize", { model, messages, tools }, signal)).json()).count;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    // The chat request meets the same error, and says it.
    return;
  }
  if (room > 0) body.max_tokens = Math.min(body.max_tokens, room);
}
