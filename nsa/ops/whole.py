"""The whole operation on projected tensors: three branches and their gates, for a layer of one's own.

Dimensions: B batch, H query heads, G groups, T tokens, S compressed blocks, D key width, E value width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..config import Implementation
from .dispatch import implementation_for, implementation_of_selected, implementation_of_sliding
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

    Queries and keys are rotated already. With `cu_seqlens`, int32 [sequences + 1] and a batch of one, sequences follow
    each other in the row and do not see each other; their complete compressed blocks follow each other in the same way.
    Raises ValueError for tensors that do not fit together, MissingImplementationError for what cannot run here.
    """
    _check(q_BHTD, branches, gates_cBHT, cu_seqlens)
    backend, _ = implementation_for(implementation, q_BHTD, branches.selected[0], branches.selected[1])
    scale, starts = selection.scale, cu_seqlens
    compressed, lse_BHT = backend.compressed(
        q_BHTD,
        *branches.compressed,
        block_len=selection.block_len,
        block_stride=selection.block_stride,
        scale=scale,
        starts=starts,
    )
    indices = backend.select(q_BHTD.detach(), branches.compressed[0].detach(), lse_BHT, selection, starts=starts)
    places, select_len = selection.select_count, selection.select_len
    reader, _ = implementation_of_selected(implementation, q_BHTD, *branches.selected, places, select_len)
    selected, _ = reader.selected(
        q_BHTD, *branches.selected, indices, select_len=selection.select_len, scale=scale, starts=starts
    )
    slider, _ = implementation_of_sliding(implementation, q_BHTD, *branches.sliding)
    sliding, _ = slider.sliding(q_BHTD, *branches.sliding, window=window, scale=scale, starts=starts)
    return backend.mixed((compressed, selected, sliding), gates_cBHT)


def _check(q_BHTD: Tensor, branches: KeysAndValues, gates_cBHT: Tensor, cu_seqlens: Tensor | None) -> None:
    batch, heads, tokens, width = q_BHTD.shape
    problems = [*_unfit(batch, heads, tokens, width, branches)]
    if gates_cBHT.shape != (3, batch, heads, tokens):
        problems.append(f"gates: expected {(3, batch, heads, tokens)}, got {tuple(gates_cBHT.shape)}")
    if cu_seqlens is not None and batch != 1:
        problems.append(f"cu_seqlens: packed sequences lie in one row, and the batch is {batch}")
    if problems:
        raise ValueError("; ".join(problems))


def _unfit(batch: int, heads: int, tokens: int, width: int, branches: KeysAndValues) -> Sequence[str]:
    problems = []
    groups = branches.selected[0].shape[1]
    for name in ("compressed", "selected", "sliding"):
        k, v = getattr(branches, name)
        length = k.shape[2] if name == "compressed" else tokens
        if k.shape != (batch, groups, length, width):
            problems.append(f"{name} keys: expected {(batch, groups, length, width)}, got {tuple(k.shape)}")
        if v.shape[:3] != (batch, groups, length):
            problems.append(f"{name} values: expected {(batch, groups, length)} and a width, got {tuple(v.shape)}")
    if groups and heads % groups:
        problems.append(f"{heads} query heads do not share {groups} key heads evenly")
    return problems
