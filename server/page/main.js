// The frame of the page: two views, the server's name and status, the API key.

import { request, useKey } from "./api.js";
import { setUpChat } from "./chat.js";
import { setUpDashboard } from "./dashboard.js";
import { byId } from "./dom.js";
import { count, shortName } from "./format.js";
import { onServer, refresh, server, trouble, watchServer } from "./server_state.js";

function drawView() {
  const isServer = location.hash === "#server", pools = server.facts?.pools ?? false;
  byId("server-view").hidden = !isServer;
  byId("chat-view").hidden = isServer || pools;
  byId("pooling-view").hidden = isServer || !pools;
  for (const [id, isShown] of [["to-chat", !isServer], ["to-server", isServer]]) {
    if (isShown) byId(id).setAttribute("aria-current", "page");
    else byId(id).removeAttribute("aria-current");
  }
}

function drawStatus() {
  const { status, facts } = server, hadKeyForm = !byId("key-form").hidden;
  setText("status", status);
  byId("status").dataset.state = status;
  setText("trouble", trouble());
  byId("trouble").hidden = !trouble();
  byId("wake").hidden = status !== "sleeping";
  byId("key-form").hidden = status !== "key needed";
  setText("key-error", server.isKeyRefused ? "The server rejected this key. Check it and enter it again." : "");
  byId("emulated").hidden = facts?.device !== "hpu-emulator";
  setText("facts", facts ? describe(facts) : "");
  setText("served", facts ? `${facts.model} · ${describe(facts)}` : "");
  if (facts) {
    document.title = `${shortName(facts.model)} · gaudiserve`;
    setText("model", shortName(facts.model));
    byId("model").title = facts.model;
  }
  drawView();
  focusWhatIsNext(hadKeyForm);
}

// Screen readers read a live region again when its text is set, even to the same text.
function setText(id, text) {
  if (byId(id).textContent !== text) byId(id).textContent = text;
}

function describe({ version, device, dtype, max_model_len }) {
  const context = max_model_len && `context ${count(max_model_len)} tokens`;
  return [`gaudiserve ${version}`, device, dtype, context].filter(Boolean).join(" · ");
}

// On a phone the focus would open a keyboard over the page.
const opensNoKeyboard = () => matchMedia("(min-width: 52rem) and (hover: hover)").matches;

function focusContent() {
  const view = [...document.querySelectorAll("main")].find((main) => !main.hidden);
  (view === byId("chat-view") ? byId("question") : view).focus();
}

// Moves the focus only if the reader has not put it elsewhere.
function focusWhatIsNext(hadKeyForm) {
  const needsKey = !byId("key-form").hidden, { activeElement } = document;
  const isFree = activeElement === document.body || (activeElement === byId("question") && !activeElement.value);
  if (needsKey === hadKeyForm) return;
  if (!needsKey && (isFree || byId("key-form").contains(activeElement))) focusContent();
  else if (needsKey && isFree && opensNoKeyboard()) byId("key").focus();
}

async function wake() {
  byId("wake-button").disabled = true;
  setText("wake-error", "");
  try {
    await request("wake_up", {});
  } catch (error) {
    setText("wake-error", error.message);
  }
  byId("wake-button").disabled = false;
  refresh();
}

byId("wake-button").addEventListener("click", wake);
byId("skip").addEventListener("click", (event) => {
  // The address names the view.
  event.preventDefault();
  focusContent();
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key").value);
  byId("key").value = "";
  refresh();
});
window.addEventListener("hashchange", drawView);
setUpChat();
setUpDashboard();
onServer(drawStatus);
drawView();
if (opensNoKeyboard() && !byId("chat-view").hidden) focusContent();
watchServer();
