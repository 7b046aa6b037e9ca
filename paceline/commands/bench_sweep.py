"""`paceline bench sweep`: speed by number of requests, K and drafter, as CSV and SVG.

Each drafter and K is an engine, because what an engine loads and captures depends on them. Rows of
sweep.csv are kept: a sweep that was stopped goes on with those that are missing.
"""

from __future__ import annotations

import csv
import json
import os
import sys
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from paceline.commands.arguments import engine_keywords, flag
from paceline.commands.datasets import DEFAULT_OUTPUT_LEN, Dataset, Tokenize, open_dataset
from paceline.commands.prompts import PromptRecord
from paceline.commands.report import (
    acceptance,
    engine_rows,
    machine,
    render,
    short,
    token_latencies,
)
from paceline.commands.session import Answer, Session, open_session
from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.observe.plots import bars, grid, line_chart
from paceline.observe.progress import ProgressLine
from paceline.speculation import AUTO, SHORT_NAMES, parse_speculative_config

COLUMNS = (
    *("model", "device", "dtype", "drafter", "k", "concurrency", "num_prompts", "elapsed_s"),
    *("requests_per_s", "output_tokens_per_s", "ttft_ms_p50", "ttft_ms_p99"),
    *("tpot_ms_p50", "tpot_ms_p99", "acceptance_rate", "tokens_per_step"),
    "acceptance_by_position",  # shares with blanks between them
)
NONE = "none"
_WARM_UP_TOKENS = 8
_LOAD = (
    *("dataset", "dataset_name", "input_len", "output_len", "prefix_len", "num_prompts"),
    *("temperature", "chat", "ignore_eos"),
)
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Variant:
    """One engine of the sweep."""

    drafter: str
    k: str  # "0" without a drafter
    config: EngineConfig

    def key(self, concurrency: int) -> tuple[str, str, str]:
        return self.drafter, self.k, str(concurrency)


def run(args: Namespace) -> int:
    loads = sorted(set(args.concurrency))
    if loads[0] < 1:
        raise ConfigError(f"--concurrency {loads[0]} must be at least 1.")
    variants = list(all_variants(args))
    most = {"num_prompts": num_requests(args, loads[-1])}
    dataset = open_dataset(Namespace(**vars(args) | most))
    kept = Results(Path(args.output_dir or "sweep"), settings(args))
    missing = [(v, [n for n in loads if v.key(n) not in kept.rows]) for v in variants]
    total = sum(num_requests(args, n) for _, left in missing for n in left)
    progress = ProgressLine(total, "Sweep")
    for variant, left in missing:
        if left:
            with open_session(variant.config) as session:
                for row in measure_loads(session, args, variant, left, dataset, progress):
                    kept.add(row)
    if total:
        progress.close()
    rows = [kept.rows[v.key(n)] for v in variants for n in loads]
    kept.svg.write_text(picture(rows), encoding="utf-8")
    first = rows[0]
    about = engine_rows(first["model"], first["device"], first["dtype"], ", ".join(_labels(rows)))
    print(render([*about, *best_rows(rows), ("Files", f"{kept.csv}, {kept.svg}")]))
    return 0


def all_variants(args: Namespace) -> Iterator[Variant]:
    """Each drafter with each K. Wrong ones fail here, before anything is loaded."""
    keywords = engine_keywords(args)
    if given := [name for name in SHORT_NAMES if name in keywords] or args.speculative_config:
        name = flag(given[0]) if isinstance(given, list) else "--speculative-config"
        raise ConfigError(f"{name}: name the drafters of a sweep with --drafters.")
    seen = set()
    for text in args.drafters:
        spec = {} if text == NONE else parse_speculative_config(_as_config(text))
        name = drafter_name(spec)
        if name in seen:
            raise ConfigError(f"--drafters has {name} twice.")
        seen.add(name)
        keywords.pop("speculative_config", None)
        for k in dict.fromkeys(args.draft_tokens if spec else ["0"]):
            if spec:
                keywords["speculative_config"] = {**spec, "num_speculative_tokens": _k(k)}
            yield Variant(name, k, EngineConfig.from_keywords(**keywords))


def _as_config(text: str) -> str:
    """The method as JSON, or the text itself if it is a config or its file."""
    return text if text[:1] in "{@" or Path(text).is_file() else json.dumps({"method": text})


def _k(text: str) -> int | str:
    if text == AUTO:
        return text
    if not text.isdigit() or not int(text):
        raise ConfigError(f"--draft-tokens {text}: give numbers from 1 on, or auto.")
    return int(text)


def drafter_name(spec: Mapping[str, Any]) -> str:
    """`ngram`, `suffix+mtp`, `eagle3 HEAD`, `ngram prompt_lookup_max=8`: all of it but K."""
    method = spec.get("method", "")
    parts = [NONE if not spec else method if isinstance(method, str) else "+".join(method)]
    if "model" in spec:
        parts.append(str(spec["model"]))
    named = ("method", "model", "num_speculative_tokens")
    parts += [f"{key}={value}" for key, value in spec.items() if key not in named]
    return " ".join(filter(None, parts))


def settings(args: Namespace) -> dict[str, Any]:
    """What must be the same for all rows of a table."""
    keywords = engine_keywords(args)
    keywords.pop("speculative_config", None)
    load = {name: getattr(args, name) for name in _LOAD}
    where = {name: value for name, value in machine().items() if name != "time"}
    found = {"engine": {k: str(v) for k, v in keywords.items()}, "load": load, "machine": where}
    return dict(json.loads(json.dumps(found)))  # as the file will have it


def num_requests(args: Namespace, concurrency: int) -> int:
    return max(int(args.num_prompts), 2 * concurrency)


class Results:
    """The rows so far, in sweep.csv; sweep.json says what was asked and on which machine."""

    def __init__(self, folder: Path, asked: Mapping[str, Any]) -> None:
        self._folder, self._asked = folder, asked
        self.csv, self.svg = folder / "sweep.csv", folder / "sweep.svg"
        self.rows: dict[tuple[str, str, str], Row] = {}
        about = folder / "sweep.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not self.csv.exists():
                return
            before = json.loads(about.read_text(encoding="utf-8"))
            with self.csv.open(newline="", encoding="utf-8") as file:
                for row in csv.DictReader(file):
                    self.rows[row["drafter"], row["k"], row["concurrency"]] = row
        except OSError as error:
            raise ConfigError(f"--output-dir {folder}: {error.strerror}.") from None
        except (ValueError, KeyError):
            raise ConfigError(f"--output-dir {folder} holds no sweep; take another one.") from None
        if different := [key for key in asked if before.get(key) != asked[key]]:
            raise ConfigError(
                f"{folder} holds a sweep with another {' and '.join(different)}; take another "
                f"--output-dir, or what {about} says."
            )
        print(f"{self.csv} has {len(self.rows)} rows already.", file=sys.stderr)

    def add(self, row: Row) -> None:
        """Replaces the files as a whole, so that a killed sweep leaves no half row."""
        self.rows[row["drafter"], row["k"], row["concurrency"]] = row
        draft = self._folder / "sweep.tmp"
        draft.write_text(json.dumps(self._asked, indent=2) + "\n", encoding="utf-8")
        os.replace(draft, self._folder / "sweep.json")
        with draft.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(self.rows.values())
        os.replace(draft, self.csv)


def measure_loads(
    session: Session,
    args: Namespace,
    variant: Variant,
    loads: Sequence[int],
    dataset: Dataset,
    progress: ProgressLine,
) -> Iterator[Row]:
    """A row for each number of requests, after a warm-up with the largest."""
    client = session.client
    if client.num_slots < loads[-1]:
        raise ConfigError(f"--concurrency {loads[-1]} needs --max-num-seqs {loads[-1]} or more.")
    prompts = dataset(_tokenizer(session))
    common = {"temperature": args.temperature, "max_tokens": args.output_len or DEFAULT_OUTPUT_LEN}
    common |= {"ignore_eos": True} if args.ignore_eos else {}
    warm_up = {"max_tokens": _WARM_UP_TOKENS, "min_tokens": 0}
    for answer in [
        session.submit(p, session.params(common, p.sampling, warm_up)) for p in prompts[: loads[-1]]
    ]:
        session.wait([answer])
    for concurrency in loads:
        progress.label = f"Sweep: {_label(variant.drafter, variant.k)}, {concurrency} at once"
        client.reset_prefix_cache()  # the requests before had the same prompts
        before, started_s = _draft_counts(session), time.perf_counter()
        chosen = prompts[: num_requests(args, concurrency)]
        answers = keep_busy(session, chosen, common, concurrency, progress.update)
        elapsed_s = time.perf_counter() - started_s
        pairs = zip_longest(_draft_counts(session), before, fillvalue=0)
        drafts = [after - earlier for after, earlier in pairs]
        yield _row(session, variant, concurrency, answers, elapsed_s) | _draft_columns(drafts)


def _tokenizer(session: Session) -> Tokenize:
    """The model's; without one, random prompts are of all token ids."""
    client = session.client
    if client.front.tokenizer is None:
        return lambda text: list(range(client.info.vocab_size))
    return lambda text: client.tokenizer.encode(text, add_special_tokens=False)


def _draft_counts(session: Session) -> list[int]:
    """Rows with drafts, drafts, accepted drafts, and these by position, since the start."""
    stats = session.client.stats
    totals = (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens)
    return [*totals, *stats.accepted_per_position]


def _draft_columns(counts: Sequence[int]) -> dict[str, Any]:
    rows, drafts, accepted, *by_position = counts
    found = acceptance(rows, drafts, accepted, by_position)
    shares = found.get("acceptance_by_position", ())
    columns = {name: found.get(name, "") for name in ("acceptance_rate", "tokens_per_step")}
    return columns | {"acceptance_by_position": " ".join(map(str, shares))}


def keep_busy(
    session: Session,
    prompts: Sequence[PromptRecord],
    common: Mapping[str, Any],
    concurrency: int,
    on_done: Callable[[int, int], None],
) -> list[Answer]:
    """Answers all prompts, `concurrency` at once: the next begins when one ends."""
    waiting = deque(prompts)
    answers: list[Answer] = []
    running: list[Answer] = []
    while waiting or running:
        while waiting and len(running) < concurrency:
            prompt = waiting.popleft()
            running.append(session.submit(prompt, session.params(common, prompt.sampling)))
        session.client.pump(None)
        for answer in [answer for answer in running if answer.finished]:
            if answer.generation.error is not None:
                raise answer.generation.error
            running.remove(answer)
            answers.append(answer)
            on_done(1, answer.num_tokens)
    return answers


def _row(
    session: Session,
    variant: Variant,
    concurrency: int,
    answers: Sequence[Answer],
    elapsed_s: float,
) -> dict[str, Any]:
    info, times = session.client.info, token_latencies(answers)
    num_out = sum(answer.num_tokens for answer in answers)
    names = [(kind, p) for kind in ("ttft_ms", "tpot_ms") for p in ("p50", "p99")]
    return {
        "model": info.model_name,
        "device": info.device,
        "dtype": info.dtype,
        "drafter": variant.drafter,
        "k": variant.k,
        "concurrency": str(concurrency),
        "num_prompts": len(answers),
        "elapsed_s": round(elapsed_s, 4),
        "requests_per_s": round(len(answers) / elapsed_s, 4),
        "output_tokens_per_s": round(num_out / elapsed_s, 2),
        **{f"{kind}_{p}": times[kind].get(p, "") for kind, p in names},
    }


def picture(rows: Sequence[Row]) -> str:
    """TPOT and throughput against requests, acceptance by position, and the best K by load."""

    def lines(column: str) -> dict[str, list[tuple[float, float]]]:
        return {
            label: [
                (float(row["concurrency"]), float(row[column]))
                for row in rows
                if _label(row["drafter"], row["k"]) == label and row[column] not in (None, "")
            ]
            for label in _labels(rows)
        }

    def chart(title: str, unit: str, series: Mapping[str, Any]) -> str:
        return line_chart(title, "requests at once", unit, series, log_x=True)

    return grid(
        [
            chart("Time per output token, median", "ms", lines("tpot_ms_p50")),
            chart("Throughput", "output tokens per second", lines("output_tokens_per_s")),
            bars("Acceptance by position", "draft", "share of steps", by_position(rows)),
            bars("Best K (0: no drafts)", "requests at once", "K", best_k(rows)),
        ]
    )


def by_position(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Of each drafter with its largest K, at the smallest load."""
    found: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(row["drafter"] for row in rows):
        drafted = [row for row in rows if row["drafter"] == name and row["acceptance_by_position"]]
        if drafted:
            most = max(drafted, key=lambda row: (len(_shares(row)), -int(row["concurrency"])))
            shares = {str(i): share for i, share in enumerate(_shares(most), 1)}
            found[_label(name, most["k"])] = shares
    return found


def _shares(row: Row) -> list[float]:
    return [float(share) for share in row["acceptance_by_position"].split()]


def best_k(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """For each drafter and load, the fixed K with the most tokens per second."""
    fixed = [row for row in rows if row["k"] != AUTO]
    names = dict.fromkeys(row["drafter"] for row in fixed if row["drafter"] != NONE)
    loads = dict.fromkeys(row["concurrency"] for row in rows)
    found: dict[str, dict[str, float]] = {}
    for name in names:
        usable = [row for row in fixed if row["drafter"] in (name, NONE)]
        best = [_fastest(row for row in usable if row["concurrency"] == n) for n in loads]
        found[name] = {row["concurrency"]: float(row["k"]) for row in best}
    return found


def best_rows(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """`4 at once    ngram K=3: 812 tok/s, 4.1 ms per token, 1.42 x none`."""
    found = []
    for load in dict.fromkeys(row["concurrency"] for row in rows):
        here = [row for row in rows if row["concurrency"] == load]
        best = _fastest(here)
        speed = float(best["output_tokens_per_s"])
        parts = [f"{_label(best['drafter'], best['k'])}: {short(speed)} tok/s"]
        if best["tpot_ms_p50"] != "":
            parts.append(f"{short(float(best['tpot_ms_p50']))} ms per token")
        plain = [float(r["output_tokens_per_s"]) for r in here if r["drafter"] == NONE]
        if plain and plain[0] and best["drafter"] != NONE:
            parts.append(f"{short(speed / plain[0])} x none")
        found.append((f"Best with {load} at once", ", ".join(parts)))
    return found


def _fastest(rows: Iterable[Row]) -> Row:
    return max(rows, key=lambda row: float(row["output_tokens_per_s"]))


def _label(drafter: str, k: str) -> str:
    return drafter if drafter == NONE else f"{drafter} K={k}"


def _labels(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(_label(row["drafter"], row["k"]) for row in rows))
