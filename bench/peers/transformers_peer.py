"""transformers `generate`: float32, eager, KV cache, one left-padded batch per job. Greedy only.

Paceline reads only the weights of a GGUF; the model and the loop are those of transformers.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers

from bench.peers.job import About, Job, Timing
from paceline.checkpoint.source import locate
from paceline.models.weights import open_weights

_PAD = 0  # never read: masked on the left


class TransformersPeer:
    """One model in memory; `generate` as a user would call it."""

    def __init__(self, *, model: str, threads: int) -> None:
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self._model: Any = load_model(model).eval()
        # Ignore the sampling defaults of the checkpoint (penalties, temperature).
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


def load_model(model: str) -> Any:
    """transformers reads a folder. Paceline reads a GGUF, for which transformers would need another
    package (accelerate)."""
    files = locate(model)
    if files.gguf is None:
        return transformers.AutoModelForCausalLM.from_pretrained(files.folder, dtype=torch.float32)
    config = transformers.AutoConfig.for_model(**files.config)
    built = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = open_weights(files, "gguf")
    own = built.state_dict()
    found = {name: weights.load(name).float() for name in weights.names() if name in own}
    weights.close()
    missing = set(built.load_state_dict(found, strict=False).missing_keys)
    built.tie_weights()
    if missing - ({"lm_head.weight"} if config.tie_word_embeddings else set()):
        raise ValueError(f"{files.gguf} lacks {sorted(missing)}")
    return built


class _Stamps(transformers.StoppingCriteria):  # type: ignore[misc]
    """Records the time after each token; never stops."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)
