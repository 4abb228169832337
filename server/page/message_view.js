// Elements of the messages of a conversation.

import { hint } from "./composer.js";
import { button, copyButton, element } from "./dom.js";
import { count, rate, seconds, shorten } from "./format.js";
import { show } from "./markdown.js";
import { picture } from "./pictures.js";
import { isEmpty } from "./stream.js";

const MAX_NAME = 40;
const WAITING = "Waiting for the first token";
const STATS = "A token is a word or a piece of a word. The time to the first token and the speed are measured in this browser.";
const NOTES = {
  stopped: () => "You stopped this answer.",
  repeats: () => "The answer repeated itself, so the page ended it. Retry, raise the temperature, or turn this off in Settings.",
  length: ({ stats, context }) => (context
    ? `The conversation fills the model's context of ${count(context)} tokens. Start a new chat.`
    : `The answer has ${count(stats?.tokens ?? 0)} tokens, the maximum in Settings. Raise it there.`),
  broken: () => "This answer is not complete.",
};

export function textOf(message) {
  if (typeof message.content === "string") return message.content;
  return message.content.filter((part) => part.type === "text").map((part) => part.text).join("\n");
}

// `edit` is called by the button of a question; null: no button.
export function questionView(message, edit) {
  const isResult = message.role === "tool";
  const view = element("article", "", `message ${message.role}`, { "aria-label": isResult ? "Result of a tool" : "Your message" });
  if (Array.isArray(message.content)) {
    const pictures = element("div", "", "pictures");
    pictures.append(...message.content.filter((part) => part.type === "image_url").map((part) => picture(part.image_url.url)));
    view.append(pictures);
  }
  if (isResult) view.append(element("p", "Tool result", "quiet"));
  view.append(element("div", textOf(message), "plain"));
  if (edit) view.append(editButton(textOf(message), edit));
  return view;
}

function editButton(text, edit) {
  const made = button("Edit", "small edit", edit);
  made.setAttribute("aria-label", `Edit ${shorten(text, MAX_NAME) || "the picture"}`);
  return made;
}

// The element of an answer, which `update` draws again; `retry` is null for all but the last one.
export class AnswerView {
  constructor(answer, retry) {
    this.answer = answer;
    this.root = element("article", "", "message assistant", { "aria-label": "Answer" });
    this.waiting = element("p", WAITING, "quiet waiting");
    this.timer = null;
    this.reasoning = folded("Reasoning");
    this.text = element("div", "", "markdown");
    this.calls = element("div", "", "calls");
    this.note = element("p", "", "note");
    this.stats = button("", "link quiet stats", () => hint(STATS));
    this.stats.title = STATS;
    this.foot = element("footer", "", "foot");
    // One group: on a narrow page, all buttons go to the next line together.
    const actions = element("span", "", "actions");
    actions.append(copyButton("Copy", "small", () => answer.content || this.calls.innerText));
    if (retry) actions.append(button("Retry", "small retry", retry));
    this.foot.append(this.stats, actions);
    this.root.append(this.waiting, this.reasoning.root, this.text, this.calls, this.note, this.foot);
  }

  update(isOpen) {
    const { answer } = this;
    this.root.classList.toggle("open", isOpen);
    const isWaiting = isOpen && answer.stats === null;
    this.waiting.hidden = !isWaiting;
    this.#countSeconds(isWaiting);
    this.reasoning.root.hidden = !answer.reasoning;
    this.reasoning.title.textContent = isOpen && !answer.content ? "Reasoning …" : "Reasoning";
    this.reasoning.body.textContent = answer.reasoning;
    show(this.text, answer.content);
    this.#updateCalls();
    this.note.textContent = isOpen ? "" : note(answer);
    this.note.hidden = !this.note.textContent;
    this.stats.textContent = statsText(answer.stats);
    this.foot.hidden = isOpen && answer.stats === null;
  }

  // Shows every second how long the answer has been waited for.
  #countSeconds(isWaiting) {
    if (!isWaiting) {
      clearInterval(this.timer);
      this.timer = null;
    }
    if (!isWaiting || this.timer) return;
    const start = performance.now();
    this.timer = setInterval(() => {
      if (!this.root.isConnected) return clearInterval(this.timer);
      this.waiting.textContent = `${WAITING}, ${count(Math.round((performance.now() - start) / 1000))} s`;
    }, 1000);
  }

  // Kept elements stay open if the reader opened them.
  #updateCalls() {
    this.answer.tool_calls.forEach((call, index) => {
      const view = this.calls.children[index] ?? this.calls.appendChild(folded("").root);
      view.querySelector("summary").textContent = `Tool call: ${call.function.name}`;
      view.querySelector(".plain").textContent = indented(call.function.arguments);
    });
  }
}

function note(answer) {
  const ignored = answer.ignored && `The server knows no such field and ignored: ${answer.ignored}. See Other fields in Settings.`;
  const isBlank = answer.end === "stop" && isEmpty(answer);
  const end = isBlank ? "The model answered with an empty text." : NOTES[answer.end]?.(answer);
  return [ignored, end].filter(Boolean).join(" ");
}

function folded(name) {
  const root = element("details", "", "folded"), title = element("summary", name), body = element("div", "", "plain");
  root.append(title, body);
  return { root, title, body };
}

function indented(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    // The model may have written something else, or is still writing.
    return json;
  }
}

function statsText(stats) {
  if (!stats) return "";
  const first = `first token ${seconds(stats.first)}`;
  if (!stats.tokens) return first;
  const tokens = `${count(stats.tokens)} ${stats.tokens === 1 ? "token" : "tokens"}`;
  // The first token belongs to the time before it.
  const speed = rate(stats.tokens - 1, stats.last - stats.first);
  return [tokens, speed === "–" ? "" : `${speed} tokens/s`, first].filter(Boolean).join(" · ");
}
