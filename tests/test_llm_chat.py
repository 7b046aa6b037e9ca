"""Conversations through a chat template, over an engine without a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, InvalidRequest, SamplingParams
from paceline.config import EngineConfig
from paceline.engine.front import load_front
from tests.engine.echo_client import echo_client
from tests.engine.test_front import checkpoint

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ mood | default('') }}{% endif %}"
)
FEW = SamplingParams(max_tokens=4)
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder: Path = tmp_path_factory.mktemp("chat")
    config = {"chat_template": TEMPLATE, "eos_token": "<end>"}
    model = checkpoint(folder / "m", tokenizer_config=config)
    front = load_front(EngineConfig.from_keywords(model=model, load_format="dummy"))
    with echo_client(front=front) as client, LLM.from_client(client) as llm:
        yield llm


def prompt_of(llm: LLM, messages: Any, **keywords: Any) -> str | None:
    (output,) = llm.chat(messages, FEW, use_tqdm=False, **keywords)
    assert output.outputs[0].token_ids == output.prompt_token_ids[:4]
    return output.prompt


def test_a_conversation_goes_through_the_template(llm: LLM) -> None:
    assert prompt_of(llm, HELLO) == "<user>hello<end><assistant>"
    assert prompt_of(llm, HELLO, add_generation_prompt=False) == "<user>hello<end>"
    kwargs = {"mood": "merry "}
    assert prompt_of(llm, HELLO, chat_template_kwargs=kwargs) == "<user>hello<end><assistant>merry "
    assert prompt_of(llm, HELLO, chat_template="{{ messages[0].content }}!") == "hello!"


def test_special_tokens_of_the_template_are_single_tokens(llm: LLM) -> None:
    (output,) = llm.chat(HELLO, FEW, use_tqdm=False)
    assert output.prompt_token_ids.count(256) == 1


def test_a_list_of_conversations_gives_one_answer_each(llm: LLM) -> None:
    other = [{"role": "user", "content": "bye"}]
    outputs = llm.chat([HELLO, other], [FEW, FEW.replace(max_tokens=2)], use_tqdm=False)
    assert [o.prompt for o in outputs] == [
        "<user>hello<end><assistant>",
        "<user>bye<end><assistant>",
    ]
    assert [len(o.outputs[0].token_ids) for o in outputs] == [4, 2]


def test_tools_are_described_in_the_prompt(llm: LLM) -> None:
    tools = [{"type": "function", "function": {"name": "get_weather"}}]
    prompt = prompt_of(llm, HELLO, tools=tools)
    assert prompt is not None
    assert '{"name": "get_weather"}' in prompt
    assert prompt.endswith("<user>hello<end><assistant>")


def test_the_final_message_can_be_continued(llm: LLM) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "well, I"}]
    keywords = {"continue_final_message": True, "add_generation_prompt": False}
    assert prompt_of(llm, messages, **keywords) == "<user>hello<end><assistant>well, I"
    with pytest.raises(InvalidRequest, match="add_generation_prompt"):
        llm.chat(messages, FEW, continue_final_message=True)


@pytest.mark.parametrize("messages", [[], "hello", [["hello"]], [5], [[{"content": "x"}]]])
def test_messages_of_another_shape_are_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidRequest):
        llm.chat(messages, FEW, use_tqdm=False)
