"""Which steps are captured and when: before the first request, in spare time, at first use.

Owns the policy; `graphs.py` captures and replays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, groupby

from paceline.kernels.gpu.device import compiling_ahead
from paceline.kernels.linear.tiles import BUCKETS as PRODUCT_ROWS
from paceline.runner.graphs import GraphKey, Graphs, Part
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
        self._met = {(False, False)}  # (has host drafts beyond the drafter's, has late rows)

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
        # A key that was not captured yet. The eager step compiles what is missing; then the key is
        # captured, so that the next such step has a graph even under load. A is captured with B.
        self.run(key)
        if key.part is not Part.A:
            self._capture_halves(self._graphs, key)
        return False

    def compile(self, progress: Progress) -> None:
        """Build the kernels of the first steps, several in parallel."""
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
        """The keys to capture before the first request, and all keys."""
        buckets = self._buckets
        tiers = [k for k in reversed(buckets.k_tiers) if k <= buckets.max_k]
        first = [GraphKey(s, SamplingMode.GREEDY) for s in buckets.decode_shapes(tiers[0])]
        rest = [
            GraphKey(shape, mode)
            for shapes in (buckets.decode_shapes, buckets.mixed_shapes)
            for mode in SamplingMode
            for k in tiers
            for shape in shapes(k)
        ]
        return first, rest

    def meet(self, key: GraphKey) -> None:
        """A step of this key is about to run. At the first one with host drafts beyond the
        drafter's, or with late rows, all such steps are captured in spare time."""
        buckets, is_wide = self._buckets, key.shape.k > self._buckets.max_k
        kind = (is_wide, key.part is not Part.WHOLE)
        if kind in self._met:
            return
        self._met.add(kind)
        tiers = [k for k in reversed(buckets.k_tiers) if (k > buckets.max_k) == is_wide]
        modes = list(SamplingMode)
        part = Part.WHOLE
        if key.part is not Part.WHOLE:
            modes, part = [SamplingMode.FULL], Part.B
        more = [
            GraphKey(shape, mode, part)
            for shapes in (buckets.decode_shapes, buckets.mixed_shapes)
            for mode in modes
            for k in tiers
            for shape in shapes(k)
        ]
        self._wanted, self.has_more = chain(more, self._wanted), self._graphs is not None

    def soon_met(self) -> Iterator[GraphKey]:
        """Steps of the first requests: prompts, which have other kernels by size, and sampling."""
        buckets, k = self._buckets, self._buckets.max_k
        yield GraphKey(next(buckets.decode_shapes(k)), SamplingMode.SAMPLE)
        sizes = {*PRODUCT_ROWS, buckets.mixed_tokens[-1]}
        for tokens, shapes in groupby(buckets.mixed_shapes(k), lambda shape: shape.tokens):
            if tokens in sizes:
                yield GraphKey(next(shapes), SamplingMode.GREEDY)

    def smallest_key(self) -> GraphKey:
        return GraphKey(next(self._buckets.decode_shapes(0)), SamplingMode.GREEDY)

    def _capture(self, graphs: Graphs, key: GraphKey, run_empty: RunEmpty) -> None:
        run_empty(key)  # compiles and allocates whatever the key needs
        self._capture_halves(graphs, key)

    @staticmethod
    def _capture_halves(graphs: Graphs, key: GraphKey) -> None:
        for half in key.halves:
            graphs.capture(half)
