"""The sliding branch: each query sees the last w tokens, itself included."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from nsa.ops.attend import attend
from nsa.ops.tiles import Kernel


def sliding_attention(
    q_BHTD: Tensor, k_BGTD: Tensor, v_BGTE: Tensor, *, window: int, scale: float, kernel: Kernel
) -> tuple[Tensor, Tensor]:
    """Output [B, H, T, E] and log-sum-exp [B, H, T]."""
    return attend(q_BHTD, k_BGTD, v_BGTE, pattern="sliding", lengths=[window], kernel=kernel, scale=scale)


def flash_sliding_attention(
    q_BHTD: Tensor, k_BGTD: Tensor, v_BGTE: Tensor, *, window: int, scale: float, flash: Callable[..., Tensor]
) -> Tensor:
    """Output [B, H, T, E] by flash-attn, whose window counts the keys to the left of the query: w - 1."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q_BHTD, k_BGTD, v_BGTE))
    return flash(q, k, v, softmax_scale=scale, causal=True, window_size=(window - 1, 0)).transpose(1, 2)
