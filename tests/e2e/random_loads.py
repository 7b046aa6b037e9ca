"""Random requests under random options, and their tokens one by one without drafts.

A load is numbers and names only, so that ranks can read it from a file. Whatever a load asks for,
each request must get the tokens that it gets alone, synchronously and without a drafter; an aborted
one gets their beginning.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from paceline.engine.engine import Engine
from paceline.request import StructuredOutputsParams
from tests.e2e.ladder import BLOCKS, PROMPTS, Workshop
from tests.e2e.loop import request, tiny_engine
from tests.engine.grammar_driving import grammars_of, tiny_tokenizer
from tests.tiny import HYBRID_FAMILIES, VOCAB

MAX_MODEL_LEN = 160
_TURNS = 30  # of the engine, in which requests arrive
_REGEX = r"(12|123|34)([0-9]{1,3}:)+5?"
_KINDS = [
    StructuredOutputsParams(regex=_REGEX),
    StructuredOutputsParams(choice=["10", "101", "110", "0"]),
    StructuredOutputsParams(regex=_REGEX, after_token_ids=[5]),
]
# Each with the chance that a request has it.
_PARAMS: list[tuple[float, str, tuple[Any, ...]]] = [
    (0.5, "temperature", (0.5, 0.8, 1.2)),
    (0.2, "top_p", (0.8,)),
    (0.2, "top_k", (5,)),
    (0.15, "min_p", (0.05,)),
    (0.2, "presence_penalty", (1.0,)),
    (0.2, "frequency_penalty", (0.5,)),
    (0.2, "repetition_penalty", (1.3,)),
    (0.15, "stop_token_ids", ([3, 40, 77], [9, 10, 11, 12])),
    (0.1, "logit_bias", ({7: 5.0}, {40: -100.0})),
    (0.3, "ignore_eos", (True,)),
    (0.1, "allowed_token_ids", (list(range(3, 60)),)),
    (0.15, "logprobs", (0, 3)),
    (0.05, "prompt_logprobs", (1,)),
]


@dataclass(frozen=True)
class Load:
    """`requests`: prompt, parameters, number of the grammar or None; by uid."""

    options: dict[str, Any]
    requests: list[tuple[list[int], dict[str, Any], int | None]]
    has_aborts: bool


def random_load(workshop: Workshop, rng: random.Random, families: tuple[str, ...]) -> Load:
    model, spec = _drafter(workshop, rng, rng.choice(families))
    max_seqs = rng.choice([1, 2, 4, 8])
    block_size = rng.choice([4, 16])
    options: dict[str, Any] = {
        "model": model,
        "speculative_config": spec,
        "run_ahead": rng.choice([0, 1, 1, 2]),
        "max_num_seqs": max_seqs,
        "max_num_batched_tokens": max(rng.choice([16, 37, 64, 512]), max_seqs * 9),
        "block_size": block_size,
        "enable_prefix_caching": rng.random() < 0.7,
        "max_model_len": MAX_MODEL_LEN,
    }
    if rng.random() < 0.3:  # little more than one sequence: others are preempted
        options["num_gpu_blocks_override"] = MAX_MODEL_LEN // block_size + 4
    most = spec.get("max_num_speculative_tokens", spec["num_speculative_tokens"])
    requests = [_request(rng, most) for _ in range(rng.randint(2, 8))]
    return Load(options, requests, has_aborts=rng.random() < 0.3)


def _drafter(workshop: Workshop, rng: random.Random, family: str) -> tuple[str, dict[str, Any]]:
    """A model and its speculative config."""
    lookup, k = rng.choice(["suffix", "ngram"]), rng.randint(1, 7)
    heads = ["draft_model", "eagle", "eagle3", "mtp", rng.choice(list(BLOCKS))]
    if family in HYBRID_FAMILIES:  # refused: a draft model with recurrent layers
        heads = ["eagle", "mtp", "dflash"]
    head = rng.choice([None, *heads])
    methods = [] if head is None else [BLOCKS.get(head, head)]
    if head is None or rng.random() < 0.4:
        methods.insert(0, lookup)
    spec: dict[str, Any] = {"method": methods if len(methods) > 1 else methods[0]}
    if head in BLOCKS:
        spec["num_speculative_tokens"] = min(k, 4)
    elif rng.random() < 0.3:
        spec |= {"num_speculative_tokens": "auto", "max_num_speculative_tokens": k}
    else:
        spec |= {"num_speculative_tokens": k, "adaptive": rng.random() < 0.5}
    if "suffix" in methods:
        spec["suffix_decoding_max_cached_requests"] = rng.choice([0, 20])
    if methods == ["ngram"]:
        spec["prompt_lookup_min"] = 1
    if head in ("draft_model", "eagle", "eagle3", "mtp") and rng.random() < 0.3:
        spec["draft_sample_method"] = "coupled"
    if head == "mtp":
        return workshop.head_folder(family, "mtp"), spec
    if head == "draft_model":
        spec["model"] = workshop.draft_folder(family)
    elif head is not None:
        spec["model"] = workshop.head_folder(family, head)
    return workshop.target_folder(family), spec


def _request(rng: random.Random, most: int) -> tuple[list[int], dict[str, Any], int | None]:
    prompt = rng.choice(PROMPTS) + rng.choice([[], rng.choice(PROMPTS)])
    prompt = prompt[: rng.randint(1, 90)]
    params = {name: rng.choice(values) for chance, name, values in _PARAMS if rng.random() < chance}
    params["max_tokens"] = rng.randint(1, 40)
    params["min_tokens"] = rng.choice([0, 0, 0, min(5, params["max_tokens"])])
    if rng.random() < 0.4:
        params["num_speculative_tokens"] = rng.randint(0, most)
    return prompt, params, rng.choice([None, None, None, 0, 1, 2])


def alone(workshop: Workshop, load: Load) -> dict[int, list[int]]:
    """What each request gets by itself. Drafts per request mean nothing then."""
    options = {"model": load.options["model"], "max_model_len": MAX_MODEL_LEN}
    options |= {"run_ahead": 0, "max_num_seqs": 1, "enable_prefix_caching": False}
    options |= {"host_draft_tokens": 0, "max_num_batched_tokens": 512}
    engine, runner, published = tiny_engine(workshop, None, **options)
    for uid, (prompt, params, kind) in enumerate(load.requests):
        plain = {k: v for k, v in params.items() if k != "num_speculative_tokens"}
        add(engine, uid, (prompt, plain, kind))
        while engine.turn():
            pass
    runner.close()
    return published


def serve(engine: Engine, load: Load, uids: list[int], rng: random.Random) -> set[int]:
    """Run these requests of a load. Returns those that were aborted.

    Ranks in lock step agree once per turn, so all have as many turns until no request is left.
    """
    arrivals = {uid: 0 if uid == uids[0] else rng.randrange(_TURNS) for uid in uids}
    added, aborted = list[int](), set[int]()
    turn, is_busy = 0, True
    while turn < _TURNS or is_busy:
        for uid in uids:
            if arrivals[uid] == turn:
                add(engine, uid, load.requests[uid])
                added.append(uid)
        is_busy = engine.turn()
        turn += 1
        if rng.random() < 0.02:
            engine.reset_prefix_cache(preempt_running=rng.random() < 0.5)
        if load.has_aborts and added and rng.random() < 0.05:
            uid = rng.choice(added)
            engine.abort(uid)
            aborted.add(uid)
    return aborted


def add(engine: Engine, uid: int, asked: tuple[list[int], dict[str, Any], int | None]) -> None:
    prompt, params, kind = asked
    constraint = None if kind is None else _grammars().constraint(_KINDS[kind])
    engine.add(request(uid, prompt, **params), constraint=constraint)


@cache
def _grammars() -> Any:
    return grammars_of(tiny_tokenizer(), vocab_size=VOCAB)


def check(
    load: Load, wanted: Mapping[int, list[int]], got: Mapping[int, list[int]], aborted: set[int]
) -> None:
    for uid, asked in enumerate(load.requests):
        tokens, right = got.get(uid, []), wanted[uid]
        right = right[: len(tokens)] if uid in aborted else right
        assert tokens == right, f"request {uid} of {load.options}: {asked}"
