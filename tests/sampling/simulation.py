"""A model made of noise, a loop that feeds `verify` with any drafts, and a plain one-by-one twin.

The twin is written from the definitions, with full sorts and Python loops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from paceline.kernels.rng import reference as rng
from paceline.kernels.rows import WindowRows
from paceline.request import Done, EngineRequest
from paceline.sampling.custom import CustomProcessors
from paceline.sampling.params import GREEDY_BELOW, mode_of, slot_rows
from paceline.sampling.verify import SamplingMode, Synthetic
from paceline.state.slots import Slots
from tests.sampling.verifying import accept

Row = npt.NDArray[np.float32]
CPU = torch.device("cpu")
# (request index, tokens so far, k) -> drafts, at most k, -1 for none
Drafter = Callable[[int, list[int], int], list[int]]


@dataclass
class Output:
    """What one request produced."""

    tokens: list[int] = field(default_factory=list)
    done: Done = Done.RUNNING
    chosen: list[float] = field(default_factory=list)  # logprob of each token
    top: list[dict[int, float]] = field(default_factory=list)
    num_steps: int = 0
    num_drafts: int = 0
    num_accepted: int = 0


@dataclass(frozen=True)
class NoiseModel:
    """Logits that depend on the last two tokens and the length: no two prefixes alike."""

    vocab_size: int
    seed: int = 0
    scale: float = 2.0

    def row(self, history: Sequence[int]) -> Row:
        generator = np.random.default_rng([self.seed, len(history), *history[-2:]])
        return (generator.standard_normal(self.vocab_size) * self.scale).astype(np.float32)


class Simulation:
    """Requests in slots, stepped through `verify` as the device step does it."""

    def __init__(
        self,
        requests: Sequence[EngineRequest],
        model: NoiseModel,
        *,
        max_len: int = 64,
        max_k: int = 5,
        processors: Sequence[str] = (),
    ) -> None:
        self.model = model
        self.requests = requests
        self.slots = Slots(len(requests), 128, max_k, model.vocab_size, CPU)
        self.custom = CustomProcessors(processors, model.vocab_size, CPU)
        self.history = [list(r.prompt_token_ids) for r in requests]
        self.outputs = [Output() for _ in requests]
        self.mode = max((mode_of(r) for r in requests), default=SamplingMode.GREEDY)
        for slot, request in enumerate(requests):
            prompt_len = len(request.prompt_token_ids)
            limit = min(max_len, prompt_len + (request.params.max_tokens or max_len))
            rows = slot_rows(request, limit, prompt_len, vocab_size=model.vocab_size)
            for name, value in rows.items():
                getattr(self.slots, name)[slot] = torch.as_tensor(value)
            self.slots.tokens_SL[slot, :prompt_len] = torch.tensor(request.prompt_token_ids)
            self.custom.assign(
                slot, request.params.logits_processors or (), request.params.extra_args
            )

    def step(self, k: int, drafter: Drafter, *, padded: bool, synthetic: Synthetic | None) -> None:
        """One verify over all live requests. `padded` keeps windows k + 1 wide, as CUDA does."""
        live = [i for i, out in enumerate(self.outputs) if out.done == Done.RUNNING]
        drafts, rows, widths = [], [], []
        for i in live:
            draft = (drafter(i, self.history[i], k) + [-1] * k)[:k]
            width = k + 1 if padded else 1 + sum(d >= 0 for d in draft)
            for j in range(width):
                before = draft[:j]
                known = all(d >= 0 for d in before)
                # Rows behind a missing draft hold whatever the device left there.
                row = self.model.row(self.history[i] + before) if known else None
                rows.append(
                    np.full(self.model.vocab_size, np.nan, np.float32) if row is None else row
                )
            drafts.append(draft)
            widths.append(width)
        windows = WindowRows.packed(
            torch.tensor(live),
            torch.tensor(widths),
            torch.tensor(drafts, dtype=torch.int32).reshape(len(live), k),
            torch.tensor([len(self.history[i]) for i in live], dtype=torch.int32),
        )
        accepted = accept(
            torch.from_numpy(np.stack(rows)),
            windows,
            self.slots,
            mode=self.mode,
            synthetic=synthetic,
            custom=self.custom,
        )
        for b, i in enumerate(live):
            self._commit(i, accepted.token_BW[b, : accepted.count_B[b]].tolist())
            out = self.outputs[i]
            out.done = Done(int(accepted.done_B[b]))
            out.num_steps += 1
            out.num_drafts += int(accepted.num_drafts_B[b])
            out.num_accepted += int(accepted.num_accepted_B[b])
            wanted = self.requests[i].params.logprobs
            for j in range(int(accepted.count_B[b]) if wanted is not None else 0):
                ids, values = accepted.ids_BWT[b, j].tolist(), accepted.values_BWT[b, j].tolist()
                out.chosen.append(values[0])
                top = slice(1, 1 + (wanted or 0))
                out.top.append(dict(zip(ids[top], values[top], strict=True)))

    def _commit(self, i: int, tokens: list[int]) -> None:
        length = len(self.history[i])
        self.slots.tokens_SL[i, length : length + len(tokens)] = torch.tensor(tokens)
        self.history[i].extend(tokens)
        self.outputs[i].tokens.extend(tokens)

    def run(
        self,
        k: int = 0,
        drafter: Drafter = lambda i, history, k: [],
        *,
        padded: bool = False,
        synthetic: Synthetic | None = None,
    ) -> list[Output]:
        while any(out.done == Done.RUNNING for out in self.outputs):
            self.step(k, drafter, padded=padded, synthetic=synthetic)
        return self.outputs


def one_by_one(request: EngineRequest, model: NoiseModel, max_len: int = 64) -> Output:
    """The definition of what a request produces."""
    params, out = request.params, Output()
    prompt = list(request.prompt_token_ids)
    tokens = list(prompt)
    limit = min(max_len, len(prompt) + (params.max_tokens or max_len))
    stops = tuple(params.stop_token_ids or ())
    while out.done == Done.RUNNING:
        raw = model.row(tokens)
        row = processed_row(raw.copy(), request, tokens)
        token = drawn_token(row, request, len(tokens))
        if params.logprobs is not None:
            logprobs = raw.astype(np.float64) - np.log(np.exp(raw.astype(np.float64)).sum())
            out.chosen.append(float(logprobs[token]))
            best = np.argsort(-raw, kind="stable")[: params.logprobs]
            out.top.append({int(i): float(logprobs[i]) for i in best})
        enough = len(tokens) - len(prompt) >= params.min_tokens
        tokens.append(token)
        if token in request.eos_token_ids and enough:
            out.done = Done.EOS
        elif token in stops and enough:
            out.done = Done.STOP_TOKEN
        elif len(tokens) == limit:
            out.done = Done.LENGTH
    out.tokens = tokens[len(prompt) :]
    return out


def processed_row(row: Row, request: EngineRequest, tokens: list[int]) -> Row:
    params = request.params
    output = tokens[len(request.prompt_token_ids) :]
    if params.allowed_token_ids is not None:
        forbidden = set(range(len(row))) - set(params.allowed_token_ids)
        row[list(forbidden)] = -np.inf
    for word in request.bad_word_ids:
        prefix = list(word[:-1])
        if not prefix or tokens[-len(prefix) :] == prefix:
            row[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        row[list(request.eos_token_ids) + list(params.stop_token_ids or ())] = -np.inf
    for token, value in (params.logit_bias or {}).items():
        row[token] += np.float32(value)
    counts = Counter(output)
    for token in set(tokens):
        repetition = np.float32(params.repetition_penalty)
        row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
        row[token] -= np.float32(params.frequency_penalty) * np.float32(counts[token])
        row[token] -= np.float32(params.presence_penalty) * np.float32(counts[token] > 0)
    return row


def drawn_token(row: Row, request: EngineRequest, position: int) -> int:
    params = request.params
    if params.temperature < GREEDY_BELOW:
        return int(row.argmax())
    row = row / np.float32(params.temperature)
    weight = np.exp(row.astype(np.float64) - row.max())
    weight[weight < params.min_p * (1 - 1e-6)] = 0
    if 0 < params.top_k < len(row):
        weight[row < np.sort(row)[-params.top_k]] = 0
    if params.top_p < 1:
        order = np.argsort(-weight, kind="stable")
        mass = np.cumsum(weight[order])
        last = int(np.searchsorted(mass, params.top_p * mass[-1] * (1 - 1e-6)))
        weight[weight < weight[order[last]]] = 0
    seed = (params.seed or 0) & 0xFFFFFFFFFFFFFFFF
    halves = np.array([[seed & 0xFFFFFFFF, seed >> 32]], np.uint32).view(np.int32)
    noise = rng.exponential(
        torch.from_numpy(halves), torch.tensor([position], dtype=torch.int32), 0, len(row)
    )[0].numpy()
    return int(np.where(weight > 0, row - np.log(noise), -np.inf).argmax())
