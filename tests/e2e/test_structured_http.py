"""Structured output over HTTP: a tiny model with drafts, the default model, and two ranks."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

from paceline import LLM, InvalidGrammar, SamplingParams, StructuredOutputsParams
from paceline.checkpoint.default_model import fetch_default_model
from paceline.errors import CheckpointError
from tests.e2e.serving import ServerProcess, Streamed, save_served, served, started
from tests.patience import PATIENCE_S, wait_for

PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Alan"]}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "Hi"}]
COMPACT: dict[str, Any] = {"json": PERSON, "disable_any_whitespace": True}


@pytest.fixture(scope="module")
def server(served_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("structured") / "log"
    with served(served_model, log, "--max-num-seqs", "16") as process:
        yield process
        process.send_signal(signal.SIGTERM)
        assert process.await_exit() == 0
        assert "Traceback" not in process.said()


def complete(server: ServerProcess, **fields: Any) -> dict[str, Any]:
    reply = server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 60, **fields})
    assert reply.status == 200, reply.body
    body: dict[str, Any] = reply.json()
    return body


def texts(reply: dict[str, Any]) -> list[str]:
    assert all(c["finish_reason"] == "stop" for c in reply["choices"]), reply
    return [c["text"] for c in reply["choices"]]


def refusal(server: ServerProcess, path: str = "/v1/completions", **fields: Any) -> dict[str, Any]:
    prompt = {"messages": MESSAGES} if "chat" in path else {"prompt": "Hi"}
    reply = server.post(path, {**prompt, **fields})
    assert reply.status == 400, reply.body
    return reply.error


def test_each_kind_of_constraint_holds(server: ServerProcess) -> None:
    for text in texts(complete(server, structured_outputs={**COMPACT}, n=4)):
        jsonschema.validate(json.loads(text), PERSON)
    (text,) = texts(complete(server, structured_outputs={"regex": "[a-c]{3}-[0-9]{2}"}))
    assert re.fullmatch("[a-c]{3}-[0-9]{2}", text)
    assert texts(complete(server, structured_outputs={"choice": ["red"]})) == ["red"]
    (text,) = texts(complete(server, structured_outputs={"grammar": 'start: "a" "b"~1..4 "c"'}))
    assert re.fullmatch("ab{1,4}c", text)
    tag = {"type": "tag", "begin": "<n>", "content": {"type": "regex", "pattern": "[0-9]{2}"}}
    fields = {"type": "structural_tag", "format": {**tag, "end": "</n>"}}
    (text,) = texts(complete(server, response_format=fields))
    assert re.fullmatch("<n>[0-9]{2}</n>", text)


def test_response_format_in_chat(server: ServerProcess) -> None:
    wrapped = {"name": "person", "schema": PERSON, "strict": True}
    for given in ({"type": "json_schema", "json_schema": wrapped}, {"type": "json_object"}):
        fields = {"messages": MESSAGES, "max_tokens": 200, "response_format": given, "seed": 4}
        reply = server.post("/v1/chat/completions", fields)
        assert reply.status == 200, reply.body
        (choice,) = reply.json()["choices"]
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)
        if given["type"] == "json_schema":
            jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)
    plain = server.post(
        "/v1/chat/completions",
        {"messages": MESSAGES, "max_tokens": 4, "response_format": {"type": "text"}},
    )
    assert plain.status == 200


def test_streams_give_the_same_text_as_whole_replies(server: ServerProcess) -> None:
    fields = {"prompt": "Hi", "seed": 3, "structured_outputs": COMPACT, "max_tokens": 60}
    streamed = Streamed()
    for event in server.stream("/v1/completions", fields):
        streamed.take(event)
    assert [streamed.text] == texts(complete(server, **fields))


def test_forced_tokens_are_in_the_usage_and_in_the_metrics(server: ServerProcess) -> None:
    before = server.gauge("forced_tokens_total")
    choice = {"structured_outputs": {"choice": ["a long answer that leaves no choice"]}}
    used = complete(server, **choice)["usage"]
    num_forced = used["completion_tokens_details"]["forced_tokens"]
    assert 0 < num_forced <= used["completion_tokens"]
    wait_for(lambda: server.gauge("forced_tokens_total") == before + num_forced)
    plain = complete(server, max_tokens=4)["usage"]["completion_tokens_details"]
    assert "forced_tokens" not in plain


def test_sampling_fields_keep_their_meaning_under_a_grammar(server: ServerProcess) -> None:
    wanted = {"structured_outputs": {"regex": "[a-z]*"}, "temperature": 0}
    cut = complete(server, structured_outputs=COMPACT, max_tokens=3)["choices"][0]
    assert cut["finish_reason"] == "length"
    free = complete(server, **wanted, max_tokens=8)["choices"][0]
    assert free["finish_reason"] == "length"
    stop = free["text"][3]
    ended = complete(server, **wanted, stop=[stop], max_tokens=8)["choices"][0]
    assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", stop)
    assert ended["text"] == free["text"].split(stop)[0]
    longer = complete(server, structured_outputs={"regex": "(ab)*"}, min_tokens=8, max_tokens=40)
    assert longer["usage"]["completion_tokens"] >= 8
    again = complete(
        server, structured_outputs={"choice": ["red"]}, ignore_eos=True, max_tokens=9, logprobs=2
    )
    assert again["usage"]["completion_tokens"] == 9
    assert again["choices"][0]["text"] == "red"
    assert len(again["choices"][0]["logprobs"]["token_logprobs"]) == 9
    penalised = complete(
        server, structured_outputs=COMPACT, presence_penalty=1.5, repetition_penalty=1.3
    )
    jsonschema.validate(json.loads(texts(penalised)[0]), PERSON)


def test_no_token_left_is_a_400_that_names_the_fields(server: ServerProcess) -> None:
    error = refusal(server, structured_outputs={"choice": ["red"]}, min_tokens=10, max_tokens=20)
    assert "structured_outputs, min_tokens together leave no token" in error["message"]
    assert error["param"] == "structured_outputs"


@pytest.mark.parametrize("stream", [False, True])
def test_an_unsupported_schema_is_a_400_that_names_the_keyword(
    server: ServerProcess, stream: bool
) -> None:
    schema = {"type": "array", "contains": {"type": "null"}}
    reason = "JSON Schema keyword 'contains' is not supported."
    error = refusal(server, structured_outputs={"json": schema}, stream=stream)
    assert error["message"] == f"structured_outputs: {reason}"
    assert error["param"] == "structured_outputs"
    given = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    error = refusal(server, "/v1/chat/completions", response_format=given, stream=stream)
    assert error["message"] == f"response_format: {reason}"
    assert error["param"] == "response_format"


def test_a_schema_of_a_tool_that_cannot_be_served_is_blamed_on_the_tools(
    server: ServerProcess,
) -> None:
    """The structural tag and the grammar that it became are not the client's."""
    function = {"name": "f", "parameters": {"type": "nothing"}}
    tools = [{"type": "function", "function": function}]
    asked = {"tools": tools, "tool_choice": "required"}
    error = refusal(server, "/v1/chat/completions", **asked)
    reason = "failed to compile JSON schema: Invalid type: nothing"
    assert error["message"] == f"tools cannot be served: {reason}"
    assert error["param"] == "tools"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"guided_json": PERSON}, "Send structured_outputs.json."),
        ({"guided_choice": ["a"]}, "Send structured_outputs.choice."),
        ({"guided_decoding_backend": "xgrammar"}, "There is one backend."),
        ({"request_id": "a"}, "X-Request-Id"),
        ({"num_ctx": 100}, "--max-model-len"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "regex, choice"),
        ({"structured_outputs": {"jsonn": {}}}, "Did you mean 'json'"),
        ({"structured_outputs": {"choice": ["a"], "after_token_ids": [1]}}, "after_token_ids"),
        ({"structured_outputs": {"choice": ["a"], "opening_token_ids": [1]}}, "opening_token_ids"),
        ({"structured_outputs": {"regex": "a" * 140_000}}, "the limit is 131072"),
        ({"response_format": {"type": "jsonschema"}}, "Did you mean 'json_schema'"),
        ({"response_format": {"type": "json_schema", "schema": {}}}, "json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "schema must"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"choice": ["a"]}},
            "send one of them",
        ),
    ],
)
def test_fields_that_do_not_fit_are_refused(
    server: ServerProcess, fields: dict[str, Any], words: str
) -> None:
    assert words in refusal(server, **fields)["message"]


def test_ten_schemas_at_once_beside_bad_ones_and_free_text(server: ServerProcess) -> None:
    def ask(i: int) -> int:
        schema = {"type": "array", "items": {"const": i}, "minItems": 2, "maxItems": 4}
        asked: dict[str, Any] = {"json": schema, "disable_any_whitespace": True}
        if i % 3 == 1:
            asked = {"json": {"not": {"const": i}}}
        fields = {"prompt": f"{i}", "max_tokens": 40}
        if i % 3 != 2:
            fields["structured_outputs"] = asked
        reply = server.post("/v1/completions", fields)
        if reply.status == 200 and i % 3 == 0:
            jsonschema.validate(json.loads(texts(reply.json())[0]), schema)
        return reply.status

    with ThreadPoolExecutor(15) as workers:
        assert list(workers.map(ask, range(30))) == [200, 400, 200] * 10


def test_a_client_that_leaves_while_its_grammar_compiles_leaves_nothing(
    server: ServerProcess,
) -> None:
    for i in range(20):
        pattern = "|".join(f"[a-z]{{{n}}}{i}x{n}" for n in range(300))
        fields = {"prompt": "Hi", "max_tokens": 60, "structured_outputs": {"regex": pattern}}
        server.open_stream("/v1/completions", fields).close()
    server.await_idle()
    assert texts(complete(server, structured_outputs={"choice": ["ok"]})) == ["ok"]


def test_offline_generation_takes_the_same_parameters(served_model: Path) -> None:
    options: dict[str, Any] = {"dtype": "float32", "cpu_threads": 1, "engine_in_process": True}
    with LLM(str(served_model), **options) as llm:
        asked = SamplingParams(
            max_tokens=60, structured_outputs=StructuredOutputsParams(**COMPACT), n=2
        )
        (output,) = llm.generate(["Hi"], asked, use_tqdm=False)
        for one in output.outputs:
            jsonschema.validate(json.loads(one.text), PERSON)
        bad = SamplingParams(structured_outputs=StructuredOutputsParams(json={"not": {}}))
        with pytest.raises(InvalidGrammar, match="'not'"):
            llm.generate(["Hi"], bad, use_tqdm=False)
        asked = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes"]))
        assert llm.generate(["Hi"], asked, use_tqdm=False)[0].outputs[0].text == "yes"


@pytest.mark.more
def test_two_ranks_give_the_tokens_of_one(
    server: ServerProcess, served_model: Path, tmp_path: Path
) -> None:
    fields = {"structured_outputs": COMPACT, "seed": 5, "n": 4}
    expected = complete(server, **fields)
    with served(served_model, tmp_path / "log", "--tensor-parallel-size", "2") as process:
        assert texts(complete(process, **fields)) == texts(expected)
        error = refusal(process, structured_outputs={"json": {"not": {}}})
        assert "'not'" in error["message"]


@pytest.mark.more
def test_replicas_in_lock_step_give_the_answers_of_one(tmp_path: Path) -> None:
    """Grammars are compiled while the other replica runs or sleeps."""
    folder = tmp_path / "experts"
    folder.mkdir()
    save_served(folder, "qwen3-moe")

    def answers(*flags: str) -> list[Any]:
        with served(folder, tmp_path / "log", *flags) as process, ThreadPoolExecutor(8) as workers:

            def ask(i: int) -> Any:
                asked: tuple[Any, ...] = (
                    {"regex": f"[a-z]{{3,{i + 4}}}"},
                    {"json": {"not": {}}},
                    COMPACT,
                    None,
                )
                fields = {"prompt": f"Hi {i}", "max_tokens": 40, "seed": i}
                fields["structured_outputs"] = asked[i % 4]
                reply = process.post("/v1/completions", fields).json()
                return reply["choices"][0]["text"] if "choices" in reply else reply["error"]

            return [ask(0), *workers.map(ask, range(1, 16))]

    assert answers("--data-parallel-size", "2", "--enable-expert-parallel") == answers()


# ---- the default model


class Person(pydantic.BaseModel):
    name: str
    age: int
    languages: list[str]


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    try:
        fetch_default_model()
    except CheckpointError as error:
        pytest.skip(f"the default model cannot be fetched here: {error}")
    log = tmp_path_factory.mktemp("smollm2-structured") / "log"
    flags = ["--cpu-threads", "1", "--port", "0", "--kv-cache-memory-bytes", "256M"]
    with started(["serve", *flags], log) as process:
        process.await_ready()
        url = f"http://127.0.0.1:{process.port}/v1"
        with openai.OpenAI(base_url=url, api_key="-", max_retries=0, timeout=PATIENCE_S) as api:
            yield api
        assert "Traceback" not in process.said()


def test_the_official_client_parses_a_pydantic_model(api: openai.OpenAI) -> None:
    reply = api.chat.completions.parse(
        model=api.models.list().data[0].id,
        messages=[
            {"role": "user", "content": "Ada, 36, speaks English and French. Give it as JSON."}
        ],
        response_format=Person,
        temperature=0,
        max_tokens=200,
    )
    (choice,) = reply.choices
    assert choice.finish_reason == "stop"
    person = choice.message.parsed
    assert isinstance(person, Person)
    assert person.name
    assert reply.usage is not None


def test_the_default_model_obeys_choices_and_regexes(api: openai.OpenAI) -> None:
    model = api.models.list().data[0].id
    for asked, pattern in (
        ({"choice": ["positive", "negative"]}, "positive|negative"),
        ({"regex": r"\d{4}-\d{2}-\d{2}"}, r"\d{4}-\d{2}-\d{2}"),
        ({"json_object": True}, r"(?s)\{.*\}"),
    ):
        reply = api.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "I love this film. When did it come out?"}],
            max_tokens=120,
            temperature=0,
            extra_body={"structured_outputs": asked},
        )
        text, reason = reply.choices[0].message.content or "", reply.choices[0].finish_reason
        assert reason == "length" or re.fullmatch(pattern, text)
        assert reason == "stop" or "json_object" in asked
