"""The compressed and sliding branches in Triton. Each query attends to one contiguous span of keys.

`Spans` contains the span of keys of each query, and the span of queries that attend to each key. The kernels are in
spanned_kernels.py.

Dimensions: B batch, G groups, H query heads, T queries, S keys, D key width, E value width. A span is [start, stop),
and empty if start == stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from .. import NAMESPACE
from ..autograd import register_attention_gradients
from ..packed import compressed_starts, sequence_numbers, single_sequence_starts
from ..table_cache import cached_table
from . import tuning
from .descriptors import TiledPair, can_describe, keys_and_values, make_descriptor
from .gates import (
    GatedBranch,
    empty_gradients,
    gate_arguments,
    query_gradient_buffer,
    query_gradient_constants,
    tuning_name,
)
from .launch import (
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
from .spanned_kernels import spanned_backward_keys, spanned_backward_queries, spanned_forward, spanned_statistics
from .tiles import candidate_tiles


@dataclass(frozen=True, kw_only=True)
class Spans:
    """The span of keys that each query attends to, and the span of queries that attend to each key.

    All tensors are int32.
    """

    first_key_T: Tensor
    stop_key_T: Tensor
    first_query_S: Tensor
    stop_query_S: Tensor
    pattern: str  # the branch and its lengths; tile sizes are tuned per pattern

    @classmethod
    def of(cls, tensors: Sequence[Tensor], pattern: str) -> Spans:
        """Restore a Spans from the four tensors that `Spans.tensors` returned."""
        first_key_T, stop_key_T, first_query_S, stop_query_S = tensors
        return cls(
            first_key_T=first_key_T,
            stop_key_T=stop_key_T,
            first_query_S=first_query_S,
            stop_query_S=stop_query_S,
            pattern=pattern,
        )

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the starts and ends of the spans of keys and queries, as four tensors."""
        return self.first_key_T, self.stop_key_T, self.first_query_S, self.stop_query_S


def block_spans(
    queries: int, blocks: int, block_len: int, block_stride: int, starts: Tensor | None, device: torch.device
) -> Spans:
    """Return the range of compressed blocks that each query attends to.

    Query t attends to block i of its sequence if the block's last token i*d + l - 1 is not after t (paper, eq. 7).
    """
    starts = single_sequence_starts(queries, device) if starts is None else starts
    first_block = compressed_starts(starts, block_len, block_stride)
    sequence_T, query_T = sequence_numbers(starts, queries), _positions(queries, device)
    inside_T = query_T - starts[sequence_T]
    complete_T = (torch.div(inside_T + 1 - block_len, block_stride, rounding_mode="floor") + 1).clamp_min(0)
    sequence_S = sequence_numbers(first_block, blocks)
    inside_S = _positions(blocks, device) - first_block[sequence_S]
    return Spans(
        first_key_T=first_block[sequence_T],
        stop_key_T=first_block[sequence_T] + complete_T,
        first_query_S=starts[sequence_S] + inside_S * block_stride + block_len - 1,
        stop_query_S=starts[sequence_S + 1],
        pattern=block_pattern(block_len, block_stride),
    )


def window_spans(tokens: int, window: int, starts: Tensor | None, device: torch.device) -> Spans:
    """Return the range of keys that each query attends to in sliding-window attention: the last `window` tokens."""
    starts = single_sequence_starts(tokens, device) if starts is None else starts
    window = min(window, tokens)  # int32 cannot represent the sum of a token and any larger window
    sequence_T, token_T = sequence_numbers(starts, tokens), _positions(tokens, device)
    return Spans(
        first_key_T=torch.maximum(starts[sequence_T], token_T - window + 1),
        stop_key_T=token_T + 1,
        first_query_S=token_T,
        stop_query_S=torch.minimum(starts[sequence_T + 1], token_T + window),
        pattern=window_pattern(window),
    )


def cached_block_spans(
    q_BHTD: Tensor, k_BGSD: Tensor, block_len: int, block_stride: int, starts: Tensor | None
) -> Spans:
    """Return the result of `block_spans`, using a cache shared by all layers."""
    numbers = q_BHTD.shape[2], k_BGSD.shape[2], block_len, block_stride
    device = q_BHTD.device
    return cached_table(starts, device, ("completed blocks", *numbers), lambda: block_spans(*numbers, starts, device))


def cached_window_spans(q_BHTD: Tensor, window: int, starts: Tensor | None) -> Spans:
    """Return the result of `window_spans`, using a cache shared by all layers."""
    numbers, device = (q_BHTD.shape[2], window), q_BHTD.device
    return cached_table(starts, device, ("last tokens", *numbers), lambda: window_spans(*numbers, starts, device))


def block_pattern(block_len: int, block_stride: int) -> str:
    """Return the name under which the tile sizes for attention to compressed blocks are stored."""
    return f"compressed l={block_len} d={block_stride}"


def window_pattern(window: int) -> str:
    """Return the name under which the tile sizes for sliding-window attention are stored."""
    return f"sliding w={window}"


def _positions(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=device)


# Number of programs that fills any current GPU. With fewer tiles of keys, the queries of each tile are split over
# several programs.
MIN_PROGRAMS = 1024
MAX_PARTS = 16
# Elements of the output that one program of `spanned_statistics` reads. Only memory bandwidth limits this kernel.
STATISTICS_ELEMENTS = 4096


def spanned_attention(
    q_BHTD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor, spans: Spans, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, T, E] and log-sum-exp [B, H, T] of attention to spans of keys.

    In the output the heads of a token are adjacent in memory. A query with an empty span gets 0 and -inf. The
    log-sum-exp has no gradient. Raises CannotLaunchError for tensors that the kernels do not support.
    """
    check_attention(spanned_forward, q_BHTD, k_BGSD, v_BGSE)
    return _spanned_attention_op(q_BHTD, k_BGSD, v_BGSE, *spans.tensors(), scale, spans.pattern)


@torch.library.custom_op(f"{NAMESPACE}::spanned", mutates_args=())
def _spanned_attention_op(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSE: Tensor,
    first_key_T: Tensor,
    stop_key_T: Tensor,
    first_query_S: Tensor,
    stop_query_S: Tensor,
    scale: float,
    pattern: str,
) -> tuple[Tensor, Tensor]:
    spans = Spans.of((first_key_T, stop_key_T, first_query_S, stop_query_S), pattern)
    return spanned_output(q_BHTD, k_BGSD, v_BGSE, spans, scale)


def spanned_output(q_BHTD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor, spans: Spans, scale: float) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp of attention to spans of keys. This function is not differentiable."""
    o_BHTE, lse_BHT = empty_outputs(q_BHTD, v_BGSE)
    sizes = kernel_constants(q_BHTD, k_BGSD, v_BGSE, scale)
    del sizes["SCALE"]

    def run(tile: Tile) -> None:
        tiles = triton.cdiv(q_BHTD.shape[2], tile.rows // sizes["HEADS_PADDED"])
        keys = keys_and_values(k_BGSD, v_BGSE, tile.keys, sizes)
        launch(
            spanned_forward,
            tiles * q_BHTD.shape[0] * k_BGSD.shape[1],
            *with_strides(q_BHTD),
            *keys.first,
            *keys.second,
            *with_strides(o_BHTE),
            lse_BHT,
            spans.first_key_T,
            spans.stop_key_T,
            k_BGSD.shape[1],
            q_BHTD.shape[2],
            tiles,
            DESCRIBED=keys.uses_descriptors,
            ROWS=tile.rows,
            KEYS=tile.keys,
            warps=tile.warps,
            stages=tile.stages,
            **sizes,
        )

    tuning.run_best(run, tuning.TuningKey.of("spanned_forward", q_BHTD, k_BGSD, v_BGSE, spans.pattern), candidate_tiles)
    return o_BHTE, lse_BHT


@torch.library.custom_op(f"{NAMESPACE}::spanned_backward", mutates_args=())
def _spanned_attention_backward_op(
    grad_BHTE: Tensor,
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSE: Tensor,
    first_key_T: Tensor,
    stop_key_T: Tensor,
    first_query_S: Tensor,
    stop_query_S: Tensor,
    o_BHTE: Tensor,
    lse_BHT: Tensor,
    scale: float,
    pattern: str,
) -> tuple[Tensor, Tensor, Tensor]:
    spans = Spans.of((first_key_T, stop_key_T, first_query_S, stop_query_S), pattern)
    return spanned_gradients(grad_BHTE, q_BHTD, k_BGSD, v_BGSE, spans, o_BHTE, lse_BHT, scale)


def spanned_gradients(
    grad_BHTE: Tensor,
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSE: Tensor,
    spans: Spans,
    o_BHTE: Tensor,
    lse_BHT: Tensor,
    scale: float,
    gated_branch: GatedBranch | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values for attention to spans of keys.

    With `gated_branch`, `grad_BHTE` is the gradient of the gated sum of all branches, and the gradient of the gate is
    written as well. If the branch has a float sum, the kernel that computes the gradients of keys and values adds to it
    with atomics.
    """
    # Per-row values that the first kernel computes and the second needs: the log-sum-exp as an exponent, and delta.
    stats_2BHT = lse_BHT.new_empty((2, *lse_BHT.shape))
    tensors = (q_BHTD, k_BGSD, v_BGSE)
    if gated_branch is not None and gated_branch.is_float_sum and gated_branch.needs_key_grads:
        dq_BHTD = gated_branch.dq_BHTD
        _write_statistics(grad_BHTE, o_BHTE, lse_BHT, stats_2BHT, gated_branch)
    else:
        dq_BHTD = _query_gradient(grad_BHTE, *tensors, spans, o_BHTE, lse_BHT, stats_2BHT, scale, gated_branch)
    if gated_branch is not None and not gated_branch.needs_key_grads:
        return dq_BHTD, *empty_gradients(k_BGSD, v_BGSE)
    dk, dv = _key_gradients(grad_BHTE, *tensors, spans, stats_2BHT, scale, gated_branch)
    return dq_BHTD, dk, dv


def _write_statistics(
    grad_BHTE: Tensor, o_BHTE: Tensor, lse_BHT: Tensor, stats_2BHT: Tensor, gated_branch: GatedBranch
) -> None:
    """Write the values per row that `spanned_backward_keys` needs, and the gradient of the gate."""
    batch, heads, tokens, width = o_BHTE.shape
    padded = next_power_of_two(width)
    rows = max(1, STATISTICS_ELEMENTS // padded)
    launch(
        spanned_statistics,
        batch * triton.cdiv(tokens * heads, rows),
        *with_strides(grad_BHTE),
        *with_strides(o_BHTE),
        *gate_arguments(gated_branch),
        *(gated_branch.dgates_cBHT, lse_BHT, stats_2BHT, batch, tokens, gated_branch.number),
        EXACT=o_BHTE.dtype in (torch.float32, torch.float64),
        HEADS=heads,
        E=width,
        E_PADDED=padded,
        ACC=triton_accumulator_dtype(o_BHTE.dtype),
        ROWS=rows,
    )


def _query_gradient(
    grad_BHTE: Tensor,
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSE: Tensor,
    spans: Spans,
    o_BHTE: Tensor,
    lse_BHT: Tensor,
    stats_2BHT: Tensor,
    scale: float,
    gated_branch: GatedBranch | None,
) -> Tensor:
    sizes = kernel_constants(q_BHTD, k_BGSD, v_BGSE, scale)
    dq_BHTD, adds_to_dq = query_gradient_buffer(q_BHTD, gated_branch)
    rows, groups = q_BHTD.shape[0] * k_BGSD.shape[1], k_BGSD.shape[1]

    def run(tile: Tile, dq_BHTD: Tensor = dq_BHTD) -> None:
        tiles = triton.cdiv(q_BHTD.shape[2], tile.rows // sizes["HEADS_PADDED"])
        keys = keys_and_values(k_BGSD, v_BGSE, tile.keys, sizes)
        launch(
            spanned_backward_queries,
            tiles * rows,
            *with_strides(q_BHTD),
            *keys.first,
            *keys.second,
            *with_strides(grad_BHTE),
            *with_strides(o_BHTE),
            *with_strides(dq_BHTD),
            *gate_arguments(gated_branch),
            gated_branch.dgates_cBHT if gated_branch else None,
            lse_BHT,
            stats_2BHT,
            spans.first_key_T,
            spans.stop_key_T,
            q_BHTD.shape[0],
            groups,
            q_BHTD.shape[2],
            tiles,
            gated_branch.number if gated_branch else 0,
            DESCRIBED=keys.uses_descriptors,
            ROWS=tile.rows,
            KEYS=tile.keys,
            ADDS=adds_to_dq,
            warps=tile.warps,
            stages=tile.stages,
            **query_gradient_constants(sizes, gated_branch),
        )

    kernel = tuning_name("spanned_backward_queries", gated_branch)
    tuning_key = tuning.TuningKey.of(kernel, q_BHTD, k_BGSD, v_BGSE, spans.pattern)
    tuning.run_best(run, tuning_key, candidate_tiles, lambda tile: run(tile, torch.empty_like(dq_BHTD)))
    return dq_BHTD


def _key_gradients(
    grad_BHTE: Tensor,
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSE: Tensor,
    spans: Spans,
    stats_2BHT: Tensor,
    scale: float,
    gated_branch: GatedBranch | None,
) -> tuple[Tensor, Tensor]:
    sizes = kernel_constants(q_BHTD, k_BGSD, v_BGSE, scale)
    rows, groups = q_BHTD.shape[0] * k_BGSD.shape[1], k_BGSD.shape[1]
    float_sum_BHTD = gated_branch.dq_BHTD if gated_branch and gated_branch.is_float_sum else None
    gradients: list[Tensor] = []

    def run(tile: Tile, dq_BHTD: Tensor | None = float_sum_BHTD, *, split_differently: bool = False) -> None:
        tiles = triton.cdiv(k_BGSD.shape[2], tile.keys)
        parts = _query_parts(tiles * rows)
        if split_differently:
            parts = 1 if parts > 1 else 2
        part_dtype = accumulator_dtype(q_BHTD.dtype) if parts > 1 else q_BHTD.dtype
        dk, dv = (tensor.new_empty((parts, *tensor.shape), dtype=part_dtype) for tensor in (k_BGSD, v_BGSE))
        queries = _queries_and_gradients(q_BHTD, grad_BHTE, tile, sizes)
        launch(
            spanned_backward_keys,
            tiles * rows * parts,
            *queries.first,
            *with_strides(k_BGSD),
            *with_strides(v_BGSE),
            *queries.second,
            dk,
            dv,
            _sum_argument(dq_BHTD, tile, sizes, described=queries.uses_descriptors),
            stats_2BHT,
            spans.first_query_S,
            spans.stop_query_S,
            groups,
            q_BHTD.shape[2],
            k_BGSD.shape[2],
            tiles,
            parts,
            rows,
            DESCRIBED=queries.uses_descriptors,
            ROWS=tile.rows,
            KEYS=tile.keys,
            SIGNED=gated_branch is not None,
            warps=tile.warps,
            stages=tile.stages,
            **sizes,
        )
        gradients[:] = [dk, dv]

    def run_trial(tile: Tile, *, split_differently: bool = False) -> None:
        elsewhere = None if float_sum_BHTD is None else torch.empty_like(float_sum_BHTD)
        run(tile, elsewhere, split_differently=split_differently)

    name = "spanned_backward_keys" if float_sum_BHTD is None else "spanned_backward_atomic"
    tuning_key = tuning.TuningKey.of(tuning_name(name, gated_branch), q_BHTD, k_BGSD, v_BGSE, spans.pattern)
    tuning.run_best(run, tuning_key, candidate_tiles, run_trial)
    dk, dv = (parts[0] if len(parts) == 1 else parts.sum(0).to(q_BHTD.dtype) for parts in gradients)
    if tuning.is_measuring():
        # Split sums have a different dtype, which needs a separately compiled kernel. Compile it now and not within a
        # step.
        tuning.run_best(partial(run_trial, split_differently=True), tuning_key, candidate_tiles)
    return dk, dv


@_spanned_attention_op.register_fake
def _(q_BHTD: Tensor, _k: Tensor, v_BGSE: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_outputs(q_BHTD, v_BGSE)


@_spanned_attention_backward_op.register_fake
def _(_grad: Tensor, q_BHTD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return empty_token_major(q_BHTD, q_BHTD.shape[-1]), k_BGSD.new_empty(k_BGSD.shape), v_BGSE.new_empty(v_BGSE.shape)


register_attention_gradients(_spanned_attention_op, _spanned_attention_backward_op, tensors=7)


def _queries_and_gradients(q_BHTD: Tensor, grad_BHTE: Tensor, tile: Tile, sizes: dict[str, Any]) -> TiledPair:
    """Return the kernel arguments for the queries and for the gradient of the attention output."""
    # Descriptors are used only if the heads need no padding, because padded heads would belong to the next group.
    first, second = with_strides(q_BHTD), with_strides(grad_BHTE)
    heads, q_BTHD, grad_BTHE = sizes["HEADS_PADDED"], q_BHTD.transpose(1, 2), grad_BHTE.transpose(1, 2)
    if heads != sizes["HEADS"] or not can_describe(q_BTHD, grad_BTHE):
        return TiledPair(first=first, second=second, uses_descriptors=False)
    block = 1, tile.rows // heads, heads
    return TiledPair(
        first=(make_descriptor(q_BTHD, (*block, sizes["D_PADDED"])), *first[1:]),
        second=(make_descriptor(grad_BTHE, (*block, sizes["E_PADDED"])), *second[1:]),
        uses_descriptors=True,
    )


def _sum_argument(dq_BHTD: Tensor | None, tile: Tile, sizes: dict[str, Any], *, described: bool) -> Any:
    """Return the kernel argument for the sum of the gradients of the queries, to which the kernel adds."""
    if dq_BHTD is None or not described:
        return dq_BHTD
    heads = sizes["HEADS_PADDED"]
    return make_descriptor(dq_BHTD.transpose(1, 2), (1, tile.rows // heads, heads, sizes["D_PADDED"]))


def _query_parts(programs: int) -> int:
    return min(MAX_PARTS, max(1, MIN_PROGRAMS // max(1, programs)))
