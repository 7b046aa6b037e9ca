"""All measurements of half an hour with a GPU, as five calls of less than ten minutes.

usage: python -m bench.gpu_session list                     what each call runs and decides
       python -m bench.gpu_session prepare                  .before/: the commit to compare with
       python -m bench.gpu_session CALL [--out DIR]         DIR/CALL.json and DIR/CALL.log
       python -m bench.gpu_session unpack FILE [--out DIR]  single records out of a CALL.json

A machine without a network needs nothing but this tree (and .before/, which git ignores). Steps run
one after another, each in a process; one that fails or has no time left is listed, and the next one
runs. --tiny rehearses a call on any machine: small models, no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Any

from bench.bench_engines import CASES

ROOT = Path(__file__).resolve().parents[1]
BEFORE = "b3ebc6f"  # the last commit whose figures were recorded on an H200
BEFORE_FOLDER = ".before"
LIMIT_S = 560.0  # of one call
SHOWN_LINES = 14  # of a step's output, again at the end
_INTERPRETED = "import tests.kernels.mend_interpreter; from bench.{} import main; exit(main({}))"
_ON_CPU = ("--set", 'dtype="float32"', "--set", 'device="cpu"')


@dataclass(frozen=True)
class Step:
    """One process. `{json}` in its arguments is a file that it writes."""

    name: str
    arguments: tuple[str, ...]  # of python
    seconds: int  # expected on an H200, start-up and compilation included
    decides: str
    tiny: tuple[str, ...] = ()  # arguments of a rehearsal; none: left out
    folder: str = "."
    needs: str = ""  # a module or a case of bench_engines that may not be there

    def is_possible(self) -> bool:
        is_case = self.needs in CASES
        is_module = not self.needs.count("-") and bool(self.needs) and _has_module(self.needs)
        return (not self.needs or is_case or is_module) and (ROOT / self.folder).is_dir()


def _has_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def engines(name: str, case: str, seconds: int, decides: str, *more: str, **rest: Any) -> Step:
    arguments = ("-m", "bench.bench_engines", "paceline", case, *more, "--json", "{json}")
    return Step(name, arguments, seconds, decides, **rest)


def interpreted(module: str) -> tuple[str, ...]:
    """A rehearsal in Triton's interpreter."""
    return ("-c", _INTERPRETED.format(module, '["--tiny"]'))


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_PAIRS = ("sm", "sm-eagle", "l8-eagle", "glm-mtp")
_TINY = (*words("-m bench.bench_engines paceline tiny --bs 1 --json {json}"), *_ON_CPU)
# Of all options that the repository gives pytest, none is wanted on a machine with few plugins.
_CHUNKS = words("-m pytest -q -p no:cacheprovider -o addopts= tests/gpu/test_delta_chunks_gpu.py")
CALLS: dict[str, tuple[Step, ...]] = {
    "tests": (
        Step(
            "delta-chunks",
            (*_CHUNKS, "-rxXf"),
            70,
            "PASS_WARPS and PREPARE_WARPS: with which numbers every case passes; then USES_CHUNKS",
            tiny=(*_CHUNKS, "--co"),
        ),
        Step(
            "gpu-tests",
            words("tests/run_gpu.py --report {json} --seconds 420"),
            320,
            "whether this commit is right on a GPU: tests/gpu_last_run.json",
            tiny=words("tests/run_gpu.py --report {json} --jobs 1 -k who_computes"),
        ),
    ),
    "before": tuple(
        engines(
            f"{'before' if folder != '.' else 'after'}-{case}",
            case,
            50,
            f"whether {case} is as fast as at {BEFORE} (at most 1.02 of its time)",
            *("--bs", "1,64"),
            folder=folder,
            tiny=_TINY if case == "sm" and folder == "." else (),
        )
        for case in _PAIRS
        for folder in (BEFORE_FOLDER, ".")
    ),
    "kernels": (
        Step(
            "long-contexts",
            words("-m bench.long_contexts_gpu --seconds 210 --json {json}"),
            240,
            "span_tiles, REACH and the tiles of latent attention: 75 % of 4.8 TB/s",
            tiny=interpreted("long_contexts_gpu"),
        ),
        Step(
            "experts",
            words("-m bench.experts_gpu --seconds 150 --json {json}"),
            190,
            "expert_tile: rows of a block by rows per expert; COUNTED of layout",
            tiny=interpreted("experts_gpu"),
        ),
        Step(
            "fp8-kernels",
            words("-m bench.fp8_gpu --seconds 60"),
            100,
            "tiles of e4m3 products",
            needs="bench.fp8_gpu",
        ),
    ),
    "engines": (
        engines(
            *("l8-long", "l8-long", 110, "contexts: 5.4, 6.3 and 8.6 ms per token"),
            *("--contexts", "1x32000,1x64000,8x16000"),
            tiny=(*_TINY, "--contexts", "1x300"),
        ),
        engines("q30", "q30", 75, "experts: 2.4 / 7.2 / 14.0 / 16.2 ms per token"),
        engines("glm-spread", "glm-spread", 60, "what spread experts cost GLM", "--bs", "1,64"),
        Step(
            "mixed-l8",
            words("-m bench.mixed_tpot l8 --rates 0,1,8,32 --json {json}"),
            75,
            "p99 at most 2.0 of the median while prompts arrive",
            tiny=(
                *words("-m bench.mixed_tpot tiny --running 2 --tokens 48 --rates 0,8 --prompt 40"),
                *("--json", "{json}", *_ON_CPU),
            ),
        ),
        engines("l8-fp8", "l8-fp8", 70, "fp8: at most 0.66 of bf16 at 1 and 8", needs="l8-fp8"),
        engines("q30-fp8", "q30-fp8", 80, "fp8: at most 0.75 of bf16 at 1", needs="q30-fp8"),
    ),
    "cases": (
        engines("q35", "q35", 60, "gated delta nets: decode", "--bs", "1,64"),
        engines("q35-mtp", "q35-mtp", 70, "gated delta nets: verify", "--bs", "1,64"),
        engines("q35-moe", "q35-moe", 80, "256 experts beside delta nets", "--bs", "1,64"),
        Step(
            "auto-k",
            words("-m bench.auto_k --device cuda --model l8 --head l8-eagle --rows 1,8,64")
            + words("--rounds 2 --output-json {json}"),
            200,
            'whether "auto" is at least 0.97 of no drafts and of the best fixed K',
            tiny=words("-m bench.auto_k --rows 1 --ks 0,1 --rounds 1 --output-json {json}"),
        ),
    ),
}


def run_call(name: str, out: Path, is_tiny: bool) -> int:
    """Everything that fits into the time of a call. 1 if a step failed or was left out."""
    end_s, found, texts = time.monotonic() + LIMIT_S, {}, {}
    out.mkdir(parents=True, exist_ok=True)

    def write(steps: dict[str, Any]) -> None:
        text = json.dumps({"call": name, "tiny": is_tiny, "steps": steps}, indent=1) + "\n"
        (out / f"{name}.json").write_text(text, encoding="utf-8")

    with (out / f"{name}.log").open("w", encoding="utf-8") as log:
        for step in CALLS[name]:
            left_s = end_s - time.monotonic()
            if (is_tiny and not step.tiny) or not step.is_possible():
                found[step.name] = {"skipped": "no rehearsal" if is_tiny else "not here"}
                continue
            if left_s < step.seconds * 0.6 and not is_tiny:
                found[step.name] = {"failed": f"only {left_s:.0f} s left"}
                continue
            found[step.name], texts[step.name] = run_step(step, is_tiny, left_s)
            log.write(f"==== {step.name}\n{texts[step.name]}\n")
            log.flush()
            write(found)  # a call may be cut off
    write(found)
    for line in summary(name, found, texts):
        print(line, flush=True)
    return int(any("failed" in x for x in found.values()))


def run_step(step: Step, is_tiny: bool, limit_s: float) -> tuple[dict[str, Any], str]:
    """What it says is printed at once, so that a call that is cut off has said it."""
    print(f"==== {step.name}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "record.json"
        given = step.tiny if is_tiny else step.arguments
        arguments = [str(path) if x == "{json}" else x for x in given]
        folder = ROOT / step.folder
        given_env = [f"PYTHONPATH={folder}", "PYTHONUNBUFFERED=1"]
        if is_tiny and "-c" in arguments:
            given_env.append("TRITON_INTERPRET=1")
        begin_s = time.monotonic()
        process = subprocess.Popen(
            ["env", *given_env, sys.executable, *arguments],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,  # an engine's processes end with it
        )
        lines, code = _listen(process, limit_s)
        record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    result: dict[str, Any] = {"seconds": round(time.monotonic() - begin_s, 1), "record": record}
    if code:
        result["failed"] = "no time" if code < 0 else f"exit status {code}"
    return result, "".join(lines)


def _listen(process: subprocess.Popen[str], limit_s: float) -> tuple[list[str], int]:
    """Its output, and its exit status; negative if it was ended."""
    timer, lines = Timer(limit_s, os.killpg, (process.pid, signal.SIGKILL)), []
    timer.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            print(line, end="", flush=True)
        return lines, process.wait()
    finally:
        timer.cancel()


def summary(name: str, found: dict[str, Any], texts: dict[str, str]) -> Iterator[str]:
    """Short, because only the end of a call's output may be seen."""
    for step in CALLS[name]:
        if step.name not in texts:
            continue
        lines = [x for x in texts[step.name].splitlines() if x.strip()]
        results = [x for x in lines if x.startswith("RESULT")] or lines[-SHOWN_LINES:]
        yield f"---- {step.name}"
        yield from (x[:220] for x in results)
    yield f"==== {name}"
    for step in CALLS[name]:
        state = found.get(step.name, {})
        about = state.get("failed") or state.get("skipped") or f"ok in {state['seconds']} s"
        yield f"{step.name:16} {about}"


def unpack(path: Path, out: Path) -> None:
    """One file per record, as bench/gpu_record.py writes them."""
    for name, state in json.loads(path.read_text(encoding="utf-8"))["steps"].items():
        if state.get("record") is not None and "failed" not in state:
            out.mkdir(parents=True, exist_ok=True)
            text = json.dumps(state["record"], indent=1) + "\n"
            (out / f"{name}.json").write_text(text, encoding="utf-8")
            print(out / f"{name}.json")


def prepare() -> None:
    """The older commit, without history."""
    command = ["git", "archive", BEFORE, "paceline", "bench", "pyproject.toml"]
    archive = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(ROOT / BEFORE_FOLDER, filter="data")
    print(f"{BEFORE_FOLDER}/ is {BEFORE}; take it along: git ignores it")


def show_list() -> None:
    for name, steps in CALLS.items():
        print(f"{name}: about {sum(x.seconds for x in steps if x.is_possible())} s")
        for step in steps:
            missing = "" if step.is_possible() else f" (not here: {step.needs or step.folder})"
            print(f"  {step.name:16} {step.seconds:>4} s  {step.decides}{missing}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("list", "prepare", "unpack", *CALLS))
    parser.add_argument("file", nargs="?", type=Path, help="of unpack")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "gpu_session")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal without a GPU")
    args = parser.parse_args(argv)
    match args.what:
        case "list":
            show_list()
        case "prepare":
            prepare()
        case "unpack":
            if args.file is None:
                parser.error("unpack needs the JSON file of a call")
            unpack(args.file, args.out)
        case name:
            return run_call(name, args.out, args.tiny)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
