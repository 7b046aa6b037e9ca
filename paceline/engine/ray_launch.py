"""Ranks placed by Ray: one task for each replica, which runs a headless node (`node.py`) there.

Ray chooses the machines and starts the tasks. Messages go over the connections of `link.py`.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

from paceline.config import EngineConfig
from paceline.engine.node import run_node
from paceline.engine.nodes import Nodes
from paceline.errors import EngineDead, MissingExtra
from paceline.parallel.placement import NodePart


def _serve_replica(options: dict[str, Any], key: str, replica: int) -> None:
    """Runs in a worker of Ray."""
    import ray

    context = ray.get_runtime_context()
    config = EngineConfig.from_keywords(
        **{**options, "cluster_key": key, "node_address": ray.util.get_node_ip_address()}
    )
    label = f"Ray node {context.get_node_id()[:12]}"
    run_node(config, NodePart(replica + 1, (replica,)), label)


class RayNodes(Nodes):
    """The front has no rank; each replica is a node of its own."""

    def __init__(self, config: EngineConfig) -> None:
        try:
            import ray
        except ModuleNotFoundError:
            raise MissingExtra(
                "distributed_executor_backend 'ray' needs Ray: pip install 'paceline[ray]'"
            ) from None
        if not ray.is_initialized():
            ray.init()
        self._ray = ray
        self._group: Any = None
        num_replicas = config.device.data_parallel_size
        nodes = replace(
            config.nodes,
            nnodes=num_replicas + 1,
            master_addr=config.nodes.address or ray.util.get_node_ip_address(),
            data_parallel_address=None,
            cluster_key=config.nodes.cluster_key or secrets.token_hex(32),
        )
        super().__init__(replace(config, nodes=nodes), NodePart(), any_port=True)
        try:
            self._place_replicas(num_replicas)
        except BaseException:
            self.close()
            raise

    def _place_replicas(self, num_replicas: int) -> None:
        """The ranks of a replica are one bundle, which is on one machine; bundles are spread."""
        ray, config = self._ray, self._config
        size = config.device.tensor_parallel_size
        needs = {"CPU": float(size)}
        if config.device.device != "cpu" and ray.cluster_resources().get("GPU"):
            needs["GPU"] = float(size)
        self._group = ray.util.placement_group([needs] * num_replicas, strategy="SPREAD")
        limit_s = config.nodes.join_timeout
        if not self._group.wait(limit_s):
            raise EngineDead(
                f"Ray had no room within {limit_s:g} s (--join-timeout) for {num_replicas} "
                f"replicas of {needs}. The cluster has {ray.cluster_resources()}."
            )
        strategies = ray.util.scheduling_strategies
        # Ray starts a task again whose machine is gone, and that node joins again.
        for replica in range(num_replicas):
            where = strategies.PlacementGroupSchedulingStrategy(self._group, replica)
            task = ray.remote(_serve_replica).options(
                num_cpus=needs["CPU"],
                num_gpus=needs.get("GPU", 0.0),
                scheduling_strategy=where,
                max_retries=-1,
            )
            task.remote(config.flat(), config.nodes.cluster_key, replica)

    def close(self) -> None:
        super().close()
        if self._group is not None and self._ray.is_initialized():
            self._ray.util.remove_placement_group(self._group)
            self._group = None
