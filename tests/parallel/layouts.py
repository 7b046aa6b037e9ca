"""The ladder under layouts of ranks: what varies, which families fit, and how a rung is run.

Tokens must equal transformers' greedy ones, whatever is spread over whom.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

from paceline import LLM
from paceline.config import EngineConfig
from paceline.engine.client import EngineClient
from paceline.engine.launch import DEFAULT_FACTORY
from tests.e2e.ladder import Rung, Workshop, options_of, run_prompts
from tests.parallel.factories import FIXED
from tests.tiny import FOUR_KEY_HEADS

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel_size": 2},
    "tp4": {"tensor_parallel_size": 4},
    "dp2": {"data_parallel_size": 2},
    "dp4": {"data_parallel_size": 4},
    "tp2-ep": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "dp2-ep": {"data_parallel_size": 2, "enable_expert_parallel": True},
    "dp4-ep": {"data_parallel_size": 4, "enable_expert_parallel": True},
    "tp2-dp2-ep": {
        "tensor_parallel_size": 2,
        "data_parallel_size": 2,
        "enable_expert_parallel": True,
    },
}
LONE = 4  # the prompt that is run once more, alone
DRAFTERS = ("none", "ngram", "draft_model", "eagle", "eagle3", "mtp")
FEW_FROM = 2112  # seeds from here on draw evenly: both exchanges in every layout that has one, ...


@dataclass(frozen=True)
class LayoutRung:
    """A rung of the ladder, and the ranks it runs on."""

    layout: str
    rung: Rung
    exchange: str = "allgather_reducescatter"
    draft_tp: int | None = None
    has_fixed_shapes: bool = False

    def __str__(self) -> str:
        shapes = "-fixed" if self.has_fixed_shapes else ""
        whole = "-draft_tp1" if self.draft_tp == 1 else ""
        exchange = "-alltoall" if self.exchange == "alltoall" else ""
        return f"{self.layout}{exchange}{whole}{shapes}-{self.rung}"


def hybrid_rungs() -> list[LayoutRung]:
    """Recurrent layers in every layout: cut by heads; with experts where they are spread; with the
    MTP head whole and cut."""
    rungs: list[LayoutRung] = []
    for i, layout in enumerate(LAYOUTS):
        families = {"tp4": FOUR_KEY_HEADS, "tp2": "qwen3.5", "dp2": "qwen3.5", "dp4": "qwen3-next"}
        drafter = "none" if layout in ("tp4", "dp4") else "mtp"
        rung = Rung(
            family=families.get(layout, "qwen3.5-moe"),
            run_ahead=(i + 1) % 3,
            drafter=drafter,
            k=(3, 2, 1)[i % 3],
            request_k="mixed" if i == 7 else "all",
            chunk=(16, 37)[i % 2],
            prefix_cache=True,
            pool=("roomy", "tight")[i % 2],
            block_size=(4, 16)[i % 2],
        )
        exchange = ("allgather_reducescatter", "alltoall")[i % 2]
        for draft_tp in (None, 1) if cuts_draft(layout, drafter) else (None,):
            rungs.append(LayoutRung(layout, rung, exchange, draft_tp, i % 4 > 1))
    return rungs


def families_for(layout: str, drafter: str) -> tuple[str, ...]:
    """Experts where they are spread; latent attention where a layer of the target drafts."""
    if drafter == "mtp":
        return ("deepseek-v3", "glm4-moe-lite")
    if layout.endswith("ep"):
        return ("mixtral", "qwen3-moe")
    return ("llama", "mixtral", "qwen2")


def rung_of(
    layout: str, drafter: str, depth: int, *, is_fixed: bool, is_whole: bool, seed: int
) -> LayoutRung:
    """The other axes are drawn, so that none of them goes with one of these."""
    draw = random.Random(seed).choice
    return LayoutRung(
        layout,
        Rung(
            family=draw(families_for(layout, drafter)),
            run_ahead=depth,
            drafter=drafter,
            k=draw((3, 1, 7, 2)),
            request_k=draw(("all", "mixed")),
            chunk=draw((16, 2048, 37)),
            prefix_cache=draw((True, True, False)),
            pool=draw(("roomy", "tight")),
            block_size=draw((16, 4)),
        ),
        exchange=draw(("allgather_reducescatter", "alltoall")),
        draft_tp=1 if is_whole else None,
        has_fixed_shapes=is_fixed,
    )


def cuts_draft(layout: str, drafter: str) -> bool:
    """Whether a draft may be whole on every rank or cut."""
    return "tensor_parallel_size" in LAYOUTS[layout] and drafter not in ("none", "ngram")


def few_rungs() -> list[LayoutRung]:
    """Every layout with two drafters; every drafter, depth and kind of step several times."""
    rungs: list[LayoutRung] = []
    for i, layout in enumerate(LAYOUTS):
        for j in range(2):
            drafter = DRAFTERS[(5 * i + 3 * j + 2) % len(DRAFTERS)]
            rungs.append(
                rung_of(
                    layout,
                    drafter,
                    depth=(i + j + 1) % 3,
                    is_fixed=(2 * i + j) % 4 == 1 or i == 4,
                    is_whole=i % 3 == 1 and cuts_draft(layout, drafter),
                    seed=FEW_FROM + len(rungs),
                )
            )
    return rungs


def block_rungs() -> list[LayoutRung]:
    """Block drafters: each under some layout, cut and whole, in both kinds of steps."""
    chosen = [
        ("dp2-ep", "dflash", False, False),
        ("tp2", "dflash", True, False),
        ("tp2", "dflash2", False, True),
        ("tp2-ep", "dspark", False, False),
        ("tp2", "dspark-gated", True, True),
        ("dp2-ep", "pard", False, False),
        ("dp2-ep", "peagle", True, False),
        ("tp2-dp2-ep", "dflash", False, False),
        ("dp2", "dspark", True, False),
        ("tp2", "pard", False, False),
    ]
    return [
        rung_of(layout, drafter, i % 3, is_fixed=is_fixed, is_whole=is_whole, seed=i)
        for i, (layout, drafter, is_fixed, is_whole) in enumerate(chosen)
    ]


def all_rungs() -> list[LayoutRung]:
    """Every layout with every drafter at every depth, in both kinds of steps; drafts both ways."""
    rungs: list[LayoutRung] = []
    for layout, drafter, depth, is_fixed, is_whole in itertools.product(
        LAYOUTS, DRAFTERS, (0, 1, 2), (False, True), (False, True)
    ):
        if is_whole and not cuts_draft(layout, drafter):
            continue
        rung = rung_of(
            layout, drafter, depth, is_fixed=is_fixed, is_whole=is_whole, seed=len(rungs)
        )
        rungs.append(rung)
    return rungs


def open_ranks(options: dict[str, Any], *, has_fixed_shapes: bool = False) -> LLM:
    """An LLM of several processes; every collective is compared before it begins."""
    checked = {"check_collectives": True, "stall_timeout": 60.0, **options}
    config = EngineConfig.from_keywords(**checked)
    factory = FIXED if has_fixed_shapes else DEFAULT_FACTORY
    return LLM.from_client(EngineClient.start(config, factory=factory))


def run_layout(what: LayoutRung, workshop: Workshop) -> tuple[list[list[int]], dict[str, int]]:
    options = options_of(what.rung, workshop)
    del options["engine_in_process"]
    options |= LAYOUTS[what.layout] | {"all2all_backend": what.exchange}
    if what.draft_tp is not None:
        options["speculative_config"]["draft_tensor_parallel_size"] = what.draft_tp

    with open_ranks(options, has_fixed_shapes=what.has_fixed_shapes) as llm:
        found = run_prompts(what.rung, llm, workshop.max_tokens)
        # All ranks sleep now; one request wakes them, and has them to itself.
        lone = run_prompts(what.rung, llm, workshop.max_tokens, [LONE])[0]
    assert lone == [workshop.expected(what.rung.family)[LONE]]
    return found
