"""langchain: a tool loop with bind_tools, a stream, structured output. Usage: URL MODEL."""

from __future__ import annotations

import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from tests.clients.script import RESULT, call, script

URL, MODEL = sys.argv[1:]


class City(BaseModel):
    """A city."""

    name: str
    people: int


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"rain in {city}"


model = ChatOpenAI(base_url=f"{URL}/v1", api_key="none", model=MODEL, max_retries=0)
bound = model.bind_tools([tool(get_weather)])
question = HumanMessage(
    script("<think>Ask.</think>" + call("get_weather", city="Paris"), f"It says {RESULT}.")
)
first = bound.invoke([question])
assert [c["name"] for c in first.tool_calls] == ["get_weather"], first
results = [ToolMessage(get_weather(**c["args"]), tool_call_id=c["id"]) for c in first.tool_calls]
assert bound.invoke([question, first, *results]).content == "It says rain in Paris."

chunks = list(bound.stream([question]))
whole = chunks[0]
for chunk in chunks[1:]:
    whole += chunk
assert whole.tool_calls[0]["args"] == {"city": "Paris"}, whole

for method in ("json_schema", "function_calling"):
    said = '{"name": "Oslo", "people": 700000}'
    if method == "function_calling":
        said = call("City", name="Oslo", people=700000)
    found = model.with_structured_output(City, method=method).invoke(script(said))
    assert found == City(name="Oslo", people=700000), found
    # The grammar turns an answer that does not fit into one that does.
    wrong = model.with_structured_output(City, method=method).invoke(script("It is Oslo."))
    assert isinstance(wrong, City), wrong

responses = ChatOpenAI(
    base_url=f"{URL}/v1", api_key="none", model=MODEL, max_retries=0, use_responses_api=True
)
assert responses.invoke(script("Hello there.")).text == "Hello there."
