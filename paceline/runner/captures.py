"""Which steps are captured and when: before the first request, in spare time, at first use.

Owns the policy; `graphs.py` captures and replays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby

from paceline.kernels.gpu.device import compiling_ahead
from paceline.kernels.linear.tiles import BUCKETS as PRODUCT_ROWS
from paceline.runner.graphs import GraphKey, Graphs
from paceline.runner.shapes import Buckets
from paceline.sampling.verify import SamplingMode

RunEmpty = Callable[[GraphKey], None]
Progress = Callable[[str, float], None]


class Captures:
    """The captured steps of one engine. Without graphs (`enforce_eager`, tests) it only compiles.

    `run` runs the step of a key; `write_empty` writes a packet without rows.
    """

    def __init__(
        self,
        run: Callable[[GraphKey], None],
        write_empty: Callable[[int], None],
        buckets: Buckets,
        graphs: Graphs | None,
        *,
        compiles: bool,
    ) -> None:
        self.run = run
        self.write_empty = write_empty
        self._buckets = buckets
        self._graphs = graphs
        self._compiles = compiles
        self._wanted: Iterator[GraphKey] = iter(())
        self.has_more = False

    @property
    def stats(self) -> dict[str, float]:
        graphs = self._graphs
        return {
            "num_replays": graphs.num_replays if graphs else 0,
            "num_captured": len(graphs) if graphs else 0,
            "capture_s": graphs.capture_s if graphs else 0.0,
        }

    def close(self) -> None:
        if self._graphs is not None:
            self._graphs.close()

    def replay(self, key: GraphKey) -> bool:
        """Run the step of a key. False: it ran eagerly, and is captured from now on."""
        if self._graphs is None:
            self.run(key)
            return False
        found = self._graphs.find(key)
        if found is not None:
            self._graphs.replay(found)
            return True
        # A key that was not foreseen: the step itself compiles what is missing, then it is
        # captured, so that a second step of the kind has its graph whatever the load.
        self.run(key)
        self._graphs.capture(key)
        return False

    def compile(self, progress: Progress) -> None:
        """Build the kernels of the first steps, many at a time."""
        if self._compiles:
            progress("compiling kernels", 0.0)
            with compiling_ahead():
                for key in (*self.keys()[0], *self.soon_met()):
                    self.run(key)

    def prepare(self, run_empty: RunEmpty, progress: Progress) -> None:
        """Capture what must be there before the first request; the rest in spare time."""
        if self._graphs is None:
            return
        first, rest = self.keys()
        for number, key in enumerate(first):
            progress("capturing graphs", number / len(first))
            self._capture(self._graphs, key, run_empty)
        self._wanted, self.has_more = iter(rest), True

    def capture_next(self, run_empty: RunEmpty) -> bool:
        """False: there is nothing left to capture."""
        graphs = self._graphs
        if graphs is None:
            return False
        key = next((k for k in self._wanted if k not in graphs), None)
        if key is None:
            self.has_more = False
            return False
        self._capture(graphs, key, run_empty)
        return True

    def keys(self) -> tuple[list[GraphKey], list[GraphKey]]:
        """What is captured before the first request, and all that is captured in the end."""
        buckets = self._buckets
        tiers = buckets.k_tiers[::-1]
        first = [GraphKey(s, SamplingMode.GREEDY) for s in buckets.decode_shapes(tiers[0])]
        rest = [
            GraphKey(shape, mode)
            for shapes in (buckets.decode_shapes, buckets.mixed_shapes)
            for mode in SamplingMode
            for k in tiers
            for shape in shapes(k)
        ]
        return first, rest

    def soon_met(self) -> Iterator[GraphKey]:
        """Steps of the first requests: prompts, which have other kernels by size, and sampling."""
        buckets, k = self._buckets, self._buckets.k_tiers[-1]
        yield GraphKey(next(buckets.decode_shapes(k)), SamplingMode.SAMPLE)
        sizes = {*PRODUCT_ROWS, buckets.mixed_tokens[-1]}
        for tokens, shapes in groupby(buckets.mixed_shapes(k), lambda shape: shape.tokens):
            if tokens in sizes:
                yield GraphKey(next(shapes), SamplingMode.GREEDY)

    def smallest_key(self) -> GraphKey:
        return GraphKey(next(self._buckets.decode_shapes(0)), SamplingMode.GREEDY)

    def _capture(self, graphs: Graphs, key: GraphKey, run_empty: RunEmpty) -> None:
        run_empty(key)  # compiles and allocates whatever the key needs
        graphs.capture(key)
