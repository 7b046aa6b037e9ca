// npm openai: chat and Responses, whole and streamed, with tools. Usage: URL MODEL.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { ASK, MODEL, RESULT, SCHEMA, URL_, script } from "./script.mjs";

const api = new OpenAI({ baseURL: `${URL_}/v1`, apiKey: "none", maxRetries: 0 });
const prompt = script(ASK, `It says ${RESULT}.`);

// Chat: a tool loop, then the same call streamed.
const tools = [{ type: "function", function: { name: "get_weather", parameters: SCHEMA } }];
const messages = [{ role: "user", content: prompt }];
const first = await api.chat.completions.create({ model: MODEL, messages, tools });
const { message } = first.choices[0];
assert.equal(first.choices[0].finish_reason, "tool_calls");
assert.deepEqual(JSON.parse(message.tool_calls[0].function.arguments), { city: "Paris" });
messages.push(message, { role: "tool", tool_call_id: message.tool_calls[0].id, content: "rain" });
const second = await api.chat.completions.create({ model: MODEL, messages, tools });
assert.equal(second.choices[0].message.content, "It says rain.");
const stream = api.chat.completions.stream({ model: MODEL, messages: messages.slice(0, 1), tools });
const streamed = (await stream.finalChatCompletion()).choices[0].message;
assert.deepEqual(JSON.parse(streamed.tool_calls[0].function.arguments), { city: "Paris" });

// Responses: the same, with the conversation kept by the server.
const functions = [{ type: "function", name: "get_weather", parameters: SCHEMA, strict: true }];
const asked = await api.responses.create({ model: MODEL, input: prompt, tools: functions });
const called = asked.output.find((item) => item.type === "function_call");
assert.deepEqual(JSON.parse(called.arguments), { city: "Paris" });
assert.equal(asked.output[0].type, "reasoning");
const events = await api.responses.create({
  model: MODEL,
  previous_response_id: asked.id,
  input: [{ type: "function_call_output", call_id: called.call_id, output: "snow" }],
  tools: functions,
  stream: true,
});
let text = "";
for await (const event of events) {
  if (event.type === "response.output_text.delta") text += event.delta;
}
assert.equal(text, "It says snow.");
