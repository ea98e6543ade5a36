"""The compression of blocks of tokens into one key and one value each (phi in eq. 7 of the NSA paper).

Dimensions: B batch, G groups, T tokens, S compressed blocks, l tokens of a compressed block, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .config import Compression, LayerConfig
from .ops.packed import PackedLayout
from .ops.rotary import rotate


class BlockMean(nn.Module):
    """A module that compresses each block of tokens to the mean of its vectors."""

    def __init__(self, config: LayerConfig, _width: int) -> None:
        super().__init__()
        self.length, self.stride = config.block_len, config.block_stride

    def forward(self, x_BGTD: Tensor, layout: PackedLayout | None = None) -> Tensor:
        """Return one compressed vector per complete block, shape [B, G, S, D]."""
        return self.compress(split_into_blocks(x_BGTD, self.length, self.stride, layout))

    def compress(self, blocks_BGSlD: Tensor) -> Tensor:
        """Return one compressed vector per block, shape [B, G, S, D]."""
        return blocks_BGSlD.mean(3)


class BlockMLP(BlockMean):
    """A module that compresses each block of tokens with an MLP and a learned position embedding, as in the NSA
    paper.
    """

    # Names of the two linear layers. They differ per method, so weights of one method never load into another.
    names = ("hidden", "out")

    def __init__(self, config: LayerConfig, width: int) -> None:
        super().__init__(config, width)
        self.position = nn.Parameter(torch.randn(self.length, width) * 0.02)
        first, second = self.names
        self.add_module(first, nn.Linear(self.length * width, width))
        self.add_module(second, nn.Linear(width, width))

    def compress(self, blocks_BGSlD: Tensor) -> Tensor:
        first, second = (self.get_submodule(name) for name in self.names)
        return second(functional.gelu(first((blocks_BGSlD + self.position).flatten(3))))


class BlockMeanMLP(BlockMLP):
    """A module that compresses each block of tokens to the mean of its vectors plus the output of an MLP."""

    names = ("inner", "outer")

    def compress(self, blocks_BGSlD: Tensor) -> Tensor:
        return blocks_BGSlD.mean(3) + super().compress(blocks_BGSlD)


PHI = {Compression.MLP: BlockMLP, Compression.MEAN: BlockMean, Compression.MEAN_MLP: BlockMeanMLP}


def split_into_blocks(x_BGTD: Tensor, length: int, stride: int, layout: PackedLayout | None = None) -> Tensor:
    """Return the complete blocks of `length` tokens that begin every `stride` tokens, shape [B, G, S, l, D].

    The result is a view, except for packed documents, whose blocks lie within one document.
    """
    if layout is not None:
        return x_BGTD.index_select(2, layout.blocks_Sl.flatten()).unflatten(2, (-1, length))
    if x_BGTD.shape[2] < length:
        # Even without a block the result stays connected to the graph: the projections get zero gradients, not None.
        return x_BGTD[:, :, :0, None].expand(-1, -1, -1, length, -1)
    return x_BGTD.unfold(2, length, stride).transpose(3, 4)


def rotate_blocks(k_BGSD: Tensor, cos_sin: Tensor, config: LayerConfig, layout: PackedLayout | None = None) -> Tensor:
    """Return the compressed keys with rotary embeddings applied, shape [B, G, S, D]."""
    # Each key is rotated to the position of its block's last token, the first query that attends to it.
    if layout is not None:
        return rotate(k_BGSD, cos_sin[..., layout.blocks_Sl[:, -1], :])
    return rotate(k_BGSD, cos_sin[..., config.block_len - 1 :: config.block_stride, :])
