"""One checkout of Paceline in a process of its own, driven through its public `LLM`.

Run as a file, because the checkout may be older than this file: it imports the standard library,
and paceline from the folder that it is given. It reads one JSON object per line and answers with
one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

# What a step costs outside of these is what `step-cpu` measures.
_MODEL_CALLS = ("forward_with_features", "logits")


def _commit(folder: Path) -> str:
    """Of a checkout; "" where there is no git."""
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


class ModelClock:
    """CPU seconds inside the target's forward and its lm_head, for an engine in this process."""

    def __init__(self) -> None:
        from paceline.models.decoder import Decoder

        self.cpu_s = 0.0
        for name in _MODEL_CALLS:
            setattr(Decoder, name, self._timed(getattr(Decoder, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **keywords: Any) -> Any:
            start_s = time.thread_time()
            try:
                return call(*args, **keywords)
            finally:
                self.cpu_s += time.thread_time() - start_s

        return timed


class CheckoutPeer:
    """One `LLM`. The prefix cache is emptied before each job, so that no round helps the next."""

    def __init__(self, folder: str, options: dict[str, Any]) -> None:
        sys.path.insert(0, folder)  # the engine's process inherits it
        import paceline

        home = Path(paceline.__file__).resolve().parents[1]
        if home != Path(folder).resolve():
            raise RuntimeError(f"paceline came from {home}, not from {folder}")
        # Only an engine in this process can be told apart from its model.
        self._clock = ModelClock() if options.get("engine_in_process") else None
        self._detokenize = not options.get("skip_tokenizer_init")
        self._params: type[Any] = paceline.SamplingParams
        self._llm: Any = paceline.LLM(**options)
        self.about = {"version": paceline.__version__, "commit": _commit(home)}

    def run(self, prompts: list[list[int]], params: list[dict[str, Any]]) -> dict[str, Any]:
        self._llm.reset_prefix_cache()
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        made = [self._params(**{"detokenize": self._detokenize, **values}) for values in params]
        start_s, start_cpu_s = time.monotonic(), self._outside_s()
        outputs = self._llm.generate(asked, made, use_tqdm=False)
        outside_s = self._outside_s() - start_cpu_s
        metrics = [output.metrics for output in outputs]
        return {
            "first_token_s": [m.first_token_time - start_s for m in metrics],
            "last_token_s": [m.finished_time - start_s for m in metrics],
            "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
            "num_steps": max(m.num_steps for m in metrics),
            "num_draft_tokens": sum(m.num_draft_tokens for m in metrics),
            "num_accepted_tokens": sum(m.num_accepted_tokens for m in metrics),
            "outside_s": outside_s,
        }

    def _outside_s(self) -> float:
        return 0.0 if self._clock is None else time.process_time() - self._clock.cpu_s

    def close(self) -> None:
        self._llm.close()


def work(requests: TextIO, answers: TextIO) -> None:
    """Build what the first line asks for, then one job per line until there are no more."""

    def answer(value: object) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        peer = CheckoutPeer(**json.loads(requests.readline()))
        answer(peer.about)
        for line in requests:
            answer(peer.run(**json.loads(line)))
        peer.close()
    except BaseException:
        answer({"failure": traceback.format_exc()})
        raise


if __name__ == "__main__":
    # Whatever prints must not meet the answers: they have a file descriptor of their own.
    own_output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    work(sys.stdin, own_output)
