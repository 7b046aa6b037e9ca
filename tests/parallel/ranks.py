"""Real ranks for tests: one process each, over gloo, with every collective compared.

A job is a function `job(rank: int, folder: Path) -> result`, named as "module:function".
"""

from __future__ import annotations

import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from paceline.parallel.groups import GroupOptions, Groups, open_groups
from paceline.parallel.placement import Layout, RankPlace
from tests.parallel.forks import Forked

TIMEOUT_S = 200


def run_ranks(job: str, num_ranks: int, folder: Path) -> list[Any]:
    """What `job` returned on each rank."""
    processes = []
    for rank in range(num_ranks):
        with (folder / f"said{rank}").open("wb") as said:
            says = [(said.fileno(), 1), (said.fileno(), 2)]
            processes.append(Forked(f"{__name__}:main", job, rank, str(folder), descriptors=says))
    try:
        failed = _wait(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert not failed, "\n".join(f"rank {i}: {(folder / f'said{i}').read_text()}" for i in failed)
    return [torch.load(folder / f"result{r}", weights_only=False) for r in range(num_ranks)]


def _wait(processes: list[Forked]) -> list[int]:
    """Who failed. One is enough: the others would wait for it in vain."""
    give_up_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < give_up_s:
        codes = [process.poll() for process in processes]
        if any(codes) or None not in codes:
            return [i for i, code in enumerate(codes) if code]
        time.sleep(0.01)
    return [i for i, process in enumerate(processes) if process.poll() is None]


def place_in(folder: Path, rank: int, layout: Layout) -> RankPlace:
    """A rank that meets the others in files of a folder."""
    return RankPlace(rank, layout, str(folder / "store"), str(folder / "collectives"))


def open_checked(rank: int, layout: Layout, folder: Path, **options: Any) -> Groups:
    """The groups of one layout; `folder` belongs to it; the first rank creates it."""
    folder.mkdir(parents=True, exist_ok=True)
    return open_groups(
        place_in(folder, rank, layout), GroupOptions(timeout_s=30, checks=True, **options)
    )


def main(job: str, rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    module, _, name = job.partition(":")
    with torch.no_grad():
        result = getattr(import_module(module), name)(rank, Path(folder))
    torch.save(result, Path(folder) / f"result{rank}")
