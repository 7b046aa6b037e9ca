"""Draws of the Triton kernels over many small chunks: every knob alone and with others, every way
that a winner can turn out not to be kept."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.kernels.interpreted import run_interpreted

NUM_SCENES = 50
CHUNK = 64


def test_draws_over_small_chunks_agree_with_the_reference_interpreted() -> None:
    pytest.importorskip("triton")
    run_interpreted(f"{__name__}:check_small_chunks")


def check_small_chunks() -> None:
    from paceline.kernels.sampling import reference as sampling
    from paceline.kernels.sampling.triton import chunks as sampling_chunks_triton
    from paceline.kernels.sampling.triton import draw as sampling_draw_triton

    # Rows of a few hundred tokens have several chunks, and top_k may be more than one holds.
    sampling_chunks_triton.MOST_CHUNK = CHUNK
    walks = _count_calls(sampling_draw_triton, "highest_covering")
    races = _count_calls(sampling_draw_triton, "_winner")
    chance, num_drawn = random.Random(1), 0
    for _ in range(NUM_SCENES):
        logits_NV, rows, knobs = _any_scene(chance)
        at = rows.logit_rows
        wanted_M, bad_M = (t[at.row_M] for t in sampling.draw(logits_NV, rows, knobs))
        found = sampling_draw_triton.draw(logits_NV, rows, knobs)
        found_M, found_bad_M = (t[at.row_M] for t in found)
        assert torch.equal(found_bad_M, bad_M)
        assert torch.equal(found_M.masked_fill(bad_M, 0), wanted_M.masked_fill(bad_M, 0)), knobs
        num_drawn += int(((knobs.at(at.slot_M).temperature_M > 0) & ~bad_M).sum())
    # Some rows needed more than one race, and for some the k best had to be weighed one by one.
    assert len(races) > num_drawn > NUM_SCENES
    assert walks


def test_logits_that_no_temperature_can_divide_are_drawn_all_the_same() -> None:
    pytest.importorskip("triton")
    run_interpreted(f"{__name__}:check_lowest_logits")


def check_lowest_logits() -> None:
    """Masked by the lowest number instead of minus infinity; what is masked for good stays so."""
    from paceline.kernels.sampling.triton import chunks as sampling_chunks_triton
    from paceline.kernels.sampling.triton import draw as sampling_draw_triton
    from tests.kernels.cases.sampling import Scene

    sampling_chunks_triton.MOST_CHUNK = CHUNK
    for vocab in (10, 300):
        scene = Scene(vocab, batch=4, greedy=0.0)
        knobs = scene.knobs()._replace(temperature_S=torch.full((scene.num_slots,), 0.5))
        logits_NV = torch.full((4, vocab), -3e38)
        logits_NV[:, ::2] = -torch.inf
        logits_NV[:, -1] = -2e38
        rows = scene.rows()._replace(width_B=torch.ones(4, dtype=torch.int32))
        token_N, bad_N = sampling_draw_triton.draw(logits_NV, rows, knobs)
        assert not bad_N.any()
        assert (logits_NV.gather(1, token_N.long()[:, None]) > -torch.inf).all()


def test_a_token_beyond_the_first_k_never_wins_interpreted() -> None:
    pytest.importorskip("triton")
    run_interpreted(f"{__name__}:check_nearly_equal_logits")


def check_nearly_equal_logits() -> None:
    """Where the bound from which races begin says nothing: its 16 bits do not tell them apart."""
    from paceline.kernels.sampling import reference as sampling
    from paceline.kernels.sampling.triton import chunks as sampling_chunks_triton
    from paceline.kernels.sampling.triton import draw as sampling_draw_triton
    from tests.kernels.cases.sampling import OFF, Scene

    sampling_chunks_triton.MOST_CHUNK = CHUNK
    scene = Scene(200, batch=24, spread=1e-5, greedy=0.0, filters=OFF | {"top_k": 1.0})
    knobs = scene.knobs()._replace(top_k_S=torch.full((scene.num_slots,), 3, dtype=torch.int32))
    rows = scene.rows()._replace(width_B=torch.ones(24, dtype=torch.int32))
    logits_NV = 1 + scene.logits(torch.float32)
    found_N, _ = sampling_draw_triton.draw(logits_NV, rows, knobs)
    wanted_N, _ = sampling.draw(logits_NV, rows, knobs)
    assert torch.equal(found_N, wanted_N)


def _any_scene(chance: random.Random) -> tuple[Any, Any, Any]:
    from tests.kernels.cases.sampling import OFF, Scene

    alone = (OFF | {"top_p": 1.0}, OFF | {"top_k": 1.0})
    joint = (None, dict.fromkeys(OFF, 0.7), OFF | {"top_k": 1.0, "top_p": 1.0})
    scene = Scene(
        vocab=chance.choice((7, 64, 97, 300, 300, 300)),
        batch=chance.choice((1, 3)),
        k=chance.choice((0, 2)),
        seed=chance.randrange(1 << 30),
        spread=chance.choice((1e-5, 0.2, 0.7, 2.0, 6.0)),
        step=chance.choice((0.0, 0.0, 0.125, 1.0)),
        allowed=chance.choice((0, 0, 0, 3, 60)),
        has_broken=chance.random() < 0.1,
        greedy=0.1,
        filters=chance.choice((*alone, *joint, joint[-1])),
    )
    knobs = scene.knobs()
    kind = chance.random()
    if kind < 0.4:
        few_S = 1 + knobs.top_k_S % chance.choice((5, 20))
        knobs = knobs._replace(top_k_S=torch.where(knobs.top_k_S > 0, few_S, 0).int())
    elif kind < 0.6:
        most_S = 0.9 + 0.1 * knobs.top_p_S
        knobs = knobs._replace(top_p_S=torch.where(knobs.top_p_S < 1, most_S, 1.0))
    elif kind < 0.8:
        both = (torch.full_like(knobs.top_k_S, CHUNK + 30), torch.full_like(knobs.top_p_S, 0.6))
        knobs = knobs._replace(top_k_S=both[0], top_p_S=both[1])
    return scene.logits(chance.choice((torch.float32, torch.float16))), scene.rows(), knobs


def _count_calls(module: Any, name: str) -> list[int]:
    calls: list[int] = []
    function = getattr(module, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return function(*args, **kwargs)

    setattr(module, name, counted)
    return calls
