"""How much of a prompt a recurrent model finds in the prefix cache, with and without MTP."""

from __future__ import annotations

import random

import pytest

from tests.engine.harness import Harness, request
from tests.fake_recurrent import RecurrentFeatureRunner, RecurrentRunner
from tests.fakes import runner_info

PAGE = 16
LONGEST = 400


def make_harness(*, mtp: bool, interval: int | None, **changes: object) -> Harness:
    options: dict[str, object] = {
        "page_size": PAGE,
        "num_pages": 160,
        "num_slots": 2,
        "max_model_len": 640,
        "is_recurrent": True,
        "num_snapshots": 200,
    }
    speculative = {"max_k": 3, "draft_lookahead": 2, "draft_reads_features": True} if mtp else {}
    info = runner_info(**{**options, **speculative, **changes})  # type: ignore[arg-type]
    runner = (RecurrentFeatureRunner if mtp else RecurrentRunner)(info, seed=1)
    return Harness(
        info,
        runner=runner,
        depth=1,
        max_num_batched_tokens=512,
        state_snapshot_interval=interval,
    )


class Client:
    """Sends one request after the other."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self._uid = 0

    def send(self, prompt: list[int], max_tokens: int = 20) -> tuple[int, list[int]]:
        """How many of the prompt's tokens were cached, and the output."""
        self._uid += 1
        stream = self.harness.add(request(self._uid, prompt, max_tokens=max_tokens))
        while self.harness.engine.turn():  # the random runs check the tables after every turn
            pass
        return stream.num_cached[0], stream.tokens


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(64) for _ in range(count)]


def hits_of(length: int, *, mtp: bool, interval: int) -> dict[str, int]:
    """Of a prompt that is sent again: as it was, with its output and a new turn, with another
    ending."""
    rng = random.Random(length)
    client = Client(make_harness(mtp=mtp, interval=interval))
    prompt = tokens(rng, length)
    first, output = client.send(prompt)
    assert first == 0
    repeated, _ = client.send(prompt)
    grown, _ = client.send(prompt + output + tokens(rng, 5))
    branched, _ = client.send([*prompt, 63 - output[0], *tokens(rng, 20)])
    client.harness.check_idle()
    client.harness.check_outputs()
    return {"repeated": repeated, "grown": grown, "branched": branched}


SEVENTH = range(1, LONGEST + 1, 7)  # meets every remainder of a page


@pytest.mark.parametrize(
    ("interval", "lengths"),
    [
        (16, SEVENTH),
        (64, SEVENTH),
        pytest.param(16, range(1, LONGEST + 1), marks=pytest.mark.more),
        pytest.param(64, range(1, LONGEST + 1), marks=pytest.mark.more),
    ],
)
def test_mtp_costs_at_most_an_interval_and_a_page_of_every_hit(
    interval: int, lengths: range
) -> None:
    total = {"without": 0, "with": 0}
    for length in lengths:
        without = hits_of(length, mtp=False, interval=interval)
        with_mtp = hits_of(length, mtp=True, interval=interval)
        assert without["repeated"] == (length - 1) // PAGE * PAGE
        for name, found in without.items():
            # The name of a page has the token after it, so one shared page alone is not enough.
            can_hit = found > 0 and not (name == "branched" and length == PAGE)
            assert with_mtp[name] >= found - interval - PAGE, f"{name} after {length} tokens"
            assert with_mtp[name] > 0 or not can_hit, f"{name} after {length} tokens"
            total["without"] += found
            total["with"] += with_mtp[name]
    assert total["with"] > 0.9 * total["without"]


def lengths_of_marks(harness: Harness) -> list[list[int]]:
    """The marks of every plan so far, of all rows."""
    plans = harness.runner.plans
    marks = [p.marks.length_BM for p in plans if p.marks is not None]
    return [sorted(at for at in length_BM.reshape(-1).tolist() if at >= 0) for length_BM in marks]


def test_snapshots_lie_at_every_interval_and_where_lookups_end() -> None:
    client = Client(make_harness(mtp=False, interval=128))
    client.send(tokens(random.Random(0), 310), max_tokens=1)
    assert lengths_of_marks(client.harness) == [[128, 256, 288, 304]]


def test_a_chunk_is_cut_where_it_would_take_more_snapshots_than_a_row_may_have() -> None:
    client = Client(make_harness(mtp=False, interval=64))
    client.send(tokens(random.Random(0), 310), max_tokens=1)
    assert lengths_of_marks(client.harness) == [[64, 128, 192, 256], [288, 304]]
    assert [p.query_len_B.tolist() for p in client.harness.runner.plans] == [[256], [54]]


def test_a_long_prompt_takes_at_most_a_quarter_of_the_snapshots_at_intervals() -> None:
    client = Client(make_harness(mtp=False, interval=16, num_snapshots=8))
    client.send(tokens(random.Random(0), 310), max_tokens=1)
    assert lengths_of_marks(client.harness) == [[128, 256, 288, 304]]


def test_where_prompts_part_the_third_request_finds_a_snapshot() -> None:
    rng = random.Random(0)
    client = Client(make_harness(mtp=False, interval=None))
    system = tokens(rng, 200)
    cached = [client.send(system + tokens(rng, 150))[0] for _ in range(3)]
    assert cached == [0, 0, 192]
    stats = client.harness.engine.scheduler.snapshots
    assert stats.num_misses == 1
    assert stats.num_hits == 1


@pytest.mark.parametrize("mtp", [False, True])
def test_snapshots_of_generated_tokens_are_found_by_the_next_turn(mtp: bool) -> None:
    client = Client(make_harness(mtp=mtp, interval=64))
    prompt = tokens(random.Random(0), 60)
    _, output = client.send(prompt, max_tokens=150)
    assert client.send(prompt + output)[0] == 192


def test_an_equal_prompt_in_the_same_step_finds_no_state_that_is_not_written_yet() -> None:
    harness = make_harness(mtp=False, interval=16)
    prompt = tokens(random.Random(0), 100)
    streams = [harness.add(request(uid, prompt, max_tokens=3)) for uid in (1, 2)]
    harness.run()
    harness.check_outputs()
    assert [stream.num_cached for stream in streams] == [[0], [0]]
    assert Client(harness).send(prompt)[0] == 96


def test_a_snapshot_goes_with_its_page() -> None:
    harness = make_harness(mtp=False, interval=64, num_pages=24, num_slots=1)
    client = Client(harness)
    rng = random.Random(0)
    prompt = tokens(rng, 200)
    client.send(prompt)
    for _ in range(4):
        client.send(tokens(rng, 300))
    assert client.send(prompt)[0] == 0
    harness.turn()  # checks that no snapshot has outlived its page


def test_the_least_recently_used_snapshot_is_evicted_first() -> None:
    client = Client(make_harness(mtp=False, interval=None, num_snapshots=6))
    rng = random.Random(0)
    old, used, new = (tokens(rng, 40) for _ in range(3))  # two snapshots each
    for prompt in (old, used, old, new, tokens(rng, 40)):
        client.send(prompt, max_tokens=1)
    assert [client.send(prompt, max_tokens=1)[0] for prompt in (old, new)] == [32, 32]
    assert client.send(used, max_tokens=1)[0] == 0
    assert client.harness.engine.scheduler.snapshots.usage == 1.0


def test_after_a_reset_no_old_state_is_found() -> None:
    client = Client(make_harness(mtp=False, interval=16))
    prompt = tokens(random.Random(0), 100)
    client.send(prompt)
    client.harness.engine.reset_prefix_cache()
    assert client.harness.engine.scheduler.snapshots.usage == 0.0
    assert client.send(prompt)[0] == 0


def test_without_memory_for_snapshots_nothing_is_found_and_nothing_fails() -> None:
    client = Client(make_harness(mtp=False, interval=16, num_snapshots=0))
    prompt = tokens(random.Random(0), 100)
    assert [client.send(prompt)[0] for _ in range(2)] == [0, 0]
    client.harness.check_outputs()
    stats = client.harness.engine.scheduler.snapshots
    assert stats.usage == 0.0
    assert stats.num_misses == 1


@pytest.mark.parametrize("mtp", [False, True])
def test_the_end_of_an_output_is_found_by_the_next_turn_at_the_default_interval(mtp: bool) -> None:
    client = Client(make_harness(mtp=mtp, interval=None))
    prompt = tokens(random.Random(0), 60)
    _, output = client.send(prompt, max_tokens=300)
    assert client.send(prompt + output)[0] == 320
    known = client.harness.engine.scheduler.snapshots.usage * 200
    assert round(known) <= 5, "the snapshots before the last of an output are replaced"
