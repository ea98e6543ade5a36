"""The sliding branch: each query sees the last w tokens, itself included."""

from __future__ import annotations

from torch import Tensor

from nsa.ops.attend import attend
from nsa.ops.tiles import Kernel


def sliding_attention(
    q_BHTD: Tensor, k_BGTD: Tensor, v_BGTE: Tensor, *, window: int, scale: float, kernel: Kernel
) -> tuple[Tensor, Tensor]:
    """Output [B, H, T, E] and log-sum-exp [B, H, T]."""
    return attend(q_BHTD, k_BGTD, v_BGTE, pattern="sliding", lengths=[window], kernel=kernel, scale=scale)
