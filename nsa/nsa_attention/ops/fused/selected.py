"""The selected branch as Triton kernels (NSA paper, eq. 11 and 12).

Each query attends to the tokens of its selected blocks up to itself.

For the forward pass and the gradient of the queries, a program holds a tile of neighbouring queries with all heads of
their group, and loops over the union of their blocks; a bit per query shows whether the query selected the block. For
the gradients of keys and values, a program holds keys of a block and loops over the queries that selected it. A block
that many queries selected is split over several programs, whose partial sums are added in a fixed order. There are no
atomics, so the same input gives the same bits.

The kernels are in selected_kernels.py.

Dimensions: B batch, H query heads, G groups, N batch x groups, T tokens, D key width, E value width, n selected blocks
per query, x tiles, W columns of a union.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from .. import NAMESPACE
from ..autograd import register_attention_gradients
from . import lists, tuning
from .descriptors import keys_and_values
from .gates import (
    GatedBranch,
    empty_gradients,
    gate_arguments,
    query_gradient_buffer,
    query_gradient_constants,
    tuning_name,
)
from .launch import (
    MIN_DOT_WIDTH,
    CannotLaunchError,
    Tile,
    accumulator_dtype,
    check_attention,
    empty_outputs,
    empty_token_major,
    kernel_constants,
    launch,
    next_power_of_two,
    triton_accumulator_dtype,
    with_strides,
)
from .lists import UNION_TAIL
from .selected_kernels import (
    selected_backward_keys,
    selected_backward_queries,
    selected_backward_sum,
    selected_forward,
)
from .tiles import candidate_tiles

# A block that is selected this many times as often as the average block is split over several programs. With 4, the
# partial sums take about as much memory as the gradients of keys and values.
FAIR_SHARE = 4


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
    return _selected_attention_op(q_BHTD, k_BGTD, v_BGTE, indices_BGTn, starts, select_len, scale, sizes, length)


def segment_length(select_len: int, indices_BGTn: Tensor) -> int:
    """Return the default number of a block's queries that one program of the backward pass processes."""
    return FAIR_SHARE * select_len * max(1, indices_BGTn.shape[3])


@torch.library.custom_op(f"{NAMESPACE}::selected_fused", mutates_args=())
def _selected_attention_op(
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
    if not q_BHTD.numel() or not indices_BGTn.numel():
        o_BHTE, lse_BHT = empty_outputs(q_BHTD, v_BGTE)
        return o_BHTE.zero_(), lse_BHT.fill_(-torch.inf)
    return selected_output(q_BHTD, k_BGTD, v_BGTE, indices_BGTn, starts, select_len, scale, tile)


def selected_output(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTE: Tensor,
    indices_BGTn: Tensor,
    starts: Tensor | None,
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
    unions = _Unions(indices_BGTn, starts, select_len)

    def run(tile: Tile, unions: _Unions = unions) -> None:
        tile_constants = _tile_constants(tile, sizes, queries=_queries_per_tile(tile, sizes))
        union_NxW = unions.of(_queries_per_tile(tile, sizes))
        keys = keys_and_values(k_BGTD, v_BGTE, tile_constants["KEYS"], sizes)
        launch(
            selected_forward,
            union_NxW.shape[0] * union_NxW.shape[1],
            *with_strides(q_BHTD),
            *keys.first,
            *keys.second,
            *with_strides(o_BHTE),
            lse_BHT,
            *_union_arguments(union_NxW, k_BGTD),
            DESCRIBED=keys.uses_descriptors,
            **tile_constants,
            **sizes,
        )

    tuning_key = _tuning_key("selected_forward", q_BHTD, k_BGTD, v_BGTE, select_len, indices_BGTn)
    _run_with_tile(run, tile, tuning_key, lambda tile: run(tile, unions.typical()))
    return o_BHTE, lse_BHT


@torch.library.custom_op(f"{NAMESPACE}::selected_fused_backward", mutates_args=())
def _selected_attention_backward_op(
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
    if not q_BHTD.numel() or not indices_BGTn.numel():
        dq, dk, dv = _empty_gradients(q_BHTD, k_BGTD, v_BGTE)
        return dq.zero_(), dk.zero_(), dv.zero_()
    tensors = (q_BHTD, k_BGTD, v_BGTE, indices_BGTn, starts, o_BHTE, lse_BHT)
    return selected_gradients(grad_BHTE, *tensors, select_len, scale, segment, tile)


def selected_gradients(
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

    unions = _Unions(indices_BGTn, starts, select_len)

    def run_queries(tile: Tile, dq: Tensor = dq, unions: _Unions = unions) -> None:
        tile_constants = _tile_constants(tile, sizes, queries=_queries_per_tile(tile, sizes))
        union_NxW = unions.of(_queries_per_tile(tile, sizes))
        keys = keys_and_values(k_BGTD, v_BGTE, tile_constants["KEYS"], sizes)
        launch(
            selected_backward_queries,
            union_NxW.shape[0] * union_NxW.shape[1],
            *(*keys.first, *keys.second, *with_strides(o_BHTE), *gate_arguments(gated_branch)),
            *(q_BTHD, grad_BTHE, dq.transpose(1, 2), gated_branch and gated_branch.dgates_cBHT, lse_BHT, stats_2BTH),
            *_union_arguments(union_NxW, k_BGTD),
            *(batch_groups, gated_branch.number if gated_branch else 0),
            ADDS=adds_to_dq,
            DESCRIBED=keys.uses_descriptors,
            **tile_constants,
            **query_gradient_constants(sizes, gated_branch),
        )

    tuning_key = _tuning_key("selected_backward_queries", q_BHTD, k_BGTD, v_BGTE, select_len, indices_BGTn)
    queries_tuning_key = replace(tuning_key, kernel=tuning_name(tuning_key.kernel, gated_branch))
    _run_with_tile(
        run_queries,
        tile,
        queries_tuning_key,
        lambda tile: run_queries(tile, torch.empty_like(dq), unions.typical()),
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
    _run_with_tile(run_keys, tile, keys_tuning_key)
    _add_parts(parts, dk, dv, segments)
    return dq, dk, dv


@_selected_attention_op.register_fake
def _(q_BHTD: Tensor, _k: Tensor, v_BGTE: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_outputs(q_BHTD, v_BGTE)


@_selected_attention_backward_op.register_fake
def _(_grad: Tensor, *tensors: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_gradients(*tensors[:3])


register_attention_gradients(_selected_attention_op, _selected_attention_backward_op, tensors=5)


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
    trial: Callable[[Tile], None] | None = None,
) -> None:
    if tile:
        rows, keys, warps, stages = tile
        run(Tile(rows=rows, keys=keys, warps=warps, stages=stages))
    else:
        tuning.run_best(run, tuning_key, candidate_tiles, trial)


def _tuning_key(
    kernel: str, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTE: Tensor, select_len: int, indices_BGTn: Tensor
) -> tuning.TuningKey:
    pattern = f"selected l'={select_len} n={indices_BGTn.shape[3]}"
    return tuning.TuningKey.of(kernel, q_BHTD, k_BGTD, v_BGTE, pattern)


def _tile_constants(tile: Tile, sizes: dict[str, Any], queries: int | None = None) -> dict[str, int]:
    """Return the launch parameters for a tile of `queries` queries."""
    heads = sizes["HEADS_PADDED"]
    rows = next_power_of_two(tile.rows, max(MIN_DOT_WIDTH, heads)) if queries is None else queries * heads
    keys = min(next_power_of_two(tile.keys), next_power_of_two(sizes["SELECT_LEN"]))
    return {"ROWS": rows, "KEYS": keys, "warps": tile.warps, "stages": tile.stages}


def _queries_per_tile(tile: Tile, sizes: dict[str, Any]) -> int:
    """Return the number of neighbouring queries in a tile of rows, from 1 to 32."""
    return min(lists.MAX_TILE_QUERIES, max(1, next_power_of_two(tile.rows) // sizes["HEADS_PADDED"]))


class _Unions:
    """The unions of the selected blocks of neighbouring queries, for tiles of any number of queries.

    The number depends on the tile that a kernel uses. Building a union takes far less time than a pass over it.
    """

    def __init__(self, indices_BGTn: Tensor, starts: Tensor | None, select_len: int) -> None:
        self.indices_BGTn, self.starts, self.select_len = indices_BGTn, starts, select_len
        self._by_queries: dict[int, Tensor] = {}
        self._typical: _Unions | None = None

    def of(self, queries: int) -> Tensor:
        """Return the unions of tiles of `queries` queries, as `lists.unions` builds them."""
        if queries not in self._by_queries:
            self._by_queries[queries] = lists.unions(
                self.indices_BGTn, select_len=self.select_len, queries=queries, starts=self.starts
            )
        return self._by_queries[queries]

    def typical(self) -> _Unions:
        """Return the unions to time tiles with.

        The inputs of a warm-up are random. A kernel then walks longer unions than for a trained model, in which
        neighbouring queries select similar blocks, and tiles of many rows would never be chosen.
        """
        if self._typical is None:
            indices_BGTn = lists.typical_selection(self.indices_BGTn, self.select_len)
            self._typical = _Unions(indices_BGTn, self.starts, self.select_len)
        return self._typical


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
