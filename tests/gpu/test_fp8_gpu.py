"""e4m3 products on a GPU: in graphs, by torch, and under an engine whose drafts change nothing."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import SamplingParams
from paceline.kernels.fp8 import reference
from paceline.kernels.fp8.reference import quantise_weight
from tests.e2e.engines import NGRAM
from tests.e2e.ladder import PROMPTS
from tests.gpu.engines import DEVICE, IS_REHEARSAL, open_llm
from tests.tiny import save_tiny

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(IS_REHEARSAL, reason="no graphs")
@pytest.mark.parametrize("num_rows", [1, 8, 64, 65, 300])
@pytest.mark.parametrize("is_blocked", [False, True])
@torch.no_grad()
def test_a_graph_replays_a_layers_products(num_rows: int, is_blocked: bool) -> None:
    from paceline.kernels.fp8.triton.products import fp8_linear
    from paceline.kernels.fp8.triton.rows import norm_rows, silu_rows
    from paceline.kernels.linear.triton.products import tickets

    torch.manual_seed(0)
    x_TD = torch.randn(num_rows, 512, device=DEVICE)
    norm_D = torch.rand(512, device=DEVICE)
    gate_up, down = (
        quantise_weight(torch.randn(size, device=DEVICE) / 16, is_blocked)
        for size in ((2 * 768, 512), (512, 768))
    )
    tickets(x_TD.device)

    def layer(ops: Any, multiply: Any) -> torch.Tensor:
        norm, gate = ops
        rows = norm(x_TD, None, norm_D, 1e-5, torch.bfloat16, is_blocked)
        inner = gate(multiply(rows, gate_up, None, torch.bfloat16), is_blocked)
        out_TD: torch.Tensor = multiply(inner, down, None, torch.bfloat16)
        return out_TD

    ours = (norm_rows, silu_rows), fp8_linear
    eager = layer(*ours)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(*ours)
    x_TD.copy_(torch.randn_like(x_TD))
    graph.replay()
    assert not torch.equal(captured, eager)
    assert torch.equal(captured, layer(*ours))
    wanted = layer((reference.norm_rows, reference.silu_rows), reference.fp8_linear).float()
    # Codes at a border of two fall to either side.
    assert float((captured.float() - wanted).norm() / wanted.norm()) < 0.02


def answers(spec: dict[str, Any] | None, **how: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": list(p)} for p in PROMPTS]
    with closing(open_llm(speculative_config=spec, **how)) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(x.outputs[0].token_ids) for x in outputs]


@pytest.mark.parametrize("quantization", ["fp8", "fp8_per_block"])
def test_drafts_do_not_change_the_tokens_of_a_quantised_model(
    tmp_path: Path, quantization: str
) -> None:
    save_tiny(tmp_path, "llama")
    how: dict[str, Any] = {"model": str(tmp_path), "dtype": "float32", "device": DEVICE}
    how |= {"skip_tokenizer_init": True, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    plain = answers(None, **how, quantization=quantization)
    assert plain == answers(NGRAM, **how, quantization=quantization)
    assert plain != answers(None, **how), "weights are rounded"
