"""NSA for new tokens of cached sequences, with keys and values in pages, as two Triton kernels.

One token is too little work for a GPU, so `cached_parts` splits the keys over several programs. Each attends to some
compressed blocks, or to some tokens of the window, and writes a partial softmax; for compressed blocks it also writes
the scores. `cached_output` computes importance from the scores, selects the blocks, attends to them, combines the
partial results, and sums the branches with their gates.

With many sequences, `cached_output` has one program per token and group. With few, several programs share this work:
the first combines the partial results of the other branches. Each of the others repeats the selection, which only reads
scores, and attends to some of the selected blocks. The program that finishes last adds the results, always in the same
order, so the same input gives the same bits.

Rows of pages are found through the table of their sequence, so no key is copied.

Dimensions: B sequences, R new tokens, H query heads, G groups, P rows of a page, D key width, E value width, n
selected blocks per query. Inside a kernel: h heads of a group, padded, K keys, C selection blocks of a chunk, N blocks
to keep, padded.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...config import Branch
from ..cached_attention import CachedAttentionConfig, CachedRows, Kind
from .device import load_heads, load_rows, power, store_heads
from .importance import LAST_INDEX, best_of, block_of_tap, sum_over_heads, taps_per_block, weight_of_tap, with_chunk
from .launch import (
    MIN_DOT_WIDTH,
    Tile,
    accumulator_dtype,
    check_attention,
    check_dtypes,
    for_any_length,
    kernel_constants,
    launch,
    next_power_of_two,
    with_strides,
)
from .tuning import TuningKey, run_best

# Number of programs that fills a GPU, and the minimum keys per program: with fewer, combining the partial results costs
# as much time as the split saves.
MIN_PROGRAMS = 256
MIN_PART_ROWS = 128
# Programs that share an output all select its blocks, so there should be no more of them than multiprocessors.
MAX_SHARING_PROGRAMS = 128
# Scores of a chunk of blocks, which a program holds in registers.
CHUNK_SCORES = 2048
_BLOCKS, _TOKENS, _WINDOW = (tl.constexpr(int(kind)) for kind in Kind)
_INFINITE = tl.constexpr(float("inf"))


def attend_pages(
    q_1HRD: Tensor, gates_c1HR: Tensor, rows: CachedRows, config: CachedAttentionConfig, *, tile: Tile | None = None
) -> Tensor:
    """Return the gated sum of the branch outputs, [1, R, H, E], for the new tokens of the sequences.

    Raises CannotLaunchError for tensors that the kernels do not support.
    """
    return attend_and_select(q_1HRD, gates_c1HR, rows, config, tile=tile)[0]


def attend_and_select(
    q_1HRD: Tensor, gates_c1HR: Tensor, rows: CachedRows, config: CachedAttentionConfig, *, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """Return the gated sum of the branch outputs, [1, R, H, E], and the indices of the selected blocks, [R, G, n].

    For a layer without the selected branch, the indices are uninitialized.
    """
    keys, values = rows.pool
    check_attention(cached_parts, q_1HRD, keys, values)
    check_dtypes(cached_parts, gates_c1HR)
    _, heads, tokens, _ = q_1HRD.shape
    rows = rows.per_token(tokens // len(rows.lengths))
    output = values.new_empty(1, tokens, heads, values.shape[-1])
    indices = rows.lengths.new_empty(tokens, rows.groups, config.selection.select_count)

    def run(size: Tile) -> None:
        _launch(size, q_1HRD, gates_c1HR, rows, config, indices, output)

    if tile is None:
        run_best(run, TuningKey.of(cached_parts.__name__, q_1HRD, keys, values, _pattern(config)), candidate_tiles)
    else:
        run(tile)
    return output, indices


def _pattern(config: CachedAttentionConfig) -> str:
    selection = config.selection
    lengths = f"l={selection.block_len} d={selection.block_stride} l'={selection.select_len} w={config.window}"
    return f"paged {'+'.join(config.branches)} {lengths} n={selection.select_count}"


def candidate_tiles(tuning_key: TuningKey) -> list[Tile]:
    """Return the tile sizes to try for a kernel."""
    return tuning_key.tiles((MIN_DOT_WIDTH, 64, 4, 3), (MIN_DOT_WIDTH, 64, 4, 2), (MIN_DOT_WIDTH, 32, 4, 2))


def _launch(
    tile: Tile,
    q_1HRD: Tensor,
    gates_c1HR: Tensor,
    rows: CachedRows,
    config: CachedAttentionConfig,
    indices: Tensor,
    output: Tensor,
) -> None:
    assert rows.tables is not None
    _, heads, tokens, _ = q_1HRD.shape
    (k, v), groups, selection = rows.pool, rows.groups, config.selection
    page_size, width = k.shape[2], v.shape[-1]
    blocks = config.pattern.count(rows.longest) if config.branches != (Branch.WIN,) else 0
    keys = _keys_per_step(tile.keys, page_size)
    # The loop over the window starts at a multiple of the step, so its first step may contain keys before the window.
    window = min(config.window + keys - 1, rows.longest) if Branch.WIN in config.branches else 0
    part_rows = _rows_per_part(tokens * groups, blocks + window, keys)
    block_parts, window_parts = -(-blocks // part_rows), -(-window // part_rows)
    parts = block_parts + window_parts
    sizes = {
        **kernel_constants(q_1HRD, k, v, selection.scale),
        "BLOCK_LEN": selection.block_len,
        "BLOCK_STRIDE": selection.block_stride,
        "PAGE_LEN": page_size,
        "COMPRESSES": int(Branch.CMP in config.branches),
        "SELECTS": int(Branch.SEL in config.branches),
    }
    del sizes["SCALE"]
    # tl.dot needs at least 16 rows.
    sizes["HEADS_PADDED"] = max(MIN_DOT_WIDTH, sizes["HEADS_PADDED"])
    selected = min(selection.select_count * selection.select_len, rows.longest) if sizes["SELECTS"] else 0
    # `cached_parts` sets the counters of finished programs to 0, so without it there is only one program per output.
    shares = _programs_per_output(tokens * groups, selected) if parts else 1
    results = parts + (shares if shares > 1 else 0)
    # Buffers for scores and partial softmax results. Separate tensors start at multiples of 16 bytes for any lengths.
    stats = tokens * heads * results
    buffer_sizes = (tokens * groups * blocks * sizes["HEADS_PADDED"], stats * width, stats, stats)
    buffers = [q_1HRD.new_empty(size, dtype=accumulator_dtype(q_1HRD.dtype)) for size in buffer_sizes]
    buffers.append(rows.lengths.new_empty(tokens * groups))
    q, _, *q_strides = with_strides(q_1HRD)
    gate_strides = [gates_c1HR.stride(axis) for axis in (0, 2, 3)]
    cache = (k, v, rows.tables, rows.lengths, *buffers)
    lengths = (groups, blocks, parts, results, *rows.tables.stride()[:2], block_parts)
    launch(
        cached_parts,
        tokens * groups * parts,
        *(q, *q_strides, *cache, *lengths, part_rows),
        **sizes,
        SPAN=config.window,
        KEYS=keys,
        warps=tile.warps,
        stages=tile.stages,
    )
    launch(
        cached_output,
        tokens * groups * shares,
        *(q, *q_strides, gates_c1HR, *gate_strides, *cache, indices, output, *lengths, shares),
        **sizes,
        SLIDES=int(Branch.WIN in config.branches),
        SELECT_LEN=selection.select_len,
        PLACES=selection.select_count,
        LOG_PLACES=(selection.select_count - 1).bit_length(),
        TAPS=taps_per_block(selection),
        LOG_CHUNK=(CHUNK_SCORES // sizes["HEADS_PADDED"]).bit_length() - 1,
        PIECE=min(next_power_of_two(selection.select_len), 64),
        warps=tile.warps,
        stages=tile.stages,
    )


def _keys_per_step(most: int, page_len: int) -> int:
    """Return the number of keys to load per loop step: about `most`, and if possible a divisor of the page length."""
    in_one_page = min(most, page_len & -page_len)
    return in_one_page if in_one_page >= MIN_DOT_WIDTH else max(MIN_DOT_WIDTH, most)


def _rows_per_part(programs: int, rows: int, keys: int) -> int:
    """Return how many rows each kernel program handles, chosen so that there are enough programs to fill the GPU."""
    parts = -(-MIN_PROGRAMS // max(1, programs))
    return max(MIN_PART_ROWS, -(-rows // parts // keys) * keys)


def _programs_per_output(outputs: int, rows: int) -> int:
    """Return how many programs compute the output of one token and group, which attends to `rows` selected rows.

    If there are several programs, the first of them attends to no selected blocks.
    """
    parts = min(MAX_SHARING_PROGRAMS // max(1, outputs), rows // MIN_PART_ROWS)
    return parts + 1 if parts > 1 else 1


@for_any_length
def cached_parts(
    p_q, s_qh, s_qt,
    p_k, p_v, p_tables, p_lengths, p_scores, p_partial, p_highest, p_total, p_finished,
    groups, blocks, parts, results, table_row, columns, block_parts, rows,
    EXPONENT: tl.constexpr, EXACT: tl.constexpr,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr,
    D: tl.constexpr, D_PADDED: tl.constexpr, E: tl.constexpr, E_PADDED: tl.constexpr,
    ACC: tl.constexpr, BLOCK_LEN: tl.constexpr, BLOCK_STRIDE: tl.constexpr, KEYS: tl.constexpr,
    PAGE_LEN: tl.constexpr, COMPRESSES: tl.constexpr, SELECTS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Attend to some of the compressed blocks or of the tokens in the window, and write their partial softmax."""
    i_part = tl.program_id(0) % parts
    i_rg = (tl.program_id(0) // parts).to(tl.int64)
    i_r = i_rg // groups
    i_g = i_rg % groups
    tokens = tl.load(p_lengths + i_r)
    tl.store(p_finished + i_rg, 0, mask=i_part == 0)
    is_block = i_part < block_parts
    seen_from = tl.where(is_block, 0, tokens - SPAN)
    first = tl.where(is_block, i_part, i_part - block_parts) * rows + tl.maximum(seen_from, 0) // KEYS * KEYS
    stop = tl.minimum(first + rows, tl.where(is_block, _block_count(tokens, BLOCK_LEN, BLOCK_STRIDE), tokens))
    p_table = p_tables + i_r * table_row + tl.where(is_block, _BLOCKS, _WINDOW).to(tl.int64) * columns
    # Without the compressed branch, block scores are used only for the selection, and block values are not needed.
    m_attended = (COMPRESSES == 1) | (i_part >= block_parts)

    o_head = tl.arange(0, HEADS_PADDED)  # [h]
    m_head = o_head < HEADS
    b_q = load_heads(p_q, (i_g * HEADS + o_head) * s_qh + i_r * s_qt, m_head, D, D_PADDED)  # [h, D]
    b_highest = tl.full([HEADS_PADDED], -_INFINITE, dtype=ACC)  # [h]
    b_total = tl.zeros([HEADS_PADDED], dtype=ACC)  # [h]
    b_o = tl.zeros([HEADS_PADDED, E_PADDED], dtype=ACC)  # [h, E]
    for start in range(first, stop, KEYS):
        o_key = start + tl.arange(0, KEYS)  # [K]
        m_key = (o_key >= seen_from) & (o_key < stop)
        if PAGE_LEN % KEYS == 0:
            page_row = _row_of_page(p_table, start, i_g, groups, PAGE_LEN) + start % PAGE_LEN
            o_row = o_key - start  # [K]
        else:
            page_row = tl.cast(0, tl.int64)
            i_page = tl.load(p_table + o_key // PAGE_LEN, mask=m_key, other=0).to(tl.int64)  # [K]
            o_row = (i_page * groups + i_g) * PAGE_LEN + o_key % PAGE_LEN  # [K]
        b_k = load_rows(p_k + page_row * D, D, o_row, m_key, D, D_PADDED)  # [K, D]
        b_v = load_rows(p_v + page_row * E, E, o_row, m_key & m_attended, E, E_PADDED)  # [K, E]
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee", out_dtype=ACC) * EXPONENT  # [h, K]
        if SELECTS:
            o_score = (i_rg * blocks + o_key)[None, :] * HEADS_PADDED + o_head[:, None]  # [h, K]
            tl.store(p_scores + o_score, b_s, mask=m_head[:, None] & (m_key & is_block)[None, :])
        b_highest, b_total, b_o = _add_keys(b_s, b_v, m_key, b_highest, b_total, b_o, EXACT, ACC)
    _store_result(p_partial, p_highest, p_total, (i_rg * results + i_part) * HEADS + o_head, m_head,
                  b_highest, b_total, b_o, E, E_PADDED)  # fmt: skip


@for_any_length
def cached_output(
    p_q, s_qh, s_qt,
    p_g, s_gc, s_gh, s_gt,
    p_k, p_v, p_tables, p_lengths, p_scores, p_partial, p_highest, p_total, p_finished, p_indices, p_y,
    groups, blocks, parts, results, table_row, columns, block_parts, shares,
    EXPONENT: tl.constexpr, EXACT: tl.constexpr,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr,
    D: tl.constexpr, D_PADDED: tl.constexpr, E: tl.constexpr, E_PADDED: tl.constexpr,
    ACC: tl.constexpr, BLOCK_LEN: tl.constexpr, BLOCK_STRIDE: tl.constexpr, SELECT_LEN: tl.constexpr,
    PLACES: tl.constexpr, LOG_PLACES: tl.constexpr, TAPS: tl.constexpr, LOG_CHUNK: tl.constexpr,
    PAGE_LEN: tl.constexpr, COMPRESSES: tl.constexpr, SELECTS: tl.constexpr, SLIDES: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Select blocks, attend to them, and write the gated sum of all branches for one token and group.

    Several programs may share this work. The first of them combines the partial results of the other branches. Each of
    the others selects the blocks, and attends to some of them. The last to finish adds the results.
    """
    i_share = tl.program_id(0) % shares
    i_rg = (tl.program_id(0) // shares).to(tl.int64)
    i_r = i_rg // groups
    i_g = i_rg % groups
    o_head = tl.arange(0, HEADS_PADDED)  # [h]
    m_head = o_head < HEADS
    o_stat = i_rg * results * HEADS + o_head  # [h]: of the first part
    p_gate = p_g + (i_g * HEADS + o_head) * s_gh + i_r * s_gt  # [h]
    is_last = shares == 1
    b_y = tl.zeros([HEADS_PADDED, E_PADDED], dtype=ACC)  # [h, E]
    if i_share == 0:
        if COMPRESSES:
            b_o = _combine_parts(p_partial, p_highest, p_total, o_stat, m_head, 0, block_parts,
                            HEADS, HEADS_PADDED, E, E_PADDED, ACC, EXACT)  # fmt: skip
            b_y += b_o * _load_gate(p_gate, m_head, ACC)
        if SLIDES:
            b_o = _combine_parts(p_partial, p_highest, p_total, o_stat, m_head, block_parts, parts,
                            HEADS, HEADS_PADDED, E, E_PADDED, ACC, EXACT)  # fmt: skip
            b_y += b_o * _load_gate(p_gate + s_gc * (COMPRESSES + SELECTS), m_head, ACC)
    if SELECTS:
        p_gate += s_gc * COMPRESSES
        b_highest = tl.full([HEADS_PADDED], -_INFINITE, dtype=ACC)  # [h]
        b_total = tl.zeros([HEADS_PADDED], dtype=ACC)  # [h]
        b_o = tl.zeros([HEADS_PADDED, E_PADDED], dtype=ACC)  # [h, E]
        if (i_share > 0) | (shares == 1):
            tokens = tl.load(p_lengths + i_r)
            b_q = load_heads(p_q, (i_g * HEADS + o_head) * s_qh + i_r * s_qt, m_head, D, D_PADDED)  # [h, D]
            b_index = _select_best(
                p_scores + i_rg * blocks * HEADS_PADDED, p_highest, p_total,
                o_stat, m_head, tokens, block_parts, HEADS, HEADS_PADDED, ACC, EXACT,
                BLOCK_LEN, BLOCK_STRIDE, SELECT_LEN, LOG_PLACES, TAPS, LOG_CHUNK,
            )  # fmt: skip  # [N]
            o_place = tl.arange(0, 1 << LOG_PLACES)  # [N]
            tl.store(p_indices + i_rg * PLACES + o_place, b_index, mask=(o_place < PLACES) & (i_share <= 1))
            p_table = p_tables + i_r * table_row + tl.cast(columns, tl.int64) * _TOKENS
            PIECES: tl.constexpr = (SELECT_LEN + PIECE - 1) // PIECE
            # The blocks up to the token's own fill the first places. The others are empty.
            steps = tl.minimum(tl.cdiv(tokens, SELECT_LEN), PLACES) * PIECES
            part_steps = tl.cdiv(steps, tl.maximum(shares - 1, 1))
            first_step = tl.maximum(i_share - 1, 0) * part_steps
            for step in range(first_step, tl.minimum(first_step + part_steps, steps)):
                # A selection block never spans two pages.
                first = tl.sum(tl.where(o_place == step // PIECES, b_index, 0)) * SELECT_LEN
                page_row = _row_of_page(p_table, first, i_g, groups, PAGE_LEN) + first % PAGE_LEN
                o_row = step % PIECES * PIECE + tl.arange(0, PIECE)  # [K]
                m_key = (o_row < SELECT_LEN) & (o_row < tokens - first)
                b_k = load_rows(p_k + page_row * D, D, o_row, m_key, D, D_PADDED)  # [K, D]
                b_v = load_rows(p_v + page_row * E, E, o_row, m_key, E, E_PADDED)  # [K, E]
                b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee", out_dtype=ACC) * EXPONENT  # [h, K]
                b_highest, b_total, b_o = _add_keys(b_s, b_v, m_key, b_highest, b_total, b_o, EXACT, ACC)
        if is_last:
            # The sum is never 0, because the token's own block is always selected.
            b_y += b_o / b_total[:, None] * _load_gate(p_gate, m_head, ACC)
        else:
            _store_result(p_partial, p_highest, p_total, o_stat + (parts + i_share) * HEADS, m_head,
                          b_highest, b_total, tl.where(i_share == 0, b_y, b_o), E, E_PADDED)  # fmt: skip
            # All threads must have written their results before one of them counts the program as finished.
            tl.debug_barrier()
            is_last = tl.atomic_add(p_finished + i_rg, 1) == shares - 1
            if is_last:
                b_y = load_heads(p_partial, (o_stat + parts * HEADS) * E, m_head, E, E_PADDED)  # [h, E]
                b_o = _combine_parts(p_partial, p_highest, p_total, o_stat, m_head, parts + 1, results,
                                HEADS, HEADS_PADDED, E, E_PADDED, ACC, EXACT)  # fmt: skip
                b_y += b_o * _load_gate(p_gate, m_head, ACC)
    if is_last:
        store_heads(p_y, (i_rg * HEADS + o_head) * E, m_head, b_y, E, E_PADDED)


@triton.jit
def _block_count(tokens, BLOCK_LEN: tl.constexpr, BLOCK_STRIDE: tl.constexpr):
    return tl.where(tokens >= BLOCK_LEN, (tokens - BLOCK_LEN) // BLOCK_STRIDE + 1, 0)


@triton.jit
def _row_of_page(p_table, row, i_g, groups, PAGE_LEN: tl.constexpr):
    """Return the offset, in rows, of the page that contains `row`."""
    return (tl.load(p_table + row // PAGE_LEN).to(tl.int64) * groups + i_g) * PAGE_LEN


@triton.jit
def _load_gate(p_gate, m_head, ACC: tl.constexpr):
    return tl.load(p_gate, mask=m_head, other=0.0).to(ACC)[:, None]  # [h, 1]


@triton.jit
def _add_keys(b_s, b_v, m_key, b_highest, b_total, b_o, EXACT: tl.constexpr, ACC: tl.constexpr):
    """Add a tile of keys to the running maximum, sum and output of each head."""
    b_s = tl.where(m_key[None, :], b_s, -_INFINITE)  # [h, K]
    b_higher = tl.maximum(b_highest, tl.max(b_s, 1))
    # Without this, heads that have not attended to any key yet would compute -inf - -inf.
    b_shift = tl.where(b_higher == -_INFINITE, 0.0, b_higher)
    b_p = power(b_s - b_shift[:, None], EXACT)  # [h, K]
    b_shrink = power(b_highest - b_shift, EXACT)
    b_total = b_total * b_shrink + tl.sum(b_p, 1)
    b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o * b_shrink[:, None], input_precision="ieee", out_dtype=ACC)
    return b_higher, b_total, b_o


@triton.jit
def _store_result(
    p_partial, p_highest, p_total, o_stat, m_head, b_highest, b_total, b_o, E: tl.constexpr, E_PADDED: tl.constexpr
):  # fmt: skip
    """Write a partial softmax: the running maximum, sum and output of each head."""
    tl.store(p_highest + o_stat, b_highest, mask=m_head)
    tl.store(p_total + o_stat, b_total, mask=m_head)
    store_heads(p_partial, o_stat * E, m_head, b_o, E, E_PADDED)


@triton.jit
def _combine_parts(
    p_partial, p_highest, p_total, o_stat, m_head, first, stop,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, E: tl.constexpr, E_PADDED: tl.constexpr,
    ACC: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Return the combined output [h, E] of the partial results `first` to `stop` - 1."""
    b_highest = tl.full([HEADS_PADDED], -_INFINITE, dtype=ACC)  # [h]
    b_total = tl.zeros([HEADS_PADDED], dtype=ACC)  # [h]
    b_o = tl.zeros([HEADS_PADDED, E_PADDED], dtype=ACC)  # [h, E]
    for part in range(first, stop):
        o_part = o_stat + tl.cast(part, tl.int64) * HEADS
        b_part_highest = tl.load(p_highest + o_part, mask=m_head, other=-_INFINITE)
        b_part_total = tl.load(p_total + o_part, mask=m_head, other=0.0)
        b_part = load_heads(p_partial, o_part * E, m_head, E, E_PADDED)  # [h, E]
        b_higher = tl.maximum(b_highest, b_part_highest)
        b_shift = tl.where(b_higher == -_INFINITE, 0.0, b_higher)
        b_shrink, b_part_shrink = power(b_highest - b_shift, EXACT), power(b_part_highest - b_shift, EXACT)
        b_total = b_total * b_shrink + b_part_total * b_part_shrink
        b_o = b_o * b_shrink[:, None] + b_part * b_part_shrink[:, None]
        b_highest = b_higher
    return b_o / tl.where(b_total == 0.0, 1.0, b_total)[:, None]


@triton.jit
def _select_best(
    p_scores, p_highest, p_total, o_stat, m_head, tokens, block_parts,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, ACC: tl.constexpr, EXACT: tl.constexpr,
    BLOCK_LEN: tl.constexpr, BLOCK_STRIDE: tl.constexpr, SELECT_LEN: tl.constexpr,
    LOG_PLACES: tl.constexpr, TAPS: tl.constexpr, LOG_CHUNK: tl.constexpr,
):  # fmt: skip
    """Return the indices [N] of the most important blocks, the most important first. Empty places are -1."""
    CHUNK: tl.constexpr = 1 << LOG_CHUNK
    # The blocks of a chunk go to several lists, each as long as the number of blocks to keep if possible. Sorting many
    # short lists at once takes fewer steps than sorting a long one.
    LOG_LISTS: tl.constexpr = max(LOG_CHUNK - LOG_PLACES, 0)
    LISTS: tl.constexpr = 1 << LOG_LISTS
    PLACES_PADDED: tl.constexpr = 1 << LOG_PLACES
    b_highest = tl.full([HEADS_PADDED], -_INFINITE, dtype=ACC)  # [h]
    b_total = tl.zeros([HEADS_PADDED], dtype=ACC)  # [h]
    for part in range(block_parts):
        o_part = o_stat + tl.cast(part, tl.int64) * HEADS
        b_part_highest = tl.load(p_highest + o_part, mask=m_head, other=-_INFINITE)
        b_higher = tl.maximum(b_highest, b_part_highest)
        b_shift = tl.where(b_higher == -_INFINITE, 0.0, b_higher)
        b_part_total = tl.load(p_total + o_part, mask=m_head, other=0.0) * power(b_part_highest - b_shift, EXACT)
        b_total = b_total * power(b_highest - b_shift, EXACT) + b_part_total
        b_highest = b_higher
    b_highest = tl.where(b_highest == -_INFINITE, 0.0, b_highest)
    b_share_of_one = 1.0 / tl.where(b_total == 0.0, 1.0, b_total)  # [h]

    blocks = _block_count(tokens, BLOCK_LEN, BLOCK_STRIDE)
    o_head = tl.arange(0, HEADS_PADDED)
    b_current = tl.full([LISTS], 0, dtype=tl.int32) + (tokens - 1) // SELECT_LEN
    b_best = tl.full([LISTS, PLACES_PADDED], -1, dtype=tl.int64)  # of each list, ascending
    for chunk in range(tl.cdiv(tokens, CHUNK * SELECT_LEN)):
        o_selected = chunk * CHUNK + tl.arange(0, CHUNK)  # [C]
        b_sum = tl.zeros([HEADS_PADDED, CHUNK], dtype=ACC)  # [h, C]
        for tap in range(TAPS):
            o_block = block_of_tap(o_selected, tap, BLOCK_LEN, BLOCK_STRIDE, SELECT_LEN)  # [C]
            m_block = (o_block >= 0) & (o_block < blocks)
            o_score = o_block.to(tl.int64)[None, :] * HEADS_PADDED + o_head[:, None]  # [h, C]
            b_s = tl.load(p_scores + o_score, mask=m_head[:, None] & m_block[None, :], other=-_INFINITE)
            b_p = power(b_s - b_highest[:, None], EXACT) * b_share_of_one[:, None]  # [h, C]
            b_sum += b_p * weight_of_tap(o_selected, o_block, tap, ACC, BLOCK_LEN, BLOCK_STRIDE, SELECT_LEN)
        b_importance = tl.reshape(sum_over_heads(b_sum, 1, HEADS_PADDED, CHUNK), [LISTS, CHUNK >> LOG_LISTS])
        o_listed = tl.reshape(o_selected, [LISTS, CHUNK >> LOG_LISTS])
        b_best = with_chunk(b_best, b_importance, o_listed, b_current, LISTS, LOG_CHUNK - LOG_LISTS, LOG_PLACES)
    b_best = best_of(tl.reshape(b_best, [1, LISTS * PLACES_PADDED]), 1, LOG_LISTS + LOG_PLACES, LOG_PLACES)
    return tl.reshape(tl.where(b_best < 0, -1, (b_best & LAST_INDEX) ^ LAST_INDEX).to(tl.int32), [PLACES_PADDED])
