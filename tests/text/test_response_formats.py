"""Which format is chosen: by name, by the tokenizer's response template, by the chat template."""

from __future__ import annotations

import pytest

from paceline.errors import ConfigError
from paceline.server.options import ServerOptions
from paceline.text.response_formats import parser_names, pick_format

# Parts of the chat templates of each family -> the names that choose the same.
TEMPLATES = {
    "<tool_call>\\n{{ c.name }}</tool_call> </think>": ("hermes", "qwen3"),
    "<tool_call>": ("hermes", "none"),
    "<tool_call>\n<function=f>\n<parameter=p> <think></think>": ("qwen3_coder", "qwen3"),
    "<tool_call>{{ n }}<arg_key>k</arg_key></think>": ("glm45", "glm45"),
    "[AVAILABLE_TOOLS][TOOL_CALLS]{{ n }}[ARGS]": ("mistral", "none"),
    "[AVAILABLE_TOOLS][TOOL_CALLS][": ("mistral", "none"),
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>\n```json": ("deepseek_v3", "none"),
    "<｜tool▁call▁begin｜>{{ n }}<｜tool▁sep｜> </think>": ("deepseek_v31", "deepseek_r1"),
    "<|start_header_id|>ipython {parameters}": ("llama3_json", "none"),
}


@pytest.mark.parametrize(("template", "names"), TEMPLATES.items())
def test_auto_recognises_the_chat_template(template: str, names: tuple[str, str]) -> None:
    assert pick_format("auto", "auto", None, template) == pick_format(*names, None, template)
    assert pick_format(*names, None, template).reads_calls


def test_a_template_that_shows_no_tools_gets_hermes() -> None:
    chosen = pick_format("auto", "auto", None, "{{ messages }}", writes_tools=False)
    assert chosen == pick_format("hermes", "none", None, "")
    assert not pick_format("auto", "auto", None, "{{ messages }}").template


def test_none_switches_a_parser_off() -> None:
    chosen = pick_format("none", "auto", None, "<tool_call></think>")
    assert not chosen.reads_calls
    assert chosen.reasoning_markers == ("<think>", "</think>")
    assert not pick_format("none", "none", None, "<tool_call></think>").template


def test_a_name_wins_over_the_tokenizers_template() -> None:
    own = {"start_anchor": "A:", "fields": {"thinking": {"open": "<t>", "close": "</t>"}}}
    assert pick_format("auto", "auto", own, "").reasoning_markers == ("<t>", "</t>")
    assert pick_format("auto", "auto", own, "<tool_call>").reads_calls  # it says nothing of calls
    chosen = pick_format("hermes", "qwen3", own, "")
    assert chosen.reasoning_markers == ("<think>", "</think>")
    assert chosen.reads_calls


@pytest.mark.parametrize(
    ("prompt", "state"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", None),
        ("<|im_start|>user\nWhat is <think>?<|im_start|>assistant\n", None),
        ("<|im_start|>assistant\n<think>\nHm.</think>So the answer", False),
        ("<｜Assistant｜></think>", False),
        ("<｜Assistant｜><think><｜tool▁output▁begin｜>x<｜tool▁output▁end｜>", None),
        ("Bot: <think>\n", True),
        ("Bot: what is <think> here", None),
    ],
)
def test_the_prompt_says_whether_the_model_thinks(prompt: str, state: bool | None) -> None:
    assert pick_format("none", "qwen3", None, "").thinking_after(prompt) is state


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"auto, none, .*hermes.*Did you mean 'hermes'"):
        ServerOptions(tool_call_parser="hermess")
    with pytest.raises(ConfigError, match="qwen3"):
        ServerOptions(reasoning_parser="nothing")
    for name in ("hermes", "qwen3_coder", "qwen3_xml", "llama3_json", "mistral", "deepseek_v3"):
        assert name in parser_names("tool_calls")
