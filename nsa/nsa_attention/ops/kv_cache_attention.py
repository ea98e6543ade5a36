"""Attention of new tokens over what a cache keeps, in plain torch: each query is at a place of its own.

What a query reads grows with T/d, the compressed keys; of the other branches it gets the rows it sees and no more.

Dimensions: N sequences x groups, h heads of a group, C new tokens, S compressed blocks, s gathered rows, D key, E value
width, n places; X is N, or 1 where all sequences are at the same places.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kernels import EagerKernel, autocast_disabled, compute_dtype
from .selection import EMPTY, Selection, best_blocks_from_probabilities, key_probabilities

_EAGER = EagerKernel()


def block_probabilities(q_NhCD: Tensor, k_NSD: Tensor, positions_XC: Tensor, selection: Selection) -> Tensor:
    """The softmax over the compressed keys, [N, S, h, C]: output and importance both come from it."""
    block_S = torch.arange(k_NSD.shape[1], device=k_NSD.device)
    last_tokens_S = block_S * selection.block_stride + selection.block_len - 1
    visible_XSC = last_tokens_S[:, None] <= positions_XC[:, None]
    with autocast_disabled(q_NhCD):
        return key_probabilities(q_NhCD, k_NSD, visible_XSC, selection.scale)


def compressed_output(probs_NShC: Tensor, v_NSE: Tensor) -> Tensor:
    """Output [N, h, C, E] of the compressed branch, in the dtype of its values."""
    with autocast_disabled(v_NSE):
        output_NrE = probs_NShC.flatten(2).transpose(1, 2) @ v_NSE.to(probs_NShC.dtype)
    return output_NrE.unflatten(1, probs_NShC.shape[2:]).to(v_NSE.dtype)


def selected_block_indices(probs_NShC: Tensor, positions_XC: Tensor, blocks: int, selection: Selection) -> Tensor:
    """Indices [N, C, at most n] (int32); all places lie within `blocks` selection blocks."""
    return best_blocks_from_probabilities(probs_NShC.sum(2), positions_XC, blocks, selection)


def tokens_of_blocks(indices_NCn: Tensor, positions_XC: Tensor, select_len: int) -> tuple[Tensor, Tensor]:
    """The tokens of these blocks and which of them a query sees, [N, C, n*l'] each; all tokens exist."""
    inside = torch.arange(select_len, device=indices_NCn.device)
    tokens_NCs = (indices_NCn.unsqueeze(-1) * select_len + inside).flatten(2)
    visible_NCs = (indices_NCn != EMPTY).repeat_interleave(select_len, -1) & (tokens_NCs <= positions_XC[:, :, None])
    return tokens_NCs.clamp_min(0).minimum(positions_XC[:, :, None]), visible_NCs


def masked_attention(q_NhCD: Tensor, k_NSD: Tensor, v_NSE: Tensor, visible_XCS: Tensor, scale: float) -> Tensor:
    """Output [N, h, C, E]."""
    bias = torch.zeros(visible_XCS.shape, dtype=compute_dtype(q_NhCD), device=q_NhCD.device)
    with autocast_disabled(q_NhCD):
        output, _ = _EAGER.forward(q_NhCD, k_NSD, v_NSE, bias.masked_fill_(~visible_XCS, -torch.inf)[:, None], scale)
    return output
