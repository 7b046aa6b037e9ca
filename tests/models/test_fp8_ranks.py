"""fp8 on several ranks: scales are cut with their weights, and logits are those of a reference."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import Tensor

from paceline.checkpoint.source import locate
from paceline.kernels.fp8.reference import Fp8Weight, dequantised
from paceline.models.families import read_spec
from paceline.models.fp8_weights import Fp8Weights
from paceline.models.loading import load_decoder
from paceline.models.quantised_config import Fp8Scheme
from paceline.models.sharding import Cut
from paceline.models.weights import open_weights
from paceline.parallel.placement import Layout
from tests.fp8 import assert_within_fp8, fp8_reference, quantise_checkpoint, save_large
from tests.models.test_decoder import paged_logits
from tests.models.test_fp8 import IDS, formats
from tests.parallel.ranks import open_checked, run_ranks


@dataclass
class Stored:
    """Tensors in memory."""

    tensors: dict[str, Tensor]

    def names(self) -> set[str]:
        return set(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def load(self, name: str, cut: Cut | None = None) -> Tensor:
        return self.tensors[name] if cut is None else cut.of(self.tensors[name])

    def blocks(self, name: str, cut: Cut | None = None) -> None:
        return None

    def close(self) -> None: ...


def source_of(kind: str, *, is_stack: bool) -> Fp8Weights:
    """A matrix of 300 by 300, or three of them."""
    random = torch.Generator().manual_seed(2)
    experts = (3,) if is_stack else ()
    codes = torch.randn(*experts, 300, 300, generator=random).to(torch.float8_e4m3fn)
    shape = {"block": (3, 3), "channel": (300, 1), "tensor": ()}[kind]
    scale = torch.rand((*experts, *shape), generator=random) + 0.5
    scheme = Fp8Scheme((128, 128) if kind == "block" else None)
    return Fp8Weights(Stored({"w": codes, "w_scale": scale}), scheme)


ROWS = [((0, 128),), ((128, 300),), ((0, 128), (256, 300))]
CROSSING = [((0, 150),), ((150, 300),), ((64, 128),), ((128, 200), (256, 300))]


@pytest.mark.parametrize("is_stack", [False, True], ids=["matrix", "stack"])
@pytest.mark.parametrize("kind", ["block", "channel", "tensor"])
def test_scales_are_cut_with_their_weights(kind: str, is_stack: bool) -> None:
    source = source_of(kind, is_stack=is_stack)
    whole = source.load("w")
    cuts = [Cut(dim + is_stack, x) for dim in (0, 1) for x in ROWS]
    cuts += [Cut(0, ((1, 3),))] if is_stack else []
    if kind != "block":
        cuts += [Cut(dim + is_stack, x) for dim in (0, 1) for x in CROSSING]
    for cut in cuts:
        assert torch.equal(source.load("w", cut), cut.of(whole)), cut
        part = source.blocks("w", cut)
        assert isinstance(part, Fp8Weight)
        assert torch.equal(dequantised(part), cut.of(whole)), cut


@pytest.mark.parametrize("ranges", CROSSING, ids=str)
def test_a_cut_through_blocks_is_said_and_gives_the_dequantised_numbers(
    ranges: tuple[tuple[int, int], ...], caplog: pytest.LogCaptureFixture
) -> None:
    source = source_of("block", is_stack=False)
    whole = source.load("w")
    with caplog.at_level(logging.WARNING):
        for cut in (Cut(0, ranges), Cut(1, ranges)):
            assert source.blocks("w", cut) is None
            assert torch.equal(source.load("w", cut), cut.of(whole))
    (record,) = caplog.records
    assert str(ranges) in record.message
    assert "divides blocks of 128" in record.message


class Case(NamedTuple):
    family: str
    by: Literal["channel", "block"]
    layout: Literal["tp 2", "dp 2 + ep"] = "tp 2"
    is_fixed: bool = False
    is_stored: bool = False

    @property
    def folder(self) -> str:
        return f"{self.family}{' in fp8' if self.is_stored else ''}"


LAYOUTS = {"tp 2": Layout(2, 1), "dp 2 + ep": Layout(1, 2, True)}
# Blocks of 128 are whole in each rank's part.
WIDE_HEADS: dict[str, dict[str, Any]] = {
    "qwen3": {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128},
    "qwen3-moe": {
        "hidden_size": 256,
        "head_dim": 128,
        "moe_intermediate_size": 256,
        "mlp_only_layers": [],
    },
}
CASES = [
    Case("qwen3", "channel"),
    Case("qwen3", "block"),
    Case("qwen3", "block", is_stored=True),
    Case("qwen3-moe", "block", is_fixed=True),
    Case("qwen3-moe", "block", is_stored=True, is_fixed=True),
    Case("qwen3-moe", "channel"),
    Case("qwen3-moe", "channel", "dp 2 + ep"),
    Case("qwen3-moe", "block", "dp 2 + ep", is_stored=True),
    Case("qwen3-moe", "channel", "dp 2 + ep", is_fixed=True),
    Case("deepseek-v3", "channel"),
    Case("deepseek-v3", "channel", "dp 2 + ep"),
    Case("qwen3.5-moe", "channel"),
]


def rank_job(rank: int, folder: Path) -> dict[Case, Tensor]:
    groups = {x: open_checked(rank, layout, folder / x) for x, layout in LAYOUTS.items()}
    found = {}
    for case in CASES:
        files = locate(str(folder / case.folder))
        how = formats(None if case.is_stored else case.by, is_fixed=case.is_fixed)
        weights = open_weights(files)
        spec, of = read_spec(files.config), groups[case.layout]
        model = load_decoder(spec, weights, how, max_model_len=256, groups=of)
        weights.close()
        logits = [model.vocab.gather(paged_logits(model, ids, [2, 1])) for ids in IDS]
        found[case] = torch.cat(logits)
    return found


def part_of_rank(name: str) -> int:
    """A row's scale is that of a rank's inputs; with blocks it is that of 128 of them."""
    return 2 if name.endswith(("o_proj", "down_proj", "out_proj")) else 1


@pytest.mark.more
@torch.no_grad()
def test_logits_on_two_ranks_are_those_of_a_reference_in_fp8(tmp_path: Path) -> None:
    models = {}
    for case in CASES:
        if case.folder not in models:
            models[case.folder] = save_large(tmp_path / case.folder, case.family, WIDE_HEADS)
            if case.is_stored:
                quantise_checkpoint(tmp_path / case.folder, "fp8 blocks")
    ranks = run_ranks("tests.models.test_fp8_ranks:rank_job", 2, tmp_path)
    for case in CASES:
        plain = models[case.folder]
        parts_of = part_of_rank if case.layout == "tp 2" else lambda name: 1
        reference = fp8_reference(plain, case.by, parts_of=parts_of)
        wanted = [x(IDS).logits.flatten(0, 1) for x in (reference, plain)]
        for found in ranks:
            assert_within_fp8(found[case], *wanted)
        if case.layout == "tp 2":
            assert torch.equal(ranks[0][case], ranks[1][case])
