"""Sorting networks inside a kernel: rows of integers, as many as a power of two, as bitonic runs.

tl.sort and tl.topk do the same, a thousand times slower in the interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sort_ascending(b_rank, ROWS: tl.constexpr, LOG_WIDTH: tl.constexpr):
    """Each row [2^LOG_WIDTH] of integers sorted."""
    for log_sorted in tl.static_range(1, LOG_WIDTH):
        b_rank = merge_runs(b_rank, ROWS, LOG_WIDTH, log_sorted, 0)
    return merge_runs(b_rank, ROWS, LOG_WIDTH, LOG_WIDTH, 1)


@triton.jit
def merge_runs(b_rank, ROWS: tl.constexpr, LOG_WIDTH: tl.constexpr, LOG_LENGTH: tl.constexpr, ASCENDING: tl.constexpr):
    """Bitonic runs of 2^LOG_LENGTH ranks, each sorted: the first descending, the next ascending, and so on.

    Or the other way round, with ASCENDING = 1.
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
    """Ranks 2^LOG_APART apart, each two in the order of their run."""
    WIDTH: tl.constexpr = 1 << LOG_WIDTH
    o_rank = tl.arange(0, WIDTH)  # [C]
    b_pairs = tl.reshape(b_rank, [ROWS * WIDTH >> (LOG_APART + 1), 2, 1 << LOG_APART])
    # The sum less the one is the other, also where the sum overflows.
    b_other = tl.reshape(tl.sum(b_pairs, 1)[:, None, :] - b_pairs, [ROWS, WIDTH])
    m_lesser = ((o_rank >> LOG_APART) ^ (o_rank >> LOG_LENGTH) ^ ASCENDING) & 1  # [C]
    # One comparison of 64 bits: which of the two stays depends on the place.
    return tl.where((b_rank > b_other) ^ (m_lesser == 1)[None, :], b_rank, b_other)
