"""Linear weights in panels of 32 outputs, and the product with them. In torch.

A panel holds its 32 outputs side by side for each input, so that a product runs over outputs in
vector lanes and adds the inputs up in ascending order: a row's bits are its own. Quantised blocks
stay as the checkpoint has them; each weight is the exact float32 number that dequantising gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

PANEL = 32
BLOCK = 32  # inputs that share a scale, in the quantised kinds

# Storage of a panel. q4: per block and output an fp16 scale and offset, then two inputs per byte;
# q8: an fp16 scale, then a signed byte per input; the others: plain numbers.
Kind = Literal["q4", "q8", "f16", "bf16", "f32"]
_DTYPES: dict[Kind, torch.dtype] = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
}


@dataclass(frozen=True, slots=True)
class PanelWeight:
    """One linear layer."""

    kind: Kind
    data: Tensor  # uint8 [panels, bytes]
    bias_N: Tensor  # fp32, padded to whole panels; zeros where the layer has none
    num_outputs: int
    num_inputs: int
    # What a launch needs, without asking the tensors every time.
    width: int  # outputs with the padding
    addresses: tuple[int, int]  # of data and bias


def pack_dense(weight_ND: Tensor, bias_N: Tensor | None) -> PanelWeight:
    """fp32, fp16 and bf16 weights as they are."""
    kinds = {dtype: kind for kind, dtype in _DTYPES.items()}
    panels = _panels(weight_ND)  # [panels, 32, D]
    data = panels.transpose(1, 2).contiguous().view(torch.uint8).flatten(1)
    return _weight(kinds[weight_ND.dtype], data, bias_N, *weight_ND.shape)


def pack_blocks(kind: str, rows: Tensor, bias_N: Tensor | None) -> PanelWeight:
    """Rows of GGUF blocks (uint8, [N, bytes]) of a type in BLOCK_BYTES, exactly as quantised."""
    num_outputs, row_bytes = rows.shape
    num_blocks = row_bytes // BLOCK_BYTES[kind]
    blocks = _panels(rows).unflatten(2, (num_blocks, -1)).transpose(1, 2)  # [P, blocks, 32, bytes]
    num_inputs = num_blocks * BLOCK
    scale = blocks[..., :2]
    if kind == "Q8_0":
        numbers = blocks[..., 2:].transpose(2, 3)
        parts = (scale, numbers)
        return _weight("q8", _joined(parts), bias_N, num_outputs, num_inputs)
    if kind == "Q4_0":  # (q - 8) d = q d + (-8 d), exactly
        offset = (scale.contiguous().view(torch.float16) * -8).view(torch.uint8)
        nibbles = blocks[..., 2:]
    else:
        offset = blocks[..., 2:4]
        nibbles = blocks[..., 4:]
    # The file pairs inputs j and j + 16 in a byte; here neighbours, so that inputs ascend.
    numbers = torch.cat((nibbles & 15, nibbles >> 4), dim=-1)
    paired = (numbers[..., ::2] | numbers[..., 1::2] << 4).transpose(2, 3)
    return _weight("q4", _joined((scale, offset, paired)), bias_N, num_outputs, num_inputs)


# Types of GGUF blocks that have a panel kind, and their bytes per 32 weights.
BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}


def matmul(x_TD: Tensor, weight: PanelWeight) -> Tensor:
    """x W^T + bias, fp32, [T, N]."""
    return torch.nn.functional.linear(x_TD, unpack(weight), weight.bias_N[: weight.num_outputs])


def unpack(weight: PanelWeight) -> Tensor:
    """The weights as fp32 [N, D]."""
    data, num_inputs = weight.data, weight.num_inputs
    panels: Tensor
    if weight.kind in _DTYPES:
        panels = data.view(_DTYPES[weight.kind]).unflatten(1, (num_inputs, PANEL)).float()
    else:
        blocks = data.unflatten(1, (num_inputs // BLOCK, -1))  # [P, blocks, bytes]
        scale = _halves(blocks[..., : 2 * PANEL])
        if weight.kind == "q8":
            numbers = blocks[..., 2 * PANEL :].contiguous().view(torch.int8)
            panels = numbers.unflatten(2, (BLOCK, PANEL)) * scale
        else:
            offset = _halves(blocks[..., 2 * PANEL : 4 * PANEL])
            pairs = blocks[..., 4 * PANEL :].unflatten(2, (BLOCK // 2, 1, PANEL))
            numbers = torch.cat((pairs & 15, pairs >> 4), dim=3).flatten(2, 3)
            panels = numbers * scale + offset
        panels = panels.flatten(1, 2)  # [P, D, 32]
    rows: Tensor = panels.transpose(1, 2).flatten(0, 1)
    return rows[: weight.num_outputs]


def _panels(rows: Tensor) -> Tensor:
    panels: Tensor = pad(rows, (0, 0, 0, -len(rows) % PANEL)).unflatten(0, (-1, PANEL))
    return panels


def _joined(parts: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([p.flatten(2) for p in parts], dim=2).flatten(1)


def _halves(bytes_: Tensor) -> Tensor:
    return bytes_.contiguous().view(torch.float16).float().unsqueeze(2)


def _weight(
    kind: Kind, data: Tensor, bias_N: Tensor | None, num_outputs: int, num_inputs: int
) -> PanelWeight:
    bias = torch.zeros(num_outputs) if bias_N is None else bias_N.float()
    bias = pad(bias, (0, -num_outputs % PANEL)).contiguous()
    data = data.contiguous()
    addresses = (data.data_ptr(), bias.data_ptr())
    return PanelWeight(kind, data, bias, num_outputs, num_inputs, len(bias), addresses)
