"""Attention where each query sees one span of keys: the compressed and the sliding branch.

`Spans` say which keys a query sees in them, where they lie side by side, and which queries see a key. The kernels that
walk them are in spanned_kernels.py.

Dimensions: B batch, G groups, H query heads, T queries, S keys, D key width, E value width. A span is [start, stop);
an empty one has start == stop.
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
from ..packed import compressed_starts, sequence_numbers, single_sequence_starts
from ..table_cache import cached_table
from . import tuning
from .descriptors import describable, described
from .gates import GatedBranch, gated_queries, gates_of, kernel_of, no_gradients
from .launch import (
    Tile,
    accumulated,
    check_attention,
    constants,
    launch,
    like_tokens,
    outputs,
    strided,
)
from .spanned_kernels import spanned_backward_keys, spanned_backward_queries, spanned_forward


@dataclass(frozen=True, kw_only=True)
class Spans:
    """int32 tensors. The same relation twice: as the forward pass walks it, and as the keys' gradients do."""

    first_key_T: Tensor
    stop_key_T: Tensor
    first_query_S: Tensor
    stop_query_S: Tensor
    pattern: str  # the branch and its lengths: what tile sizes are measured for

    @classmethod
    def of(cls, tensors: Sequence[Tensor], pattern: str) -> Spans:
        first_key_T, stop_key_T, first_query_S, stop_query_S = tensors
        return cls(
            first_key_T=first_key_T,
            stop_key_T=stop_key_T,
            first_query_S=first_query_S,
            stop_query_S=stop_query_S,
            pattern=pattern,
        )

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.first_key_T, self.stop_key_T, self.first_query_S, self.stop_query_S


def spans_of_completed_blocks(
    queries: int, blocks: int, block_len: int, block_stride: int, starts: Tensor | None, device: torch.device
) -> Spans:
    """Query t sees block i of its sequence when the block's last token i*d + l - 1 is not after t."""
    starts = single_sequence_starts(queries, device) if starts is None else starts
    first_block = compressed_starts(starts, block_len, block_stride)
    sequence_T, query_T = sequence_numbers(starts, queries), _places(queries, device)
    inside_T = query_T - starts[sequence_T]
    complete_T = (torch.div(inside_T + 1 - block_len, block_stride, rounding_mode="floor") + 1).clamp_min(0)
    sequence_S = sequence_numbers(first_block, blocks)
    inside_S = _places(blocks, device) - first_block[sequence_S]
    return Spans(
        first_key_T=first_block[sequence_T],
        stop_key_T=first_block[sequence_T] + complete_T,
        first_query_S=starts[sequence_S] + inside_S * block_stride + block_len - 1,
        stop_query_S=starts[sequence_S + 1],
        pattern=pattern_of_completed_blocks(block_len, block_stride),
    )


def spans_of_last_tokens(tokens: int, window: int, starts: Tensor | None, device: torch.device) -> Spans:
    """Query t sees the tokens of its sequence in (t - w, t]."""
    starts = single_sequence_starts(tokens, device) if starts is None else starts
    sequence_T, token_T = sequence_numbers(starts, tokens), _places(tokens, device)
    return Spans(
        first_key_T=torch.maximum(starts[sequence_T], token_T - window + 1),
        stop_key_T=token_T + 1,
        first_query_S=token_T,
        stop_query_S=torch.minimum(starts[sequence_T + 1], token_T + window),
        pattern=pattern_of_last_tokens(window),
    )


def kept_completed_blocks(
    q_BHTD: Tensor, k_BGSD: Tensor, block_len: int, block_stride: int, starts: Tensor | None
) -> Spans:
    """The same for tensors, computed once for all layers and steps of these lengths."""
    numbers = q_BHTD.shape[2], k_BGSD.shape[2], block_len, block_stride
    device = q_BHTD.device
    return cached_table(
        starts, device, ("completed blocks", *numbers), lambda: spans_of_completed_blocks(*numbers, starts, device)
    )


def kept_last_tokens(q_BHTD: Tensor, window: int, starts: Tensor | None) -> Spans:
    """The same for tensors, computed once for all layers and steps of these lengths."""
    numbers, device = (q_BHTD.shape[2], window), q_BHTD.device
    return cached_table(
        starts, device, ("last tokens", *numbers), lambda: spans_of_last_tokens(*numbers, starts, device)
    )


def pattern_of_completed_blocks(block_len: int, block_stride: int) -> str:
    return f"compressed l={block_len} d={block_stride}"


def pattern_of_last_tokens(window: int) -> str:
    return f"sliding w={window}"


def _places(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=device)


# Programs that fill any GPU of today: below that, the queries that see a tile of keys are shared out among several.
ENOUGH_PROGRAMS = 1024
MOST_PARTS = 16


def spanned_attention(
    q_BHTD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor, spans: Spans, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [B, H, T, E], each token's heads side by side in memory, and log-sum-exp [B, H, T] without gradient.

    A query with an empty span gets 0 and minus infinity. Raises CannotLaunchError for tensors a kernel cannot take.
    """
    check_attention(spanned_forward, q_BHTD, k_BGSD, v_BGSE)
    return _spanned(q_BHTD, k_BGSD, v_BGSE, *spans.tensors(), scale, spans.pattern)


@torch.library.custom_op(f"{NAMESPACE}::spanned", mutates_args=())
def _spanned(
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
    seen = Spans.of((first_key_T, stop_key_T, first_query_S, stop_query_S), pattern)
    return spanned_output(q_BHTD, k_BGSD, v_BGSE, seen, scale)


def spanned_output(q_BHTD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor, spans: Spans, scale: float) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, without autograd."""
    o_BHTE, lse_BHT = outputs(q_BHTD, v_BGSE)
    sizes = constants(q_BHTD, k_BGSD, v_BGSE, scale)
    del sizes["SCALE"]

    def run(tile: Tile) -> None:
        tiles = triton.cdiv(q_BHTD.shape[2], tile.rows // sizes["HEADS_PADDED"])
        keys = _keys_and_values(k_BGSD, v_BGSE, tile, sizes)
        launch(
            spanned_forward,
            tiles * q_BHTD.shape[0] * k_BGSD.shape[1],
            *strided(q_BHTD),
            *keys.first,
            *keys.second,
            *strided(o_BHTE),
            lse_BHT,
            spans.first_key_T,
            spans.stop_key_T,
            k_BGSD.shape[1],
            q_BHTD.shape[2],
            tiles,
            DESCRIBED=keys.described,
            ROWS=tile.rows,
            KEYS=tile.keys,
            warps=tile.warps,
            stages=tile.stages,
            **sizes,
        )

    tuning.run_best(run, tuning.Situation.of("spanned_forward", q_BHTD, k_BGSD, v_BGSE, spans.pattern), _forward_tiles)
    return o_BHTE, lse_BHT


@torch.library.custom_op(f"{NAMESPACE}::spanned_backward", mutates_args=())
def _spanned_backward(
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
    seen = Spans.of((first_key_T, stop_key_T, first_query_S, stop_query_S), pattern)
    return spanned_gradients(grad_BHTE, q_BHTD, k_BGSD, v_BGSE, seen, o_BHTE, lse_BHT, scale)


def spanned_gradients(
    grad_BHTE: Tensor,
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSE: Tensor,
    spans: Spans,
    o_BHTE: Tensor,
    lse_BHT: Tensor,
    scale: float,
    gated: GatedBranch | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values. As a `gated` branch it gets the gradient of the sum of all branches."""
    # What the first kernel computes of each row and the second needs: the log-sum-exp as an exponent, and delta.
    stats_2BHT = lse_BHT.new_empty((2, *lse_BHT.shape))
    tensors = (q_BHTD, k_BGSD, v_BGSE)
    dq_BHTD = _gradient_of_queries(grad_BHTE, *tensors, spans, o_BHTE, lse_BHT, stats_2BHT, scale, gated)
    if gated is not None and not gated.wants_keys:
        return dq_BHTD, *no_gradients(k_BGSD, v_BGSE)
    dk, dv = _gradients_of_keys(grad_BHTE, *tensors, spans, stats_2BHT, scale, gated)
    return dq_BHTD, dk, dv


def _gradient_of_queries(
    grad_BHTE: Tensor,
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSE: Tensor,
    spans: Spans,
    o_BHTE: Tensor,
    lse_BHT: Tensor,
    stats_2BHT: Tensor,
    scale: float,
    gated: GatedBranch | None,
) -> Tensor:
    sizes = constants(q_BHTD, k_BGSD, v_BGSE, scale)
    dq_BHTD, adds = gated_queries(q_BHTD, gated)
    rows, groups = q_BHTD.shape[0] * k_BGSD.shape[1], k_BGSD.shape[1]

    def run(tile: Tile, dq_BHTD: Tensor = dq_BHTD) -> None:
        tiles = triton.cdiv(q_BHTD.shape[2], tile.rows // sizes["HEADS_PADDED"])
        keys = _keys_and_values(k_BGSD, v_BGSE, tile, sizes)
        launch(
            spanned_backward_queries,
            tiles * rows,
            *strided(q_BHTD),
            *keys.first,
            *keys.second,
            *strided(grad_BHTE),
            *strided(o_BHTE),
            *strided(dq_BHTD),
            *gates_of(gated),
            gated.dgates_cBHT if gated else None,
            lse_BHT,
            stats_2BHT,
            spans.first_key_T,
            spans.stop_key_T,
            groups,
            q_BHTD.shape[2],
            tiles,
            rows,
            gated.number if gated else 0,
            DESCRIBED=keys.described,
            ROWS=tile.rows,
            KEYS=tile.keys,
            ADDS=adds,
            warps=tile.warps,
            stages=tile.stages,
            **sizes,
        )

    kernel = kernel_of("spanned_backward_queries", gated)
    situation = tuning.Situation.of(kernel, q_BHTD, k_BGSD, v_BGSE, spans.pattern)
    tuning.run_best(run, situation, _backward_query_tiles, lambda tile: run(tile, torch.empty_like(dq_BHTD)))
    return dq_BHTD


def _gradients_of_keys(
    grad_BHTE: Tensor,
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSE: Tensor,
    spans: Spans,
    stats_2BHT: Tensor,
    scale: float,
    gated: GatedBranch | None,
) -> tuple[Tensor, Tensor]:
    sizes = constants(q_BHTD, k_BGSD, v_BGSE, scale)
    rows, groups = q_BHTD.shape[0] * k_BGSD.shape[1], k_BGSD.shape[1]
    gradients: list[Tensor] = []

    def run(tile: Tile, *, of_another_length: bool = False) -> None:
        tiles = triton.cdiv(k_BGSD.shape[2], tile.keys)
        parts = _parts(tiles * rows)
        if of_another_length:
            parts = 1 if parts > 1 else 2
        kept = accumulated(q_BHTD.dtype) if parts > 1 else q_BHTD.dtype
        dk, dv = (tensor.new_empty((parts, *tensor.shape), dtype=kept) for tensor in (k_BGSD, v_BGSE))
        queries = _queries_and_gradients(q_BHTD, grad_BHTE, tile, sizes)
        launch(
            spanned_backward_keys,
            tiles * rows * parts,
            *queries.first,
            *strided(k_BGSD),
            *strided(v_BGSE),
            *queries.second,
            dk,
            dv,
            stats_2BHT,
            spans.first_query_S,
            spans.stop_query_S,
            groups,
            q_BHTD.shape[2],
            k_BGSD.shape[2],
            tiles,
            parts,
            rows,
            DESCRIBED=queries.described,
            ROWS=tile.rows,
            KEYS=tile.keys,
            SIGNED=gated is not None,
            warps=tile.warps,
            stages=tile.stages,
            **sizes,
        )
        gradients[:] = [dk, dv]

    kernel = kernel_of("spanned_backward_keys", gated)
    situation = tuning.Situation.of(kernel, q_BHTD, k_BGSD, v_BGSE, spans.pattern)
    tuning.run_best(run, situation, _backward_key_tiles)
    dk, dv = (parts[0] if len(parts) == 1 else parts.sum(0).to(q_BHTD.dtype) for parts in gradients)
    if tuning.is_measuring():
        # Parts are of another dtype than the whole, which is another kernel: it must not be compiled inside a step.
        tuning.run_best(partial(run, of_another_length=True), situation, _backward_key_tiles)
    return dk, dv


@_spanned.register_fake
def _(q_BHTD: Tensor, _k: Tensor, v_BGSE: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return outputs(q_BHTD, v_BGSE)


@_spanned_backward.register_fake
def _(_grad: Tensor, q_BHTD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return like_tokens(q_BHTD, q_BHTD.shape[-1]), k_BGSD.new_empty(k_BGSD.shape), v_BGSE.new_empty(v_BGSE.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, scale, pattern = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.numbers = (scale, pattern)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_BHTE: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    none = (None,) * 6
    if grad_BHTE is None:
        return None, None, None, *none
    return *_spanned_backward(grad_BHTE, *ctx.saved_tensors, *ctx.numbers), *none


_spanned.register_autograd(_differentiate, setup_context=_keep)


@dataclass(frozen=True, kw_only=True)
class _Read:
    """Two tensors that a kernel reads in tiles, each with the strides that pointers need."""

    first: tuple[Any, ...]
    second: tuple[Any, ...]
    described: bool


def _keys_and_values(k_BGSD: Tensor, v_BGSE: Tensor, tile: Tile, sizes: dict[str, Any]) -> _Read:
    first, second = strided(k_BGSD), strided(v_BGSE)
    if not describable(k_BGSD, v_BGSE):
        return _Read(first=first, second=second, described=False)
    block = 1, 1, tile.keys
    return _Read(
        first=(described(k_BGSD, (*block, sizes["D_PADDED"])), *first[1:]),
        second=(described(v_BGSE, (*block, sizes["E_PADDED"])), *second[1:]),
        described=True,
    )


def _queries_and_gradients(q_BHTD: Tensor, grad_BHTE: Tensor, tile: Tile, sizes: dict[str, Any]) -> _Read:
    """A tile is some queries with all heads of a group: of padded heads the last would be the next group's."""
    first, second = strided(q_BHTD), strided(grad_BHTE)
    heads, q_BTHD, grad_BTHE = sizes["HEADS_PADDED"], q_BHTD.transpose(1, 2), grad_BHTE.transpose(1, 2)
    if heads != sizes["HEADS"] or not describable(q_BTHD, grad_BTHE):
        return _Read(first=first, second=second, described=False)
    block = 1, tile.rows // heads, heads
    return _Read(
        first=(described(q_BTHD, (*block, sizes["D_PADDED"])), *first[1:]),
        second=(described(grad_BTHE, (*block, sizes["E_PADDED"])), *second[1:]),
        described=True,
    )


def _parts(programs: int) -> int:
    return min(MOST_PARTS, max(1, ENOUGH_PROGRAMS // max(1, programs)))


# With two stages the loads of a step are issued at its end and awaited at the top of the next; three hide them.
def _forward_tiles(situation: tuning.Situation) -> list[Tile]:
    """A long walk goes by 128 keys, which scales the output half as often; of a window it would see more in vain."""
    sizes = [(128, 64, 8, 3), (128, 128, 8, 3), (64, 64, 4, 3), (256, 64, 16, 3), (64, 32, 4, 3), (32, 32, 4, 1)]
    if _sees_blocks(situation):
        sizes.insert(0, sizes.pop(1))
    return situation.tiles(*sizes)


def _backward_query_tiles(situation: tuning.Situation) -> list[Tile]:
    """Shared memory has room for one program of these: with eight warps it hides more than with four."""
    sizes = (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3), (64, 32, 4, 3), (128, 32, 8, 3), (32, 32, 4, 1)
    return situation.tiles(*sizes)


def _backward_key_tiles(situation: tuning.Situation) -> list[Tile]:
    """Each four warps have 64 keys of their own: with fewer, two groups of them would compute the same scores.

    Keys of completed blocks are seen by most queries, which a tile of 128 keys reads half as often.
    """
    sizes = [(32, 64, 4, 3), (64, 128, 8, 3), (32, 128, 8, 3), (32, 64, 4, 4), (16, 64, 4, 4), (32, 32, 4, 1)]
    if _sees_blocks(situation):
        sizes.insert(0, sizes.pop(1))
    return situation.tiles(*sizes)


def _sees_blocks(situation: tuning.Situation) -> bool:
    """Fewer keys than queries: blocks of tokens, most of which a late query sees."""
    return situation.keys < situation.tokens
