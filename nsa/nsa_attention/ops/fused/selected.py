"""The selected branch as Triton kernels (NSA paper, eq. 11 and 12).

Each query attends to the tokens of its selected blocks up to itself.

For the forward pass and the gradient of the queries, a program holds a tile of neighbouring queries with all heads of
their group, and loops over the union of their blocks; a bit per query shows whether the query selected the block. For
the gradients of keys and values, a program holds keys of a block and loops over the queries that selected it. A block
that many queries selected is split over several programs, whose partial sums are added in a fixed order. There are no
atomics, so the same input gives the same bits.

Each loop has two parts. For blocks that end before the tile of queries starts, a query attends to all keys of the block
or none, and no mask per key is needed. Only the few blocks that overlap the tile need one. The address of the next load
is read one step ahead, because otherwise the loop would wait for the address and then for the load.

Dimensions: B batch, H query heads, G groups, N batch x groups, T tokens, D key width, E value width, n selected blocks
per query, x tiles, W columns of a union, s segments. Inside a kernel: R rows (queries x heads of a group), K keys of a
tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import NAMESPACE
from . import lists, tuning
from .device import load_heads, load_rows, log_sum, store_heads, store_rows
from .gates import GatedBranch, empty_gradients, gate_arguments, query_gradient_buffer, row_statistics, tuning_name
from .launch import (
    MIN_DOT_WIDTH,
    CannotLaunchError,
    Tile,
    accumulator_dtype,
    check_attention,
    empty_outputs,
    empty_token_major,
    for_any_length,
    kernel_constants,
    launch,
    next_power_of_two,
    triton_accumulator_dtype,
    with_strides,
)
from .lists import UNION_TAIL
from .steps import forward_step, key_step, load_existing_rows, query_step

# A block that is selected this many times as often as the average block is split over several programs. With 4, the
# partial sums take about as much memory as the gradients of keys and values.
FAIR_SHARE = 4
# Rows of a tile of queries. The forward pass and the gradient of the queries share the unions, so they share this
# number. Few rows are better if neighbouring queries select different blocks, many rows if they select the same; with
# fewer than 64, tensor cores are partly idle. float32 and float64 products (ROWS_EXACT) do not use tensor cores.
ROWS, ROWS_EXACT = 64, 32


def fused_selected_attention(
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
    """Return the output [B, H, T, E] and log-sum-exp [B, H, T] of attention to the selected blocks.

    In the output the heads of a token are adjacent in memory. A query without visible keys gets 0 and -inf. `starts`
    (cu_seqlens) packs several sequences into one row; indices then count from the start of each query's own sequence.
    `tile` overrides the tuned tiles of all kernels. `segment` is the maximum number of queries that one program of the
    backward pass processes for a block. Raises CannotLaunchError for tensors that the kernels do not support.
    """
    _check(q_BHTD, k_BGTD, v_BGTE, indices_BGTn, starts)
    sizes = [] if tile is None else [tile.rows, tile.keys, tile.warps, tile.stages]
    length = segment or segment_length(select_len, indices_BGTn)
    union_NxW = _unions(indices_BGTn, starts, select_len, tile_queries(q_BHTD, k_BGTD, tile))
    return _selected_attention_op(
        q_BHTD, k_BGTD, v_BGTE, indices_BGTn, starts, union_NxW, select_len, scale, sizes, length
    )


def segment_length(select_len: int, indices_BGTn: Tensor) -> int:
    """Return the default number of a block's queries that one program of the backward pass processes."""
    return FAIR_SHARE * select_len * max(1, indices_BGTn.shape[3])


def tile_queries(q_BHTD: Tensor, k_BGTD: Tensor, tile: Tile | None = None) -> int:
    """Return the number of neighbouring queries per tile, from 1 to 32."""
    heads = next_power_of_two(q_BHTD.shape[1] // k_BGTD.shape[1], least=1)
    exact = q_BHTD.dtype not in (torch.float16, torch.bfloat16)
    rows = tile.rows if tile is not None else ROWS_EXACT if exact else ROWS
    return min(lists.MAX_TILE_QUERIES, max(1, next_power_of_two(rows) // heads))


@torch.library.custom_op(f"{NAMESPACE}::selected_unions", mutates_args=())
def _unions(indices_BGTn: Tensor, starts: Tensor | None, select_len: int, queries: int) -> Tensor:
    return lists.unions(indices_BGTn, select_len=select_len, queries=queries, starts=starts)


@_unions.register_fake
def _(indices_BGTn: Tensor, _starts: Tensor | None, _select_len: int, queries: int) -> Tensor:
    return indices_BGTn.new_empty(lists.union_shape(indices_BGTn, queries), dtype=torch.int32)


@torch.library.custom_op(f"{NAMESPACE}::selected_fused", mutates_args=())
def _selected_attention_op(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTE: Tensor,
    indices_BGTn: Tensor,
    _starts: Tensor | None,
    union_NxW: Tensor,
    select_len: int,
    scale: float,
    tile: list[int],
    _segment: int,
) -> tuple[Tensor, Tensor]:
    if not q_BHTD.numel() or not indices_BGTn.numel():
        o_BHTE, lse_BHT = empty_outputs(q_BHTD, v_BGTE)
        return o_BHTE.zero_(), lse_BHT.fill_(-torch.inf)
    return selected_output(q_BHTD, k_BGTD, v_BGTE, indices_BGTn, union_NxW, select_len, scale, tile)


def selected_output(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTE: Tensor,
    indices_BGTn: Tensor,
    union_NxW: Tensor,
    select_len: int,
    scale: float,
    tile: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, T, E] and log-sum-exp [B, H, T] of attention to the selected blocks. Not
    differentiable.
    """
    o_BHTE, lse_BHT = empty_outputs(q_BHTD, v_BGTE)
    sizes = kernel_constants(q_BHTD, k_BGTD, v_BGTE, scale) | {"SELECT_LEN": select_len}
    del sizes["SCALE"]

    def run(tile: Tile) -> None:
        launch(
            selected_forward,
            union_NxW.shape[0] * union_NxW.shape[1],
            *with_strides(q_BHTD),
            *with_strides(k_BGTD),
            *with_strides(v_BGTE),
            *with_strides(o_BHTE),
            lse_BHT,
            *_union_arguments(union_NxW, k_BGTD),
            **_tile_constants(tile, sizes, _queries_per_tile(union_NxW, indices_BGTn)),
            **sizes,
        )

    tuning_key = _tuning_key("selected_forward", q_BHTD, k_BGTD, v_BGTE, select_len, indices_BGTn)
    _run_with_tile(run, tile, tuning_key, _forward_tiles)
    return o_BHTE, lse_BHT


@torch.library.custom_op(f"{NAMESPACE}::selected_fused_backward", mutates_args=())
def _selected_attention_backward_op(
    grad_BHTE: Tensor,
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTE: Tensor,
    indices_BGTn: Tensor,
    starts: Tensor | None,
    union_NxW: Tensor,
    o_BHTE: Tensor,
    lse_BHT: Tensor,
    select_len: int,
    scale: float,
    tile: list[int],
    segment: int,
) -> tuple[Tensor, Tensor, Tensor]:
    if not q_BHTD.numel() or not indices_BGTn.numel():
        dq, dk, dv = _empty_gradients(q_BHTD, k_BGTD, v_BGTE)
        return dq.zero_(), dk.zero_(), dv.zero_()
    tensors = (q_BHTD, k_BGTD, v_BGTE, indices_BGTn, starts, union_NxW, o_BHTE, lse_BHT)
    return selected_gradients(grad_BHTE, *tensors, select_len, scale, segment, tile)


def selected_gradients(
    grad_BHTE: Tensor,
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTE: Tensor,
    indices_BGTn: Tensor,
    starts: Tensor | None,
    union_NxW: Tensor,
    o_BHTE: Tensor,
    lse_BHT: Tensor,
    select_len: int,
    scale: float,
    segment: int,
    tile: Sequence[int] = (),
    *,
    gated_branch: GatedBranch | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values for attention to the selected blocks.

    With `gated_branch`, `grad_BHTE` is the gradient of the gated sum of all branches, and the gradient of the gate is
    written as well.
    """
    dq, adds_to_dq = query_gradient_buffer(q_BHTD, gated_branch)
    sizes = kernel_constants(q_BHTD, k_BGTD, v_BGTE, scale) | {"SELECT_LEN": select_len}
    keys_values = (*with_strides(k_BGTD), *with_strides(v_BGTE))
    # With the heads of a token adjacent in memory, each gather of a query (also of its log-sum-exp and delta) is one
    # contiguous load.
    q_BTHD, grad_BTHE = (tensor.transpose(1, 2).contiguous() for tensor in (q_BHTD, grad_BHTE))
    stats_2BTH = lse_BHT.new_empty((2, *q_BTHD.shape[:3]))
    batch_groups = k_BGTD.shape[0] * k_BGTD.shape[1]

    def run_queries(tile: Tile, dq: Tensor = dq) -> None:
        launch(
            selected_backward_queries,
            union_NxW.shape[0] * union_NxW.shape[1],
            *(*keys_values, *with_strides(o_BHTE), *gate_arguments(gated_branch)),
            *(q_BTHD, grad_BTHE, dq.transpose(1, 2), gated_branch and gated_branch.dgates_cBHT, lse_BHT, stats_2BTH),
            *_union_arguments(union_NxW, k_BGTD),
            *(batch_groups, gated_branch.number if gated_branch else 0),
            ADDS=adds_to_dq,
            **_tile_constants(tile, sizes, _queries_per_tile(union_NxW, indices_BGTn)),
            **sizes,
        )

    tuning_key = _tuning_key("selected_backward_queries", q_BHTD, k_BGTD, v_BGTE, select_len, indices_BGTn)
    queries_tuning_key = replace(tuning_key, kernel=tuning_name(tuning_key.kernel, gated_branch))
    _run_with_tile(
        run_queries,
        tile,
        queries_tuning_key,
        _backward_query_tiles,
        lambda tile: run_queries(tile, torch.empty_like(dq)),
    )
    if gated_branch is not None and not gated_branch.needs_key_grads:
        return dq, *empty_gradients(k_BGTD, v_BGTE)
    dk, dv = k_BGTD.new_empty(k_BGTD.shape), v_BGTE.new_empty(v_BGTE.shape)
    segments = lists.segments(indices_BGTn, select_len=select_len, starts=starts, length=segment)
    parts_shape = (segments.block_Ns.shape[0], segments.partials, select_len, dk.shape[3] + dv.shape[3])
    parts = dk.new_empty(parts_shape, dtype=accumulator_dtype(dk.dtype))

    def run_keys(tile: Tile) -> None:
        tile_constants = _tile_constants(tile, sizes)
        launch(
            selected_backward_keys,
            segments.block_Ns.numel() * triton.cdiv(select_len, tile_constants["KEYS"]),
            *(*keys_values, q_BTHD, grad_BTHE, dk, dv, parts, stats_2BTH),
            *(segments.key_NL, *segments.table_4Nb, segments.block_Ns, segments.first_b),
            *(
                *k_BGTD.shape[1:3],
                segments.key_NL.shape[1],
                segments.blocks,
                segments.block_Ns.shape[1],
                segments.partials,
                segment,
            ),
            batch_groups,
            SIGNED=gated_branch is not None,
            **tile_constants,
            **sizes,
        )

    keys_tuning_key = replace(tuning_key, kernel=tuning_name("selected_backward_keys", gated_branch))
    _run_with_tile(run_keys, tile, keys_tuning_key, _backward_key_tiles)
    _add_parts(parts, dk, dv, segments)
    return dq, dk, dv


@_selected_attention_op.register_fake
def _(q_BHTD: Tensor, _k: Tensor, v_BGTE: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_outputs(q_BHTD, v_BGTE)


@_selected_attention_backward_op.register_fake
def _(_grad: Tensor, *tensors: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_gradients(*tensors[:3])


def _save_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, select_len, scale, tile, segment = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.numbers = (select_len, scale, tile, segment)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_BHTE: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    none = (None,) * 7
    if grad_BHTE is None:
        return None, None, None, *none
    return *_selected_attention_backward_op(grad_BHTE, *ctx.saved_tensors, *ctx.numbers), *none


_selected_attention_op.register_autograd(_backward, setup_context=_save_context)


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
    ACC: tl.constexpr, SELECT_LEN: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute the output and log-sum-exp of one tile of queries, for all heads of a group."""
    PIECES: tl.constexpr = (SELECT_LEN + KEYS - 1) // KEYS
    # Tiles of one group are adjacent, so its keys and values stay in the cache.
    i_list = tl.program_id(0)
    i_b, i_g = (i_list // tiles // groups).to(tl.int64), (i_list // tiles % groups).to(tl.int64)
    o_query, o_token, o_head, m_row = _rows_of_tile(i_list, tokens, tiles, ROWS, HEADS, HEADS_PADDED)
    o_head = i_g * HEADS + o_head
    o_wide = o_token.to(tl.int64)
    b_q = load_heads(p_q, i_b * s_qb + o_head * s_qh + o_wide * s_qt, m_row, D, D_PADDED)  # [R, D]
    p_keys, p_values = p_k + i_b * s_kb + i_g * s_kg, p_v + i_b * s_vb + i_g * s_vg
    b_highest = tl.full([ROWS], float("-inf"), ACC)
    b_total = tl.zeros([ROWS], ACC)
    b_o = tl.zeros([ROWS, E_PADDED], ACC)
    p_first = p_union + i_list.to(tl.int64) * (2 * places + 2)
    p_members = p_first + places
    steps = tl.load(p_members + places) * PIECES
    # If the block length is no multiple of the tile, the last piece of a block extends beyond it and needs a mask.
    whole = tl.load(p_members + places + 1) * PIECES if SELECT_LEN % KEYS == 0 else 0
    first, m_member = _step_of_walk(p_first, p_members, 0, o_query, PIECES, KEYS)
    for i in range(whole):
        b_k = load_existing_rows(p_keys, s_kt, first, KEYS, D, D_PADDED)  # [K, D]
        b_v = load_existing_rows(p_values, s_vt, first, KEYS, E, E_PADDED)  # [K, E]
        b_highest, b_total, b_o = forward_step(
            b_q, b_k, b_v, m_member, None, b_highest, b_total, b_o, EXPONENT, EXACT, ACC
        )
        first, m_member = _step_of_walk(p_first, p_members, i + 1, o_query, PIECES, KEYS)
    for i in range(whole, steps):
        o_key, m_key, m_seen = _keys_of_step(i, first, m_member, o_token, tokens, SELECT_LEN, KEYS)
        b_k = load_rows(p_keys, s_kt, o_key, m_key, D, D_PADDED)  # [K, D]
        b_v = load_rows(p_values, s_vt, o_key, m_key, E, E_PADDED)  # [K, E]
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
    ACC: tl.constexpr, SELECT_LEN: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the queries, and each row's log-sum-exp and delta for `selected_backward_keys`.

    With gates, `do` is the gradient of the gated sum of all branches (gates.py). With ADDS, the gradient is added to
    `p_dq`.
    """
    PIECES: tl.constexpr = (SELECT_LEN + KEYS - 1) // KEYS
    i_list = tl.program_id(0)
    i_b, i_g = (i_list // tiles // groups).to(tl.int64), (i_list // tiles % groups).to(tl.int64)
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
    p_keys, p_values = p_k + i_b * s_kb + i_g * s_kg, p_v + i_b * s_vb + i_g * s_vg
    b_dq = tl.zeros([ROWS, D_PADDED], ACC)
    p_first = p_union + i_list.to(tl.int64) * (2 * places + 2)
    p_members = p_first + places
    steps = tl.load(p_members + places) * PIECES
    whole = tl.load(p_members + places + 1) * PIECES if SELECT_LEN % KEYS == 0 else 0
    first, m_member = _step_of_walk(p_first, p_members, 0, o_query, PIECES, KEYS)
    for i in range(whole):
        b_k = load_existing_rows(p_keys, s_kt, first, KEYS, D, D_PADDED)  # [K, D]
        b_v = load_existing_rows(p_values, s_vt, first, KEYS, E, E_PADDED)  # [K, E]
        b_dq = query_step(b_q, b_k, b_v, b_do, b_lse, b_delta, m_member, None, b_dq, EXPONENT, EXACT, ACC)
        first, m_member = _step_of_walk(p_first, p_members, i + 1, o_query, PIECES, KEYS)
    for i in range(whole, steps):
        o_key, m_key, m_seen = _keys_of_step(i, first, m_member, o_token, tokens, SELECT_LEN, KEYS)
        b_k = load_rows(p_keys, s_kt, o_key, m_key, D, D_PADDED)  # [K, D]
        b_v = load_rows(p_values, s_vt, o_key, m_key, E, E_PADDED)  # [K, E]
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
        b_dk, b_dv = key_step(b_q, b_k, b_v, b_do, b_lse, b_delta, m_seen, b_dk, b_dv, SIGNED, EXPONENT, EXACT, ACC)
        o_token = _query_of_place(p_key, start + QUERIES + o_query, stop, first_key)
    for start in range(apart, stop, QUERIES):
        m_row = (start + o_query < stop) & (o_head < HEADS)
        o_stat = o_token * s_token + o_head  # [R]
        b_q, b_do, b_lse, b_delta = _rows_of_list(
            p_q, p_do, p_stats, to_delta, o_stat, o_head, m_row, HEADS, HEADS_PADDED, D, D_PADDED, E, E_PADDED
        )
        b_dk, b_dv = key_step(b_q, b_k, b_v, b_do, b_lse, b_delta, None, b_dk, b_dv, SIGNED, EXPONENT, EXACT, ACC)
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


def _add_parts(parts: Tensor, dk: Tensor, dv: Tensor, segments: lists.Segments) -> None:
    select_len, width, value_width = parts.shape[2], dk.shape[3], dv.shape[3]
    keys = min(MIN_DOT_WIDTH, next_power_of_two(select_len))
    launch(
        selected_backward_sum,
        parts.shape[0] * segments.blocks * triton.cdiv(select_len, keys),
        *(dk, dv, parts, *segments.table_4Nb[2:], segments.first_b),
        *(dk.shape[2], segments.blocks, segments.partials),
        D=width,
        D_PADDED=next_power_of_two(width),
        E=value_width,
        E_PADDED=next_power_of_two(value_width),
        ACC=triton_accumulator_dtype(dk.dtype),
        SELECT_LEN=select_len,
        KEYS=keys,
    )


def _run_with_tile(
    run: Callable[[Tile], None],
    tile: Sequence[int],
    tuning_key: tuning.TuningKey,
    candidates: Callable[[tuning.TuningKey], list[Tile]],
    trial: Callable[[Tile], None] | None = None,
) -> None:
    if tile:
        rows, keys, warps, stages = tile
        run(Tile(rows=rows, keys=keys, warps=warps, stages=stages))
    else:
        tuning.run_best(run, tuning_key, candidates, trial)


def _tuning_key(
    kernel: str, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTE: Tensor, select_len: int, indices_BGTn: Tensor
) -> tuning.TuningKey:
    pattern = f"selected l'={select_len} n={indices_BGTn.shape[3]}"
    return tuning.TuningKey.of(kernel, q_BHTD, k_BGTD, v_BGTE, pattern)


def _forward_tiles(tuning_key: tuning.TuningKey) -> list[Tile]:
    # Two programs of the first tile fit on a multiprocessor. One of them then multiplies while the other computes
    # exponentials.
    return tuning_key.tiles(*_with_rows(ROWS, (64, 4, 3), (64, 4, 2), (32, 4, 4), (64, 8, 3), (32, 4, 1)))


def _backward_query_tiles(tuning_key: tuning.TuningKey) -> list[Tile]:
    # One program of the first tile fits on a multiprocessor, with loads issued two steps ahead. Two programs of the
    # second tile fit, with loads issued one step ahead.
    return tuning_key.tiles(*_with_rows(ROWS, (64, 4, 3), (64, 4, 2), (32, 4, 4), (64, 8, 3), (32, 4, 1)))


def _with_rows(rows: int, *sizes: tuple[int, int, int]) -> list[tuple[int, int, int, int]]:
    return [(rows, *size) for size in sizes]


def _backward_key_tiles(tuning_key: tuning.TuningKey) -> list[Tile]:
    # Two accumulators stay in registers: with four warps and 64 x 64 tiles they spill at width 128. With eight warps,
    # both warp groups multiply all 64 keys with all queries, which doubles the products for S and dP.
    sizes = (32, 64, 4, 3), (32, 64, 4, 4), (16, 64, 4, 4), (64, 64, 8, 3), (64, 64, 8, 1), (128, 64, 8, 1)
    return tuning_key.tiles(*sizes, (32, 32, 4, 1))


def _tile_constants(tile: Tile, sizes: dict[str, Any], queries: int | None = None) -> dict[str, int]:
    """Return the launch parameters for a tile of `queries` queries."""
    heads = sizes["HEADS_PADDED"]
    rows = next_power_of_two(tile.rows, max(MIN_DOT_WIDTH, heads)) if queries is None else queries * heads
    keys = min(next_power_of_two(tile.keys), next_power_of_two(sizes["SELECT_LEN"]))
    return {"ROWS": rows, "KEYS": keys, "warps": tile.warps, "stages": tile.stages}


def _queries_per_tile(union_NxW: Tensor, indices_BGTn: Tensor) -> int:
    return (union_NxW.shape[2] - UNION_TAIL) // (2 * indices_BGTn.shape[3])


def _union_arguments(union_NxW: Tensor, k_BGTD: Tensor) -> tuple[Any, ...]:
    """Return the kernel arguments that describe the union of selected blocks of each tile."""
    groups, tokens = k_BGTD.shape[1:3]
    tiles, columns = union_NxW.shape[1:]
    return union_NxW, groups, tokens, (columns - UNION_TAIL) // 2, tiles


def _empty_gradients(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dq_BHTD = empty_token_major(q_BHTD, q_BHTD.shape[3])
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
