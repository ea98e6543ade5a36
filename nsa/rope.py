"""Rotary positions: queries and keys turned by an angle that grows with their position."""

from __future__ import annotations

import torch
from torch import Tensor

BASE = 10000.0


def frequencies(width: int) -> Tensor:
    """Angle per token of each pair of dimensions, [D/2]."""
    return torch.as_tensor(BASE ** (-torch.arange(0, width, 2, dtype=torch.float64) / width), dtype=torch.float32)


def turns(frequencies: Tensor, tokens: int) -> Tensor:
    """Cosine and sine, [2, T, D/2], of the angles of the positions 0 to T - 1."""
    positions = torch.arange(tokens, device=frequencies.device, dtype=frequencies.dtype)
    angles = positions[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x_BHTD: Tensor, turns_2Tp: Tensor) -> Tensor:
    """`x` with its two halves turned as pairs; row t by turns[:, t]. Keeps the dtype of `x`."""
    cosine, sine = turns_2Tp.to(x_BHTD.dtype)
    first, second = x_BHTD.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)
