"""Attention under a pattern as one operator of torch: a loop over query tiles, memory linear in the sequence.

An operator, so that autograd sees one node and torch.compile one call however long the sequence is. Patterns and
kernels go by name, as an operator takes numbers, strings and tensors only.

Dimensions as in tiles.py, with T queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nsa.ops.cores import shares, side_by_side
from nsa.ops.kernels import KERNELS
from nsa.ops.patterns import PATTERNS, Pattern
from nsa.ops.tiles import Kernel, TileState, compute_dtype, exactly_in_the_dtype_of, nothing_seen, tiles


def attend(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSE: Tensor,
    *,
    pattern: str,
    lengths: list[int],
    kernel: Kernel,
    scale: float,
    indices_BGTn: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [B, H, T, E] and log-sum-exp [B, H, T] (no gradient) of attention under `pattern` of these lengths."""
    batch, heads, queries, _ = q_BHTD.shape
    groups = k_BGSD.shape[1]
    rows = batch * groups
    indices = None if indices_BGTn is None else indices_BGTn.reshape(rows, queries, -1)
    o_NhTE, lse_NhT = _attend(
        q_BHTD.reshape(rows, heads // groups, queries, -1),
        k_BGSD.reshape(rows, *k_BGSD.shape[2:]),
        v_BGSE.reshape(rows, *v_BGSE.shape[2:]),
        indices,
        pattern,
        lengths,
        kernel.name,
        scale,
    )
    return o_NhTE.reshape(batch, heads, queries, -1), lse_NhT.reshape(batch, heads, queries)


@torch.library.custom_op("nsa::attend", mutates_args=())
def _attend(
    q_NhTD: Tensor,
    k_NSD: Tensor,
    v_NSE: Tensor,
    indices: Tensor | None,
    pattern: str,
    lengths: list[int],
    kernel: str,
    scale: float,
) -> tuple[Tensor, Tensor]:
    form, run = PATTERNS[pattern](*lengths), KERNELS[kernel]
    o_NhTE, lse_NhT = nothing_seen(q_NhTD, v_NSE)

    def piece(rows: slice, heads: slice) -> None:
        tensors = (q_NhTD[rows, heads], k_NSD[rows], v_NSE[rows], None if indices is None else indices[rows])
        _attend_tiles(form, run, *tensors, o_NhTE[rows, heads], lse_NhT[rows, heads], scale)

    side_by_side([partial(piece, *share) for share in shares(q_NhTD.device, *q_NhTD.shape[:2])])
    return o_NhTE, lse_NhT


def _attend_tiles(
    form: Pattern,
    run: Kernel,
    q_NhTD: Tensor,
    k_NSD: Tensor,
    v_NSE: Tensor,
    indices: Tensor | None,
    o_NhTE: Tensor,
    lse_NhT: Tensor,
    scale: float,
) -> None:
    """Fill in output and log-sum-exp, which are those of queries that see nothing."""
    with exactly_in_the_dtype_of(q_NhTD):
        for start, stop in _tiles(q_NhTD, form, run):
            first, last = form.keys(start, stop)
            if first == last:
                continue
            q, o, lse = (tensor[:, :, start:stop] for tensor in (q_NhTD, o_NhTE, lse_NhT))
            bias = form.bias(start, stop, indices, q_NhTD)
            o[:], lse[:] = run.forward(q, k_NSD[:, first:last], v_NSE[:, first:last], bias, scale)
            blind = form.blind(start, stop, indices, q_NhTD.device)
            if blind is not None:
                lse.masked_fill_(blind, -torch.inf)


@torch.library.custom_op("nsa::attend_backward", mutates_args=())
def _attend_backward(
    grad_NhTE: Tensor,
    q_NhTD: Tensor,
    k_NSD: Tensor,
    v_NSE: Tensor,
    indices: Tensor | None,
    o_NhTE: Tensor,
    lse_NhT: Tensor,
    pattern: str,
    lengths: list[int],
    kernel: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    form, run = PATTERNS[pattern](*lengths), KERNELS[kernel]
    dq = torch.zeros_like(q_NhTD, memory_format=torch.contiguous_format)
    dk = k_NSD.new_zeros(k_NSD.shape, dtype=compute_dtype(k_NSD))
    dv = v_NSE.new_zeros(v_NSE.shape, dtype=compute_dtype(v_NSE))

    def piece(rows: slice, heads: slice) -> tuple[Tensor, Tensor]:
        queries = (tensor[rows, heads] for tensor in (grad_NhTE, q_NhTD, o_NhTE, lse_NhT))
        keys = (k_NSD[rows], v_NSE[rows], None if indices is None else indices[rows])
        return _differentiate_tiles(form, run, *queries, *keys, dq[rows, heads], scale)

    cut = shares(q_NhTD.device, *q_NhTD.shape[:2])
    # In the order of the pieces, whichever ends first: the same sum each time.
    for (rows, _), (piece_dk, piece_dv) in zip(
        cut, side_by_side([partial(piece, *share) for share in cut]), strict=True
    ):
        dk[rows] += piece_dk
        dv[rows] += piece_dv
    # The operator may return none of its inputs, and no view; `to` returns what needs no change as it is.
    return dq, dk.to(k_NSD.dtype), dv.to(v_NSE.dtype)


def _differentiate_tiles(
    form: Pattern,
    run: Kernel,
    grad_NhTE: Tensor,
    q_NhTD: Tensor,
    o_NhTE: Tensor,
    lse_NhT: Tensor,
    k_NSD: Tensor,
    v_NSE: Tensor,
    indices: Tensor | None,
    dq_NhTD: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Gradients of keys and values from these heads; that of the queries is filled in."""
    dk = k_NSD.new_zeros(k_NSD.shape, dtype=compute_dtype(k_NSD))
    dv = v_NSE.new_zeros(v_NSE.shape, dtype=compute_dtype(v_NSE))
    with exactly_in_the_dtype_of(q_NhTD):
        for start, stop in _tiles(q_NhTD, form, run):
            first, last = form.keys(start, stop)
            if first == last:
                continue
            q, o, lse, grad = (tensor[:, :, start:stop] for tensor in (q_NhTD, o_NhTE, lse_NhT, grad_NhTE))
            state = TileState(q=q, k=k_NSD[:, first:last], v=v_NSE[:, first:last], output=o, lse=lse)
            bias = form.bias(start, stop, indices, q_NhTD)
            dq_NhTD[:, :, start:stop], tile_dk, tile_dv = run.backward(grad, state, bias, scale)
            dk[:, first:last] += tile_dk
            dv[:, first:last] += tile_dv
    return dk, dv


@_attend.register_fake
def _(q_NhTD: Tensor, _k: Tensor, v_NSE: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return nothing_seen(q_NhTD, v_NSE)


@_attend_backward.register_fake
def _(_grad: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors[:3])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, pattern, lengths, kernel, scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.form = (pattern, lengths, kernel, scale)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_NhTE: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    none = (None,) * 5
    if grad_NhTE is None:
        return None, None, None, *none
    return *_attend_backward(grad_NhTE, *ctx.saved_tensors, *ctx.form), *none


_attend.register_autograd(_differentiate, setup_context=_keep)


def _tiles(q_NhTD: Tensor, pattern: Pattern, kernel: Kernel) -> Iterator[tuple[int, int]]:
    rows, heads, queries, _ = q_NhTD.shape
    first, last = pattern.keys(queries - 1, queries) if queries else (0, 0)
    return tiles(queries, kernel.widest(rows, heads, last - first), pattern.longest_tile())
