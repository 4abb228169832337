// The failure above the box: its words, and how long it stays.

import { ApiError, hasKey } from "./api.js";
import { showFailure } from "./composer.js";
import { refuseKey, server, trouble } from "./server_state.js";

// Whether the failure in view is cleared when the server is ready.
let isUntilReady = false;

export function fail(text) {
  isUntilReady = server.status !== "ready";
  showFailure(text);
}

export function clearWhenReady() {
  if (!isUntilReady || server.status !== "ready") return;
  isUntilReady = false;
  showFailure("");
}

export function words(error) {
  // Anything else is a fault of this page; its message helps whoever reports it.
  if (!(error instanceof ApiError)) return error.message;
  if (error.status === 401) refuseKey(hasKey());
  return (error.status === 503 && server.status === "starting" && trouble()) || error.message;
}
