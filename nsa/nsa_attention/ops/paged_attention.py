"""NSA for one new token per sequence, with keys and values in pages, in plain PyTorch.

The sequences have different lengths; their new tokens form one row. The Triton kernels in fused/paged_attention.py
compute the same from the same pages, without gathering keys and values first.

Dimensions: R new tokens, one per sequence, H query heads, G groups, h heads of a group, N = R x G, C = 1 query, p
pages, P rows of a page, S compressed blocks, s gathered rows, D key width, E value width, W either of them, c branches,
n selected blocks per query.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import Branch
from .attend import CompletedBlocks
from .kv_cache_attention import (
    block_probabilities,
    compressed_output,
    masked_attention,
    selected_block_indices,
    tokens_of_blocks,
)
from .selection import Selection

# Indices in the second dimension of the tables; the kinds of rows in nsa/nsa_attention/pages.py.
BLOCKS, TOKENS, WINDOW = range(3)


@dataclass(frozen=True, kw_only=True)
class PagedRows:
    """The cached keys and values of a layer, for the sequences that have a new token.

    They include the new token. `keys` and `values` are contiguous. Table entries for pages that a sequence does not own
    may be any valid page.
    """

    keys: Tensor  # [pages, G, P, D]
    values: Tensor  # [pages, G, P, E]
    tables: Tensor  # [R, 3, columns] int32
    lengths: Tensor  # [R] int32, tokens of each sequence, at least 1
    longest: int  # the largest length, known to the host


@dataclass(frozen=True, kw_only=True)
class PagedAttentionConfig:
    """The parameters that determine which cached tokens and blocks a new token attends to."""

    selection: Selection
    window: int
    branches: tuple[Branch, ...]

    @property
    def ranks_blocks(self) -> bool:
        """Whether the layer has a selected branch, which needs the blocks to be ranked."""
        return Branch.SEL in self.branches

    def blocks(self, tokens: int) -> int:
        """Return the number of complete compressed blocks in `tokens` tokens."""
        return CompletedBlocks(self.selection.block_len, self.selection.block_stride).count(tokens)


def outputs_of_branches(q_1HRD: Tensor, rows: PagedRows, config: PagedAttentionConfig) -> list[Tensor]:
    """Return the output [1, H, R, E] of each branch of the layer."""
    groups = rows.keys.shape[1]
    q_NhCD = q_1HRD[0].unflatten(0, (groups, -1)).permute(2, 0, 1, 3).flatten(0, 1).unsqueeze(2)
    positions_N1 = (rows.lengths.long() - 1).repeat_interleave(groups)[:, None]
    outputs: dict[Branch, Tensor] = {}
    if config.branches != (Branch.WIN,):
        outputs |= _attend_blocks(q_NhCD, positions_N1, rows, config)
    if Branch.WIN in config.branches:
        outputs[Branch.WIN] = _attend_window(q_NhCD, positions_N1, rows, config)
    return [_as_one_row(outputs[branch], groups) for branch in Branch if branch in outputs]


def _attend_blocks(
    q_NhCD: Tensor, positions_N1: Tensor, rows: PagedRows, config: PagedAttentionConfig
) -> dict[Branch, Tensor]:
    selection = config.selection
    outputs: dict[Branch, Tensor] = {}
    block_NS = torch.arange(config.blocks(rows.longest), device=q_NhCD.device).expand(len(q_NhCD), -1)
    probs_NShC = block_probabilities(q_NhCD, _gather_rows(rows.keys, rows, BLOCKS, block_NS), positions_N1, selection)
    if Branch.CMP in config.branches:
        # Rows after the blocks of a sequence have weight 0, but may contain NaN, so they are set to 0.
        v_NSE = _gather_rows(rows.values, rows, BLOCKS, block_NS)
        outputs[Branch.CMP] = compressed_output(
            probs_NShC, v_NSE.masked_fill(probs_NShC.sum((2, 3))[..., None] == 0, 0.0)
        )
    if config.ranks_blocks:
        indices_NCn = selected_block_indices(
            probs_NShC, positions_N1, -(-rows.longest // selection.select_len), selection
        )
        tokens_NCs, visible_NCs = tokens_of_blocks(indices_NCn, positions_N1, selection.select_len)
        k, v = (_gather_rows(tensor, rows, TOKENS, tokens_NCs[:, 0]) for tensor in (rows.keys, rows.values))
        outputs[Branch.SEL] = masked_attention(q_NhCD, k, v, visible_NCs, selection.scale)
    return outputs


def _attend_window(q_NhCD: Tensor, positions_N1: Tensor, rows: PagedRows, config: PagedAttentionConfig) -> Tensor:
    reach = min(config.window, rows.longest)
    token_Ns = positions_N1 - torch.arange(reach - 1, -1, -1, device=q_NhCD.device)
    visible_NCs = (token_Ns >= 0)[:, None]
    k, v = (_gather_rows(tensor, rows, WINDOW, token_Ns.clamp_min(0)) for tensor in (rows.keys, rows.values))
    return masked_attention(q_NhCD, k, v, visible_NCs, config.selection.scale)


def _gather_rows(tensor_pGPW: Tensor, rows: PagedRows, kind: int, row_Ns: Tensor) -> Tensor:
    """Copy the rows `row_Ns` from the pages, and return them with shape [N, s, W]."""
    _, groups, page_len, _ = tensor_pGPW.shape
    tables_Nc = rows.tables[:, kind].repeat_interleave(groups, 0)
    page_Ns = tables_Nc.gather(1, row_Ns // page_len).long()
    group_N1 = torch.arange(groups, device=row_Ns.device).repeat(len(rows.lengths))[:, None]
    return tensor_pGPW[page_Ns, group_N1, row_Ns % page_len]


def _as_one_row(output_NhCE: Tensor, groups: int) -> Tensor:
    """Return the attention outputs of all sequences, arranged as the tokens of one row, shape [1, H, R, E]."""
    return output_NhCE.squeeze(2).unflatten(0, (-1, groups)).flatten(1, 2).transpose(0, 1)[None]
