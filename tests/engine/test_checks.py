"""The complete check of a request, by the front and again by the engine."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.config import EngineConfig
from paceline.engine.checks import RequestChecks
from paceline.errors import InvalidRequest
from paceline.request import (
    MAX_BAD_WORDS,
    MAX_EOS_TOKEN_IDS,
    MAX_STOP_TOKEN_IDS,
    EngineRequest,
    SamplingParams,
)
from paceline.step import RunnerInfo

VOCAB = 70
INFO = RunnerInfo(100, 16, 4, 64, VOCAB, 3, 0)


def crafted(uid: int = 1, **changes: Any) -> EngineRequest:
    """A request that no front would send: `changes` are not checked."""
    fields = {name: changes.pop(name) for name in ("prompt", "eos", "bad_words") if name in changes}
    params = SamplingParams(max_tokens=3, temperature=0.0, seed=1).replace_unchecked(**changes)
    prompt, eos = fields.get("prompt", [1, 2]), fields.get("eos", ())
    return EngineRequest(uid, prompt, params, eos, fields.get("bad_words", ()))


BAD = [
    ({"prompt": [1, VOCAB]}, "prompt", "0 to 69"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": [1] * 64}, "prompt", "64 tokens"),
    ({"temperature": "hot"}, "temperature", "must be a number"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"bad_words": ((1,),) * (MAX_BAD_WORDS + 1)}, "bad_words", str(MAX_BAD_WORDS)),
    ({"bad_words": ((1,) * 9,)}, "bad_words", "9 tokens"),
    ({"bad_words": ((),)}, "bad_words", "0 tokens"),
    ({"bad_words": ((VOCAB,),)}, "bad_words", "0 to 69"),
    ({"logit_bias": {VOCAB: 1.0}}, "logit_bias", "token id 70"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias", "token id -1"),
    ({"allowed_token_ids": (3, 99)}, "allowed_token_ids", "token id 99"),
    ({"stop_token_ids": (99,)}, "stop_token_ids", "token id 99"),
    ({"stop_token_ids": (1,) * (MAX_STOP_TOKEN_IDS + 1)}, "stop_token_ids", "at most 32"),
    ({"eos": tuple(range(MAX_EOS_TOKEN_IDS + 1))}, "eos_token_ids", "at most 8"),
    ({"logits_processors": ("my:Own",)}, "logits_processors", "Loaded with"),
    ({"logprobs": 21}, "logprobs", "at most 20"),
]


@pytest.mark.parametrize(("changes", "param", "message"), BAD)
def test_a_request_that_cannot_run_is_refused_with_the_field_and_the_limit(
    changes: dict[str, Any], param: str, message: str
) -> None:
    checks = RequestChecks(EngineConfig.from_keywords(), INFO)
    with pytest.raises(InvalidRequest, match=message) as raised:
        checks.check(crafted(**changes))
    assert raised.value.param == param


def test_a_resolved_request_passes_the_check_of_the_engine() -> None:
    """The stop ids of a user and those of a model with many end-of-sequence ids fit together."""
    checks = RequestChecks(EngineConfig.from_keywords(), INFO)
    checks.check(crafted(stop_token_ids=tuple(range(MAX_STOP_TOKEN_IDS))))
