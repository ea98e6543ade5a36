"""Lists of selected blocks, in the two orders that the kernels of the selected branch need.

For the forward pass and the gradient of the queries, `unions` lists the blocks that any query of a tile selected; a
kernel sorts them in registers. For the gradients of keys and values, `segments` lists the queries that selected each
block; torch sorts them and a kernel cuts them into segments. No value is read from the device, so sizes are upper
bounds.

`unions` identifies a block by its first token, `segments` by its number in the row, counted over all packed sequences.

Dimensions: B batch, G groups, N batch x groups, T tokens, n slots of a query (selected blocks per query), b blocks (an
upper bound), x tiles, U slots of a tile (queries x n), W columns of a union, L slots of all queries (T x n), s segments
(an upper bound). Inside a kernel: X tiles of a program, U slots, padded; Q queries, P slots of a query; K blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.core import constexpr

from ..packed import selection_starts, sequence_numbers
from ..table_cache import cached_table
from .launch import for_any_length, launch, next_power_of_two
from .sorting import sort_ascending

MAX_TILE_QUERIES = 32  # queries of a tile: one bit each in an int32
# Columns of a union after first tokens and members. A loop that looks one step ahead may read one of them.
UNION_TAIL = 2
_NO_BLOCK: constexpr = constexpr(2**62)  # greater than every key of a sort
_SLOTS_PER_PROGRAM = 1024
_KEPT_QUERIES = 32  # neighbouring queries for which a slot of a typical selection keeps its block
_SPREAD, _FRACTIONS = 40503, 1 << 16  # Knuth's multiplicative hash for 16 bits
_BLOCKS_PER_STEP = 1024  # constant, because a size that fits the number of blocks would need a kernel per length


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """The start of the sequence to which each token belongs, in a row of packed sequences."""

    first_T: Tensor  # int32, the first token of the token's sequence
    block_T: Tensor  # int32, the number of the first block of that sequence

    @classmethod
    def of(cls, starts: Tensor, tokens: int, select_len: int) -> Sequences:
        """Return the cached sequence starts for a row of `tokens` tokens."""

        def compute() -> Sequences:
            own_T = sequence_numbers(starts, tokens)
            return cls(first_T=starts[own_T].int(), block_T=selection_starts(starts, select_len)[own_T].int())

        return cached_table(starts, starts.device, ("sequences", tokens, select_len), compute)


@dataclass(frozen=True, kw_only=True)
class Segments:
    """The queries that selected each block, cut into segments of limited length.

    Each block has at least one segment, even if no query selected it.
    """

    key_NL: Tensor  # int32 or int64: block * T + query, ascending; slots without a block come last
    table_4Nb: Tensor  # [4, N, b + 1] int32: for each block, and one entry after the last block,
    # 0 the index of its first slot in key_NL,
    # 1 the index of its first slot whose query is after the block,
    # 2 the number of its first segment,
    # 3 the number of its first segment, counting only blocks with several segments.
    block_Ns: Tensor  # int32: the block of each segment, or b for a segment that does not exist
    first_b: Tensor | None  # [b + 1] int32: the first token of each block; None: block i starts at i * select_len
    length: int
    partials: int  # upper bound for the segments of a row that belong to blocks with several segments

    @property
    def blocks(self) -> int:
        """Return the number of blocks of keys, or an upper bound for it if sequences are packed."""
        return self.table_4Nb.shape[2] - 1


def unions(indices_BGTn: Tensor, *, select_len: int, queries: int, starts: Tensor | None) -> Tensor:
    """Return, for each tile of neighbouring queries, the blocks that at least one of its queries selected.

    The result is int32 [N, x, 2 U + 2]. A row has U first tokens of blocks, ascending; U bit masks of the queries that
    selected the block (bit i is query i of the tile); the number of blocks; and the number of blocks that end before
    the tile. `queries` must be a power of two. Indices count from the start of each query's own sequence; indices below
    0 or above the query's own block are ignored.
    """
    batch, groups, tokens, places = indices_BGTn.shape
    tiles = triton.cdiv(tokens, queries)
    union_NxW = indices_BGTn.new_zeros(union_shape(indices_BGTn, queries), dtype=torch.int32)
    sequences = None if starts is None else Sequences.of(starts, tokens, select_len)
    log_width = _log2(queries) + _log2(next_power_of_two(places, least=1))
    tiles_of_a_program = max(1, _SLOTS_PER_PROGRAM >> log_width)
    launch(
        selected_unions,
        batch * groups * triton.cdiv(tiles, tiles_of_a_program) if places else 0,
        *(indices_BGTn.contiguous(), None if sequences is None else sequences.first_T, union_NxW),
        *(tokens, tiles),
        SELECT_LEN=select_len,
        PLACES=places,
        LOG_QUERIES=_log2(queries),
        LOG_WIDTH=log_width,
        TILES=tiles_of_a_program,
    )
    return union_NxW


def typical_selection(indices_BGTn: Tensor, select_len: int) -> Tensor:
    """Return indices of the same shape that neighbouring queries share as in a trained model.

    Each query selects the first, its own and the previous block. Each other slot keeps a block for some queries, so
    neighbours share 97 to 98 % of 16 slots, as measured by benchmarks/nsa_choices.py.
    """
    tokens, places = indices_BGTn.shape[2:]
    token_T1 = torch.arange(tokens, device=indices_BGTn.device)[:, None]
    place_n = torch.arange(places, device=indices_BGTn.device)
    own_T1 = token_T1 // select_len
    # The slots change their block one after another. The factor spreads the blocks over the sequence.
    change_Tn = (token_T1 + place_n * _KEPT_QUERIES // places) // _KEPT_QUERIES
    fraction_Tn = (change_Tn * places + place_n) * _SPREAD % _FRACTIONS
    block_Tn = own_T1 * fraction_Tn // _FRACTIONS
    for place, fixed_T1 in enumerate((torch.zeros_like(own_T1), own_T1, (own_T1 - 1).clamp_min(0))):
        block_Tn = torch.where(place_n == place, fixed_T1, block_Tn)
    return block_Tn.to(indices_BGTn.dtype).expand(indices_BGTn.shape).contiguous()


def union_shape(indices_BGTn: Tensor, queries: int) -> tuple[int, int, int]:
    """Return the shape of the result of `unions`."""
    batch, groups, tokens, places = indices_BGTn.shape
    return batch * groups, -(-tokens // queries), 2 * queries * places + UNION_TAIL


def segments(indices_BGTn: Tensor, *, select_len: int, starts: Tensor | None, length: int) -> Segments:
    """Return the queries that selected each block, in segments of at most `length` selections.

    Most blocks have few selections; block 0 has one for every query, so it gets many segments.
    """
    batch, groups, tokens, places = indices_BGTn.shape
    rows = batch * groups
    sequences = None if starts is None else Sequences.of(starts, tokens, select_len)
    first_b = None
    if starts is not None:
        cache_arguments = ("first tokens of blocks", tokens, select_len)
        first_b = cached_table(
            starts, starts.device, cache_arguments, lambda: _first_tokens(starts, select_len, tokens)
        )
    blocks = triton.cdiv(tokens, select_len) if first_b is None else first_b.shape[0] - 1
    # Sort 32-bit keys if every key fits.
    key_dtype = torch.int32 if (blocks + 1) * tokens < 1 << 31 else torch.int64
    key_NL = indices_BGTn.new_empty((rows, tokens * places), dtype=key_dtype)
    queries = max(1, _SLOTS_PER_PROGRAM // next_power_of_two(places, least=1) ** 2)
    launch(
        selected_keys,
        rows * triton.cdiv(tokens, queries),
        *(indices_BGTn.contiguous(), None if sequences is None else sequences.first_T),
        *(None if sequences is None else sequences.block_T, key_NL),
        *(tokens, blocks),
        SELECT_LEN=select_len,
        PLACES=places,
        PLACES_PADDED=next_power_of_two(places, least=1),
        QUERIES=queries,
    )
    key_NL = key_NL.sort(-1).values
    # A block with c slots has fewer than c / length + 1 segments, and fewer than 2 c / length if it has several.
    segment_bound = blocks + tokens * places // length
    # Pad rows so that each of the four tables starts at a multiple of 16 bytes. Other addresses would need a separately
    # compiled kernel.
    table_4Nb = key_NL.new_empty((4, -(-rows // 4) * 4, blocks + 1), dtype=torch.int32)
    block_Ns = key_NL.new_empty((rows, segment_bound), dtype=torch.int32)
    launch(
        selected_segments,
        rows,
        *(key_NL, first_b, table_4Nb, block_Ns),
        *(tokens, key_NL.shape[1], blocks, segment_bound, length, table_4Nb.shape[1]),
        SELECT_LEN=select_len,
        BLOCKS=_BLOCKS_PER_STEP,
    )
    return Segments(
        key_NL=key_NL,
        table_4Nb=table_4Nb[:, :rows],
        block_Ns=block_Ns,
        first_b=first_b,
        length=length,
        partials=min(segment_bound, 2 * tokens * places // length),
    )


def _first_tokens(starts: Tensor, select_len: int, tokens: int) -> Tensor:
    """Return the first token of each block, followed by the number of tokens, int32 [b + 1]."""
    block_begins = selection_starts(starts, select_len)
    bound = (tokens + (starts.shape[0] - 1) * (select_len - 1)) // select_len
    sequence_b = sequence_numbers(block_begins, bound + 1)
    number_b = torch.arange(bound + 1, device=starts.device, dtype=starts.dtype)
    return (starts[sequence_b] + (number_b - block_begins[sequence_b]) * select_len).clamp_max(tokens).int()


def _log2(power: int) -> int:
    return power.bit_length() - 1


@for_any_length
def selected_unions(
    p_index, p_sequence, p_union,
    tokens, tiles,
    SELECT_LEN: tl.constexpr, PLACES: tl.constexpr,
    LOG_QUERIES: tl.constexpr, LOG_WIDTH: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Write, for each tile of queries, the blocks that any of them selected. Each program processes TILES tiles."""
    QUERIES: tl.constexpr = 1 << LOG_QUERIES
    WIDTH: tl.constexpr = 1 << LOG_WIDTH
    shares = tl.cdiv(tiles, TILES)
    i_n = (tl.program_id(0) // shares).to(tl.int64)
    o_tile = tl.program_id(0) % shares * TILES + tl.arange(0, TILES)  # [X]
    o_place = tl.arange(0, WIDTH)  # [U]
    o_query = o_place >> (LOG_WIDTH - LOG_QUERIES)  # [U]
    o_named = o_place & ((WIDTH >> LOG_QUERIES) - 1)  # [U]
    o_token = o_tile[:, None] * QUERIES + o_query[None, :]  # [X, U]
    m_place = (o_token < tokens) & (o_named < PLACES)[None, :]
    b_begin = tl.zeros([TILES, WIDTH], tl.int32)
    if p_sequence is not None:
        b_begin = tl.load(p_sequence + o_token, mask=m_place, other=0)
    p_named = p_index + (i_n * tokens + o_token) * PLACES + o_named[None, :]
    b_block = tl.load(p_named, mask=m_place, other=-1)  # [X, U]
    # Indices may have any value, so they are compared before anything is computed from them.
    m_real = (b_block >= 0) & (b_block <= (o_token - b_begin) // SELECT_LEN)
    b_first = b_begin + tl.where(m_real, b_block, 0).to(tl.int32) * SELECT_LEN
    b_key = (b_first.to(tl.int64) << LOG_QUERIES) | o_query[None, :]
    b_key = sort_ascending(tl.where(m_real, b_key, _NO_BLOCK), TILES, LOG_WIDTH)
    m_real = b_key < _NO_BLOCK
    b_first = tl.where(m_real, b_key >> LOG_QUERIES, -1).to(tl.int32)
    b_members = tl.where(m_real, tl.full([TILES, WIDTH], 1, tl.int32) << (b_key & (QUERIES - 1)).to(tl.int32), 0)
    # Slots of the same block are adjacent. The last one collects the queries of all of them, with a doubling distance.
    for log_far in tl.static_range(LOG_WIDTH):
        o_far = _broadcast_to_tiles(tl.maximum(o_place - (1 << log_far), 0), TILES, WIDTH)
        m_same = (tl.gather(b_first, o_far, 1) == b_first) & (o_place >= 1 << log_far)[None, :]
        b_members |= tl.where(m_same, tl.gather(b_members, o_far, 1), 0)
    b_before = tl.gather(b_first, _broadcast_to_tiles(tl.maximum(o_place - 1, 0), TILES, WIDTH), 1)
    b_behind = tl.gather(b_first, _broadcast_to_tiles(tl.minimum(o_place + 1, WIDTH - 1), TILES, WIDTH), 1)
    m_begin = m_real & ((b_before != b_first) | (o_place == 0)[None, :])
    m_end = m_real & ((b_behind != b_first) | (o_place == WIDTH - 1)[None, :])
    o_rank = tl.cumsum(m_begin.to(tl.int32), 1) - 1
    m_before = m_end & (b_first + SELECT_LEN <= (o_tile * QUERIES)[:, None])
    PLACES_OF_TILE: tl.constexpr = QUERIES * PLACES
    p_row = p_union + (i_n * tiles + o_tile) * (2 * PLACES_OF_TILE + 2)  # [X]
    tl.store(p_row[:, None] + o_rank, b_first, mask=m_end)
    tl.store(p_row[:, None] + PLACES_OF_TILE + o_rank, b_members, mask=m_end)
    tl.store(p_row + 2 * PLACES_OF_TILE, tl.sum(m_end.to(tl.int32), 1), mask=o_tile < tiles)
    tl.store(p_row + 2 * PLACES_OF_TILE + 1, tl.sum(m_before.to(tl.int32), 1), mask=o_tile < tiles)


@triton.jit
def _broadcast_to_tiles(o_place, TILES: tl.constexpr, WIDTH: tl.constexpr):
    return tl.broadcast_to(o_place[None, :], [TILES, WIDTH])


@for_any_length
def selected_keys(
    p_index, p_sequence, p_base, p_key,
    tokens, blocks,
    SELECT_LEN: tl.constexpr, PLACES: tl.constexpr, PLACES_PADDED: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Write, for each block that a query selected, the sort key block * T + query.

    Indices that select nothing and repeated blocks of a query get blocks * T.
    """
    shares = tl.cdiv(tokens, QUERIES)
    i_n = (tl.program_id(0) // shares).to(tl.int64)
    o_token = tl.program_id(0) % shares * QUERIES + tl.arange(0, QUERIES)  # [Q]
    o_place = tl.arange(0, PLACES_PADDED)  # [P]
    m_token = o_token < tokens
    m_place = m_token[:, None] & (o_place < PLACES)[None, :]  # [Q, P]
    b_begin, b_base = tl.zeros([QUERIES], tl.int32), tl.zeros([QUERIES], tl.int32)
    if p_sequence is not None:
        b_begin = tl.load(p_sequence + o_token, mask=m_token, other=0)
        b_base = tl.load(p_base + o_token, mask=m_token, other=0)
    o_out = (i_n * tokens + o_token)[:, None] * PLACES + o_place[None, :]
    b_block = tl.load(p_index + o_out, mask=m_place, other=-1)
    b_latest = (o_token - b_begin) // SELECT_LEN  # [Q]
    b_block = tl.where(b_block <= b_latest[:, None], b_block, -1).to(tl.int32)
    m_earlier = (o_place[None, :] < o_place[:, None])[None, :, :]  # [1, P, P]
    m_repeated = tl.sum(((b_block[:, :, None] == b_block[:, None, :]) & m_earlier).to(tl.int32), 2) > 0
    b_block = tl.where((b_block < 0) | m_repeated, blocks, b_block + b_base[:, None])
    b_key = b_block.to(tl.int64) * tokens + tl.where(b_block < blocks, o_token[:, None], 0)
    tl.store(p_key + o_out, b_key.to(p_key.dtype.element_ty), mask=m_place)


@for_any_length
def selected_segments(
    p_key, p_first, p_table, p_block,
    tokens, places, blocks, segments, length, batch_groups,
    SELECT_LEN: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """For each block, split the list of queries that selected it into segments of limited length."""
    i_n = tl.program_id(0).to(tl.int64)
    p_key += i_n * places
    p_block += i_n * segments
    p_row = p_table + i_n * (blocks + 1)
    apart = tl.cast(batch_groups, tl.int64) * (blocks + 1)
    segment = 0
    partial = 0
    for start in range(0, blocks + 1, BLOCKS):
        o_block = start + tl.arange(0, BLOCKS)  # [K]
        m_block = o_block <= blocks
        if p_first is None:
            b_stop = (o_block + 1) * SELECT_LEN
        else:
            b_stop = tl.load(p_first + o_block, mask=m_block, other=0) + SELECT_LEN
        o_key = o_block.to(tl.int64) * tokens
        b_begin = _count_below(p_key, o_key, places, BLOCKS)
        b_behind = _count_below(p_key, o_key + tl.minimum(b_stop, tokens), places, BLOCKS)
        b_end = _count_below(p_key, o_key + tokens, places, BLOCKS)
        b_cuts = tl.maximum((b_end - b_begin + length - 1) // length, 1)
        b_cuts = tl.where(o_block < blocks, b_cuts, 0)
        b_several = tl.where(b_cuts > 1, b_cuts, 0)
        b_segment = segment + tl.cumsum(b_cuts, 0) - b_cuts
        b_partial = partial + tl.cumsum(b_several, 0) - b_several
        tl.store(p_row + o_block, b_begin, mask=m_block)
        tl.store(p_row + apart + o_block, b_behind, mask=m_block)
        tl.store(p_row + 2 * apart + o_block, b_segment, mask=m_block)
        tl.store(p_row + 3 * apart + o_block, b_partial, mask=m_block)
        for i_cut in range(tl.max(b_cuts, 0)):
            tl.store(p_block + b_segment + i_cut, o_block, mask=i_cut < b_cuts)
        segment += tl.sum(b_cuts, 0)
        partial += tl.sum(b_several, 0)
    for start in range(segment, segments, BLOCKS):
        o_segment = start + tl.arange(0, BLOCKS)
        tl.store(p_block + o_segment, tl.zeros([BLOCKS], tl.int32) + blocks, mask=o_segment < segments)


@triton.jit
def _count_below(p_key, b_key, places, BLOCKS: tl.constexpr):
    """Return, for each element of `b_key`, the number of smaller values among the ascending keys at `p_key`."""
    b_low = tl.zeros([BLOCKS], tl.int32)
    b_high = b_low + places
    span = places
    while span > 0:
        b_middle = b_low + (b_high - b_low) // 2
        m_open = b_low < b_high
        m_less = m_open & (tl.load(p_key + b_middle, mask=m_open, other=0) < b_key)
        b_low = tl.where(m_less, b_middle + 1, b_low)
        b_high = tl.where(m_open & ~m_less, b_middle, b_high)
        span = span // 2
    return b_low
