"""The tile sizes to try for each kernel, by GPU.

The first tile of each list is used if nothing was measured. On the GPUs of its list it spills no registers at width 128
in half precision (`tests/nsa/fused/test_fused_compile.py`). The kernels of the forward pass and of the gradient of the
queries hold rows; a row is one query and one head. The kernels for the gradients of keys and values hold keys.

Paged decoding has its own list (`cached.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from .launch import Tile
from .tuning import TuningKey

_Sizes = Sequence[tuple[int, int, int, int]]  # rows, keys, warps, stages

# By the first compute capability of a family of GPUs, times ten:
# 80: products of single warps (mma.sync), operands in registers. Large tiles spill. GPUs of the family with compute
#     capability 8.6 and 8.9 have 99 KiB of shared memory for a program, others 163 KiB.
# 90: products of four warps, operands in shared memory, 227 KiB.
# 100: products of a whole program, sums in tensor memory, 227 KiB. The compiler refuses some tiles.
_FORWARD: dict[int, _Sizes] = {
    80: ((128, 64, 8, 3), (64, 64, 4, 2), (128, 64, 8, 2), (64, 64, 4, 3), (128, 32, 8, 3), (32, 32, 4, 1)),
    90: ((128, 64, 8, 3), (128, 128, 8, 3), (64, 64, 4, 3), (256, 64, 16, 3), (64, 32, 4, 3), (32, 32, 4, 1)),
}
# Long spans: 128 keys rescale the output half as often. For a window, 128 keys would load more masked keys.
_FORWARD_COMPRESSED: dict[int, _Sizes] = {
    80: _FORWARD[80],
    90: ((128, 128, 8, 3), (128, 64, 8, 3), (64, 64, 4, 3), (256, 64, 16, 3), (64, 32, 4, 3), (32, 32, 4, 1)),
}
_BACKWARD_QUERIES: dict[int, _Sizes] = {
    80: ((64, 64, 4, 2), (128, 32, 8, 2), (128, 32, 8, 3), (64, 32, 4, 3), (32, 32, 4, 1)),
    # Shared memory fits one program of the first ones, so eight warps hide more latency.
    90: ((128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3), (64, 32, 4, 3), (128, 32, 8, 3), (32, 32, 4, 1)),
}
# Every four warps get 64 keys: with fewer keys, two warp groups would compute the same scores.
_BACKWARD_KEYS: dict[int, _Sizes] = {
    80: ((32, 64, 4, 3), (32, 64, 4, 2), (64, 64, 8, 3), (64, 64, 8, 2), (32, 32, 4, 1)),
    90: ((32, 64, 4, 3), (64, 128, 8, 3), (32, 128, 8, 3), (32, 64, 4, 4), (16, 64, 4, 4), (32, 32, 4, 1)),
}
# Most queries attend to each compressed key, and tiles of 128 keys read the queries half as often.
_BACKWARD_KEYS_COMPRESSED: dict[int, _Sizes] = {
    80: _BACKWARD_KEYS[80],
    90: ((64, 128, 8, 3), (32, 64, 4, 3), (32, 128, 8, 3), (32, 64, 4, 4), (16, 64, 4, 4), (32, 32, 4, 1)),
}
# With atomics. In addition to two sums, a step holds a tile of the gradient of the queries.
_BACKWARD_ATOMIC: dict[int, _Sizes] = {
    80: ((64, 64, 8, 3), (64, 128, 8, 2), (64, 64, 8, 2), (32, 64, 4, 2), (32, 64, 4, 1), (32, 32, 4, 1)),
    90: ((64, 128, 8, 3), (64, 128, 8, 2), (64, 64, 4, 3), (32, 128, 8, 3), (32, 64, 4, 3), (32, 32, 4, 1)),
    # Tiles of 64 rows and 128 keys do not fit into tensor memory.
    100: ((64, 64, 4, 3), (32, 128, 8, 3), (64, 64, 4, 2), (32, 64, 4, 3), (32, 32, 4, 1)),
}
# Each program reads all keys before its queries, so memory traffic is proportional to T / rows.
_RANKED: dict[int, _Sizes] = {
    80: ((64, 64, 4, 2), (128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 3), (64, 32, 4, 2)),
    90: ((128, 64, 4, 3), (256, 64, 8, 3), (64, 64, 4, 3), (64, 32, 4, 2)),
    100: ((128, 64, 8, 3), (64, 64, 4, 2), (64, 32, 4, 2)),
}
# Few rows are better if neighbouring queries select different blocks, many rows if they select the same. A warp group
# multiplies 64 rows at once. Two programs of the first tile for 90 fit on a multiprocessor: one of them multiplies
# while the other computes exponentials.
_SELECTED_FORWARD: dict[int, _Sizes] = {
    80: ((64, 64, 4, 2), (128, 64, 8, 3), (64, 32, 4, 3), (64, 64, 8, 3), (32, 32, 4, 1)),
    90: ((64, 64, 4, 2), (128, 64, 8, 3), (64, 64, 4, 3), (64, 32, 4, 4), (64, 64, 8, 3), (64, 32, 4, 1)),
    100: ((64, 32, 4, 4), (128, 64, 8, 3), (64, 32, 4, 3), (64, 32, 4, 1)),
}
_SELECTED_BACKWARD_QUERIES: dict[int, _Sizes] = {
    80: ((64, 32, 4, 3), (64, 32, 4, 2), (32, 32, 4, 1)),
    90: ((64, 64, 4, 2), (128, 64, 8, 3), (64, 64, 4, 3), (64, 32, 4, 4), (64, 64, 8, 3), (64, 32, 4, 1)),
}
# Two sums stay in registers: with four warps and 64 x 64 tiles they spill at width 128.
_SELECTED_BACKWARD_KEYS: dict[int, _Sizes] = {
    80: ((64, 64, 8, 2), (64, 64, 8, 3), (32, 32, 4, 3), (16, 64, 4, 3), (32, 32, 4, 1)),
    # With eight warps, both warp groups multiply all 64 keys with all queries, which doubles the products for S and dP.
    90: (
        *((32, 64, 4, 3), (32, 64, 4, 4), (16, 64, 4, 4), (64, 64, 8, 3), (64, 64, 8, 1), (128, 64, 8, 1)),
        (32, 32, 4, 1),
    ),
}
TABLES: dict[str, dict[int, _Sizes]] = {
    "spanned_forward": _FORWARD,
    "spanned_forward compressed": _FORWARD_COMPRESSED,
    "spanned_backward_queries": _BACKWARD_QUERIES,
    "spanned_backward_atomic": _BACKWARD_ATOMIC,
    "spanned_backward_keys": _BACKWARD_KEYS,
    "spanned_backward_keys compressed": _BACKWARD_KEYS_COMPRESSED,
    "ranked_blocks": _RANKED,
    "selected_forward": _SELECTED_FORWARD,
    "selected_backward_queries": _SELECTED_BACKWARD_QUERIES,
    "selected_backward_keys": _SELECTED_BACKWARD_KEYS,
}


def candidate_tiles(tuning_key: TuningKey) -> list[Tile]:
    """Return the tile sizes to try for a kernel, best guess first, with at least one row for each head of a group."""
    name = tuning_key.kernel.partition(",")[0]
    with_pattern = f"{name} {tuning_key.pattern.partition(' ')[0]}"
    table = TABLES.get(with_pattern, TABLES[name])
    return tuning_key.tiles(*table[family(tuning_key.capability, table)])


def family(capability: int, families: dict[int, _Sizes]) -> int:
    """Return the entry of `families` for GPUs of a compute capability, times ten.

    0, the interpreter, gets the entry for 90.
    """
    # GPUs with compute capability 12 multiply like those with 8.
    capability = {0: 90}.get(capability, 80 if capability >= 120 else capability)
    return max((first for first in families if first <= capability), default=min(families))
