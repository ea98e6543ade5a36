"""All three attention branches and their gates as a single operator.

With separate operators, the gated sum would write a gradient for each branch's output, and autograd would add up the
branches' gradients of the queries. Here the kernels of each branch read the gradient of the sum and apply the gate
themselves (gates.py), and all branches add to one gradient of the queries.

Dimensions: c branches, B batch, H query heads, G groups, T tokens, S compressed blocks, D key width, E value width, n
selected blocks per query. `keys_values` has six tensors: keys and values of the compressed, the selected and the
sliding branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import NAMESPACE
from ..recompute import project_and_rotate
from ..selection import Selection, remember
from .gates import GatedBranch, empty_gradients
from .importance import select_by_importance
from .launch import accumulator_dtype, check_attention, check_dtypes, empty_outputs, empty_token_major
from .mix import empty_sum, mix_forward, weighted_sum
from .selected import segment_length, selected_gradients, selected_output
from .spanned import (
    Spans,
    block_pattern,
    cached_block_spans,
    cached_window_spans,
    spanned_gradients,
    spanned_output,
    window_pattern,
)
from .spanned_kernels import spanned_forward

_COMPRESSED, _SELECTED, _SLIDING = range(3)  # branches
# Of the saved tensors: the spans, the results of the branches, the keys and values of the compressed and the selected
# branch, and those of the sliding branch or their sources.
_SAVED = ((0, 8), (8, 15), (15, 19), (19, None))


def gated_attention(
    q_BHTD: Tensor,
    pairs: Sequence[tuple[Tensor, Tensor]],
    gates_cBHT: Tensor,
    selection: Selection,
    *,
    window: int,
    starts: Tensor | None = None,
    memo_number: Tensor | None = None,
    indices_BGTn: Tensor | None = None,
    sliding_sources: Sequence[Tensor] = (),
    deterministic: bool = True,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Return the gated sum [B, T, H, E], the indices [B, G, T, n] of the selected blocks, and the branch outputs.

    The branch outputs, three tensors [B, H, T, E], have no gradients. `memo_number` identifies a SelectionMemo, if
    there is one. `indices_BGTn` selects the blocks; None selects the most important ones. `sliding_sources` are the
    arguments with which `project_and_rotate` returns the keys and values of the sliding branch: the backward pass then
    computes these again, and they are not saved. An empty list: they are saved. If `deterministic` is False, the
    backward pass uses atomics, unless torch.use_deterministic_algorithms is on when it runs. There must be at least one
    token, and `selection.select_count` must be at least 3. Raises CannotLaunchError for tensors that the kernels do not
    support.
    """
    for pair in pairs:
        check_attention(spanned_forward, q_BHTD, *pair)
    check_dtypes(mix_forward, gates_cBHT)
    lengths = selection.block_len, selection.block_stride
    blocks = cached_block_spans(q_BHTD, pairs[0][0], *lengths, starts)
    tokens = cached_window_spans(q_BHTD, window, starts)
    result = _gated_attention(
        q_BHTD,
        [tensor for pair in pairs for tensor in pair],
        gates_cBHT,
        [*blocks.tensors(), *tokens.tensors()],
        list(sliding_sources),
        starts,
        *lengths,
        selection.select_len,
        selection.select_count,
        window,
        selection.scale,
        deterministic,
        memo_number,
        indices_BGTn,
    )
    output_BTHE, *branch_results, indices_BGTn = result
    return output_BTHE, indices_BGTn, tuple(branch_results[::2])


@torch.library.custom_op(f"{NAMESPACE}::gated", mutates_args=())
def _gated_attention(
    q_BHTD: Tensor,
    keys_values: list[Tensor],
    gates_cBHT: Tensor,
    spans: list[Tensor],
    _sliding_sources: list[Tensor],
    starts: Tensor | None,
    block_len: int,
    block_stride: int,
    select_len: int,
    select_count: int,
    window: int,
    scale: float,
    _deterministic: bool,
    memo_number: Tensor | None = None,
    given_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gated sum of the three branches' outputs, followed by the tensors that the backward pass needs."""
    compressed_pair, selected_pair, sliding_pair = _pairs(keys_values)
    spans_by_branch = _spans(spans, block_len, block_stride, window)
    selection = Selection(
        block_len=block_len,
        block_stride=block_stride,
        select_len=select_len,
        select_count=select_count,
        scale=scale,
    )
    compressed_result = spanned_output(q_BHTD, *compressed_pair, spans_by_branch[0], scale)
    if given_indices is None:
        ranking = (q_BHTD, compressed_pair[0], compressed_result[1], selection)
        indices_BGTn = remember(memo_number, lambda: select_by_importance(*ranking, starts=starts))
    else:
        indices_BGTn = given_indices.clone()  # an operator must not return its inputs
    selected_result = selected_output(q_BHTD, *selected_pair, indices_BGTn, starts, select_len, scale)
    sliding_result = spanned_output(q_BHTD, *sliding_pair, spans_by_branch[1], scale)
    output_BTHE = weighted_sum((compressed_result[0], selected_result[0], sliding_result[0]), gates_cBHT)
    return output_BTHE, *compressed_result, *selected_result, *sliding_result, indices_BGTn


@torch.library.custom_op(f"{NAMESPACE}::gated_backward", mutates_args=())
def _gated_attention_backward(
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
    deterministic: bool,
    needs_grad: list[bool],
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Return the gradients of the queries, of the keys and values, and of the gates.

    If `deterministic` is False, kernels may add to the gradient of the queries with atomics (gates.py). `needs_grad`
    has a bool for the queries, six for keys and values, and one for the gates. Gradients that are not needed are empty.
    """
    needs_q, *needs_kv, needs_gates = needs_grad
    *branch_results, indices_BGTn = results
    spans_by_branch = _spans(spans, block_len, block_stride, window)
    dy_BHTE = grad_BTHE.contiguous().transpose(1, 2)
    dgates_cBHT = gates_cBHT.new_empty(gates_cBHT.shape)
    # Atomics save products if a kernel computes the gradients of queries and of keys and values.
    needs_both = needs_q and any(needs_kv[:2] + needs_kv[4:])
    uses_atomics = needs_both and not (deterministic or torch.are_deterministic_algorithms_enabled())
    sum_dtype = accumulator_dtype(q_BHTD.dtype) if uses_atomics else q_BHTD.dtype
    sum_BHTD = empty_token_major(q_BHTD, q_BHTD.shape[-1], sum_dtype)
    adds_to_dq, gradients = False, list(keys_values)
    # The selected branch uses no atomics, so it can be the first to write the sum.
    for number in (_SELECTED, _COMPRESSED, _SLIDING) if uses_atomics else (_COMPRESSED, _SELECTED, _SLIDING):
        pair, result = _pairs(keys_values)[number], _pairs(branch_results)[number]
        needs_key_grads = any(needs_kv[2 * number : 2 * number + 2])
        if not (needs_q or needs_key_grads or needs_gates):
            gradients[2 * number : 2 * number + 2] = empty_gradients(*pair)
            continue
        gated_branch = GatedBranch(
            number=number,
            gates_cBHT=gates_cBHT,
            dgates_cBHT=dgates_cBHT,
            dq_BHTD=sum_BHTD,
            adds_to_dq=adds_to_dq,
            needs_key_grads=needs_key_grads,
            is_float_sum=uses_atomics,
        )
        if number == _SELECTED:
            tensors = (dy_BHTE, q_BHTD, *pair, indices_BGTn, starts, *result)
            segment = segment_length(select_len, indices_BGTn)
            _, *key_value_grads = selected_gradients(*tensors, select_len, scale, segment, gated_branch=gated_branch)
        else:
            _, *key_value_grads = spanned_gradients(
                dy_BHTE, q_BHTD, *pair, spans_by_branch[number // 2], *result, scale, gated_branch
            )
        adds_to_dq = True
        gradients[2 * number : 2 * number + 2] = key_value_grads
    dq_BHTD = sum_BHTD
    if uses_atomics:
        dq_BHTD = torch.mul(sum_BHTD, scale, out=empty_token_major(q_BHTD, q_BHTD.shape[-1]))
    dq_BHTD, dgates_cBHT = (
        gradient if is_needed else empty_gradients(gradient)[0]
        for gradient, is_needed in ((dq_BHTD, needs_q), (dgates_cBHT, needs_gates))
    )
    return dq_BHTD, gradients, dgates_cBHT


def _pairs(tensors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(tensors[::2], tensors[1::2], strict=True))


def _spans(tensors: Sequence[Tensor], block_len: int, block_stride: int, window: int) -> tuple[Spans, Spans]:
    return (
        Spans.of(tensors[:4], block_pattern(block_len, block_stride)),
        Spans.of(tensors[4:], window_pattern(window)),
    )


@_gated_attention.register_fake
def _(
    q_BHTD: Tensor,
    keys_values: list[Tensor],
    _gates: Tensor,
    _spans: list[Tensor],
    _sliding_sources: list[Tensor],
    _starts: Tensor | None,
    _block_len: int,
    _block_stride: int,
    _select_len: int,
    select_count: int,
    *_: Any,
) -> tuple[Tensor, ...]:
    branch_results = [tensor for values in keys_values[1::2] for tensor in empty_outputs(q_BHTD, values)]
    keys_BGTD = keys_values[2]
    indices_BGTn = q_BHTD.new_empty((*keys_BGTD.shape[:3], select_count), dtype=torch.int32)
    return empty_sum(branch_results), *branch_results, indices_BGTn


@_gated_attention_backward.register_fake
def _(
    _grad: Tensor, q_BHTD: Tensor, keys_values: list[Tensor], gates_cBHT: Tensor, *rest: Any
) -> tuple[Tensor, list[Tensor], Tensor]:
    needs_q, *needs_kv, needs_gates = rest[-1]
    dq_BHTD = empty_token_major(q_BHTD, q_BHTD.shape[-1]) if needs_q else empty_gradients(q_BHTD)[0]
    gradients: list[Tensor] = []
    for number, pair in enumerate(_pairs(keys_values)):
        needs_key_grads = any(needs_kv[2 * number : 2 * number + 2])
        gradients += [tensor.new_empty(tensor.shape) for tensor in pair] if needs_key_grads else empty_gradients(*pair)
    return dq_BHTD, gradients, gates_cBHT.new_empty(gates_cBHT.shape if needs_gates else 0)


def _save_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q_BHTD, keys_values, gates_cBHT, spans, sliding_sources, starts, *numbers = inputs
    block_len, block_stride, select_len, _, window, scale, deterministic, *_ = numbers
    sliding = sliding_sources or keys_values[4:]
    ctx.sliding_groups = keys_values[4].shape[1] if sliding_sources else None
    ctx.save_for_backward(q_BHTD, gates_cBHT, starts, *spans, *output[1:], *keys_values[:4], *sliding)
    ctx.numbers = (block_len, block_stride, select_len, window, scale, deterministic)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_BTHE: Tensor | None, *_: None) -> tuple[Any, ...]:
    # torch omits arguments that have their default values.
    needs_q, needs_kv, needs_gates, needs_spans, needs_sources, *others = ctx.needs_input_grad
    nothing = ([None] * len(needs_spans), [None] * len(needs_sources), *[None] * len(others))
    if grad_BTHE is None:
        return None, [None] * len(needs_kv), None, *nothing
    q_BHTD, gates_cBHT, starts, *saved_tensors = ctx.saved_tensors
    spans, results, keys_values, sliding = (list(saved_tensors[slice(*ends)]) for ends in _SAVED)
    keys_values += sliding if ctx.sliding_groups is None else project_and_rotate(*sliding, groups=ctx.sliding_groups)
    needs_grad = [needs_q, *needs_kv, needs_gates]
    tensors = (grad_BTHE, q_BHTD, keys_values, gates_cBHT, spans, starts, results)
    dq_BHTD, kv_grads, dgates_cBHT = _gated_attention_backward(*tensors, *ctx.numbers, needs_grad)
    gradients = [dq_BHTD, *kv_grads, dgates_cBHT]
    dq, *kv_grads, dgates = (
        gradient if is_needed else None for gradient, is_needed in zip(gradients, needs_grad, strict=True)
    )
    return dq, kv_grads, dgates, *nothing


_gated_attention.register_autograd(_backward, setup_context=_save_context)
