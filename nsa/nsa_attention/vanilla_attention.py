"""A dense attention layer with the projections and rotary embeddings of NSAttention, for comparisons.

Dimensions: B batch, T tokens, M model width, H query heads, G groups of query heads that share keys and values, D key
width, E value width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .config import Branch, Implementation, LayerConfig
from .kv_cache import KVCache, attend_with_cache
from .ops.rotary import rotate_queries_and_keys
from .projections import (
    Projected,
    Projection,
    TokenContext,
    call_projection,
    keys_and_values,
    project_together,
    split_heads,
)


class VanillaAttention(nn.Module):
    """A dense causal attention layer, used as the baseline for comparisons with NSAttention."""

    implementation = Implementation.AUTO  # of the rotary embeddings

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.config = config
        self.q_proj = Projection(config.dim, config.heads * config.d_k)
        self.k_proj = Projection(config.dim, config.groups * config.d_k)
        self.v_proj = Projection(config.dim, config.groups * config.d_v)
        self.out_proj = nn.Linear(config.heads * config.d_v, config.dim, bias=False)

    def forward(self, x_BTM: Tensor, *, cache: KVCache | None = None, context: TokenContext | None = None) -> Tensor:
        """Return the output of the layer, shape [B, T, M], with either a cache or the facts about the tokens."""
        if cache is not None:
            return attend_with_cache(self, x_BTM, cache)
        assert context is not None
        cos_sin, _, layout = context
        q_BHTD, raw = self.project(x_BTM)
        k_BGTD, v_BGTE, _ = raw[Branch.SEL]
        q_BHTD, k_BGTD = rotate_queries_and_keys(q_BHTD, [k_BGTD], [cos_sin] * 2, self.implementation)
        lengths = layout.lengths if layout else (x_BTM.shape[1],)
        outputs = [
            functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            for q, k, v in zip(*(tensor.split(lengths, 2) for tensor in (q_BHTD, k_BGTD, v_BGTE)), strict=True)
        ]
        output = outputs[0] if layout is None else torch.cat(outputs, 2)
        return self.out_proj(output.transpose(1, 2).flatten(2))

    def project(self, x: Tensor) -> tuple[Tensor, dict[Branch, Projected]]:
        """Return what NSAttention.project returns; the only keys and values are those of all tokens, as of SEL."""
        (query_product,), products = project_together(x, [[self.q_proj], [self.k_proj, self.v_proj]])
        q_BHTD = split_heads(call_projection(self.q_proj, x, query_product), self.config.heads)
        return q_BHTD, {Branch.SEL: keys_and_values(self, x, products)}
