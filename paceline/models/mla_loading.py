"""Checkpoint tensors to a latent attention block: names and shapes, and the KV projection absorbed.

Called by models/loading for one layer at a time; computes nothing at run time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.kernels.dispatch import pick_latent_kernels
from paceline.kernels.mla import LatentNorm
from paceline.layers.mla import LatentAttention, QueryRank
from paceline.layers.rope import interleave_pairs
from paceline.models.sharding import Cuts, even_cut
from paceline.models.spec import MlaSpec, ModelSpec
from paceline.parallel.collectives import Group

if TYPE_CHECKING:
    from paceline.models.loading import Reader

Shape = tuple[str, tuple[int, ...]]


def latent_shapes(spec: ModelSpec, at: str) -> list[Shape]:
    """Every tensor of one block, whose names begin with `at`."""
    mla, width, heads = _mla(spec), spec.hidden_size, spec.num_heads
    rank = mla.query_rank
    matrices = [
        ("kv_a_proj_with_mqa", mla.row_size, width, spec.has_qkv_bias),
        ("kv_b_proj", heads * (mla.nope_size + mla.value_size), mla.latent_size, False),
        ("o_proj", width, heads * mla.value_size, spec.has_o_bias),
    ]
    shapes: list[Shape] = [(at + "kv_a_layernorm.weight", (mla.latent_size,))]
    if rank is None:
        matrices.append(("q_proj", heads * mla.query_size, width, False))
    else:
        matrices.append(("q_a_proj", rank, width, spec.has_qkv_bias))
        matrices.append(("q_b_proj", heads * mla.query_size, rank, False))
        shapes.append((at + "q_a_layernorm.weight", (rank,)))
    for name, rows, columns, has_bias in matrices:
        shapes.append((f"{at}{name}.weight", (rows, columns)))
        if has_bias:
            shapes.append((f"{at}{name}.bias", (rows,)))
    return shapes


def latent_cuts(spec: ModelSpec, at: str, group: Group) -> Cuts:
    """Shared out by head; the narrow vectors, and so the cache, are whole on every rank."""
    mla, heads = _mla(spec), spec.num_heads
    queries = even_cut(0, heads * mla.query_size, group)
    return {
        at + "q_proj.weight": queries,
        at + "q_b_proj.weight": queries,
        at + "kv_b_proj.weight": even_cut(0, heads * (mla.nope_size + mla.value_size), group),
        at + "o_proj.weight": even_cut(1, heads * mla.value_size, group),
    }


def load_latent_attention(spec: ModelSpec, read: Reader, at: str) -> LatentAttention:
    mla, heads, formats = _mla(spec), spec.num_heads, read.formats
    query_name, kv_name = at + "q_proj", at + "kv_a_proj_with_mqa"
    query: QueryRank | None = None
    if mla.query_rank is not None:
        rows = _ordered(read.tensor(at + "q_b_proj.weight"), heads, mla)
        norm_Q = read.norm(at + "q_a_layernorm.weight")
        query = QueryRank(norm_Q, mla.norm_eps, formats.linear(rows, None))
        first, first_bias = _rows(read, at + "q_a_proj")
    else:
        first, first_bias = _rows(read, query_name)
        first = _ordered(first, heads, mla)
    kv, kv_bias = _rows(read, kv_name)
    kv = _ordered(kv, 1, mla)
    bias = None
    if first_bias is not None or kv_bias is not None:
        kv_bias = None if kv_bias is None else _ordered(kv_bias, 1, mla)
        parts = ((first, first_bias), (kv, kv_bias))
        bias = torch.cat([x.new_zeros(len(x)) if b is None else b for x, b in parts])
    absorbed = read.tensor(at + "kv_b_proj.weight").to(formats.device, formats.compute)
    absorbed = absorbed.view(heads, mla.nope_size + mla.value_size, mla.latent_size)
    key_NQL, value_NVL = absorbed.split((mla.nope_size, mla.value_size), dim=1)
    return LatentAttention(
        down=formats.linear(torch.cat((first, kv)), bias),
        query=query,
        key_NQL=key_NQL.contiguous(),
        value_NLV=value_NVL.transpose(1, 2).contiguous(),
        norm=LatentNorm(read.norm(at + "kv_a_layernorm.weight"), mla.norm_eps),
        o=read.reduced(at + "o_proj"),
        kernels=pick_latent_kernels(formats.device),
        scale=mla.query_size**-0.5 * spec.rope.softmax_factor,
    )


def _rows(read: Reader, name: str) -> tuple[Tensor, Tensor | None]:
    return read.tensor(name + ".weight"), read.optional(name + ".bias")


def _ordered(rows: Tensor, num_heads: int, mla: MlaSpec) -> Tensor:
    """Rotary pairs are neighbours in what we compute; some checkpoints have them as halves."""
    if mla.is_interleaved:
        return rows
    by_head = rows.unflatten(0, (num_heads, -1))
    rope = by_head[:, -mla.rope_size :].flatten(0, 1)
    paired = interleave_pairs(rope, num_heads).unflatten(0, (num_heads, -1))
    return torch.cat((by_head[:, : -mla.rope_size], paired), dim=1).flatten(0, 1)


def _mla(spec: ModelSpec) -> MlaSpec:
    assert spec.mla is not None, f"{spec.family} has no latent attention"
    return spec.mla
