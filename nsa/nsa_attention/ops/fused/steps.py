"""A tile of keys in the softmax of a tile of rows, and in its gradients, for rows that see all of it or nothing.

Whether a row sees the tile is one number of the row: what the exponent is taken relative to is infinite where it does
not. So nothing is compared or chosen for each row and key, and scale and log-sum-exp go into one fused
multiply-add. `m_row` [R] says which rows see the tile, None that all do. Where a row sees some of the keys, `m_seen`
[R, K] (or [K, R]) says which; None costs nothing.

Exponents are in the base that `power` takes. Gradients of queries and keys are without the scale, which is
multiplied in once, behind the walk. Rows R, keys K of a tile, D and E the widths of keys and values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .device import power
from .gates import with_gate_sign

_INFINITE = tl.constexpr(float("inf"))


@triton.jit
def load_existing_rows(p_rows, s_row, first, ROWS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr):
    """Rows from `first` on, all of which exist."""
    o_row = tl.arange(0, ROWS).to(tl.int64)
    o_column = tl.arange(0, WIDTH_PADDED)
    # The part that depends on `first` is one number, so that the rest stays as it is from step to step.
    p_tile = p_rows + tl.cast(first, tl.int64) * s_row + (o_row[:, None] * s_row + o_column[None, :])
    if WIDTH == WIDTH_PADDED:
        b_rows = tl.load(p_tile)
    else:
        b_rows = tl.load(p_tile, mask=(o_column < WIDTH)[None, :], other=0.0)
    return b_rows  # [ROWS, WIDTH_PADDED]


@triton.jit
def forward_step(
    b_q, b_k, b_v, m_row, m_seen, b_highest, b_total, b_o,
    EXPONENT: tl.constexpr, EXACT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """A tile of keys into the running maximum and sum of each row of `m_row` [R], and into its output [R, E]."""
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee", out_dtype=ACC)  # [R, K]
    if m_seen is None:
        # One multiplication a row: the scale keeps the order, or turns it round.
        b_most = tl.max(b_s, 1) * EXPONENT if EXPONENT >= 0 else tl.min(b_s, 1) * EXPONENT
        b_s = b_s * EXPONENT
    else:
        b_s = tl.where(m_seen, b_s * EXPONENT, -_INFINITE)
        b_most = tl.max(b_s, 1)
    b_higher = tl.maximum(b_highest, b_most)
    if m_row is not None:
        b_higher = tl.where(m_row, b_higher, b_highest)
    b_shift = b_higher
    if m_row is not None or m_seen is not None:
        # Rows that have seen nothing yet would compute -inf - -inf.
        b_shift = tl.where(b_higher == -_INFINITE, 0.0, b_higher)
    b_seen_shift = b_shift
    if m_row is not None:
        b_seen_shift = tl.where(m_row, b_shift, _INFINITE)
    b_p = power(b_s - b_seen_shift[:, None], EXACT)  # [R, K]
    b_shrink = power(b_highest - b_shift, EXACT)
    b_total = b_total * b_shrink + tl.sum(b_p, 1)
    b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o * b_shrink[:, None], input_precision="ieee", out_dtype=ACC)
    return b_higher, b_total, b_o


@triton.jit
def query_step(
    b_q, b_k, b_v, b_do, b_lse, b_delta, m_row, m_seen, b_dq,
    EXPONENT: tl.constexpr, EXACT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """A tile of keys into the gradient of the queries [R, D].

    Of a row that sees no key at all `b_lse` is infinite, of either sign where `m_seen` says so as well.
    """
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee", out_dtype=ACC)  # [R, K]
    if m_row is not None:
        b_lse = tl.where(m_row, b_lse, _INFINITE)
    b_exponent = b_s * EXPONENT - b_lse[:, None]
    if m_seen is not None:
        b_exponent = tl.where(m_seen, b_exponent, -_INFINITE)
    b_p = power(b_exponent, EXACT)
    b_dp = tl.dot(b_do, tl.trans(b_v), input_precision="ieee", out_dtype=ACC)  # [R, K]
    b_ds = b_p * (b_dp - b_delta[:, None])
    return tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision="ieee", out_dtype=ACC)


@triton.jit
def key_step(
    b_q, b_k, b_v, b_do, b_lse, b_delta, m_seen, b_dk, b_dv,
    SIGNED: tl.constexpr, EXPONENT: tl.constexpr, EXACT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """A tile of rows into the gradients of keys [K, D] and values [K, E]; of a row that is none `b_lse` is infinite.

    With SIGNED `b_delta` has the sign of the row's gate (gates.py).
    """
    b_s = tl.dot(b_k, tl.trans(b_q), input_precision="ieee", out_dtype=ACC)  # [K, R]
    b_exponent = b_s * EXPONENT - b_lse[None, :]
    if m_seen is not None:
        b_exponent = tl.where(m_seen, b_exponent, -_INFINITE)
    b_p = power(b_exponent, EXACT)
    if SIGNED:
        b_p = with_gate_sign(b_p, b_delta)
    b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv, input_precision="ieee", out_dtype=ACC)
    b_dp = tl.dot(b_v, tl.trans(b_do), input_precision="ieee", out_dtype=ACC)  # [K, R]
    b_ds = b_p * (b_dp - b_delta[None, :])
    b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision="ieee", out_dtype=ACC)
    return b_dk, b_dv
