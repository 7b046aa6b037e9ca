"""Reads the prompts and parameters that a caller of `LLM` gives. Knows no tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import InvalidRequest, nearest
from paceline.request import SamplingParams

PromptInput = str | Mapping[str, Any] | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


def read_prompts(prompts: Any) -> list[tuple[str | None, list[int] | None]]:
    """(text, token ids) of each; the ids are None where the text is still to be encoded.

    One prompt is a string, {"prompt": ...}, {"prompt_token_ids": [...]} or a list of token ids.
    """
    if isinstance(prompts, str | Mapping) or _is_token_ids(prompts):
        return [_read_prompt(prompts)]
    if isinstance(prompts, Sequence) and not isinstance(prompts, bytes):
        return [_read_prompt(item) for item in prompts]
    raise InvalidRequest(
        f"prompts must be a string, a dict or a list of those, got {type(prompts).__name__}.",
        param="prompts",
    )


def _is_token_ids(value: Any) -> bool:
    if isinstance(value, str | bytes | Mapping):
        return False
    if isinstance(value, Sequence):
        return bool(value) and isinstance(value[0], int)
    return getattr(value, "ndim", None) == 1 and hasattr(value, "tolist")


def _read_prompt(item: Any) -> tuple[str | None, list[int] | None]:
    if isinstance(item, str):
        return item, None
    if isinstance(item, Mapping):
        return _read_prompt_dict(item)
    if _is_token_ids(item) or (isinstance(item, Sequence) and not item):
        return None, _to_list(item)
    raise InvalidRequest(
        f"A prompt must be a string, a dict or a list of token ids, got {type(item).__name__}.",
        param="prompts",
    )


def _read_prompt_dict(item: Mapping[str, Any]) -> tuple[str | None, list[int] | None]:
    known = ("prompt", "prompt_token_ids")
    for name in item:
        if name not in known:
            raise InvalidRequest(f"Unknown prompt key {name!r}.{nearest(name, known)}", param=name)
    text, ids = item.get("prompt"), item.get("prompt_token_ids")
    if text is None and ids is None:
        raise InvalidRequest('A prompt dict needs "prompt" or "prompt_token_ids".', param="prompts")
    if text is not None and not isinstance(text, str):
        raise InvalidRequest(f'"prompt" must be a string, got {text!r}.', param="prompt")
    # With both, the ids are computed and the text is reported.
    return text, None if ids is None else _to_list(ids)


def _to_list(ids: Any) -> list[int]:
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    if not isinstance(ids, Sequence) or isinstance(ids, str):
        raise InvalidRequest(
            f"prompt_token_ids must be a list of integers, got {ids!r}.", param="prompt"
        )
    return list(ids)


def read_conversations(messages: Any) -> list[list[dict[str, Any]]]:
    """One conversation or a list of them, as a list of them."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidRequest(
            "messages must be a list of messages, or a list of such lists, and not empty.",
            param="messages",
        )
    conversations = [messages] if isinstance(messages[0], Mapping) else messages
    for conversation in conversations:
        is_list = isinstance(conversation, Sequence) and not isinstance(conversation, str)
        if not is_list or not all(isinstance(m, Mapping) for m in conversation):
            raise InvalidRequest(
                'Each message must be a dict such as {"role": "user", "content": "..."}.',
                param="messages",
            )
    return [[dict(message) for message in conversation] for conversation in conversations]


def spread_params(params: Any, count: int) -> list[SamplingParams]:
    spread = _spread("sampling_params", params, count)
    for one in spread:
        if not isinstance(one, SamplingParams):
            raise InvalidRequest(
                f"sampling_params must be SamplingParams, got {type(one).__name__}.",
                param="sampling_params",
            )
    return spread


def spread_priority(priority: Any, count: int) -> list[int]:
    spread = _spread("priority", 0 if priority is None else priority, count)
    for one in spread:
        if isinstance(one, bool) or not isinstance(one, int):
            raise InvalidRequest(f"priority must be an integer, got {one!r}.", param="priority")
    return spread


def _spread(name: str, value: Any, count: int) -> list[Any]:
    """One for all, or one per prompt."""
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise InvalidRequest(
            f"{name} has {len(value)} entries for {count} prompts; give one, or one per prompt.",
            param=name,
        )
    return list(value)
