"""Native sparse attention on projected tensors: the operation behind `nsa_func`.

Dimensions: c branches, B batch, H query heads, G groups, T tokens, S compressed blocks, D key width, E value width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import Implementation
from .dispatch import combined_operator, implementation_for, implementation_for_selected, implementation_for_sliding
from .mixing import gated_sum
from .selection import Selection


@dataclass(frozen=True, kw_only=True)
class KeysAndValues:
    """The keys and values of each attention branch, as pairs of tensors.

    The compressed branch has keys [B, G, S, D] and values [B, G, S, E], the others have [B, G, T, D] and [B, G, T, E].
    """

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
    deterministic: bool = True,
) -> Tensor:
    """Return the output [B, T, H, E] of native sparse attention: the gated sum of its branches.

    The arguments are not checked: `nsa_func` does that for callers outside this package. Queries and keys must already
    have rotary embeddings; tensors may have any strides. Gates are in the order compressed, selected, sliding and may
    have a different float dtype; the output has the dtype of the branches.

    `cu_seqlens` (int32 [sequences + 1], batch 1) packs several sequences into the row. They do not attend to each
    other, and their complete compressed blocks are concatenated in the same order.

    Raises MissingImplementationError if `implementation` cannot run on these tensors. Memory grows linearly with T
    (quadratically with DENSE); compressed scores take T * S products.
    """
    pairs = (branches.compressed, branches.selected, branches.sliding)
    starts = cu_seqlens
    places, select_len, scale = selection.select_count, selection.select_len, selection.scale
    # Choose all three before computing anything, so that a missing implementation is an error at once.
    backend, _ = implementation_for(implementation, q_BHTD, *branches.compressed)
    reader, _ = implementation_for_selected(implementation, q_BHTD, *branches.selected, places, select_len)
    slider, _ = implementation_for_sliding(implementation, q_BHTD, *branches.sliding)
    if not q_BHTD.numel():
        return _empty_output(q_BHTD, pairs, gates_cBHT)
    if (combined := combined_operator(implementation, q_BHTD, *pairs)) is not None:
        options = {"window": window, "starts": starts, "deterministic": deterministic}
        return combined.attend(q_BHTD, pairs, gates_cBHT, selection, **options)[0]
    lengths = {"block_len": selection.block_len, "block_stride": selection.block_stride}
    compressed_BHTE, lse_BHT = backend.attend_compressed(
        q_BHTD, *branches.compressed, **lengths, scale=scale, starts=starts
    )
    indices = backend.select(q_BHTD.detach(), branches.compressed[0].detach(), lse_BHT, selection, starts=starts)
    selected_BHTE, _ = reader.attend_selected(
        q_BHTD, *branches.selected, indices, select_len=select_len, scale=scale, starts=starts
    )
    sliding_BHTE, _ = slider.attend_sliding(q_BHTD, *branches.sliding, window=window, scale=scale, starts=starts)
    return gated_sum((compressed_BHTE, selected_BHTE, sliding_BHTE), gates_cBHT)


def _empty_output(q_BHTD: Tensor, pairs: tuple[tuple[Tensor, Tensor], ...], gates_cBHT: Tensor) -> Tensor:
    """Return the output, of shape [B, T, H, E], for empty inputs."""
    # The output is connected to the graph, so that every input gets a gradient.
    batch, heads, tokens, _ = q_BHTD.shape
    nothing = torch.stack([tensor.sum().to(q_BHTD.dtype) for pair in ((q_BHTD, gates_cBHT), *pairs) for tensor in pair])
    return nothing.sum().expand(batch, tokens, heads, pairs[1][1].shape[3])
