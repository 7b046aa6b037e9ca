"""instructor: answers as pydantic models, in three of its modes. Usage: URL MODEL."""

from __future__ import annotations

import sys

import instructor
import openai
from pydantic import BaseModel

from tests.clients.script import call, script

URL, MODEL = sys.argv[1:]


class City(BaseModel):
    name: str
    people: int


SAID = {
    instructor.Mode.TOOLS: call("City", name="Oslo", people=700000),
    instructor.Mode.JSON: '{"name": "Oslo", "people": 700000}',
    instructor.Mode.JSON_SCHEMA: '{"name": "Oslo", "people": 700000}',
}
# The grammar turns an answer that does not fit into one that does. JSON asks for any object.
WRONG = {
    instructor.Mode.TOOLS: call("City", town=3),
    instructor.Mode.JSON_SCHEMA: "It is Oslo.",
}


def ask(mode: instructor.Mode, said: str) -> City:
    api = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    client = instructor.from_openai(api, mode=mode)
    city: City = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": script(said)}],
        response_model=City,
        max_retries=0,
    )
    return city


for mode, said in SAID.items():
    city = ask(mode, said)
    assert city.model_dump() == {"name": "Oslo", "people": 700000}, (mode, city)
for mode, said in WRONG.items():
    assert set(ask(mode, said).model_dump()) == {"name", "people"}, mode
