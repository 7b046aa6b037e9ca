"""Small vocabularies for tests, learned from a few lines in many scripts, and texts to try."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 12345 o'clock, isn't it? We'll see!",
    "def main():\n    for i in range(100):\n        print(i, i * i)\n\n\nreturn 0\n",
    "Größe, naïve café, Übergrößenträger, señor, ÀÉÎÕÜ, fiancée, jalapeño",
    "東京は日本の首都です。中文字符測試。한국어 문장입니다. ไทย العربية עברית",
    "Привет, мир! Γειά σου Κόσμε! 1 234 567,89 € and $5.00 or 50%",
    "emoji 😀😃😄 👩‍👩‍👧 🏳️‍🌈 ❤️ and signs ∑∫√≠ “quotes” – dash — …",
    "hello hello hello world world the the the and and of of to to in in that that",
]
TEXTS = [
    "",
    " ",
    "a",
    "Hello world",
    "  two spaces in front and behind  ",
    "\n\n\n",
    "tabs\tand\r\nreturns\r\n\r\n",
    "    indented\n        more\n",
    "don't I'll we've you're he'd I'm it's IT'S",
    "1234567890 3.14159 1,000,000 x2y3 ²³ ½ ٣٤٥",
    "naïve café Größe ﬁ ǅ",
    "cafe\u0301 (decomposed) e\u0301a\u0300",
    "東京は日本の首都です。中文字符測試 한국어 ไทย",
    "العربية and עברית mixed",
    "😀 👩‍👩‍👧 🏳️‍🌈 ❤️ 🇩🇪",
    "zero\u200bwidth\u00a0nbsp\u3000wide",
    "null\x00 and \x7f control \x1b[0m",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<s>not a start</s> <unk> <0x41> [INST] x [/INST]",
    "<tool>call</tool> and <tool> again",
    "x" * 60,
    "the quick brown fox jumps over the lazy dog " * 4,
    "\u2581 a real lower block \u2581\u2581",
    "ends with a space ",
]


@dataclass
class Vocabulary:
    """What a GGUF stores of a tokenizer."""

    model: str
    pre: str | None
    tokens: list[str]
    types: list[int]
    merges: list[tuple[str, str]] = field(default_factory=list)
    scores: list[float] | None = None
    special: dict[str, int] = field(default_factory=dict)  # "bos" -> id
    flags: dict[str, bool] = field(default_factory=dict)  # "add_bos_token" -> False
    template: str | None = None


def _learn(pre_tokenizer: Any, alphabet: list[str], size: int) -> tuple[list[str], list[Any]]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].get), [tuple(m) for m in model["merges"]]


@functools.cache
def byte_level(pre: str) -> Vocabulary:
    """A byte-level vocabulary with control tokens behind the learned ones, as Qwen's has."""
    learned, merges = _learn(
        pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.ByteLevel.alphabet(), 480
    )
    # A whole word that the merges do not reach: only `ignore_merges` finds it.
    learned.append("unreachable")
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*learned, *control, "<tool>"]
    first = len(learned)
    return Vocabulary(
        model="gpt2",
        pre=pre,
        tokens=tokens,
        types=[1] * len(learned) + [3] * len(control) + [4],
        merges=merges,
        special={"bos": first + 1, "eos": first + 2, "padding": first},
        template="{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )


@functools.cache
def sentencepiece() -> Vocabulary:
    """A SentencePiece BPE vocabulary: bytes, pieces by rank, then single characters."""
    learned, merges = _learn(pre_tokenizers.Metaspace(), [], 420)
    characters = [piece for piece in learned if len(piece) == 1]
    joined = ["".join(m) for m in merges]
    pieces = list(dict.fromkeys([*joined, *characters]))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))]
    return Vocabulary(
        model="llama",
        pre="default",
        tokens=tokens,
        types=[2, 3, 3] + [6] * 256 + [1] * len(pieces),
        scores=scores,
        special={"bos": 1, "eos": 2, "unknown": 0},
    )
