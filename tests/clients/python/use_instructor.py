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
for mode, said in SAID.items():
    api = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    client = instructor.from_openai(api, mode=mode)
    city = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": script(said)}],
        response_model=City,
        max_retries=0,
    )
    assert city.model_dump() == {"name": "Oslo", "people": 700000}, (mode, city)
