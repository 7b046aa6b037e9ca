"""Clients of an engine that runs the echo runner, and a tokenizer of bytes to read it with.

For tests only; nothing here needs a model or torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from paceline.checkpoint.tokenizer_config import TokenizerConfig
from paceline.config import EngineConfig
from paceline.engine.client import EngineClient
from paceline.engine.front import Front
from paceline.engine.outputs import Delta, Generation
from paceline.request import SamplingParams
from paceline.text.tokenizer import Tokenizer
from tests.patience import PATIENCE_S

FACTORY = "tests.engine.echo_runner:build_echo"
EOS = 256


def byte_tokenizer() -> Tokenizer:
    """One token per byte of UTF-8, " the" as a token of its own, and <end> as number 256."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: token for token, char in enumerate(alphabet)}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    return Tokenizer(backend, TokenizerConfig(named={"eos_token": "<end>"}))


def echo_front(tokenizer: Tokenizer | None = None, **values: Any) -> Front:
    return Front(tokenizer=tokenizer or byte_tokenizer(), eos_token_ids=(EOS,), **values)


@contextmanager
def echo_client(
    behaviour: str = "", *, in_process: bool = True, front: Front | None = None, **options: Any
) -> Iterator[EngineClient]:
    config = EngineConfig.from_keywords(model=behaviour, **options)
    client = EngineClient.start(
        config, in_process=in_process, factory=FACTORY, front=front or echo_front()
    )
    try:
        yield client
    finally:
        client.close()


class Stream:
    """The deltas of one request, as they came."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.generation: Generation | None = None

    def __call__(self, deltas: list[Delta]) -> None:
        self.deltas += deltas

    @property
    def finished(self) -> bool:
        return self.generation is not None and self.generation.finished

    def of(self, index: int) -> list[Delta]:
        return [d for d in self.deltas if d.index == index]

    def text(self, index: int = 0) -> str:
        return "".join(d.text for d in self.of(index))

    def token_ids(self, index: int = 0) -> list[int]:
        return [t for d in self.of(index) for t in d.token_ids]

    def last(self, index: int = 0) -> Delta:
        return self.of(index)[-1]


def submit(client: EngineClient, request_id: str, prompt: str, **params: Any) -> Stream:
    stream = Stream()
    ids = client.tokenizer.encode(prompt)
    sampling = SamplingParams(**params)
    stream.generation = client.submit(request_id, ids, sampling, on_deltas=stream, prompt=prompt)
    return stream


def pump_until_finished(client: EngineClient, *streams: Stream) -> None:
    pump_until(client, lambda: all(s.finished for s in streams))


def pump_until(client: EngineClient, is_so: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < give_up_s, "it did not happen in time"
        client.pump(0.1)


def pump_for_ever(client: EngineClient) -> NoReturn:
    """Until `pump` raises."""
    give_up_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up_s:
        client.pump(1.0)
    raise AssertionError("the engine lives on")


def run(client: EngineClient, prompt: str, **params: Any) -> Stream:
    """One request to its end."""
    stream = submit(client, "one", prompt, **params)
    pump_until_finished(client, stream)
    return stream
