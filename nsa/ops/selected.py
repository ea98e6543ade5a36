"""The selected branch: each query sees the tokens of the blocks chosen for it, up to itself (paper, eq. 11 and 12)."""

from __future__ import annotations

from torch import Tensor

from nsa.ops.attend import attend
from nsa.ops.blockwise import blockwise
from nsa.ops.kernels import BlockwiseKernel
from nsa.ops.tiles import Kernel


def selected_attention(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTE: Tensor,
    indices_BGTn: Tensor,
    *,
    select_len: int,
    scale: float,
    kernel: Kernel,
) -> tuple[Tensor, Tensor]:
    """Output [B, H, T, E] and log-sum-exp [B, H, T]; a row of nothing but -1 gives 0 and -inf.

    Memory grows with T. So does the work block by block; under a mask over all keys it grows with T squared.
    """
    if kernel.name == BlockwiseKernel.name:
        return blockwise(q_BHTD, k_BGTD, v_BGTE, indices_BGTn, select_len=select_len, scale=scale)
    return attend(
        q_BHTD,
        k_BGTD,
        v_BGTE,
        pattern="selected",
        lengths=[select_len],
        kernel=kernel,
        scale=scale,
        indices_BGTn=indices_BGTn,
    )
