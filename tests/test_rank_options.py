"""The options that say how many ranks there are and how they talk: what is taken, what refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.cli import build_parser
from paceline.commands.arguments import engine_config
from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.parallel.placement import Layout, RankPlace, layout_of


def config(**options: Any) -> EngineConfig:
    return EngineConfig.from_keywords(model="m", **options)


def eagle(**values: Any) -> dict[str, Any]:
    return {"method": "eagle", "model": "head", "num_speculative_tokens": 2, **values}


def test_the_command_of_the_design_is_taken_as_it_stands() -> None:
    line = (
        "serve org/model --tensor-parallel-size=1 --data-parallel-size=2 --enable-expert-parallel"
    )
    spec = json.dumps(eagle())
    args = build_parser().parse_args([*line.split(), "--speculative-config", spec])
    assert layout_of(engine_config(args)) == Layout(1, 2, spreads_experts=True)


def test_without_options_there_is_one_rank() -> None:
    assert layout_of(config()) == Layout() == RankPlace().layout
    assert layout_of(config()).num_ranks == 1


def test_ranks_of_a_replica_are_neighbours_and_its_first_one_leads() -> None:
    layout = layout_of(config(tensor_parallel_size=2, data_parallel_size=3))
    assert (layout.num_ranks, layout.leaders()) == (6, [0, 2, 4])
    assert [layout.replica(r) for r in range(3)] == [[0, 1], [2, 3], [4, 5]]
    place = RankPlace(3, layout)
    assert (place.dp_rank, place.tp_rank, place.is_leader) == (1, 1, False)
    assert (place.tp_ranks(), place.dp_ranks()) == ([2, 3], [1, 3, 5])


@pytest.mark.parametrize(("asked", "size"), [(None, 4), (1, 1), (4, 4)])
def test_a_draft_is_whole_on_every_rank_or_cut_as_the_target_is(
    asked: int | None, size: int
) -> None:
    spec = eagle() if asked is None else eagle(draft_tensor_parallel_size=asked)
    made = config(tensor_parallel_size=4, speculative_config=spec)
    assert made.draft_tensor_parallel_size == size
    there = EngineConfig.from_keywords(**json.loads(json.dumps(made.flat())))
    assert there == made


@pytest.mark.parametrize(("target", "draft"), [(4, 2), (1, 2), (2, 0), (2, 4)])
def test_a_draft_in_other_parts_is_refused_with_both_numbers(target: int, draft: int) -> None:
    message = f"draft_tensor_parallel_size is {draft} and tensor_parallel_size is {target}"
    with pytest.raises(ConfigError, match=message):
        config(
            tensor_parallel_size=target,
            speculative_config=eagle(draft_tensor_parallel_size=draft),
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0; it must be at least 1"),
        ({"data_parallel_size": -1}, "data_parallel_size is -1; it must be at least 1"),
        ({"tensor_parallel_size": "2"}, "tensor_parallel_size must be an integer"),
        ({"distributed_executor_backend": "uni"}, "'uni'; use mp or ray"),
        ({"all2all_backend": "all2all"}, "use one of allgather_reducescatter, alltoall.*Did you"),
        ({"stall_timeout": 0}, "stall_timeout is 0 s; it must be more than 0"),
        ({"stall_timeout": float("nan")}, "stall_timeout is nan s; it must be more than 0"),
        ({"stall_timeout": float("inf")}, "stall_timeout is inf s; .* and at most 86400"),
        ({"stall_timeout": "soon"}, "stall_timeout must be a number"),
        ({"check_collectives": 1}, "check_collectives must be true or false"),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**options)


def test_a_rank_waits_a_minute_for_another_unless_told_otherwise() -> None:
    args = build_parser().parse_args(["serve", "m"])
    assert engine_config(args).device.stall_timeout == config().device.stall_timeout == 60.0


def test_what_is_taken_reaches_the_engine_process() -> None:
    made = config(
        distributed_executor_backend="mp",
        all2all_backend="alltoall",
        stall_timeout=5,
        check_collectives=True,
        force_collectives=True,
        enable_expert_parallel=True,
    )
    there = EngineConfig.from_keywords(**json.loads(json.dumps(made.flat())))
    assert there == made
    assert there.device.stall_timeout == 5.0
