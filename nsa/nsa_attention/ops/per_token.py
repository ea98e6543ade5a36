"""The selected branch as a Python loop over tokens: the slow form, that others are measured against.

It is how the branch reads off the paper, and how a first implementation often looks: for each query its blocks are put
together and attended to by operations of its own. The result is right. But autograd gets a score of nodes for each
token and group in each layer, so that a step takes minutes where others take seconds, at full CPU and an idle GPU, and
from outside looks like a hang. Nothing chooses it but its own name.

Dimensions: B batch, H query heads, G groups, h heads of a group, T queries, D key width, E value width, n places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .backends import Starts
from .packed import apply_per_sequence

NAME = "per_token"


class PerTokenLoop:
    """What computes the selected branch, and no other: without log-sum-exp, which nothing asks of it."""

    name = "per_token"

    def attend_selected(
        self, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, *, select_len: int, scale: float, starts: Starts = None
    ) -> tuple[Tensor, None]:
        def attend_one_sequence(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> tuple[Tensor]:
            return (per_token(q, k, v, indices, select_len=select_len, scale=scale),)

        if starts is None:
            return attend_one_sequence(q, k, v, indices)[0], None
        (output,) = apply_per_sequence(attend_one_sequence, (q, starts), (k, starts), (v, starts), (indices, starts))
        return output, None


def per_token(
    q_BHTD: Tensor, k_BGTD: Tensor, v_BGTE: Tensor, indices_BGTn: Tensor, *, select_len: int, scale: float
) -> Tensor:
    """Output [B, H, T, E]; a row of nothing but -1 gives 0. Work, memory and autograd nodes grow with T."""
    q_BGhTD = q_BHTD.unflatten(1, (k_BGTD.shape[1], -1))
    # One node for all blocks: a slice of the whole for each query would fill a gradient as long as the whole.
    k_blocks, v_blocks = k_BGTD.split(select_len, 2), v_BGTE.split(select_len, 2)
    rows = [
        [
            _row(q_BGhTD[b, g], [k[b, g] for k in k_blocks], [v[b, g] for v in v_blocks], chosen, select_len, scale)
            for g, chosen in enumerate(of_sequence)
        ]
        for b, of_sequence in enumerate(indices_BGTn.tolist())
    ]
    return torch.stack([torch.stack(list(of_groups)) for of_groups in rows]).flatten(1, 2)


def _row(
    q_hTD: Tensor,
    k_blocks: Sequence[Tensor],
    v_blocks: Sequence[Tensor],
    chosen: Sequence[Sequence[int]],
    select_len: int,
    scale: float,
) -> Tensor:
    """Output [h, T, E] of one group of one sequence."""
    if not chosen:  # no token: nothing to stack, and yet connected to the graph
        return q_hTD @ k_blocks[0].t() @ v_blocks[0]
    outputs = []
    for token, places in enumerate(chosen):
        seen = list(_seen(places, token, select_len))
        keys = torch.cat([k_blocks[block][:length] for block, length in seen])
        values = torch.cat([v_blocks[block][:length] for block, length in seen])
        weights = torch.softmax(q_hTD[:, token] @ keys.t() * scale, -1)
        outputs.append(weights @ values)
    return torch.stack(outputs, 1)


def _seen(places: Sequence[int], token: int, select_len: int) -> Iterator[tuple[int, int]]:
    """Each block with how many of its keys are not after the token; of a query that sees nothing no key of one."""
    blocks = sorted({block for block in places if 0 <= block * select_len <= token})
    for block in blocks or (0,):
        yield block, min(select_len, token + 1 - block * select_len) if blocks else 0
