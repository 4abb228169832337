// openai-node against the server at BASE_URL.
import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "none", maxRetries: 0 });
const ask = {
  model: "demo",
  messages: [{ role: "user", content: "What is the capital of France?" }],
  max_tokens: 24,
  temperature: 0,
};
const City = z.object({ name: z.string().max(20), is_capital: z.boolean() });
const Weather = z.object({ city: z.string().max(20) });
const weather = zodFunction({ name: "get_weather", parameters: Weather });

test("a chat, whole and streamed", async () => {
  const whole = await client.chat.completions.create(ask);
  const options = { ...ask, stream: true, stream_options: { include_usage: true } };
  let text = "";
  let usage = null;
  for await (const chunk of await client.chat.completions.create(options)) {
    text += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.deepEqual(usage, whole.usage);
  assert.ok(whole._request_id);
});

test("the stream helper's events and its final message", async () => {
  const pieces = [];
  const stream = client.chat.completions.stream(ask).on("content", (piece) => pieces.push(piece));
  const message = await stream.finalMessage();
  assert.equal(pieces.join(""), message.content);
});

test("parsed answers and parsed arguments", async () => {
  const format = zodResponseFormat(City, "city");
  const parsed = await client.chat.completions.parse({
    ...ask,
    max_tokens: 100,
    response_format: format,
  });
  City.parse(parsed.choices[0].message.parsed);
  const called = await client.chat.completions.parse({
    ...ask,
    max_tokens: 100,
    tools: [weather],
    tool_choice: "required",
  });
  Weather.parse(called.choices[0].message.tool_calls[0].function.parsed_arguments);
});

test("text completions, and models by page", async () => {
  const answer = await client.completions.create({
    model: "demo",
    prompt: "One, two, three,",
    max_tokens: 12,
    temperature: 0,
  });
  assert.match(answer.choices[0].text, /four/);
  const models = [];
  for await (const model of client.models.list()) models.push(model.id);
  assert.deepEqual(models, ["demo"]);
});

test("errors of the kinds that the SDK has, and a stream that is left", async () => {
  await assert.rejects(client.chat.completions.create({ ...ask, model: "other" }), (error) => {
    return error instanceof OpenAI.NotFoundError && error.code === "model_not_found";
  });
  await assert.rejects(
    client.chat.completions.create({ ...ask, temperature: 9, stream: true }),
    OpenAI.BadRequestError,
  );
  const stream = await client.chat.completions.create({ ...ask, max_tokens: 2000, stream: true });
  for await (const chunk of stream) {
    assert.ok(chunk.id);
    break;
  }
});
