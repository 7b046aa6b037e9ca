"""The loop at every depth: preemption, reuse of slots, failure, the bubble."""

from __future__ import annotations

import tracemalloc

import pytest

from paceline.engine.engine import Engine
from paceline.engine.messages import RESTED, StepMessage, StepTimes, decode
from paceline.errors import EngineDead
from paceline.request import Done
from paceline.step import LateMasks, RunnerInfo, SlotInit, StepPlan, StepResult, StepSize
from tests.engine.harness import Harness, ModThree, engine_config, request
from tests.fakes import FakeRunner, FakeStep, runner_info

all_depths = pytest.mark.parametrize("depth", range(4))


def prompt(length: int, first: int = 1) -> list[int]:
    return [(first + i) % 60 for i in range(length)]


def plans(harness: Harness) -> list[StepPlan]:
    return harness.runner.plans


# ---- depth


@all_depths
def test_the_loop_runs_ahead_by_its_depth_and_no_further(depth: int) -> None:
    harness = Harness(runner_info(), depth=depth)
    harness.add(request(1, prompt(5), max_tokens=20))
    harness.run()
    assert harness.max_in_flight == depth
    harness.check_outputs()


@all_depths
def test_one_message_is_published_per_step(depth: int) -> None:
    harness = Harness(runner_info(max_k=2), depth=depth)
    harness.add(request(1, prompt(5), max_tokens=20))
    harness.run()
    # The admission is known before there is a result to send it with.
    assert harness.front.num_messages == len(plans(harness)) + 1


@all_depths
def test_the_reference_equals_a_run_without_speculation(depth: int) -> None:
    """Ties the tests' oracle to the engine: the plainest run there is gives the same tokens."""
    harness = Harness(runner_info(num_slots=1, max_k=0), depth=depth, enable_prefix_caching=False)
    for uid in range(1, 6):
        harness.add(request(uid, prompt(3 * uid), eos=(3, 4, 5), max_tokens=30, seed=uid))
    harness.run()
    harness.check_outputs()
    assert {stream.done for stream in harness.front.streams.values()} == {Done.EOS, Done.LENGTH}


def test_an_idle_engine_says_so_and_wakes_up_again() -> None:
    harness = Harness(runner_info(), depth=1)
    assert not harness.turn()
    for uid in (1, 2):
        harness.add(request(uid, prompt(5)))
        harness.run()
        assert not harness.turn()
    harness.check_outputs()


@pytest.mark.trap("A2")
@all_depths
def test_rows_keep_their_tokens_when_the_first_row_ends(depth: int) -> None:
    harness = Harness(runner_info(max_k=3, num_slots=4), depth=depth)
    for uid, max_tokens in ((1, 3), (2, 20), (3, 20), (4, 20)):
        harness.add(request(uid, prompt(6, 7 * uid), max_tokens=max_tokens))
    harness.run()
    harness.check_outputs()


@pytest.mark.trap("A5")
@all_depths
def test_a_slot_is_reused_at_once_and_late_rows_of_its_former_owner_do_not_leak(
    depth: int,
) -> None:
    harness = Harness(runner_info(num_slots=1, max_k=2, page_size=4), depth=depth)
    few = tuple(range(8))  # one of these ends some of the requests early
    for uid in range(1, 9):
        harness.add(request(uid, prompt(13), eos=few if uid % 2 else (), seed=uid))
    harness.run()
    harness.check_outputs()
    slots = {init.slot for plan in plans(harness) for init in plan.admissions}
    assert slots == {0}
    hits = [stream.num_cached for stream in harness.front.streams.values()]
    assert hits == [[0]] + [[12]] * 7
    if depth:
        assert harness.front.num_wasted_rows > 0


# ---- preemption and cache resets


@pytest.mark.trap("B2")
@all_depths
def test_preemption_after_every_step_changes_no_token(depth: int) -> None:
    harness = Harness(runner_info(max_k=4), depth=depth)
    for uid in (1, 2, 3):
        harness.add(request(uid, prompt(7, uid), max_tokens=15))
    while harness.turn():
        harness.engine.reset_prefix_cache(preempt_running=True)
    harness.check_idle()
    harness.check_outputs()
    assert harness.num_preemptions > 10


@pytest.mark.trap("B1")
@pytest.mark.parametrize("preempt_running", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_cache_reset_while_a_verification_is_in_flight(depth: int, preempt_running: bool) -> None:
    harness = Harness(runner_info(max_k=4, page_size=4), depth=depth)
    for uid in (1, 2):
        harness.add(request(uid, prompt(9), max_tokens=20))
    for _ in range(4):
        harness.turn()
    assert plans(harness)[-1].k_B.max() == 4
    assert harness.num_in_flight == depth
    harness.engine.reset_prefix_cache(preempt_running=preempt_running)
    harness.run()
    harness.check_outputs()


@pytest.mark.trap("B3")
@pytest.mark.parametrize("preempt_running", [False, True])
@all_depths
def test_a_cache_reset_while_idle_loses_and_repeats_no_token(
    depth: int, preempt_running: bool
) -> None:
    harness = Harness(runner_info(max_k=2), depth=depth)
    harness.add(request(1, prompt(9)))
    harness.run()
    harness.engine.reset_prefix_cache(preempt_running=preempt_running)
    second = harness.add(request(2, prompt(9)))
    harness.run()
    harness.check_outputs()
    assert second.num_cached == [0]


@pytest.mark.trap("B5")
@all_depths
def test_a_resumed_request_computes_prompt_and_output_in_chunks(depth: int) -> None:
    harness = Harness(
        runner_info(max_k=1), depth=depth, max_num_batched_tokens=8, enable_prefix_caching=False
    )
    stream = harness.add(request(1, prompt(10), max_tokens=20))
    while len(stream.tokens) < 8:
        harness.turn()
    harness.engine.reset_prefix_cache(preempt_running=True)
    while not any(init.num_cached == 0 and len(init.tokens) > 10 for init in admissions(harness)):
        harness.turn()
    resumed = admissions(harness)[-1]
    assert resumed.prompt_len == 10
    assert resumed.tokens.tolist() == prompt(10) + stream.tokens
    first = len(plans(harness)) - 1
    assert plans(harness)[first].admissions == [resumed]
    harness.run()
    chunks = [plan.query_len_B.tolist() for plan in plans(harness)[first : first + 3]]
    assert chunks == [[8], [8], [len(resumed.tokens) - 16]]
    harness.check_outputs()


def admissions(harness: Harness) -> list[SlotInit]:
    return [init for plan in plans(harness) for init in plan.admissions]


@all_depths
def test_output_that_arrives_after_a_preemption_can_end_the_request(depth: int) -> None:
    harness = Harness(runner_info(), depth=depth)
    stream = harness.add(request(1, prompt(5), max_tokens=depth + 2))
    harness.turn()
    while harness.num_in_flight < depth or not stream.num_cached:
        harness.turn()
    while len(plans(harness)) < depth + 2:
        harness.turn()
    harness.engine.reset_prefix_cache(preempt_running=True)
    harness.run()
    harness.check_outputs()
    assert len(plans(harness)) == depth + 2, "it was finished, not resumed"


@pytest.mark.trap("B6")
@pytest.mark.parametrize("depth", [0, 2])
def test_priority_preemption_leaves_nothing_of_the_victim_in_the_step(depth: int) -> None:
    """The runner refuses pages and drafts of slots that have no row in the step."""
    info = runner_info(num_pages=20, page_size=1, num_slots=4, max_model_len=18, max_k=2)
    harness = Harness(info, depth=depth, scheduling_policy="priority")
    for uid in range(1, 21):
        harness.add(request(uid, prompt(3, uid), max_tokens=9, priority=-uid))
        harness.turn()
    harness.run()
    harness.check_outputs()
    assert harness.num_preemptions > 5


@pytest.mark.trap("B9")
@all_depths
def test_a_resumed_request_starts_without_drafts(depth: int) -> None:
    harness = Harness(runner_info(max_k=4), depth=depth)
    harness.runner.no_draft = 0.0
    harness.add(request(1, prompt(5), max_tokens=30))
    for _ in range(4):
        harness.turn()
    num_before = len(plans(harness))
    harness.engine.reset_prefix_cache(preempt_running=True)
    harness.run()
    resumed = plans(harness)[num_before]
    assert [init.request.uid for init in resumed.admissions] == [1]
    assert resumed.k_B.tolist() == [0]
    harness.check_outputs()


@pytest.mark.trap("B12")
@all_depths
def test_slots_are_free_for_new_arrivals_after_all_were_preempted(depth: int) -> None:
    harness = Harness(runner_info(num_slots=4, max_k=2), depth=depth, scheduling_policy="priority")
    for uid in range(1, 5):
        harness.add(request(uid, prompt(5, uid), priority=5))
    for _ in range(3):
        harness.turn()
    harness.engine.reset_prefix_cache(preempt_running=True)
    for uid in range(5, 9):
        harness.add(request(uid, prompt(5, uid), priority=0))
    harness.turn()
    assert plans(harness)[-1].uid_B.tolist() == [5, 6, 7, 8]
    harness.run()
    harness.check_outputs()


# ---- failure


@all_depths
@pytest.mark.parametrize("fail_at", [1, 4])
def test_a_failing_device_answers_all_requests_and_stops_the_engine(
    depth: int, fail_at: int
) -> None:
    harness = Harness(runner_info(num_slots=2), depth=depth)
    harness.runner.fail_at = fail_at
    for uid in (1, 2, 3):
        harness.add(request(uid, prompt(5, uid), max_tokens=20))
    with pytest.raises(EngineDead, match="RuntimeError: the device is on fire"):
        harness.run()
    for stream in harness.front.streams.values():
        assert stream.done == Done.ERROR
        assert "on fire" in stream.reason
    with pytest.raises(EngineDead, match="on fire"):
        harness.engine.add(request(4, prompt(5)))
    with pytest.raises(EngineDead, match="on fire"):
        harness.engine.turn()


def test_a_device_that_cannot_launch_answers_all_requests_too() -> None:
    class Broken(FakeRunner):
        def launch(self, plan: StepPlan) -> FakeStep:
            raise MemoryError("no room for the step")

    info = runner_info()
    harness = Harness(info, runner=Broken(info))
    stream = harness.add(request(1, prompt(5)))
    with pytest.raises(EngineDead, match="MemoryError: no room for the step"):
        harness.turn()
    assert stream.done == Done.ERROR


# ---- measures


class Scripted:
    """A runner whose device times are given; every row emits one token and never ends."""

    has_spare_work = False
    lockstep = None

    def __init__(self, times: list[tuple[float, float]]) -> None:
        self._times = iter(times)
        self._runner = FakeRunner(runner_info())

    @property
    def info(self) -> RunnerInfo:
        return self._runner.info

    def step_size(self, plan: StepPlan) -> StepSize:
        return plan.step_size()

    def launch(self, plan: StepPlan) -> ScriptedStep:
        return ScriptedStep(self._runner.launch(plan), *next(self._times))

    def use_spare_time(self) -> bool:
        return False

    def heartbeat(self) -> None:
        pass

    def close(self) -> None:
        pass


class ScriptedStep:
    def __init__(self, step: FakeStep, start_s: float, end_s: float) -> None:
        self._step, self._start_s, self._end_s = step, start_s, end_s

    def bind(self, late: LateMasks) -> None:
        raise AssertionError("no late rows here")

    def is_over(self, within_s: float) -> bool:
        return True

    def wait(self) -> StepResult:
        result = self._step.wait()
        result.device_start_s, result.device_end_s = self._start_s, self._end_s
        return result


def test_the_bubble_is_idle_time_between_steps_but_not_while_there_is_no_work() -> None:
    device = [(1.0, 2.0), (2.0, 3.0), (3.5, 4.0), (10.0, 11.0), (11.25, 12.0), (20.0, 21.0)]
    engine_info = runner_info()
    times: list[StepTimes] = []

    def publish(data: bytes) -> None:
        message = decode(data)
        assert isinstance(message, StepMessage)
        times.extend(message.gauges.times)

    engine = Engine(Scripted(device), engine_config(engine_info, depth=1), publish)
    engine.add(request(1, prompt(5), max_tokens=3))
    while engine.turn():
        pass
    engine.add(request(2, prompt(5), max_tokens=2))
    while engine.turn():
        pass
    engine.add(request(3, prompt(5), max_tokens=1))
    while engine.turn():
        pass
    watch = engine.watch
    assert watch.idle_s == pytest.approx(0.75)
    assert watch.busy_s == pytest.approx(5.25)
    # Step by step, one message late; the last step is over when there is nothing left to say.
    assert [t.idle_s for t in times] == pytest.approx([RESTED, 0.0, 0.5, RESTED, 0.25])
    assert [t.busy_s for t in times] == pytest.approx([1.0, 1.0, 0.5, 1.0, 0.75])
    assert all(t.host_s > 0 for t in times)
    assert watch.host_s < watch.busy_s, "the device's time is not the host's"


@all_depths
def test_host_time_is_that_of_the_stages_without_waiting(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a millisecond in each stage but the wait, which takes 5."""
    now_s = 0.0

    def delay(stage: str) -> None:
        nonlocal now_s
        now_s += 0.005 if stage == "wait" else 0.0005

    monkeypatch.setattr("paceline.engine.stopwatch.perf_counter", lambda: now_s)
    harness = Harness(runner_info(), depth=depth, delay=delay)
    harness.add(request(1, prompt(5), max_tokens=20))
    harness.run()
    per_step_s = harness.engine.watch.host_s / len(plans(harness))
    assert per_step_s == pytest.approx(0.002, rel=0.25)


def test_gauges_follow_the_slots_and_the_pages() -> None:
    harness = Harness(runner_info(num_slots=2, num_pages=64, page_size=4))
    for uid in (1, 2, 3):
        harness.add(request(uid, prompt(8, uid), max_tokens=4))
    harness.turn()
    harness.turn()
    assert harness.front.last is not None
    gauges = harness.front.last.gauges
    assert gauges.num_running == 2
    assert 0.0 < gauges.kv_usage < 1.0
    harness.run()
    gauges = harness.front.last.gauges
    assert (gauges.num_running, gauges.kv_usage) == (0, 0.0)
    assert harness.front.last.result.step == len(plans(harness))


def test_every_stage_can_be_delayed() -> None:
    stages: list[str] = []
    harness = Harness(runner_info(), delay=stages.append)
    harness.add(request(1, prompt(5)), ModThree(64))
    harness.run()
    assert set(stages) == {"plan", "launch", "bind", "publish", "wait", "commit"}


@pytest.mark.trap("B15")
def test_memory_stays_flat_over_many_steps() -> None:
    info = runner_info(num_slots=4, max_k=2, page_size=4)
    runner = FakeRunner(info)
    runner.keeps_plans = False
    engine = Engine(runner, engine_config(info, depth=1), lambda data: None)
    uid = 0

    def run(steps: int) -> int:
        nonlocal uid
        for _ in range(steps):
            while engine.num_unfinished < 6:
                uid += 1
                engine.add(request(uid, prompt(7, uid), max_tokens=20, seed=uid))
            engine.turn()
        return tracemalloc.get_traced_memory()[0]

    run(500)
    tracemalloc.start()
    try:
        first = run(500)
        second = run(1500)
    finally:
        tracemalloc.stop()
    assert second - first < 16_384, f"{second - first} bytes more after 1500 steps"
