"""The projections of an attention layer, and the facts about tokens that they need.

Dimensions: B batch, T tokens, M model width, G groups of query heads that share keys and values, D key width, E value
width, p pairs of dimensions that rotary embeddings rotate together (D/2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from .config import LayerConfig
from .ops.packed import PackedLayout
from .ops.recompute import linear


class TokenContext(NamedTuple):
    """Facts about the tokens that a model computes once for all its layers."""

    cos_sin: Tensor
    memo_number: Tensor | None = None  # number of the SelectionMemo of a layer with gradient checkpointing
    layout: PackedLayout | None = None


class Projected(NamedTuple):
    """The projected keys and values of a branch, before rotary embeddings."""

    keys_BGTD: Tensor
    values_BGTE: Tensor
    x_BTM: Tensor | None  # the input, or None if a hook or a replaced module may have changed its products


class HasKeysAndValues(Protocol):
    """A module with projections of keys and values."""

    config: LayerConfig
    k_proj: Projection
    v_proj: Projection


class Projection(nn.Linear):
    """A linear layer without bias whose output can be computed in advance.

    The product still passes through `forward`, so that forward hooks see it.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x_BTM: Tensor, product: Tensor | None = None) -> Tensor:
        return super().forward(x_BTM) if product is None else product


# With fewer tokens, copying the weights into one matrix takes longer than it saves.
MIN_JOINED_TOKENS = 16


def project_together(x_BTM: Tensor, projections: Sequence[Sequence[Projection]]) -> list[list[Tensor | None]]:
    """Apply several projections to the same input with a single matrix product.

    The results have the nesting of `projections`. For few tokens they are all None, and each projection later computes
    its own. The weights stay separate parameters, because they are named, sharded and saved separately.
    """
    if x_BTM.shape[:-1].numel() < MIN_JOINED_TOKENS:
        return [[None] * len(group) for group in projections]
    flat = [projection for group in projections for projection in group]
    product = linear(x_BTM, [projection.weight for projection in flat])
    parts = iter(product.split([projection.out_features for projection in flat], -1))
    return [[next(parts) for _ in group] for group in projections]


def keys_and_values(part: HasKeysAndValues, x_BTM: Tensor, products: Sequence[Tensor | None]) -> Projected:
    """Return the projected keys and values of an attention branch.

    `products` are the results of both projections (`project_together`).
    """
    k_product, v_product = products
    k_BTI, v_BTI = part.k_proj(x_BTM, k_product), part.v_proj(x_BTM, v_product)
    are_products = k_BTI is k_product and v_BTI is v_product
    # The values are copied, so that saving them for the backward pass does not keep the joint projection result alive.
    k_BGTD, v_BGTE = (split_heads(tensor, part.config.groups) for tensor in (k_BTI, v_BTI.contiguous()))
    return Projected(k_BGTD, v_BGTE, x_BTM if are_products else None)


def split_heads(x_BTM: Tensor, heads: int) -> Tensor:
    """Return a view of `x_BTM` with shape [B, heads, T, M / heads]."""
    return x_BTM.unflatten(-1, (heads, -1)).transpose(1, 2)
