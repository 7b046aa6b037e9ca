"""The type of fp8 weights, rows and KV: four bits of exponent, three of mantissa, no infinity."""

from __future__ import annotations

import torch

DTYPE = torch.float8_e4m3fn
MOST = 448.0  # the largest number of the type
