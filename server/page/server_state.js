// The server's state, requested every two seconds while the page is visible.

import { forgetKey, hasKey, request } from "./api.js";

const INTERVAL_MS = 2000;
const WORDS = {
  unreachable: () => "The server cannot be reached. The page tries again every two seconds.",
  starting: (state) => `${stage(state.progress)}. It accepts no requests yet.`,
  restarting: ({ reason }) => `The engine is being restarted: ${reason}. Requests wait until it is ready.`,
  draining: () => "The server is shutting down. It takes no new requests.",
  sleeping: () => "The model is asleep. It answers no requests until it is woken.",
  failed: ({ reason }) => `The engine has failed: ${reason}. The server's log says more.`,
};

const stage = (progress) => `The server is starting: ${progress}`;

// `status` is connecting, unreachable, key needed, or the server's; `facts` is null unless it was read just now.
export const server = { status: "connecting", facts: null, isKeyRefused: false };
const listeners = [];

export function onServer(listener) {
  listeners.push(listener);
}

// What keeps the server from answering, or an empty string.
export const trouble = () => WORDS[server.status]?.(server.facts) ?? "";

export async function refresh() {
  const hadKey = hasKey();
  try {
    // A proxy may answer with a page of its own, which is no JSON.
    const facts = await (await request("page/state")).json();
    Object.assign(server, { status: facts.status, facts, isKeyRefused: false });
  } catch (error) {
    if (error.status === 401) refuseKey(hadKey);
    else Object.assign(server, { status: "unreachable", facts: null });
  }
  for (const listener of listeners) listener();
}

// A refused key is not sent again; the word about it stays until a key is right.
export function refuseKey(hadKey) {
  if (hadKey) forgetKey();
  Object.assign(server, { status: "key needed", facts: null, isKeyRefused: server.isKeyRefused || hadKey });
}

export function watchServer() {
  refresh();
  setInterval(() => document.hidden || refresh(), INTERVAL_MS);
}
