"""A runner that answers by a script, with drafts of which some are wrong.

It keeps slots, pages and windows as `FakeRunner` does, which checks every plan. Tokens are those of
the model folder's tokenizer. A draft is wrong at fixed positions, so windows of 1 to K + 1 tokens
are cut at every place of tool calls and reasoning markers.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.config import EngineConfig
from paceline.engine.front import load_front
from paceline.parallel.placement import RankPlace
from paceline.request import EngineRequest
from paceline.step import Ints, Runner, RunnerInfo
from paceline.text.tokenizer import Tokenizer
from tests.clients.script import answer
from tests.fake_model import is_allowed
from tests.fakes import FakeRunner, Slot

MAX_MODEL_LEN = 400_000  # prompts of agents have about 100,000 tokens of this tokenizer
K = 5
PAGE_SIZE = 16
STEP_S = 0.001  # so that a stream has more than one chunk


class ScriptedRunner(FakeRunner):
    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(
            RunnerInfo(
                num_pages=3 * MAX_MODEL_LEN // PAGE_SIZE,
                page_size=PAGE_SIZE,
                num_slots=4,
                max_model_len=MAX_MODEL_LEN,
                vocab_size=tokenizer.vocab_size,
                max_k=K,
                draft_lookahead=K,
                max_host_drafts=7,
                draft_methods=("ngram",),
                max_num_batched_tokens=16384,
                model_name="scripted",
            ),
            delay=lambda: time.sleep(STEP_S),
        )
        self.keeps_plans = False
        self._tokenizer = tokenizer
        assert tokenizer.eos_token_id is not None
        # Ends of JSON, then the begin of JSON and of a call (`<to`), not of a thought (`<th`).
        closers = [tokenizer.encode(text, add_special_tokens=False)[0] for text in '"}]0{o']
        self._enders = (tokenizer.eos_token_id, *closers)
        self._answers: dict[int, list[int]] = {}  # by request

    def sample(self, slot: Slot, bans_stops: bool, mask: Ints | None) -> int:
        """The script's token. If the request forbids it: what ends a structure soonest."""
        assert slot.init is not None
        request = slot.init.request
        banned: tuple[int, ...] = request.eos_token_ids if bans_stops else ()
        wanted = self._scripted(slot, len(slot.tokens))
        tokens: tuple[int, ...] = (wanted, *self._enders, *range(self.info.vocab_size))
        return next(t for t in tokens if is_allowed(mask, t) and t not in banned)

    def propose(self, slot: Slot, k: int) -> list[int]:
        """The script's next tokens. One of four is wrong, and some are missing."""
        first = len(slot.tokens)
        places = range(first, first + k)
        drafts = [self._scripted(slot, place) ^ _is_wrong(place) for place in places]
        return drafts if first % 13 else [-1] * k

    def _scripted(self, slot: Slot, position: int) -> int:
        assert slot.init is not None
        uid = slot.init.request.uid
        if uid not in self._answers:
            if len(self._answers) > 4 * self.info.num_slots:  # most of them have ended
                self._answers.clear()
            self._answers[uid] = self._tokens_of(slot.init.request)
        tokens = self._answers[uid]
        return tokens[min(position - slot.init.prompt_len, len(tokens) - 1)]

    def _tokens_of(self, request: EngineRequest) -> list[int]:
        prompt = self._tokenizer.decode(list(request.prompt_token_ids), skip_special_tokens=False)
        tokens = self._tokenizer.encode(answer(prompt), add_special_tokens=False)
        return [*tokens, self._enders[0]]


def _is_wrong(place: int) -> bool:
    return place * 2654435761 >> 7 & 3 == 0


def build_scripted(
    config: EngineConfig, progress: Callable[[str, float], None], place: RankPlace
) -> Runner:
    """The factory: `tests.clients.scripted_runner:build_scripted`."""
    progress("loading", 1.0)
    tokenizer = load_front(config).tokenizer
    assert tokenizer is not None
    return ScriptedRunner(tokenizer)
