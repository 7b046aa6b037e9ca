"""Tools and reasoning over HTTP: what is asked of the engine, and how replies and chunks look."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import openai
import pytest

from paceline.engine.outputs import Delta
from paceline.errors import InvalidRequest, MissingExtra
from paceline.request import SamplingParams, StructuredOutputsParams
from paceline.server import service
from paceline.server.options import ServerOptions
from paceline.server.service import Service
from paceline.server.tools import constrained, read_tool_use
from paceline.text.response_formats import pick_format
from tests.server.fake_client import Asked, FakeClient, Steps, ids_of, table
from tests.server.serving import Served, serving
from tests.text.model_answers import TOOLS, cut

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
# A chat template that knows tools, thinks, and prints whatever it is given.
THINKING = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools><tool_call>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}{% if reasoning_effort %}[{{ reasoning_effort }}]{% endif %}"
    "<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)


def saying(
    text: str, *, size: int = 4, finish: str = "stop", **last: Any
) -> Callable[[Asked], Steps]:
    """Every choice says the text in windows of `size` tokens."""

    def script(asked: Asked) -> Steps:
        steps = []
        for piece in cut(text, lambda _: size):
            ids = ids_of(piece)
            steps.append([Delta(i, piece, list(ids)) for i in range(asked.params.n)])
            if asked.params.logprobs is not None:
                for delta in steps[-1]:
                    delta.logprobs = [table(token) for token in ids]
        for delta in steps[-1]:
            delta.finish_reason = finish
            for name, value in last.items():
                setattr(delta, name, value)
        return steps

    return script


def reply_to(text: str, options: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    with serving(FakeClient(saying(text)), **(options or {})) as server:
        reply = server.chat(**{"tools": TOOLS, **fields})
    assert reply.status == 200, reply.body
    body: dict[str, Any] = reply.json()
    return body


def chunks_of(server: Served, **fields: Any) -> list[dict[str, Any]]:
    body = server.chat(stream=True, **fields).body.decode()
    lines = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def joined(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """What a client collects of one choice."""
    whole: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish": None}
    for choice in (c for chunk in chunks for c in chunk["choices"] if c["index"] == index):
        delta = choice["delta"]
        whole["content"] += delta.get("content", "")
        whole["reasoning"] += delta.get("reasoning", "")
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(whole["calls"])
                assert call["function"]["arguments"] == ""
                whole["calls"].append([call["function"]["name"], ""])
            else:
                assert list(call["function"]) == ["arguments"]
                whole["calls"][call["index"]][1] += call["function"]["arguments"]
        whole["finish"] = choice["finish_reason"] or whole["finish"]
    return whole


def test_a_call_is_in_the_message() -> None:
    choice = reply_to(f"I look.\n{CALL}\n{SECOND}")["choices"][0]
    calls = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": "I look.", "refusal": None}
    assert choice["finish_reason"] == "tool_calls"
    assert [call["type"] for call in calls] == ["function", "function"]
    assert calls[0]["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert calls[1]["function"] == {"name": "now", "arguments": "{}"}
    assert len({call["id"] for call in calls}) == 2


def test_a_message_with_only_calls_has_no_content() -> None:
    message = reply_to(CALL)["choices"][0]["message"]
    assert message["content"] is None


@pytest.mark.trap("F3", "F6")
@pytest.mark.parametrize("size", [1, 2, 4, 7, 500])
def test_calls_stream_in_windows_of_any_size(size: int) -> None:
    with serving(FakeClient(saying(f"I look.\n{CALL}\n{SECOND}", size=size))) as server:
        whole = joined(chunks_of(server, tools=TOOLS))
    assert whole["content"] == "I look."
    assert whole["calls"] == [["get_weather", '{"city": "Paris"}'], ["now", "{}"]]
    assert whole["finish"] == "tool_calls"


def test_arguments_stream_before_the_call_has_ended() -> None:
    with serving(FakeClient(saying(CALL, size=3))) as server:
        chunks = chunks_of(server, tools=TOOLS)
    assert sum("tool_calls" in c["choices"][0]["delta"] for c in chunks) > 4


def test_every_choice_has_its_own_calls() -> None:
    with serving(FakeClient(saying(CALL))) as server:
        chunks = chunks_of(server, tools=TOOLS, n=2)
        body = server.chat(tools=TOOLS, n=2).json()
    for index in range(2):
        assert joined(chunks, index)["calls"] == [["get_weather", '{"city": "Paris"}']]
    ids = {c["message"]["tool_calls"][0]["id"] for c in body["choices"]}
    assert len(ids) == 2


def test_logprobs_stand_next_to_calls() -> None:
    with serving(FakeClient(saying(CALL))) as server:
        whole = server.chat(tools=TOOLS, logprobs=True).json()["choices"][0]
        chunks = chunks_of(server, tools=TOOLS, logprobs=True, return_token_ids=True)
    assert len(whole["logprobs"]["content"]) == len(CALL)
    choices = [c["choices"][0] for c in chunks]
    shown = [t["token"] for c in choices for t in (c["logprobs"] or {"content": []})["content"]]
    assert "".join(shown) == CALL
    assert [i for c in choices for i in c.get("token_ids", ())] == ids_of(CALL)


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_a_call_that_is_cut_off_is_text_in_a_whole_reply(finish: str) -> None:
    text = CALL[:60]
    with serving(FakeClient(saying(text, finish=finish))) as server:
        choice = server.chat(tools=TOOLS).json()["choices"][0]
        streamed = joined(chunks_of(server, tools=TOOLS))
    assert choice["message"]["content"] == text
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == streamed["finish"] == finish
    # A stream has sent the beginning before it was known that the rest is missing.
    assert streamed["calls"] == [["get_weather", text.partition('"arguments": ')[2]]]


def test_a_malformed_call_is_text() -> None:
    text = '<tool_call>{"name": now}</tool_call> Sorry.'
    choice = reply_to(text)["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    with serving(FakeClient(saying(text))) as server:
        assert joined(chunks_of(server, tools=TOOLS))["content"] == text


def test_reasoning_has_both_names_and_is_counted() -> None:
    with serving(FakeClient(saying("<think>\nHm.\n</think>\n\nYes.")), chat_template=THINKING) as s:
        body = s.chat().json()
        chunks = chunks_of(s, stream_options={"include_usage": True})
        hidden = s.chat(include_reasoning=False).json()["choices"][0]["message"]
        silent = joined(chunks_of(s, include_reasoning=False))
    message = body["choices"][0]["message"]
    assert (message["content"], message["reasoning"], message["reasoning_content"]) == (
        "Yes.",
        "Hm.",
        "Hm.",
    )
    details = body["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == len("\nHm.\n")
    assert chunks[-1]["usage"]["completion_tokens_details"] == details
    assert joined(chunks[:-1])["reasoning"] == "Hm."
    assert (hidden["content"], "reasoning" in hidden) == ("Yes.", False)
    assert (silent["content"], silent["reasoning"]) == ("Yes.", "")


def asked_for(options: dict[str, Any] | None = None, **fields: Any) -> FakeClient:
    client = FakeClient()
    with serving(client, **(options or {})) as server:
        reply = server.chat(**fields)
        assert reply.status == 200, reply.body
    return client


def prompt_of(client: FakeClient) -> str:
    return client.tokenizer.decode(client.last.prompt_token_ids)


def test_effort_and_the_switch_of_thinking_reach_the_template() -> None:
    options = {"chat_template": THINKING}
    assert "[high]" in prompt_of(asked_for(options, reasoning_effort="high"))
    for fields in (
        {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ):
        assert prompt_of(asked_for(options, **fields)).endswith("</think>\n\n")


def test_tools_calls_and_results_reach_the_template() -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Hm.",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"city": "Bonn"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "name": "get_weather", "content": "Rain."},
    ]
    tools = [{"type": "function", "function": {"name": "get_weather", "strict": True}}]
    prompt = prompt_of(asked_for({"chat_template": THINKING}, messages=messages, tools=tools))
    assert prompt == (
        '<tools>[{"type": "function", "function": {"name": "get_weather"}}]</tools><tool_call>'
        "<|im_start|>user\nHi<|im_start|>assistant\n<think>Hm.</think>"
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Bonn"}}</tool_call>'
        "<|im_start|>tool\nRain.<|im_start|>assistant\n"
    )


def test_a_template_without_tools_gets_them_as_text() -> None:
    prompt = prompt_of(asked_for(tools=TOOLS))
    assert prompt.startswith("<system>You can call functions.")
    assert json.dumps(TOOLS[0]) in prompt
    assert prompt.endswith("<user>Hi<assistant>")


def test_tools_that_may_not_be_called_are_shown_unless_the_server_hides_them() -> None:
    shown = asked_for(tools=TOOLS, tool_choice="none")
    assert "get_weather" in prompt_of(shown)
    assert shown.last.params.structured_outputs is None
    hidden = asked_for(
        {"exclude_tools_when_tool_choice_none": True}, tools=TOOLS, tool_choice="none"
    )
    assert "get_weather" not in prompt_of(hidden)
    message = reply_to(CALL, tool_choice="none")["choices"][0]["message"]
    assert message["content"] == CALL


def test_auto_without_strict_tools_constrains_nothing() -> None:
    params = asked_for(tools=TOOLS).last.params
    assert params.structured_outputs is None
    assert params.skip_special_tokens


def tag_of(client: FakeClient) -> dict[str, Any]:
    wanted = client.last.params.structured_outputs
    assert wanted is not None
    assert isinstance(wanted.structural_tag, dict)
    form: dict[str, Any] = wanted.structural_tag["format"]
    return form


@pytest.mark.parametrize("parallel", [True, False])
def test_required_and_named_calls_ask_for_a_structural_tag(parallel: bool) -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "parallel_tool_calls": parallel}
    form = tag_of(asked_for(tool_choice="required", **fields))
    assert (form["type"], form["at_least_one"]) == ("tags_with_separator", True)
    assert form["stop_after_first"] is not parallel
    assert len(form["tags"]) == 2
    named = {"type": "function", "function": {"name": "get_weather"}}
    form = tag_of(asked_for(tool_choice=named, **fields))
    (tag,) = form["tags"]
    assert tag["begin"] == '<tool_call>\n{"name": "get_weather", "arguments": '
    assert tag["content"]["json_schema"] == TOOLS[0]["function"]["parameters"]


def test_a_strict_tool_is_constrained_once_its_call_begins() -> None:
    strict = {"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}
    form = tag_of(asked_for(tools=[strict, TOOLS[1]]))
    assert (form["type"], form["triggers"]) == ("triggered_tags", ["<tool_call>"])
    schemas = [tag["content"]["json_schema"] for tag in form["tags"]]
    assert schemas == [TOOLS[0]["function"]["parameters"], {"type": "object"}]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tools": [{"type": "custom"}], "tool_choice": "no"}, "tools[0].type", "functions"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "object"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name", "name"),
        (
            {"tools": [{"function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
            "schema",
        ),
        ({"tools": [TOOLS[1], TOOLS[1]]}, "tools[1].function.name", "'now'"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "paramters": {}}}]},
            "tools[0].function.paramters",
            "Did you mean 'parameters'?",
        ),
        ({"tools": [{**TOOLS[1], "parameters": {}}]}, "tools[0].parameters", "Unknown field"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice", "required"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nov"}}},
            "tool_choice",
            "Did you mean 'now'?",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type", "auto"),
        ({"tool_choice": "required"}, "tools", "offers no function"),
        ({"functions": [{"name": "f"}]}, "functions", "Send tools"),
        ({"function_call": "auto"}, "function_call", "Send tool_choice"),
        ({"tools": TOOLS * 600}, "tools", "1024"),
        (
            {"tools": TOOLS, "structured_outputs": {"json": "[" * 5000}},
            "structured_outputs",
            "not JSON",
        ),
    ],
)
def test_what_is_wrong_with_tools_is_said(
    server: Served, fields: dict[str, Any], param: str, says: str
) -> None:
    reply = server.chat(**fields)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert says in reply.error["message"]


def test_a_choice_that_asks_for_nothing_needs_no_tools(server: Served) -> None:
    for choice in ("none", "auto"):
        assert server.chat(tool_choice=choice).status == 200
        assert server.chat(tool_choice=choice, tools=[]).status == 200
    assert server.chat(parallel_tool_calls=True).status == 200


def test_a_server_without_a_parser_refuses_tools_and_says_why() -> None:
    with serving(FakeClient(), tool_call_parser="none") as server:
        reply = server.chat(tools=TOOLS)
        assert (reply.status, reply.error["param"]) == (400, "tools")
        assert "--tool-call-parser" in reply.error["message"]
        assert server.chat(tools=TOOLS, tool_choice="none").status == 200


def test_markers_that_are_special_tokens_are_kept_in_the_text() -> None:
    own = {"start_anchor": "<assistant>", "fields": {"thinking": {"open": "<a>", "close": "<end>"}}}
    client = FakeClient()
    template = client.load_chat_template(None)
    template.response_template = own
    client.load_chat_template = lambda override: template  # type: ignore[method-assign]
    with serving(client) as server:
        assert server.chat().status == 200
    assert not client.last.params.skip_special_tokens


def test_without_the_library_chat_goes_on_and_tools_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(*_: Any) -> None:
        raise MissingExtra("tools need transformers: pip install 'paceline[tools]'")

    for name in ("load_library", "check_template"):
        monkeypatch.setattr(service, name, missing)
    with serving(FakeClient(), chat_template=THINKING) as server:
        assert server.chat().json()["choices"][0]["message"]["content"] == "Hello"
        reply = server.chat(tools=TOOLS)
        assert (reply.status, reply.error["param"]) == (400, "tools")
        assert "paceline[tools]" in reply.error["message"]
    with pytest.raises(MissingExtra):
        Service(ServerOptions(tool_call_parser="hermes")).attach(FakeClient())


@pytest.mark.parametrize(
    "own",
    [
        {"fields": {"thinking": {"open": "<a>", "close": "<b>"}}},
        {
            "start_anchor": "<assistant>",
            "fields": {"thinking": {"open_pattern": "(", "close": "b"}},
        },
        {"start_anchor": "<assistant>", "fields": {"tool_calls": {"open": "x", "what": 1}}},
    ],
)
def test_a_broken_template_of_the_tokenizer_is_not_used(own: dict[str, Any]) -> None:
    client = FakeClient(saying(CALL))
    template = client.load_chat_template(None)
    template.response_template = own
    client.load_chat_template = lambda override: template  # type: ignore[method-assign]
    with serving(client) as server:
        message = server.chat(tools=TOOLS).json()["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["name"] == "get_weather"


def test_the_model_may_not_choose_if_the_server_says_so() -> None:
    with serving(FakeClient(), enable_auto_tool_choice=False) as server:
        reply = server.chat(tools=TOOLS)
        assert (reply.status, reply.error["param"]) == (400, "tool_choice")
        assert server.chat(tools=TOOLS, tool_choice="required").status == 200


def test_json_of_the_request_may_be_a_call_instead() -> None:
    layout = pick_format("hermes", "none", None, "")
    wanted = StructuredOutputsParams(json={"type": "array"})
    params = SamplingParams(structured_outputs=wanted)

    def after(choice: str) -> StructuredOutputsParams:
        use = read_tool_use(TOOLS, choice)
        made = constrained(
            params, use, layout, FakeClient().tokenizer, {"after_token_ids": (7,)}
        ).structured_outputs
        assert made is not None
        assert made.after_token_ids == (7,)
        return made

    tag = after("auto").structural_tag
    assert isinstance(tag, dict)
    first, second = tag["format"]["elements"]
    assert first["json_schema"] == {"type": "array"}
    assert second["type"] == "tags_with_separator"
    assert after("none").json == {"type": "array"}  # no call is possible
    layout = pick_format("llama3_json", "none", None, "")
    with pytest.raises(InvalidRequest, match="tool_choice none"):
        after("auto")


def test_parsing_needs_no_torch() -> None:
    program = (
        "import sys; from paceline.text.response_parser import load_library; load_library(); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == 0


def test_tokenize_shows_tools_too(server: Served) -> None:
    fields = {"messages": [{"role": "user", "content": "Hi"}]}
    plain = server.post("/tokenize", fields).json()["count"]
    assert server.post("/tokenize", {**fields, "tools": TOOLS}).json()["count"] > plain


def two_turns(asked: Asked) -> Steps:
    is_answer = "<tool_response>\nrain" in (asked.prompt or "")
    return saying("It rains in Paris." if is_answer else CALL)(asked)


@pytest.mark.parametrize("stream", [False, True])
def test_the_openai_client_runs_a_tool_loop(stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "Weather?"}]
    tools: Any = TOOLS
    final: openai.types.chat.ChatCompletion
    with (
        serving(FakeClient(two_turns)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as api,
    ):
        for _ in range(2):
            if stream:
                with api.chat.completions.stream(
                    model="tiny", messages=messages, tools=tools
                ) as events:
                    final = events.get_final_completion()
            else:
                final = api.chat.completions.create(model="tiny", messages=messages, tools=tools)
            choice = final.choices[0]
            messages.append(choice.message.model_dump())
            for call in choice.message.tool_calls or ():
                assert call.type == "function"
                assert json.loads(call.function.arguments) == {"city": "Paris"}
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "rain"})
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[-1]["content"] == "It rains in Paris."
    assert choice.finish_reason == "stop"
