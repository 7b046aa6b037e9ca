// npm ai: its tool loop, streamed and whole, and an object by a schema. Usage: URL MODEL.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import * as ai from "ai";
import { z } from "zod";
import { ASK, MODEL, RESULT, URL_, script } from "./script.mjs";

const paceline = createOpenAICompatible({
  name: "paceline",
  baseURL: `${URL_}/v1`,
  supportsStructuredOutputs: true,
});
const asked = {
  model: paceline(MODEL),
  prompt: script(ASK, `It says ${RESULT}.`),
  tools: {
    get_weather: ai.tool({
      description: "The weather of a city.",
      inputSchema: z.object({ city: z.string() }),
      execute: async ({ city }) => `rain in ${city}`,
    }),
  },
  stopWhen: ai.stepCountIs(5),
  maxRetries: 0,
};

const whole = await ai.generateText(asked);
assert.equal(whole.text, "It says rain in Paris.");
assert.equal(whole.steps.length, 2);
assert.equal(whole.steps[0].reasoningText, "I ask.");

const stream = ai.streamText(asked);
let text = "";
for await (const part of stream.textStream) text += part;
assert.equal(text, "It says rain in Paris.");

// The grammar turns the second answer, which does not fit, into one that does.
for (const said of ['{"city": "Oslo"}', "It is Oslo."]) {
  const { output } = await ai.generateText({
    model: paceline(MODEL),
    prompt: script(said),
    output: ai.Output.object({ schema: z.object({ city: z.string() }) }),
    maxRetries: 0,
  });
  if (said.startsWith("{")) assert.deepEqual(output, { city: "Oslo" });
  assert.deepEqual(Object.keys(output), ["city"]);
}
