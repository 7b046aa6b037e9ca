"""Models of experts on real ranks: spread or sliced, they give one rank's logits and read a part.

Replicas have unequal rows and fall idle; one of them never has any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.checkpoint.source import locate
from paceline.errors import ConfigError
from paceline.layers.moe import MoeMlp, ReducedExperts, SpreadExperts, StackedExperts
from paceline.models.decoder import Decoder
from paceline.models.families import read_spec
from paceline.models.layout import lay_out
from paceline.models.loading import expected_shapes, load_decoder
from paceline.models.reader import WeightFormats
from paceline.models.sharding import Cut
from paceline.models.spec import ModelSpec
from paceline.models.weight_source import DummyWeights, Stored, WeightSource
from paceline.models.weights import open_weights
from paceline.parallel.collectives import SOLO, Group
from paceline.parallel.contract import Contract
from paceline.parallel.expert_exchange import GatherScatter
from paceline.parallel.groups import ALONE, Groups
from paceline.parallel.placement import Layout
from paceline.state.pages import Pages
from paceline.state.slots import Slots
from tests.models.test_decoder import CPU, EXACT
from tests.models.test_moe import FIXED
from tests.models.test_moe import LAYOUTS as STORED
from tests.parallel.ranks import open_checked, run_ranks
from tests.recurrent import storage_of, with_rows
from tests.tiers import first_or_more
from tests.tiny import VOCAB, save_tiny

NUM_RANKS = 4
FAMILIES = ("mixtral", "qwen3-moe", "deepseek-v3", "glm4-moe-lite", "qwen3.5-moe")
# Key heads that four ranks can cut.
CHANGES = {"qwen3.5-moe": {"linear_num_key_heads": 4, "linear_num_value_heads": 8}}
LAYOUTS = {
    "dp 2 + ep": Layout(1, 2, True),
    "dp 4 + ep": Layout(1, 4, True),
    "tp 2 + ep": Layout(2, 1, True),
    "tp 2 x dp 2 + ep": Layout(2, 2, True),
    "tp 2": Layout(2, 1),
    "tp 4": Layout(4, 1),
}
FORMATS = {"separate": EXACT, "stacked": FIXED}
# Tokens of each replica, pass by pass.
COUNTS = ((9, 1, 3, 0, 1), (0, 5, 1, 0, 2), (2, 2, 2, 0, 2), (0, 0, 0, 0, 0))


class Case(NamedTuple):
    family: str
    layout: str
    formats: str = "separate"
    exchange: str = "allgather_reducescatter"
    draft_tp: int | None = None  # None: as the target
    is_dummy: bool = False


def cases() -> list[Case]:
    """Every family in every layout, and what else may differ where that is cheap."""
    hows = list(FORMATS)
    pairs = [(f, name) for f in range(len(FAMILIES)) for name in range(len(LAYOUTS))]
    names = list(LAYOUTS)
    every = [Case(FAMILIES[f], names[i], hows[(f + i) % 2]) for f, i in pairs]
    spread = [name for name, x in LAYOUTS.items() if x.spreads_experts]
    every += [Case("glm4-moe-lite", x, exchange="alltoall") for x in spread]
    every += [Case("mixtral", "tp 2 x dp 2 + ep", "stacked", "alltoall")]
    drafts = [("mixtral", "tp 2 + ep"), ("mixtral", "tp 4"), ("glm4-moe-lite", "tp 2")]
    every += [Case(*x, draft_tp=1) for x in (*drafts, ("glm4-moe-lite", "tp 2 x dp 2 + ep"))]
    return every + [Case("glm4-moe-lite", x, is_dummy=True) for x in ("tp 2 + ep", "tp 4")]


CASES = cases()
# Every family in two layouts, every layout, and each of what else may differ.
FIRST = [
    *(
        case
        for case in CASES[: len(FAMILIES) * len(LAYOUTS)]
        if (FAMILIES.index(case.family) + [*LAYOUTS].index(case.layout)) % 3 == 0
    ),
    Case("mixtral", "tp 2 x dp 2 + ep", "stacked", "alltoall"),
    Case("mixtral", "tp 2 + ep", draft_tp=1),
    Case("glm4-moe-lite", "tp 2", draft_tp=1),
    Case("glm4-moe-lite", "tp 4", is_dummy=True),
]


@dataclass(slots=True)
class Recording:
    """A source that remembers how many numbers of each tensor were asked for."""

    source: WeightSource
    reads: dict[str, int] = field(default_factory=dict)

    def names(self) -> set[str]:
        return self.source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(name)

    def load(self, name: str, cut: Cut | None = None) -> Tensor:
        value = self.source.load(name, cut)
        self.reads[name] = self.reads.get(name, 0) + value.numel()
        return value

    def blocks(self, name: str, cut: Cut | None = None) -> Stored | None:
        return self.source.blocks(name, cut)


class Outcome(NamedTuple):
    logits: Tensor
    reads: dict[str, int]
    kinds: set[str]
    records: list[str]


def build(case: Case, folder: Path, groups: Groups) -> tuple[Decoder, dict[str, int]]:
    files = locate(str(folder / case.family))
    spec, formats = read_spec(files.config), FORMATS[case.formats]
    if case.is_dummy:
        dummy = Recording(DummyWeights(expected_shapes(spec), 0, CPU))
        return load(spec, dummy, formats, groups), dummy.reads
    stored = open_weights(files)
    source = Recording(stored)
    try:
        return load(spec, source, formats, groups), source.reads
    finally:
        stored.close()


def load(spec: ModelSpec, source: Recording, formats: WeightFormats, groups: Groups) -> Decoder:
    return load_decoder(spec, source, formats, max_model_len=64, groups=groups)


def logits_of(model: Decoder, replica: int, num_replicas: int) -> Tensor:
    """Of all passes. Every rank runs all of them, with whatever rows there are."""
    pages, slots = Pages(8, 16, 2, 64, CPU), Slots(2, 64, 0, VOCAB, CPU)
    layers = storage_of(model.spec, slots, pages)
    pages.table_SP[1, :4] = torch.tensor([5, 2, 7, 0], dtype=torch.int32)
    random = torch.Generator().manual_seed(replica)
    slots.tokens_SL[1] = torch.randint(3, VOCAB, (64,), generator=random).int()
    out, start = [], 0
    for counts in zip(*COUNTS[:num_replicas], strict=True):
        count = counts[replica]
        slot_B, start_B, count_B = (np.array([x][:count], np.int64) for x in (1, start, count))
        inputs = lay_out(slots, pages, slot_B, start_B, count_B, model.spec.group_size)
        inputs = with_rows(inputs)
        inputs.num_rows = max(counts)
        out.append(model.vocab.gather(model.logits(model.forward(inputs, layers))))
        start += count
    return torch.cat(out)


def first_job(rank: int, folder: Path) -> dict[Case, Outcome]:
    return model_job(rank, folder, FIRST)


def model_job(rank: int, folder: Path, cases: Sequence[Case] = CASES) -> dict[Case, Outcome]:
    found: dict[Case, Outcome] = {}
    opened: dict[tuple[str, str], Groups] = {}
    for case in cases:
        layout = LAYOUTS[case.layout]
        if rank >= layout.num_ranks:
            continue
        key = case.layout, case.exchange
        if key not in opened:
            opened[key] = open_checked(rank, layout, folder / str(key), exchange=case.exchange)
        groups = opened[key] if case.draft_tp is None else opened[key].for_draft(case.draft_tp)
        model, reads = build(case, folder, groups)
        records = opened[key].tp.contract.records
        records.clear()
        replica = rank // layout.tensor_parallel
        logits = logits_of(model, replica, layout.data_parallel)
        blocks = [x.mlp for x in model.layers if isinstance(x.mlp, MoeMlp)]
        kinds = {type(x.experts).__name__ for x in blocks}
        found[case] = Outcome(logits, reads, kinds, list(records))
    return found


class Ran(NamedTuple):
    folder: Path
    ranks: list[dict[Case, Outcome]]

    @property
    def cases(self) -> Sequence[Case]:
        return [*self.ranks[0]]


@pytest.fixture(
    scope="module", params=first_or_more(["first_job", "model_job"], "first_job".__eq__)
)
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("ranks")
    for family in FAMILIES:
        save_tiny(folder / family, family, **CHANGES.get(family, {}))
    # One layer's experts one by one, the other's in one tensor.
    path = folder / "mixtral" / "model.safetensors"
    save_file(STORED["mixed"](load_file(path)), path, metadata={"format": "pt"})
    job = f"tests.models.test_expert_parallel:{request.param}"
    return Ran(folder, run_ranks(job, NUM_RANKS, folder))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_and_greedy_tokens_equal_those_of_one_rank(ran: Ran, family: str) -> None:
    for case in (x for x in ran.cases if x.family == family):
        layout = LAYOUTS[case.layout]
        model, _ = build(case, ran.folder, ALONE)
        found = [ran.ranks[r][case].logits for r in range(layout.num_ranks)]
        for rank, logits in enumerate(found):
            replica = rank // layout.tensor_parallel
            wanted = logits_of(model, replica, layout.data_parallel)
            assert len(wanted) == sum(COUNTS[replica])
            torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=5e-5, msg=f"{case} {rank}")
            assert torch.equal(logits.argmax(1), wanted.argmax(1)), f"{case} {rank}"
            first = found[replica * layout.tensor_parallel]
            assert torch.equal(logits, first), f"bits in a replica: {case} {rank}"


def test_every_rank_of_a_layout_calls_the_same_collectives(ran: Ran) -> None:
    """Idle or not: pass 4 has no rows anywhere, and the last of four replicas never has any."""
    for case in ran.cases:
        layout = LAYOUTS[case.layout]
        outcomes = [ran.ranks[r][case] for r in range(layout.num_ranks)]
        for group in ("tp", "dp"):
            lists = [[x for x in o.records if f" over {group} " in x] for o in outcomes]
            size = layout.tensor_parallel
            peers = [lists[i : i + size] for i in range(0, len(lists), size)]
            if group == "dp":
                peers = [lists[place::size] for place in range(size)]
            for same in peers:
                assert same == [same[0]] * len(same), f"{case} {group}"
        assert outcomes[0].records or case.draft_tp == 1, case
        is_spread = layout.spreads_experts
        kinds = {"SpreadExperts" if is_spread else "ReducedExperts"}
        if not is_spread and case.draft_tp == 1:
            kinds = {"SeparateExperts"}
            assert not outcomes[0].records, "a draft that is whole on each rank needs no collective"
        assert {k for o in outcomes for k in o.kinds} == kinds, case


def test_a_rank_reads_its_own_experts_or_its_slices_and_nothing_else(ran: Ran) -> None:
    for case in ran.cases:
        layout = LAYOUTS[case.layout]
        _, whole = build(case, ran.folder, ALONE)
        experts = [n for n in whole if ".experts." in n]
        assert experts
        outcomes = [ran.ranks[r][case] for r in range(layout.num_ranks)]
        is_whole = not layout.spreads_experts and case.draft_tp == 1
        for name in experts:
            reads = [o.reads.get(name, 0) for o in outcomes]
            if is_whole:
                assert reads == [whole[name]] * layout.num_ranks, f"{case} {name}"
                continue
            assert sum(reads) == whole[name], f"{case} {name}: once by all ranks together"
            if not layout.spreads_experts:
                assert len(set(reads)) == 1, f"{case} {name}"
        for name in (n for n in whole if "shared_experts" in n):
            share = whole[name] // (case.draft_tp or layout.tensor_parallel)
            assert [o.reads[name] for o in outcomes] == [share] * layout.num_ranks, name
        for name in (n for n in whole if n.endswith(("gate.weight", "correction_bias"))):
            assert [o.reads[name] for o in outcomes] == [whole[name]] * layout.num_ranks, name


# ---- without ranks


def member(name: str, size: int, rank: int) -> Group:
    return Group(name, range(size), rank, Contract(), None)


def spread(tp: int, dp: int, rank: int) -> Groups:
    groups = member("tp", tp, rank % tp), member("dp", dp, rank // tp)
    return Groups(*groups, GatherScatter(*groups))


def test_more_ranks_than_experts_are_refused_while_loading(tmp_path: Path) -> None:
    save_tiny(tmp_path / "mixtral", "mixtral")
    with pytest.raises(ConfigError, match=r"5 experts cannot be spread over 6 ranks"):
        build(Case("mixtral", "dp 2 + ep"), tmp_path, spread(1, 6, 0))


@pytest.mark.trap("L-11")
@pytest.mark.parametrize("formats", FORMATS)
def test_experts_of_a_draft_at_tp_1_are_spread_and_its_shared_expert_is_whole(
    tmp_path: Path, formats: str
) -> None:
    family = "glm4-moe-lite"
    save_tiny(tmp_path / family, family)
    case, groups = Case(family, "", formats), spread(2, 2, 3)
    for size, is_part in ((2, True), (1, False)):
        model, _ = build(case, tmp_path, groups.for_draft(size))
        block = model.layers[1].mlp
        assert isinstance(block, MoeMlp)
        assert isinstance(block.experts, SpreadExperts)
        assert block.experts.has_shared_part == is_part
        assert block.shared is not None
        assert block.shared.nbytes == 3 * 32 * (2 * 16 // size) * 4
        assert block.experts.inner.nbytes == 2 * 3 * 32 * 16 * 4, "2 of 8 experts"
    assert groups.for_draft(1).tp is SOLO


@pytest.mark.parametrize("is_spread", [True, False], ids=["spread", "sliced"])
def test_sums_of_ranks_are_fp32_until_they_are_added(
    tmp_path: Path, is_spread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a rank computes in a half type is rounded once, behind the sum."""
    save_tiny(tmp_path / "mixtral", "mixtral")
    groups = spread(1, 2, 0) if is_spread else Groups(member("tp", 2, 1), SOLO)
    monkeypatch.setattr(Group, "is_active", True)
    model, _ = build(Case("mixtral", "", "stacked"), tmp_path, groups)
    block = model.layers[0].mlp
    assert isinstance(block, MoeMlp)
    assert isinstance(block.experts, SpreadExperts if is_spread else ReducedExperts)
    inner = block.experts.inner
    assert isinstance(inner, StackedExperts)
    assert inner.out_dtype == torch.float32
