"""KV pages and the page table. Drafter layers are more layers over the same table.

The page after the last is padding. Only the step writes pages, only staging the table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class LayerPages:
    """Keys and values of one layer, head-major: [N, pages * page_size, H].

    Latent attention has one row per token, which begins with its value: `value_NSH` is a view of
    `key_NSH` there.
    """

    key_NSH: Tensor
    value_NSH: Tensor


class Pages:
    """One table for all layers, target and draft; one pair of tensors per layer."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_slots: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.max_pages_per_slot = -(-max_model_len // page_size)
        self.device = device
        # -1: no page yet.
        self.table_SP = torch.full(
            (num_slots + 1, self.max_pages_per_slot), -1, dtype=torch.int32, device=device
        )

    def add_layers(
        self,
        count: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        latent_size: int | None = None,
    ) -> list[LayerPages]:
        """Storage for `count` more layers. Memory is touched, and so taken, only when written.

        `latent_size`: how many numbers at the beginning of a key are its value.
        """
        shape = (num_kv_heads, (self.num_pages + 1) * self.page_size, head_size)

        def storage() -> Tensor:
            return torch.empty(shape, dtype=dtype, device=self.device)

        if latent_size is None:
            return [LayerPages(storage(), storage()) for _ in range(count)]
        keys = [storage() for _ in range(count)]
        return [LayerPages(key, key[..., :latent_size]) for key in keys]
