"""Attention of new tokens to cached keys and values, in plain PyTorch.

Each of B sequences has C new tokens, whose keys and values are already in the cache. The sequences may have different
lengths. The Triton kernels in fused/cached.py compute the same from the pages of a paged cache.

Dimensions: B sequences, C new tokens of a sequence, R = B x C new tokens of all sequences, H query heads, G groups, h
heads of a group, N = B x G, S compressed blocks, r rows of a page, s gathered rows, D key width, E value width, W
either of them, n selected blocks per query. X is N, or 1 if all sequences have the same length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor
from torch.nn import functional

from ..config import Branch
from .attend import CompletedBlocks
from .kernels import EagerKernel, autocast_disabled, compute_dtype
from .selection import EMPTY, Selection, best_blocks_from_probabilities, key_probabilities

_EAGER = EagerKernel()


class Kind(IntEnum):
    """A kind of row in a KV cache. The value is the index in the second dimension of the page table."""

    BLOCKS = 0  # compressed blocks, or block means if the layer has no compressed branch
    TOKENS = 1  # tokens of the selected branch, or of dense attention
    WINDOW = 2  # tokens of the sliding branch


@dataclass(frozen=True, kw_only=True)
class CachedRows:
    """The cached keys and values of a layer, including those of the new tokens, for the sequences with new tokens.

    Row i of a sequence is row i % r of the page in column i // r of its table. Without tables, each sequence has one
    page, with the number of the sequence. Rows after the end of a sequence may contain any values, including NaN.
    """

    memory: Mapping[Kind, tuple[Tensor, Tensor]]  # keys [pages, G, r, D] and values [pages, G, r, E], contiguous
    lengths: Tensor  # [B] int32, tokens of each sequence, at least 1
    longest: int  # the largest length, as a number on the host
    numbers: Tensor | None = None  # [B], the numbers of the sequences; None: 0 to B - 1
    tables: Tensor | None = None  # [B, 3, columns] int32; an entry without a page may be any valid page
    is_uniform: bool = False  # whether all sequences have the same length

    @property
    def groups(self) -> int:
        """Return the number of key and value heads, G."""
        return self.pool[0].shape[1]

    @property
    def pool(self) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all pages. In a paged cache, all kinds of rows share these two tensors."""
        return next(iter(self.memory.values()))

    def read(self, kind: Kind, row_Ns: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of the keys [N, s, D] and values [N, s, E] in the rows `row_Ns`."""
        keys, values = self.memory[kind]
        sequences, page_size, device = len(self.lengths), keys.shape[2], row_Ns.device
        if self.tables is not None:
            tables_Nc = self.tables[:, kind].repeat_interleave(self.groups, 0)
            page_Ns = tables_Nc.gather(1, row_Ns // page_size).long()
        else:
            numbers_B = torch.arange(sequences, device=device) if self.numbers is None else self.numbers
            page_Ns = numbers_B.repeat_interleave(self.groups)[:, None]
        index = page_Ns, torch.arange(self.groups, device=device).repeat(sequences)[:, None], row_Ns % page_size
        return keys[index], values[index]

    def read_first(self, kind: Kind, count: int) -> tuple[Tensor, Tensor]:
        """Return the keys [N, count, D] and values [N, count, E] of the first rows, as views if possible."""
        if self.tables is not None:
            row_s = torch.arange(count, device=self.lengths.device)
            return self.read(kind, row_s.expand(len(self.lengths) * self.groups, -1))
        own = slice(None) if self.numbers is None else self.numbers
        keys, values = (tensor[own, :, :count].flatten(0, 1) for tensor in self.memory[kind])
        return keys, values

    def positions(self, queries: int) -> Tensor:
        """Return the positions of the last `queries` tokens of each sequence, [X, C]."""
        lengths = self.lengths.long()
        lengths_X = lengths[:1] if self.is_uniform else lengths.repeat_interleave(self.groups)
        return lengths_X[:, None] + torch.arange(-queries, 0, device=lengths.device)

    def per_token(self, queries: int) -> CachedRows:
        """Return the rows with a separate sequence for each of the last `queries` tokens, which ends at this token."""
        if queries == 1:
            return self
        assert self.tables is not None
        ends_C = torch.arange(1 - queries, 1, dtype=torch.int32, device=self.lengths.device)
        lengths_R = (self.lengths[:, None] + ends_C).flatten()
        return replace(self, tables=self.tables.repeat_interleave(queries, 0), lengths=lengths_R, is_uniform=False)


@dataclass(frozen=True, kw_only=True)
class CachedAttentionConfig:
    """The parameters that determine which cached tokens and blocks a new token attends to."""

    selection: Selection
    window: int
    branches: tuple[Branch, ...]

    @property
    def pattern(self) -> CompletedBlocks:
        """Return the mask pattern of the compressed branch."""
        return CompletedBlocks(self.selection.block_len, self.selection.block_stride)


def outputs_of_branches(q_1HRD: Tensor, rows: CachedRows, config: CachedAttentionConfig) -> list[Tensor]:
    """Return the output [1, H, R, E] of each branch of the layer."""
    q_NhCD = _by_sequence(q_1HRD, rows)
    positions_XC = rows.positions(q_NhCD.shape[2])
    outputs: dict[Branch, Tensor] = {}
    if config.branches != (Branch.WIN,):
        outputs |= _attend_blocks(q_NhCD, positions_XC, rows, config)
    if Branch.WIN in config.branches:
        outputs[Branch.WIN] = _attend_window(q_NhCD, positions_XC, rows, config)
    return [_as_one_row(outputs[branch], rows) for branch in Branch if branch in outputs]


def dense_output(q_1HRD: Tensor, rows: CachedRows, scale: float) -> Tensor:
    """Return the output [1, H, R, E] of causal attention to all tokens of each sequence."""
    q_NhCD = _by_sequence(q_1HRD, rows)
    positions_XC = rows.positions(q_NhCD.shape[2])
    k_NSD, v_NSE = rows.read_first(Kind.TOKENS, rows.longest)
    token_S = torch.arange(rows.longest, device=q_1HRD.device)
    if not rows.is_uniform:
        v_NSE = v_NSE.masked_fill((token_S > positions_XC[:, -1:])[..., None], 0.0)
    visible_X1CS = (token_S <= positions_XC[..., None])[:, None]
    output_NhCE = functional.scaled_dot_product_attention(
        q_NhCD, k_NSD[:, None], v_NSE[:, None], attn_mask=visible_X1CS, scale=scale, enable_gqa=True
    )
    return _as_one_row(output_NhCE, rows)


def _attend_blocks(
    q_NhCD: Tensor, positions_XC: Tensor, rows: CachedRows, config: CachedAttentionConfig
) -> dict[Branch, Tensor]:
    """Return the outputs [N, h, C, E] of the compressed and selected branches, if the layer has them."""
    selection, outputs = config.selection, dict[Branch, Tensor]()
    k_NSD, v_NSE = rows.read_first(Kind.BLOCKS, config.pattern.count(rows.longest))
    probs_NShC = block_probabilities(q_NhCD, k_NSD, positions_XC, selection)
    if Branch.CMP in config.branches:
        if not rows.is_uniform:
            # Rows after the blocks of a sequence have weight 0, but may contain NaN, so they are set to 0.
            v_NSE = v_NSE.masked_fill(probs_NShC.sum((2, 3))[..., None] == 0, 0.0)
        outputs[Branch.CMP] = compressed_output(probs_NShC, v_NSE)
    if Branch.SEL in config.branches:
        indices_NCn = selected_blocks(probs_NShC, positions_XC, rows.longest, selection)
        outputs[Branch.SEL] = _attend_selected(q_NhCD, indices_NCn, positions_XC, rows, selection)
    return outputs


def _attend_selected(
    q_NhCD: Tensor, indices_NCn: Tensor, positions_XC: Tensor, rows: CachedRows, selection: Selection
) -> Tensor:
    tokens_NCs, visible_NCs = tokens_of_blocks(indices_NCn, positions_XC, selection.select_len)
    sizes = tokens_NCs.shape[:2]
    # Every query has its own keys, so each query becomes a batch entry with one token: [N*C, h, 1, D].
    k, v = (
        tensor.unflatten(1, (sizes[1], -1)).flatten(0, 1) for tensor in rows.read(Kind.TOKENS, tokens_NCs.flatten(1))
    )
    q = q_NhCD.transpose(1, 2).flatten(0, 1).unsqueeze(2)
    output = masked_attention(q, k, v, visible_NCs.flatten(0, 1)[:, None], selection.scale)
    return output.squeeze(2).unflatten(0, sizes).transpose(1, 2)


def _attend_window(q_NhCD: Tensor, positions_XC: Tensor, rows: CachedRows, config: CachedAttentionConfig) -> Tensor:
    reach = min(config.window - 1 + q_NhCD.shape[2], rows.longest)
    token_Xs = positions_XC[:, -1:] + torch.arange(1 - reach, 1, device=q_NhCD.device)
    visible_XCs = (token_Xs >= 0)[:, None] & (token_Xs[:, None] <= positions_XC[..., None])
    visible_XCs &= token_Xs[:, None] > positions_XC[..., None] - config.window
    k, v = rows.read(Kind.WINDOW, token_Xs.clamp_min(0).expand(len(q_NhCD), -1))
    return masked_attention(q_NhCD, k, v, visible_XCs, config.selection.scale)


def block_probabilities(q_NhCD: Tensor, k_NSD: Tensor, positions_XC: Tensor, selection: Selection) -> Tensor:
    """Return the attention probabilities of each query over the compressed keys, [N, S, h, C].

    The output of the compressed branch and the importance of the blocks are computed from these probabilities.
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


def selected_blocks(probs_NShC: Tensor, positions_XC: Tensor, longest: int, selection: Selection) -> Tensor:
    """Return the indices of the blocks that each query selects, int32, shape [N, C, n or fewer].

    `longest` is the number of tokens of the longest sequence.
    """
    blocks = -(-longest // selection.select_len)
    return best_blocks_from_probabilities(probs_NShC.sum(2), positions_XC, blocks, selection)


def tokens_of_blocks(indices_NCn: Tensor, positions_XC: Tensor, select_len: int) -> tuple[Tensor, Tensor]:
    """Return the positions of the tokens in the selected blocks, and which of them are visible, both [N, C, n*l']."""
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


def _by_sequence(q_1HRD: Tensor, rows: CachedRows) -> Tensor:
    """Return the queries, arranged by sequence and group, [N, h, C, D]."""
    q_GhBCD = q_1HRD[0].unflatten(1, (len(rows.lengths), -1)).unflatten(0, (rows.groups, -1))
    return q_GhBCD.permute(2, 0, 1, 3, 4).flatten(0, 1)


def _as_one_row(output_NhCE: Tensor, rows: CachedRows) -> Tensor:
    """Return the attention outputs of all sequences, arranged as the tokens of one row, shape [1, H, R, E]."""
    output_GhBCE = output_NhCE.unflatten(0, (-1, rows.groups)).permute(1, 2, 0, 3, 4)
    return output_GhBCE.flatten(2, 3).flatten(0, 1)[None]
