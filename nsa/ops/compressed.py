"""The compressed branch: attention over one key per block of l tokens, a block every d tokens (paper, eq. 7)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.ops.tiles import Kernel, attend


@dataclass(frozen=True, kw_only=True)
class CompletedBlocks:
    """Query t sees block i when the block's last token i*d + l - 1 is not after t."""

    block_len: int
    block_stride: int

    def count(self, tokens: int) -> int:
        """Blocks that are complete after `tokens` tokens."""
        return max(0, (tokens - self.block_len) // self.block_stride + 1)

    def keys(self, _start: int, stop: int) -> tuple[int, int]:
        return 0, self.count(stop)

    def allowed(self, start: int, stop: int, _indices: Tensor | None, device: torch.device) -> Tensor:
        queries = torch.arange(start, stop, device=device)
        last_tokens = torch.arange(self.count(stop), device=device) * self.block_stride + self.block_len - 1
        return (last_tokens <= queries[:, None])[None, None]


def compressed_attention(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSE: Tensor,
    *,
    block_len: int,
    block_stride: int,
    scale: float,
    kernel: Kernel,
) -> tuple[Tensor, Tensor]:
    """Output [B, H, T, E] and log-sum-exp [B, H, T]; a query before the first complete block gets 0 and -inf."""
    pattern = CompletedBlocks(block_len=block_len, block_stride=block_stride)
    return attend(q_BHTD, k_BGSD, v_BGSE, pattern=pattern, kernel=kernel, scale=scale)
