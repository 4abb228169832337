// What an empty chat shows: examples to ask, and a hint about the demo model.

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

export function welcome(ask) {
  const shown = element("div", "", "welcome"), examples = element("div", "", "examples");
  examples.append(...EXAMPLES.map((text) => button(text, "example", () => ask(text))));
  shown.append(element("h2", "What would you like to ask?"), examples, demoHint());
  return shown;
}

export function demoHint() {
  const shown = element("p", "The demo model is made to try the server. Ask about facts: its answers are often wrong, and those to greetings or about itself are odd.", "demo-hint");
  shown.hidden = server.facts?.model !== DEMO;
  return shown;
}
