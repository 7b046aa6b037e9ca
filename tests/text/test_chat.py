"""Chat templates render as in transformers, from every place they are kept, and fail politely."""

from __future__ import annotations

import dataclasses
import datetime
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from paceline.checkpoint.source import ModelFiles
from paceline.errors import ConfigError, InvalidRequest
from paceline.text.chat import ChatTemplate, load_chat_template
from tests.checkpoint.gguf_writing import write_tokenizer_only
from tests.checkpoint.vocabularies import byte_level

PLAIN = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {% if message.role == 'system' %}\n"
    "[SYS]{{ message.content }}[/SYS]\n"
    "    {%- else %}\n"
    "[{{ message.role }}]{{ message.content }}{{ eos_token }}\n"
    "    {%- endif %}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}[assistant]{% endif %}\n"
)
STRICT = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}<{{ m.role }}>{{ m.content | trim }}"
    "</{{ m.role }}>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}"
    "{% if p.type == 'text' %}({{ p.text }}){% endif %}{% endfor %}{% endfor %}"
)
BOTH = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endif %}{% endfor %}"
)
DEVELOPER = (
    "{% for m in messages %}{% if m.role in ('system', 'developer') %}<|{{ m.role }}|>"
    "{% else %}<{{ m.role }}>{% endif %}{{ m.content }}{% endfor %}"
)
LOOPS = (
    "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}"
    "{% if loop.index0 == 3 %}{% break %}{% endif %}{% generation %}{{ m.content }}"
    "{% endgeneration %};{% endfor %}"
)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <b>&amp;</b> 'there'"},
    {"role": "assistant", "content": "  Hello!\n"},
    {"role": "user", "content": "Grüße 😀"},
]


def template(text: str, **named: str) -> ChatTemplate:
    return ChatTemplate(
        "tiny", {"default": text}, named or {"bos_token": "<s>", "eos_token": "<e>"}
    )


def reference(text: str) -> Any:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"<s>": 0, "<e>": 1}, []))
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="<e>"
    )
    made.chat_template = text
    return made


@pytest.mark.parametrize("text", [PLAIN, STRICT, BOTH, DEVELOPER, LOOPS])
@pytest.mark.parametrize("generation", [True, False])
def test_prompts_equal_those_of_transformers(text: str, generation: bool) -> None:
    theirs = reference(text).apply_chat_template(
        TALK, tokenize=False, add_generation_prompt=generation
    )
    assert template(text).render(TALK, add_generation_prompt=generation) == theirs


@pytest.mark.parametrize("text", [PLAIN, STRICT])
@pytest.mark.parametrize("end", ["The answer", "The answer: ", "e", ">", "line\n"])
def test_a_continued_message_is_left_open_as_in_transformers(text: str, end: str) -> None:
    talk = [*TALK, {"role": "assistant", "content": end}]
    theirs = reference(text).apply_chat_template(talk, tokenize=False, continue_final_message=True)
    ours = template(text).render(talk, add_generation_prompt=False, continue_final_message=True)
    assert ours == theirs
    assert ours.endswith(end if text == PLAIN else end.rstrip())


def test_a_continued_message_of_parts_is_left_open() -> None:
    talk = [{"role": "assistant", "content": [{"type": "text", "text": "The "}]}]
    for text, expected in ((PARTS, "<assistant>(The "), (PLAIN, "<s>[assistant]The ")):
        got = template(text).render(talk, add_generation_prompt=False, continue_final_message=True)
        assert got == expected
    assert talk[0]["content"] == [{"type": "text", "text": "The "}]


@pytest.mark.parametrize(
    ("text", "expected"),
    [(PLAIN, "<s>[user]onetwo<e>"), (PARTS, "<user>(one)(two)"), (BOTH, "<user>[one][two]")],
)
def test_text_parts_are_joined_only_for_templates_that_want_text(text: str, expected: str) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    talk = [{"role": "user", "content": parts}]
    assert template(text).render(talk, add_generation_prompt=False).strip() == expected


def test_text_becomes_a_part_for_templates_that_know_only_parts() -> None:
    assert template(PARTS).render([{"role": "user", "content": "x"}]) == "<user>(x)"
    assert template(BOTH).render([{"role": "user", "content": "x"}]) == "<user>x"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (PLAIN, "<s>[SYS]Be brief.[/SYS]"),
        (STRICT, "<system>Be brief.</system>"),
        (DEVELOPER, "<|developer|>Be brief."),
    ],
)
def test_developer_is_system_where_the_template_does_not_know_it(text: str, expected: str) -> None:
    talk = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert template(text).render(talk).startswith(expected)
    assert talk[0]["role"] == "developer"


def test_extra_variables_and_tools_reach_the_template() -> None:
    text = "{{ tools | tojson }}{{ thinking }}{{ documents is none }}"
    tools = [{"name": "f", "description": "<&>'é"}]
    got = template(text).render(TALK, tools=tools, thinking="on")
    assert got == '[{"name": "f", "description": "<&>\'é"}]onTrue'


def test_tojson_does_as_transformers_does() -> None:
    text = "{{ messages[0] | tojson(indent=2) }}{{ messages[1].content | tojson }}"
    theirs = reference(text).apply_chat_template(TALK, tokenize=False)
    assert template(text).render(TALK) == theirs


def test_the_clock_is_there_for_templates_that_print_the_date() -> None:
    got = template("{{ strftime_now('%Y') }}").render(TALK)
    assert got == str(datetime.datetime.now().year)


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ undefined_function() }}",
        "{{ messages[0].content.nothing.here }}",
        "{{ 1 / 0 }}",
    ],
)
def test_what_a_template_does_wrong_is_an_invalid_request(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        template(text).render(TALK)
    assert caught.value.param == "messages"


def test_a_template_can_refuse_messages_with_its_own_words() -> None:
    talk = [{"role": "martian", "content": "x"}]
    with pytest.raises(InvalidRequest, match="unknown role martian") as caught:
        template(STRICT).render(talk)
    assert caught.value.param == "messages"


def test_a_model_without_a_template_says_how_to_give_one() -> None:
    nothing = ChatTemplate("tiny", {}, {})
    assert not nothing.exists
    with pytest.raises(InvalidRequest, match="--chat-template") as caught:
        nothing.render(TALK)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("talk", "named"),
    [
        ([], "messages is empty"),
        ([{"content": "x"}], r"messages\[0\] has no role"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content must be text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "type 'image_url'"),
        ([{"role": "user", "content": [3]}], "reads text only"),
        ([{"role": "user", "content": [{"type": "text"}]}], "needs 'text': a string"),
        ([{"role": "user"}], "needs content"),
        ([{"role": "user", "content": "x", "tool_calls": [{}]}], "makes no tool calls"),
        ([{"role": "assistant", "tool_calls": ["x"]}], "needs 'function': an object"),
    ],
)
def test_messages_of_the_wrong_form_are_named(talk: list[Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        template(PLAIN).render(talk)


def test_a_final_message_is_continued_or_answered_but_not_both() -> None:
    with pytest.raises(InvalidRequest) as caught:
        template(PLAIN).render(TALK, continue_final_message=True)
    assert caught.value.param == "continue_final_message"
    empty = [{"role": "assistant", "content": ""}]
    with pytest.raises(InvalidRequest, match="needs text in the last message"):
        template(PLAIN).render(empty, add_generation_prompt=False, continue_final_message=True)
    hidden = "{{ messages[0].content }}"
    with pytest.raises(InvalidRequest, match="does not show the last message"):
        template(hidden).render(TALK, add_generation_prompt=False, continue_final_message=True)


def folder_files(folder: Path) -> ModelFiles:
    return ModelFiles("tiny", "hf", folder, None, [], {})


def test_the_template_of_tokenizer_config_json(tmp_path: Path) -> None:
    config = {"chat_template": PLAIN, "bos_token": {"content": "<s>"}, "eos_token": "<e>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    got = load_chat_template(folder_files(tmp_path)).render(TALK)
    assert got == template(PLAIN).render(TALK)


def test_a_list_of_named_templates_is_picked_from(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools"},
    ]
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"chat_template": named}))
    chat = load_chat_template(folder_files(tmp_path))
    assert chat.render(TALK) == "plain"
    assert chat.render(TALK, tools=[{}]) == "tools"
    path.write_text(json.dumps({"chat_template": [*named[1:], {"name": "rag", "template": ""}]}))
    with pytest.raises(InvalidRequest, match="rag, tool_use"):
        load_chat_template(folder_files(tmp_path)).render(TALK)


def test_a_file_beside_the_config_wins(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "old"}')
    (tmp_path / "chat_template.jinja").write_text("new")
    assert load_chat_template(folder_files(tmp_path)).render(TALK) == "new"


def test_the_template_of_a_gguf(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    vocabulary = dataclasses.replace(byte_level("smollm"), template=PLAIN)
    write_tokenizer_only(path, vocabulary)
    files = ModelFiles("tiny", "gguf", tmp_path, path, [path], {})
    got = load_chat_template(files).render(TALK)
    assert got == template(PLAIN, bos_token="<|im_start|>", eos_token="<|im_end|>").render(TALK)


def test_an_override_is_a_file_or_the_template_itself(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "old"}')
    (tmp_path / "mine.jinja").write_text("from {{ messages[0].role }}")
    files = folder_files(tmp_path)
    assert load_chat_template(files, str(tmp_path / "mine.jinja")).render(TALK) == "from system"
    assert load_chat_template(files, "to {{ messages[1].role }}").render(TALK) == "to user"
    with pytest.raises(ConfigError, match=r"neither a file.*nor a Jinja template"):
        load_chat_template(files, str(tmp_path / "missing.jinja"))


def test_a_template_that_is_no_jinja_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("fine\n{% for m in %}")
    with pytest.raises(ConfigError, match="not valid Jinja in line 2"):
        load_chat_template(folder_files(tmp_path))


ONE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)


def test_late_system_messages_reach_a_template_that_takes_one_at_the_beginning() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "a"},
        {"role": "developer", "content": [{"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {"role": "system", "content": "d"},
    ]
    strict = ChatTemplate("m", {"default": ONE_SYSTEM}, {})
    assert strict.render(messages) == "<system>a\n\nb<user>c<user>d"
    assert strict.render(messages[2:]) == "<user>c<user>d"
    loose = ChatTemplate(
        "m", {"default": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"}, {}
    )
    assert loose.render(messages[::3]) == "<system>a<system>d"
