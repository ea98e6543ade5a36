"""One loop step of the attention kernels: the contribution of a tile of keys to a tile of query rows.

`m_row` [R] is True for rows that attend to the whole tile; None means all rows. For a row that does not, the value that
is subtracted from its exponents is infinite. So nothing is compared per row and key, and scale and log-sum-exp become
one fused multiply-add. If rows attend to only some of the keys, `m_seen` [R, K] (or [K, R]) is True for these keys;
None costs nothing.

Exponents are in the base that `power` uses. Gradients of queries and keys are without the scale, which the callers
multiply once after their loop.

Dimensions: R query rows, K keys of a tile, D key width, E value width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .device import power
from .gates import with_gate_sign

_INFINITE = tl.constexpr(float("inf"))


@triton.jit
def load_existing_rows(p_rows, s_row, first, ROWS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr):
    """Load ROWS rows, starting at row `first`, without a mask."""
    o_row = tl.arange(0, ROWS).to(tl.int64)
    o_column = tl.arange(0, WIDTH_PADDED)
    # Only a scalar depends on `first`, so the other offsets stay the same in every step.
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
    """Add a tile of keys to the running maximum [R], sum [R] and output [R, E] of the rows."""
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee", out_dtype=ACC)  # [R, K]
    if m_seen is None:
        # One multiplication per row is enough: a positive scale keeps the order of scores, a negative one reverses it.
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
        # Without this, rows that have not attended to any key yet would compute -inf - -inf.
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
    """Add the contribution of a tile of keys to the gradient of the queries [R, D].

    For a row without any visible key `b_lse` is inf; if `m_seen` masks it as well, -inf is allowed too.
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
    """Add the contribution of a tile of rows to the gradients of keys [K, D] and values [K, E].

    Also return the gradient of the scores [K, R], as the operand of a product.
    For a row that does not exist `b_lse` is inf. With SIGNED, the last bit of `b_delta` is the sign of the row's gate
    (gates.py).
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
    b_ds = (b_p * (b_dp - b_delta[None, :])).to(b_q.dtype)
    b_dk = tl.dot(b_ds, b_q, b_dk, input_precision="ieee", out_dtype=ACC)
    return b_dk, b_dv, b_ds
