"""The selected branch as Triton kernels: each query sees the tokens of its blocks up to itself (paper, eq. 11 and 12).

Forward and gradient of the queries: a program holds a tile of neighbouring queries with all heads of their group and
walks the union of their blocks; a bit per query says who chose the block. Gradients of keys and values: a program
holds keys of a block and walks the queries that chose it, by an inverted list; a block that many chose is shared out
to several programs, whose parts are added in order. No atomics: the same input gives the same bits.

Dimensions: B batch, H query heads, G groups, T tokens, D key width, E value width, n places; inside a kernel R rows
(queries x heads of a group) and K keys of a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import NAMESPACE
from . import lists, tuning
from .device import (
    as_exponent,
    forward_step,
    key_step,
    load_heads,
    load_rows,
    log_sum,
    query_step,
    store_heads,
    store_rows,
)
from .launch import (
    NARROWEST,
    CannotLaunchError,
    Tile,
    accumulated,
    accumulator,
    check_attention,
    constants,
    launch,
    like_tokens,
    outputs,
    padded,
    strided,
)

# A block may be chosen this many times as often as the average one before it is shared out. With 4 the parts take
# about as much room as the gradients of keys and values.
FAIR_SHARE = 4


def selected(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTE: Tensor,
    indices_BGTn: Tensor,
    *,
    select_len: int,
    scale: float,
    starts: Tensor | None = None,
    tile: Tile | None = None,
    segment: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [B, H, T, E], each token's heads side by side in memory, and log-sum-exp [B, H, T] without gradient.

    A row that sees nothing gives 0 and minus infinity. With `starts` (cu_seqlens) the row is several sequences, and
    indices count from the start of the query's own. `tile` is for all kernels, None for the tuned ones; `segment` is
    the most places of a block that one program of the backward pass takes. Raises CannotLaunchError for tensors that
    the kernels cannot take.
    """
    _check(q_BHTD, k_BGTD, v_BGTE, indices_BGTn, starts)
    sizes = [] if tile is None else [tile.rows, tile.keys, tile.warps, tile.stages]
    length = segment or FAIR_SHARE * select_len * max(1, indices_BGTn.shape[3])
    return _selected(q_BHTD, k_BGTD, v_BGTE, indices_BGTn, starts, select_len, scale, sizes, length)


@torch.library.custom_op(f"{NAMESPACE}::selected_fused", mutates_args=())
def _selected(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTE: Tensor,
    indices_BGTn: Tensor,
    starts: Tensor | None,
    select_len: int,
    scale: float,
    tile: list[int],
    _segment: int,
) -> tuple[Tensor, Tensor]:
    o_BHTE, lse_BHT = outputs(q_BHTD, v_BGTE)
    if not o_BHTE.numel() or not indices_BGTn.numel():
        return o_BHTE.zero_(), lse_BHT.fill_(-torch.inf)
    of_query = lists.query_blocks(indices_BGTn, select_len=select_len, starts=starts)
    sizes = constants(q_BHTD, k_BGTD, v_BGTE, scale) | {"SELECT_LEN": select_len}
    del sizes["SCALE"]

    def run(tile: Tile) -> None:
        tiled = _tiled(tile, sizes)
        union = lists.unions(of_query, tiled["ROWS"] // sizes["HEADS_PADDED"])
        launch(
            selected_forward,
            union.count_Nx.numel(),
            *strided(q_BHTD),
            *strided(k_BGTD),
            *strided(v_BGTE),
            *strided(o_BHTE),
            lse_BHT,
            *_walk(union, k_BGTD),
            **tiled,
            **sizes,
        )

    _run_best(run, tile, selected_forward, _forward_tiles, (q_BHTD, k_BGTD, v_BGTE), _pattern(select_len, indices_BGTn))
    return o_BHTE, lse_BHT


@torch.library.custom_op(f"{NAMESPACE}::selected_fused_backward", mutates_args=())
def _selected_backward(
    grad_BHTE: Tensor,
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTE: Tensor,
    indices_BGTn: Tensor,
    starts: Tensor | None,
    o_BHTE: Tensor,
    lse_BHT: Tensor,
    select_len: int,
    scale: float,
    tile: list[int],
    segment: int,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = _gradients(q_BHTD, k_BGTD, v_BGTE)
    if not o_BHTE.numel() or not indices_BGTn.numel():
        return dq.zero_(), dk.zero_(), dv.zero_()
    of_query = lists.query_blocks(indices_BGTn, select_len=select_len, starts=starts)
    sizes = constants(q_BHTD, k_BGTD, v_BGTE, scale) | {"SELECT_LEN": select_len}
    tensors = [argument for tensor in (q_BHTD, k_BGTD, v_BGTE, grad_BHTE) for argument in strided(tensor)]
    delta_BHT = torch.empty_like(lse_BHT)

    def run_queries(tile: Tile) -> None:
        tiled = _tiled(tile, sizes)
        union = lists.unions(of_query, tiled["ROWS"] // sizes["HEADS_PADDED"])
        launch(
            selected_backward_queries,
            union.count_Nx.numel(),
            *(*tensors, *strided(o_BHTE), *strided(dq), lse_BHT, delta_BHT),
            *_walk(union, k_BGTD),
            **tiled,
            **sizes,
        )

    pattern = _pattern(select_len, indices_BGTn)
    _run_best(run_queries, tile, selected_backward_queries, _backward_query_tiles, (q_BHTD, k_BGTD, v_BGTE), pattern)
    cut = lists.segments(of_query, segment)
    room = (*cut.block_Ns.shape[:1], cut.partials, select_len, dk.shape[3] + dv.shape[3])
    parts = dk.new_empty(room, dtype=accumulated(dk.dtype))
    table = (cut.query_NL, cut.block_Ns, cut.begin_Nb, cut.segment_Nb, cut.partial_Nb, of_query.first_b)

    def run_keys(tile: Tile) -> None:
        tiled = _tiled(tile, sizes)
        launch(
            selected_backward_keys,
            cut.block_Ns.numel() * triton.cdiv(select_len, tiled["KEYS"]),
            *(*tensors, dk, dv, parts, lse_BHT, delta_BHT, *table),
            *(*k_BGTD.shape[1:3], cut.query_NL.shape[1], of_query.blocks, cut.block_Ns.shape[1], cut.partials, segment),
            **tiled,
            **sizes,
        )

    _run_best(run_keys, tile, selected_backward_keys, _backward_key_tiles, (q_BHTD, k_BGTD, v_BGTE), pattern)
    if cut.partials:
        _add_parts(parts, dk, dv, cut, of_query)
    return dq, dk, dv


@_selected.register_fake
def _(q_BHTD: Tensor, _k: Tensor, v_BGTE: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return outputs(q_BHTD, v_BGTE)


@_selected_backward.register_fake
def _(_grad: Tensor, *tensors: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients(*tensors[:3])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, select_len, scale, tile, segment = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.numbers = (select_len, scale, tile, segment)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_BHTE: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    none = (None,) * 6
    if grad_BHTE is None:
        return None, None, None, *none
    return *_selected_backward(grad_BHTE, *ctx.saved_tensors, *ctx.numbers), *none


_selected.register_autograd(_differentiate, setup_context=_keep)


@triton.jit
def _keys_of_step(
    i, i_list, p_first, p_members, o_query, o_token, tokens, places, SELECT_LEN: tl.constexpr, KEYS: tl.constexpr
):
    """The keys of one step of a walk, a piece of a block; which of them exist; and which of them each row sees."""
    PIECES: tl.constexpr = (SELECT_LEN + KEYS - 1) // KEYS
    i_place = i_list * places + i // PIECES
    o_inside = i % PIECES * KEYS + tl.arange(0, KEYS)  # [K]
    o_key = tl.load(p_first + i_place) + o_inside  # [K]
    m_key = (o_inside < SELECT_LEN) & (o_key < tokens)
    m_selected = ((tl.load(p_members + i_place) >> o_query) & 1) != 0  # [R]
    # What lies behind a short last block belongs to a later sequence, and is later than every query of this one.
    return o_key, m_key, m_selected[:, None] & m_key[None, :] & (o_key[None, :] <= o_token[:, None])  # [R, K]


@triton.jit
def selected_forward(
    p_q, s_qb, s_qh, s_qt,
    p_k, s_kb, s_kg, s_kt,
    p_v, s_vb, s_vg, s_vt,
    p_o, s_ob, s_oh, s_ot,
    p_lse, p_first, p_members, p_count,
    groups, tokens, places, tiles,
    EXPONENT: tl.constexpr, EXACT: tl.constexpr,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr,
    D: tl.constexpr, D_PADDED: tl.constexpr, E: tl.constexpr, E_PADDED: tl.constexpr,
    ACC: tl.constexpr, SELECT_LEN: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    # One group's tiles follow each other: its keys and values stay in the cache.
    i_list, i_bg = tl.program_id(0).to(tl.int64), tl.program_id(0).to(tl.int64) // tiles
    i_b, i_g = i_bg // groups, i_bg % groups
    o_query = tl.arange(0, ROWS) // HEADS_PADDED  # [R]
    o_token = i_list % tiles * (ROWS // HEADS_PADDED) + o_query  # [R]
    o_head = tl.arange(0, ROWS) % HEADS_PADDED  # [R]
    m_row = (o_head < HEADS) & (o_token < tokens)
    o_head = i_g * HEADS + o_head
    b_q = load_heads(p_q, i_b * s_qb + o_head * s_qh + o_token * s_qt, m_row, D, D_PADDED)  # [R, D]
    p_keys, p_values = p_k + i_b * s_kb + i_g * s_kg, p_v + i_b * s_vb + i_g * s_vg
    b_highest = tl.full([ROWS], float("-inf"), ACC)
    b_total = tl.zeros([ROWS], ACC)
    b_o = tl.zeros([ROWS, E_PADDED], ACC)
    for i in range(tl.load(p_count + i_list) * ((SELECT_LEN + KEYS - 1) // KEYS)):
        o_key, m_key, m_seen = _keys_of_step(
            i, i_list, p_first, p_members, o_query, o_token, tokens, places, SELECT_LEN, KEYS
        )
        b_k = load_rows(p_keys, s_kt, o_key, m_key, D, D_PADDED)  # [K, D]
        b_v = load_rows(p_values, s_vt, o_key, m_key, E, E_PADDED)  # [K, E]
        b_highest, b_total, b_o = forward_step(b_q, b_k, b_v, m_seen, b_highest, b_total, b_o, EXPONENT, EXACT, ACC)
    b_o = b_o / tl.where(b_total == 0.0, 1.0, b_total)[:, None]
    store_heads(p_o, i_b * s_ob + o_head * s_oh + o_token * s_ot, m_row, b_o, E, E_PADDED)
    tl.store(p_lse + (i_b * groups * HEADS + o_head) * tokens + o_token, log_sum(b_highest, b_total, EXACT), mask=m_row)


@triton.jit
def selected_backward_queries(
    p_q, s_qb, s_qh, s_qt,
    p_k, s_kb, s_kg, s_kt,
    p_v, s_vb, s_vg, s_vt,
    p_do, s_dob, s_doh, s_dot,
    p_o, s_ob, s_oh, s_ot,
    p_dq, s_dqb, s_dqh, s_dqt,
    p_lse, p_delta, p_first, p_members, p_count,
    groups, tokens, places, tiles,
    SCALE: tl.constexpr, EXPONENT: tl.constexpr, EXACT: tl.constexpr,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr,
    D: tl.constexpr, D_PADDED: tl.constexpr, E: tl.constexpr, E_PADDED: tl.constexpr,
    ACC: tl.constexpr, SELECT_LEN: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The same walk: gradient of the queries, and delta = sum(o * do), which the other kernel needs as well."""
    i_list, i_bg = tl.program_id(0).to(tl.int64), tl.program_id(0).to(tl.int64) // tiles
    i_b, i_g = i_bg // groups, i_bg % groups
    o_query = tl.arange(0, ROWS) // HEADS_PADDED  # [R]
    o_token = i_list % tiles * (ROWS // HEADS_PADDED) + o_query  # [R]
    o_head = tl.arange(0, ROWS) % HEADS_PADDED  # [R]
    m_row = (o_head < HEADS) & (o_token < tokens)
    o_head = i_g * HEADS + o_head
    b_q = load_heads(p_q, i_b * s_qb + o_head * s_qh + o_token * s_qt, m_row, D, D_PADDED)  # [R, D]
    b_do = load_heads(p_do, i_b * s_dob + o_head * s_doh + o_token * s_dot, m_row, E, E_PADDED)  # [R, E]
    b_o = load_heads(p_o, i_b * s_ob + o_head * s_oh + o_token * s_ot, m_row, E, E_PADDED)  # [R, E]
    o_stat = (i_b * groups * HEADS + o_head) * tokens + o_token
    # All of E at once: a kernel that split the values would subtract delta once for each part.
    b_delta = tl.sum(b_o.to(ACC) * b_do.to(ACC), 1)  # [R]
    tl.store(p_delta + o_stat, b_delta, mask=m_row)
    b_lse = as_exponent(tl.load(p_lse + o_stat, mask=m_row, other=0.0), EXACT)
    p_keys, p_values = p_k + i_b * s_kb + i_g * s_kg, p_v + i_b * s_vb + i_g * s_vg
    b_dq = tl.zeros([ROWS, D_PADDED], ACC)
    for i in range(tl.load(p_count + i_list) * ((SELECT_LEN + KEYS - 1) // KEYS)):
        o_key, m_key, m_seen = _keys_of_step(
            i, i_list, p_first, p_members, o_query, o_token, tokens, places, SELECT_LEN, KEYS
        )
        b_k = load_rows(p_keys, s_kt, o_key, m_key, D, D_PADDED)  # [K, D]
        b_v = load_rows(p_values, s_vt, o_key, m_key, E, E_PADDED)  # [K, E]
        b_dq += query_step(b_q, b_k, b_v, b_do, b_lse, b_delta, m_seen, SCALE, EXPONENT, EXACT, ACC)
    store_heads(p_dq, i_b * s_dqb + o_head * s_dqh + o_token * s_dqt, m_row, b_dq, D, D_PADDED)


@triton.jit
def selected_backward_keys(
    p_q, s_qb, s_qh, s_qt,
    p_k, s_kb, s_kg, s_kt,
    p_v, s_vb, s_vg, s_vt,
    p_do, s_dob, s_doh, s_dot,
    p_dk, p_dv, p_parts, p_lse, p_delta, p_query, p_block, p_begin, p_segment, p_partial, p_first,
    groups, tokens, places, blocks, segments, partials, length,
    SCALE: tl.constexpr, EXPONENT: tl.constexpr, EXACT: tl.constexpr,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr,
    D: tl.constexpr, D_PADDED: tl.constexpr, E: tl.constexpr, E_PADDED: tl.constexpr,
    ACC: tl.constexpr, SELECT_LEN: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Gradients of keys of a block and their values, from a segment of the queries that chose it, or a part of them."""
    PIECES: tl.constexpr = (SELECT_LEN + KEYS - 1) // KEYS
    i_piece = tl.program_id(0) % PIECES
    i_segment = tl.program_id(0) // PIECES % segments
    i_bg = (tl.program_id(0) // PIECES // segments).to(tl.int64)
    i_b, i_g = i_bg // groups, i_bg % groups
    i_named = tl.load(p_block + i_bg * segments + i_segment)
    i_block = tl.minimum(i_named, blocks - 1)
    i_table = i_bg * (blocks + 1) + i_block
    i_cut = i_segment - tl.load(p_segment + i_table)  # the number of the segment among those of its block
    cuts = tl.load(p_segment + i_table + 1) - tl.load(p_segment + i_table)
    begin = tl.load(p_begin + i_table) + i_cut.to(tl.int64) * length
    # A segment that does not exist begins behind the last place of the last block: no step.
    stop = tl.minimum(begin + length, tl.load(p_begin + i_table + 1))
    o_inside = i_piece * KEYS + tl.arange(0, KEYS)  # [K]
    o_key = tl.load(p_first + i_block) + o_inside  # [K]
    # What lies behind a short block is another program's to write.
    m_key = (i_named < blocks) & (o_inside < SELECT_LEN) & (o_key < tl.load(p_first + i_block + 1))
    b_k = load_rows(p_k + i_b * s_kb + i_g * s_kg, s_kt, o_key, m_key, D, D_PADDED)  # [K, D]
    b_v = load_rows(p_v + i_b * s_vb + i_g * s_vg, s_vt, o_key, m_key, E, E_PADDED)  # [K, E]
    o_row = tl.arange(0, ROWS)
    o_head = i_g * HEADS + o_row % HEADS_PADDED  # [R]
    m_head = o_row % HEADS_PADDED < HEADS
    b_dk = tl.zeros([KEYS, D_PADDED], ACC)
    b_dv = tl.zeros([KEYS, E_PADDED], ACC)
    for start in range(begin, stop, ROWS // HEADS_PADDED):
        o_place = start + o_row // HEADS_PADDED  # [R]
        o_token = tl.load(p_query + i_bg * places + o_place, mask=o_place < stop, other=-1).to(tl.int64)  # [R]
        m_row = m_head & (o_token >= 0)
        b_q = load_heads(p_q, i_b * s_qb + o_head * s_qh + o_token * s_qt, m_row, D, D_PADDED)  # [R, D]
        b_do = load_heads(p_do, i_b * s_dob + o_head * s_doh + o_token * s_dot, m_row, E, E_PADDED)  # [R, E]
        o_stat = (i_b * groups * HEADS + o_head) * tokens + o_token
        # A query of the list sees the first key of the block: its log-sum-exp is finite.
        b_lse = as_exponent(tl.load(p_lse + o_stat, mask=m_row, other=0.0), EXACT)
        b_delta = tl.load(p_delta + o_stat, mask=m_row, other=0.0)
        m_seen = m_key[:, None] & m_row[None, :] & (o_key[:, None] <= o_token[None, :])
        b_dk, b_dv = key_step(b_q, b_k, b_v, b_do, b_lse, b_delta, m_seen, b_dk, b_dv, SCALE, EXPONENT, EXACT, ACC)
    store_rows(p_dk + i_bg * tokens * D, D, o_key, m_key & (cuts == 1), b_dk, D, D_PADDED)
    store_rows(p_dv + i_bg * tokens * E, E, o_key, m_key & (cuts == 1), b_dv, E, E_PADDED)
    i_part = i_bg * partials + tl.load(p_partial + i_table) + i_cut
    p_part = p_parts + i_part * SELECT_LEN * (D + E)
    store_rows(p_part, D + E, o_inside, m_key & (cuts > 1), b_dk, D, D_PADDED)
    store_rows(p_part + D, D + E, o_inside, m_key & (cuts > 1), b_dv, E, E_PADDED)


@triton.jit
def selected_backward_sum(
    p_dk, p_dv, p_parts, p_segment, p_partial, p_first, tokens, blocks, partials,
    D: tl.constexpr, D_PADDED: tl.constexpr, E: tl.constexpr, E_PADDED: tl.constexpr,
    ACC: tl.constexpr, SELECT_LEN: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The parts of a block's gradients, added in order, for keys of a block that has several."""
    PIECES: tl.constexpr = (SELECT_LEN + KEYS - 1) // KEYS
    i_block = tl.program_id(0) // PIECES % blocks
    i_bg = (tl.program_id(0) // PIECES // blocks).to(tl.int64)
    i_table = i_bg * (blocks + 1) + i_block
    cuts = tl.load(p_segment + i_table + 1) - tl.load(p_segment + i_table)
    o_inside = tl.program_id(0) % PIECES * KEYS + tl.arange(0, KEYS)  # [K]
    o_key = tl.load(p_first + i_block) + o_inside  # [K]
    m_key = (cuts > 1) & (o_inside < SELECT_LEN) & (o_key < tl.load(p_first + i_block + 1))
    p_part = p_parts + (i_bg * partials + tl.load(p_partial + i_table)) * SELECT_LEN * (D + E)
    b_dk = tl.zeros([KEYS, D_PADDED], ACC)
    b_dv = tl.zeros([KEYS, E_PADDED], ACC)
    for i in range(tl.where(cuts > 1, cuts, 0)):
        b_dk += load_rows(p_part, D + E, i * SELECT_LEN + o_inside, m_key, D, D_PADDED)
        b_dv += load_rows(p_part + D, D + E, i * SELECT_LEN + o_inside, m_key, E, E_PADDED)
    store_rows(p_dk + i_bg * tokens * D, D, o_key, m_key, b_dk, D, D_PADDED)
    store_rows(p_dv + i_bg * tokens * E, E, o_key, m_key, b_dv, E, E_PADDED)


def _add_parts(parts: Tensor, dk: Tensor, dv: Tensor, cut: lists.Segments, of_query: lists.QueryBlocks) -> None:
    select_len, width, value_width = parts.shape[2], dk.shape[3], dv.shape[3]
    keys = min(NARROWEST, padded(select_len))
    launch(
        selected_backward_sum,
        parts.shape[0] * of_query.blocks * triton.cdiv(select_len, keys),
        *(dk, dv, parts, cut.segment_Nb, cut.partial_Nb, of_query.first_b),
        *(dk.shape[2], of_query.blocks, cut.partials),
        D=width,
        D_PADDED=padded(width),
        E=value_width,
        E_PADDED=padded(value_width),
        ACC=accumulator(dk.dtype),
        SELECT_LEN=select_len,
        KEYS=keys,
    )


def _run_best(
    run: Callable[[Tile], None],
    tile: list[int],
    kernel: Any,
    candidates: Callable[[tuning.Situation], list[Tile]],
    tensors: tuple[Tensor, Tensor, Tensor],
    pattern: str,
) -> None:
    if tile:
        rows, keys, warps, stages = tile
        run(Tile(rows=rows, keys=keys, warps=warps, stages=stages))
    else:
        tuning.run_best(run, tuning.Situation.of(kernel.__name__, *tensors, pattern), candidates)


def _pattern(select_len: int, indices_BGTn: Tensor) -> str:
    return f"selected l'={select_len} n={indices_BGTn.shape[3]}"


def _forward_tiles(situation: tuning.Situation) -> list[Tile]:
    """Few rows waste least where neighbours choose different blocks, many rows where they choose the same."""
    sizes = (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (32, 64, 4, 2), (16, 64, 2, 2), (16, 64, 4, 3)
    return situation.tiles(*sizes, (32, 32, 4, 1))


def _backward_query_tiles(situation: tuning.Situation) -> list[Tile]:
    sizes = (64, 64, 4, 2), (64, 64, 8, 2), (128, 64, 8, 2), (32, 64, 4, 2), (16, 64, 4, 2)
    return situation.tiles(*sizes, (32, 32, 4, 1))


def _backward_key_tiles(situation: tuning.Situation) -> list[Tile]:
    """Two accumulators stay on the chip: with four warps and 64 x 64 they spill at a width of 128."""
    sizes = (64, 64, 8, 2), (32, 64, 4, 2), (16, 64, 4, 2), (64, 64, 8, 1), (128, 64, 8, 1)
    return situation.tiles(*sizes, (32, 32, 4, 1))


def _tiled(tile: Tile, sizes: dict[str, Any]) -> dict[str, int]:
    """What a tile comes to for a launch: at most one query for each bit, and no more keys than a block has."""
    heads = sizes["HEADS_PADDED"]
    rows = min(padded(tile.rows, max(NARROWEST, heads)), lists.MOST_QUERIES * heads)
    keys = min(padded(tile.keys), padded(sizes["SELECT_LEN"]))
    return {"ROWS": rows, "KEYS": keys, "warps": tile.warps, "stages": tile.stages}


def _walk(union: lists.Unions, k_BGTD: Tensor) -> tuple[Any, ...]:
    """A union as arguments, with the numbers that say where each tile's part of it lies."""
    groups, tokens = k_BGTD.shape[1:3]
    tiles, places = union.first_NxU.shape[1:]
    return union.first_NxU, union.members_NxU, union.count_Nx, groups, tokens, places, tiles


def _gradients(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dq_BHTD = like_tokens(q_BHTD, q_BHTD.shape[3])
    return dq_BHTD, k_BGTD.new_empty(k_BGTD.shape), v_BGTE.new_empty(v_BGTE.shape)


def _check(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTE: Tensor, indices_BGTn: Tensor, starts: Tensor | None) -> None:
    (batch, _, tokens, width), groups = q_BHTD.shape, k_BGTD.shape[1]
    if k_BGTD.shape != (batch, groups, tokens, width) or v_BGTE.shape[:3] != k_BGTD.shape[:3]:
        raise CannotLaunchError(
            f"queries {list(q_BHTD.shape)}, keys {list(k_BGTD.shape)} and values {list(v_BGTE.shape)} do not belong "
            "together: keys are [B, G, T, D] and values [B, G, T, E]"
        )
    check_attention(selected_forward, q_BHTD, k_BGTD, v_BGTE)
    if indices_BGTn.shape[:3] != k_BGTD.shape[:3]:
        raise CannotLaunchError(f"indices are {list(indices_BGTn.shape)}: keys {list(k_BGTD.shape)} want [B, G, T, n]")
    if starts is not None and batch != 1:
        raise CannotLaunchError(f"`starts` with a batch of {batch}: put all sequences into one row")
