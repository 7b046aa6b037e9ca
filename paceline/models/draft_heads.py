"""Draft heads: models of few layers that read the target's hidden states beside its tokens.

Computes; never loads (models/head_loading) and never decides how many drafts are made.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.layers.attention import ForwardInputs
from paceline.layers.linear import Linear
from paceline.models.decoder import LayerStack
from paceline.state.pages import LayerPages


@dataclass(slots=True)
class EagleModel:
    """EAGLE-1: x = fc([embedding of the next token; feature]), layers, the target's lm_head.

    Entry i holds token i + 1 and the feature at i: the target's hidden state after its final norm
    where there is one, else this head's own output at i. There is no norm before the first layer
    and none after the last.
    """

    stack: LayerStack
    embedding_VD: Tensor
    fc: Linear
    lm_head: Linear

    def forward(self, inputs: ForwardInputs, feature_TD: Tensor, pages: list[LayerPages]) -> Tensor:
        """Output of the last layer, [T, D]: the next feature, and what logits come from."""
        token_TD = self.embedding_VD.index_select(0, inputs.token_T).to(feature_TD.dtype)
        x_TD = self.fc(torch.cat((token_TD, feature_TD), dim=1))
        residual_TD = x_TD.float()
        delta_TD = self.stack.run(residual_TD, inputs, pages, x_TD)
        return residual_TD.add_(delta_TD).to(feature_TD.dtype)

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """fp32 logits [B, V]."""
        return self.lm_head(hidden_BD).float()

    @property
    def nbytes(self) -> int:
        """Without the lm_head, which is the target's."""
        return self.stack.layer_bytes + self.fc.nbytes + self.embedding_VD.nbytes
