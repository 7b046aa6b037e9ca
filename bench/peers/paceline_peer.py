"""Paceline through its public offline API, with the clocks of `RequestOutput.metrics`.

As for a user, the front runs in this process and the engine in the process that `LLM` starts.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import paceline
from bench.peers.job import About, Job, Timing
from paceline import LLM, SamplingParams
from paceline.config import EngineConfig
from paceline.engine.client import EngineClient


class PacelinePeer:
    """One `LLM`. The prefix cache is emptied before each job, so that rounds are independent."""

    def __init__(self, **options: Any) -> None:
        config = EngineConfig.from_keywords(**options)
        client = EngineClient.start(config)
        self._detokenize = not config.model.skip_tokenizer_init
        self._llm = LLM.from_client(client)
        details: dict[str, object] = {
            "version": paceline.__version__,
            "config": config.flat(),
            "runner": asdict(client.info),
        }
        self.about = About(f"Paceline {paceline.__version__}, {client.info.dtype}", details)

    def run(self, job: Job) -> Timing:
        self._llm.reset_prefix_cache()
        prompts = [{"prompt_token_ids": list(ids)} for ids in job.prompts]
        params = [
            SamplingParams(
                temperature=job.temperature,
                top_p=job.top_p,
                seed=job.seed,
                max_tokens=limit,
                ignore_eos=job.ignore_eos,
                detokenize=self._detokenize,
            )
            for limit in job.max_tokens
        ]
        start_s = time.monotonic()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        metrics = [output.metrics for output in outputs]
        return Timing(
            first_token_s=[(m.first_token_time or 0.0) - start_s for m in metrics],
            last_token_s=[(m.finished_time or 0.0) - start_s for m in metrics],
            token_ids=[list(output.outputs[0].token_ids) for output in outputs],
            num_steps=sum(m.num_steps for m in metrics),
            num_draft_tokens=sum(m.num_draft_tokens for m in metrics),
            num_accepted_tokens=sum(m.num_accepted_tokens for m in metrics),
            num_cached_tokens=sum(m.num_cached_tokens for m in metrics),
        )

    def close(self) -> None:
        self._llm.close()
