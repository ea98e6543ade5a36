"""Attention with full score matrices, for `--impl dense`.

This is the textbook form of attention, for comparison. Autograd saves the matrices, so memory grows with the square of
T. At usual training lengths it fills a GPU with a model of a few layers.

Dimensions: B batch, H query heads, G groups, N batch x groups, h heads of a group, T queries, S keys, D key width, E
value width, n selected blocks per query.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .attend import CompletedBlocks, LastTokens, Pattern, SelectedBlocks
from .backends import OutputAndLse, Starts, TiledBackend
from .kernels import compute_dtype
from .packed import apply_per_sequence, compressed_starts


@dataclass(frozen=True)
class DenseBackend(TiledBackend):
    """A backend that computes full score matrices."""

    name = "dense"

    def attend_compressed(
        self, q: Tensor, k: Tensor, v: Tensor, *, block_len: int, block_stride: int, scale: float, starts: Starts = None
    ) -> OutputAndLse:
        def attend_one_sequence(q: Tensor, k: Tensor, v: Tensor) -> OutputAndLse:
            return dense(CompletedBlocks(block_len, block_stride), q, k, v, None, scale)

        blocks = None if starts is None else compressed_starts(starts, block_len, block_stride)
        return apply_per_sequence(attend_one_sequence, (q, starts), (k, blocks), (v, blocks))

    def attend_selected(
        self, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, *, select_len: int, scale: float, starts: Starts = None
    ) -> OutputAndLse:
        def attend_one_sequence(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> OutputAndLse:
            return dense(SelectedBlocks(select_len), q, k, v, indices, scale)

        return apply_per_sequence(attend_one_sequence, (q, starts), (k, starts), (v, starts), (indices, starts))

    def attend_sliding(
        self, q: Tensor, k: Tensor, v: Tensor, *, window: int, scale: float, starts: Starts = None
    ) -> OutputAndLse:
        def attend_one_sequence(q: Tensor, k: Tensor, v: Tensor) -> OutputAndLse:
            return dense(LastTokens(window), q, k, v, None, scale)

        return apply_per_sequence(attend_one_sequence, (q, starts), (k, starts), (v, starts))


def dense(
    pattern: Pattern, q_BHTD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor, indices_BGTn: Tensor | None, scale: float
) -> OutputAndLse:
    """Return the output [B, H, T, E] and log-sum-exp [B, H, T] of attention under a mask pattern.

    A query that attends to no key, or has only scores of -inf, gets output 0 and log-sum-exp -inf. The log-sum-exp has
    no gradient.
    """
    batch, heads, queries, _ = q_BHTD.shape
    batch_groups = batch * k_BGSD.shape[1]
    first, last = pattern.key_range(0, queries)
    indices = None if indices_BGTn is None else indices_BGTn.reshape(batch_groups, queries, indices_BGTn.shape[3])
    q_NhTD = q_BHTD.reshape(batch_groups, heads * batch // batch_groups, queries, q_BHTD.shape[3])
    k_N1SD, v_N1SE = (
        tensor.reshape(batch_groups, 1, *tensor.shape[2:])[:, :, first:last] for tensor in (k_BGSD, v_BGSE)
    )
    scores_NhTS = q_NhTD @ k_N1SD.transpose(2, 3) * scale + pattern.bias(0, queries, indices, q_NhTD)
    lse_NhT = scores_NhTS.detach().to(compute_dtype(q_BHTD)).logsumexp(-1)
    # The softmax of a row with only -inf, and its gradient, would be NaN.
    fully_masked = (lse_NhT == -torch.inf).unsqueeze(-1)
    output_NhTE = torch.softmax(scores_NhTS.masked_fill(fully_masked, 0.0), -1) @ v_N1SE
    output_NhTE = output_NhTE.masked_fill(fully_masked, 0.0)
    output_BHTE = output_NhTE.reshape(batch, heads, queries, v_BGSE.shape[3]).to(q_BHTD.dtype)
    return output_BHTE, lse_NhT.reshape(batch, heads, queries)
