"""Two machines serve one engine: headless nodes, torchrun and Ray, with the tokens of one rank.

The second machine is a network namespace where one can be made, else another loopback address.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.errors import EngineDead
from tests.e2e.serving import PACELINE, save_served, started
from tests.eagle import train
from tests.mtp import random_mtp, save_mtp
from tests.parallel.test_serving import NUM_TRAINED, PROMPTS, check, plain_answers
from tests.patience import PATIENCE_S, wait_for
from tests.ports import free_port
from tests.server.processes import ROOT
from tests.tiers import first_or_more

KEY = {"PACELINE_CLUSTER_KEY": "the key of the tests"}
EXPERTS = "--data-parallel-size 2 --enable-expert-parallel"
ON_CPU = "--device cpu --stall-timeout 20 --cpu-threads 1"


_number = itertools.count()


@dataclass
class Wiring:
    """Two machines' addresses, and what runs a command on the second one."""

    here: str
    there: str
    command: list[str]


@contextlib.contextmanager
def two_machines() -> Iterator[Wiring]:
    # Another name each time: the kernel takes a namespace away some time after it was deleted.
    number = os.getpid() + next(_number) * 7
    name = f"pl{number}"
    inside = ["ip", "netns", "exec", name]
    net = f"10.213.{number % 250}"
    steps = [
        ["ip", "netns", "add", name],
        ["ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name],
        ["ip", "address", "add", f"{net}.1/24", "dev", name],
        ["ip", "link", "set", name, "up"],
        [*inside, "ip", "address", "add", f"{net}.2/24", "dev", "eth0"],
        [*inside, "ip", "link", "set", "eth0", "up"],
        [*inside, "ip", "link", "set", "lo", "up"],
    ]
    try:
        for step in steps:
            subprocess.run(step, check=True, capture_output=True)
        check_route(f"{net}.1", inside)
    except (OSError, subprocess.CalledProcessError):
        with contextlib.suppress(OSError):  # there may be no `ip` at all
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        yield Wiring("127.0.0.1", "127.0.0.2", [])
        return
    try:
        yield Wiring(f"{net}.1", f"{net}.2", inside)
    finally:
        for rest in (["ip", "link", "del", name], ["ip", "netns", "del", name]):
            subprocess.run(rest, capture_output=True, check=False)


def check_route(address: str, inside: list[str]) -> None:
    """Raises if the namespace cannot connect to this address: a firewall may be in between."""
    with socket.create_server((address, 0)) as server:
        dial = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)"
        where = [address, str(server.getsockname()[1])]
        done = [*inside, sys.executable, "-c", dial, *where]
        subprocess.run(done, check=True, capture_output=True)


def tree(pid: int) -> list[int]:
    """A process and what it has started."""
    found = [pid]
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [p for child in path.read_text().split() for p in tree(int(child))]
    return found


def listening(pid: int) -> set[str]:
    """The addresses on which a process and its children listen."""
    found = set()
    for process in tree(pid):
        links = [os.readlink(path) for path in Path(f"/proc/{process}/fd").iterdir()]
        mine = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
        for family, kind in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
            for line in Path(f"/proc/{process}/net/{kind}").read_text().splitlines()[1:]:
                local, state = line.split()[1], line.split()[3]
                if state == "0A" and line.split()[9] in mine:
                    words = bytes.fromhex(local.partition(":")[0])
                    # Each word of four bytes is in the order of this machine.
                    parts = [words[i : i + 4][::-1] for i in range(0, len(words), 4)]
                    found.add(socket.inet_ntop(family, b"".join(parts)))
    return found


def save_trained(tmp_path: Path) -> tuple[Path, list[Any], list[str]]:
    """A MoE with an MTP layer some of whose drafts are right; its answers; flags to serve it."""
    plain, folder = tmp_path / "plain", tmp_path / "model"
    target = save_served(plain, "qwen3.5-moe")
    answers = plain_answers(plain)
    known = [tokens for _, tokens in answers]
    save_mtp(folder, plain, train(random_mtp(target), target, known, num_steps=NUM_TRAINED))
    spec = json.dumps({"method": "mtp", "num_speculative_tokens": 2})
    return folder, answers, [*ON_CPU.split(), "--speculative-config", spec]


@pytest.mark.parametrize(
    "layout", first_or_more([EXPERTS, "--tensor-parallel-size 2"], lambda flags: flags == EXPERTS)
)
def test_mtp_over_two_machines_has_the_tokens_of_one_rank(tmp_path: Path, layout: str) -> None:
    """Two replicas that share experts, and one replica that spans both machines."""
    folder, answers, flags = save_trained(tmp_path)
    with two_machines() as wiring, (tmp_path / "node.log").open("w") as log:
        where = f"--nnodes 2 --master-addr {wiring.here} --master-port {free_port(wiring.here)}"
        flags = ["serve", str(folder), *flags, *layout.split(), *where.split()]
        mine = ["--headless", "--node-rank", "1", "--node-address", wiring.there]
        node = subprocess.Popen(
            [*wiring.command, *PACELINE, *flags, *mine],
            cwd=ROOT, env={**os.environ, **KEY}, stdout=log, stderr=log,
        )  # fmt: skip
        try:
            arguments = [*flags, "--port", "0"]
            with started(arguments, tmp_path / "log", environment=KEY) as process:
                process.await_ready()
                assert listening(process.popen.pid) == {wiring.here, "127.0.0.1"}  # HTTP: loopback
                assert listening(node.pid) == {wiring.there}
                check(process, folder, answers, num_ranks=1)
            assert node.wait(PATIENCE_S) == 0, (tmp_path / "node.log").read_text()
        finally:
            node.kill()
            node.wait()


def _is_open(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.more
@pytest.mark.parametrize("layout", [EXPERTS, "--tensor-parallel-size 2"])
def test_a_machine_that_vanishes_is_named_and_nothing_of_the_engine_is_left(
    tmp_path: Path, layout: str
) -> None:
    """Its network goes down, so neither machine hears of the other's end."""
    folder = tmp_path / "model"
    save_served(folder, "mixtral")
    with two_machines() as wiring, (tmp_path / "node.log").open("w") as log:
        if not wiring.command:
            pytest.skip("network namespaces cannot be made here")
        where = f"--nnodes 2 --master-addr {wiring.here} --master-port {free_port(wiring.here)}"
        flags = ["serve", str(folder), *layout.split(), *ON_CPU.split(), *where.split()]
        flags += ["--max-restarts", "0", "--stall-timeout", "5"]
        node = subprocess.Popen(
            [*wiring.command, *PACELINE, *flags, "--headless", "--node-rank", "1"],
            cwd=ROOT, env={**os.environ, **KEY}, stdout=log, stderr=log,
        )  # fmt: skip
        try:
            with started([*flags, "--port", "0"], tmp_path / "log", environment=KEY) as process:
                process.await_ready()
                there = tree(node.pid)
                assert len(there) == 2, "a node and its rank"
                down = [*wiring.command, "ip", "link", "set", "eth0", "down"]
                subprocess.run(down, check=True)
                assert process.await_exit() == 1
                assert f"node 1 at {wiring.there}" in process.said()
            assert node.wait(PATIENCE_S) == 1
            assert f"node 0 at {wiring.here}" in (tmp_path / "node.log").read_text()
            wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in there))
        finally:
            node.kill()
            node.wait()


def torchrun(flags: str, where: str, inside: list[str], log: Path) -> subprocess.Popen[bytes]:
    """`torchrun ... -m paceline serve`; its script may not be on the path, and is this module."""
    command = [*inside, sys.executable, "-m", "torch.distributed.run", *where.split(), "-m"]
    with log.open("wb") as file:
        return subprocess.Popen(
            [*command, "paceline", "serve", *flags.split()],
            cwd=ROOT, env={**os.environ, **KEY}, stdout=file, stderr=file,
        )  # fmt: skip


def first_answer(folder: Path, port: int, processes: list[subprocess.Popen[bytes]]) -> list[int]:
    """The tokens of the first prompt, when the server is there."""
    url = f"http://127.0.0.1:{port}"
    ready = ["curl", "-sf", f"{url}/readyz"]

    def is_ready() -> bool:
        assert all(p.poll() is None for p in processes), "torchrun has ended"
        return subprocess.run(ready, capture_output=True, check=False).returncode == 0

    wait_for(is_ready)
    fields = {"model": str(folder), "prompt": PROMPTS[0], "temperature": 0, "max_tokens": 64}
    body = json.dumps({**fields, "ignore_eos": True, "return_token_ids": True})
    ask = ["curl", "-s", "-H", "Content-Type: application/json", "-d", body]
    reply = subprocess.run([*ask, f"{url}/v1/completions"], capture_output=True, check=True)
    tokens: list[int] = json.loads(reply.stdout)["choices"][0]["token_ids"]
    return tokens


def end(processes: list[subprocess.Popen[bytes]], port: int) -> None:
    for process in processes:
        process.send_signal(signal.SIGTERM)
    for process in processes:
        process.wait(PATIENCE_S)
    wait_for(lambda: not _is_open(port))


@pytest.mark.more
@pytest.mark.parametrize("layout", [EXPERTS, "--tensor-parallel-size 2"])
def test_torchrun_starts_the_server_as_written(tmp_path: Path, layout: str) -> None:
    folder = tmp_path / "model"
    save_served(folder, "mixtral")
    ((_, tokens),) = plain_answers(folder)[:1]
    port = free_port("127.0.0.1")
    where = f"--nproc-per-node 2 --master-port {free_port('127.0.0.1')}"
    flags = f"{folder} {layout} {ON_CPU} --port {port}"
    processes = [torchrun(flags, where, [], tmp_path / "log")]
    try:
        assert first_answer(folder, port, processes) == tokens
    finally:
        end(processes, port)


@pytest.mark.more
def test_torchrun_on_two_machines_starts_one_engine(tmp_path: Path) -> None:
    """One rank of a replica on each."""
    folder = tmp_path / "model"
    save_served(folder, "mixtral")
    ((_, tokens),) = plain_answers(folder)[:1]
    port = free_port("127.0.0.1")
    with two_machines() as wiring:
        where = f"--nnodes 2 --nproc-per-node 1 --master-addr {wiring.here}"
        where += f" --master-port {free_port(wiring.here)}"
        flags = f"{folder} --tensor-parallel-size 2 {ON_CPU} --port {port}"
        flags += f" --master-port {free_port(wiring.here)}"
        processes = [
            torchrun(flags, f"{where} --node-rank {number}", inside, tmp_path / f"log{number}")
            for number, inside in enumerate(([], wiring.command))
        ]
        try:
            assert first_answer(folder, port, processes) == tokens
        finally:
            end(processes, port)


@contextlib.contextmanager
def ray_cluster() -> Iterator[tuple[Any, Any]]:
    """A cluster of two nodes with one CPU each, and the second one."""
    # Slow, and only these tests need it; `make test-more` installs it.
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    try:
        ray.init(address=cluster.address, log_to_driver=False)  # on the head: it is the only node
        yield cluster, cluster.add_node(num_cpus=1)
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.more
def test_ray_places_the_replicas_and_a_node_that_is_killed_is_named(tmp_path: Path) -> None:
    folder, answers, _ = save_trained(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    options: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True}
    options |= {"device": "cpu", "dtype": "float32", "cpu_threads": 1, "stall_timeout": 20}
    spec = {"method": "mtp", "num_speculative_tokens": 2}
    with (
        ray_cluster() as (cluster, second),
        LLM(
            str(folder), distributed_executor_backend="ray", speculative_config=spec, **options
        ) as llm,
    ):
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        found = [list(output.outputs[0].token_ids) for output in outputs]
        assert found == [tokens for _, tokens in answers[:-1]]
        name = second.node_id[:12]
        cluster.remove_node(second, allow_graceful=False)
        with pytest.raises(EngineDead, match=f"Ray node {name}"):
            llm.generate(PROMPTS, params, use_tqdm=False)


@pytest.mark.more
@pytest.mark.parametrize("layout", [EXPERTS, "--tensor-parallel-size 2 --nnodes 2"])
def test_a_server_under_ray_has_the_tokens_of_one_rank(tmp_path: Path, layout: str) -> None:
    """The second layout needs both nodes for one replica."""
    folder, answers, flags = save_trained(tmp_path)
    where = ["--distributed-executor-backend", "ray", "--port", "0"]
    arguments = ["serve", str(folder), *flags, *layout.split(), *where]
    with ray_cluster() as (cluster, _):
        environment = {"RAY_ADDRESS": cluster.address}
        with started(arguments, tmp_path / "log", environment=environment) as process:
            process.await_ready()
            check(process, folder, answers, num_ranks=0)
