// A chat request as a curl command and as a Python script.

import { OWN_FIELDS } from "./settings.js";

// With tools, an answer has calls, a text or both.
const PRINT_WITH_CALLS = [
  "message = completion.choices[0].message",
  "for call in message.tool_calls or []:",
  '    print(f"{call.function.name}({call.function.arguments})")',
  "if message.content:",
  "    print(message.content)",
];
const EXAMPLE = [{ role: "user", content: "What is the capital of Japan?" }];

// The request that asks for the last answer: the conversation without what came after its last question.
export function lastRequest(body) {
  const messages = [...body.messages];
  while (messages.length && messages.at(-1).role === "assistant") messages.pop();
  const hasQuestion = messages.some((message) => message.role !== "system");
  return { ...body, messages: hasQuestion ? messages : [...messages, ...EXAMPLE] };
}

export function curl(baseUrl, body, hasKey) {
  const lines = [
    `curl ${baseUrl}/chat/completions`,
    '  -H "Content-Type: application/json"',
    ...(hasKey ? ['  -H "Authorization: Bearer $OPENAI_API_KEY"'] : []),
    // A here-document needs no quotes, and may be longer than an argument.
    "  --data-binary @- <<'END_OF_BODY'",
  ];
  return `${lines.join(" \\\n")}\n${JSON.stringify(body, null, 2)}\nEND_OF_BODY\n`;
}

export function python(baseUrl, body, hasKey) {
  const key = hasKey ? 'os.environ["OPENAI_API_KEY"]' : '"none"';
  const isOwn = ([name]) => OWN_FIELDS.includes(name);
  const others = Object.fromEntries(Object.entries(body).filter((field) => !isOwn(field)));
  // The client has no arguments for fields that OpenAI's API lacks.
  const sent = [...Object.entries(body).filter(isOwn), ...(Object.keys(others).length ? [["extra_body", others]] : [])];
  const fields = sent.map(([name, value]) => `    ${name}=${literal(value, 1)},\n`);
  return [
    ...(hasKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${JSON.stringify(baseUrl)}, api_key=${key})`,
    `completion = client.chat.completions.create(\n${fields.join("")})`,
    ...(body.tools ? PRINT_WITH_CALLS : ["print(completion.choices[0].message.content)"]),
    "",
  ].join("\n");
}

// A JSON value as Python writes it. Strings of JSON are strings of Python.
function literal(value, depth) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const isList = Array.isArray(value), margin = "    ".repeat(depth);
  const items = isList
    ? value.map((item) => literal(item, depth + 1))
    : Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${literal(item, depth + 1)}`);
  const [open, close] = isList ? "[]" : "{}";
  return items.length ? `${open}\n${items.map((item) => `${margin}    ${item},\n`).join("")}${margin}${close}` : open + close;
}
