"""Selection of the most important blocks in a single Triton kernel (NSA paper, eq. 8 to 11).

A program holds a tile of queries of one sequence with all heads of a group, and loops over the selection blocks in
chunks. For a chunk it processes one "tap" after another: first the first compressed block that overlaps each selection
block, then the second, and so on. Each tap is one gather of keys and one product with the queries. The weighted
probabilities are summed over taps and heads in registers, ranked, and merged with the best blocks so far.

A compressed block that overlaps two selection blocks is multiplied twice; in return [H, T, S] is never written. If l =
2d and d divides l', only the last tap overlaps the next selection block. It is then multiplied once, and its sum over
heads is added to both.

Dimensions: B batch, H query heads, G groups, T tokens, S compressed blocks, D key width, n selected blocks per query.
Inside the kernel: R rows (queries x heads, both padded), Q queries, C selection blocks of a chunk, N blocks to keep per
query, padded.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.core import constexpr

from ..packed import compressed_starts
from ..selection import Selection
from ..table_cache import cached_table
from .device import as_exponent, load_heads, load_rows, power
from .launch import (
    MIN_DOT_WIDTH,
    CannotLaunchError,
    Tile,
    check_dtypes,
    for_any_length,
    kernel_constants,
    launch,
    next_power_of_two,
    with_strides,
)
from .sorting import merge_runs
from .steps import load_existing_rows
from .tiles import candidate_tiles
from .tuning import TuningKey, run_best

LAST_INDEX: constexpr = constexpr(2**31 - 1)
LARGEST: constexpr = constexpr(3.0e38)
MAX_TILE_QUERIES = 32


def select_by_importance(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    lse_BHT: Tensor,
    selection: Selection,
    *,
    starts: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Return the indices of the blocks that each query selects, int32, shape [B, G, T, n].

    `k_BGSD` are the compressed keys, and `lse_BHT` is the log-sum-exp of the compressed branch. With `starts`
    (ops/packed.py), the batch is one row of packed sequences, the keys are the concatenated complete blocks of the
    sequences, and indices count from each query's own sequence. Importance is rounded to float32 for ranking, also for
    float64 tensors; NaN ranks last. `tile` overrides the tuned tile size. Raises CannotLaunchError for different dtypes
    and for `starts` with a batch other than 1.
    """
    if starts is not None and q_BHTD.shape[0] != 1:
        raise CannotLaunchError(
            f"starts: packed sequences are one row of tokens, but q_BHTD has a batch of {q_BHTD.shape[0]}: "
            "put the sequences behind each other"
        )
    check_dtypes(ranked_blocks, q_BHTD, k_BGSD)
    batch, _, tokens, _ = q_BHTD.shape
    indices = q_BHTD.new_empty((batch, k_BGSD.shape[1], tokens, selection.select_count), dtype=torch.int32)

    def run(size: Tile) -> None:
        _launch(size, q_BHTD, k_BGSD, lse_BHT, starts, selection, indices)

    if tile is None:
        run_best(
            run, TuningKey.of(ranked_blocks.__name__, q_BHTD, k_BGSD, k_BGSD, _pattern(selection)), _candidate_tiles
        )
    else:
        run(tile)
    return indices


def _pattern(selection: Selection) -> str:
    blocks = f"l={selection.block_len} d={selection.block_stride}"
    return f"ranked {blocks} l'={selection.select_len} n={selection.select_count}"


def _candidate_tiles(tuning_key: TuningKey) -> list[Tile]:
    # The number of queries is limited, because ranking their blocks takes registers as well.
    most_rows = MAX_TILE_QUERIES * tuning_key.heads
    tiles = (replace(tile, rows=min(tile.rows, most_rows)) for tile in candidate_tiles(tuning_key))
    return list(dict.fromkeys(tiles))


def taps_per_block(selection: Selection) -> int:
    """Return the maximum number of compressed blocks, called taps, that overlap one selection block."""
    length, stride, size = selection.block_len, selection.block_stride, selection.select_len
    # The offsets of selection blocks relative to compressed blocks repeat after this many selection blocks.
    period = stride // math.gcd(stride, size)
    return max((j * size + size - 1) // stride - (j * size - length) // stride for j in range(period))


def shares_last_tap(selection: Selection) -> bool:
    """Return whether a compressed block overlaps two neighbouring selection blocks, as the last and the first one."""
    length, stride = selection.block_len, selection.block_stride
    return length == 2 * stride and selection.select_len % stride == 0


def _launch(
    tile: Tile,
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    lse_BHT: Tensor,
    starts: Tensor | None,
    selection: Selection,
    indices: Tensor,
) -> None:
    batch, heads, tokens, _ = q_BHTD.shape
    groups, blocks = k_BGSD.shape[1:3]
    queries = max(1, tile.rows // next_power_of_two(heads // groups, least=1))
    tiles = -(-tokens // queries) + (0 if starts is None else starts.shape[0] - 2)
    table = None
    if starts is not None:
        numbers = ("ranked tiles", tiles, queries, blocks, selection)
        table = cached_table(
            starts, starts.device, numbers, lambda: _tile_table(starts, tiles, queries, blocks, selection)
        )
    sizes = kernel_constants(q_BHTD, k_BGSD, k_BGSD, selection.scale)
    for unused_constant in ("SCALE", "E", "E_PADDED"):
        del sizes[unused_constant]
    launch(
        ranked_blocks,
        batch * groups * tiles if tokens else 0,
        *(*with_strides(q_BHTD), *with_strides(k_BGSD), lse_BHT.contiguous(), indices, table),
        *(groups, tokens, blocks, tiles),
        **sizes,
        **_lengths(selection, queries, tile.keys),
        warps=tile.warps,
        stages=tile.stages,
    )


def _lengths(selection: Selection, queries: int, keys: int) -> dict[str, int]:
    return {
        "BLOCK_LEN": selection.block_len,
        "BLOCK_STRIDE": selection.block_stride,
        "SELECT_LEN": selection.select_len,
        "PLACES": selection.select_count,
        "LOG_PLACES": _log2_padded(selection.select_count),
        "TAPS": taps_per_block(selection) - shares_last_tap(selection),
        "REACHES": int(shares_last_tap(selection)),
        "QUERIES": queries,
        "LOG_CHUNK": _log2_padded(max(MIN_DOT_WIDTH, keys)),
    }


def _log2_padded(number: int) -> int:
    return (number - 1).bit_length()


def _tile_table(starts: Tensor, tiles: int, queries: int, blocks: int, selection: Selection) -> Tensor:
    """Return a table of the tiles of packed sequences, int32 [tiles, 5].

    The columns are the first token of the tile's sequence, its number of tokens, its first compressed block, its number
    of compressed blocks, and the tile's first query within the sequence. `tiles` is an upper bound that needs no value
    from the device; surplus tiles get a sequence with 0 tokens.
    """
    lengths = starts.diff()
    first_tiles = torch.nn.functional.pad(((lengths + queries - 1) // queries).cumsum(0), (1, 0))
    tile = torch.arange(tiles, device=starts.device)
    sequence = torch.searchsorted(first_tiles[1:].contiguous(), tile, right=True)
    used = sequence < lengths.shape[0]
    sequence = sequence.clamp_max(lengths.shape[0] - 1)
    first_blocks = compressed_starts(starts, selection.block_len, selection.block_stride).clamp_max(blocks)
    columns = (
        starts[sequence],
        lengths[sequence] * used,
        first_blocks[sequence],
        first_blocks.diff()[sequence],
        (tile - first_tiles[sequence]) * queries * used,
    )
    return torch.stack([column.to(torch.int32) for column in columns], 1)


@for_any_length
def ranked_blocks(
    p_q, s_qb, s_qh, s_qt,
    p_k, s_kb, s_kg, s_ks,
    p_lse, p_indices, p_table,
    groups, tokens, blocks, tiles,
    EXPONENT: tl.constexpr, EXACT: tl.constexpr,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr,
    D: tl.constexpr, D_PADDED: tl.constexpr,
    ACC: tl.constexpr, BLOCK_LEN: tl.constexpr, BLOCK_STRIDE: tl.constexpr, SELECT_LEN: tl.constexpr,
    PLACES: tl.constexpr, LOG_PLACES: tl.constexpr, TAPS: tl.constexpr, REACHES: tl.constexpr,
    QUERIES: tl.constexpr, LOG_CHUNK: tl.constexpr,
):  # fmt: skip
    """Select the most important blocks for one tile of queries and all heads of a group."""
    CHUNK: tl.constexpr = 1 << LOG_CHUNK
    PLACES_PADDED: tl.constexpr = 1 << LOG_PLACES
    ROWS: tl.constexpr = QUERIES * HEADS_PADDED
    # Programs of one group are adjacent and share its keys in the cache. The program with the most work starts first.
    i_bg = tl.program_id(0) // tiles
    i_tile = tiles - 1 - tl.program_id(0) % tiles
    i_b = (i_bg // groups).to(tl.int64)
    i_g = (i_bg % groups).to(tl.int64)
    first_token = 0
    first_block = 0
    sequence_tokens = tokens
    sequence_blocks = blocks
    first_query = i_tile * QUERIES
    if p_table is not None:
        p_row = p_table + i_tile.to(tl.int64) * 5
        first_token = tl.load(p_row)
        sequence_tokens = tl.load(p_row + 1)
        first_block = tl.load(p_row + 2)
        sequence_blocks = tl.load(p_row + 3)
        first_query = tl.load(p_row + 4)

    o_row = tl.arange(0, ROWS)  # [R]
    o_head = o_row % HEADS_PADDED  # [R]
    o_token = first_query + o_row // HEADS_PADDED  # [R]
    m_row = (o_token < sequence_tokens) & (o_head < HEADS)  # [R]
    o_head = i_g * HEADS + o_head
    o_wide = first_token + o_token.to(tl.int64)  # [R]
    b_q = load_heads(p_q, i_b * s_qb + o_head * s_qh + o_wide * s_qt, m_row, D, D_PADDED)  # [R, D]
    o_stat = (i_b * groups * HEADS + o_head) * tokens + o_wide  # [R]
    b_lse = as_exponent(tl.load(p_lse + o_stat, mask=m_row, other=float("inf")).to(ACC), EXACT)  # [R]
    b_seen_from = tl.where(m_row, o_token, -1)  # [R]
    p_keys = p_k + i_b * s_kb + i_g * s_kg + first_block.to(tl.int64) * s_ks

    o_query = first_query + tl.arange(0, QUERIES)  # [Q]
    b_current = o_query // SELECT_LEN  # [Q]
    last_token = tl.minimum(first_query + QUERIES, sequence_tokens)
    chunks = (last_token + CHUNK * SELECT_LEN - 1) // (CHUNK * SELECT_LEN)
    # Old chunks: every query of the tile attends to all compressed blocks that overlap them, and none of these blocks
    # starts before the sequence, as some of the first chunk do. They need no masks.
    old_chunks = tl.maximum((first_query + 1 - BLOCK_LEN) // (CHUNK * SELECT_LEN), 0)
    UNEVEN: tl.constexpr = 1 if BLOCK_LEN > BLOCK_STRIDE and not REACHES else 0
    b_sum = tl.zeros([ROWS, CHUNK], dtype=ACC)  # [R, C]
    b_over = tl.zeros([QUERIES], dtype=ACC)  # [Q]: contribution of a chunk's last tap to the next chunk
    b_best = tl.full([QUERIES, PLACES_PADDED], -1, dtype=tl.int64)  # [Q, N], ascending
    # A single loop over chunks and taps, so that the keys of the next chunk are loaded while this chunk is ranked.
    for step in range(UNEVEN * TAPS, old_chunks * TAPS):
        tap = step % TAPS + REACHES
        o_selected = (step // TAPS) * CHUNK + tl.arange(0, CHUNK)  # [C]
        o_block = block_of_tap(o_selected, tap, BLOCK_LEN, BLOCK_STRIDE, SELECT_LEN)  # [C]
        if SELECT_LEN % BLOCK_STRIDE == 0:
            first = block_of_tap(step // TAPS * CHUNK, tap, BLOCK_LEN, BLOCK_STRIDE, SELECT_LEN)
            p_first = p_keys + first.to(tl.int64) * s_ks
            b_k = load_existing_rows(
                p_first, tl.cast(s_ks, tl.int64) * (SELECT_LEN // BLOCK_STRIDE), 0, CHUNK, D, D_PADDED
            )
        else:
            b_k = load_rows(p_keys, s_ks, o_block, o_block >= 0, D, D_PADDED)  # [C, D]
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee", out_dtype=ACC)  # [R, C]
        b_p = power(b_s * EXPONENT - b_lse[:, None], EXACT)  # [R, C]
        b_sum += b_p * weight_of_tap(o_selected, o_block, tap, ACC, BLOCK_LEN, BLOCK_STRIDE, SELECT_LEN)
        if tap == TAPS - 1 + REACHES:
            b_importance = sum_over_heads(b_sum, QUERIES, HEADS_PADDED, CHUNK)  # [Q, C]
            if REACHES:
                b_importance, b_over = _add_shared_tap(b_importance, b_p, b_over, BLOCK_STRIDE, HEADS_PADDED)
            b_best = with_chunk(b_best, b_importance, o_selected[None, :], b_current, QUERIES, LOG_CHUNK, LOG_PLACES)
            b_sum = tl.zeros([ROWS, CHUNK], dtype=ACC)
    skipped = tl.maximum(old_chunks - UNEVEN, 0)
    for step in range((chunks - skipped) * TAPS):
        tap = step % TAPS + REACHES
        chunk = step // TAPS
        chunk += tl.where(chunk >= UNEVEN, skipped, 0)
        o_selected = chunk * CHUNK + tl.arange(0, CHUNK)  # [C]
        o_block = block_of_tap(o_selected, tap, BLOCK_LEN, BLOCK_STRIDE, SELECT_LEN)  # [C]
        m_block = (o_block >= 0) & (o_block < sequence_blocks)  # [C]
        b_k = load_rows(p_keys, s_ks, o_block, m_block, D, D_PADDED)  # [C, D]
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee", out_dtype=ACC)  # [R, C]
        b_last_token = tl.where(m_block, o_block * BLOCK_STRIDE + (BLOCK_LEN - 1), LAST_INDEX)  # [C]
        m_seen = b_last_token[None, :] <= b_seen_from[:, None]  # [R, C]
        b_p = tl.where(m_seen, power(b_s * EXPONENT - b_lse[:, None], EXACT), 0.0)  # [R, C]
        b_sum += b_p * weight_of_tap(o_selected, o_block, tap, ACC, BLOCK_LEN, BLOCK_STRIDE, SELECT_LEN)
        if tap == TAPS - 1 + REACHES:
            b_importance = sum_over_heads(b_sum, QUERIES, HEADS_PADDED, CHUNK)  # [Q, C]
            if REACHES:
                b_importance, b_over = _add_shared_tap(b_importance, b_p, b_over, BLOCK_STRIDE, HEADS_PADDED)
            b_best = with_chunk(b_best, b_importance, o_selected[None, :], b_current, QUERIES, LOG_CHUNK, LOG_PLACES)
            b_sum = tl.zeros([ROWS, CHUNK], dtype=ACC)

    o_place = PLACES_PADDED - 1 - tl.arange(0, PLACES_PADDED)  # [N]
    b_index = tl.where(b_best < 0, -1, (b_best & LAST_INDEX) ^ LAST_INDEX).to(tl.int32)  # [Q, N]
    m_out = (o_query < sequence_tokens)[:, None] & (o_place < PLACES)[None, :]  # [Q, N]
    o_out = i_bg.to(tl.int64) * tokens + first_token + o_query.to(tl.int64)  # [Q]
    tl.store(p_indices + o_out[:, None] * PLACES + o_place[None, :], b_index, mask=m_out)


@triton.jit
def block_of_tap(o_selected, tap, BLOCK_LEN: tl.constexpr, BLOCK_STRIDE: tl.constexpr, SELECT_LEN: tl.constexpr):
    """For each selection block, return the `tap`-th of the compressed blocks that overlap it."""
    # SHIFT keeps the dividend of the first tap positive, because integer division in kernels rounds towards zero.
    SHIFT: tl.constexpr = (BLOCK_LEN + BLOCK_STRIDE - 1) // BLOCK_STRIDE
    return (o_selected * SELECT_LEN - BLOCK_LEN + SHIFT * BLOCK_STRIDE) // BLOCK_STRIDE + (1 - SHIFT + tap)


@triton.jit
def weight_of_tap(
    o_selected, o_block, tap, ACC: tl.constexpr,
    BLOCK_LEN: tl.constexpr, BLOCK_STRIDE: tl.constexpr, SELECT_LEN: tl.constexpr,
):  # fmt: skip
    """Return the number of tokens that a selection block and a compressed block share."""
    # Eq. 9 also divides by d, which does not change the ranking.
    if SELECT_LEN % BLOCK_STRIDE == 0:
        # The weight is the same for all selection blocks.
        begin = block_of_tap(0, tap, BLOCK_LEN, BLOCK_STRIDE, SELECT_LEN) * BLOCK_STRIDE
        weight = tl.maximum(tl.minimum(SELECT_LEN, begin + BLOCK_LEN) - tl.maximum(begin, 0), 0).to(ACC)
    else:
        o_begin = o_selected * SELECT_LEN
        o_end = tl.minimum(o_begin + SELECT_LEN, o_block * BLOCK_STRIDE + BLOCK_LEN)
        weight = tl.maximum(o_end - tl.maximum(o_begin, o_block * BLOCK_STRIDE), 0).to(ACC)[None, :]
    return weight


@triton.jit
def sum_over_heads(b_share, QUERIES: tl.constexpr, HEADS_PADDED: tl.constexpr, CHUNK: tl.constexpr):
    """Return the sum of `b_share` over the heads of each query, shape [Q, C]."""
    # After tl.sum, each thread that held a head has a copy of the result. A gather with identity indices distributes
    # the elements over the threads again, which halves the instructions of the kernel.
    o_same = tl.broadcast_to(tl.arange(0, CHUNK)[None, :], [QUERIES, CHUNK])  # [Q, C]
    return tl.gather(tl.sum(tl.reshape(b_share, [QUERIES, HEADS_PADDED, CHUNK]), 1), o_same, 1)


@triton.jit
def _add_shared_tap(b_importance, b_p, b_over, BLOCK_STRIDE: tl.constexpr, HEADS_PADDED: tl.constexpr):
    """Add each shared compressed block to the importance of both selection blocks that it overlaps.

    Return the importance [Q, C], and the contribution of the chunk's last block to the next chunk [Q].
    """
    QUERIES: tl.constexpr = b_importance.shape[0]
    CHUNK: tl.constexpr = b_importance.shape[1]
    o_selected = tl.arange(0, CHUNK)  # [C]
    b_shared = sum_over_heads(b_p, QUERIES, HEADS_PADDED, CHUNK) * BLOCK_STRIDE  # [Q, C]
    o_before = tl.broadcast_to(tl.maximum(o_selected - 1, 0)[None, :], [QUERIES, CHUNK])
    b_from_previous = tl.where((o_selected == 0)[None, :], b_over[:, None], tl.gather(b_shared, o_before, 1))
    b_over = tl.sum(tl.where((o_selected == CHUNK - 1)[None, :], b_shared, 0.0), 1)
    return b_importance + b_from_previous, b_over


@triton.jit
def with_chunk(
    b_best, b_importance, o_block, b_current,
    QUERIES: tl.constexpr, LOG_CHUNK: tl.constexpr, LOG_PLACES: tl.constexpr,
):  # fmt: skip
    """Merge a chunk of blocks into the best blocks so far, and return their ranks [Q, N] in ascending order."""
    b_rank = _rank(b_importance.to(tl.float32), o_block, b_current)
    # In long sequences, most chunks contain no block that is better than the worst of the best so far.
    if tl.max((b_rank > tl.min(b_best, 1)[:, None]).to(tl.int32)) > 0:
        # The element-wise maximum of an ascending and a descending row has the N greatest ranks of both.
        b_best = tl.maximum(b_best, best_of(b_rank, QUERIES, LOG_CHUNK, LOG_PLACES))
        b_best = merge_runs(b_best, QUERIES, LOG_PLACES, LOG_PLACES, 1)
    return b_best


@triton.jit
def _rank(b_importance, o_block, b_current):
    """Return an integer rank for each block and query, greater for more important blocks."""
    # The high bits contain the importance, the low bits the inverted index, so of equally important blocks the lower
    # index has the greater rank.
    m_forced = (o_block == 0) | (o_block == b_current[:, None]) | (o_block == b_current[:, None] - 1)  # [Q, C]
    # Comparisons with NaN are false, so NaN counts as importance 0.
    b_finite = tl.where(b_importance > 0, tl.minimum(b_importance, LARGEST), 0.0)  # [Q, C]
    # The bits of non-negative floats are ordered like the floats. With all bits inverted, a lower index is greater.
    b_bits = tl.where(m_forced, float("inf"), b_finite).to(tl.int32, bitcast=True).to(tl.int64)  # [Q, C]
    b_rank = (b_bits << 32) | (o_block ^ LAST_INDEX).to(tl.int64)  # [Q, C]
    return tl.where(o_block <= b_current[:, None], b_rank, -1)


@triton.jit
def best_of(b_rank, QUERIES: tl.constexpr, LOG_CHUNK: tl.constexpr, LOG_PLACES: tl.constexpr):
    """Return the N greatest ranks of a chunk, [Q, N], in descending order."""
    # Groups of N ranks are sorted, alternately descending and ascending. Then the element-wise maximum of two
    # neighbouring groups keeps the N greatest ranks of both, because each rank that is dropped has N greater ones. This
    # is repeated until one group is left. tl.topk does the same, but is a thousand times slower in Triton's
    # interpreter.
    PLACES_PADDED: tl.constexpr = 1 << LOG_PLACES
    if LOG_CHUNK < LOG_PLACES:
        o_copy = tl.arange(0, 1 << (LOG_PLACES - LOG_CHUNK))
        b_spread = tl.where((o_copy == 0)[None, None, :], b_rank[:, :, None], -1)
        b_rank = tl.reshape(b_spread, [QUERIES, PLACES_PADDED])
    LOG_WIDTH: tl.constexpr = max(LOG_CHUNK, LOG_PLACES)
    for log_sorted in tl.static_range(1, LOG_PLACES + 1):
        b_rank = merge_runs(b_rank, QUERIES, LOG_WIDTH, log_sorted, 0)
    for log_left in tl.static_range(LOG_WIDTH - LOG_PLACES):
        b_rank = _merge_halves(b_rank, QUERIES, LOG_WIDTH - log_left - 1, LOG_PLACES)
    return b_rank


@triton.jit
def _merge_halves(b_rank, QUERIES: tl.constexpr, LOG_WIDTH: tl.constexpr, LOG_PLACES: tl.constexpr):
    """Merge pairs of sorted groups, keeping the greatest ranks of each pair."""
    GROUPS: tl.constexpr = QUERIES << (LOG_WIDTH - LOG_PLACES)
    b_rank = tl.max(tl.reshape(b_rank, [GROUPS, 2, 1 << LOG_PLACES]), 1)
    return merge_runs(tl.reshape(b_rank, [QUERIES, 1 << LOG_WIDTH]), QUERIES, LOG_WIDTH, LOG_PLACES, 0)
