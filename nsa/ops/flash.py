"""The sliding branch by the flash attention of others: flash-attn, and torch's own.

Both take tokens of all sequences in one row, [tokens, heads, width], with the starts of the sequences; both count in
`window_size` the keys to the left of the query's own, so that a window of w keys is (w - 1, 0).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor

InOneRow = Callable[..., Tensor]


def flash_attn_sliding(flash_attn_varlen_func: Callable[..., Tensor]) -> InOneRow:
    """By flash-attn 2, which knows groups of query heads."""

    def attend(q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, starts: Tensor, longest: int, window: int, scale: float):
        return flash_attn_varlen_func(
            q_NHD,
            k_NGD,
            v_NGD,
            starts,
            starts,
            longest,
            longest,
            softmax_scale=scale,
            causal=True,
            window_size=(window - 1, 0),
        )

    return _in_one_row(attend)


def torch_flash_sliding(varlen_attn: Callable[..., Tensor]) -> InOneRow:
    """By torch.nn.attention.varlen, whose groups came with torch 2.12: before, keys are repeated for each head."""
    knows_groups = "enable_gqa" in inspect.signature(varlen_attn).parameters

    def attend(q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, starts: Tensor, longest: int, window: int, scale: float):
        options = {"scale": scale, "window_size": (window - 1, 0)}
        if knows_groups:
            return varlen_attn(q_NHD, k_NGD, v_NGD, starts, starts, longest, longest, enable_gqa=True, **options)
        k, v = (tensor.repeat_interleave(q_NHD.shape[1] // k_NGD.shape[1], 1) for tensor in (k_NGD, v_NGD))
        return varlen_attn(q_NHD, k, v, starts, starts, longest, longest, **options)

    return _in_one_row(attend)


def _in_one_row(attend: Callable[..., Tensor]) -> InOneRow:
    """From [B, H, T, D] to one row of tokens and back; without `starts` each sequence of the batch is one."""

    def sliding(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTE: Tensor, *, window: int, scale: float, starts: Tensor | None):
        batch, _, tokens, _ = q_BHTD.shape
        if starts is None:
            starts = torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=q_BHTD.device)
        q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (q_BHTD, k_BGTD, v_BGTE))
        output = attend(q, k, v, starts, tokens, window, scale)
        return output.unflatten(0, (batch, tokens)).transpose(1, 2)

    return sliding
