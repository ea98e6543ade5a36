"""The selected branch: each query sees the tokens of the blocks chosen for it, up to itself (paper, eq. 11 and 12)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.ops.tiles import Kernel, attend


@dataclass(frozen=True, kw_only=True)
class ChosenBlocks:
    """Query t sees token s when s <= t and block s // l' stands in its row of indices; -1 is an empty place."""

    select_len: int

    def keys(self, _start: int, stop: int) -> tuple[int, int]:
        return 0, stop

    def allowed(self, start: int, stop: int, indices: Tensor | None, device: torch.device) -> Tensor:
        assert indices is not None, "the selected branch always has indices"
        blocks = -(-stop // self.select_len)
        chosen_NCn = indices[:, start:stop].long()
        # Empty places and blocks after this tile write to a column of their own. A block named twice is one True.
        columns = torch.where((chosen_NCn < 0) | (chosen_NCn >= blocks), blocks, chosen_NCn)
        member = torch.zeros(*columns.shape[:2], blocks + 1, dtype=torch.bool, device=device)
        member.scatter_(2, columns, True)
        tokens = member[..., :blocks].repeat_interleave(self.select_len, dim=2)[..., :stop]
        causal = torch.arange(stop, device=device) <= torch.arange(start, stop, device=device)[:, None]
        return (tokens & causal).unsqueeze(1)


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

    Work grows with T squared, memory with T.
    """
    pattern = ChosenBlocks(select_len=select_len)
    return attend(q_BHTD, k_BGTD, v_BGTE, pattern=pattern, kernel=kernel, scale=scale, indices_BGTn=indices_BGTn)
