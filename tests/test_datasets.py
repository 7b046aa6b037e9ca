"""Data sets of `paceline bench`: what vLLM and guidellm write is read, and wrong input is named."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import build_parser
from paceline.commands.datasets import open_dataset
from paceline.commands.prompts import PromptRecord
from paceline.errors import ConfigError

FLAGS: dict[str, Any] = {
    **dict.fromkeys(("dataset", "dataset_name", "input_len", "output_len", "prefix_len", "seed")),
    "num_prompts": 4,
    "chat": False,
}


def words(text: str) -> list[int]:
    """A tokenizer: each word is the token of its length."""
    return [len(word) for word in text.split()]


def prompts(**flags: Any) -> list[PromptRecord]:
    return open_dataset(Namespace(**FLAGS | flags))(words)


def written(folder: Path, name: str, content: Any) -> str:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)


def jsonl(*rows: dict[str, Any]) -> str:
    return "\n".join(json.dumps(row) for row in rows)


def test_random_prompts_have_exact_lengths_and_depend_on_the_seed() -> None:
    found = prompts(input_len=9, output_len=5, prefix_len=3)
    assert [len(p.token_ids or ()) for p in found] == [12] * 4
    assert len({tuple((p.token_ids or ())[:3]) for p in found}) == 1
    assert {json.dumps(p.sampling) for p in found} == {'{"max_tokens": 5, "ignore_eos": true}'}
    assert found == prompts(input_len=9, output_len=5, prefix_len=3, dataset_name="random")
    assert found != prompts(input_len=9, output_len=5, prefix_len=3, seed=1)


def test_random_messages_are_text() -> None:
    found = prompts(input_len=9, chat=True)
    assert {len(str((p.messages or [{}])[0]["content"]).split()) for p in found} == {9}


def test_the_lengths_have_vllms_names_too() -> None:
    argv = ["bench", "serve", "--random-input-len", "5", "--sharegpt-output-len", "6"]
    args = build_parser().parse_args([*argv, "--dataset-path", "x", "--sonnet-prefix-len", "7"])
    assert (args.input_len, args.output_len, args.prefix_len, args.dataset) == (5, 6, 7, "x")


@pytest.mark.parametrize(
    "spec",
    [
        "prompt_tokens=16,output_tokens=7",
        "kind=synthetic_text,prompt_tokens=16,output_tokens=7",
        '{"prompt_tokens": 16, "output_tokens": 7, "samples": 100}',
    ],
)
def test_the_synthetic_data_of_guidellm(spec: str) -> None:
    found = prompts(dataset=spec)
    assert {len(p.token_ids or ()) for p in found} == {16}
    assert {p.sampling["max_tokens"] for p in found} == {7}


def test_synthetic_lengths_vary_between_their_limits() -> None:
    spec = "prompt_tokens=50,prompt_tokens_min=20,prompt_tokens_max=80,output_tokens=30"
    found = prompts(dataset=f"{spec},output_tokens_stdev=9,output_tokens_max=33", num_prompts=200)
    lengths = [len(p.token_ids or ()) for p in found]
    assert min(lengths) >= 20
    assert max(lengths) <= 80
    assert len(set(lengths)) > 20
    limits = [p.sampling["max_tokens"] for p in found]
    assert max(limits) == 33
    assert len(set(limits)) > 10


def test_conversations_of_sharegpt(tmp_path: Path) -> None:
    def talk(*turns: str) -> dict[str, Any]:
        return {"id": "x", "conversations": [{"from": "human", "value": turn} for turn in turns]}

    question, answer = "one two three four five", "a b c d e f g"
    rows = [talk(question, answer), talk("too short", answer), talk(question), talk()]
    rows += [talk("w " * 1025, answer), talk("w " * 1000, "w " * 1049)]
    path = written(tmp_path, "sharegpt.json", rows)
    for name in (None, "sharegpt"):
        found = prompts(dataset=path, dataset_name=name)
        assert found == [PromptRecord(text=question, sampling={"max_tokens": 7})] * 4
    found = prompts(dataset=path, output_len=9)
    assert found[0].sampling == {"max_tokens": 9}


def test_the_custom_format_of_vllm(tmp_path: Path) -> None:
    rows = jsonl({"prompt": "a", "output_tokens": 3}, {"prompt": "b"})
    path = written(tmp_path, "custom.jsonl", rows)
    found = prompts(dataset=path, dataset_name="custom", num_prompts=3)
    assert [p.text for p in found] == ["a", "b", "a"]
    assert [dict(p.sampling) for p in found] == [{"max_tokens": 3}, {}, {"max_tokens": 3}]
    assert [dict(p.sampling) for p in prompts(dataset=path, output_len=8)] == [{}] * 4
    (first, *_) = prompts(dataset=path, chat=True)
    assert first.messages == [{"role": "user", "content": "a"}]


ROW = {"question": "why?", "system_prompt": "be kind ", "output_tokens_count": 4, "other": "x"}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", jsonl(ROW, ROW)),
        ("a.json", json.dumps([ROW])),
        ("a.json", json.dumps({"version": "1", "data": [ROW]}, indent=2)),
        ("a.csv", ",".join(ROW) + "\n" + ",".join(map(str, ROW.values())) + "\n"),
    ],
)
def test_files_of_guidellm(tmp_path: Path, name: str, content: str) -> None:
    path = written(tmp_path, name, content)
    kind = f"kind={name.partition('.')[2]}_file,path={path}"
    limit = {"max_tokens": 4, "ignore_eos": True}
    for given in (path, kind):
        assert prompts(dataset=given) == [PromptRecord(text="be kind why?", sampling=limit)] * 4


def test_a_quoted_cell_of_csv_may_hold_lines(tmp_path: Path) -> None:
    path = written(tmp_path, "a.csv", 'prompt,x\n"one\ntwo",1\n')
    assert prompts(dataset=path)[0].text == "one\ntwo"


def test_our_own_format_keeps_its_parameters(tmp_path: Path) -> None:
    rows = jsonl({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "id": 7})
    (first, *_) = prompts(dataset=written(tmp_path, "own.jsonl", rows))
    assert first.messages == [{"role": "user", "content": "hi"}]
    assert first.sampling == {"max_tokens": 2}


def test_sonnets_share_their_beginning(tmp_path: Path) -> None:
    path = written(tmp_path, "sonnet.txt", "".join(f"line {i} of a poem\n" for i in range(300)))
    found = prompts(dataset=path, dataset_name="sonnet", input_len=110, prefix_len=50)
    texts = [str(p.text).splitlines() for p in found]
    assert {tuple(lines[1:11]) for lines in texts} == {
        tuple(f"line {i} of a poem" for i in range(10))
    }
    assert len({tuple(lines[11:]) for lines in texts}) == 4
    assert all(abs(len(words(str(p.text))) - 110) <= 5 for p in found)
    assert {p.sampling["max_tokens"] for p in found} == {150}
    assert [p.text for p in prompts(dataset=path)] == [f"line {i} of a poem" for i in range(4)]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"dataset": "no/such.jsonl"}, "No such file"),
        ({"dataset": "prompt_tokns=3"}, "Did you mean 'prompt_tokens'"),
        ({"dataset": "output_tokens=3"}, "needs prompt_tokens"),
        ({"dataset": "prompt_tokens=many"}, "must be a number"),
        ({"dataset": "prompt_tokens=inf"}, "must be a number"),
        ({"dataset": "prompt_tokens=9,prompt_tokens_min=5,prompt_tokens_max=3"}, "_min at most"),
        ({"dataset": "kind=huggingface,source=a/b"}, "has no source"),
        ({"dataset": "{"}, "not JSON"),
        ({"dataset_name": "sharegpt"}, "--dataset-path FILE"),
        ({"dataset_name": "random", "dataset": "x"}, "reads no file"),
    ],
)
def test_wrong_data_sets_are_named_before_anything_is_loaded(
    flags: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        open_dataset(Namespace(**FLAGS | flags))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", '{"prompt": "x"}\n{"prompt"', "row 2: not JSON"),
        ("a.jsonl", jsonl({"answer": "x"}), "row 1 has no column prompt.*found answer"),
        ("a.jsonl", jsonl({"prompt": 5}), "prompt must be a string"),
        ("a.jsonl", jsonl({"prompt": "x", "output_tokens": "few"}), "must be an integer"),
        ("a.json", "[1, 2]", "must be a JSON object"),
        ("a.json", json.dumps([{"conversations": [1, 2]}]), "a turn must be"),
        ("a.parquet", "", "write it as JSONL or CSV"),
        ("a.txt", "\n", "holds no usable prompt"),
    ],
)
def test_wrong_rows_are_named(tmp_path: Path, name: str, content: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        prompts(dataset=written(tmp_path, name, content))
