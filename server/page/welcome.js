// What an empty chat shows: examples to ask, and a hint about the demo model or a missing chat template.

import { button, element } from "./dom.js";
import { server } from "./server_state.js";

// The demo model answers these at its defaults and at temperature 0 without repeating itself.
const EXAMPLES = [
  "What is photosynthesis?",
  "List the four seasons.",
  "What are the benefits of walking every day? List five.",
  "What is the water cycle?",
];
const DEMO = "demo";

const DEMO_HINT = "The demo model is made to try the server. Ask about facts: its answers are often wrong, and those to greetings or about itself are odd.";
const NO_TEMPLATE = "This model has no chat template, so the server refuses chats. Use /v1/completions, or start the server with --chat-template FILE.";

export function welcome(ask) {
  const shown = element("div", "", "welcome"), examples = element("div", "", "examples");
  examples.append(...EXAMPLES.map((text) => button(text, "example", () => ask(text))));
  shown.append(element("h2", "What would you like to ask?"), examples, element("p", DEMO_HINT, "demo-hint"), element("p", NO_TEMPLATE, "no-template"));
  return drawWelcome(shown);
}

export function drawWelcome(shown) {
  const refuses = server.facts?.has_no_template ?? false;
  shown.querySelector("h2").hidden = shown.querySelector(".examples").hidden = refuses;
  shown.querySelector(".demo-hint").hidden = refuses || server.facts?.model !== DEMO;
  shown.querySelector(".no-template").hidden = !refuses;
  return shown;
}
