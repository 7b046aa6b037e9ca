"""Tiny heads on DFlash's layers and their plain arithmetic: one sequence, no cache, no pages.

DFlash, DFlash2 and DSpark, in the two forms in which heads are published. They are trained for a
moment on sequences that the target has said, so that part of their drafts is right.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy, silu

from tests.eagle3 import tapped

Tensors = dict[str, Tensor]
WIDTH, INNER, HEADS, KV_HEADS, SIZE, THETA, EPS = 24, 40, 4, 2, 8, 5000.0, 1e-5
MASK = 5
WINDOW = 11


@dataclass
class PlainBlock:
    """What such a head is. `kinds`: window (0: none) and causality of each layer."""

    kind: str  # dflash, dflash2, dspark, dspark-gated
    weights: Tensors
    embedding_VD: Tensor
    taps: tuple[int, ...]
    kinds: list[tuple[int, bool]]
    block_size: int = 8
    first_output: int = 1
    offset_V: Tensor | None = None  # d2t
    is_nested: bool = False  # a head of speculators: windows begin before the anchor

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * self.weights[name]

    def features(self, target: Any, tokens: Sequence[int]) -> Tensor:
        return tapped(target, tokens, self.taps)

    def forward(self, feature_AND: Tensor, anchor_A: Tensor, token_A: Tensor, width: int) -> Tensor:
        """Hidden states of the blocks; block a begins at position anchor_A[a]."""
        w, embedding_VD = self.weights, self.weights.get("embed_tokens.weight", self.embedding_VD)
        context_AND = self.norm(feature_AND @ w["fc.weight"].T, "hidden_norm.weight")
        token_AW = torch.full((len(anchor_A), width), MASK)
        token_AW[:, 0] = token_A
        x_AWD = embedding_VD[token_AW]
        for i, kind in enumerate(self.kinds):
            at = f"layers.{i}."

            def attend(u: Tensor, at: str = at, kind: tuple[int, bool] = kind) -> Tensor:
                return self.attention(u, context_AND, anchor_A, at + "self_attn.", kind)

            def think(u: Tensor, at: str = at) -> Tensor:
                gate, up, down = (w[f"{at}mlp.{x}_proj.weight"].T for x in ("gate", "up", "down"))
                return (silu(u @ gate) * (u @ up)) @ down

            u_AWD = self.norm(x_AWD, at + "input_layernorm.weight")
            x_AWD = x_AWD + self.convolved(u_AWD, at + "attention_conv.", attend)
            u_AWD = self.norm(x_AWD, at + "post_attention_layernorm.weight")
            x_AWD = x_AWD + self.convolved(u_AWD, at + "mlp_conv.", think)
        return self.norm(x_AWD, "norm.weight")

    def convolved(self, u_AWD: Tensor, at: str, part: Callable[[Tensor], Tensor]) -> Tensor:
        if self.kind != "dflash2":
            return part(u_AWD)
        base_2TD = self.weights[at + "base_kernel"]
        added = (u_AWD @ self.weights[at + "kernel_projection.weight"].T).unflatten(-1, (2, 2, -1))
        kernel = base_2TD + added.repeat_interleave(4, dim=-1)  # [A, W, 2, T, D]

        def conv(x: Tensor, side: int) -> Tensor:
            before = torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), dim=1)
            found: Tensor = kernel[:, :, side, 0] * x + kernel[:, :, side, 1] * before
            return found

        return conv(part(conv(u_AWD, 0)), 1)

    def attention(
        self, u_AWD: Tensor, context_AND: Tensor, anchor_A: Tensor, at: str, kind: tuple[int, bool]
    ) -> Tensor:
        width, count = u_AWD.shape[1], context_AND.shape[1]
        own_AW = anchor_A[:, None] + torch.arange(width)
        past_AN = torch.arange(count).expand(len(anchor_A), -1)
        q = self._heads(u_AWD, at + "q", HEADS, own_AW)
        k = torch.cat(
            [
                self._heads(c, at + "k", KV_HEADS, p)
                for c, p in ((context_AND, past_AN), (u_AWD, own_AW))
            ],
            dim=1,
        )
        v = torch.cat((context_AND, u_AWD), dim=1) @ self.weights[f"{at}v_proj.weight"].T
        v = v.unflatten(-1, (KV_HEADS, SIZE))
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=2) for x in (k, v))
        key_AK = torch.cat((past_AN, own_AW), dim=1)
        is_context_K = torch.arange(count + width) < count
        is_seen = ~is_context_K | (key_AK < anchor_A[:, None])
        is_seen_AWK = is_seen[:, None].expand(-1, width, -1)
        window, is_causal = kind
        if is_causal:
            is_seen_AWK = is_seen_AWK & (key_AK[:, None] <= own_AW[:, :, None])
        if window:
            first_AW = anchor_A[:, None].expand_as(own_AW) - 1 if self.is_nested else own_AW
            is_seen_AWK = is_seen_AWK & (key_AK[:, None] > first_AW[:, :, None] - window)
        score = torch.einsum("awhd,akhd->ahwk", q, k) * SIZE**-0.5
        score = score.masked_fill(~is_seen_AWK[:, None], float("-inf"))
        out = torch.einsum("ahwk,akhd->awhd", score.softmax(-1), v)
        return out.flatten(2) @ self.weights[f"{at}o_proj.weight"].T

    def _heads(self, x: Tensor, name: str, count: int, position: Tensor) -> Tensor:
        x = (x @ self.weights[f"{name}_proj.weight"].T).unflatten(-1, (count, SIZE))
        x = self.norm(x, f"{name}_norm.weight")
        half = SIZE // 2
        angle = position[..., None, None] * THETA ** (-torch.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat(
            (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1
        )

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weights.get("lm_head.weight", self.embedding_VD).T

    def corrected(self, logits_BV: Tensor, hidden_BD: Tensor, previous_B: Tensor) -> Tensor:
        """By the token before, where the head does so."""
        w = self.weights
        if self.kind == "dflash2":
            at = "candidate_selector."
            best = logits_BV.topk(6, dim=1)
            edge = w[at + "predecessor_codebook"][previous_B]
            edge = edge * (hidden_BD @ w[at + "hidden_projection.weight"].T)
            more = (w[at + "successor_codebook"][best.indices] * edge[:, None]).sum(-1)
            none = torch.full_like(logits_BV, -1e9)
            return none.scatter(1, best.indices, best.values + more)
        if "markov_head.markov_w1.weight" in w:
            token = w["markov_head.markov_w1.weight"][previous_B]
            if self.kind == "dspark-gated":
                gate = torch.cat((hidden_BD, token), dim=1) @ w["markov_head.gate_proj.weight"].T
                token = token * torch.sigmoid(gate + w["markov_head.gate_proj.bias"])
            return logits_BV + token @ w["markov_head.markov_w2.weight"].T
        return logits_BV

    def token_of(self, index: int) -> int:
        return index if self.offset_V is None else index + int(self.offset_V[index])

    def first_logits(self, feature_ND: Tensor, tokens: Sequence[int], k: int) -> Tensor:
        """Of the first draft, over the target's vocabulary."""
        given = (torch.tensor([len(tokens) - 1]), torch.tensor([tokens[-1]]))
        hidden = self.forward(feature_ND[None, :-1], *given, k + self.first_output)
        hidden_1D = hidden[0, self.first_output : self.first_output + 1]
        return self.corrected(self.logits(hidden_1D), hidden_1D, given[1])[0]

    def drafts(self, feature_ND: Tensor, tokens: Sequence[int], k: int, limit: int) -> list[int]:
        """All K greedy drafts after `tokens`; blocks end at `limit`."""
        anchor = len(tokens) - 1
        width = min(k + self.first_output, limit - anchor)
        newest = torch.tensor([tokens[-1]])
        given = (feature_ND[None, :anchor], torch.tensor([anchor]), newest)
        hidden_WD = self.forward(*given, width)[0]
        found, previous = [], newest
        for i in range(self.first_output, width):
            logits = self.corrected(
                self.logits(hidden_WD[i : i + 1]), hidden_WD[i : i + 1], previous
            )
            found.append(self.token_of(int(logits[0].argmax())))
            previous = torch.tensor(found[-1:])
        return found


def random_block(target: Any, kind: str = "dflash", *, seed: int = 0, **changes: Any) -> PlainBlock:
    """Weights wide enough that every part of the head matters to its drafts."""
    generator = torch.Generator().manual_seed(seed)
    vocab, target_width = target.config.vocab_size, target.config.hidden_size

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.25

    taps = (1, 2) if target.config.num_hidden_layers > 2 else (0, 1)
    kinds = changes.pop("kinds", [(0, False), (0, False)])
    draft_vocab = changes.pop("draft_vocab", None)
    w: Tensors = {
        "fc.weight": rand(WIDTH, len(taps) * target_width),
        "hidden_norm.weight": 1 + rand(WIDTH),
        "norm.weight": 1 + rand(WIDTH),
        "embed_tokens.weight": rand(vocab, WIDTH) * 4,
        "lm_head.weight": rand(draft_vocab or vocab, WIDTH),
    }
    for i in range(len(kinds)):
        at = f"layers.{i}."
        shapes = {"q": (HEADS * SIZE, WIDTH), "k": (KV_HEADS * SIZE, WIDTH)}
        shapes |= {"v": (KV_HEADS * SIZE, WIDTH), "o": (WIDTH, HEADS * SIZE)}
        w |= {f"{at}self_attn.{x}_proj.weight": rand(*shape) for x, shape in shapes.items()}
        w |= {f"{at}self_attn.{x}_norm.weight": 1 + rand(SIZE) for x in "qk"}
        w |= {f"{at}{x}_layernorm.weight": 1 + rand(WIDTH) for x in ("input", "post_attention")}
        w |= {f"{at}mlp.{x}_proj.weight": rand(INNER, WIDTH) for x in ("gate", "up")}
        w[f"{at}mlp.down_proj.weight"] = rand(WIDTH, INNER)
        if kind == "dflash2":
            for x in ("attention", "mlp"):
                w[f"{at}{x}_conv.base_kernel"] = rand(2, 2, WIDTH) + torch.tensor([[1.0], [0.0]])
                w[f"{at}{x}_conv.kernel_projection.weight"] = rand(2 * 2 * WIDTH // 4, WIDTH)
    if kind == "dflash2":
        w["candidate_selector.predecessor_codebook"] = rand(vocab, 16)
        w["candidate_selector.successor_codebook"] = rand(vocab, 16)
        w["candidate_selector.hidden_projection.weight"] = rand(16, WIDTH)
    if kind.startswith("dspark"):
        w["markov_head.markov_w1.weight"] = rand(vocab, 16) * 4
        w["markov_head.markov_w2.weight"] = rand(draft_vocab or vocab, 16)
        w["confidence_head.proj.weight"] = rand(1, WIDTH)
        changes.setdefault("first_output", 0)
    if kind == "dspark-gated":
        w["markov_head.gate_proj.weight"] = rand(16, WIDTH + 16)
        w["markov_head.gate_proj.bias"] = rand(16)
    offset_V = None
    if draft_vocab:
        chosen = torch.randperm(vocab, generator=generator)[:draft_vocab]
        offset_V = chosen.sort().values - torch.arange(draft_vocab)
    embedding = target.get_input_embeddings().weight.detach()
    return PlainBlock(kind, w, embedding, taps, kinds, offset_V=offset_V, **changes)


def train_block(
    head: PlainBlock, target: Any, sequences: Sequence[Sequence[int]], *, num_steps: int = 80
) -> PlainBlock:
    """It half learns what comes after many places of these sequences."""
    drafts, size = 7, 40
    known = [s for s in sequences if len(s) > size]
    feature_BND = torch.stack([head.features(target, s)[-size:] for s in known])
    token_BN = torch.tensor([s[-size:] for s in known])
    count = len(head.weights["lm_head.weight"])
    index_of = {head.token_of(i): i for i in range(count)}
    anchors = torch.arange(4, size - drafts - 1, 4)
    # Every sequence with every anchor.
    feature = feature_BND.repeat_interleave(len(anchors), 0)
    token = token_BN.repeat_interleave(len(anchors), 0)
    anchor_A = anchors.repeat(len(known))
    place_AK = anchor_A[:, None] + torch.arange(1, drafts + 1)
    answer_AK, before_AK = token.gather(1, place_AK), token.gather(1, place_AK - 1)
    goal = torch.tensor([index_of.get(t, -100) for t in answer_AK.flatten().tolist()])
    learned = [x for name, x in head.weights.items() if "confidence" not in name]
    with torch.enable_grad():
        for x in learned:
            x.requires_grad_()
        optimizer = torch.optim.Adam(learned, lr=0.02)
        for _ in range(num_steps):
            newest_A = token.gather(1, anchor_A[:, None])[:, 0]
            width = drafts + head.first_output
            hidden = head.forward(feature, anchor_A, newest_A, width)[:, head.first_output :]
            hidden = hidden.flatten(0, 1)
            base = head.logits(hidden)
            loss = cross_entropy(base, goal)
            if head.kind != "dflash2":  # what is no candidate teaches nothing
                logits = head.corrected(base, hidden, before_AK.flatten())
                loss = loss + cross_entropy(logits, goal)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for x in learned:
        x.requires_grad_(False)
    return head


def save_block(folder: Path, head: PlainBlock, *, form: str = "z-lab", **changes: Any) -> None:
    """As z-lab publishes heads, or as `speculators` does."""
    folder.mkdir(parents=True, exist_ok=True)
    layers: dict[str, Any] = {
        "model_type": "qwen3",
        "hidden_act": "silu",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": len(head.kinds),
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": SIZE,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "max_position_embeddings": 16,  # of its training: no limit
        "vocab_size": len(head.embedding_VD),
    }
    names = {True: "sliding_attention", False: "full_attention"}
    layers["layer_types"] = [names[bool(window)] for window, _ in head.kinds]
    layers["sliding_window"] = max(window for window, _ in head.kinds) or None
    kind = head.kind.partition("-")[0]
    parts: dict[str, Any] = {"mask_token_id": MASK, "block_size": head.block_size}
    if kind == "dflash2":
        parts |= {"conv_kernel_size": 2, "conv_group_size": 4}
        parts |= {"selector_rank": 16, "selector_top_k": 6}
    if kind == "dspark":
        parts |= {"markov_rank": 16, "markov_head_type": head.kind.partition("-")[2] or "vanilla"}
        parts["sample_from_anchor"] = head.first_output == 0
    more = {
        "draft_vocab_size": len(head.weights["lm_head.weight"]),
        "target_hidden_size": head.embedding_VD.shape[1],
        "torch_dtype": "float32",
    }
    is_causal = {causal for _, causal in head.kinds}
    if form == "z-lab":
        title = {"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark"}[kind]
        parts["target_layer_ids"] = [x - 1 for x in head.taps]
        config = layers | more | {"architectures": [f"{title}DraftModel"], "dflash_config": parts}
        if len(is_causal) == 1:
            config["is_causal"] = is_causal.pop()
    else:
        config = {"speculators_model_type": kind, "transformer_layer_config": layers} | more | parts
        config["aux_hidden_state_layer_ids"] = list(head.taps)
        config["sliding_window_non_causal"] = True not in is_causal
    tensors = {name: x.contiguous() for name, x in head.weights.items()}
    if head.offset_V is not None:
        tensors["d2t"] = head.offset_V
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | changes))
