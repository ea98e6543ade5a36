"""The selected branch as a Python loop over tokens, a slow baseline for `--impl per_token`.

Like the paper's formulas and many first implementations, it concatenates the blocks of each query and attends to them
with separate operations. The result is correct, but autograd gets about twenty nodes per token, group and layer. A step
then takes minutes instead of seconds, with a busy CPU and an idle GPU, and looks like a hang.

Dimensions: B batch, H query heads, G groups, h heads of a group, T queries, D key width, E value width, n selected
blocks per query.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .backends import Starts
from .packed import apply_per_sequence

NAME = "per_token"


class PerTokenLoop:
    """An implementation of attention to the selected blocks as a Python loop over tokens."""

    name = "per_token"

    def attend_selected(
        self, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, *, select_len: int, scale: float, starts: Starts = None
    ) -> tuple[Tensor, None]:
        def attend_one_sequence(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> tuple[Tensor]:
            return (per_token(q, k, v, indices, select_len=select_len, scale=scale),)

        (output,) = apply_per_sequence(attend_one_sequence, (q, starts), (k, starts), (v, starts), (indices, starts))
        return output, None


def per_token(
    q_BHTD: Tensor, k_BGTD: Tensor, v_BGTE: Tensor, indices_BGTn: Tensor, *, select_len: int, scale: float
) -> Tensor:
    """Return the output [B, H, T, E] of attention to the selected blocks.

    A query whose indices are all -1 gets 0. The number of autograd nodes grows linearly with T.
    """
    q_BGhTD = q_BHTD.unflatten(1, (k_BGTD.shape[1], -1))
    # `split` is one autograd node for all blocks. A slice per query would allocate a full-length gradient per query.
    k_blocks, v_blocks = k_BGTD.split(select_len, 2), v_BGTE.split(select_len, 2)
    rows = [
        [
            _row(q_BGhTD[b, g], [k[b, g] for k in k_blocks], [v[b, g] for v in v_blocks], indices_Tn, select_len, scale)
            for g, indices_Tn in enumerate(indices_GTn)
        ]
        for b, indices_GTn in enumerate(indices_BGTn.tolist())
    ]
    return torch.stack([torch.stack(list(outputs_of_groups)) for outputs_of_groups in rows]).flatten(1, 2)


def _row(
    q_hTD: Tensor,
    k_blocks: Sequence[Tensor],
    v_blocks: Sequence[Tensor],
    indices_Tn: Sequence[Sequence[int]],
    select_len: int,
    scale: float,
) -> Tensor:
    """Return the output [h, T, E] for one sequence and group."""
    if not indices_Tn:  # no token: return an empty output that is still connected to the graph
        return q_hTD @ k_blocks[0].t() @ v_blocks[0]
    outputs = []
    for token, slots in enumerate(indices_Tn):
        lengths_by_block = list(_visible_lengths(slots, token, select_len))
        keys = torch.cat([k_blocks[block][:length] for block, length in lengths_by_block])
        values = torch.cat([v_blocks[block][:length] for block, length in lengths_by_block])
        weights = torch.softmax(q_hTD[:, token] @ keys.t() * scale, -1)
        outputs.append(weights @ values)
    return torch.stack(outputs, 1)


def _visible_lengths(slots: Sequence[int], token: int, select_len: int) -> Iterator[tuple[int, int]]:
    """Yield each selected block with the number of its keys that `token` may attend to.

    If no block is selected, yield block 0 with 0 keys.
    """
    blocks = sorted({block for block in slots if 0 <= block * select_len <= token})
    for block in blocks or (0,):
        yield block, min(select_len, token + 1 - block * select_len) if blocks else 0
