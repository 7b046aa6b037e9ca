"""Draft heads: models of few layers that read the target's hidden states beside its tokens.

Computes; never loads (models/head_loading) and never decides how many drafts are made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.layers.attention import ForwardInputs
from paceline.layers.linear import Linear
from paceline.layers.vocab import Embedding, VocabShards
from paceline.models.decoder import LayerStack
from paceline.models.head_spec import Eagle3Spec
from paceline.state.pages import LayerPages


class HeadModel(Protocol):
    """A model whose entry i holds token i + 1 and the feature at i.

    The first features are the target's; after its last one a head goes on with its own.
    """

    stack: LayerStack

    @property
    def vocab(self) -> VocabShards:
        """Which part of its vocabulary the logits of this rank are of."""

    @property
    def tap_ids(self) -> tuple[int, ...]:
        """What it reads of the target: the residual stream after so many layers each; (): its
        hidden states after the final norm."""

    @property
    def token_of_V(self) -> Tensor | None:
        """The target's ids of a vocabulary of its own, int64."""

    def read(self, target_TD: Tensor) -> Tensor:
        """The target's features as features of this head's own kind."""

    def forward(self, inputs: ForwardInputs, feature_TD: Tensor, pages: list[LayerPages]) -> Tensor:
        """The next features, [T, D] or of `inputs.wanted`, which logits also come from."""

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """fp32 logits over this rank's part of its own vocabulary."""


@dataclass(slots=True)
class EagleModel:
    """EAGLE-1: x = fc([embedding of the next token; feature]), layers, the target's lm_head.

    Entry i holds token i + 1 and the feature at i: the target's hidden state after its final norm
    where there is one, else this head's own output at i. There is no norm before the first layer
    and none after the last.
    """

    stack: LayerStack
    embedding: Embedding
    fc: Linear
    lm_head: Linear
    vocab: VocabShards

    tap_ids = ()
    token_of_V = None

    def read(self, target_TD: Tensor) -> Tensor:
        return target_TD

    def forward(self, inputs: ForwardInputs, feature_TD: Tensor, pages: list[LayerPages]) -> Tensor:
        """Output of the last layer: the next feature, and what logits come from."""
        token_TD = self.embedding(inputs.token_T).to(feature_TD.dtype)
        x_TD = self.fc(torch.cat((token_TD, feature_TD), dim=1))
        stream = self.stack.run(x_TD.float(), inputs, pages, x_TD)
        # Added up in fp32 and rounded as it is stored: one kernel.
        return torch.add(*stream, out=x_TD.new_empty(stream.residual_TD.shape))

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """fp32 logits [B, V]."""
        return self.lm_head(hidden_BD).float()

    @property
    def nbytes(self) -> int:
        """Without the lm_head, which is the target's."""
        return self.stack.layer_bytes + self.fc.nbytes + self.embedding.nbytes


def _for_norm(x_TD: Tensor) -> Tensor:
    """The CPU's norms read whole rows of fp32; CUDA's convert what they read, wherever it is."""
    return x_TD if x_TD.is_cuda else x_TD.float().contiguous()


@dataclass(slots=True)
class TapReader:
    """EAGLE-3's way from taps of the target to one feature: fc, behind norms of some kind."""

    fc: Linear
    norms: list[list[Tensor]]  # in order: one for each tap; one for all of them side by side
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    eps: float

    def __call__(self, tap_TD: Tensor) -> Tensor:
        for norms in self.norms:
            parts = [_for_norm(x) for x in tap_TD.chunk(len(norms), dim=1)]
            normed = [self.rms_norm(x, w, self.eps) for x, w in zip(parts, norms, strict=True)]
            tap_TD = torch.cat(normed, dim=1)
        return self.fc(tap_TD)

    @property
    def nbytes(self) -> int:
        return self.fc.nbytes


@dataclass(slots=True)
class Eagle3Model:
    """EAGLE-3: attention over [embedding; feature], each normed; a vocabulary of its own.

    The first layer has no norm in front: what it reads is made here, beside the residual stream.
    Features are the stream after the last layer, before the norm (after it: `norms_output`).
    """

    spec: Eagle3Spec
    stack: LayerStack
    embedding: Embedding
    reader: TapReader | None
    token_norm: Tensor
    feature_norm: Tensor
    final_norm: Tensor
    lm_head: Linear
    vocab: VocabShards
    token_of_V: Tensor | None

    @property
    def tap_ids(self) -> tuple[int, ...]:
        return self.spec.tap_ids

    def read(self, target_TD: Tensor) -> Tensor:
        return target_TD if self.reader is None else self.reader(target_TD)

    def forward(self, inputs: ForwardInputs, feature_TD: Tensor, pages: list[LayerPages]) -> Tensor:
        """The next features, fp32 unless they are normed."""
        stack, eps = self.stack, self.stack.spec.norm_eps
        rms_norm = stack.kernels.rms_norm
        token_TD = _for_norm(self.embedding(inputs.token_T))
        normed_TD = rms_norm(_for_norm(feature_TD), self.feature_norm, eps)
        x_TD = torch.cat((rms_norm(token_TD, self.token_norm, eps), normed_TD), dim=1)
        # A copy: the stream is written in place, and the features are the target's or the step's.
        start_TD = normed_TD if self.spec.norms_residual else feature_TD
        residual_TD = start_TD.to(torch.float32, copy=True)
        stream = stack.run(residual_TD, inputs, pages, x_TD)
        if not self.spec.norms_output:
            return stream.residual_TD.add_(stream.delta_TD)
        return stack.kernels.add_rms_norm(*stream, self.final_norm, eps)

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """fp32 logits [B, draft vocabulary]."""
        if not self.spec.norms_output:
            eps = self.stack.spec.norm_eps
            hidden_BD = self.stack.kernels.rms_norm(hidden_BD, self.final_norm, eps)
        return self.lm_head(hidden_BD).float()

    @property
    def nbytes(self) -> int:
        reader = 0 if self.reader is None else self.reader.nbytes
        return self.stack.layer_bytes + reader + self.embedding.nbytes + self.lm_head.nbytes


@dataclass(slots=True)
class MtpModel:
    """A target's own next-token layer: eh_proj([normed embedding; normed feature]), one layer.

    Features are hidden states after a final norm: the target's first, then this layer's.
    """

    stack: LayerStack
    embedding: Embedding
    token_norm: Tensor
    feature_norm: Tensor
    projection: Linear
    final_norm: Tensor
    lm_head: Linear
    vocab: VocabShards

    tap_ids = ()
    token_of_V = None

    def read(self, target_TD: Tensor) -> Tensor:
        return target_TD

    def forward(self, inputs: ForwardInputs, feature_TD: Tensor, pages: list[LayerPages]) -> Tensor:
        stack, eps = self.stack, self.stack.spec.norm_eps
        rms_norm = stack.kernels.rms_norm
        token_TD = _for_norm(self.embedding(inputs.token_T))
        token_TD = rms_norm(token_TD, self.token_norm, eps)
        feature_TD = rms_norm(_for_norm(feature_TD), self.feature_norm, eps)
        residual_TD = self.projection(torch.cat((token_TD, feature_TD), dim=1)).float()
        stream = stack.run(residual_TD, inputs, pages)
        return stack.kernels.add_rms_norm(*stream, self.final_norm, eps)

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """fp32 logits [B, V]."""
        return self.lm_head(hidden_BD).float()

    @property
    def nbytes(self) -> int:
        """Without tables, which are the target's as a rule."""
        return self.stack.layer_bytes + self.projection.nbytes
