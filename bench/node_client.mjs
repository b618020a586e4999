// The official Node client against `yocolm serve`: see check_clients.sh.
// node node_client.mjs URL    with the package openai beside it
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: "Say hello in exactly 3 words." }];
const fixed = { model, temperature: 0, seed: 1 };

const completion = await client.completions.create({ ...fixed, prompt: "She was", max_tokens: 8 });
assert.equal(completion.choices[0].finish_reason, "length");
assert.equal(completion.usage.completion_tokens, 8);
assert.ok(completion.choices[0].text.length > 0);

const whole = await client.chat.completions.create({ ...fixed, messages, max_tokens: 64 });
let text = "";
let usage = null;
const stream = await client.chat.completions.create({
  ...fixed, messages, max_tokens: 64, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, whole.choices[0].message.content);
assert.deepEqual(usage, whole.usage);

const properties = { place: { enum: ["Bath", "Lyme"] } }; // which the model cannot draw out
const parameters = { type: "object", properties, required: ["place"], additionalProperties: false };
const called = await client.chat.completions.create({
  ...fixed, messages, max_tokens: 300, tool_choice: "required", parallel_tool_calls: false,
  tools: [{ type: "function", function: { name: "get_weather", parameters } }],
});
assert.equal(called.choices[0].finish_reason, "tool_calls");
const [call] = called.choices[0].message.tool_calls;
assert.equal(call.function.name, "get_weather");
assert.ok(properties.place.enum.includes(JSON.parse(call.function.arguments).place));

await assert.rejects(
  client.chat.completions.create({ model, messages, temperature: -1 }),
  (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature",
);
await assert.rejects(
  client.chat.completions.create({ model: "other", messages }),
  (error) => error instanceof OpenAI.NotFoundError,
);
console.log("completion, chat, stream, tool call and errors are as they should be");
