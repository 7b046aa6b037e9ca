"""CPU and CUDA run one step: a few files know which device they are on, and no other may ask."""

from __future__ import annotations

import ast

import pytest

from tests.architecture.source_tree import Source, dotted, sources

FOLDERS = ("paceline/runner", "paceline/sampling", "paceline/drafters", "paceline/state")
# What differs between CPU and CUDA, and where it is decided.
KNOWS_DEVICE = {
    "paceline/runner/startup.py": "which device an engine runs on",
    "paceline/runner/platform_cuda.py": "weight formats, memory sizing, graphs",
    "paceline/runner/ranks.py": "which GPU a rank has",
    "paceline/runner/streams.py": "a worker thread, or the GPU's own stream",
    "paceline/runner/graphs.py": "capture and replay",
    "paceline/runner/runner.py": "the clock and the idle check of a GPU",
    "paceline/sampling/verify.py": "which processors a step can leave out",
    "paceline/state/step_buffers.py": "pinned host memory",
    "paceline/state/packets.py": "pinned host memory",
}
ASKS = {"is_cuda", "is_cpu", "cuda"}
WRITES = {"paceline/state/staging.py", "paceline/state/packets.py"}
# Where tensors become numbers of the host: calls that would wait for a GPU, and why they may.
READS = {"cpu", "item", "numpy"}
READS_TENSORS = {
    "paceline/state/staging.py": "the CPU's way in",
    "paceline/state/packets.py": "the way in of both: pinned memory of the ring",
    "paceline/state/readback.py": "the way out: pinned memory of the ring",
    "paceline/state/slots.py": "arrays over CPU tensors, for the compact rows",
    "paceline/state/late_rows.py": "features of rows that wait, on the CPU",
    "paceline/runner/compact_rows.py": "rows of the CPU, and the order of its late rows",
    "paceline/runner/prompt_logprobs.py": "prompt logprobs, in an eager step",
    "paceline/sampling/custom.py": "custom processors run on the host, in an eager step",
    "paceline/sampling/verify.py": "which processors a step of the CPU can leave out",
}

PACKAGE = sources(*FOLDERS)


def attributes(source: Source) -> set[str]:
    nodes = ast.walk(source.tree)
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def compares_device_type(source: Source) -> bool:
    compared = (n for n in ast.walk(source.tree) if isinstance(n, ast.Compare))
    return any(dotted(n.left).endswith("device.type") for n in compared)


@pytest.mark.parametrize("source", PACKAGE, ids=lambda s: s.name)
def test_only_the_named_files_ask_which_device_they_are_on(source: Source) -> None:
    asks = bool(attributes(source) & ASKS) or compares_device_type(source)
    if source.name not in KNOWS_DEVICE:
        assert not asks, f"{source.name} asks for the device; see {sorted(KNOWS_DEVICE)}"


@pytest.mark.parametrize("name", sorted(KNOWS_DEVICE))
def test_every_file_that_may_ask_does(name: str) -> None:
    (source,) = (s for s in PACKAGE if s.name == name)
    asks = bool(attributes(source) & (ASKS | {"pin_memory", "is_pinned"}))
    assert asks or compares_device_type(source), f"{name} need not be in the list any more"


def test_there_is_one_step_one_verify_one_runner_and_one_builder() -> None:
    for name, owner in (
        ("step_a", "paceline/runner/step.py"),
        ("step_b", "paceline/runner/step.py"),
        ("verify", "paceline/sampling/verify.py"),
        ("launch", "paceline/runner/runner.py"),
        ("build_on", "paceline/runner/startup.py"),
    ):
        found = {s.name for s in PACKAGE for f in s.functions() if f.name == name}
        assert found == {owner}, name


def test_slot_state_has_one_door_in_for_each_transport() -> None:
    """Only staging and packets write what a plan changes in slots and page tables."""
    writers = set()
    for source in sources("paceline"):
        calls = [n for n in ast.walk(source.tree) if isinstance(n, ast.Call)]
        names = {dotted(call.func).rpartition(".")[2] for call in calls}
        if names & {"Staging", "PacketWriter"} and source.name not in WRITES:
            writers.add(source.name)
    assert writers == {"paceline/runner/compact_rows.py", "paceline/runner/padded_rows.py"}


@pytest.mark.parametrize("source", PACKAGE, ids=lambda s: s.name)
def test_only_the_named_files_read_tensors_on_the_host(source: Source) -> None:
    calls = (n.func for n in ast.walk(source.tree) if isinstance(n, ast.Call))
    reads = {f.attr for f in calls if isinstance(f, ast.Attribute)} & READS
    assert bool(reads) == (source.name in READS_TENSORS), f"{source.name}: {sorted(reads)}"


def test_results_are_read_in_one_place() -> None:
    readers = set()
    for source in sources("paceline"):
        calls = [n for n in ast.walk(source.tree) if isinstance(n, ast.Call)]
        if any(dotted(call.func).rpartition(".")[2] == "RingReader" for call in calls):
            readers.add(source.name)
    assert readers == {"paceline/runner/runner.py"}


@pytest.mark.parametrize("source", [*PACKAGE, *sources("paceline/scheduler")], ids=lambda s: s.name)
def test_requests_are_checked_before_they_reach_the_loop(source: Source) -> None:
    """`engine/checks.py` refuses them. An error in the scheduler or the step ends the engine."""
    names = {node.id for node in ast.walk(source.tree) if isinstance(node, ast.Name)}
    assert not names & {"InvalidRequest", "PromptTooLong"}
