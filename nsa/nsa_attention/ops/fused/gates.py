"""The use of gates in the backward pass of an attention branch.

The gradient of the branch's output is never written to memory. The gated sum is y = g1 o1 + g2 o2 + g3 o3 (NSA paper,
eq. 5). If y has the gradient dy, the output of a branch has the gradient g dy. The gradient of a row's gate is sum(o
dy). The gradients of the branch's scores S and values V are

    dS = P (g dy v - g sum(o dy)) = (g P) (dy v - sum(o dy))        dV = (g P) dy

So the kernels read dy directly and multiply P by the gate, at no cost: P = exp(S - lse), and g P = exp(S - (lse -
log|g|)) up to the sign. For a gate of 0 the subtracted value is infinite, and the whole row becomes 0.

The host does not know the signs of the gates and would have to wait for them. Kernels that hold query rows negate dy
once for negative gates. Kernels that load query rows in their loop read the sign from the last bit of the row's sum(o
dy), where it changes less than rounding does, and negate P.

With atomics (`deterministic=False`), one kernel each computes all gradients of the compressed and of the sliding
branch. These kernels add to a sum of the gradients of the queries in float32 (float64 for float64). The sum is without
the scale, because multiplying each addend would take instructions in the loop. The selected branch runs first and
writes the sum, so nothing has to set it to zero. At the end, the sum is multiplied by the scale and rounded once.

Dimensions: c branches, B batch, H query heads, T tokens, D key width; inside a kernel R query rows, K keys, E value
width.
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
    """The gate of one branch, and the gradients that all branches share in the backward pass."""

    number: int  # index of its gate in the first dimension
    gates_cBHT: Tensor
    dgates_cBHT: Tensor  # gradient of the gates, contiguous
    dq_BHTD: Tensor  # gradient of the queries, summed over the branches
    adds_to_dq: bool  # whether to add to `dq_BHTD`, because another branch has written it already
    needs_key_grads: bool  # whether to compute gradients of keys and values
    is_float_sum: bool = False  # whether `dq_BHTD` is the sum for atomics, without the scale


def gate_arguments(branch: GatedBranch | None) -> tuple[Any, ...]:
    """Return the gates and their strides as kernel arguments."""
    return (None, 0, 0, 0, 0) if branch is None else (branch.gates_cBHT, *branch.gates_cBHT.stride())


def query_gradient_buffer(q_BHTD: Tensor, branch: GatedBranch | None) -> tuple[Tensor, bool]:
    """Return a tensor for the gradient of the queries, and whether kernels should add to the values in it."""
    return (
        (empty_token_major(q_BHTD, q_BHTD.shape[-1]), False) if branch is None else (branch.dq_BHTD, branch.adds_to_dq)
    )


def query_gradient_constants(sizes: dict[str, Any], branch: GatedBranch | None) -> dict[str, Any]:
    """Return the constants of a kernel that writes or adds to the gradient of the queries."""
    return sizes | {"SCALE": 1.0} if branch is not None and branch.is_float_sum else sizes


def empty_gradients(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return an empty tensor for each gradient that is not needed, because operators cannot return None."""
    return tuple(tensor.new_empty(0) for tensor in tensors)


def tuning_name(name: str, branch: GatedBranch | None) -> str:
    """Return the name under which the tile size of kernel `name` is stored."""
    return name if branch is None else f"{name}, gated"


@triton.jit
def row_statistics(
    b_o, b_do, b_lse, p_g, s_gc, s_gb, s_gh, s_gt, p_dg, i_b, o_head, o_token, o_dg, branch, m_row,
    EXACT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Return each row's log-sum-exp, delta and upstream gradient, and store the gradient of the gates.

    The results are the value to subtract from exponents [R], delta = sum(o do) for the loop over keys [R], delta with
    the gate's sign in its last bit for the kernel of the keys [R], and `b_do` [R, E] with the sign of the gate applied.
    """
    # The sum needs all of E at once: a kernel that split the values would subtract delta once per part.
    b_delta = tl.sum(b_o.to(ACC) * b_do.to(ACC), 1)
    b_lse = as_exponent(b_lse, EXACT)
    # Rows without visible keys get inf, so that all their probabilities are 0.
    b_lse = tl.where(b_lse == -_INFINITE, _INFINITE, b_lse)
    b_signed_delta = b_delta
    if p_g is not None:
        p_gate = p_g + tl.cast(branch, tl.int64) * s_gc + i_b * s_gb + o_head * s_gh + o_token * s_gt
        b_gate = tl.load(p_gate, mask=m_row, other=1.0).to(ACC)
        tl.store(p_dg + o_dg, b_delta.to(p_dg.dtype.element_ty), mask=m_row)
        # For a gate of 0 the logarithm is -inf, and b_lse becomes inf.
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
    """Set the last bit of `b_delta` in rows whose gate is negative (`m_below`), and clear it in the others."""
    b_bits = _bits_of(b_delta)
    return ((b_bits & -2) | m_below.to(b_bits.dtype)).to(b_delta.dtype, bitcast=True)


@triton.jit
def with_gate_sign(b_p, b_delta):
    """Return the attention probabilities `b_p` [K, R], negated in rows whose gate is negative."""
    m_below = (_bits_of(b_delta) & 1) != 0
    return tl.where(m_below[None, :], -b_p, b_p)
