"""Decoding with a paged cache, for sequences of different lengths in one batch.

Sequences may start and end at any time. In a step every sequence has one new token. These tokens form one row, like the
tokens of a single sequence, so the projections, norms and the MLP run unchanged; only attention distinguishes the
sequences.

Dimensions: R new tokens, one per sequence, N new tokens of one row, n sequences that complete a block in this step, C
new tokens of one sequence, M model width, H query heads, G groups, P rows of a page, T tokens of a prompt, S compressed
blocks, l tokens of a block, D key width, E value width, p pairs of dimensions that rotary embeddings rotate together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .attention import NSAttention, TokenContext, count_run, selection_from, split_heads
from .compression import rotate_blocks, split_into_blocks
from .config import Branch, NSAConfig
from .model import TinyLM
from .ops.dispatch import implementation_for_paged
from .ops.paged_attention import PagedAttentionConfig, PagedRows
from .ops.rotary import RotaryTable, rotate
from .pages import Kind, PageTables


class PagedCache:
    """The cached keys and values of several sequences, which share one pool of pages.

    A sequence starts with the first token appended under its number. It owns pages for all keys and values that later
    tokens can attend to; for the sliding branch these are the pages of its window. `end` frees its pages.
    """

    def __init__(self, config: NSAConfig, *, sequences: int, pages: int, page_len: int | None = None) -> None:
        """Create an empty cache for at most `sequences` sequences and `pages` pages of `page_len` rows.

        `page_len` must be a multiple of select_len; None takes the smallest multiple that 16 divides as well. Raises
        CannotRunError for any other `page_len`, and for attention without NSA branches.
        """
        self.config = config
        self.tables = PageTables(config, sequences, pages, page_len)
        self.layers = [LayerPages(self.tables, config) for _ in range(config.layers)]
        self.cos_sin = RotaryTable()

    @property
    def batch(self) -> int:
        """Return the maximum number of sequences in the cache."""
        return len(self.tables.sequences)

    @property
    def free_pages(self) -> int:
        """Return the number of free pages."""
        return self.tables.pool.free

    def lengths(self) -> list[int]:
        """Return the number of tokens in each sequence."""
        return [sequence.tokens for sequence in self.tables.sequences]

    def end(self, sequence: int) -> None:
        """End a sequence, and free its pages."""
        self.tables.end(sequence)


class LayerPages:
    """The pages of one layer, and the latest uncompressed tokens of each sequence."""

    def __init__(self, tables: PageTables, config: NSAConfig) -> None:
        self._tables, self._config = tables, config
        # None until the first tokens show dtype and device.
        self._pages: tuple[Tensor, Tensor] | None = None
        self._recent: tuple[Tensor, Tensor] | None = None

    def pages(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return all key pages and value pages. The first call allocates them with the dtype and device of `like`.

        Their shapes are [pages, G, P, D] and [pages, G, P, E].
        """
        if self._pages is None:
            self._pages = self._allocate(self._tables.pool.size, self._tables.page_len, like)
        return self._pages

    def write(self, page_N: Tensor, inside_N: Tensor, k_GND: Tensor, v_GNE: Tensor) -> None:
        """Write the keys and values of N tokens or blocks to row `inside_N` of page `page_N`."""
        for tensor, rows in zip(self.pages(k_GND), (k_GND, v_GNE), strict=True):
            tensor[page_N, :, inside_N] = rows.transpose(0, 1)

    def store_recent(
        self, placement: TokenPlacement, tokens: slice, k_GND: Tensor, v_GNE: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Store the uncompressed keys and values of new tokens, and return all that are stored, for all sequences.

        They have the shapes [sequences, G, l, D] and [sequences, G, l, E]; token t is in row t % l.
        """
        length = self._config.block_len
        if self._recent is None:
            self._recent = self._allocate(len(self._tables.sequences), length, k_GND)
        for tensor, rows in zip(self._recent, (k_GND, v_GNE), strict=True):
            index = placement.sequences_N[tokens], slice(None), placement.positions_N[tokens] % length
            tensor[index] = rows[:, tokens].transpose(0, 1)
        return self._recent

    def _allocate(self, count: int, rows: int, like: Tensor) -> tuple[Tensor, Tensor]:
        groups = self._config.groups
        keys, values = (like.new_zeros(count, groups, rows, width) for width in (self._config.d_k, self._config.d_v))
        return keys, values


@dataclass(frozen=True, kw_only=True)
class TokenPlacement:
    """The sequence to which each new token of a row belongs, and the token's position in that sequence."""

    sequences_N: Tensor  # number of each token's sequence
    positions_N: Tensor  # position of each token in its sequence
    cos_sin: Tensor  # [2, N, p]
    table: Tensor  # [sequences, 3, columns] int32
    page_len: int
    longest: int  # length in tokens of the longest of these sequences, including the new tokens

    def locate(self, kind: Kind, tokens: Tensor | slice, row: Tensor) -> tuple[Tensor, Tensor]:
        """Return, for each token, the page that contains row `row` of its sequence, and the index within that page.

        `row` counts the rows of this kind in the token's sequence.
        """
        return self.table[self.sequences_N[tokens], int(kind), row // self.page_len].long(), row % self.page_len


@torch.no_grad()
def append_to_pages(model: TinyLM, tokens: Mapping[int, Tensor], cache: PagedCache) -> dict[int, Tensor]:
    """Append new tokens to some sequences. Return, for each sequence, the output [C, M] of the last transformer block.

    `tokens` maps sequence numbers to tokens; other sequences do not change. The first tokens of a sequence run through
    the layers' own forward pass. Later tokens run one after another, each step with one token of every sequence that
    has tokens left. Raises OutOfPagesError if the pool is too small, and ValueError for an unknown sequence number. In
    both cases no token is appended.
    """
    if unknown := sorted(set(tokens) - set(range(cache.batch))):
        raise ValueError(f"tokens: expected sequences from 0 to {cache.batch - 1}, got {', '.join(map(str, unknown))}")
    cache.tables.reserve({number: len(new_tokens) for number, new_tokens in tokens.items()})
    outputs: defaultdict[int, list[Tensor]] = defaultdict(list)
    for number, new_tokens in tokens.items():
        if len(new_tokens) > 1 and not cache.tables.sequences[number].tokens:
            outputs[number].append(_run_prompt(model, new_tokens, number, cache))
    rest = {number: new_tokens for number, new_tokens in tokens.items() if number not in outputs}
    for step in range(max(map(len, rest.values()), default=0)):
        now = {number: new_tokens[step] for number, new_tokens in rest.items() if step < len(new_tokens)}
        for number, x_1M in zip(now, _run_step(model, now, cache).split(1), strict=True):
            outputs[number].append(x_1M)
    nothing = model.embed.weight[:0]
    return {number: torch.cat(outputs[number]) if outputs[number] else nothing for number in tokens}


def _run_prompt(model: TinyLM, tokens_T: Tensor, number: int, cache: PagedCache) -> Tensor:
    """Append the prompt of a new sequence, and return the output [T, M] of the last transformer block."""
    length = len(tokens_T)
    placement = _placement(model, cache, [number] * length, range(length), tokens_T.device)
    x_1TM = model.embed(tokens_T)[None]
    for block, layer_pages in zip(model.blocks, cache.layers, strict=True):
        fresh_1TM = block.attn_norm(x_1TM)
        # As in decode.py, a prompt computes these projections twice.
        _write_tokens(block.attn, fresh_1TM, layer_pages, placement, cache.tables.first_in_window(length))
        _write_prompt_blocks(block.attn, fresh_1TM, layer_pages, placement)
        x_1TM = x_1TM + block.attn(fresh_1TM, context=TokenContext(placement.cos_sin))
        x_1TM = x_1TM + block.mlp(block.mlp_norm(x_1TM))
    cache.tables.sequences[number].tokens = length
    return x_1TM[0]


def _run_step(model: TinyLM, tokens: Mapping[int, Tensor], cache: PagedCache) -> Tensor:
    """Append one token to each sequence, and return the output [R, M] of the last transformer block."""
    sequences = [cache.tables.sequences[number] for number in tokens]
    token_R = torch.stack(list(tokens.values()))
    placement = _placement(model, cache, list(tokens), [sequence.tokens for sequence in sequences], token_R.device)
    new_blocks = NewBlocks.of(placement, cache.config, [sequence.tokens for sequence in sequences])
    # Most steps append a token of every sequence, in order. The table of all sequences then needs no indexing.
    is_whole_batch = list(tokens) == list(range(len(cache.tables.sequences)))
    tables = placement.table if is_whole_batch else placement.table[placement.sequences_N]
    lengths = (placement.positions_N + 1).to(torch.int32)
    x_1RM = model.embed(token_R)[None]
    for block, layer_pages in zip(model.blocks, cache.layers, strict=True):
        fresh_1RM = block.attn_norm(x_1RM)
        _write_tokens(block.attn, fresh_1RM, layer_pages, placement, 0)
        _write_completed_blocks(block.attn, fresh_1RM, layer_pages, placement, new_blocks)
        q_1HRD = rotate(split_heads(block.attn.q_proj(fresh_1RM), cache.config.heads), placement.cos_sin)
        keys, values = layer_pages.pages(q_1HRD)
        rows = PagedRows(keys=keys, values=values, tables=tables, lengths=lengths, longest=placement.longest)
        x_1RM = x_1RM + _attend_pages(block.attn, fresh_1RM, q_1HRD, rows)
        x_1RM = x_1RM + block.mlp(block.mlp_norm(x_1RM))
    for sequence in sequences:
        sequence.tokens += 1
    return x_1RM[0]


def _placement(
    model: TinyLM, cache: PagedCache, sequences: Sequence[int], positions: Sequence[int], device: torch.device
) -> TokenPlacement:
    longest = max(positions) + 1
    sequences_N, positions_N = torch.tensor([sequences, positions], device=device)
    return TokenPlacement(
        sequences_N=sequences_N,
        positions_N=positions_N,
        cos_sin=cache.cos_sin(model.get_buffer("frequencies"), longest)[:, positions_N],
        table=cache.tables.table(device),
        page_len=cache.tables.page_len,
        longest=longest,
    )


def _attend_pages(layer: NSAttention, x_1RM: Tensor, q_1HRD: Tensor, rows: PagedRows) -> Tensor:
    """Return the attention output [1, R, M] of tokens whose keys and values are already in the pages."""
    config = layer.config
    attend, used = implementation_for_paged(layer.implementation, q_1HRD, rows.keys, rows.values)
    count_run(layer.gate_mlp.runs, used)
    attention_config = PagedAttentionConfig(
        selection=selection_from(config), window=config.window, branches=config.branches
    )
    return layer.out_proj(attend(q_1HRD, layer.gates(x_1RM), rows, attention_config).flatten(2))


def _write_tokens(
    layer: NSAttention, x_1NM: Tensor, layer_pages: LayerPages, placement: TokenPlacement, window_from: int
) -> None:
    """Write the keys and values of new tokens to the pages of a layer."""
    config = layer.config
    for branch, kind, start in ((Branch.SEL, Kind.TOKENS, 0), (Branch.WIN, Kind.WINDOW, window_from)):
        if branch in config.branches:
            part, own = getattr(layer, branch.value), slice(start, None)
            k_GND = rotate(split_heads(part.k_proj(x_1NM[:, own]), config.groups), placement.cos_sin[:, own])[0]
            v_GNE = split_heads(part.v_proj(x_1NM[:, own]), config.groups)[0]
            layer_pages.write(*placement.locate(kind, own, placement.positions_N[own]), k_GND, v_GNE)


def _write_prompt_blocks(layer: NSAttention, x_1TM: Tensor, layer_pages: LayerPages, placement: TokenPlacement) -> None:
    raw = _uncompressed_keys_values(layer, x_1TM)
    if raw is None:
        return
    config, (k_1GTD, v_1GTE) = layer.config, raw
    newest = slice(max(0, x_1TM.shape[1] - config.block_len), None)
    layer_pages.store_recent(placement, newest, k_1GTD[0], v_1GTE[0])
    k_1GSD, v_1GSE = _compress(layer, k_1GTD, v_1GTE)
    block_S = torch.arange(k_1GSD.shape[2], device=x_1TM.device)
    rows = placement.locate(Kind.BLOCKS, slice(k_1GSD.shape[2]), block_S)
    layer_pages.write(*rows, rotate_blocks(k_1GSD, placement.cos_sin, config)[0], v_1GSE[0])


@dataclass(frozen=True, kw_only=True)
class NewBlocks:
    """The compressed blocks that the new tokens of a step complete."""

    tokens_n: Tensor  # index of the completing token in the row
    rows_nl: Tensor  # rows of LayerPages._recent with the tokens of the block
    block_n: Tensor  # number of the block in its sequence

    @classmethod
    def of(cls, placement: TokenPlacement, config: NSAConfig, last_positions: Sequence[int]) -> NewBlocks | None:
        """Return the blocks that end at `last_positions`, or None if no block ends there."""
        length, stride = config.block_len, config.block_stride
        begins = [position + 1 - length for position in last_positions]
        tokens = [token for token, begin in enumerate(begins) if begin >= 0 and begin % stride == 0]
        if not tokens:
            return None
        tokens_n = torch.tensor(tokens, device=placement.positions_N.device)
        begin_n = placement.positions_N[tokens_n] + 1 - length
        inside_l = torch.arange(length, device=begin_n.device)
        return cls(tokens_n=tokens_n, rows_nl=(begin_n[:, None] + inside_l) % length, block_n=begin_n // stride)


def _write_completed_blocks(
    layer: NSAttention, x_1RM: Tensor, layer_pages: LayerPages, placement: TokenPlacement, new_blocks: NewBlocks | None
) -> None:
    raw = _uncompressed_keys_values(layer, x_1RM)
    if raw is None:
        return
    k_1GRD, v_1GRE = raw
    newest_k, newest_v = layer_pages.store_recent(placement, slice(None), k_1GRD[0], v_1GRE[0])
    if new_blocks is None:
        return
    sequence_n1 = placement.sequences_N[new_blocks.tokens_n][:, None]
    k_nGlD, v_nGlE = (rows[sequence_n1, :, new_blocks.rows_nl].transpose(1, 2) for rows in (newest_k, newest_v))
    k_nG1D, v_nG1E = _compress(layer, k_nGlD, v_nGlE)
    k_1GnD = rotate(k_nG1D.permute(2, 1, 0, 3), placement.cos_sin[:, new_blocks.tokens_n])
    rows = placement.locate(Kind.BLOCKS, new_blocks.tokens_n, new_blocks.block_n)
    layer_pages.write(*rows, k_1GnD[0], v_nG1E[:, :, 0].transpose(0, 1))


def _uncompressed_keys_values(layer: NSAttention, x_1NM: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the keys and values [1, G, N, *] to be compressed, or None if the layer uses no blocks."""
    # Without a compressed branch these are the keys and values of the selected branch. Its block means rank the blocks,
    # and the compressed values are never read.
    config = layer.config
    if Branch.CMP not in config.branches and Branch.SEL not in config.branches:
        return None
    part = layer.cmp if Branch.CMP in config.branches else layer.sel
    return split_heads(part.k_proj(x_1NM), config.groups), split_heads(part.v_proj(x_1NM), config.groups)


def _compress(layer: NSAttention, k_BGTD: Tensor, v_BGTE: Tensor) -> tuple[Tensor, Tensor]:
    config = layer.config
    if Branch.CMP in config.branches:
        return layer.cmp.k_blocks(k_BGTD), layer.cmp.v_blocks(v_BGTE)
    k_BGSD, v_BGSE = (
        split_into_blocks(rows, config.block_len, config.block_stride).mean(3) for rows in (k_BGTD, v_BGTE)
    )
    return k_BGSD, v_BGSE
