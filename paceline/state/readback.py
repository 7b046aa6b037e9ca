"""The only door from device to host: the tensors of a step's outcome become a StepResult.

On CPU the device is a thread, so this is a view, taken before drafting starts to reuse anything.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from paceline.step import Ints


def to_host(tensor: Tensor) -> Ints:
    return tensor.numpy().astype(np.int32, copy=False)
