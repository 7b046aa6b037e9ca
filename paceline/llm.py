"""The offline API: `LLM.generate` and `LLM.chat` block and return results in prompt order.

Never imports torch.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from paceline.config import EngineConfig
from paceline.engine.batch import Batch, BatchItem
from paceline.engine.client import EngineClient
from paceline.engine.prompts import (
    Messages,
    PromptInput,
    read_conversations,
    read_prompts,
    spread_params,
    spread_priority,
)
from paceline.engine.stats import EngineStats
from paceline.errors import InvalidRequest, nearest
from paceline.observe.progress import ProgressLine
from paceline.request import RequestOutput, SamplingParams
from paceline.text.tokenizer import Tokenizer

_TOKENIZE_AT_ONCE = 1024


class ProgressBar(Protocol):
    """What a function given as `use_tqdm` returns, for example a tqdm."""

    def update(self, n: int, /) -> object: ...

    def close(self) -> None: ...


UseTqdm = bool | Callable[..., ProgressBar]


class LLM:
    """A model in an engine process.

    Keywords are the flags of `paceline serve` with underscores, under the names vLLM users know.
    `engine_in_process` (ours) runs the engine in a thread of this process, for debugging.
    """

    def __init__(
        self,
        model: str = "",
        *,
        speculative_config: Mapping[str, Any] | None = None,
        engine_in_process: bool = False,
        **options: Any,
    ) -> None:
        config = EngineConfig.from_keywords(
            model=model, speculative_config=speculative_config, **options
        )
        self._adopt(EngineClient.start(config, in_process=engine_in_process))

    @classmethod
    def from_client(cls, client: EngineClient) -> Self:
        """An LLM for an engine that was started before. Closing the LLM closes the engine."""
        llm = cls.__new__(cls)
        llm._adopt(client)
        return llm

    def _adopt(self, client: EngineClient) -> None:
        self._client = client
        self._request_ids = map(str, itertools.count())
        self._lock = threading.Lock()  # one thread at a time may use the client

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        priority: int | Sequence[int] | None = None,
        **unsupported: Any,
    ) -> list[RequestOutput]:
        """Complete each prompt: a string, {"prompt": ...} or {"prompt_token_ids": [...]}.

        `sampling_params` is one for all or one per prompt; None takes the model's own defaults
        (generation_config.json). A prompt that cannot be served raises before any is submitted.
        Ctrl-C aborts the running prompts and leaves the LLM usable.
        """
        _refuse_keywords(unsupported)
        read = self._encode(read_prompts(prompts))
        each_params = self._params(sampling_params, len(read))
        each_priority = spread_priority(priority, len(read))
        items = [
            BatchItem(text, ids, params, rank)
            for (text, ids), params, rank in zip(read, each_params, each_priority, strict=True)
        ]
        return self._run(items, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of a list of them, through the model's chat template.

        `tools` are functions in OpenAI's form, which the prompt describes. Outputs are the model's
        text; the server sorts it into calls.
        """
        conversations = read_conversations(messages)
        each_params = self._params(sampling_params, len(conversations))
        template = self._client.load_chat_template(chat_template)
        tokenizer = self._client.tokenizer
        items = []
        for conversation, params in zip(conversations, each_params, strict=True):
            text = template.render(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=None if tools is None else [dict(tool) for tool in tools],
                **(chat_template_kwargs or {}),
            )
            # The template writes the special tokens itself.
            items.append(BatchItem(text, tokenizer.encode(text, add_special_tokens=False), params))
        return self._run(items, use_tqdm)

    def get_tokenizer(self) -> Tokenizer:
        return self._client.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses when no sampling_params are given."""
        return SamplingParams(**self._client.default_sampling)

    def get_metrics(self) -> EngineStats:
        """Totals of the engine so far: steps, bubble, drafts, accepted drafts, preemptions."""
        return self._client.stats

    def reset_prefix_cache(self) -> None:
        self._client.reset_prefix_cache()

    def close(self) -> None:
        """Stop the engine process. A second call does nothing."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _params(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        return spread_params(params, count)

    def _encode(
        self, read: list[tuple[str | None, list[int] | None]]
    ) -> list[tuple[str | None, list[int]]]:
        texts = [text for text, ids in read if ids is None and text is not None]
        encoded: Iterator[list[int]] = iter(())
        if texts:
            tokenizer = self._client.tokenizer
            starts = range(0, len(texts), _TOKENIZE_AT_ONCE)
            encoded = itertools.chain.from_iterable(
                tokenizer.encode_batch(texts[start : start + _TOKENIZE_AT_ONCE]) for start in starts
            )
        return [(text, next(encoded) if ids is None else ids) for text, ids in read]

    def _run(self, items: list[BatchItem], use_tqdm: UseTqdm) -> list[RequestOutput]:
        with self._lock:
            bar = _ProgressBar(use_tqdm, len(items))
            try:
                return Batch(self._client, items, self._request_ids, bar.update).run()
            finally:
                bar.close()


class _ProgressBar:
    """Our own line, the caller's tqdm, or nothing."""

    def __init__(self, use_tqdm: UseTqdm, total: int) -> None:
        self._line: ProgressLine | None = None
        self._theirs: ProgressBar | None = None
        if callable(use_tqdm):
            self._theirs = use_tqdm(total=total, desc="Processed prompts")
        elif use_tqdm:
            self._line = ProgressLine(total, "Processed prompts")

    def update(self, done: int, tokens: int) -> None:
        if self._line is not None:
            self._line.update(done, tokens)
        if self._theirs is not None and done:
            self._theirs.update(done)

    def close(self) -> None:
        for bar in (self._line, self._theirs):
            if bar is not None:
                bar.close()


def _refuse_keywords(given: Mapping[str, Any]) -> None:
    for name in given:
        if name == "prompt_token_ids":
            raise InvalidRequest(
                "generate() has no prompt_token_ids keyword; pass the ids as prompts: "
                'generate({"prompt_token_ids": [...]}).',
                param="prompt_token_ids",
            )
        hint = nearest(name, ("prompts", "sampling_params", "use_tqdm", "priority"))
        raise InvalidRequest(f"generate() has no keyword {name!r}.{hint}", param=name)
