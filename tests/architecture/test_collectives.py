"""One module talks to torch.distributed, one holds the only agreement of hosts, no other may."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.architecture.source_tree import Source, dotted, sources

PACKAGE = sources("paceline")
COLLECTIVES = "paceline/parallel/collectives.py"
GROUPS = "paceline/parallel/groups.py"
LOCKSTEP = "paceline/parallel/lockstep.py"
# Who may open a wire, and what opens one.
OPENERS = {GROUPS, LOCKSTEP}
WIRES = {"gloo_wire", "nccl_wire", "GlooWire", "NcclWire", "Wire", "open_store"}
# What only a wire asks of a process group.
RAW = {"allreduce", "_allgather_base", "_reduce_scatter_base", "alltoall_base", "broadcast"}
RAW |= {"all_gather_into_tensor", "init_process_group", "new_group", "barrier", "_wire"}
# Where parts of a layer meet, on the device. No other file calls a collective of any group.
VERBS = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")
CALLERS = {"paceline/parallel/expert_exchange.py", LOCKSTEP}
CALLERS |= {f"paceline/layers/{name}.py" for name in ("linear", "moe", "vocab")}
# The agreement, and who asks for it.
AGREES = {"agree": {"paceline/engine/engine.py"}, "open_lockstep": {"paceline/runner/ranks.py"}}


def imported(source: Source) -> Iterator[str]:
    """Dotted names of all that a file imports, wherever it does."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def used(source: Source) -> set[str]:
    """Names and attributes that a file mentions."""
    nodes = list(ast.walk(source.tree))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def calls_of(source: Source, name: str) -> list[ast.Call]:
    calls = [node for node in ast.walk(source.tree) if isinstance(node, ast.Call)]
    return [c for c in calls if dotted(c.func).rpartition(".")[2] == name]


def test_one_module_knows_torch_distributed() -> None:
    found = set()
    for source in PACKAGE:
        attributes = (dotted(n) for n in ast.walk(source.tree) if isinstance(n, ast.Attribute))
        if any(x.startswith("torch.distributed") for x in (*imported(source), *attributes)):
            found.add(source.name)
    assert found == {COLLECTIVES}


@pytest.mark.parametrize("source", PACKAGE, ids=lambda s: s.name)
def test_no_other_file_opens_a_wire_or_talks_through_one(source: Source) -> None:
    if source.name == COLLECTIVES:
        return
    assert not used(source) & RAW, f"{source.name} asks a process group itself; ask a Group"
    if source.name not in OPENERS:
        assert not used(source) & WIRES, f"{source.name}: groups are opened in {GROUPS}"
        assert not calls_of(source, "Group"), f"{source.name}: groups are made in {GROUPS}"


def test_collectives_are_called_where_parts_of_a_layer_meet() -> None:
    callers = {s.name for s in PACKAGE for verb in VERBS if calls_of(s, verb)}
    assert callers - {COLLECTIVES} == CALLERS


def test_one_module_opens_the_group_of_hosts() -> None:
    named = {
        source.name
        for source in PACKAGE
        for opener in ("gloo_wire", "nccl_wire", "Group", "group")
        for call in calls_of(source, opener)
        for value in ast.walk(call)
        if isinstance(value, ast.Constant) and value.value == "host"
    }
    assert named == {LOCKSTEP}


@pytest.mark.parametrize("name", AGREES)
def test_one_place_asks_for_the_agreement(name: str) -> None:
    found = {s.name for s in PACKAGE if s.name != LOCKSTEP and calls_of(s, name)}
    assert found == AGREES[name]


def test_the_collective_of_hosts_is_one_call() -> None:
    (source,) = (s for s in PACKAGE if s.name == LOCKSTEP)
    assert [len(calls_of(source, verb)) for verb in VERBS] == [1, 0, 0, 0]
    assert not used(source) & {"cuda", "to", "device"}, "it is over numbers in host memory"
