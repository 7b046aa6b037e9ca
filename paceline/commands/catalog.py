"""All commands with their summaries and flags. No slow imports, so that `--help` is fast.

The module with the name of a command implements it.
"""

from __future__ import annotations

import math
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.commands.arguments import (
    add_dataclass_arguments,
    add_engine_arguments,
    add_sampling_arguments,
    engine_config,
    one_of,
)
from paceline.server.options import ServerOptions


def _loading(args: Namespace) -> str:
    from paceline.checkpoint.default_model import NAME

    config = engine_config(args)
    device = config.device.device
    return f"loading {config.model.model or NAME}" + (f" on {device}" if device != "auto" else "")


@dataclass(frozen=True)
class Command:
    """One command. `subcommands` are its second level, as in `paceline bench latency`.

    `start_message` is printed before slow imports. It raises ConfigError for wrong values.
    """

    summary: str
    add_arguments: Callable[[ArgumentParser], None] = lambda parser: None
    usage: str = "[MODEL] [options]"
    start_message: Callable[[Namespace], str] | None = _loading
    subcommands: tuple[tuple[str, Command], ...] = ()


def _serve(parser: ArgumentParser) -> None:
    add_dataclass_arguments(parser, "server", ServerOptions)
    add_engine_arguments(parser)


def _generate(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("prompts")
    _text(group, "--prompt", "TEXT", "one prompt, instead of a file of them")
    _text(group, "--input", "FILE", "one prompt per line, or JSONL [stdin]")
    _text(group, "--output", "FILE", "file for the answers, as JSONL [stdout]")
    group.add_argument(
        "--chat", action="store_true", help="apply the chat template: each line is a user message"
    )
    add_sampling_arguments(parser)
    add_engine_arguments(parser, shown=False)


def _chat(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("conversation")
    _text(group, "--system-prompt", "TEXT", "system message of the conversation")
    add_sampling_arguments(parser)
    add_engine_arguments(parser, shown=False)


def _bench_latency(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    _number(group, "--batch-size", 8, "requests in a batch")
    _number(group, "--num-iters", 10, "measured batches")
    _number(group, "--num-iters-warmup", 2, "warm-up batches before them")
    _lengths(group)
    _trace(group)
    add_engine_arguments(parser, shown=False)


def _bench_throughput(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    _number(group, "--num-prompts", 100, "number of requests")
    _lengths(group)
    _trace(group)
    add_engine_arguments(parser, shown=False)


def _bench_serve(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    _text(group, "--base-url", "URL", "URL of a running server [this command starts one]")
    _text(group, "--api-key", "TEXT", "API key of that server")
    group = parser.add_argument_group("load")
    _number(group, "--num-prompts", 100, "number of requests")
    _dataset(group)
    _output_json(group)
    _number(group, "--request-rate", math.inf, "requests per second; inf is all at once")
    _number(
        group, "--burstiness", 1.0, "1 is a Poisson process; lower is more bursty, higher more even"
    )
    _number(group, "--max-concurrency", None, "most requests in flight")
    add_engine_arguments(parser, shown=False)


def _bench_sweep(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("what is varied")
    add = group.add_argument
    text = "requests at once [1 2 4 8]"
    add("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8], metavar="N", help=text)
    text = "methods, or speculative configs as JSON or @FILE [none ngram]"
    add("--drafters", nargs="+", default=["none", "ngram"], metavar="TEXT", help=text)
    text = "K, the most drafts of a step; auto too [1 3 5]"
    add("--draft-tokens", nargs="+", default=["1", "3", "5"], metavar="N", help=text)
    group = parser.add_argument_group("load")
    _text(group, "--output-dir", "DIR", "where sweep.csv and sweep.svg are written [sweep]")
    _number(group, "--num-prompts", 32, "requests of a measurement, and at least 2 per slot")
    _dataset(group)
    add_engine_arguments(parser, shown=False)


def _dataset(group: Any) -> None:
    """vLLM's flags for data sets. Its names of one length by data set are not shown."""
    names = ("random", "sharegpt", "custom", "sonnet")
    metavar = "{" + ",".join(names) + "}"
    text = "format of the data set [by its content]"
    group.add_argument("--dataset-name", type=one_of(names), metavar=metavar, help=text)
    text = "its file (JSONL, JSON, CSV, text), or prompt_tokens=256,output_tokens=128 [random]"
    group.add_argument("--dataset", "--dataset-path", metavar="FILE", help=text)
    _number(group, "--input-len", None, "tokens in a random prompt [128; sonnet 550]")
    _number(group, "--output-len", None, "tokens in an answer [128, or what the data set says]")
    _number(group, "--prefix-len", None, "tokens that all prompts share [0; sonnet 200]")
    for kind in (
        "random-input",
        "sonnet-input",
        *(f"{n}-output" for n in names),
        "random-prefix",
        "sonnet-prefix",
    ):
        name = f"{kind.partition('-')[2]}_len"
        group.add_argument(f"--{kind}-len", dest=name, type=int, help=SUPPRESS)
    _number(group, "--temperature", 0.0, "0 is greedy")
    text = "send each prompt as a user message, with the chat template"
    group.add_argument("--chat", action="store_true", help=text)
    text = "generate past the end-of-sequence token"
    group.add_argument("--ignore-eos", action="store_true", help=text)


def _verify(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("proof")
    _text(group, "--prompts", "FILE", "one prompt per line, or JSONL [built-in prompts]")
    _number(group, "--max-tokens", 48, "tokens in an answer")
    _number(group, "--concurrency", 8, "requests that run together")
    _number(group, "--draws", 1000, "draws for the chi-square test")
    text = "largest share of device idle time; default: 0.05 on a GPU, not judged on a CPU"
    group.add_argument("--max-bubble", type=float, metavar="X", help=text)
    _text(group, "--output", "DIR", "folder for verify.html and verify.json")
    group = parser.add_argument_group("a running server")
    _text(group, "--url", "URL", "ask this server instead of starting engines")
    _text(group, "--api-key", "TEXT", "API key of that server")
    text = "exit 0 if nothing failed, even if some promises could not be checked"
    group.add_argument("--partial", action="store_true", help=text)
    add_engine_arguments(parser, shown=False)


def _convert(parser: ArgumentParser) -> None:
    parser.add_argument("gguf", metavar="GGUF", help="the file to read")
    parser.add_argument("folder", metavar="DIR", help="where the Hugging Face folder is written")
    dtypes = ("float16", "bfloat16", "float32")
    metavar = "{" + ",".join(dtypes) + "}"
    text = "precision of the written weights [float16]"
    parser.add_argument(
        "--dtype", type=one_of(dtypes), default="float16", metavar=metavar, help=text
    )


def _doctor(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def _text(group: Any, flag: str, metavar: str, text: str) -> None:
    group.add_argument(flag, metavar=metavar, help=text)


def _number(group: Any, flag: str, default: float | None, text: str) -> None:
    kind = float if isinstance(default, float) else int
    if default is not None:
        text = f"{text} [{default}]"
    metavar = "X" if kind is float else "N"
    group.add_argument(flag, type=kind, default=default, metavar=metavar, help=text)


def _lengths(group: Any) -> None:
    _number(group, "--input-len", 128, "tokens in a random prompt")
    _number(group, "--output-len", 128, "tokens in an answer")
    _output_json(group)


def _output_json(group: Any) -> None:
    _text(group, "--output-json", "FILE", "file for the result; - is stdout")


def _trace(group: Any) -> None:
    _text(group, "--trace", "FILE", "write a timeline of host and device, for ui.perfetto.dev")


_BENCHES = (
    ("latency", Command("Latency of a batch, measured several times.", _bench_latency)),
    ("throughput", Command("Tokens per second with all requests at once.", _bench_throughput)),
    (
        "serve",
        Command(
            "Rates and latencies of a server under load.",
            _bench_serve,
            start_message=lambda args: f"measuring {args.base_url or 'a server that it starts'}",
        ),
    ),
    (
        "sweep",
        Command(
            "Speed by number of requests, K and drafter, as CSV and SVG. Goes on where it stopped.",
            _bench_sweep,
            start_message=lambda args: f"sweeping {args.model or 'the default model'}",
        ),
    ),
)

COMMANDS = {
    "serve": Command("Serve a model over HTTP, as OpenAI's API.", _serve),
    "generate": Command(
        "Answer a file of prompts; writes JSONL in the order of the input.",
        _generate,
        usage="[MODEL] [--prompt TEXT | --input FILE] [--output FILE] [options]",
    ),
    "chat": Command("Talk to a model in the terminal.", _chat),
    "bench": Command(
        "Measure latency, throughput, a server under load, or the best drafter.",
        usage="{latency,throughput,serve,sweep} [MODEL] [options]",
        subcommands=_BENCHES,
    ),
    "verify": Command(
        "Prove that drafts, caches and batches change no token, on your model and prompts.",
        _verify,
        start_message=lambda args: f"verifying {args.url}" if args.url else _loading(args),
    ),
    "convert": Command(
        "Write a GGUF file as a folder of safetensors.",
        _convert,
        usage="GGUF DIR [options]",
        start_message=lambda args: f"converting {args.gguf}",
    ),
    "doctor": Command(
        "Show what this machine has, what Paceline would use, and what is missing.",
        _doctor,
        usage="[--json]",
        start_message=None,  # its report begins at once
    ),
}
