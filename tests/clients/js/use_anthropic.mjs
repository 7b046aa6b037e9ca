// npm @anthropic-ai/sdk: a tool loop, streamed and whole. Usage: URL MODEL.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { ASK, MODEL, RESULT, SCHEMA, URL_, script } from "./script.mjs";

const api = new Anthropic({ baseURL: URL_, apiKey: "none", maxRetries: 0 });
const tools = [{ name: "get_weather", input_schema: SCHEMA }];
const messages = [{ role: "user", content: script(ASK, `It says ${RESULT}.`) }];
const asked = { model: MODEL, max_tokens: 500, tools };

const first = await api.messages.stream({ ...asked, messages }).finalMessage();
assert.equal(first.stop_reason, "tool_use");
assert.deepEqual(first.content.map((block) => block.type), ["thinking", "tool_use"]);
const call = first.content.at(-1);
assert.deepEqual(call.input, { city: "Paris" });
const result = { type: "tool_result", tool_use_id: call.id, content: "rain" };
messages.push({ role: "assistant", content: first.content }, { role: "user", content: [result] });
const second = await api.messages.create({ ...asked, messages });
assert.deepEqual(second.content.map((block) => block.text), ["It says rain."]);
const counted = await api.messages.countTokens({ model: MODEL, tools, messages });
assert.equal(counted.input_tokens, second.usage.input_tokens + second.usage.cache_read_input_tokens);
