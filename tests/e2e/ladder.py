"""The ladder's rungs: what varies, the pairwise cover of it, and how one rung is run.

Every rung must emit exactly the tokens of transformers' greedy generate, in fp32.
"""

from __future__ import annotations

import fcntl
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from paceline import LLM, SamplingParams
from tests.block_heads import random_block, save_block, train_block
from tests.eagle import PlainHead, random_head, save_head, train
from tests.eagle3 import random_eagle3, save_eagle3
from tests.mtp import random_mtp, save_mtp
from tests.one_pass_heads import PlainPard, trained_peagle
from tests.tiny import FAMILIES, VOCAB, greedy_reference, make_tiny, save_noisy_draft

AXES: dict[str, tuple[Any, ...]] = {
    "family": FAMILIES,
    "run_ahead": (0, 1, 2),
    "drafter": ("none", "ngram", "draft_model", "eagle", "eagle3", "mtp"),
    "k": (1, 2, 3, 4, 5, 6, 7),
    "request_k": ("all", "mixed"),  # mixed: some requests ask for 0 or fewer drafts
    "chunk": (2048, 37, 16),
    "prefix_cache": (True, False),
    "pool": ("roomy", "tight"),  # tight: preemption is forced
    "block_size": (16, 4),
}

# Kinds of block drafters, and the methods that run them.
BLOCKS = {
    "dflash": "dflash",
    "dflash2": "dflash",
    "dspark": "dspark",
    "dspark-gated": "dspark",
    "peagle": "peagle",
    "pard": "pard",
}


@dataclass(frozen=True)
class Rung:
    family: str
    run_ahead: int
    drafter: str
    k: int
    request_k: str
    chunk: int
    prefix_cache: bool
    pool: str
    block_size: int
    device: str = "cpu"
    eager: bool = False  # on a GPU: no graphs

    def __str__(self) -> str:
        cache_name = "cache" if self.prefix_cache else "nocache"
        how = "" if self.device == "cpu" else ("-eager" if self.eager else "-graphs")
        return (
            f"{self.family}-depth{self.run_ahead}-{self.drafter}-k{self.k}-{self.request_k}"
            f"-chunk{self.chunk}-{cache_name}-{self.pool}-block{self.block_size}{how}"
        )


def pairwise(axes: dict[str, tuple[Any, ...]] = AXES) -> list[Rung]:
    """A small set in which every pair of values of two axes occurs: greedy, seeded."""
    names = list(axes)
    pairs = {
        (a, x, b, y) for a, b in itertools.combinations(names, 2) for x in axes[a] for y in axes[b]
    }
    rng = random.Random(8)
    rungs: list[Rung] = []
    while pairs:
        candidates = [{n: rng.choice(axes[n]) for n in names} for _ in range(60)]
        best = max(candidates, key=lambda c: len(_covered(c, names) & pairs))
        gained = _covered(best, names) & pairs
        if not gained:
            a, x, b, y = sorted(pairs, key=str)[0]
            best = {**best, a: x, b: y}
            gained = _covered(best, names) & pairs
        pairs -= gained
        rungs.append(Rung(**best))
    return rungs


def each_value(rungs: Sequence[Rung]) -> list[Rung]:
    """A few of them in which every value of every axis occurs: these are in `make test`."""

    def values(rung: Rung) -> set[tuple[str, Any]]:
        return {(name, getattr(rung, name)) for name in AXES}

    missing = {value for rung in rungs for value in values(rung)}
    chosen = []
    while missing:
        chosen.append(max(rungs, key=lambda rung: len(values(rung) & missing)))
        missing -= values(chosen[-1])
    return chosen


def each_drafter(rungs: Sequence[Rung]) -> list[Rung]:
    """The first of each."""
    return [*{rung.drafter: rung for rung in reversed(rungs)}.values()]


def product() -> list[Rung]:
    """Every rung of one family; K is walked for the drafters that draft."""
    rungs = []
    for values in itertools.product(*(AXES[n] for n in AXES if n != "family")):
        rung = Rung("llama", *values)
        if rung.drafter == "none" and (rung.k > 1 or rung.request_k == "mixed"):
            continue
        rungs.append(rung)
    return rungs


def _covered(values: dict[str, Any], names: list[str]) -> set[tuple[Any, ...]]:
    return {(a, values[a], b, values[b]) for a, b in itertools.combinations(names, 2)}


class Workshop:
    """Tiny checkpoints and their reference tokens, made once for all who share the folder."""

    max_tokens = 40
    open_llm: Callable[..., LLM] = LLM  # what runs a rung

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.target = cache(self._target)
        self.draft_folder = cache(self._draft_folder)
        self._made = cache(self._head)
        self.expected = cache(self._expected)
        self.block_head = cache(self._block_head)

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        """What the first of all processes made."""
        path = self._folder / f"{name}.made"
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return torch.load(path, weights_only=False)
            made = make()
            torch.save(made, path)
            return made

    def _target(self, family: str) -> Any:
        # Seeds whose outputs end at different lengths, most of them long enough to preempt.
        seed = {"llama": 1, "qwen3": 3, "qwen3.5-moe": 1}.get(family, 0)
        # Not out of a file: a model that was unpickled does not hand out its hidden states.
        model = make_tiny(family, seed=seed)
        self._once(family, lambda: model.save_pretrained(self._folder / family))
        return model

    def target_folder(self, family: str) -> str:
        self.target(family)
        return str(self._folder / family)

    def _draft_folder(self, family: str) -> str:
        folder = self._folder / f"{family}-draft"
        target = self.target(family)
        self._once(folder.name, lambda: save_noisy_draft(folder, target, noise=0.06))
        return str(folder)

    def head(self, family: str, drafter: str = "eagle") -> PlainHead:
        """A head that has seen the expected outputs, but not for long."""
        return self._made(family, drafter)

    def _head(self, family: str, drafter: str) -> PlainHead:
        head, save = self._new_head(family, drafter)

        def make() -> list[torch.Tensor]:
            sequences = [[*p, *o] for p, o in zip(PROMPTS, self.expected(family), strict=True)]
            train(head, self.target(family), sequences)
            save()
            return head.learned()

        learned = self._once(f"{family}-{drafter}", make)
        with torch.no_grad():
            for weight, value in zip(head.learned(), learned, strict=True):
                weight.copy_(value)
        return head

    def _new_head(self, family: str, drafter: str) -> tuple[PlainHead, Callable[[], None]]:
        """One that knows nothing, and how it is saved."""
        target, folder = self.target(family), self._folder / f"{family}-{drafter}"
        # Published heads come as they do for llama; other forms are met as well.
        is_published = family == "llama"
        if drafter == "mtp":
            mtp, checkpoint = random_mtp(target), self.target_folder(family)
            return mtp, partial(save_mtp, folder, checkpoint, mtp, with_copies=is_published)
        if drafter == "eagle3":
            flags: dict[str, Any] = (
                {} if is_published else {"norm_before_residual": True, "norm_before_fc": True}
            )
            eagle3 = random_eagle3(target, **flags)
            form = "flat" if is_published else "nested"
            return eagle3, partial(save_eagle3, folder, eagle3, form=form)
        eagle, prefix = random_head(target), "" if is_published else "model."
        return eagle, partial(
            save_head, folder, eagle, prefix=prefix, as_safetensors=not is_published
        )

    def _block_head(self, family: str, kind: str) -> Any:
        """The same of a block drafter; every kind has `features` and `drafts`."""
        target, folder = self.target(family), self._folder / f"{family}-{kind}"

        def make() -> Any:
            if kind == "pard":
                head: Any = PlainPard(self.draft_folder(family))
                head.save(folder, "z-lab")
                return head
            sequences = [[*p, *o] for p, o in zip(PROMPTS, self.expected(family), strict=True)]
            if kind == "peagle":
                head = trained_peagle(target, sequences)
                head.save(folder, "z-lab")
                return head
            head = train_block(random_block(target, kind), target, sequences)
            save_block(folder, head)
            return head

        return self._once(f"{family}-{kind}", make)

    def head_folder(self, family: str, drafter: str = "eagle") -> str:
        """Where the head is; an MTP layer is in a checkpoint of the target."""
        make = self.block_head if drafter in BLOCKS else self.head
        make(family, drafter)
        return str(self._folder / f"{family}-{drafter}")

    def _expected(self, family: str) -> list[list[int]]:
        model = self.target(family)
        tokens: list[list[int]] = self._once(
            f"{family}-expected",
            lambda: [greedy_reference(model, p, self.max_tokens) for p in PROMPTS],
        )
        return tokens


def _prompts() -> list[list[int]]:
    rng = random.Random(7)
    shared = [rng.randrange(3, VOCAB) for _ in range(33)]
    phrase = [rng.randrange(3, VOCAB) for _ in range(5)]
    prompts = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (1, 2, 15, 16, 17, 48, 230)]
    prompts += [[*shared, rng.randrange(3, VOCAB)] for _ in range(2)]
    prompts += [shared[:32], shared[:32], phrase * 6]
    return prompts


PROMPTS = _prompts()


def options_of(rung: Rung, workshop: Workshop) -> dict[str, Any]:
    """What an LLM for this rung is given."""
    max_seqs = 6
    options: dict[str, Any] = {
        "model": workshop.target_folder(rung.family),
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "run_ahead": rung.run_ahead,
        "max_num_seqs": max_seqs,
        "max_num_batched_tokens": max(rung.chunk, max_seqs * (rung.k + 1)),
        "enable_prefix_caching": rung.prefix_cache,
        "block_size": rung.block_size,
        "device": rung.device,
        "enforce_eager": rung.eager,
        "cpu_threads": 1,
        "engine_in_process": True,
    }
    if rung.pool == "tight":
        # One full sequence fits and little more: running several means preempting.
        options["num_gpu_blocks_override"] = 256 // rung.block_size + 1
    if rung.drafter != "none":
        options["speculative_config"] = {
            "method": BLOCKS.get(rung.drafter, rung.drafter),
            "num_speculative_tokens": rung.k,
            "adaptive": False,
        }
    if rung.drafter == "ngram":
        options["speculative_config"]["prompt_lookup_min"] = 1
    if rung.drafter == "draft_model":
        options["speculative_config"]["model"] = workshop.draft_folder(rung.family)
    if rung.drafter in ("eagle", "eagle3", *BLOCKS):
        head = workshop.head_folder(rung.family, rung.drafter)
        options["speculative_config"]["model"] = head
    if rung.drafter == "mtp":
        options["model"] = workshop.head_folder(rung.family, "mtp")
    return options


def run_rung(rung: Rung, workshop: Workshop) -> tuple[list[list[int]], dict[str, int]]:
    """Tokens of every prompt under this rung, and what happened on the way."""
    with workshop.open_llm(**options_of(rung, workshop)) as llm:
        return run_prompts(rung, llm, workshop.max_tokens)


def run_prompts(
    rung: Rung, llm: LLM, max_tokens: int, which: Sequence[int] = range(len(PROMPTS))
) -> tuple[list[list[int]], dict[str, int]]:
    """Those prompts, under this rung's k by request."""
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            detokenize=False,
            num_speculative_tokens=_request_k(rung, i),
        )
        for i in which
    ]
    prompts = [{"prompt_token_ids": PROMPTS[i]} for i in which]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seen = {
        "preemptions": sum(o.metrics.num_preemptions for o in outputs),
        "accepted": sum(o.metrics.num_accepted_tokens for o in outputs),
        "drafted": sum(o.metrics.num_draft_tokens for o in outputs),
        "cached": sum(o.metrics.num_cached_tokens for o in outputs),
    }
    return [list(o.outputs[0].token_ids) for o in outputs], seen


def _request_k(rung: Rung, index: int) -> int | None:
    if rung.drafter == "none" or rung.request_k == "all":
        return None
    return min(index % 4, rung.k)
