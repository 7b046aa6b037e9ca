"""llama.cpp's server core through the `xllamacpp` wheel, in process, no HTTP. Greedy only.

Eight slots; prompts of a job are submitted together, one thread each. No prompt cache.
"""

from __future__ import annotations

import threading
import time
from importlib.metadata import version
from typing import Any

import xllamacpp

from bench.peers.job import About, Job, Timing

NUM_SLOTS = 8
_CONTEXT_PER_SLOT = 1024


class LlamaCppPeer:
    """One server. `drafter` is one of its n-gram methods, such as `ngram_simple`."""

    def __init__(
        self, *, gguf: str, threads: int, flash_attention: bool, drafter: str | None = None
    ) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = gguf
        params.n_parallel = NUM_SLOTS
        params.n_ctx = NUM_SLOTS * _CONTEXT_PER_SLOT
        params.cpuparams.n_threads = threads
        params.cpuparams_batch.n_threads = threads
        params.flash_attn_type = int(flash_attention)
        params.cache_ram_mib = 0
        params.verbosity = -1
        if drafter is not None:
            kind = f"COMMON_SPECULATIVE_TYPE_{drafter.upper()}"
            params.speculative.types = [getattr(xllamacpp.common_speculative_type, kind)]
        self._server = xllamacpp.Server(params)
        wheel = version("xllamacpp")
        attention = "flash attention" if flash_attention else "no flash attention"
        self.about = About(
            f"llama.cpp (xllamacpp {wheel}), {attention}" + (f", {drafter}" if drafter else ""),
            {
                "version": wheel,
                "build": dict(xllamacpp.BUILD_INFO),
                "system_info": xllamacpp.get_system_info().strip(),
                "threads": threads,
                "flash_attention": flash_attention,
                "slots": NUM_SLOTS,
                "drafter": drafter,
            },
        )

    def run(self, job: Job) -> Timing:
        if job.temperature:
            raise ValueError("the llama.cpp contender is for greedy jobs")
        answers: list[_Answer] = [_Answer() for _ in job.prompts]
        start_s = time.perf_counter()
        threads = [
            threading.Thread(target=self._complete, args=(job, i, answer))
            for i, answer in enumerate(answers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        replies = [answer.checked() for answer in answers]
        timings = [reply["timings"] for reply in replies]
        last_s = [answer.done_s - start_s for answer in answers]
        return Timing(
            # llama.cpp's clock from the first token to the last. The time to return the answer
            # counts before the first token, which favours its decode rate.
            first_token_s=[
                done - t["predicted_ms"] / 1e3 for done, t in zip(last_s, timings, strict=True)
            ],
            last_token_s=last_s,
            token_ids=[list(reply["__verbose"]["tokens"]) for reply in replies],
            num_draft_tokens=sum(t.get("draft_n", 0) for t in timings),
            num_accepted_tokens=sum(t.get("draft_n_accepted", 0) for t in timings),
        )

    def _complete(self, job: Job, index: int, answer: _Answer) -> None:
        request = {
            "prompt": list(job.prompts[index]),
            "n_predict": job.max_tokens[index],
            "ignore_eos": job.ignore_eos,
            "samplers": ["top_k"],  # the fastest sampler that takes the largest logit
            "top_k": 1,
            "cache_prompt": False,
            "return_tokens": True,
            "verbose": True,  # token ids are in the verbose part at the end of the reply
        }
        try:
            answer.reply = self._server.handle_completions(request)
        except Exception as error:
            answer.error = error
        answer.done_s = time.perf_counter()

    def close(self) -> None:
        del self._server


class _Answer:
    """The result of one thread."""

    def __init__(self) -> None:
        self.reply: Any = None
        self.error: Exception | None = None
        self.done_s = 0.0

    def checked(self) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        if not isinstance(self.reply, dict) or "timings" not in self.reply:
            raise RuntimeError(f"llama.cpp answered {self.reply!r:.300}")
        return self.reply
