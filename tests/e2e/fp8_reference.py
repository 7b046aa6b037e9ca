"""transformers with keys and values rounded through e4m3: what fp8 pages are compared with.

Computed here from scratch, one token of a sequence after the other, with none of Paceline's code. A
scale is a number, or one for each KV head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# A key on the border between two codes is rounded to the other one where its last bit differs, on
# another CPU. That moves the logits of one prompt a little, so that one token of a few hundred may
# be another. With other scales by 5 %, or without rounding, 11 to 190 of some 450 are.
MOST_OTHERS = 4


def rounded(x: Tensor, scale: Tensor) -> Tensor:
    """To the nearest of e4m3's numbers times the scale."""
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    size = (x.double() / scale.double()).abs().clamp(max=448.0)
    above = torch.searchsorted(grid, size).clamp(1, 126)
    low, high = grid[above - 1], grid[above]
    is_high = (high - size < size - low) | ((high - size == size - low) & (above % 2 == 0))
    return (torch.where(is_high, high, low) * x.sign() * scale).to(x.dtype)


@contextmanager
def rounded_pages(model: Any, key: Tensor, value: Tensor) -> Iterator[None]:
    """Within it, the model sees what fp8 pages hold. Latent attention has one scale."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as FUNCTIONS

    plain = FUNCTIONS["sdpa"]
    norms = [m for name, m in model.named_modules() if name.endswith("kv_a_layernorm")]
    rope = getattr(model.config, "qk_rope_head_dim", 0) if norms else 0

    def attend(module: Any, query: Tensor, keys: Tensor, values: Tensor, *rest: Any, **more: Any):  # type: ignore[no-untyped-def]
        if rope:  # the rest of keys and values was made of rounded latents
            keys = torch.cat((keys[..., :-rope], rounded(keys[..., -rope:], key)), dim=-1)
        else:
            keys, values = (rounded(x, s.view(-1, 1, 1)) for x, s in ((keys, key), (values, value)))
        return plain(module, query, keys, values, *rest, **more)

    hooks = [n.register_forward_hook(lambda _m, _i, latent: rounded(latent, key)) for n in norms]
    FUNCTIONS["sdpa"] = attend
    try:
        yield
    finally:
        FUNCTIONS["sdpa"] = plain
        for hook in hooks:
            hook.remove()


def num_others(model: Any, prompts: Sequence[list[int]], outputs: Sequence[list[int]]) -> int:
    """Tokens that are not the model's, given those before them."""
    found = 0
    for prompt, tokens in zip(prompts, outputs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        found += int((logits.argmax(1) != torch.tensor(tokens)).sum())
    return found
