"""Compute the amount of work in each fused kernel, such as loop passes and memory traffic.

Passes are counted from the spans and lists that the host passes to the kernels. If the loop of a kernel changes, adapt
which queries or keys a program loops over (`spans_walked`, `union_sizes`, `segment_passes`), and in which order
(`spread_bytes`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.roofline import Shape
from nsa_attention.ops.fused.selected import FAIR_SHARE
from nsa_attention.ops.fused.spanned import Spans, block_spans, window_spans

if TYPE_CHECKING:
    from benchmarks.compiled import Launch

HALF, FLOAT = 2, 4  # bytes of an element
# Number of programs that run at the same time: one per multiprocessor of an H100 or H200. It determines how often data
# that programs share are read.
RUNNING = 132


@dataclass(frozen=True, kw_only=True)
class Work:
    """The amount of work done by one kernel launch."""

    programs: int
    passes: int  # passes through the main loop, summed over all programs
    edges: int  # those of the passes that run the loop with masks, for kernels with two loops
    longest: int  # passes of the program with the most passes
    conditional: float  # fraction of the passes that run the conditional part of the loop
    own_bytes: int  # bytes read and written outside of the loops
    walked_bytes: int  # distinct bytes that the loops read
    reads: float  # how often the distinct bytes are read from memory at best, because programs run one after another
    spread_bytes: int  # distinct bytes that each additional running program adds to the working set
    seen: int  # visible pairs of query row and key; 0 for kernels without matrix products
    walked: int  # pairs that the passes multiply, including masked ones
    sum_bytes: int = 0  # bytes of the sum for atomics that move between the L2 cache and memory, at least


def work(launch: Launch, shape: Shape, indices: Tensor) -> Work:
    """Return the amount of work done by one kernel launch.

    `indices` [1, 1, T, n] are the selected blocks of one group. They are used for all groups.
    """
    return _KERNELS[launch.name](launch, shape, indices)


def _spanned_query_work(launch: Launch, shape: Shape, _: Tensor) -> Work:
    queries, keys = _queries(launch), launch.constants["KEYS"]
    spans = _spans(launch.part, shape)
    passes, edges = spans_walked(spans.first_key_T, spans.stop_key_T, queries, keys)
    distinct = _keys(launch, shape) * _pair_bytes(shape)
    return _loop_work(
        launch,
        passes.repeat(shape.groups),
        edges=int(edges.sum()) * shape.groups,
        own_bytes=_query_bytes(launch, shape),
        walked_bytes=distinct,
        spread_bytes=distinct // shape.groups // RUNNING,
        seen=int((spans.stop_key_T - spans.first_key_T).clamp_min(0).sum()) * shape.heads,
    )


def _spanned_key_work(launch: Launch, shape: Shape, _: Tensor) -> Work:
    queries, keys, parts = _queries(launch), launch.constants["KEYS"], launch.argument("parts")
    spans, is_atomic = _spans(launch.part, shape), launch.argument("p_dq") is not None
    walk = (spans.first_query_S, spans.stop_query_S, keys, queries, parts)
    passes, edges = spans_walked(*walk, masks_missing=is_atomic)
    key_tiles = -(-_keys(launch, shape) // keys)
    distinct = shape.tokens * _row_bytes(shape)
    # The loops go down from the last query, so the distance of two key tiles in memory is that of their last queries.
    apart = int(spans.stop_query_S[-1] - spans.stop_query_S[0]) // max(1, key_tiles - 1)
    waves = launch.programs / shape.groups / RUNNING
    seen_by_tile = int(passes.sum()) * queries / (key_tiles * shape.tokens)  # fraction of all queries
    reads = max(1.0, waves * min(1.0, seen_by_tile))
    sum_row_bytes = shape.heads * shape.width * FLOAT if is_atomic else 0
    return _loop_work(
        launch,
        passes.repeat(shape.groups),
        edges=int(edges.sum()) * shape.groups,
        own_bytes=_key_bytes(launch, shape, parts),
        walked_bytes=distinct,
        reads=reads,
        spread_bytes=apart * (_row_bytes(shape) + sum_row_bytes) // shape.groups // parts,
        sum_bytes=round(2 * reads * shape.tokens * sum_row_bytes),
        seen=int((spans.stop_key_T - spans.first_key_T).clamp_min(0).sum()) * shape.heads,
    )


def _ranking_work(launch: Launch, shape: Shape, _: Tensor) -> Work:
    queries, reach = launch.constants["QUERIES"], shape.select_len << launch.constants["LOG_CHUNK"]
    first = torch.arange(0, shape.tokens, queries)
    chunks = -(-(first + queries).clamp_max(shape.tokens) // reach)
    # Chunks in which every query attends to all overlapping compressed blocks, except the first chunk.
    old = ((first + 1 - shape.block_len) // reach).clamp_min(0) - (1 if shape.block_len > shape.block_stride else 0)
    distinct = shape.blocks * shape.groups * shape.width * HALF
    rows = shape.tokens * shape.heads
    blocks = _spans("compressed", shape)
    return _loop_work(
        launch,
        (chunks * launch.constants["TAPS"]).repeat(shape.groups),
        edges=int((chunks - old.clamp_min(0)).sum()) * launch.constants["TAPS"] * shape.groups,
        conditional=1 / launch.constants["TAPS"],
        own_bytes=rows * (shape.width * HALF + FLOAT) + shape.tokens * shape.groups * shape.select_count * FLOAT,
        walked_bytes=distinct,
        spread_bytes=distinct // shape.groups // RUNNING,
        seen=int((blocks.stop_key_T - blocks.first_key_T).clamp_min(0).sum()) * shape.heads,
    )


def _selected_query_work(launch: Launch, shape: Shape, indices: Tensor) -> Work:
    pieces, queries = -(-shape.select_len // launch.constants["KEYS"]), _queries(launch)
    passes = union_sizes(indices, queries, shape.select_len) * pieces
    # Each query selects its own block, in which it attends only to earlier tokens.
    first = torch.arange(0, shape.tokens, queries)
    own = (first + queries - 1).clamp_max(shape.tokens - 1) // shape.select_len - first // shape.select_len + 1
    distinct = shape.tokens * shape.groups * _pair_bytes(shape)
    return _loop_work(
        launch,
        passes.repeat(shape.groups),
        edges=int(own.sum()) * pieces * shape.groups,
        own_bytes=_query_bytes(launch, shape),
        walked_bytes=distinct,
        spread_bytes=distinct // shape.groups // RUNNING,
        seen=_selected_pairs(indices, shape) * shape.heads,
    )


def _selected_key_work(launch: Launch, shape: Shape, indices: Tensor) -> Work:
    pieces = -(-shape.select_len // launch.constants["KEYS"])
    passes = segment_passes(indices, shape.select_len, launch.argument("length"), _queries(launch))
    distinct = shape.tokens * _row_bytes(shape)
    selected_share = min(1.0, shape.select_count / max(1, shape.tokens // shape.select_len))
    # Fraction of all queries that selected any of the blocks that run at the same time, per wave of programs.
    touched_share = 1 - (1 - selected_share) ** RUNNING
    waves = max(1.0, len(passes) * pieces * shape.groups / RUNNING) / shape.groups
    return _loop_work(
        launch,
        passes.repeat_interleave(pieces).repeat(shape.groups),
        own_bytes=_key_bytes(launch, shape, 1),
        walked_bytes=distinct,
        reads=max(1.0, min(waves * touched_share, shape.select_count)),
        spread_bytes=shape.select_len * _row_bytes(shape) // shape.groups,
        seen=_selected_pairs(indices, shape) * shape.heads,
    )


def _partial_sum_work(launch: Launch, shape: Shape, indices: Tensor) -> Work:
    length = lists_length(shape)
    cuts = cuts_of_blocks(indices, shape.select_len, length)
    several = torch.where(cuts > 1, cuts, 0)
    pieces = -(-shape.select_len // launch.constants["KEYS"])
    tile = shape.select_len * (shape.width + shape.value_width)
    return _loop_work(
        launch,
        several.repeat_interleave(pieces).repeat(shape.groups),
        own_bytes=int((cuts > 1).sum()) * shape.groups * tile * HALF,
        walked_bytes=int(several.sum()) * shape.groups * tile * FLOAT,
        spread_bytes=0,
        seen=0,
    )


def _mix_work(launch: Launch, shape: Shape, _: Tensor) -> Work:
    output = shape.tokens * shape.heads * shape.value_width * HALF
    gates = 3 * shape.tokens * shape.heads * HALF
    return _loopless_work(launch, 4 * output + gates)


def _statistics_work(launch: Launch, shape: Shape, _: Tensor) -> Work:
    # The output, its gradient, a gate and its gradient; the log-sum-exp, and the two statistics.
    row = 2 * (shape.value_width + 1) * HALF + 3 * FLOAT
    return _loopless_work(launch, shape.tokens * shape.heads * row)


def _union_work(launch: Launch, shape: Shape, _: Tensor) -> Work:
    return _loopless_work(launch, 3 * _index_bytes(shape))


def _list_key_work(launch: Launch, shape: Shape, _: Tensor) -> Work:
    return _loopless_work(launch, _index_bytes(shape) + _list_bytes(launch, shape))


def _list_segment_work(launch: Launch, shape: Shape, _: Tensor) -> Work:
    """Return the work done by the kernel `selected_segments`, which performs binary searches."""
    blocks, places = launch.argument("blocks"), launch.argument("places")
    passes = 3 * -(-(blocks + 1) // launch.constants["BLOCKS"]) * places.bit_length()
    table = 4 * (blocks + 1) + launch.argument("segments")
    return Work(
        programs=launch.programs,
        passes=launch.programs * passes,
        edges=0,
        longest=passes,
        conditional=0.0,
        own_bytes=launch.programs * table * FLOAT,
        walked_bytes=_list_bytes(launch, shape),
        reads=1.0,
        spread_bytes=0,
        seen=0,
        walked=0,
    )


def _loopless_work(launch: Launch, moved_bytes: int) -> Work:
    return Work(
        programs=launch.programs,
        passes=0,
        edges=0,
        longest=0,
        conditional=0.0,
        own_bytes=moved_bytes,
        walked_bytes=0,
        reads=1.0,
        spread_bytes=0,
        seen=0,
        walked=0,
    )


def _index_bytes(shape: Shape) -> int:
    return shape.groups * shape.tokens * shape.select_count * FLOAT


def _list_bytes(launch: Launch, shape: Shape) -> int:
    return _index_bytes(shape) // FLOAT * launch.argument("p_key").element_size()


_KERNELS: dict[str, Callable[[Launch, Shape, Tensor], Work]] = {
    "spanned_forward": _spanned_query_work,
    "spanned_backward_queries": _spanned_query_work,
    "spanned_backward_keys": _spanned_key_work,
    "spanned_statistics": _statistics_work,
    "ranked_blocks": _ranking_work,
    "selected_unions": _union_work,
    "selected_keys": _list_key_work,
    "selected_segments": _list_segment_work,
    "selected_forward": _selected_query_work,
    "selected_backward_queries": _selected_query_work,
    "selected_backward_keys": _selected_key_work,
    "selected_backward_sum": _partial_sum_work,
    "mix_forward": _mix_work,
}


def spans_walked(
    first: Tensor, stop: Tensor, width: int, step: int, parts: int = 1, *, masks_missing: bool = False
) -> tuple[Tensor, Tensor]:
    """Return two counts for each program: its loop passes, and those of them that need masks.

    This repeats the plan of spanned_kernels.plan_walk. `first` and `stop` bound the span of each query or key. Passes
    with and without masks are each split over `parts` programs. If `masks_missing`, all passes of a tile that is not
    full need masks.
    """
    firsts, common_firsts = _reduce_tiles(first, width, amin=2**31 - 1), _reduce_tiles(first, width, amax=0)
    stops = _reduce_tiles(stop, width, amax=0)
    common_stops = _reduce_tiles(stop, width, amin=0 if masks_missing else 2**31 - 1)
    steps = -((firsts - stops) // step).clamp_max(0)
    lead = -((firsts - common_firsts) // step)
    inner = (common_stops - firsts - lead * step).clamp_min(0) // step
    part = torch.arange(parts)
    edges = -((part - (steps - inner)[:, None]) // parts)
    return (edges - ((part - inner[:, None]) // parts)).flatten(), edges.flatten()


def _reduce_tiles(values: Tensor, width: int, **reduction: int) -> Tensor:
    """Return the minimum or maximum of each group of `width` consecutive values.

    The keyword is `amin` or `amax`; its value pads the last group.
    """
    ((name, neutral),) = reduction.items()
    padded_values = torch.nn.functional.pad(values.long(), (0, -values.shape[0] % width), value=neutral)
    tiles: Tensor = getattr(padded_values.reshape(-1, width), name)(1)
    return tiles


def union_sizes(indices: Tensor, queries: int, select_len: int) -> Tensor:
    """Return, for each tile of queries, the number of distinct blocks that they selected."""
    selections = _distinct_selections(indices, select_len)
    padding = -selections.shape[0] % queries
    tiles = torch.nn.functional.pad(selections, (0, 0, 0, padding), value=-1).reshape(-1, queries * selections.shape[1])
    ascending = tiles.sort(-1).values
    new = torch.nn.functional.pad(ascending, (1, 0), value=-1).diff(dim=-1) > 0
    return new.sum(-1)


def segment_passes(indices: Tensor, select_len: int, length: int, queries: int) -> Tensor:
    """Return the number of loop passes over each segment of queries that selected the same block."""
    readers, cuts = _reader_counts(indices, select_len), cuts_of_blocks(indices, select_len, length)
    number = torch.arange(int(cuts.sum())) - (cuts.cumsum(0) - cuts).repeat_interleave(cuts)
    remaining = (readers.repeat_interleave(cuts) - number * length).clamp(0, length)
    return -(-remaining // queries)


def cuts_of_blocks(indices: Tensor, select_len: int, length: int) -> Tensor:
    """Return the number of segments into which the queries of each block are split."""
    return (-(-_reader_counts(indices, select_len) // length)).clamp_min(1)


def _reader_counts(indices: Tensor, select_len: int) -> Tensor:
    """Return, for each block, the number of queries that selected it."""
    selections = _distinct_selections(indices, select_len)
    return torch.bincount(selections[selections >= 0], minlength=-(-selections.shape[0] // select_len))


def _distinct_selections(indices: Tensor, select_len: int) -> Tensor:
    """Return the distinct blocks [T, n] selected by each query. Unused positions are -1."""
    selections = indices[0, 0].long()
    own = torch.arange(selections.shape[0]) // select_len
    selections = torch.where(selections <= own[:, None], selections, -1).sort(-1).values
    is_repeated = torch.nn.functional.pad(selections, (1, 0), value=-1).diff(dim=-1) == 0
    return torch.where(is_repeated, -1, selections)


def lists_length(shape: Shape) -> int:
    """Return the maximum number of queries in a segment of a block's queries."""
    return FAIR_SHARE * shape.select_len * max(1, shape.select_count)


def _loop_work(
    launch: Launch,
    passes: Tensor,
    *,
    own_bytes: int,
    walked_bytes: int,
    spread_bytes: int,
    seen: int,
    edges: int = 0,
    reads: float = 1.0,
    conditional: float = 1.0,
    sum_bytes: int = 0,
) -> Work:
    constants = launch.constants
    if launch.name == "ranked_blocks":
        pairs = constants["QUERIES"] * constants["HEADS_PADDED"] << constants["LOG_CHUNK"]
    else:
        pairs = constants.get("ROWS", 0) * constants["KEYS"]
    return Work(
        programs=launch.programs,
        passes=int(passes.sum()),
        edges=edges,
        longest=int(passes.max()),
        conditional=conditional,
        own_bytes=own_bytes,
        walked_bytes=walked_bytes,
        reads=reads,
        spread_bytes=spread_bytes,
        seen=seen,
        walked=int(passes.sum()) * pairs,
        sum_bytes=sum_bytes,
    )


def _queries(launch: Launch) -> int:
    return launch.constants["ROWS"] // launch.constants["HEADS_PADDED"]


@cache
def _spans(part: str, shape: Shape) -> Spans:
    if part == "sliding":
        return window_spans(shape.tokens, shape.window, None, torch.device("cpu"))
    lengths = (shape.block_len, shape.block_stride)
    return block_spans(shape.tokens, shape.blocks, *lengths, None, torch.device("cpu"))


def _selected_pairs(indices: Tensor, shape: Shape) -> int:
    """Return the number of visible query-key pairs per head in the selected branch."""
    index = indices[0, 0].long()
    query = torch.arange(shape.tokens)[:, None]
    visible = (query + 1 - index * shape.select_len).clamp(0, shape.select_len)
    return int(torch.where(index >= 0, visible, 0).sum())


def _keys(launch: Launch, shape: Shape) -> int:
    return shape.blocks if launch.part == "compressed" else shape.tokens


def _pair_bytes(shape: Shape) -> int:
    return (shape.width + shape.value_width) * HALF


def _row_bytes(shape: Shape) -> int:
    """Return the number of bytes, over all heads, that the backward pass reads for each query position."""
    return shape.heads * (_pair_bytes(shape) + 2 * FLOAT)


def _query_bytes(launch: Launch, shape: Shape) -> int:
    rows = shape.tokens * shape.heads
    if "forward" in launch.name:
        return rows * ((shape.width + shape.value_width) * HALF + FLOAT)
    # With gates, a gate and its gradient are moved as well; with ADDS, the gradient of the queries is also read.
    halves = shape.width + 2 * shape.value_width + (2 if launch.argument("p_g") is not None else 0)
    gradients = shape.width * (2 if launch.constants["ADDS"] else 1)
    return rows * (halves * HALF + 2 * FLOAT + gradients * launch.argument("p_dq").element_size())


def _key_bytes(launch: Launch, shape: Shape, parts: int) -> int:
    pairs = _keys(launch, shape) * shape.groups * (shape.width + shape.value_width)
    return pairs * (HALF + (HALF if parts == 1 else parts * FLOAT))
