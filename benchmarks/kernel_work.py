"""How much each fused kernel has to do at a shape: programs, passes through their main loops, and bytes of memory.

Passes are counted from the spans and lists that the host hands to the kernels. What a change of a kernel's walk changes
here: which queries or keys a program walks (`_spans_walked`, `_chosen_walked`), and in which order (`spread_bytes`).
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
# Programs that run at once, to tell how often what they share is read: one for each multiprocessor of an H100 or H200.
RUNNING = 132


@dataclass(frozen=True, kw_only=True)
class Work:
    programs: int
    passes: int  # through the main loop, of all programs
    edges: int  # of these passes those through the loop that masks, where a walk has two loops
    longest: int  # passes of the longest program
    conditional: float  # part of the passes that run what only some passes run
    own_bytes: int  # read and written outside of the loops, once
    walked_bytes: int  # that the loops read, each byte once
    reads: float  # how often those come from memory at best, since the programs that share them do not run at once
    spread_bytes: int  # of them, what one more running program adds to what is in use at a time
    seen: int  # pairs of a query row and a key that count; 0 where a kernel multiplies no tiles of them
    walked: int  # pairs that the passes multiply


def work(launch: Launch, shape: Shape, indices: Tensor) -> Work:
    """`indices` [1, 1, T, n]: the choices of one group; all groups choose alike."""
    return _KERNELS[launch.name](launch, shape, indices)


def _spanned_queries(launch: Launch, shape: Shape, _: Tensor) -> Work:
    queries, keys = _queries(launch), launch.constants["KEYS"]
    spans = _spans(launch.part, shape)
    passes, edges = spans_walked(spans.first_key_T, spans.stop_key_T, queries, keys)
    distinct = _keys(launch, shape) * _pair_bytes(shape)
    return _walk(
        launch,
        passes.repeat(shape.groups),
        edges=int(edges.sum()) * shape.groups,
        own_bytes=_query_bytes(launch, shape),
        walked_bytes=distinct,
        spread_bytes=distinct // shape.groups // RUNNING,
        seen=int((spans.stop_key_T - spans.first_key_T).clamp_min(0).sum()) * shape.heads,
    )


def _spanned_keys(launch: Launch, shape: Shape, _: Tensor) -> Work:
    queries, keys, parts = _queries(launch), launch.constants["KEYS"], launch.argument("parts")
    spans = _spans(launch.part, shape)
    passes, edges = spans_walked(spans.first_query_S, spans.stop_query_S, keys, queries, parts)
    key_tiles = -(-_keys(launch, shape) // keys)
    distinct = shape.tokens * _row_bytes(shape)
    # Walks go down from the last query: tiles of keys begin them as far from each other as their last queries are.
    apart = int(spans.stop_query_S[-1] - spans.stop_query_S[0]) // max(1, key_tiles - 1)
    waves = launch.programs / shape.groups / RUNNING
    seen_by_tile = int(passes.sum()) * queries / (key_tiles * shape.tokens)  # part of all queries
    return _walk(
        launch,
        passes.repeat(shape.groups),
        edges=int(edges.sum()) * shape.groups,
        own_bytes=_key_bytes(launch, shape, parts),
        walked_bytes=distinct,
        reads=max(1.0, waves * min(1.0, seen_by_tile)),
        spread_bytes=apart * _row_bytes(shape) // shape.groups // parts,
        seen=int((spans.stop_key_T - spans.first_key_T).clamp_min(0).sum()) * shape.heads,
    )


def _ranked(launch: Launch, shape: Shape, _: Tensor) -> Work:
    queries, reach = launch.constants["QUERIES"], shape.select_len << launch.constants["LOG_CHUNK"]
    first = torch.arange(0, shape.tokens, queries)
    chunks = -(-(first + queries).clamp_max(shape.tokens) // reach)
    # Of these all but the first where every query sees all compressed blocks that reach into them.
    old = ((first + 1 - shape.block_len) // reach).clamp_min(0) - (1 if shape.block_len > shape.block_stride else 0)
    distinct = shape.blocks * shape.groups * shape.width * HALF
    rows = shape.tokens * shape.heads
    blocks = _spans("compressed", shape)
    return _walk(
        launch,
        (chunks * launch.constants["TAPS"]).repeat(shape.groups),
        edges=int((chunks - old.clamp_min(0)).sum()) * launch.constants["TAPS"] * shape.groups,
        conditional=1 / launch.constants["TAPS"],
        own_bytes=rows * (shape.width * HALF + FLOAT) + shape.tokens * shape.groups * shape.select_count * FLOAT,
        walked_bytes=distinct,
        spread_bytes=distinct // shape.groups // RUNNING,
        seen=int((blocks.stop_key_T - blocks.first_key_T).clamp_min(0).sum()) * shape.heads,
    )


def _selected_queries(launch: Launch, shape: Shape, indices: Tensor) -> Work:
    pieces, queries = -(-shape.select_len // launch.constants["KEYS"]), _queries(launch)
    passes = union_sizes(indices, queries, shape.select_len) * pieces
    # Each query chose its own block, which it does not see whole.
    first = torch.arange(0, shape.tokens, queries)
    own = (first + queries - 1).clamp_max(shape.tokens - 1) // shape.select_len - first // shape.select_len + 1
    distinct = shape.tokens * shape.groups * _pair_bytes(shape)
    return _walk(
        launch,
        passes.repeat(shape.groups),
        edges=int(own.sum()) * pieces * shape.groups,
        own_bytes=_query_bytes(launch, shape),
        walked_bytes=distinct,
        spread_bytes=distinct // shape.groups // RUNNING,
        seen=_chosen_pairs(indices, shape) * shape.heads,
    )


def _selected_keys(launch: Launch, shape: Shape, indices: Tensor) -> Work:
    pieces = -(-shape.select_len // launch.constants["KEYS"])
    passes = segment_passes(indices, shape.select_len, launch.argument("length"), _queries(launch))
    distinct = shape.tokens * _row_bytes(shape)
    chosen = min(1.0, shape.select_count / max(1, shape.tokens // shape.select_len))
    # Of all queries those that chose any of the blocks that run at once, for each wave of programs.
    touched = 1 - (1 - chosen) ** RUNNING
    waves = max(1.0, len(passes) * pieces * shape.groups / RUNNING) / shape.groups
    return _walk(
        launch,
        passes.repeat_interleave(pieces).repeat(shape.groups),
        own_bytes=_key_bytes(launch, shape, 1),
        walked_bytes=distinct,
        reads=max(1.0, min(waves * touched, shape.select_count)),
        spread_bytes=shape.select_len * _row_bytes(shape) // shape.groups,
        seen=_chosen_pairs(indices, shape) * shape.heads,
    )


def _selected_sum(launch: Launch, shape: Shape, indices: Tensor) -> Work:
    length = lists_length(shape)
    cuts = cuts_of_blocks(indices, shape.select_len, length)
    several = torch.where(cuts > 1, cuts, 0)
    pieces = -(-shape.select_len // launch.constants["KEYS"])
    tile = shape.select_len * (shape.width + shape.value_width)
    return _walk(
        launch,
        several.repeat_interleave(pieces).repeat(shape.groups),
        own_bytes=int((cuts > 1).sum()) * shape.groups * tile * HALF,
        walked_bytes=int(several.sum()) * shape.groups * tile * FLOAT,
        spread_bytes=0,
        seen=0,
    )


def _mix(launch: Launch, shape: Shape, _: Tensor) -> Work:
    output = shape.tokens * shape.heads * shape.value_width * HALF
    gates = 3 * shape.tokens * shape.heads * HALF
    return _straight(launch, 4 * output + gates if launch.name == "mix_forward" else 7 * output + 2 * gates)


def _unions(launch: Launch, shape: Shape, _: Tensor) -> Work:
    """First tokens and members of as many places as were chosen."""
    return _straight(launch, 3 * _index_bytes(shape))


def _list_keys(launch: Launch, shape: Shape, _: Tensor) -> Work:
    return _straight(launch, _index_bytes(shape) + _list_bytes(launch, shape))


def _list_segments(launch: Launch, shape: Shape, _: Tensor) -> Work:
    """Three searches by halves in the list of a row, for so many blocks at a time: each waits for the one before."""
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


def _straight(launch: Launch, moved: int) -> Work:
    """Of a kernel without a loop."""
    return Work(
        programs=launch.programs,
        passes=0,
        edges=0,
        longest=0,
        conditional=0.0,
        own_bytes=moved,
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
    "spanned_forward": _spanned_queries,
    "spanned_backward_queries": _spanned_queries,
    "spanned_backward_keys": _spanned_keys,
    "ranked_blocks": _ranked,
    "selected_unions": _unions,
    "selected_keys": _list_keys,
    "selected_segments": _list_segments,
    "selected_forward": _selected_queries,
    "selected_backward_queries": _selected_queries,
    "selected_backward_keys": _selected_keys,
    "selected_backward_sum": _selected_sum,
    "mix_forward": _mix,
    "mix_backward": _mix,
}


def spans_walked(first: Tensor, stop: Tensor, width: int, step: int, parts: int = 1) -> tuple[Tensor, Tensor]:
    """Passes of each program over a tile of `width` spans, and those of them that must mask (spanned_kernels.plan_walk).

    Both are shared out to `parts` programs, each by itself.
    """
    firsts, common_firsts = _tiles(first, width, amin=2**31 - 1), _tiles(first, width, amax=0)
    stops, common_stops = _tiles(stop, width, amax=0), _tiles(stop, width, amin=2**31 - 1)
    steps = -((firsts - stops) // step).clamp_max(0)
    lead = -((firsts - common_firsts) // step)
    inner = (common_stops - firsts - lead * step).clamp_min(0) // step
    part = torch.arange(parts)
    edges = -((part - (steps - inner)[:, None]) // parts)
    return (edges - ((part - inner[:, None]) // parts)).flatten(), edges.flatten()


def _tiles(values: Tensor, width: int, **reduced: int) -> Tensor:
    """The least or the greatest value of each tile: `amin` or `amax` with what stands for none."""
    ((name, none),) = reduced.items()
    padded = torch.nn.functional.pad(values.long(), (0, -values.shape[0] % width), value=none)
    tiles: Tensor = getattr(padded.reshape(-1, width), name)(1)
    return tiles


def union_sizes(indices: Tensor, queries: int, select_len: int) -> Tensor:
    """Blocks that any query of a tile chose, for each tile of one group."""
    chosen = _chosen(indices, select_len)
    padding = -chosen.shape[0] % queries
    tiles = torch.nn.functional.pad(chosen, (0, 0, 0, padding), value=-1).reshape(-1, queries * chosen.shape[1])
    ascending = tiles.sort(-1).values
    new = torch.nn.functional.pad(ascending, (1, 0), value=-1).diff(dim=-1) > 0
    return new.sum(-1)


def segment_passes(indices: Tensor, select_len: int, length: int, queries: int) -> Tensor:
    """Passes over each segment of a block's queries, for the blocks of one group."""
    places, cuts = _places(indices, select_len), cuts_of_blocks(indices, select_len, length)
    number = torch.arange(int(cuts.sum())) - (cuts.cumsum(0) - cuts).repeat_interleave(cuts)
    left = (places.repeat_interleave(cuts) - number * length).clamp(0, length)
    return -(-left // queries)


def cuts_of_blocks(indices: Tensor, select_len: int, length: int) -> Tensor:
    """Segments of each block of one group; a block that nobody chose has one."""
    return (-(-_places(indices, select_len) // length)).clamp_min(1)


def _places(indices: Tensor, select_len: int) -> Tensor:
    """How many queries chose each block of one group."""
    chosen = _chosen(indices, select_len)
    return torch.bincount(chosen[chosen >= 0], minlength=-(-chosen.shape[0] // select_len))


def _chosen(indices: Tensor, select_len: int) -> Tensor:
    """The blocks [T, n] that each query of one group sees by its choice, -1 for none, each once."""
    chosen = indices[0, 0].long()
    own = torch.arange(chosen.shape[0]) // select_len
    chosen = torch.where(chosen <= own[:, None], chosen, -1).sort(-1).values
    repeated = torch.nn.functional.pad(chosen, (1, 0), value=-1).diff(dim=-1) == 0
    return torch.where(repeated, -1, chosen)


def lists_length(shape: Shape) -> int:
    """Places of a segment, as selected.selected() has it."""
    return FAIR_SHARE * shape.select_len * max(1, shape.select_count)


def _walk(
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
    )


def _queries(launch: Launch) -> int:
    return launch.constants["ROWS"] // launch.constants["HEADS_PADDED"]


@cache
def _spans(part: str, shape: Shape) -> Spans:
    if part == "sliding":
        return window_spans(shape.tokens, shape.window, None, torch.device("cpu"))
    lengths = (shape.block_len, shape.block_stride)
    return block_spans(shape.tokens, shape.blocks, *lengths, None, torch.device("cpu"))


def _chosen_pairs(indices: Tensor, shape: Shape) -> int:
    """Pairs of a query and a token that it sees, per head."""
    index = indices[0, 0].long()
    query = torch.arange(shape.tokens)[:, None]
    seen = (query + 1 - index * shape.select_len).clamp(0, shape.select_len)
    return int(torch.where(index >= 0, seen, 0).sum())


def _keys(launch: Launch, shape: Shape) -> int:
    return shape.blocks if launch.part == "compressed" else shape.tokens


def _pair_bytes(shape: Shape) -> int:
    """Of a key and its value."""
    return (shape.width + shape.value_width) * HALF


def _row_bytes(shape: Shape) -> int:
    """Of a query and the gradient of its output, with two statistics, over all heads."""
    return shape.heads * (_pair_bytes(shape) + 2 * FLOAT)


def _query_bytes(launch: Launch, shape: Shape) -> int:
    rows = shape.tokens * shape.heads
    if "forward" in launch.name:
        return rows * ((shape.width + shape.value_width) * HALF + FLOAT)
    # With a gate and its gradient; to be added to, the gradient of the queries is read as well.
    halves = 2 * (shape.width + shape.value_width) + (2 if launch.argument("p_g") is not None else 0)
    halves += shape.width if launch.constants["ADDS"] else 0
    return rows * (halves * HALF + 2 * FLOAT)


def _key_bytes(launch: Launch, shape: Shape, parts: int) -> int:
    pairs = _keys(launch, shape) * shape.groups * (shape.width + shape.value_width)
    return pairs * (HALF + (HALF if parts == 1 else parts * FLOAT))
