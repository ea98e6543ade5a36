"""Kernels in plain PyTorch that compute attention for one tile of queries.

Dimensions: N batch x groups, h query heads of a group, T queries, C queries of a tile, S keys, D key width, E value
width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

# Limit for the elements of a tile's largest intermediate tensor. It bounds memory at any sequence length.
TILE_ELEMENTS = 1 << 22
SHORTEST_TILE = 16


@dataclass(frozen=True, kw_only=True)
class TileState:
    """The tensors that the backward pass of one tile needs."""

    q: Tensor  # [N, h, C, D]
    k: Tensor  # [N, S, D]
    v: Tensor  # [N, S, E]
    output: Tensor  # [N, h, C, E]
    lse: Tensor  # [N, h, C]


class Kernel(Protocol):
    """The interface of a kernel, which computes attention for one tile of queries.

    `bias` has the shape [N or 1, 1, C, S] and is 0 for visible keys and -inf for others. A query without visible keys
    gets output 0.
    """

    name: str

    def elements_per_query(self, rows: int, heads: int, keys: int) -> int:
        """Return the size of the kernel's largest intermediate tensor, in elements per query."""

    def forward(self, q_NhCD: Tensor, k_NSD: Tensor, v_NSE: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, ...]:
        """Return the output [N, h, C, E] and log-sum-exp [N, h, C] of one tile of queries.

        For a query without visible keys, the log-sum-exp may be any finite number or -inf.
        """

    def backward(self, grad: Tensor, state: TileState, bias: Tensor, scale: float) -> tuple[Tensor, ...]:
        """Return the gradients of queries [N, h, C, D], keys [N, S, D] and values [N, S, E]."""


def tiles(queries: int, elements_per_query: int, longest: int) -> Iterator[tuple[int, int]]:
    """Split the queries into ranges [start, stop) for which intermediate tensors stay small, and yield the ranges."""
    length = max(SHORTEST_TILE, min(longest, TILE_ELEMENTS // max(1, elements_per_query)))
    for start in range(0, queries, length):
        yield start, min(start + length, queries)


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype for accumulation, which is at least float32."""
    return tensor.dtype if tensor.dtype in (torch.float32, torch.float64) else torch.float32


def fully_masked_output(q_NhTD: Tensor, v_NSE: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output [N, h, T, E] and log-sum-exp [N, h, T] for queries without visible keys."""
    shape = q_NhTD.shape[:3]
    lse_NhT = q_NhTD.new_full(shape, -torch.inf, dtype=compute_dtype(q_NhTD))
    return q_NhTD.new_zeros((*shape, v_NSE.shape[-1])), lse_NhT


def autocast_disabled(tensor: Tensor) -> AbstractContextManager[Any]:
    """Return a context manager that turns autocast off on the tensor's device."""
    return torch.autocast(tensor.device.type, enabled=False)


class EagerKernel:
    """Attention in plain PyTorch, for every device and dtype."""

    name = "eager"

    def elements_per_query(self, rows: int, heads: int, keys: int) -> int:
        return rows * heads * keys

    def forward(self, q_NhCD: Tensor, k_NSD: Tensor, v_NSE: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, ...]:
        scores_NhCS = _scores(q_NhCD, k_NSD, bias, scale)
        # A row without visible keys has the maximum -inf. With 0 instead, exp(-inf - 0) = 0 avoids NaN.
        highest = _replace_infinite(scores_NhCS.amax(-1, keepdim=True))
        weights = scores_NhCS.sub_(highest).exp_()
        total = weights.sum(-1, keepdim=True)
        o_NhCE = _matmul_per_group(weights, v_NSE.to(weights.dtype)) / total.masked_fill(total == 0, 1.0)
        lse_NhC = (highest + total.log()).squeeze(-1)
        return o_NhCE.to(q_NhCD.dtype), lse_NhC

    def backward(self, grad: Tensor, state: TileState, bias: Tensor, scale: float) -> tuple[Tensor, ...]:
        dtype = compute_dtype(state.q)
        grad, o_NhCE = grad.to(dtype), state.output.to(dtype)
        scores_NhCS = _scores(state.q, state.k, bias, scale)
        weights = scores_NhCS.sub_(_replace_infinite(state.lse.unsqueeze(-1))).exp_()
        delta = (grad * o_NhCE).sum(-1, keepdim=True)
        d_weights = _matmul_per_group(grad, state.v.to(dtype).transpose(1, 2))
        d_scores = d_weights.sub_(delta).mul_(weights).mul_(scale)
        dq = _matmul_per_group(d_scores, state.k.to(dtype))
        dk = d_scores.flatten(1, 2).transpose(1, 2) @ state.q.to(dtype).flatten(1, 2)
        dv = weights.flatten(1, 2).transpose(1, 2) @ grad.flatten(1, 2)
        return dq.to(state.q.dtype), dk, dv


class FusedCpuKernel:
    """Attention by PyTorch's flash attention for CPUs, about four times as fast as EagerKernel.

    Its operators are private; `fused_cpu_reason` checks whether the installed version has them.
    """

    name = "fused_cpu"

    def elements_per_query(self, rows: int, _heads: int, keys: int) -> int:
        return rows * keys  # the mask is the largest tensor; the heads of a group share it

    def forward(self, q_NhCD: Tensor, k_NSD: Tensor, v_NSE: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, ...]:
        o_NhCE, lse_NhC = _flash(q_NhCD, k_NSD, v_NSE, scale, attn_mask=bias)
        if bool((is_zero := lse_NhC == 0).any()):
            # The operator also returns 0 for a query with only scores of -inf.
            rows_C = is_zero.flatten(0, 1).any(0).nonzero().flatten()
            _, lse_NhR = EagerKernel().forward(q_NhCD[:, :, rows_C], k_NSD, v_NSE, bias[:, :, rows_C], scale)
            lse_NhC[:, :, rows_C] = lse_NhC[:, :, rows_C].where(~is_zero[:, :, rows_C], lse_NhR)
        return o_NhCE, lse_NhC

    def backward(self, grad: Tensor, state: TileState, bias: Tensor, scale: float) -> tuple[Tensor, ...]:
        return _flash_backward(grad, state, scale, attn_mask=bias)


class BlockwiseKernel(FusedCpuKernel):
    """A FusedCpuKernel that computes attention to selected blocks with `blockwise`."""

    name = "blockwise"


def causal_forward(q_NhTD: Tensor, k_NTD: Tensor, v_NTE: Tensor, scale: float) -> tuple[Tensor, ...]:
    """Return the output [N, h, T, E] and log-sum-exp [N, h, T] of causal attention on a CPU."""
    return _flash(q_NhTD, k_NTD, v_NTE, scale, is_causal=True)


def causal_backward(grad: Tensor, state: TileState, scale: float) -> tuple[Tensor, ...]:
    """Return the gradients of the queries, keys and values of `causal_forward`."""
    return _flash_backward(grad, state, scale, is_causal=True)


def fused_cpu_reason(q: Tensor, v: Tensor) -> str | None:
    """Return the reason why FusedCpuKernel does not support these tensors, or None if it does."""
    if q.device.type != "cpu":
        return f"tensors are on {q.device.type}"
    if not hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward"):
        return f"torch {torch.__version__} has no flash attention for CPUs"
    if q.shape[-1] != v.shape[-1]:
        return f"keys of width {q.shape[-1]} and values of width {v.shape[-1]} differ"
    return None


def _flash(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, is_causal: bool = False, attn_mask: Tensor | None = None
) -> tuple[Tensor, ...]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, _expand_to_heads(k, q), _expand_to_heads(v, q), 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )


def _flash_backward(
    grad: Tensor, state: TileState, scale: float, *, is_causal: bool = False, attn_mask: Tensor | None = None
) -> tuple[Tensor, ...]:
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad,
        state.q,
        _expand_to_heads(state.k, state.q),
        _expand_to_heads(state.v, state.q),
        state.output,
        _replace_infinite(state.lse),
        0.0,
        is_causal,
        attn_mask=attn_mask,
        scale=scale,
    )
    dtype = compute_dtype(state.k)
    return dq, dk.sum(1, dtype=dtype), dv.sum(1, dtype=dtype)


def _scores(q_NhCD: Tensor, k_NSD: Tensor, bias: Tensor, scale: float) -> Tensor:
    dtype = compute_dtype(q_NhCD)
    scores = _matmul_per_group(q_NhCD.to(dtype), k_NSD.to(dtype).transpose(1, 2))
    return scores.mul_(scale).add_(bias)


def _matmul_per_group(left_NhCX: Tensor, right_NXY: Tensor) -> Tensor:
    """Multiply the queries of all heads by the matrix of their group, with one matrix product per group."""
    heads, queries = left_NhCX.shape[1:3]
    return (left_NhCX.flatten(1, 2) @ right_NXY).unflatten(1, (heads, queries))


def _replace_infinite(values: Tensor) -> Tensor:
    return values.masked_fill(values == -torch.inf, 0.0)


def _expand_to_heads(k_NSD: Tensor, q_NhCD: Tensor) -> Tensor:
    return k_NSD.unsqueeze(1).expand(-1, q_NhCD.shape[1], -1, -1)


KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (EagerKernel(), FusedCpuKernel(), BlockwiseKernel())}
