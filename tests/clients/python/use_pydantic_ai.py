"""pydantic-ai: agents with a tool and a typed answer over OpenAI's two APIs. Usage: URL MODEL."""

from __future__ import annotations

import sys

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.script import RESULT, call, script

URL, MODEL = sys.argv[1:]


class Report(BaseModel):
    city: str
    weather: str


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"rain in {city}"


openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
models = [
    OpenAIChatModel(MODEL, provider=openai),
    OpenAIResponsesModel(MODEL, provider=openai),
]
ASK = "<think>I ask.</think>" + call("get_weather", city="Paris")
for model in models:
    agent = Agent(model, tools=[get_weather])
    said = agent.run_sync(script(ASK, f"It says {RESULT}.")).output
    assert said == "It says rain in Paris.", (model, said)
    typed = Agent(model, tools=[get_weather], output_type=Report)
    end = call("final_result", city="Paris", weather="rain")
    report = typed.run_sync(script(ASK, end)).output
    assert report == Report(city="Paris", weather="rain"), (model, report)
    # The grammar turns an answer that is no report into one.
    wrong = Agent(model, output_type=Report).run_sync(script("It rains.")).output
    assert isinstance(wrong, Report), (model, wrong)
