// A conversation as a Markdown file, and its last request as a curl command and as a Python script.

import { hasKey } from "./api.js";
import { hint } from "./composer.js";
import { byId, copy, element } from "./dom.js";
import { textOf } from "./message_view.js";
import { chatBody } from "./request_body.js";
import { settings } from "./settings.js";
import { curl, lastRequest, python } from "./snippets.js";

const NAMES = { user: "You", assistant: "Answer", tool: "Result of a tool" };

function markdownOf(chat) {
  const parts = chat.messages.map((message) => [`## ${NAMES[message.role]}`, ...partsOf(message)].join("\n\n"));
  return [`# ${chat.title}`, ...parts].join("\n\n") + "\n";
}

function partsOf(message) {
  const calls = (message.tool_calls ?? []).map((call) => `Tool call: \`${call.function.name}(${call.function.arguments})\``);
  const reasoning = message.reasoning ? [message.reasoning.replace(/^/gm, "> ")] : [];
  return [...reasoning, textOf(message), ...calls].filter(Boolean);
}

function download(chat) {
  const url = URL.createObjectURL(new Blob([markdownOf(chat)], { type: "text/markdown" }));
  const name = chat.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "") || "chat";
  element("a", "", "", { href: url, download: `${name}.md` }).click();
  // The browser reads it after the click.
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

async function copyAs(chat, snippet, name) {
  let body;
  try {
    body = lastRequest(chatBody(settings.model, chat.messages, settings));
  } catch (error) {
    return hint(error.message);
  }
  const copied = await copy(snippet(new URL("v1", document.baseURI).href, body, hasKey()));
  hint(copied ? `Copied as ${name}.` : "This browser does not let the page copy: select the text and copy it.");
}

// `read` returns the conversation in view.
export function setUpExport(read) {
  byId("copy-curl").addEventListener("click", () => copyAs(read(), curl, "curl"));
  byId("copy-python").addEventListener("click", () => copyAs(read(), python, "Python"));
  byId("export").addEventListener("click", () => download(read()));
}
