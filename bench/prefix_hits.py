"""How much of its prompts a recurrent model finds in the prefix cache, with MTP and without.

Replays conversations over the real scheduler and a fake device: eight at a time, turn by turn,
each answer part of the next prompt. A word or a sign is a token. Reads a JSONL file of questions
with `turns`, or a JSON list of `conversations`. The first column is what a model without recurrent
state would find: every known page.
"""

from __future__ import annotations

import argparse
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from paceline.engine.engine import Engine
from tests.engine.harness import Front, Stream, engine_config, request
from tests.fake_recurrent import RecurrentFeatureRunner, RecurrentRunner
from tests.fakes import FakeRunner, runner_info

VOCAB = 32_000
CONCURRENT = 8
KINDS = {
    "pages": (FakeRunner, 0),
    "alone": (RecurrentRunner, 0),
    "mtp": (RecurrentFeatureRunner, 3),
}


def tokens_of(text: str) -> list[int]:
    return [zlib.crc32(word.encode()) % VOCAB for word in re.findall(r"\w+|[^\w ]", text)]


def conversations(path: Path) -> Iterator[list[str]]:
    """The questions of each."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        yield from (json.loads(line)["turns"] for line in text.splitlines())
        return
    for entry in json.loads(text):
        yield [turn["value"] for turn in entry["conversations"] if turn["from"] == "human"]


def hit_rate(path: Path, kind: str, interval: int, output_len: int, num_snapshots: int) -> float:
    make_runner, k = KINDS[kind]
    info = runner_info(
        num_pages=20_000,
        page_size=16,
        num_slots=CONCURRENT,
        max_model_len=16_384,
        vocab_size=VOCAB,
        max_k=k,
        draft_lookahead=max(k - 1, 0),
        draft_reads_features=k > 0,
        is_recurrent=kind != "pages",
        num_snapshots=num_snapshots,
    )
    runner = make_runner(info)
    runner.keeps_plans = False
    config = engine_config(
        info, depth=1, max_num_batched_tokens=2048, state_snapshot_interval=interval
    )
    front = Front()
    engine = Engine(runner, config, front.receive)
    waiting = list(conversations(path))[::-1]
    open_turns: dict[int, tuple[list[int], list[str]]] = {}
    uid = num_asked = 0

    def send(prompt: list[int], questions: list[str]) -> None:
        nonlocal uid, num_asked
        uid += 1
        asked = f"<|im_start|> user {questions[0]} <|im_end|> <|im_start|> assistant"
        prompt = prompt + tokens_of(asked)
        num_asked += len(prompt)
        front.streams[uid] = Stream()
        engine.add(request(uid, prompt, max_tokens=output_len, seed=uid))
        open_turns[uid] = (prompt, questions[1:])

    while waiting or open_turns:
        while waiting and len(open_turns) < CONCURRENT:
            send(
                tokens_of("<|im_start|> system You are a helpful assistant. <|im_end|>"),
                waiting.pop(),
            )
        engine.turn()
        for number in [number for number in open_turns if front.streams[number].done]:
            prompt, questions = open_turns.pop(number)
            if questions:
                said = prompt + front.streams[number].tokens
                send(said + tokens_of("<|im_end|>"), questions)
    while engine.turn():
        pass
    return engine.scheduler.num_hit_tokens / num_asked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--intervals", nargs="+", type=int, default=[512, 64, 16])
    parser.add_argument("--output-len", type=int, default=200)
    parser.add_argument("--num-snapshots", type=int, default=1000)
    parser.add_argument("--json", type=Path, help="write the shares here")
    args = parser.parse_args()
    found: dict[str, dict[str, dict[str, float]]] = {}
    for path in args.files:
        for interval in args.intervals:
            shares = {
                kind: hit_rate(path, kind, interval, args.output_len, args.num_snapshots)
                for kind in KINDS
            }
            percent = {kind: round(100 * share, 1) for kind, share in shares.items()}
            found.setdefault(path.name, {})[str(interval)] = percent
            shown = ", ".join(f"{kind} {share} %" for kind, share in percent.items())
            print(f"{path.name} interval {interval}: {shown}", flush=True)
    if args.json:
        numbers = {"output_len": args.output_len, "num_snapshots": args.num_snapshots}
        record = {**numbers, "percent_by_interval": found}
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
