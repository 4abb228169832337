// Streams an answer into a message: text, reasoning, tool calls, tokens and times.

import { events, request } from "./api.js";

export const newAnswer = () => ({ role: "assistant", content: "", reasoning: "", tool_calls: [], end: "", ignored: "", stats: null });

export const isEmpty = (answer) => !(answer.content || answer.reasoning || answer.tool_calls.length);

// Calls `changed` after each event. `answer.end` is the finish reason afterwards.
export async function stream(body, answer, signal, changed) {
  const sent = performance.now();
  const options = { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  const response = await request("v1/chat/completions", { ...body, ...options }, signal);
  answer.ignored = response.headers.get("x-gaudiserve-ignored-fields") ?? "";
  for await (const event of events(response)) {
    const choice = event.choices?.[0], elapsed = (performance.now() - sent) / 1000;
    if (choice) {
      // The server sends the first choice with the first token, which may have no text: a tool call's start.
      answer.stats ??= { first: elapsed, last: elapsed, tokens: 0 };
      addDelta(answer, choice.delta ?? {});
      if (choice.finish_reason) answer.end = choice.finish_reason;
    }
    measure(answer.stats, event.usage, elapsed);
    changed();
  }
}

function addDelta(answer, delta) {
  answer.content += delta.content ?? "";
  answer.reasoning += delta.reasoning ?? delta.reasoning_content ?? "";
  for (const part of delta.tool_calls ?? []) {
    const call = (answer.tool_calls[part.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    call.id = part.id ?? call.id;
    call.function.name += part.function?.name ?? "";
    call.function.arguments += part.function?.arguments ?? "";
  }
}

// Times are those of this browser: they include the network.
function measure(stats, usage, elapsed) {
  const tokens = usage?.completion_tokens ?? 0;
  if (stats && tokens > stats.tokens) Object.assign(stats, { last: elapsed, tokens });
}
