"""Bitonic sorting networks for integers inside a Triton kernel.

tl.sort and tl.topk do the same, but are a thousand times slower in Triton's interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sort_ascending(b_rank, ROWS: tl.constexpr, LOG_WIDTH: tl.constexpr):
    """Sort each row of 2^LOG_WIDTH integers in ascending order."""
    for log_sorted in tl.static_range(1, LOG_WIDTH):
        b_rank = merge_runs(b_rank, ROWS, LOG_WIDTH, log_sorted, 0)
    return merge_runs(b_rank, ROWS, LOG_WIDTH, LOG_WIDTH, 1)


@triton.jit
def merge_runs(b_rank, ROWS: tl.constexpr, LOG_WIDTH: tl.constexpr, LOG_LENGTH: tl.constexpr, ASCENDING: tl.constexpr):
    """Sort each bitonic run of 2^LOG_LENGTH integers, alternately in descending and ascending order.

    With ASCENDING = 1 the first run becomes ascending.
    """
    for log_step in tl.static_range(LOG_LENGTH):
        b_rank = _compare_exchange(b_rank, ROWS, LOG_WIDTH, LOG_LENGTH, LOG_LENGTH - 1 - log_step, ASCENDING)
    return b_rank


@triton.jit
def _compare_exchange(
    b_rank,
    ROWS: tl.constexpr,
    LOG_WIDTH: tl.constexpr,
    LOG_LENGTH: tl.constexpr,
    LOG_APART: tl.constexpr,
    ASCENDING: tl.constexpr,
):
    """Compare integers that are 2^LOG_APART positions apart, and exchange those in the wrong order."""
    WIDTH: tl.constexpr = 1 << LOG_WIDTH
    o_rank = tl.arange(0, WIDTH)  # [C]
    b_pairs = tl.reshape(b_rank, [ROWS * WIDTH >> (LOG_APART + 1), 2, 1 << LOG_APART])
    # The sum of a pair minus one rank is the other rank, even if the sum overflows.
    b_other = tl.reshape(tl.sum(b_pairs, 1)[:, None, :] - b_pairs, [ROWS, WIDTH])
    m_lesser = ((o_rank >> LOG_APART) ^ (o_rank >> LOG_LENGTH) ^ ASCENDING) & 1  # [C]
    # A single 64-bit comparison; the position decides whether the greater or the lesser rank stays.
    return tl.where((b_rank > b_other) ^ (m_lesser == 1)[None, :], b_rank, b_other)
