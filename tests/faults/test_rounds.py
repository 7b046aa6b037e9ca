"""Random faults under a mixed load: `make test-faults` runs many more rounds of the same kind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import shared_folder
from tests.faults import saboteur
from tests.faults.rounds import LAYOUTS, Bench, save_models
from tests.faults.soak import soak
from tests.tiers import first_or_more

# One for each layout, with a fault that ends a rank at once; then what comes. The ranks of "tp2"
# start again together, as those of "dp2-ep" do.
FIRST = {"dp2": 33, "tp2": 1, "dp2-ep": 5}
ROUNDS = [*((layout, number) for layout, number in FIRST.items())]
ROUNDS += [([*LAYOUTS][number % 3], number) for number in range(100, 110)]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once for all processes that run tests."""
    folder = shared_folder(tmp_path_factory) / "faults"
    save_models(folder)
    return folder


@pytest.fixture(scope="module")
def bench(models: Path) -> Iterator[Bench]:
    bench = Bench(models)
    try:
        yield bench
    finally:
        left = bench.close()
    assert not left


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("layout", "number"), first_or_more(ROUNDS, lambda r: FIRST.get(r[0]) == r[1] and r[0] != "tp2")
)
def test_every_client_gets_every_token_of_an_undisturbed_run(
    bench: Bench, layout: str, number: int
) -> None:
    done = bench.run(1, number, layout)
    assert not done.complaints, str(done)


@pytest.mark.more
@pytest.mark.timeout(600)
def test_a_rank_that_hangs_while_it_is_idle_is_found_when_a_request_comes(bench: Bench) -> None:
    os.kill(bench.client("dp2").engine_pids[0], saboteur.HANG)
    done = bench.run(1, 0, "dp2", faults=[])
    assert not done.complaints, str(done)
    assert done.num_restarts == 1


@pytest.mark.more
@pytest.mark.timeout(600)
def test_a_minute_at_twice_saturation_answers_every_client(models: Path, tmp_path: Path) -> None:
    report = soak(models, tmp_path / "log", 60.0)
    assert not report.complaints, str(report)
    assert not any(report.after.values()), str(report)
    assert report.outcomes["429"] > 0, str(report)
    assert report.outcomes["stream"] > 0, str(report)
