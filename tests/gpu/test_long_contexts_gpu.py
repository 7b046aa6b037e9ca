"""Contexts up to 131,072 tokens on the GPU: short and long rows side by side, in fp32."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_long_contexts import MAX_LEN, OUTPUT, check_long_contexts
from tests.gpu.engines import open_llm

pytestmark = pytest.mark.gpu


def test_tokens_equal_the_reference_up_to_131072_tokens(tmp_path: Path) -> None:
    lengths = [100, 4_000, 32_000, 64_000, MAX_LEN - OUTPUT]
    check_long_contexts(tmp_path, lengths, open_llm, max_num_batched_tokens=8192)
