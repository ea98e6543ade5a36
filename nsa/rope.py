"""Rotary positions: queries and keys turned by an angle that grows with their position."""

from __future__ import annotations

import torch
from torch import Tensor

BASE = 10000.0


def frequencies(width: int) -> Tensor:
    """Angle per token of each pair of dimensions, [D/2]."""
    return torch.as_tensor(BASE ** (-torch.arange(0, width, 2, dtype=torch.float64) / width), dtype=torch.float32)


def angles(frequencies: Tensor, tokens: int) -> Tensor:
    """Angles [T, D/2] of the positions 0 to T - 1."""
    positions = torch.arange(tokens, device=frequencies.device, dtype=frequencies.dtype)
    return positions[:, None] * frequencies


def rotate(x_BHTD: Tensor, angles_Tp: Tensor) -> Tensor:
    """`x` with its two halves turned as pairs; row t by angles[t]. Keeps the dtype of `x`."""
    cosine, sine = angles_Tp.cos().to(x_BHTD.dtype), angles_Tp.sin().to(x_BHTD.dtype)
    first, second = x_BHTD.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)
