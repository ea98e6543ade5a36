"""Triton kernels of the selected branch (NSA paper, eq. 11 and 12). `selected.py` launches them.

Each loop has two parts. For blocks that end before the tile of queries starts, a query attends to all keys of the block
or none, and no mask per key is needed. Only the few blocks that overlap the tile need one. The address of the next load
is read one step ahead, because otherwise the loop would wait for the address and then for the load.

Dimensions inside a kernel: R rows (queries x heads of a group), K keys of a tile, D key width, E value width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .device import load_heads, load_rows, log_sum, store_heads, store_rows
from .gates import row_statistics
from .launch import for_any_length
from .spanned_kernels import group_pointer
from .steps import forward_step, key_step, load_existing_rows, query_step


@triton.jit
def _rows_of_tile(i_list, tokens, tiles, ROWS: tl.constexpr, HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr):
    """Return the query, token, head and mask for each row of a tile."""
    o_query = tl.arange(0, ROWS) // HEADS_PADDED  # [R]
    first_token = i_list % tiles * (ROWS // HEADS_PADDED)
    o_head = tl.arange(0, ROWS) % HEADS_PADDED  # [R]
    m_row = (o_head < HEADS) & (first_token + o_query < tokens)
    return o_query, first_token + o_query, o_head, m_row


@triton.jit
def _step_of_walk(p_first, p_members, i, o_query, PIECES: tl.constexpr, KEYS: tl.constexpr):
    """Return the first key of loop step `i`, and a mask of the rows whose query selected the key's block."""
    first = tl.load(p_first + i // PIECES) + i % PIECES * KEYS
    return first, ((tl.load(p_members + i // PIECES) >> o_query) & 1) != 0


@triton.jit
def _keys_of_step(i, first, m_member, o_token, tokens, SELECT_LEN: tl.constexpr, KEYS: tl.constexpr):
    """Return the keys of loop step `i`, a mask of those that exist, and a mask of those that each row attends to."""
    PIECES: tl.constexpr = (SELECT_LEN + KEYS - 1) // KEYS
    o_inside = i % PIECES * KEYS + tl.arange(0, KEYS)  # [K]
    o_key = first + tl.arange(0, KEYS)  # [K]
    m_key = (o_inside < SELECT_LEN) & (o_key < tokens)
    # Keys after a short last block belong to a later sequence, and are later than every query of this sequence.
    return o_key, m_key, m_member[:, None] & m_key[None, :] & (o_key[None, :] <= o_token[:, None])  # [R, K]


@triton.jit
def _plan_walk(p_union, i_list, places, SELECT_LEN: tl.constexpr, KEYS: tl.constexpr):
    """Return the first keys of the blocks of a tile's union and their members, and the numbers of steps of the loops.

    `steps` counts both loops, and `whole` the first one, whose steps need no mask per key.
    """
    PIECES: tl.constexpr = (SELECT_LEN + KEYS - 1) // KEYS
    p_first = p_union + i_list.to(tl.int64) * (2 * places + 2)
    p_members = p_first + places
    steps = tl.load(p_members + places) * PIECES
    # If the block length is no multiple of the tile, the last piece of a block extends beyond it and needs a mask.
    whole = tl.load(p_members + places + 1) * PIECES if SELECT_LEN % KEYS == 0 else 0
    return p_first, p_members, steps, whole


@triton.jit
def _load_block(
    p_rows, i_bg, groups, s_row, first, o_key, m_key,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Load the keys or values [first, first + KEYS) of a group.

    `m_key` is a mask of the rows `o_key` that exist; None: all exist. A descriptor reads other rows as 0.
    """
    if DESCRIBED:
        b_rows = tl.reshape(p_rows.load([i_bg // groups, i_bg % groups, first, 0]), [KEYS, WIDTH_PADDED])
    elif m_key is None:
        b_rows = load_existing_rows(p_rows, s_row, first, KEYS, WIDTH, WIDTH_PADDED)
    else:
        b_rows = load_rows(p_rows, s_row, o_key, m_key, WIDTH, WIDTH_PADDED)
    return b_rows  # [K, WIDTH_PADDED]


@for_any_length
def selected_forward(
    p_q, s_qb, s_qh, s_qt,
    p_k, s_kb, s_kg, s_kt,
    p_v, s_vb, s_vg, s_vt,
    p_o, s_ob, s_oh, s_ot,
    p_lse, p_union,
    groups, tokens, places, tiles,
    EXPONENT: tl.constexpr, EXACT: tl.constexpr,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr,
    D: tl.constexpr, D_PADDED: tl.constexpr, E: tl.constexpr, E_PADDED: tl.constexpr,
    ACC: tl.constexpr, SELECT_LEN: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Compute the output and log-sum-exp of one tile of queries, for all heads of a group."""
    PIECES: tl.constexpr = (SELECT_LEN + KEYS - 1) // KEYS
    # Tiles of one group are adjacent, so its keys and values stay in the cache.
    i_list = tl.program_id(0)
    i_bg = i_list // tiles
    i_b, i_g = (i_bg // groups).to(tl.int64), (i_bg % groups).to(tl.int64)
    o_query, o_token, o_head, m_row = _rows_of_tile(i_list, tokens, tiles, ROWS, HEADS, HEADS_PADDED)
    o_head = i_g * HEADS + o_head
    o_wide = o_token.to(tl.int64)
    b_q = load_heads(p_q, i_b * s_qb + o_head * s_qh + o_wide * s_qt, m_row, D, D_PADDED)  # [R, D]
    p_keys = group_pointer(p_k, i_b, i_g, s_kb, s_kg, DESCRIBED)
    p_values = group_pointer(p_v, i_b, i_g, s_vb, s_vg, DESCRIBED)
    b_highest = tl.full([ROWS], float("-inf"), ACC)
    b_total = tl.zeros([ROWS], ACC)
    b_o = tl.zeros([ROWS, E_PADDED], ACC)
    p_first, p_members, steps, whole = _plan_walk(p_union, i_list, places, SELECT_LEN, KEYS)
    first, m_member = _step_of_walk(p_first, p_members, 0, o_query, PIECES, KEYS)
    for i in range(whole):
        b_k = _load_block(p_keys, i_bg, groups, s_kt, first, None, None, KEYS, D, D_PADDED, DESCRIBED)  # [K, D]
        b_v = _load_block(p_values, i_bg, groups, s_vt, first, None, None, KEYS, E, E_PADDED, DESCRIBED)  # [K, E]
        b_highest, b_total, b_o = forward_step(
            b_q, b_k, b_v, m_member, None, b_highest, b_total, b_o, EXPONENT, EXACT, ACC
        )
        first, m_member = _step_of_walk(p_first, p_members, i + 1, o_query, PIECES, KEYS)
    for i in range(whole, steps):
        o_key, m_key, m_seen = _keys_of_step(i, first, m_member, o_token, tokens, SELECT_LEN, KEYS)
        b_k = _load_block(p_keys, i_bg, groups, s_kt, first, o_key, m_key, KEYS, D, D_PADDED, DESCRIBED)  # [K, D]
        b_v = _load_block(p_values, i_bg, groups, s_vt, first, o_key, m_key, KEYS, E, E_PADDED, DESCRIBED)  # [K, E]
        b_highest, b_total, b_o = forward_step(
            b_q, b_k, b_v, m_member, m_seen, b_highest, b_total, b_o, EXPONENT, EXACT, ACC
        )
        first, m_member = _step_of_walk(p_first, p_members, i + 1, o_query, PIECES, KEYS)
    b_o = b_o / tl.where(b_total == 0.0, 1.0, b_total)[:, None]
    store_heads(p_o, i_b * s_ob + o_head * s_oh + o_wide * s_ot, m_row, b_o, E, E_PADDED)
    tl.store(p_lse + (i_b * groups * HEADS + o_head) * tokens + o_wide, log_sum(b_highest, b_total, EXACT), mask=m_row)


@for_any_length
def selected_backward_queries(
    p_k, s_kb, s_kg, s_kt,
    p_v, s_vb, s_vg, s_vt,
    p_o, s_ob, s_oh, s_ot,
    p_g, s_gc, s_gb, s_gh, s_gt,
    p_q, p_do, p_dq, p_dg, p_lse, p_stats, p_union,
    groups, tokens, places, tiles, batch_groups, branch,
    SCALE: tl.constexpr, EXPONENT: tl.constexpr, EXACT: tl.constexpr,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr,
    D: tl.constexpr, D_PADDED: tl.constexpr, E: tl.constexpr, E_PADDED: tl.constexpr,
    ACC: tl.constexpr, SELECT_LEN: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DESCRIBED: tl.constexpr,
    ADDS: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the queries, and each row's log-sum-exp and delta for `selected_backward_keys`.

    With gates, `do` is the gradient of the gated sum of all branches (gates.py). With ADDS, the gradient is added to
    `p_dq`.
    """
    PIECES: tl.constexpr = (SELECT_LEN + KEYS - 1) // KEYS
    i_list = tl.program_id(0)
    i_bg = i_list // tiles
    i_b, i_g = (i_bg // groups).to(tl.int64), (i_bg % groups).to(tl.int64)
    o_query, o_token, o_head, m_row = _rows_of_tile(i_list, tokens, tiles, ROWS, HEADS, HEADS_PADDED)
    o_head = i_g * HEADS + o_head
    o_wide = o_token.to(tl.int64)
    o_stat = (i_b * tokens + o_wide) * groups * HEADS + o_head  # [R]
    b_q = load_heads(p_q, o_stat * D, m_row, D, D_PADDED)  # [R, D]
    b_do = load_heads(p_do, o_stat * E, m_row, E, E_PADDED)  # [R, E]
    b_o = load_heads(p_o, i_b * s_ob + o_head * s_oh + o_wide * s_ot, m_row, E, E_PADDED)  # [R, E]
    o_lse = (i_b * groups * HEADS + o_head) * tokens + o_wide
    to_delta = tl.cast(batch_groups, tl.int64) * HEADS * tokens
    b_lse = tl.load(p_lse + o_lse, mask=m_row, other=float("-inf"))
    b_lse, b_delta, b_signed_delta, b_do = row_statistics(
        b_o, b_do, b_lse, p_g, s_gc, s_gb, s_gh, s_gt, p_dg, i_b, o_head, o_wide, branch * to_delta + o_lse,
        branch, m_row, EXACT, ACC,
    )  # fmt: skip
    tl.store(p_stats + o_stat, b_lse, mask=m_row)
    tl.store(p_stats + to_delta + o_stat, b_signed_delta, mask=m_row)
    p_keys = group_pointer(p_k, i_b, i_g, s_kb, s_kg, DESCRIBED)
    p_values = group_pointer(p_v, i_b, i_g, s_vb, s_vg, DESCRIBED)
    b_dq = tl.zeros([ROWS, D_PADDED], ACC)
    p_first, p_members, steps, whole = _plan_walk(p_union, i_list, places, SELECT_LEN, KEYS)
    first, m_member = _step_of_walk(p_first, p_members, 0, o_query, PIECES, KEYS)
    for i in range(whole):
        b_k = _load_block(p_keys, i_bg, groups, s_kt, first, None, None, KEYS, D, D_PADDED, DESCRIBED)  # [K, D]
        b_v = _load_block(p_values, i_bg, groups, s_vt, first, None, None, KEYS, E, E_PADDED, DESCRIBED)  # [K, E]
        b_dq = query_step(b_q, b_k, b_v, b_do, b_lse, b_delta, m_member, None, b_dq, EXPONENT, EXACT, ACC)
        first, m_member = _step_of_walk(p_first, p_members, i + 1, o_query, PIECES, KEYS)
    for i in range(whole, steps):
        o_key, m_key, m_seen = _keys_of_step(i, first, m_member, o_token, tokens, SELECT_LEN, KEYS)
        b_k = _load_block(p_keys, i_bg, groups, s_kt, first, o_key, m_key, KEYS, D, D_PADDED, DESCRIBED)  # [K, D]
        b_v = _load_block(p_values, i_bg, groups, s_vt, first, o_key, m_key, KEYS, E, E_PADDED, DESCRIBED)  # [K, E]
        b_dq = query_step(b_q, b_k, b_v, b_do, b_lse, b_delta, m_member, m_seen, b_dq, EXPONENT, EXACT, ACC)
        first, m_member = _step_of_walk(p_first, p_members, i + 1, o_query, PIECES, KEYS)
    b_dq *= SCALE
    if ADDS:
        b_dq += load_heads(p_dq, o_stat * D, m_row, D, D_PADDED)
    store_heads(p_dq, o_stat * D, m_row, b_dq, D, D_PADDED)


@triton.jit
def _first_of_block(p_first, i_block, tokens, SELECT_LEN: tl.constexpr):
    """Return the first token of a block, and the first token of the next block."""
    if p_first is None:
        first, behind = i_block * SELECT_LEN, tl.minimum((i_block + 1) * SELECT_LEN, tokens)
    else:
        first, behind = tl.load(p_first + i_block), tl.load(p_first + i_block + 1)
    return first, behind


@triton.jit
def _query_of_place(p_key, o_place, stop, first_key):
    """Return the queries at positions `o_place` of a block's list of queries. Positions beyond the end are clamped."""
    # The int32 difference is right even if both operands are truncated.
    return tl.load(p_key + tl.maximum(tl.minimum(o_place, stop - 1), 0)).to(tl.int32) - first_key


@triton.jit
def _rows_of_list(
    p_q, p_do, p_stats, to_delta, o_stat, o_head, m_row,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr,
    D: tl.constexpr, D_PADDED: tl.constexpr, E: tl.constexpr, E_PADDED: tl.constexpr,
):  # fmt: skip
    """Return the queries, upstream gradients, log-sum-exp and delta for some rows of a block's list of queries."""
    # Rows that do not exist get an infinite log-sum-exp, so they contribute 0. Their queries and gradients are those of
    # an existing row, so these loads need no mask.
    o_width, o_value = tl.arange(0, D_PADDED), tl.arange(0, E_PADDED)
    p_queries = p_q + (o_stat * D)[:, None] + o_width[None, :]
    p_grads = p_do + (o_stat * E)[:, None] + o_value[None, :]
    if HEADS == HEADS_PADDED and D == D_PADDED:
        b_q = tl.load(p_queries)
    else:
        b_q = tl.load(p_queries, mask=(o_head < HEADS)[:, None] & (o_width < D)[None, :], other=0.0)
    if HEADS == HEADS_PADDED and E == E_PADDED:
        b_do = tl.load(p_grads)
    else:
        b_do = tl.load(p_grads, mask=(o_head < HEADS)[:, None] & (o_value < E)[None, :], other=0.0)
    b_lse = tl.load(p_stats + o_stat, mask=m_row, other=float("inf"))
    b_delta = tl.load(p_stats + to_delta + o_stat, mask=m_row, other=0.0)
    return b_q, b_do, b_lse, b_delta


@for_any_length
def selected_backward_keys(
    p_k, s_kb, s_kg, s_kt,
    p_v, s_vb, s_vg, s_vt,
    p_q, p_do, p_dk, p_dv, p_parts, p_stats,
    p_key, p_begin, p_behind, p_segment, p_partial, p_block, p_first,
    groups, tokens, places, blocks, segments, partials, length, batch_groups,
    SCALE: tl.constexpr, EXPONENT: tl.constexpr, EXACT: tl.constexpr,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr,
    D: tl.constexpr, D_PADDED: tl.constexpr, E: tl.constexpr, E_PADDED: tl.constexpr,
    ACC: tl.constexpr, SELECT_LEN: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SIGNED: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a block's keys and values from some of the queries that selected it.

    For a block with several segments of queries, the result is a partial sum. With SIGNED, rows have gates, which may
    be negative (gates.py).
    """
    PIECES: tl.constexpr = (SELECT_LEN + KEYS - 1) // KEYS
    QUERIES: tl.constexpr = ROWS // HEADS_PADDED
    i_piece = tl.program_id(0) % PIECES
    i_segment = tl.program_id(0) // PIECES % segments
    i_bg = (tl.program_id(0) // PIECES // segments).to(tl.int64)
    i_b, i_g = i_bg // groups, i_bg % groups
    i_named = tl.load(p_block + i_bg * segments + i_segment)
    i_block = tl.minimum(i_named, blocks - 1)
    i_table = i_bg * (blocks + 1) + i_block
    # Index of the segment within its block.
    i_cut = i_segment - tl.load(p_segment + i_table)
    begin = tl.load(p_begin + i_table) + i_cut * length
    # A segment that does not exist starts after the last slot of the last block, so it has no steps.
    stop = tl.minimum(begin + length, tl.load(p_begin + i_table + 1))
    first_token, behind_token = _first_of_block(p_first, i_block, tokens, SELECT_LEN)
    o_inside = i_piece * KEYS + tl.arange(0, KEYS)  # [K]
    o_key = first_token + o_inside  # [K]
    # Keys after a short block are written by another program. This tile computes them, too, but does not store them.
    m_key = (i_named < blocks) & (o_inside < SELECT_LEN) & (o_key < behind_token)
    b_k = load_rows(p_k + i_b * s_kb + i_g * s_kg, s_kt, o_key, m_key, D, D_PADDED)  # [K, D]
    b_v = load_rows(p_v + i_b * s_vb + i_g * s_vg, s_vt, o_key, m_key, E, E_PADDED)  # [K, E]
    o_query = tl.arange(0, ROWS) // HEADS_PADDED  # [R]
    o_head = tl.arange(0, ROWS) % HEADS_PADDED  # [R]
    s_token = tl.cast(groups, tl.int64) * HEADS
    first_row = i_b * tokens * s_token + i_g * HEADS
    p_q += first_row * D
    p_do += first_row * E
    p_stats += first_row
    to_delta = tl.cast(batch_groups, tl.int64) * HEADS * tokens
    p_key += i_bg * places
    first_key = (i_block.to(tl.int64) * tokens).to(tl.int32)
    b_dk = tl.zeros([KEYS, D_PADDED], ACC)
    b_dv = tl.zeros([KEYS, E_PADDED], ACC)
    # Queries inside the block come first and need a mask. Queries after the block attend to all of it. The step that
    # contains both kinds uses the mask.
    inside = tl.maximum(tl.minimum(tl.load(p_behind + i_table), stop) - begin, 0)
    apart = begin + (inside + QUERIES - 1) // QUERIES * QUERIES
    o_token = _query_of_place(p_key, begin + o_query, stop, first_key)  # [R]
    # With a third stage, registers of the loop below would spill.
    for start in tl.range(begin, apart, QUERIES, num_stages=2):
        m_row = (start + o_query < stop) & (o_head < HEADS)
        o_stat = o_token * s_token + o_head  # [R]
        b_q, b_do, b_lse, b_delta = _rows_of_list(
            p_q, p_do, p_stats, to_delta, o_stat, o_head, m_row, HEADS, HEADS_PADDED, D, D_PADDED, E, E_PADDED
        )
        m_seen = o_key[:, None] <= o_token[None, :]
        b_dk, b_dv, _ = key_step(b_q, b_k, b_v, b_do, b_lse, b_delta, m_seen, b_dk, b_dv, SIGNED, EXPONENT, EXACT, ACC)
        o_token = _query_of_place(p_key, start + QUERIES + o_query, stop, first_key)
    for start in range(apart, stop, QUERIES):
        m_row = (start + o_query < stop) & (o_head < HEADS)
        o_stat = o_token * s_token + o_head  # [R]
        b_q, b_do, b_lse, b_delta = _rows_of_list(
            p_q, p_do, p_stats, to_delta, o_stat, o_head, m_row, HEADS, HEADS_PADDED, D, D_PADDED, E, E_PADDED
        )
        b_dk, b_dv, _ = key_step(b_q, b_k, b_v, b_do, b_lse, b_delta, None, b_dk, b_dv, SIGNED, EXPONENT, EXACT, ACC)
        o_token = _query_of_place(p_key, start + QUERIES + o_query, stop, first_key)
    b_dk *= SCALE
    # Loading these values again saves two registers in the loop.
    cuts = tl.load(p_segment + i_table + 1) - tl.load(p_segment + i_table)
    i_cut = i_segment - tl.load(p_segment + i_table)
    store_rows(p_dk + i_bg * tokens * D, D, o_key, m_key & (cuts == 1), b_dk, D, D_PADDED)
    store_rows(p_dv + i_bg * tokens * E, E, o_key, m_key & (cuts == 1), b_dv, E, E_PADDED)
    i_part = i_bg * partials + tl.load(p_partial + i_table) + i_cut
    p_part = p_parts + i_part * SELECT_LEN * (D + E)
    store_rows(p_part, D + E, o_inside, m_key & (cuts > 1), b_dk, D, D_PADDED)
    store_rows(p_part + D, D + E, o_inside, m_key & (cuts > 1), b_dv, E, E_PADDED)


@for_any_length
def selected_backward_sum(
    p_dk, p_dv, p_parts, p_segment, p_partial, p_first, tokens, blocks, partials,
    D: tl.constexpr, D_PADDED: tl.constexpr, E: tl.constexpr, E_PADDED: tl.constexpr,
    ACC: tl.constexpr, SELECT_LEN: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Add the partial sums of a block's gradients in a fixed order."""
    PIECES: tl.constexpr = (SELECT_LEN + KEYS - 1) // KEYS
    i_block = tl.program_id(0) // PIECES % blocks
    i_bg = (tl.program_id(0) // PIECES // blocks).to(tl.int64)
    i_table = i_bg * (blocks + 1) + i_block
    cuts = tl.load(p_segment + i_table + 1) - tl.load(p_segment + i_table)
    o_inside = tl.program_id(0) % PIECES * KEYS + tl.arange(0, KEYS)  # [K]
    first_token, behind_token = _first_of_block(p_first, i_block, tokens, SELECT_LEN)
    o_key = first_token + o_inside  # [K]
    m_key = (cuts > 1) & (o_inside < SELECT_LEN) & (o_key < behind_token)
    p_part = p_parts + (i_bg * partials + tl.load(p_partial + i_table)) * SELECT_LEN * (D + E)
    b_dk = tl.zeros([KEYS, D_PADDED], ACC)
    b_dv = tl.zeros([KEYS, E_PADDED], ACC)
    for i in range(tl.where(cuts > 1, cuts, 0)):
        b_dk += load_rows(p_part, D + E, i * SELECT_LEN + o_inside, m_key, D, D_PADDED)
        b_dv += load_rows(p_part + D, D + E, i * SELECT_LEN + o_inside, m_key, E, E_PADDED)
    store_rows(p_dk + i_bg * tokens * D, D, o_key, m_key, b_dk, D, D_PADDED)
    store_rows(p_dv + i_bg * tokens * E, E, o_key, m_key, b_dv, E, E_PADDED)
