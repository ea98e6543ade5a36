"""Attention of one tile of queries: how they are cut into tiles, and what computes one.

Two implementations: plain torch anywhere, and torch's fused kernel on a CPU.

Dimensions: N batch x groups, h query heads of a group, C queries of a tile, S keys, D key width, E value width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

# Elements of the largest intermediate of a tile. It bounds memory whatever the sequence length is.
TILE_ELEMENTS = 1 << 22
SHORTEST_TILE = 16


@dataclass(frozen=True, kw_only=True)
class TileState:
    """The tensors of one tile that the backward pass starts from."""

    q: Tensor  # [N, h, C, D]
    k: Tensor  # [N, S, D]
    v: Tensor  # [N, S, E]
    output: Tensor  # [N, h, C, E]
    lse: Tensor  # [N, h, C]


class Kernel(Protocol):
    """Attention of one tile. `bias` is 0 or minus infinity, [N or 1, 1, C, S]; a row without any 0 gives 0."""

    name: str

    def elements_per_query(self, rows: int, heads: int, keys: int) -> int:
        """Elements per query of the largest intermediate."""

    def forward(self, q_NhCD: Tensor, k_NSD: Tensor, v_NSE: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, ...]:
        """Output [N, h, C, E] and log-sum-exp [N, h, C], any finite number or minus infinity for a blind row."""

    def backward(self, grad: Tensor, state: TileState, bias: Tensor, scale: float) -> tuple[Tensor, ...]:
        """Gradients of queries [N, h, C, D], keys [N, S, D] and values [N, S, E]."""


def tiles(queries: int, elements_per_query: int, longest: int) -> Iterator[tuple[int, int]]:
    """Query ranges whose largest intermediate stays near TILE_ELEMENTS."""
    length = max(SHORTEST_TILE, min(longest, TILE_ELEMENTS // max(1, elements_per_query)))
    for start in range(0, queries, length):
        yield start, min(start + length, queries)


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Half types are accumulated in float32; float32 and float64 stay as they are."""
    return tensor.dtype if tensor.dtype in (torch.float32, torch.float64) else torch.float32


def fully_masked_output(q_NhTD: Tensor, v_NSE: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of queries that see no key: 0, and minus infinity."""
    shape = q_NhTD.shape[:3]
    lse_NhT = q_NhTD.new_full(shape, -torch.inf, dtype=compute_dtype(q_NhTD))
    return q_NhTD.new_zeros((*shape, v_NSE.shape[-1])), lse_NhT


def autocast_disabled(tensor: Tensor) -> AbstractContextManager[Any]:
    """Without autocast: what is computed here says its dtypes itself."""
    return torch.autocast(tensor.device.type, enabled=False)


class EagerKernel:
    """Matrix products and a softmax in plain torch. Runs on every device and in every dtype."""

    name = "eager"

    def elements_per_query(self, rows: int, heads: int, keys: int) -> int:
        return rows * heads * keys

    def forward(self, q_NhCD: Tensor, k_NSD: Tensor, v_NSE: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, ...]:
        scores_NhCS = _scores(q_NhCD, k_NSD, bias, scale)
        # A row without any key has the maximum -inf; exp(-inf - 0) = 0 keeps it free of NaN.
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
    """torch's flash attention for CPUs, which keeps no scores: about four times as fast as the plain one.

    The operators are private to torch; `fused_cpu_reason` says whether this torch has them.
    """

    name = "fused_cpu"

    def elements_per_query(self, rows: int, _heads: int, keys: int) -> int:
        return rows * keys  # the mask is the largest tensor; the heads of a group share it

    def forward(self, q_NhCD: Tensor, k_NSD: Tensor, v_NSE: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, ...]:
        return _flash(q_NhCD, k_NSD, v_NSE, scale, attn_mask=bias)

    def backward(self, grad: Tensor, state: TileState, bias: Tensor, scale: float) -> tuple[Tensor, ...]:
        return _flash_backward(grad, state, scale, attn_mask=bias)


class BlockwiseKernel(FusedCpuKernel):
    """The same in two branches; the selected one goes block by block of keys (blockwise.py)."""

    name = "blockwise"


def causal_forward(q_NhTD: Tensor, k_NTD: Tensor, v_NTE: Tensor, scale: float) -> tuple[Tensor, ...]:
    """Output [N, h, T, E] and log-sum-exp [N, h, T] of plain causal attention by torch's flash attention for CPUs."""
    return _flash(q_NhTD, k_NTD, v_NTE, scale, is_causal=True)


def causal_backward(grad: Tensor, state: TileState, scale: float) -> tuple[Tensor, ...]:
    """Gradients of queries, keys and values of the same."""
    return _flash_backward(grad, state, scale, is_causal=True)


def fused_cpu_reason(q: Tensor, v: Tensor) -> str | None:
    """Why the fused CPU kernel cannot take these tensors; None if it can."""
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
    """One matrix product per group: its heads' queries are rows of the same matrix."""
    heads, queries = left_NhCX.shape[1:3]
    return (left_NhCX.flatten(1, 2) @ right_NXY).unflatten(1, (heads, queries))


def _replace_infinite(values: Tensor) -> Tensor:
    return values.masked_fill(values == -torch.inf, 0.0)


def _expand_to_heads(k_NSD: Tensor, q_NhCD: Tensor) -> Tensor:
    """The group's keys for each of its heads, without a copy."""
    return k_NSD.unsqueeze(1).expand(-1, q_NhCD.shape[1], -1, -1)


KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (EagerKernel(), FusedCpuKernel(), BlockwiseKernel())}
