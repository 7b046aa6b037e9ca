"""transformers `generate`: float32, eager, KV cache, one left-padded batch per job. Greedy only.

Loads the same checkpoint with transformers' own reader; shares no code with Paceline.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.peers.job import About, Job, Timing

_PAD = 0  # never read: masked on the left


class TransformersPeer:
    """One model in memory; `generate` as a user would call it."""

    def __init__(self, *, folder: str, gguf: str | None, threads: int) -> None:
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        source: dict[str, Any] = {} if gguf is None else {"gguf_file": Path(gguf).name}
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, **source
        ).eval()
        # What a checkpoint would add of its own (penalties, sampling) has no place here.
        self._model.generation_config = transformers.GenerationConfig(do_sample=False)
        self._eos = self._model.config.eos_token_id
        attention = str(self._model.config._attn_implementation)
        self.about = About(
            f"transformers {transformers.__version__}, float32, {attention} attention",
            {
                "version": transformers.__version__,
                "torch": torch.__version__,
                "threads": threads,
                "attention": attention,
            },
        )

    def run(self, job: Job) -> Timing:
        if job.temperature:
            raise ValueError("the transformers contender is for greedy jobs")
        if len(set(job.max_tokens)) != 1:
            raise ValueError("generate() makes the same number of tokens for the whole batch")
        width = max(map(len, job.prompts))
        ids = torch.full((len(job.prompts), width), _PAD)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(job.prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        stamps = _Stamps()
        start_s = time.perf_counter()
        out = self._model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=job.max_tokens[0],
            eos_token_id=None if job.ignore_eos else self._eos,
            pad_token_id=_PAD,
            stopping_criteria=transformers.StoppingCriteriaList([stamps]),
            use_cache=True,
        )
        count = len(job.prompts)
        return Timing(
            first_token_s=[stamps.times[0] - start_s] * count,
            last_token_s=[stamps.times[-1] - start_s] * count,
            token_ids=out[:, width:].tolist(),
            num_steps=len(stamps.times),
        )

    def close(self) -> None:
        del self._model


class _Stamps(transformers.StoppingCriteria):  # type: ignore[misc]
    """Looks at the clock after each token and never stops anything."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)
