"""Tensor parallelism: the tokens and drafts of one rank, the same bits on all, whatever the layout.

Real ranks over gloo, started once for all cases: see tests/models/tensor_parallel.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.parallel.groups import ALONE
from tests.models.tensor_parallel import DRAFTERS, FAMILIES, VOCAB, compute, odd_rows, save_all
from tests.parallel.ranks import run_ranks
from tests.tiers import first_or_more

Results = dict[str, Any]
JOBS = {2: "two_ranks", 4: "four_ranks"}
SIZES = pytest.mark.parametrize("size", first_or_more(JOBS, lambda size: size == 2))


class Ranks(dict[int, list[Results]]):
    """What each rank computed, by their number; run when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, size: int) -> list[Results]:
        job = f"tests.models.tensor_parallel:{JOBS[size]}"
        self[size] = run_ranks(job, size, self._folder)
        return self[size]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    save_all(path)
    return path


@pytest.fixture(scope="module")
def alone(folder: Path) -> Results:
    with torch.no_grad():
        return compute(folder, ALONE)


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Ranks:
    return Ranks(folder)


@SIZES
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_in_parts_gives_the_logits_and_tokens_of_one(
    alone: Results, ranks: Ranks, size: int, family: str
) -> None:
    expected = alone[family]
    for rank in ranks[size]:
        found = rank[family]
        torch.testing.assert_close(found["logits"], expected["logits"], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found["scores"], expected["scores"], atol=1e-4, rtol=1e-4)
        assert found["tokens"].tolist() == expected["tokens"].tolist()
        assert not found["is fused"]


@SIZES
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.trap("I10")
def test_every_sampling_mode_emits_the_tokens_of_one_rank_on_all_ranks(
    alone: Results, ranks: Ranks, size: int, family: str
) -> None:
    """Both layouts of windows; sampled rows have a temperature, and nothing is broadcast."""
    expected = alone[family]["verified"]
    assert set(expected) == {"GREEDY", "SAMPLE", "FULL"}
    assert expected["GREEDY"] != expected["SAMPLE"]
    for rank in ranks[size]:
        assert rank[family]["verified"] == expected


@SIZES
@pytest.mark.trap("I5")
def test_every_rank_has_the_same_bits(ranks: Ranks, size: int) -> None:
    first, *others = ranks[size]
    for rank in others:
        for family in FAMILIES:
            assert torch.equal(rank[family]["logits"], first[family]["logits"])
        for drafter in DRAFTERS:
            for layout in (1, size):
                mine, theirs = (x[f"{drafter} at {layout}"] for x in (first, rank))
                assert all(torch.equal(mine[x], theirs[x]) for x in ("drafts", "sampled", "q"))


@SIZES
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_are_those_of_one_rank_at_both_draft_layouts(
    alone: Results, ranks: Ranks, size: int, drafter: str
) -> None:
    expected = alone[f"{drafter} at 1"]
    assert (expected["drafts"] >= 0).all()
    for layout in (1, size):
        for rank in ranks[size]:
            found = rank[f"{drafter} at {layout}"]
            assert found["drafts"].tolist() == expected["drafts"].tolist()
            assert found["sampled"].tolist() == expected["sampled"].tolist()
            torch.testing.assert_close(found["q"], expected["q"], atol=1e-4, rtol=1e-3)


@SIZES
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.trap("L-11")
def test_a_draft_at_one_rank_inside_many_has_whole_layers(
    alone: Results, ranks: Ranks, size: int, drafter: str
) -> None:
    whole = alone[f"{drafter} at 1"]["shapes"]
    assert len(whole) > 4
    for rank in ranks[size]:
        assert rank[f"{drafter} at 1"]["shapes"] == whole
        assert rank[f"{drafter} at {size}"]["shapes"] != whole


@SIZES
def test_a_head_shares_the_targets_tables_only_where_they_are_equal_on_all_ranks(
    alone: Results, ranks: Ranks, size: int
) -> None:
    """The tables differ in one row, which is the last rank's: the others must hear of it."""
    tables = {
        "eagle": True,
        "eagle3": True,
        "mtp": True,
        "mtp of experts": True,
        "mtp of a hybrid": True,
    }
    heads = {
        "eagle": True,
        "eagle with a table": True,
        "mtp": True,
        "mtp of experts": True,
        "mtp of a hybrid": True,
    }
    for found in (alone, *ranks[size]):
        for drafter in DRAFTERS:
            for layout in {1, size} if found is not alone else {1}:
                of = found[f"{drafter} at {layout}"]
                assert of["shares the table"] == tables.get(drafter, False), drafter
                assert of["shares the head"] == heads.get(drafter, False), drafter


@SIZES
@pytest.mark.trap("L-10")
def test_the_cache_holds_a_ranks_own_heads(ranks: Ranks, size: int) -> None:
    held = {"llama": 2, "one KV head": 1, "four KV heads": 4, "deepseek-v3": 1}
    for rank in ranks[size]:
        for family, count in held.items():
            assert rank[family]["kv heads"] == max(1, count // size)


@SIZES
def test_a_vocabulary_that_does_not_divide_is_whole_again_and_no_padding_wins(
    ranks: Ranks, size: int
) -> None:
    most = -(-VOCAB // size)
    for index, rank in enumerate(ranks[size]):
        found = rank["vocabulary"]
        gathered, rows = found["gathered"], odd_rows()
        assert torch.equal(gathered.view(torch.int32), rows.view(torch.int32))
        (token_N, bad_N), (expected_N, expected_bad_N) = found["greedy"], found["expected greedy"]
        assert token_N.dtype == torch.int32
        assert token_N.tolist() == expected_N.tolist()
        assert bad_N.tolist() == expected_bad_N.tolist()
        assert 0 < bad_N.sum() < len(bad_N)
        assert torch.equal(found["embedded"], found["expected embedded"])
        assert found["no rows"].shape == (0,)
        assert found["no rows gathered"].shape == (0, VOCAB)
        assert found["no tokens"].shape == (0, 6)
        local = rank["llama"]["local vocabulary"]
        assert local == (most if index < size - 1 else VOCAB - (size - 1) * most)


def test_a_group_of_one_that_is_made_to_talk_changes_no_bit(alone: Results, ranks: Ranks) -> None:
    forced = ranks[2][0]["forced"]
    assert any("all_reduce" in x for x in forced["records"])
    for family in FAMILIES:
        assert torch.equal(forced[family]["logits"], alone[family]["logits"])
    for drafter in DRAFTERS:
        mine, theirs = (x[f"{drafter} at 1"] for x in (forced, alone))
        assert torch.equal(mine["drafts"], theirs["drafts"])


@SIZES
def test_greedy_steps_exchange_one_value_and_id_and_never_whole_rows(
    ranks: Ranks, size: int
) -> None:
    """The records of a rank: what traveled for greedy drafts of one row is [2, 1]."""
    for rank in ranks[size]:
        assert sum(x.endswith("all_gather over tp of int32 [2, 1]") for x in rank["records"])
