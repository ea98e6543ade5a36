"""A backend that runs the Triton kernels."""

from __future__ import annotations

from torch import Tensor

from ..rotary import ROTATIONS
from ..selection import RANKERS, Selection, select_blocks
from .importance import select_by_importance
from .rotary import rotate_rows
from .selected import fused_selected_attention
from .spanned import cached_block_spans, cached_window_spans, spanned_attention


class FusedBackend:
    """A backend that runs the Triton kernels on a GPU."""

    name = "triton"

    def attend_compressed(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        block_len: int,
        block_stride: int,
        scale: float,
        starts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        return spanned_attention(q, k, v, cached_block_spans(q, k, block_len, block_stride, starts), scale)

    def select(
        self,
        q: Tensor,
        k: Tensor,
        lse: Tensor | None,
        selection: Selection,
        memo_number: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        return select_blocks(q, k, selection, memo_number, lse_BHT=lse, starts=starts, ranked_by=self.name)

    def attend_selected(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        indices: Tensor,
        *,
        select_len: int,
        scale: float,
        starts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        return fused_selected_attention(q, k, v, indices, select_len=select_len, scale=scale, starts=starts)

    def attend_sliding(
        self, q: Tensor, k: Tensor, v: Tensor, *, window: int, scale: float, starts: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return spanned_attention(q, k, v, cached_window_spans(q, window, starts), scale)


def _select_with_fused_kernel(
    q: Tensor, k: Tensor, selection: Selection, lse: Tensor | None, starts: Tensor | None
) -> Tensor:
    """Return the indices of the selected blocks. If `lse` is None, it is computed first."""
    if lse is None:
        lengths = {"block_len": selection.block_len, "block_stride": selection.block_stride}
        _, lse = FusedBackend().attend_compressed(q, k, k, **lengths, scale=selection.scale, starts=starts)
    return select_by_importance(q, k, lse, selection, starts=starts)


RANKERS[FusedBackend.name] = _select_with_fused_kernel
ROTATIONS[FusedBackend.name] = rotate_rows
