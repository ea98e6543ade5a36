"""What a gate makes of the gradients of its branch, without a gradient of the branch's output being written.

The sum is y = g1 o1 + g2 o2 + g3 o3 (paper, eq. 5), and of its gradient dy a branch's output gets g dy. With sum(o dy)
of each row, which is the gradient of its gate, the gradients of the branch's scores and values are

    dS = P (g dy v - g sum(o dy)) = (g P) (dy v - sum(o dy))        dV = (g P) dy

So kernels read dy itself, and the gate goes into P, where it costs nothing: P is a power whose exponent has the row's
log-sum-exp taken off, and off that the logarithm of |g|. A gate of 0 makes it infinite, and all of its row 0. Whether a
gate is below 0 the host does not know and would have to wait for. Kernels that hold rows turn their dy around, once;
for those that load rows in their loop the sign stands in the last bit of the row's sum(o dy), where it is worth less
than a rounding, and they turn P around.

Dimensions: c branches, B batch, H query heads, T tokens, D key width; inside a kernel R rows, E value width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .device import as_exponent
from .launch import empty_token_major

_INFINITE = tl.constexpr(float("inf"))


@dataclass(frozen=True, kw_only=True)
class GatedBranch:
    """One branch in the backward pass of all of them: its gate, and where it leaves what they have in common."""

    number: int  # of its gate
    gates_cBHT: Tensor
    dgates_cBHT: Tensor  # contiguous
    dq_BHTD: Tensor
    adds_to_dq: bool  # to the gradient of the queries, which another branch has written
    needs_key_grads: bool  # or their values; else no gradient of theirs is computed


def gate_arguments(branch: GatedBranch | None) -> tuple[Any, ...]:
    """For a kernel, with their strides; without any nothing is gated."""
    return (None, 0, 0, 0, 0) if branch is None else (branch.gates_cBHT, *branch.gates_cBHT.stride())


def query_gradient_buffer(q_BHTD: Tensor, branch: GatedBranch | None) -> tuple[Tensor, bool]:
    """Where the gradient of the queries is left, and whether something stands there already."""
    return (
        (empty_token_major(q_BHTD, q_BHTD.shape[-1]), False) if branch is None else (branch.dq_BHTD, branch.adds_to_dq)
    )


def empty_gradients(*tensors: Tensor) -> tuple[Tensor, ...]:
    """In place of gradients that nobody wants: an operator has no other word for it."""
    return tuple(tensor.new_empty(0) for tensor in tensors)


def tuning_name(name: str, branch: GatedBranch | None) -> str:
    """What tile sizes are settled for: with gates it is another kernel of the same code."""
    return name if branch is None else f"{name}, gated"


@triton.jit
def row_statistics(
    b_o, b_do, b_lse, p_g, s_gc, s_gb, s_gh, s_gt, p_dg, i_b, o_head, o_token, o_dg, branch, m_row,
    EXACT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Of rows [R] what their exponents are relative to, and delta as their own loop and as the keys' kernel takes it.

    And their upstream gradients [R, E] with the sign of the gate. `o_dg` is where the gradient of a row's gate belongs.
    """
    # All of E at once: a kernel that split the values would subtract delta once for each part.
    b_delta = tl.sum(b_o.to(ACC) * b_do.to(ACC), 1)
    b_lse = as_exponent(b_lse, EXACT)
    # Relative to infinity every share is 0, as it is where a row sees nothing.
    b_lse = tl.where(b_lse == -_INFINITE, _INFINITE, b_lse)
    b_signed_delta = b_delta
    if p_g is not None:
        p_gate = p_g + tl.cast(branch, tl.int64) * s_gc + i_b * s_gb + o_head * s_gh + o_token * s_gt
        b_gate = tl.load(p_gate, mask=m_row, other=1.0).to(ACC)
        tl.store(p_dg + o_dg, b_delta.to(p_dg.dtype.element_ty), mask=m_row)
        # Of a gate of 0 the logarithm is minus infinity.
        if EXACT:
            b_lse -= tl.log(tl.abs(b_gate))
        else:
            b_lse -= tl.log2(tl.abs(b_gate))
        m_below = b_gate < 0.0
        b_signed_delta = encode_sign(b_delta, m_below)
        b_delta = tl.where(m_below, -b_delta, b_delta)
        b_do = tl.where(m_below[:, None], -b_do, b_do)
    return b_lse, b_delta, b_signed_delta, b_do


@triton.jit
def _bits_of(b_delta):
    if b_delta.dtype == tl.float64:
        b_bits = b_delta.to(tl.int64, bitcast=True)
    else:
        b_bits = b_delta.to(tl.int32, bitcast=True)
    return b_bits


@triton.jit
def encode_sign(b_delta, m_below):
    """The last bit says whether the gate is below 0."""
    b_bits = _bits_of(b_delta)
    return ((b_bits & -2) | m_below.to(b_bits.dtype)).to(b_delta.dtype, bitcast=True)


@triton.jit
def with_gate_sign(b_p, b_delta):
    """Shares [K, R] with the sign of their row's gate."""
    m_below = (_bits_of(b_delta) & 1) != 0
    return tl.where(m_below[None, :], -b_p, b_p)
