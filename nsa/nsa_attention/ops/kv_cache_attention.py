"""Attention of new tokens to cached keys and values, in plain PyTorch.

Each query has its own position. A query reads T/d compressed keys. For the other branches the caller passes only the
rows that the query attends to.

Dimensions: N sequences x groups, h heads of a group, C new tokens, S keys or compressed blocks, s gathered rows, r rows
(h x C), D key width, E value width, n selected blocks per query. X is N, or 1 if all sequences have the same positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kernels import EagerKernel, autocast_disabled, compute_dtype
from .selection import EMPTY, Selection, best_blocks_from_probabilities, key_probabilities

_EAGER = EagerKernel()


def block_probabilities(q_NhCD: Tensor, k_NSD: Tensor, positions_XC: Tensor, selection: Selection) -> Tensor:
    """Return the attention probabilities of each query over the compressed keys, [N, S, h, C].

    Both the output of the compressed branch and the importance of blocks are computed from it.
    """
    block_S = torch.arange(k_NSD.shape[1], device=k_NSD.device)
    last_tokens_S = block_S * selection.block_stride + selection.block_len - 1
    visible_XSC = last_tokens_S[:, None] <= positions_XC[:, None]
    with autocast_disabled(q_NhCD):
        return key_probabilities(q_NhCD, k_NSD, visible_XSC, selection.scale)


def compressed_output(probs_NShC: Tensor, v_NSE: Tensor) -> Tensor:
    """Return the output [N, h, C, E] of attention to compressed blocks, given the attention probabilities."""
    with autocast_disabled(v_NSE):
        output_NrE = probs_NShC.flatten(2).transpose(1, 2) @ v_NSE.to(probs_NShC.dtype)
    return output_NrE.unflatten(1, probs_NShC.shape[2:]).to(v_NSE.dtype)


def selected_block_indices(probs_NShC: Tensor, positions_XC: Tensor, blocks: int, selection: Selection) -> Tensor:
    """Return the indices of the selected blocks, int32, shape [N, C, n or fewer].

    `blocks` is the number of selection blocks up to the highest position.
    """
    return best_blocks_from_probabilities(probs_NShC.sum(2), positions_XC, blocks, selection)


def tokens_of_blocks(indices_NCn: Tensor, positions_XC: Tensor, select_len: int) -> tuple[Tensor, Tensor]:
    """Return the tokens of the selected blocks and a mask of the visible tokens, each of shape [N, C, n*l']."""
    inside = torch.arange(select_len, device=indices_NCn.device)
    tokens_NCs = (indices_NCn.unsqueeze(-1) * select_len + inside).flatten(2)
    visible_NCs = (indices_NCn != EMPTY).repeat_interleave(select_len, -1) & (tokens_NCs <= positions_XC[:, :, None])
    return tokens_NCs.clamp_min(0).minimum(positions_XC[:, :, None]), visible_NCs


def masked_attention(q_NhCD: Tensor, k_NSD: Tensor, v_NSE: Tensor, visible_XCS: Tensor, scale: float) -> Tensor:
    """Return the attention output [N, h, C, E] over the visible keys."""
    bias = torch.zeros(visible_XCS.shape, dtype=compute_dtype(q_NhCD), device=q_NhCD.device)
    with autocast_disabled(q_NhCD):
        output, _ = _EAGER.forward(q_NhCD, k_NSD, v_NSE, bias.masked_fill_(~visible_XCS, -torch.inf)[:, None], scale)
    return output
