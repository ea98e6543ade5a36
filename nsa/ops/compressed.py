"""The compressed branch: attention over one key per block of l tokens, a block every d tokens (paper, eq. 7)."""

from __future__ import annotations

from torch import Tensor

from nsa.ops.attend import attend
from nsa.ops.tiles import Kernel


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
    lengths = [block_len, block_stride]
    return attend(q_BHTD, k_BGSD, v_BGSE, pattern="compressed", lengths=lengths, kernel=kernel, scale=scale)
