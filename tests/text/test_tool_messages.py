"""Tools, calls and results in prompts: as transformers renders them, or as text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.errors import InvalidRequest
from paceline.text.chat import ChatTemplate
from paceline.text.response_formats import pick_format
from paceline.text.response_parser import ResponseTemplateParser
from tests.text.model_answers import ANSWERS, TOOLS, meaning, parsed
from tests.text.test_chat import reference

_TALK = "{% for m in messages %}%s{% endfor %}"
_TOOLS = "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
_CHATML = (
    "<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "CALL{% endfor %}<|im_end|>\n"
)


def _chatml(call: str, tail: str) -> str:
    talk = _TALK.replace("%s", _CHATML.replace("CALL", call))
    return _TOOLS + talk + "<|im_start|>assistant\n" + tail


_HERMES_CALL = "<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
_QWEN35_CALL = (
    "<tool_call>\n<function={{ c.function.name }}>{% for k, v in c.function.arguments.items() %}"
    "<parameter={{ k }}>\n{{ v }}\n</parameter>{% endfor %}</function></tool_call>"
)
_GLM_CALL = (
    "<tool_call>{{ c.function.name }}{% for k, v in c.function.arguments | items %}<arg_key>{{ k }}"
    "</arg_key><arg_value>{{ v }}</arg_value>{% endfor %}</tool_call>"
)
# Small templates in the manner of each family: how they print calls, and how an answer begins.
TEMPLATES = {
    "hermes": _chatml(_HERMES_CALL, ""),
    "qwen3": _chatml(_HERMES_CALL, "{# </think> #}"),
    "qwen3.5": _chatml(_QWEN35_CALL, "<think>\n{# </think> #}"),
    "glm 4.5": _TOOLS
    + _TALK.replace(
        "%s",
        "<|{{ m.role }}|>{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        + _GLM_CALL
        + "{% endfor %}",
    )
    + "<|assistant|>{# </think> #}",
    "llama3": _TOOLS
    + _TALK.replace(
        "%s",
        "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{% if m.tool_calls %}{% set c = "
        'm.tool_calls[0].function %}{"name": "{{ c.name }}", "parameters": '
        "{{ c.arguments | tojson }}}{% else %}{{ m.content }}{% endif %}<|eot_id|>",
    )
    + "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": _TOOLS
    + _TALK.replace(
        "%s",
        "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}"
        "[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% else %}{% for c in m.tool_calls %}"
        "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}"
        "{% endif %}",
    )
    + "{# [THINK] #}",
    # Joins the arguments to text, so they must be text.
    "deepseek V3": _TOOLS
    + _TALK.replace(
        "%s",
        "{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% elif m.role == 'tool' %}"
        "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{% elif m.content is none %}"
        "<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}{{ '<｜tool▁call▁begin｜>' + c.type + "
        "'<｜tool▁sep｜>' + c.function.name + '\n```json\n' + c.function.arguments + "
        "'\n```<｜tool▁call▁end｜>' }}{% endfor %}<｜tool▁calls▁end｜>{% endif %}",
    )
    + "<｜Assistant｜>",
}
ARGUMENTS = '{"city": "Bonn", "days": 1}'
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call12345",
                "type": "function",
                "function": {"name": "get_weather", "arguments": ARGUMENTS},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call12345", "content": "It rains."},
]


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_conversation_is_rendered_and_its_answer_parsed(family: str) -> None:
    template = ChatTemplate("m", {"default": TEMPLATES[family]}, {})
    assert template.knows_tools
    prompt = template.render(CONVERSATION, tools=TOOLS)
    assert json.dumps(TOOLS[0], ensure_ascii=False) in prompt
    assert "Bonn" in prompt
    assert "It rains." in prompt
    layout = pick_format("auto", "auto", None, template.text_with_tools)
    answer = ANSWERS[family]
    parser = ResponseTemplateParser(layout, prompt, TOOLS)
    reasoning, content, calls = meaning(parsed(parser, list(answer.text)))
    assert (reasoning, content) == (answer.reasoning, answer.content)
    assert [name for name, _ in calls] == [name for name, _ in answer.calls]


@pytest.mark.parametrize("family", [f for f in TEMPLATES if f != "deepseek V3"])
def test_prompts_with_tools_equal_those_of_transformers(family: str) -> None:
    text = TEMPLATES[family]
    call = CONVERSATION[1]["tool_calls"][0]
    function = {"name": "get_weather", "arguments": json.loads(ARGUMENTS)}
    as_object = {**CONVERSATION[1], "tool_calls": [{**call, "function": function}]}
    expected = reference(text).apply_chat_template(
        [CONVERSATION[0], as_object, CONVERSATION[2]], tools=TOOLS, tokenize=False
    )
    template = ChatTemplate("m", {"default": text}, {})
    assert template.render(CONVERSATION, tools=TOOLS, add_generation_prompt=False) == expected


def test_a_message_without_content_never_shows_none() -> None:
    """GLM's template prints whatever the content is."""
    text = TEMPLATES["glm 4.5"].replace("m.content or ''", "m.content")
    prompt = ChatTemplate("m", {"default": text}, {}).render(CONVERSATION, tools=TOOLS)
    assert "None" not in prompt
    assert "<|assistant|><tool_call>get_weather" in prompt


def test_reasoning_has_the_names_that_templates_read() -> None:
    template = ChatTemplate("m", {"default": "{{ messages[0].thinking }}"}, {})
    for name in ("reasoning_content", "reasoning", "thinking"):
        assert template.render([{"role": "assistant", "content": "", name: "Hm."}]) == "Hm."


def test_a_call_of_another_shape_is_refused() -> None:
    template = ChatTemplate("m", {"default": TEMPLATES["hermes"]}, {})
    for calls in ([5], [{"name": "f"}]):
        with pytest.raises(InvalidRequest, match="function"):
            template.render([{"role": "assistant", "content": "", "tool_calls": calls}])


def test_arguments_stay_text_for_a_template_that_joins_them() -> None:
    template = ChatTemplate("m", {"default": TEMPLATES["deepseek V3"]}, {})
    assert f"\n```json\n{ARGUMENTS}\n```" in template.render(CONVERSATION)


def test_arguments_that_are_no_json_are_shown_as_they_are() -> None:
    talk = json.loads(json.dumps(CONVERSATION))
    talk[1]["tool_calls"][0]["function"]["arguments"] = '{"city": '
    template = ChatTemplate("m", {"default": TEMPLATES["hermes"]}, {})
    assert '{\\"city\\": ' in template.render(talk)


def test_a_template_that_shows_calls_but_no_tools_gets_a_description_in_its_own_form() -> None:
    """As the templates of DeepSeek-V3 and V3.1."""
    text = TEMPLATES["deepseek V3"].removeprefix(_TOOLS)
    system = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    template = ChatTemplate("m", {"default": system + text}, {})
    assert template.knows_tools
    prompt = template.render(CONVERSATION, tools=TOOLS)
    assert json.dumps(TOOLS[0]) in prompt
    assert "function<｜tool▁sep｜>the name\n```json\n" in prompt
    assert f"function<｜tool▁sep｜>get_weather\n```json\n{ARGUMENTS}\n```" in prompt
    assert "<tool_call>" not in prompt


PLAIN = (
    "{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('what is ' + m.role) }}{% endif %}<{{ m.role }}>{{ m.content }}"
    "{% endfor %}<assistant>"
)


def test_a_template_without_tools_gets_all_of_it_as_text() -> None:
    template = ChatTemplate("m", {"default": PLAIN}, {})
    assert not template.knows_tools
    talk = [{"role": "system", "content": "Be brief."}, *CONVERSATION, CONVERSATION[2]]
    prompt = template.render(talk, tools=TOOLS)
    assert prompt.startswith("<system>Be brief.\n\nYou can call functions.")
    assert json.dumps(TOOLS[1]) in prompt
    response = "<tool_response>\nIt rains.\n</tool_response>"
    assert prompt.endswith(
        "<user>Weather?<assistant><tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "Bonn", "days": 1}}\n</tool_call>'
        f"<user>{response}\n{response}<assistant>"
    )
    # The history may hold calls although this request has no tools.
    assert template.render(CONVERSATION).count("<tool_call>") == 1
