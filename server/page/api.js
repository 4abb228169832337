// Requests to the server: the API key, errors in words, events of a stream.

import { PREFIX } from "./storage.js";

const KEY_NAME = `${PREFIX}key`;
export const UNREACHABLE = "The server cannot be reached. Is it still running?";
const TOO_LONG = " You can also start a new chat.";
const BROKEN = "The connection ended before the answer was complete.";

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export const hasKey = () => sessionStorage.getItem(KEY_NAME) !== null;
export const forgetKey = () => sessionStorage.removeItem(KEY_NAME);

// The key stays in this tab. fetch refuses control characters in a header, and no key has them.
export const useKey = (key) => sessionStorage.setItem(KEY_NAME, key.replace(/[\x00-\x1f\x7f]/g, ""));

function headers() {
  const key = sessionStorage.getItem(KEY_NAME);
  // fetch refuses characters above U+00FF in a header: send the bytes of UTF-8, which the server compares.
  return key ? { Authorization: `Bearer ${String.fromCharCode(...new TextEncoder().encode(key))}` } : {};
}

// The response of a GET, or of a POST if there is a body. Raises ApiError unless its status is 2xx.
export async function request(path, body, signal) {
  const sent = body && { method: "POST", body: JSON.stringify(body) };
  const type = body && { "Content-Type": "application/json" };
  let response;
  try {
    response = await fetch(path, { ...sent, headers: { ...type, ...headers() }, cache: "no-store", signal });
  } catch (error) {
    throw error.name === "AbortError" ? error : new ApiError(UNREACHABLE, 0);
  }
  if (!response.ok) throw new ApiError(await message(response), response.status);
  return response;
}

// A proxy's own error is no JSON.
async function message(response) {
  try {
    const { message, code } = (await response.json()).error;
    return code === "context_length_exceeded" ? `${message}${TOO_LONG}` : String(message);
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}

// The JSON of each event up to [DONE]. Raises ApiError for an error event and for a stream without [DONE].
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffered = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      throw error.name === "AbortError" ? error : new ApiError(BROKEN, 0);
    }
    if (part.done) throw new ApiError(BROKEN, 0);
    const lines = (buffered + part.value).split("\n");
    buffered = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: [DONE]")) return;
      if (!line.startsWith("data: {")) continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new ApiError(String(event.error.message), event.error.code ?? 0);
      yield event;
    }
  }
}
