"""The whole operation on projected tensors: three branches and their gates, for a layer of one's own.

Dimensions: B batch, H query heads, G groups, T tokens, S compressed blocks, D key width, E value width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import Implementation
from .dispatch import combined_operator, implementation_for, implementation_for_selected, implementation_for_sliding
from .input_validation import validate_inputs
from .selection import Selection


@dataclass(frozen=True, kw_only=True)
class KeysAndValues:
    """A pair for each branch (paper, 3.3.3): [B, G, S, D] and [B, G, S, E], or T in place of S."""

    compressed: tuple[Tensor, Tensor]
    selected: tuple[Tensor, Tensor]
    sliding: tuple[Tensor, Tensor]


def sparse_attention(
    q_BHTD: Tensor,
    branches: KeysAndValues,
    gates_cBHT: Tensor,
    selection: Selection,
    *,
    window: int,
    implementation: Implementation = Implementation.AUTO,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Output [B, T, H, E] of native sparse attention (paper, eq. 5), gates in the order compressed, selected, sliding.

    Queries and keys are rotated already; their strides may be any. Gates may be of another float dtype: the output has
    that of the branches. With `cu_seqlens`, int32 [sequences + 1] and a batch of one, sequences follow each other in
    the row and do not see each other; their complete compressed blocks follow each other in the same way. Raises
    ValueError for what does not fit together, all of it at once, and MissingImplementationError for what cannot run
    here.
    """
    pairs = (branches.compressed, branches.selected, branches.sliding)
    starts = validate_inputs(q_BHTD, pairs, gates_cBHT, selection, window, cu_seqlens)
    places, select_len, scale = selection.select_count, selection.select_len, selection.scale
    # All three before any of them computes: what was asked for and cannot be is said at once.
    backend, around = implementation_for(implementation, q_BHTD, *branches.compressed)
    reader, reads = implementation_for_selected(implementation, q_BHTD, *branches.selected, places, select_len)
    slider, slides = implementation_for_sliding(implementation, q_BHTD, *branches.sliding)
    if not q_BHTD.numel():
        return _empty_output(q_BHTD, pairs, gates_cBHT)
    if (gated := combined_operator(around, reads, slides)) is not None:
        return gated(q_BHTD, pairs, gates_cBHT, selection, window=window, starts=starts)
    lengths = {"block_len": selection.block_len, "block_stride": selection.block_stride}
    compressed, lse_BHT = backend.attend_compressed(q_BHTD, *branches.compressed, **lengths, scale=scale, starts=starts)
    indices = backend.select(q_BHTD.detach(), branches.compressed[0].detach(), lse_BHT, selection, starts=starts)
    selected, _ = reader.attend_selected(
        q_BHTD, *branches.selected, indices, select_len=select_len, scale=scale, starts=starts
    )
    sliding, _ = slider.attend_sliding(q_BHTD, *branches.sliding, window=window, scale=scale, starts=starts)
    return backend.mix((compressed, selected, sliding), gates_cBHT)


def _empty_output(q_BHTD: Tensor, pairs: tuple[tuple[Tensor, Tensor], ...], gates_cBHT: Tensor) -> Tensor:
    """[B, T, H, E] without an element, and connected to the graph: every input gets a gradient without an element."""
    batch, heads, tokens, _ = q_BHTD.shape
    nothing = torch.stack([tensor.sum().to(q_BHTD.dtype) for pair in ((q_BHTD, gates_cBHT), *pairs) for tensor in pair])
    return nothing.sum().expand(batch, tokens, heads, pairs[1][1].shape[3])
