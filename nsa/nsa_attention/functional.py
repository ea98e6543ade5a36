"""Native Sparse Attention as functions of tensors, in the layout of flash-attn and flash-linear-attention.

Dimensions: B batch, T tokens, H query heads, G key and value heads, S compressed blocks, l tokens of a block, D key
width, E value width.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from .config import Implementation
from .ops.input_validation import (
    Lengths,
    compression_problems,
    cu_seqlens_form_problems,
    cu_seqlens_value_problems,
    validate_inputs,
)
from .ops.packed import packed_layout
from .ops.selection import Selection
from .ops.sparse_attention import KeysAndValues, sparse_attention
from .ops.table_cache import cached_table


def nsa_func(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_slc: Tensor,
    v_slc: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    g_cmp: Tensor,
    g_slc: Tensor,
    g_swa: Tensor,
    *,
    block_size: int = 64,
    block_count: int = 16,
    compress_size: int = 32,
    compress_stride: int = 16,
    window: int = 512,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    implementation: str = "auto",
    deterministic: bool = True,
) -> Tensor:
    """Return the output [B, T, H, E] of causal Native Sparse Attention (arXiv 2502.11089, eq. 5).

    The output is the sum of three attention branches, each multiplied by its gate. All ten tensors get gradients.

    Args:
        q: Queries [B, T, H, D], with positions (such as rotary embeddings) already applied, like all keys.
        k_cmp: Keys [B, S, G, D] of the compressed branch, one for each complete block; `compress_mean` computes them.
        v_cmp: Values [B, S, G, E] of the compressed branch.
        k_slc: Keys [B, T, G, D] of the selected branch. H is a multiple of G: H / G query heads share one key head.
        v_slc: Values [B, T, G, E] of the selected branch.
        k_win: Keys [B, T, G, D] of the sliding window.
        v_win: Values [B, T, G, E] of the sliding window.
        g_cmp: Gates [B, T, H] of the compressed branch, in any float dtype.
        g_slc: Gates [B, T, H] of the selected branch.
        g_swa: Gates [B, T, H] of the sliding window.
        block_size: Tokens in a block of the selected branch.
        block_count: Blocks that a query reads, at least 3, among them block 0, its own block and the block before it.
        compress_size: Tokens in a compressed block.
        compress_stride: Distance in tokens between the starts of two compressed blocks, at most `compress_size`.
        window: Tokens in the sliding window, including the query's own token.
        scale: Factor of the scores; None means 1 / sqrt(D).
        cu_seqlens: int32 [sequences + 1], ascending from 0 to T: packs several sequences into a batch of 1. They do not
            attend to each other, and their complete compressed blocks are concatenated in the same order.
        implementation: `auto`, or the name of one implementation (docs/internals/nsa/kernels.md).
        deterministic: False lets the backward pass of the Triton kernels add with atomics. The same input may then give
            gradients that differ by rounding, and the pass needs another float32 tensor as large as `q`.
            torch.use_deterministic_algorithms takes precedence if it is on when the backward pass runs. Other
            implementations, and everything on a CPU, are always deterministic, and this option changes nothing there.

    The tensors may have any strides, and none of them is copied except the gates. Memory grows linearly with T.

    Raises:
        ValueError: Lists every invalid argument.
        MissingImplementationError: The requested implementation cannot run on these tensors, and why.
    """
    lengths = Lengths(
        block_size=block_size,
        block_count=block_count,
        compress_size=compress_size,
        compress_stride=compress_stride,
        window=window,
    )
    keys_and_values = {
        "k_cmp": k_cmp,
        "v_cmp": v_cmp,
        "k_slc": k_slc,
        "v_slc": v_slc,
        "k_win": k_win,
        "v_win": v_win,
    }
    gates = {"g_cmp": g_cmp, "g_slc": g_slc, "g_swa": g_swa}
    starts = validate_inputs(q, keys_and_values, gates, lengths, scale, cu_seqlens, implementation)
    compressed, selected, sliding = (
        (k.transpose(1, 2), v.transpose(1, 2)) for k, v in ((k_cmp, v_cmp), (k_slc, v_slc), (k_win, v_win))
    )
    return sparse_attention(
        q.transpose(1, 2),
        KeysAndValues(compressed=compressed, selected=selected, sliding=sliding),
        torch.stack((g_cmp, g_slc, g_swa)).transpose(2, 3),
        Selection(
            block_len=compress_size,
            block_stride=compress_stride,
            select_len=block_size,
            select_count=block_count,
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
        ),
        window=window,
        implementation=Implementation(implementation),
        cu_seqlens=starts,
        deterministic=deterministic,
    )


def compress_mean(
    x: Tensor, compress_size: int = 32, compress_stride: int = 16, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Return the mean of each complete block of tokens, [B, S, G, D], as keys or values of the compressed branch.

    `x` are keys or values [B, T, G, D]. Block i contains the tokens i * compress_stride to i * compress_stride +
    compress_size - 1, so S is (T - compress_size) // compress_stride + 1, or 0 for fewer tokens than a block. With
    `cu_seqlens` (int32 [sequences + 1], batch 1), no block spans two sequences; the number of blocks then depends on
    the values of `cu_seqlens`, which are read from the device once per tensor.

    Raises ValueError that lists every invalid argument.
    """
    _validate_compression(x, compress_size, compress_stride, cu_seqlens)
    if cu_seqlens is not None:
        tokens_Sl = cached_table(
            cu_seqlens,
            x.device,
            ("tokens of blocks", x.shape[1], compress_size, compress_stride),
            lambda: _tokens_of_blocks(cu_seqlens, x, compress_size, compress_stride),
        )
        return x.index_select(1, tokens_Sl.flatten()).unflatten(1, (-1, compress_size)).mean(2)
    if x.shape[1] < compress_size:
        return x[:, :0]
    return x.unfold(1, compress_size, compress_stride).mean(-1)


def _validate_compression(x: Tensor, compress_size: int, compress_stride: int, cu_seqlens: Tensor | None) -> None:
    problems = compression_problems(compress_size, compress_stride)
    if x.dim() != 4 or not x.is_floating_point():
        problems.append(f"x: expected floats [B, T, G, D], got {x.dtype} {list(x.shape)}")
    elif cu_seqlens is not None:
        problems += cu_seqlens_form_problems(cu_seqlens, x, "x")
    if problems:
        raise ValueError("compress_mean: " + "; ".join(problems))


def _tokens_of_blocks(cu_seqlens: Tensor, x: Tensor, compress_size: int, compress_stride: int) -> Tensor:
    starts = cu_seqlens.tolist()
    if problems := cu_seqlens_value_problems(starts, x.shape[1]):
        raise ValueError("compress_mean: " + "; ".join(problems))
    lengths = [stop - start for start, stop in pairwise(starts)]
    return packed_layout(lengths, compress_size, compress_stride, x.device).blocks_Sl
