"""Ranks placed by Ray: one task for each bundle, which runs a headless node (`node.py`) there.

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
from paceline.parallel.placement import NodePart, even_share, layout_of


def _serve_bundle(options: dict[str, Any], key: str, part: NodePart) -> None:
    """Runs in a worker of Ray."""
    import ray

    context = ray.get_runtime_context()
    config = EngineConfig.from_keywords(
        **{**options, "cluster_key": key, "node_address": ray.util.get_node_ip_address()}
    )
    label = f"Ray node {context.get_node_id()[:12]}"
    run_node(config, part, label)


class RayNodes(Nodes):
    """The front has no rank; each bundle is a node."""

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
        layout = layout_of(config)
        num_bundles = max(layout.data_parallel, config.nodes.nnodes)
        size = even_share(layout, num_bundles)
        nodes = replace(
            config.nodes,
            nnodes=num_bundles + 1,
            master_addr=config.nodes.address or ray.util.get_node_ip_address(),
            data_parallel_address=None,
            cluster_key=config.nodes.cluster_key or secrets.token_hex(32),
        )
        super().__init__(replace(config, nodes=nodes), NodePart(), any_port=True)
        try:
            self._place_bundles(num_bundles, size)
        except BaseException:
            self.close()
            raise

    def _place_bundles(self, num_bundles: int, size: int) -> None:
        """The ranks of a bundle are on one machine: a replica, or with a larger --nnodes a part of
        one. Bundles are spread."""
        ray, config = self._ray, self._config
        needs = {"CPU": float(size)}
        if config.device.device != "cpu" and ray.cluster_resources().get("GPU"):
            needs["GPU"] = float(size)
        self._group = ray.util.placement_group([needs] * num_bundles, strategy="SPREAD")
        limit_s = config.nodes.join_timeout
        if not self._group.wait(limit_s):
            raise EngineDead(
                f"Ray had no room within {limit_s:g} s (--join-timeout) for {num_bundles} "
                f"bundles of {needs}. The cluster has {ray.cluster_resources()}."
            )
        strategies = ray.util.scheduling_strategies
        # Ray starts a task again whose machine is gone, and that node joins again.
        for bundle in range(num_bundles):
            where = strategies.PlacementGroupSchedulingStrategy(self._group, bundle)
            task = ray.remote(_serve_bundle).options(
                num_cpus=needs["CPU"],
                num_gpus=needs.get("GPU", 0.0),
                scheduling_strategy=where,
                max_retries=-1,
            )
            part = NodePart(bundle + 1, tuple(range(bundle * size, (bundle + 1) * size)))
            task.remote(config.flat(), config.nodes.cluster_key, part)

    def close(self) -> None:
        super().close()
        if self._group is not None and self._ray.is_initialized():
            self._ray.util.remove_placement_group(self._group)
            self._group = None
