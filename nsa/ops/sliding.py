"""The sliding branch: each query sees the last w tokens, itself included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.ops.tiles import Kernel, attend


@dataclass(frozen=True, kw_only=True)
class LastTokens:
    """Query t sees keys in (t - w, t]."""

    window: int

    def keys(self, start: int, stop: int) -> tuple[int, int]:
        return max(0, start - self.window + 1), stop

    def allowed(self, start: int, stop: int, _indices: Tensor | None, device: torch.device) -> Tensor:
        queries = torch.arange(start, stop, device=device)[:, None]
        keys = torch.arange(*self.keys(start, stop), device=device)
        return ((keys <= queries) & (keys > queries - self.window))[None, None]


def sliding_attention(
    q_BHTD: Tensor, k_BGTD: Tensor, v_BGTE: Tensor, *, window: int, scale: float, kernel: Kernel
) -> tuple[Tensor, Tensor]:
    """Output [B, H, T, E] and log-sum-exp [B, H, T]."""
    return attend(q_BHTD, k_BGTD, v_BGTE, pattern=LastTokens(window=window), kernel=kernel, scale=scale)


def flash_sliding_attention(
    q_BHTD: Tensor, k_BGTD: Tensor, v_BGTE: Tensor, *, window: int, scale: float, flash: Callable[..., Tensor]
) -> Tensor:
    """Output [B, H, T, E] by flash-attn, whose window counts the keys to the left of the query: w - 1."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q_BHTD, k_BGTD, v_BGTE))
    return flash(q, k, v, softmax_scale=scale, causal=True, window_size=(window - 1, 0)).transpose(1, 2)
