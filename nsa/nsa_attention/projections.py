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


def project_together(x_BTM: Tensor, projections: Sequence[Sequence[nn.Module]]) -> list[list[Tensor | None]]:
    """Apply several projections to the same input with a single matrix product.

    The results have the nesting of `projections`. They are None for few tokens, and for a module that the user has put
    in the place of a projection: `call_projection` then computes the product. The weights stay separate parameters,
    because they are named, sharded and saved separately.
    """
    joined = [projection for group in projections for projection in group if isinstance(projection, Projection)]
    if x_BTM.shape[:-1].numel() < MIN_JOINED_TOKENS or not joined:
        return [[None] * len(group) for group in projections]
    product = linear(x_BTM, [projection.weight for projection in joined])
    parts = iter(product.split([projection.out_features for projection in joined], -1))
    return [
        [next(parts) if isinstance(projection, Projection) else None for projection in group] for group in projections
    ]


def call_projection(projection: nn.Module, x_BTM: Tensor, product: Tensor | None) -> Tensor:
    """Return the output of a projection, or of the module in its place. `product` is from `project_together`."""
    result: Tensor = projection(x_BTM) if product is None else projection(x_BTM, product)
    return result


def keys_and_values(part: HasKeysAndValues, x_BTM: Tensor, products: Sequence[Tensor | None]) -> Projected:
    """Return the projected keys and values of an attention branch.

    `products` are the results of both projections (`project_together`).
    """
    k_product, v_product = products
    k_BTI, v_BTI = call_projection(part.k_proj, x_BTM, k_product), call_projection(part.v_proj, x_BTM, v_product)
    are_products = k_BTI is k_product and v_BTI is v_product
    # The values are copied, so that saving them for the backward pass does not keep the joint projection result alive.
    k_BGTD, v_BGTE = (split_heads(tensor, part.config.groups) for tensor in (k_BTI, v_BTI.contiguous()))
    return Projected(k_BGTD, v_BGTE, x_BTM if are_products else None)


def split_heads(x_BTM: Tensor, heads: int) -> Tensor:
    """Return a view of `x_BTM` with shape [B, heads, T, M / heads]."""
    return x_BTM.unflatten(-1, (heads, -1)).transpose(1, 2)
