"""All three branches and their gates as one operator (paper, eq. 5); backwards each reads the gradient of the sum.

With an operator for each, the mixing writes the gradient of each branch's output, and autograd adds up what each branch
has for the queries. Here the kernels of a branch take its gate along (gates.py) and add to one gradient of the queries.

Dimensions: c branches, B batch, H query heads, G groups, T tokens, S compressed blocks, D key width, E value width,
n places. Keys and values come in this order: compressed, selected, sliding, the keys of each before its values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import NAMESPACE
from ..selection import Selection
from . import lists
from .gates import GatedBranch, no_gradients
from .importance import select_by_importance
from .launch import check_attention, check_dtypes, like_tokens, outputs
from .mix import like_the_sum, mix_forward, weighted_sum
from .selected import queries_of_tile, segment_length, selected_gradients, selected_output
from .spanned import (
    Spans,
    kept_completed_blocks,
    kept_last_tokens,
    pattern_of_completed_blocks,
    pattern_of_last_tokens,
    spanned_gradients,
    spanned_output,
)
from .spanned_kernels import spanned_forward

_SELECTED = 1  # the branch among the three


def gated_attention(
    q_BHTD: Tensor,
    pairs: Sequence[tuple[Tensor, Tensor]],
    gates_cBHT: Tensor,
    selection: Selection,
    *,
    window: int,
    starts: Tensor | None = None,
) -> Tensor:
    """Output [B, T, H, E], contiguous, in the dtype of the branches, of at least one token and three places.

    Raises CannotLaunchError for tensors that the kernels cannot take.
    """
    for pair in pairs:
        check_attention(spanned_forward, q_BHTD, *pair)
    check_dtypes(mix_forward, gates_cBHT)
    lengths = selection.block_len, selection.block_stride
    blocks = kept_completed_blocks(q_BHTD, pairs[0][0], *lengths, starts)
    tokens = kept_last_tokens(q_BHTD, window, starts)
    result = _gated(
        q_BHTD,
        [tensor for pair in pairs for tensor in pair],
        gates_cBHT,
        [*blocks.tensors(), *tokens.tensors()],
        starts,
        *lengths,
        selection.select_len,
        selection.select_count,
        window,
        selection.scale,
    )
    output_BTHE: Tensor = result[0]
    return output_BTHE


@torch.library.custom_op(f"{NAMESPACE}::gated", mutates_args=())
def _gated(
    q_BHTD: Tensor,
    keys_values: list[Tensor],
    gates_cBHT: Tensor,
    spans: list[Tensor],
    starts: Tensor | None,
    block_len: int,
    block_stride: int,
    select_len: int,
    select_count: int,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The sum; then output and log-sum-exp of each branch; the chosen blocks, and their unions."""
    compressed, selected, sliding = _pairs(keys_values)
    seen = _spans(spans, block_len, block_stride, window)
    selection = Selection(
        block_len=block_len,
        block_stride=block_stride,
        select_len=select_len,
        select_count=select_count,
        scale=scale,
    )
    of_compressed = spanned_output(q_BHTD, *compressed, seen[0], scale)
    indices_BGTn = select_by_importance(q_BHTD, compressed[0], of_compressed[1], selection, starts=starts)
    queries = queries_of_tile(q_BHTD, selected[0])
    union_NxW = lists.unions(indices_BGTn, select_len=select_len, queries=queries, starts=starts)
    of_selected = selected_output(q_BHTD, *selected, indices_BGTn, union_NxW, select_len, scale)
    of_sliding = spanned_output(q_BHTD, *sliding, seen[1], scale)
    output_BTHE = weighted_sum([of_compressed[0], of_selected[0], of_sliding[0]], gates_cBHT)
    return output_BTHE, *of_compressed, *of_selected, *of_sliding, indices_BGTn, union_NxW


@torch.library.custom_op(f"{NAMESPACE}::gated_backward", mutates_args=())
def _gated_backward(
    grad_BTHE: Tensor,
    q_BHTD: Tensor,
    keys_values: list[Tensor],
    gates_cBHT: Tensor,
    spans: list[Tensor],
    starts: Tensor | None,
    results: list[Tensor],
    block_len: int,
    block_stride: int,
    select_len: int,
    window: int,
    scale: float,
    wanted: list[bool],
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Gradients of queries, of keys and values, and of gates; without an element where none is `wanted`."""
    wants_queries, *wants, wants_gates = wanted
    *attended, indices_BGTn, union_NxW = results
    seen = _spans(spans, block_len, block_stride, window)
    dy_BHTE = grad_BTHE.contiguous().transpose(1, 2)
    dq_BHTD = like_tokens(q_BHTD, q_BHTD.shape[-1])
    dgates_cBHT = gates_cBHT.new_empty(gates_cBHT.shape)
    adds, gradients = False, list[Tensor]()
    for number, (pair, of_pair) in enumerate(zip(_pairs(keys_values), _pairs(attended), strict=True)):
        wants_keys = any(wants[2 * number : 2 * number + 2])
        if not (wants_queries or wants_keys or wants_gates):
            gradients += no_gradients(*pair)
            continue
        gated = GatedBranch(
            number=number,
            gates_cBHT=gates_cBHT,
            dgates_cBHT=dgates_cBHT,
            dq_BHTD=dq_BHTD,
            adds=adds,
            wants_keys=wants_keys,
        )
        if number == _SELECTED:
            tensors = (dy_BHTE, q_BHTD, *pair, indices_BGTn, starts, union_NxW, *of_pair)
            segment = segment_length(select_len, indices_BGTn)
            _, *both = selected_gradients(*tensors, select_len, scale, segment, gated=gated)
        else:
            _, *both = spanned_gradients(dy_BHTE, q_BHTD, *pair, seen[number // 2], *of_pair, scale, gated)
        adds = True
        gradients += both
    dq_BHTD, dgates_cBHT = (
        gradient if is_wanted else no_gradients(gradient)[0]
        for gradient, is_wanted in ((dq_BHTD, wants_queries), (dgates_cBHT, wants_gates))
    )
    return dq_BHTD, gradients, dgates_cBHT


def _pairs(tensors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(tensors[::2], tensors[1::2], strict=True))


def _spans(tensors: Sequence[Tensor], block_len: int, block_stride: int, window: int) -> tuple[Spans, Spans]:
    return (
        Spans.of(tensors[:4], pattern_of_completed_blocks(block_len, block_stride)),
        Spans.of(tensors[4:], pattern_of_last_tokens(window)),
    )


@_gated.register_fake
def _(
    q_BHTD: Tensor,
    keys_values: list[Tensor],
    _gates: Tensor,
    _spans: list[Tensor],
    _starts: Tensor | None,
    _block_len: int,
    _block_stride: int,
    _select_len: int,
    select_count: int,
    *_: Any,
) -> tuple[Tensor, ...]:
    attended = [tensor for values in keys_values[1::2] for tensor in outputs(q_BHTD, values)]
    keys_BGTD = keys_values[2]
    indices_BGTn = q_BHTD.new_empty((*keys_BGTD.shape[:3], select_count), dtype=torch.int32)
    union = lists.union_shape(indices_BGTn, queries_of_tile(q_BHTD, keys_BGTD))
    return like_the_sum(attended), *attended, indices_BGTn, indices_BGTn.new_empty(union)


@_gated_backward.register_fake
def _(
    _grad: Tensor, q_BHTD: Tensor, keys_values: list[Tensor], gates_cBHT: Tensor, *rest: Any
) -> tuple[Tensor, list[Tensor], Tensor]:
    wants_queries, *wants, wants_gates = rest[-1]
    dq_BHTD = like_tokens(q_BHTD, q_BHTD.shape[-1]) if wants_queries else no_gradients(q_BHTD)[0]
    gradients: list[Tensor] = []
    for number, pair in enumerate(_pairs(keys_values)):
        wants_keys = any(wants[2 * number : 2 * number + 2])
        gradients += [one.new_empty(one.shape) for one in pair] if wants_keys else no_gradients(*pair)
    return dq_BHTD, gradients, gates_cBHT.new_empty(gates_cBHT.shape if wants_gates else 0)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q_BHTD, keys_values, gates_cBHT, spans, starts, block_len, block_stride, select_len, _, window, scale = inputs
    ctx.save_for_backward(q_BHTD, gates_cBHT, starts, *keys_values, *spans, *output[1:])
    ctx.numbers = (block_len, block_stride, select_len, window, scale)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_BTHE: Tensor | None, *_: None) -> tuple[Any, ...]:
    wants_queries, wants, wants_gates, *_ = ctx.needs_input_grad
    nothing = ([None] * 8, *[None] * 7)  # for spans, starts and numbers
    if grad_BTHE is None:
        return None, [None] * len(wants), None, *nothing
    q_BHTD, gates_cBHT, starts, *saved = ctx.saved_tensors
    keys_values, spans, results = saved[:6], saved[6:14], saved[14:]
    wanted = [wants_queries, *wants, wants_gates]
    tensors = (grad_BTHE, q_BHTD, keys_values, gates_cBHT, spans, starts, results)
    dq_BHTD, of_pairs, dgates_cBHT = _gated_backward(*tensors, *ctx.numbers, wanted)
    gradients = [dq_BHTD, *of_pairs, dgates_cBHT]
    dq, *of_pairs, dgates = (one if is_wanted else None for one, is_wanted in zip(gradients, wanted, strict=True))
    return dq, of_pairs, dgates, *nothing


_gated.register_autograd(_differentiate, setup_context=_keep)
