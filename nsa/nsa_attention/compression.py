"""The compression of blocks of tokens into one key and one value each (phi in eq. 7 of the NSA paper).

Dimensions: B batch, G groups, T tokens, S compressed blocks, l tokens of a compressed block, D width, p pairs of
dimensions that rotary embeddings rotate together (D/2).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from .config import Compression, LayerConfig
from .ops.packed import PackedLayout
from .ops.recompute import Origin, RecomputingLinear, call_linear, origin_of


class BlockMean(nn.Module):
    """A module that compresses each block of tokens to the mean of its vectors."""

    def __init__(self, config: LayerConfig, _width: int) -> None:
        super().__init__()
        self.length, self.stride = config.block_len, config.block_stride

    def forward(self, x_BGTD: Tensor, layout: PackedLayout | None = None, origin: Origin | None = None) -> Tensor:
        """Return one compressed vector per complete block, shape [B, G, S, D].

        The backward pass computes the blocks again from `origin`, the origin of `x_BGTD`. None: they are saved.
        """
        split = partial(split_into_blocks, length=self.length, stride=self.stride)
        index = () if layout is None else (layout.blocks_Sl,)
        blocks_BGSlD = split(x_BGTD, *index)
        if origin is not None:
            origin = origin.then(blocks_BGSlD, split, *index) if origin.is_of(x_BGTD) else None
        return self.compress(blocks_BGSlD, origin)

    def compress(self, blocks_BGSlD: Tensor, _origin: Origin | None = None) -> Tensor:
        """Return one compressed vector per block, shape [B, G, S, D]. `_origin` is the origin of the blocks."""
        return blocks_BGSlD.mean(3)


class BlockMLP(BlockMean):
    """A module that compresses each block of tokens with an MLP and a learned position embedding, as in the NSA
    paper.
    """

    # Names of the two linear layers. They differ per method, so weights of one method never load into another.
    names = ("hidden", "out")

    def __init__(self, config: LayerConfig, width: int) -> None:
        super().__init__(config, width)
        self.position = nn.Parameter(torch.empty(self.length, width))
        self.reset_parameters()
        first, second = self.names
        self.add_module(first, RecomputingLinear(self.length * width, width))
        self.add_module(second, RecomputingLinear(width, width))

    def reset_parameters(self) -> None:
        """Initialize the position embedding, for example after `to_empty` of a module on the meta device."""
        with torch.no_grad():
            self.position.copy_(torch.randn_like(self.position) * 0.02)

    def compress(self, blocks_BGSlD: Tensor, origin: Origin | None = None) -> Tensor:
        first, second = (self.get_submodule(name) for name in self.names)
        inputs_BGSI = _add_positions(blocks_BGSlD, self.position)
        hidden_BGSD = call_linear(
            first, inputs_BGSI, origin and origin.then(inputs_BGSI, _add_positions, self.position)
        )
        active_BGSD = functional.gelu(hidden_BGSD)
        return call_linear(second, active_BGSD, origin_of(active_BGSD, functional.gelu, hidden_BGSD))


class BlockMeanMLP(BlockMLP):
    """A module that compresses each block of tokens to the mean of its vectors plus the output of an MLP."""

    names = ("inner", "outer")

    def compress(self, blocks_BGSlD: Tensor, origin: Origin | None = None) -> Tensor:
        return blocks_BGSlD.mean(3) + super().compress(blocks_BGSlD, origin)


PHI = {Compression.MLP: BlockMLP, Compression.MEAN: BlockMean, Compression.MEAN_MLP: BlockMeanMLP}


def split_into_blocks(x_BGTD: Tensor, blocks_Sl: Tensor | None = None, *, length: int, stride: int) -> Tensor:
    """Return the complete blocks of `length` tokens that begin every `stride` tokens, shape [B, G, S, l, D].

    The result is a view, except for packed documents, whose blocks consist of the tokens `blocks_Sl`.
    """
    if blocks_Sl is not None:
        return x_BGTD.index_select(2, blocks_Sl.flatten()).unflatten(2, (-1, length))
    if x_BGTD.shape[2] < length:
        # Even without a block the result stays connected to the graph: the projections get zero gradients, not None.
        return x_BGTD[:, :, :0, None].expand(-1, -1, -1, length, -1)
    return x_BGTD.unfold(2, length, stride).transpose(3, 4)


def _add_positions(blocks_BGSlD: Tensor, position_lD: Tensor) -> Tensor:
    """Return the inputs of the MLP, [B, G, S, l x D]."""
    return (blocks_BGSlD + position_lD).flatten(3)


def block_angles(cos_sin: Tensor, config: LayerConfig, layout: PackedLayout | None = None) -> Tensor:
    """Return the rotary cosines and sines of the compressed keys, [2, (B,) S, p], from those of the tokens."""
    # Each key is rotated to the position of its block's last token, the first query that attends to it.
    if layout is not None:
        return cos_sin[..., layout.blocks_Sl[:, -1], :]
    return cos_sin[..., config.block_len - 1 :: config.block_stride, :]
