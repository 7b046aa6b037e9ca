"""What `paceline verify` asks: an engine that it starts, or a server over HTTP.

Knows no check. Both kinds answer token ids with token ids.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.commands.http_stream import (
    Endpoint,
    NotOffered,
    RequestFailed,
    first_model,
    post,
    reading,
    request,
)
from paceline.commands.prompts import PromptRecord
from paceline.commands.report import resolved
from paceline.commands.session import Session, open_session
from paceline.config import EngineConfig
from paceline.engine.messages import StepTimes
from paceline.errors import ConfigError, EngineDead
from paceline.llm import LLM
from paceline.request import RequestOutput, SamplingParams

_SERVER_CONCURRENCY = 32  # requests at once on a server, if a check does not say
_SERVER_LOGPROBS = 20  # vLLM's default for --max-logprobs, and ours
_LIVE_S = 10.0  # /v1/live sends a frame every second


@dataclass(frozen=True)
class Ask:
    """One request: token ids, and sampling parameters by name."""

    prompt: Sequence[int]
    params: dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """Output tokens with what drafts and the prefix cache did for them."""

    token_ids: list[int]
    text: str = ""
    num_drafts: int = 0
    num_accepted: int = 0
    num_cached: int = 0
    # Of the last prompt position, if prompt_logprobs were asked for: token -> logprob.
    last_logprobs: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class About:
    """What is known of the engine; an empty text or None is not known."""

    model: str
    device: str = ""
    dtype: str = ""
    drafters: tuple[str, ...] = ()
    draft_sampling: str = ""
    page_size: int = 16
    max_model_len: int | None = None
    max_logprobs: int = _SERVER_LOGPROBS
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Load:
    """Device time since the last `take_load`, or since the start of a server."""

    idle_s: float
    busy_s: float
    steps: Sequence[StepTimes] = ()
    accepted_per_position: Sequence[int] = ()


class Target(Protocol):
    about: About

    def encode(self, prompt: PromptRecord) -> list[int]: ...

    def ask(self, asks: Sequence[Ask], concurrency: int | None = None) -> list[Reply]:
        """Answers in order. `concurrency` is the most requests at once; None: any number."""

    def take_load(self) -> Load | None:
        """None: it does not say."""


class EngineTarget:
    """An engine that this command has started."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._llm = LLM.from_client(session.client)
        config, info = session.client.config, session.client.info
        speculative = config.speculative
        self.about = About(
            model=info.model_name,
            device=info.device,
            dtype=info.dtype,
            drafters=info.draft_methods,
            draft_sampling=speculative.draft_sample_method if speculative else "",
            page_size=info.page_size,
            max_model_len=info.max_model_len,
            max_logprobs=min(config.model.max_logprobs, info.vocab_size, _SERVER_LOGPROBS),
            config=resolved(config, info),
        )

    def encode(self, prompt: PromptRecord) -> list[int]:
        return self._session.encode(prompt)

    def ask(self, asks: Sequence[Ask], concurrency: int | None = None) -> list[Reply]:
        size = concurrency or max(1, len(asks))
        outputs: list[RequestOutput] = []
        for start in range(0, len(asks), size):
            part = asks[start : start + size]
            outputs += self._llm.generate(
                [{"prompt_token_ids": list(ask.prompt)} for ask in part],
                [SamplingParams(**ask.params) for ask in part],
                use_tqdm=False,
            )
        return [_reply(output) for output in outputs]

    def take_load(self) -> Load:
        stats = self._session.client.stats
        steps = [times for times in stats.recent if times.idle_s >= 0.0]
        stats.recent.clear()
        idle_s, busy_s = sum(t.idle_s for t in steps), sum(t.busy_s for t in steps)
        return Load(idle_s, busy_s, steps, [*stats.accepted_per_position])


def _reply(output: RequestOutput) -> Reply:
    metrics, answer = output.metrics, output.outputs[0]
    table = (output.prompt_logprobs or [None])[-1] or {}
    return Reply(
        list(answer.token_ids),
        answer.text,
        metrics.num_draft_tokens,
        metrics.num_accepted_tokens,
        metrics.num_cached_tokens,
        {token: found.logprob for token, found in table.items()},
    )


class ServerTarget:
    """A server that runs already."""

    def __init__(self, endpoint: Endpoint, dtype: str) -> None:
        self._endpoint = endpoint
        try:
            card = asyncio.run(first_model(endpoint))
            live = asyncio.run(self._live())
        except RequestFailed as error:
            hint = " (give the key with --api-key)" if str(error).startswith("HTTP 401") else ""
            raise EngineDead(f"{endpoint.url} cannot be verified: {error}{hint}") from None
        has_drafts = live is None or live[0] > 0
        self.about = About(
            model=card["id"],
            dtype=dtype,
            drafters=("the server's",) if has_drafts else (),
            max_model_len=card.get("max_model_len"),
            config={"url": endpoint.url},
        )

    def encode(self, prompt: PromptRecord) -> list[int]:
        if prompt.token_ids is not None:
            return prompt.token_ids
        body: dict[str, Any] = {"prompt": prompt.text}
        if prompt.messages is not None:
            body = {"messages": prompt.messages}
        found = asyncio.run(post(self._endpoint, "/tokenize", body))
        with reading("/tokenize"):
            return [int(token) for token in found["tokens"]]

    def ask(self, asks: Sequence[Ask], concurrency: int | None = None) -> list[Reply]:
        return asyncio.run(self._ask_all(asks, concurrency or _SERVER_CONCURRENCY))

    async def _ask_all(self, asks: Sequence[Ask], concurrency: int) -> list[Reply]:
        limiter = asyncio.Semaphore(concurrency)

        async def one(ask: Ask) -> Reply:
            body = {"model": self.about.model, "prompt": list(ask.prompt), **ask.params}
            body["return_token_ids"] = True
            async with limiter:
                found = await post(self._endpoint, "/v1/completions", body)
            with reading("/v1/completions"):
                return _from_json(found)

        return await asyncio.gather(*map(one, asks))

    def take_load(self) -> Load | None:
        live = asyncio.run(self._live())
        return None if live is None else live[1]

    async def _live(self) -> tuple[int, Load] | None:
        """Most drafts, and the load, of the first frame of /v1/live; None: the server has none."""
        with suppress(RequestFailed, TimeoutError), reading("/v1/live"):
            async with (
                asyncio.timeout(_LIVE_S),
                request(self._endpoint, "GET", "/v1/live") as content,
            ):
                while line := await content.readline():
                    if line.startswith(b"data:"):
                        frame = json.loads(line[5:])
                        load = Load(
                            *(float(frame["bubble_s"]), float(frame["busy_s"]), ()),
                            accepted_per_position=list(frame["accepted_per_position"]),
                        )
                        return int(frame["max_drafts"]), load
        return None


def _from_json(body: dict[str, Any]) -> Reply:
    choice, usage = body["choices"][0], body["usage"]
    if "token_ids" not in choice:
        raise NotOffered("the server does not know return_token_ids")
    drafts = usage.get("completion_tokens_details") or {}
    accepted = drafts.get("accepted_prediction_tokens") or 0
    table = (choice.get("prompt_logprobs") or [None])[-1] or {}
    return Reply(
        choice["token_ids"],
        choice["text"],
        accepted + (drafts.get("rejected_prediction_tokens") or 0),
        accepted,
        (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        {int(token): found["logprob"] for token, found in table.items()},
    )


@contextmanager
def open_engine(config: EngineConfig) -> Iterator[EngineTarget]:
    if config.nodes.headless:
        raise ConfigError("--headless starts a node without requests; run `verify` on node 0.")
    with open_session(config) as session:
        yield EngineTarget(session)
