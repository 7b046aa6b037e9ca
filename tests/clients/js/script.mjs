// Prompts for the scripted model, as script.py writes them.
export const [URL_, MODEL] = process.argv.slice(2);
export const RESULT = "[[result]]";

export function script(...answers) {
  return `[[script]]${answers.join("[[next]]")}[[end]]`;
}

export function call(name, args) {
  const body = `{"name": ${JSON.stringify(name)}, "arguments": ${JSON.stringify(args)}}`;
  return `<tool_call>\n${body}\n</tool_call>`;
}

export const ASK = "<think>I ask.</think>" + call("get_weather", { city: "Paris" });
export const SCHEMA = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
