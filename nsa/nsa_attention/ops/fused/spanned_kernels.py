"""The Triton kernels of the compressed and sliding branches.

Each query attends to one contiguous span of keys. For the forward pass and the gradient of the queries, a program holds
a tile of queries with all heads of their group, and loops over the keys from the first to the last that any of them
attends to. For the gradients of keys and values, a program holds a tile of keys and loops over the queries, so the sum
over queries and heads stays in registers and needs no atomics. With atomics, the same program also adds its
contribution to the gradient of the queries, and a light kernel computes the statistics of the rows.

Dimensions: R rows (queries x heads of a group), K keys of a tile, D key width, E value width. A span is [start, stop),
and empty if start == stop.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .device import load_heads, load_rows, log_sum, store_heads, store_rows
from .gates import row_statistics
from .launch import for_any_length
from .steps import forward_step, key_step, query_step

_NO_KEY = tl.constexpr(2**31 - 1)


@triton.jit
def tile_rows(i_tile, p_first, p_stop, tokens, ROWS: tl.constexpr, HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr):
    """Return the token, head, mask and span of keys for each row of a tile."""
    o_row = tl.arange(0, ROWS)
    o_token = i_tile * (ROWS // HEADS_PADDED) + o_row // HEADS_PADDED  # [R]
    o_head = o_row % HEADS_PADDED  # [R]
    m_row = (o_token < tokens) & (o_head < HEADS)
    b_first = tl.load(p_first + o_token, mask=m_row, other=0)  # [R]
    b_stop = tl.load(p_stop + o_token, mask=m_row, other=0)  # [R]
    return o_token, o_head, m_row, b_first, b_stop


@triton.jit
def plan_walk(b_first, b_stop, m_span, STEP: tl.constexpr):
    """Plan the loop over the spans of a tile in steps of STEP keys or queries.

    Return the first position, the position after the last, the number of steps, `lead` and `inner`. In the steps [lead,
    lead + inner), every span contains the whole step, so no mask is needed.
    """
    first, last = tl.min(tl.where(m_span, b_first, _NO_KEY), 0), tl.max(b_stop, 0)
    common_first, common_last = tl.max(b_first, 0), tl.min(tl.where(m_span, b_stop, _NO_KEY), 0)
    steps = tl.cdiv(tl.maximum(last - first, 0), STEP)
    lead = tl.cdiv(tl.maximum(common_first - first, 0), STEP)
    inner = tl.maximum(common_last - first - lead * STEP, 0) // STEP
    return first, last, steps, lead, inner


@triton.jit
def is_inside(o_place, b_first, b_stop):
    """Return a mask of the positions `o_place` that lie in [b_first, b_stop)."""
    # A single unsigned comparison is enough, because positions before `first` become huge numbers.
    b_length = (b_stop - b_first).to(tl.uint32, bitcast=True)
    return (o_place - b_first).to(tl.uint32, bitcast=True) < b_length


@triton.jit
def group_pointer(p_tensor, i_b, i_g, s_b, s_g, DESCRIBED: tl.constexpr):
    """Return a pointer to the rows of group `i_g`. A tensor descriptor is returned unchanged."""
    if DESCRIBED:
        p_group = p_tensor
    else:
        p_group = p_tensor + tl.cast(i_b, tl.int64) * s_b + tl.cast(i_g, tl.int64) * s_g
    return p_group


@triton.jit
def load_keys(
    p_rows, i_b, i_g, s_row, start, last, MASKED: tl.constexpr,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Load the keys or values at positions [start, start + KEYS) of a group."""
    if DESCRIBED:
        b_rows = tl.reshape(p_rows.load([i_b, i_g, start, 0]), [KEYS, WIDTH_PADDED])
    else:
        b_rows = load_key_rows(p_rows, s_row, start, last, MASKED, KEYS, WIDTH, WIDTH_PADDED)
    return b_rows  # [K, WIDTH_PADDED]


@triton.jit
def load_key_rows(
    p_rows, s_row, start, last,
    MASKED: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr,
):  # fmt: skip
    """Load the rows [start, start + KEYS) through pointers. If MASKED, row `last` and all later rows are 0."""
    o_row, o_column = tl.arange(0, KEYS), tl.arange(0, WIDTH_PADDED)
    p_tile = p_rows + start.to(tl.int64) * s_row + (o_row.to(tl.int64) * s_row)[:, None] + o_column[None, :]
    if MASKED:
        b_rows = tl.load(p_tile, mask=(start + o_row < last)[:, None] & (o_column < WIDTH)[None, :], other=0.0)
    elif WIDTH == WIDTH_PADDED:
        b_rows = tl.load(p_tile)
    else:
        b_rows = tl.load(p_tile, mask=(o_column < WIDTH)[None, :], other=0.0)
    return b_rows  # [K, WIDTH_PADDED]


@triton.jit
def load_queries(
    p_rows, i_b, i_g, o_row, start, s_row, m_row, MASKED: tl.constexpr, HEADS: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Load query rows at offsets relative to query `start`.

    With MASKED, rows outside `m_row` are 0.
    """
    if DESCRIBED:
        b_rows = tl.reshape(p_rows.load([i_b, start, i_g * HEADS, 0]), [ROWS, WIDTH_PADDED])
    else:
        b_rows = load_query_rows(p_rows, o_row, start, s_row, m_row, MASKED, WIDTH, WIDTH_PADDED)
    return b_rows  # [R, WIDTH_PADDED]


@triton.jit
def load_query_rows(
    p_rows, o_row, start, s_row, m_row,
    MASKED: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr,
):  # fmt: skip
    """Load query rows through pointers, at offsets relative to query `start`."""
    o_column = tl.arange(0, WIDTH_PADDED)
    p_tile = p_rows + start.to(tl.int64) * s_row + o_row[:, None] + o_column[None, :]
    if MASKED:
        b_rows = tl.load(p_tile, mask=m_row[:, None] & (o_column < WIDTH)[None, :], other=0.0)
    elif WIDTH == WIDTH_PADDED:
        b_rows = tl.load(p_tile)
    else:
        b_rows = tl.load(p_tile, mask=(o_column < WIDTH)[None, :], other=0.0)
    return b_rows  # [R, WIDTH_PADDED]


@triton.jit
def add_queries(
    p_dq, i_b, i_g, start, groups, tokens, m_row, b_dq, MASKED: tl.constexpr,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
    ROWS: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Add the tile `b_dq` of a group of heads, which begins at query `start`, to `p_dq` [B, T, H, D] with atomics."""
    if DESCRIBED:
        b_tile = tl.reshape(b_dq, [1, ROWS // HEADS, HEADS, D_PADDED])
        p_dq.atomic_add([i_b, start, i_g * HEADS, 0], b_tile)
    else:
        o_row, o_column = tl.arange(0, ROWS), tl.arange(0, D_PADDED)
        s_token = tl.cast(groups, tl.int64) * (HEADS * D)
        p_tile = p_dq + (tl.cast(i_b, tl.int64) * tokens + start) * s_token + i_g * (HEADS * D)
        p_tile = p_tile + (o_row // HEADS_PADDED)[:, None] * s_token
        p_tile = p_tile + ((o_row % HEADS_PADDED) * D)[:, None] + o_column[None, :]
        # Neighbouring threads add neighbouring elements. With several elements per thread, each instruction would use
        # only a part of the sectors that it touches.
        p_tile = tl.multiple_of(p_tile, [4, 4])
        if MASKED:
            tl.atomic_add(p_tile, b_dq, mask=m_row[:, None] & (o_column < D)[None, :], sem="relaxed")
        elif D == D_PADDED:
            tl.atomic_add(p_tile, b_dq, sem="relaxed")
        else:
            tl.atomic_add(p_tile, b_dq, mask=(o_column < D)[None, :], sem="relaxed")


@triton.jit
def forward_keys(
    b_q, p_keys, s_ks, p_values, s_vs, i_b, i_g, start, last, b_first, b_stop, b_highest, b_total, b_o,
    MASKED: tl.constexpr, EXPONENT: tl.constexpr, EXACT: tl.constexpr,
    D: tl.constexpr, D_PADDED: tl.constexpr, E: tl.constexpr, E_PADDED: tl.constexpr,
    ACC: tl.constexpr, KEYS: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Load a tile of keys and values, and add it to the running maximum, sum and output of each row."""
    b_k = load_keys(p_keys, i_b, i_g, s_ks, start, last, MASKED, KEYS, D, D_PADDED, DESCRIBED)
    b_v = load_keys(p_values, i_b, i_g, s_vs, start, last, MASKED, KEYS, E, E_PADDED, DESCRIBED)
    if MASKED:
        m_seen = is_inside((start + tl.arange(0, KEYS))[None, :], b_first[:, None], b_stop[:, None])
    else:
        m_seen = None
    return forward_step(b_q, b_k, b_v, None, m_seen, b_highest, b_total, b_o, EXPONENT, EXACT, ACC)


@for_any_length
def spanned_forward(
    p_q, s_qb, s_qh, s_qt,
    p_k, s_kb, s_kg, s_ks,
    p_v, s_vb, s_vg, s_vs,
    p_o, s_ob, s_oh, s_ot,
    p_lse, p_first, p_stop,
    groups, tokens, tiles,
    EXPONENT: tl.constexpr, EXACT: tl.constexpr,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr,
    D: tl.constexpr, D_PADDED: tl.constexpr, E: tl.constexpr, E_PADDED: tl.constexpr,
    ACC: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Compute the output and log-sum-exp of one tile of queries, for all heads of a group."""
    # The last queries attend to most keys, so their programs start first. Tiles of one group are adjacent and share its
    # keys in the cache.
    i_tile = tiles - 1 - tl.program_id(0) % tiles
    i_bg = tl.program_id(0) // tiles
    i_b, i_g = i_bg // groups, i_bg % groups
    o_token, o_head, m_row, b_first, b_stop = tile_rows(i_tile, p_first, p_stop, tokens, ROWS, HEADS, HEADS_PADDED)
    i_b_wide, o_head = i_b.to(tl.int64), i_g.to(tl.int64) * HEADS + o_head  # [R]
    o_wide = o_token.to(tl.int64)
    b_q = load_heads(p_q, i_b_wide * s_qb + o_head * s_qh + o_wide * s_qt, m_row, D, D_PADDED)  # [R, D]
    p_keys = group_pointer(p_k, i_b, i_g, s_kb, s_kg, DESCRIBED)
    p_values = group_pointer(p_v, i_b, i_g, s_vb, s_vg, DESCRIBED)
    b_highest = tl.full([ROWS], float("-inf"), ACC)
    b_total = tl.zeros([ROWS], ACC)
    b_o = tl.zeros([ROWS, E_PADDED], ACC)
    first, last, steps, lead, inner = plan_walk(b_first, b_stop, m_row, KEYS)
    for i in range(lead, lead + inner):
        b_highest, b_total, b_o = forward_keys(
            b_q, p_keys, s_ks, p_values, s_vs, i_b, i_g, first + i * KEYS, last, b_first, b_stop,
            b_highest, b_total, b_o,
            False, EXPONENT, EXACT, D, D_PADDED, E, E_PADDED, ACC, KEYS, DESCRIBED,
        )  # fmt: skip
    for i in range(steps - inner):
        start = first + tl.where(i < lead, i, i + inner) * KEYS
        b_highest, b_total, b_o = forward_keys(
            b_q, p_keys, s_ks, p_values, s_vs, i_b, i_g, start, last, b_first, b_stop,
            b_highest, b_total, b_o,
            True, EXPONENT, EXACT, D, D_PADDED, E, E_PADDED, ACC, KEYS, DESCRIBED,
        )  # fmt: skip
    b_o = b_o / tl.where(b_total == 0.0, 1.0, b_total)[:, None]
    b_lse = log_sum(b_highest, b_total, EXACT)
    store_heads(p_o, i_b_wide * s_ob + o_head * s_oh + o_wide * s_ot, m_row, b_o, E, E_PADDED)
    tl.store(p_lse + (i_b_wide * groups * HEADS + o_head) * tokens + o_wide, b_lse, mask=m_row)


@triton.jit
def gradient_from_keys(
    b_q, p_keys, s_ks, p_values, s_vs, i_b, i_g, b_do, b_lse, b_delta, start, last, b_first, b_stop, b_dq,
    MASKED: tl.constexpr, EXPONENT: tl.constexpr, EXACT: tl.constexpr,
    D: tl.constexpr, D_PADDED: tl.constexpr, E: tl.constexpr, E_PADDED: tl.constexpr,
    ACC: tl.constexpr, KEYS: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Load a tile of keys and values, and add its contribution to the gradient of the queries."""
    b_k = load_keys(p_keys, i_b, i_g, s_ks, start, last, MASKED, KEYS, D, D_PADDED, DESCRIBED)
    b_v = load_keys(p_values, i_b, i_g, s_vs, start, last, MASKED, KEYS, E, E_PADDED, DESCRIBED)
    if MASKED:
        m_seen = is_inside((start + tl.arange(0, KEYS))[None, :], b_first[:, None], b_stop[:, None])
    else:
        m_seen = None
    return query_step(b_q, b_k, b_v, b_do, b_lse, b_delta, None, m_seen, b_dq, EXPONENT, EXACT, ACC)


@triton.jit
def store_statistics(
    p_do, s_dob, s_doh, s_dot, p_o, s_ob, s_oh, s_ot, p_g, s_gc, s_gb, s_gh, s_gt, p_dg, p_lse, p_stats,
    i_b, o_head, o_token, m_row, batch, heads, tokens, branch,
    EXACT: tl.constexpr, E: tl.constexpr, E_PADDED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Store each row's log-sum-exp and delta for `spanned_backward_keys`, and the gradient of the gates.

    Return the log-sum-exp [R], delta [R] and upstream gradient [R, E] for a loop over keys (gates.row_statistics).
    """
    b_do = load_heads(p_do, i_b * s_dob + o_head * s_doh + o_token * s_dot, m_row, E, E_PADDED)  # [R, E]
    b_o = load_heads(p_o, i_b * s_ob + o_head * s_oh + o_token * s_ot, m_row, E, E_PADDED)  # [R, E]
    o_stat = (i_b * heads + o_head) * tokens + o_token
    to_delta = tl.cast(batch, tl.int64) * heads * tokens
    b_lse = tl.load(p_lse + o_stat, mask=m_row, other=0.0)
    b_lse, b_delta, b_signed_delta, b_do = row_statistics(
        b_o, b_do, b_lse, p_g, s_gc, s_gb, s_gh, s_gt, p_dg, i_b, o_head, o_token, branch * to_delta + o_stat,
        branch, m_row, EXACT, ACC,
    )  # fmt: skip
    tl.store(p_stats + o_stat, b_lse, mask=m_row)
    tl.store(p_stats + to_delta + o_stat, b_signed_delta, mask=m_row)
    return b_lse, b_delta, b_do


@for_any_length
def spanned_statistics(
    p_do, s_dob, s_doh, s_dot,
    p_o, s_ob, s_oh, s_ot,
    p_g, s_gc, s_gb, s_gh, s_gt,
    p_dg, p_lse, p_stats,
    batch, tokens, branch,
    EXACT: tl.constexpr, HEADS: tl.constexpr, E: tl.constexpr, E_PADDED: tl.constexpr,
    ACC: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute what `spanned_backward_queries` computes besides the gradient of the queries."""
    row_tiles = tl.cdiv(tokens * HEADS, ROWS)
    i_b = (tl.program_id(0) // row_tiles).to(tl.int64)
    o_row = (tl.program_id(0) % row_tiles) * ROWS + tl.arange(0, ROWS)  # [R]
    o_head, o_token, m_row = (o_row % HEADS).to(tl.int64), (o_row // HEADS).to(tl.int64), o_row < tokens * HEADS
    store_statistics(
        p_do, s_dob, s_doh, s_dot, p_o, s_ob, s_oh, s_ot, p_g, s_gc, s_gb, s_gh, s_gt, p_dg, p_lse, p_stats,
        i_b, o_head, o_token, m_row, batch, HEADS, tokens, branch, EXACT, E, E_PADDED, ACC,
    )  # fmt: skip


@for_any_length
def spanned_backward_queries(
    p_q, s_qb, s_qh, s_qt,
    p_k, s_kb, s_kg, s_ks,
    p_v, s_vb, s_vg, s_vs,
    p_do, s_dob, s_doh, s_dot,
    p_o, s_ob, s_oh, s_ot,
    p_dq, s_dqb, s_dqh, s_dqt,
    p_g, s_gc, s_gb, s_gh, s_gt,
    p_dg, p_lse, p_stats, p_first, p_stop,
    batch, groups, tokens, tiles, branch,
    SCALE: tl.constexpr, EXPONENT: tl.constexpr, EXACT: tl.constexpr,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr,
    D: tl.constexpr, D_PADDED: tl.constexpr, E: tl.constexpr, E_PADDED: tl.constexpr,
    ACC: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DESCRIBED: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the queries, and each row's log-sum-exp and delta for `spanned_backward_keys`.

    These are delta = sum(o * do), and the log-sum-exp in the base that `power` uses. With gates, `do` is the gradient
    of the gated sum of all branches (gates.py), and delta is the gradient of the gate. With ADDS, the gradient of the
    queries is added to `p_dq`.
    """
    i_tile = tiles - 1 - tl.program_id(0) % tiles
    i_bg = tl.program_id(0) // tiles
    i_b, i_g = i_bg // groups, i_bg % groups
    o_token, o_head, m_row, b_first, b_stop = tile_rows(i_tile, p_first, p_stop, tokens, ROWS, HEADS, HEADS_PADDED)
    i_b_wide, o_head = i_b.to(tl.int64), i_g.to(tl.int64) * HEADS + o_head
    o_wide = o_token.to(tl.int64)
    b_q = load_heads(p_q, i_b_wide * s_qb + o_head * s_qh + o_wide * s_qt, m_row, D, D_PADDED)  # [R, D]
    b_lse, b_delta, b_do = store_statistics(
        p_do, s_dob, s_doh, s_dot, p_o, s_ob, s_oh, s_ot, p_g, s_gc, s_gb, s_gh, s_gt, p_dg, p_lse, p_stats,
        i_b_wide, o_head, o_wide, m_row, batch, tl.cast(groups, tl.int64) * HEADS, tokens, branch,
        EXACT, E, E_PADDED, ACC,
    )  # fmt: skip
    p_keys = group_pointer(p_k, i_b, i_g, s_kb, s_kg, DESCRIBED)
    p_values = group_pointer(p_v, i_b, i_g, s_vb, s_vg, DESCRIBED)
    b_dq = tl.zeros([ROWS, D_PADDED], ACC)
    first, last, steps, lead, inner = plan_walk(b_first, b_stop, m_row, KEYS)
    for i in range(lead, lead + inner):
        b_dq = gradient_from_keys(
            b_q, p_keys, s_ks, p_values, s_vs, i_b, i_g, b_do, b_lse, b_delta,
            first + i * KEYS, last, b_first, b_stop, b_dq,
            False, EXPONENT, EXACT, D, D_PADDED, E, E_PADDED, ACC, KEYS, DESCRIBED,
        )  # fmt: skip
    for i in range(steps - inner):
        start = first + tl.where(i < lead, i, i + inner) * KEYS
        b_dq = gradient_from_keys(
            b_q, p_keys, s_ks, p_values, s_vs, i_b, i_g, b_do, b_lse, b_delta, start, last, b_first, b_stop, b_dq,
            True, EXPONENT, EXACT, D, D_PADDED, E, E_PADDED, ACC, KEYS, DESCRIBED,
        )  # fmt: skip
    o_dq = i_b_wide * s_dqb + o_head * s_dqh + o_wide * s_dqt
    b_dq *= SCALE
    if ADDS:
        b_dq += load_heads(p_dq, o_dq, m_row, D, D_PADDED)
    store_heads(p_dq, o_dq, m_row, b_dq, D, D_PADDED)


@triton.jit
def gradients_from_queries(
    p_queries, o_query, s_qt, p_grads, o_grad, s_dot, p_dq, groups, tokens, i_b, i_g, b_k, b_v, p_stats, to_delta,
    start, last, b_first, b_stop, b_dk, b_dv, m_head,
    MASKED: tl.constexpr, SIGNED: tl.constexpr, EXPONENT: tl.constexpr, EXACT: tl.constexpr,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr,
    D: tl.constexpr, D_PADDED: tl.constexpr, E: tl.constexpr, E_PADDED: tl.constexpr,
    ACC: tl.constexpr, ROWS: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Load a tile of query rows, and add its contribution to the gradients of keys and values.

    If `p_dq` is not None, also add the contribution of the keys to the gradient of these queries.
    """
    o_token = start + tl.arange(0, ROWS) // HEADS_PADDED  # [R]
    m_row = m_head & (o_token < last)
    NEEDS: tl.constexpr = MASKED or HEADS != HEADS_PADDED
    b_q = load_queries(
        p_queries, i_b, i_g, o_query, start, s_qt, m_row, NEEDS, HEADS, ROWS, D, D_PADDED, DESCRIBED
    )  # [R, D]
    b_do = load_queries(
        p_grads, i_b, i_g, o_grad, start, s_dot, m_row, NEEDS, HEADS, ROWS, E, E_PADDED, DESCRIBED
    )  # [R, E]
    if NEEDS:
        b_lse = tl.load(p_stats + start, mask=m_row, other=0.0)
        b_delta = tl.load(p_stats + start + to_delta, mask=m_row, other=0.0)
    else:
        b_lse = tl.load(p_stats + start)
        b_delta = tl.load(p_stats + start + to_delta)
    # Queries and gradients of rows that do not exist are 0 and contribute nothing.
    if MASKED:
        m_seen = is_inside(o_token[None, :], b_first[:, None], b_stop[:, None])
    else:
        m_seen = None
    b_dk, b_dv, b_ds = key_step(b_q, b_k, b_v, b_do, b_lse, b_delta, m_seen, b_dk, b_dv, SIGNED, EXPONENT, EXACT, ACC)
    if p_dq is not None:
        b_dq = tl.dot(tl.trans(b_ds), b_k, input_precision="ieee", out_dtype=ACC)  # [R, D]
        add_queries(
            p_dq, i_b, i_g, start, groups, tokens, m_row, b_dq, NEEDS, HEADS, HEADS_PADDED, D, D_PADDED, ROWS, DESCRIBED
        )
    return b_dk, b_dv


@for_any_length
def spanned_backward_keys(
    p_q, s_qb, s_qh, s_qt,
    p_k, s_kb, s_kg, s_ks,
    p_v, s_vb, s_vg, s_vs,
    p_do, s_dob, s_doh, s_dot,
    p_dk, p_dv,
    p_dq, p_stats, p_first_query, p_stop_query,
    groups, tokens, keys, tiles, parts, batch_groups,
    SCALE: tl.constexpr, EXPONENT: tl.constexpr, EXACT: tl.constexpr,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr,
    D: tl.constexpr, D_PADDED: tl.constexpr, E: tl.constexpr, E_PADDED: tl.constexpr,
    ACC: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DESCRIBED: tl.constexpr, SIGNED: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a tile of keys and values.

    If `p_dq` is not None, also add their contribution to the gradient of the queries, without the scale, with atomics.
    """
    # The program processes every `parts`-th tile of the queries that attend to these keys. The steps that need a mask
    # come first, because their bounds occupy registers. The other steps go down from the last query, which attends to
    # all compressed blocks, so programs that run at the same time read the same queries. With SIGNED, rows have gates,
    # which may be negative (gates.py).
    QUERIES: tl.constexpr = ROWS // HEADS_PADDED
    i_part = tl.program_id(0) % parts
    i_tile = tl.program_id(0) // parts % tiles
    i_bg = tl.program_id(0) // parts // tiles
    i_b, i_g = i_bg // groups, i_bg % groups
    o_key = i_tile * KEYS + tl.arange(0, KEYS)  # [K]
    m_key = o_key < keys
    b_k = load_rows(group_pointer(p_k, i_b, i_g, s_kb, s_kg, False), s_ks, o_key, m_key, D, D_PADDED)  # [K, D]
    b_v = load_rows(group_pointer(p_v, i_b, i_g, s_vb, s_vg, False), s_vs, o_key, m_key, E, E_PADDED)  # [K, E]
    b_first = tl.load(p_first_query + o_key, mask=m_key, other=0)
    b_stop = tl.load(p_stop_query + o_key, mask=m_key, other=0)
    o_row = tl.arange(0, ROWS)
    i_b_wide, o_head = i_b.to(tl.int64), i_g.to(tl.int64) * HEADS + o_row % HEADS_PADDED  # [R]
    o_query = (o_row // HEADS_PADDED).to(tl.int64)
    m_head = o_row % HEADS_PADDED < HEADS
    p_queries, p_grads = (
        group_pointer(p_q, i_b, 0, s_qb, 0, DESCRIBED),
        group_pointer(p_do, i_b, 0, s_dob, 0, DESCRIBED),
    )
    p_stats += (i_b_wide * groups * HEADS + o_head) * tokens + o_query
    to_delta = tl.cast(batch_groups, tl.int64) * HEADS * tokens
    b_dk = tl.zeros([KEYS, D_PADDED], ACC)
    b_dv = tl.zeros([KEYS, E_PADDED], ACC)
    first, last, steps, lead, inner = plan_walk(b_first, b_stop, m_key, QUERIES)
    # A kernel that also adds to the gradient of the queries would spill if loop invariants occupied registers.
    ADDS_QUERIES: tl.constexpr = p_dq is not None
    if ADDS_QUERIES:
        # Without a mask, keys that do not exist would add infinity times zero to the gradient of the queries.
        inner = tl.where((i_tile + 1) * KEYS > keys, 0, inner)
    for i in tl.range(i_part, steps - inner, parts, disable_licm=ADDS_QUERIES):
        step = steps - inner - 1 - i
        start = first + tl.where(step < lead, step, step + inner) * QUERIES
        b_dk, b_dv = gradients_from_queries(
            p_queries, o_head * s_qh + o_query * s_qt, s_qt, p_grads, o_head * s_doh + o_query * s_dot, s_dot,
            p_dq, groups, tokens, i_b, i_g, b_k, b_v, p_stats, to_delta, start, last,
            b_first, b_stop, b_dk, b_dv, m_head,
            True, SIGNED, EXPONENT, EXACT, HEADS, HEADS_PADDED, D, D_PADDED, E, E_PADDED, ACC, ROWS, DESCRIBED,
        )  # fmt: skip
    for i in tl.range(i_part, inner, parts, disable_licm=ADDS_QUERIES):
        b_dk, b_dv = gradients_from_queries(
            p_queries, o_head * s_qh + o_query * s_qt, s_qt, p_grads, o_head * s_doh + o_query * s_dot, s_dot,
            p_dq, groups, tokens, i_b, i_g, b_k, b_v, p_stats, to_delta, first + (lead + inner - 1 - i) * QUERIES, last,
            b_first, b_stop, b_dk, b_dv, m_head,
            False, SIGNED, EXPONENT, EXACT, HEADS, HEADS_PADDED, D, D_PADDED, E, E_PADDED, ACC, ROWS, DESCRIBED,
        )  # fmt: skip
    # Offsets are relative to this tile and computed again here, because each value kept through the loop occupies a
    # register.
    o_inside, remaining = tl.arange(0, KEYS), keys - i_tile * KEYS
    o_out = (i_part * batch_groups + i_bg).to(tl.int64) * keys + i_tile * KEYS
    store_rows(p_dk + o_out * D, D, o_inside, o_inside < remaining, b_dk * SCALE, D, D_PADDED)
    store_rows(p_dv + o_out * E, E, o_inside, o_inside < remaining, b_dv, E, E_PADDED)
