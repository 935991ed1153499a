// openai for Node: chat, streams, tools, responses, models.
import assert from "node:assert";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [base, model, modules] = process.argv.slice(2);
const found = createRequire(modules + "/").resolve("openai");
const { default: OpenAI } = await import(pathToFileURL(found));
const client = new OpenAI({ baseURL: base, apiKey: "any", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const chat = { model, messages, temperature: 0, max_tokens: 24 };
const whole = await client.chat.completions.create(chat);
assert(whole.choices[0].message.content);
let text = "", usage = null;
for await (const chunk of await client.chat.completions.create({ ...chat, stream: true, stream_options: { include_usage: true } })) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, whole.choices[0].message.content);
assert.equal(usage.total_tokens, whole.usage.total_tokens);
const parameters = { type: "object", properties: { place: { type: "string" } }, required: ["place"], additionalProperties: false };
const tools = [{ type: "function", function: { name: "get_weather", parameters } }];
const called = await client.chat.completions.create({ ...chat, max_tokens: 60, tools, tool_choice: "required" });
assert("place" in JSON.parse(called.choices[0].message.tool_calls[0].function.arguments));
const made = await client.responses.create({ model, input: messages, temperature: 0, max_output_tokens: 24 });
assert.equal(made.output_text, text);
let streamed = "";
for await (const event of await client.responses.create({ model, input: messages, temperature: 0, max_output_tokens: 24, stream: true }))
  if (event.type === "response.output_text.delta") streamed += event.delta;
assert.equal(streamed, text);
const names = [];
for await (const one of client.models.list()) names.push(one.id);
assert(names.includes(model));
await assert.rejects(client.chat.completions.create({ ...chat, temperature: -1 }), (error) => error.status === 400 && error.param === "temperature");
