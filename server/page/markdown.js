// Markdown as a document fragment: CommonMark with tables, highlighted code, no HTML, no pictures.

import { copyButton, element } from "./dom.js";
import hljs from "./highlight.js";
import MarkdownIt from "./markdown-it.js";
import DOMPurify from "./purify.js";

// Above it, highlighting a block takes longer than reading it is worth.
const MAX_HIGHLIGHTED = 50_000;
// Of the class names, the sanitizer lets those of the highlighter and of table cells through.
const CLASSES = /^(hljs(-\w+)?|language-[\w+#.-]+|\w+_|align-\w+|(function|class|inherited)_+)$/;
const ALLOWED = {
  ALLOWED_TAGS: [
    ..."a blockquote br code del em h1 h2 h3 h4 h5 h6 hr li ol p pre s span strong".split(" "),
    ..."table tbody td th thead tr ul".split(" "),
  ],
  ALLOWED_ATTR: ["class", "href", "start"],
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

const markdown = new MarkdownIt({ html: false, linkify: true, breaks: true, highlight });
// A picture's address could carry the conversation to another server: only its link is shown.
markdown.disable("image");
for (const name of ["th_open", "td_open"]) {
  // Style attributes are against the page's policy.
  markdown.renderer.rules[name] = (tokens, index, options, _env, renderer) => {
    const token = tokens[index], style = token.attrGet("style");
    token.attrs = style ? [["class", style.replace("text-align:", "align-")]] : null;
    return renderer.renderToken(tokens, index, options);
  };
}

function highlight(code, language) {
  if (!hljs.getLanguage(language) || code.length > MAX_HIGHLIGHTED) return "";
  return hljs.highlight(code, { language, ignoreIllegals: true }).value;
}

export function render(text) {
  const fragment = DOMPurify.sanitize(markdown.render(text), ALLOWED);
  for (const styled of fragment.querySelectorAll("[class]")) {
    styled.className = [...styled.classList].filter((name) => CLASSES.test(name)).join(" ");
  }
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const table of fragment.querySelectorAll("table")) {
    const scroll = element("div", "", "scroll", { tabindex: 0, role: "region", "aria-label": "Table" });
    table.replaceWith(scroll);
    scroll.append(table);
  }
  for (const pre of fragment.querySelectorAll("pre")) pre.replaceWith(codeBlock(pre));
  return fragment;
}

// Code below a bar with its language and a button that copies it.
function codeBlock(pre) {
  const code = pre.querySelector("code") ?? pre;
  const language = /language-(\S+)/.exec(code.className)?.[1] ?? "";
  const block = element("div", "", "code"), bar = element("div", "", "code-bar");
  bar.append(element("span", language), copyButton("Copy", "small", () => code.textContent));
  pre.tabIndex = 0;
  pre.setAttribute("role", "region");
  pre.setAttribute("aria-label", language ? `Code in ${language}` : "Code");
  block.append(bar, pre.cloneNode(true));
  return block;
}

// Shows `text` in `target`. Blocks that have not changed keep their elements, with the reader's selection in them.
export function show(target, text) {
  const fresh = [...render(text).childNodes];
  fresh.forEach((node, index) => {
    const old = target.childNodes[index];
    if (!old) target.append(node);
    else if (!isSame(old, node)) old.replaceWith(node);
  });
  while (target.childNodes.length > fresh.length) target.lastChild.remove();
}

// A copy button that says "Copied" just now is no change.
function isSame(old, node) {
  return old.isEqualNode(node) || (isCode(old) && isCode(node) && old.lastChild.isEqualNode(node.lastChild));
}

const isCode = (node) => node.classList?.contains("code") ?? false;
