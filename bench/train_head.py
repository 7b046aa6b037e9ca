"""Trains a small EAGLE-1 head for the default model on its own answers, for `bench/drafters.py`.

usage: python -m bench.train_head FOLDER
Only prompts of the half "tune" are asked, so that `bench.drafters --head FOLDER --half test` uses
others. A few minutes of training on a few thousand tokens: the head is right now and then, which is
what a chain has to deal with. With `--half test` it learns the very answers that are timed, and
stands for a good head. It is no head to serve with. Needs transformers.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.drafters import KINDS, ask, prompts
from paceline import LLM
from paceline.checkpoint.convert import convert_gguf
from paceline.checkpoint.default_model import fetch_default_model
from tests.eagle import PlainEagle, features, random_head, save_head


def answered(num_prompts: int, num_tokens: int, threads: int, half: str) -> list[list[int]]:
    """Prompts and answers as tokens."""
    with LLM(cpu_threads=threads, engine_in_process=True) as llm:
        found = []
        for kind in KINDS:
            outputs, _ = ask(llm, kind, prompts(num_prompts, half)[kind], num_tokens, 8)
            found += [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs]
    return found


def train(
    head: PlainEagle, target: Any, texts: list[list[int]], num_steps: int, num_tokens: int
) -> None:
    """One text after the other: the next token from the target's features, then from its own. Of
    each text the last `num_tokens` count, which are the answer."""
    known = [(features(target, text), torch.tensor(text)) for text in texts]
    learned = [w.mul_(0.1).requires_grad_() for w in head.learned()]
    for name, weight in head.weights.items():
        if "norm" in name:
            weight.detach().fill_(1.0)
    width = head.config["hidden_size"]
    with torch.no_grad():  # begin with the target's feature as it is
        head.weights["fc.weight"][:, width:] += torch.eye(width)
    optimizer = torch.optim.Adam(learned, lr=1e-3)
    for number in range(num_steps):
        feature_ND, token_N = known[number % len(known)]
        once_ND = head.forward(feature_ND[:-2], token_N[1:-1])
        own_ND = torch.cat((feature_ND[:1], once_ND[:-1]))
        twice_ND = head.forward(own_ND, token_N[1:-1])
        logits_NV = head.logits(torch.cat((once_ND[-num_tokens:], twice_ND[-num_tokens:])))
        wanted_N = token_N[2:][-num_tokens:].repeat(2)
        loss = torch.nn.functional.cross_entropy(logits_NV, wanted_N)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if number % 20 == 0:
            print(f"step {number}: loss {loss.item():.2f}", flush=True)
    for weight in learned:
        weight.requires_grad_(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=int, default=4, help="of each kind")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--half", default="tune", choices=["both", "tune", "test"], help="prompts")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    import transformers

    torch.set_num_threads(args.threads)
    texts = answered(args.prompts, args.tokens, args.threads, args.half)
    with tempfile.TemporaryDirectory() as name:
        convert_gguf(fetch_default_model(), Path(name) / "model", "float32")
        target: Any = transformers.AutoModelForCausalLM.from_pretrained(
            Path(name) / "model", dtype=torch.float32
        )
    target.requires_grad_(False)
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    sizes = {key: getattr(target.config, key) for key in (*names, "rms_norm_eps")}
    head = random_head(target, **sizes, max_position_embeddings=2048)
    train(head, target, texts, args.steps, args.tokens)
    save_head(args.folder, head)


if __name__ == "__main__":
    main()
