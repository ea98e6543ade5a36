"""Compute a lower bound (roofline) for the execution time of NSA on a GPU.

A visible pair of query and key costs 2 (D + E) operations in the forward and 2 (3 D + 2 E) in the backward pass. Each
part of the operation takes the time of its operations or of the bytes it must read and write once, whichever is longer;
the parts run one after another.
"""

from __future__ import annotations

from dataclasses import dataclass

# Dense bfloat16 operations per second and memory bytes per second, by a substring of torch's device name.
DEVICES = {"H200": (790e12, 4.3e12), "H100": (790e12, 3.0e12), "A100": (280e12, 1.8e12)}
_BYTES = 2  # bytes of a bfloat16 element
_STAT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of an NSA operation on a single sequence.

    Lengths are in tokens. The comments give the letters of the NSA paper.
    """

    tokens: int
    heads: int = 64
    groups: int = 4
    width: int = 128
    value_width: int = 128
    block_len: int = 32  # l
    block_stride: int = 16  # d
    select_len: int = 64  # l'
    select_count: int = 16  # n
    window: int = 512  # w

    @property
    def blocks(self) -> int:
        """Return the number of complete compressed blocks."""
        return max(0, (self.tokens - self.block_len) // self.block_stride + 1)


def pairs(shape: Shape) -> dict[str, int]:
    """Return, for each kind of attention, the number of visible query-key pairs per head."""
    tokens = shape.tokens
    compressed_pairs = sum(
        min(shape.blocks, max(0, (t + 1 - shape.block_len) // shape.block_stride + 1)) for t in range(tokens)
    )
    selected_pairs = 0
    for t in range(tokens):
        current = t // shape.select_len
        selected_pairs += (min(shape.select_count, current + 1) - 1) * shape.select_len + t % shape.select_len + 1
    return {
        "dense": tokens * (tokens + 1) // 2,
        "compressed": compressed_pairs,
        "selected": selected_pairs,
        "sliding": sum(min(shape.window, t + 1) for t in range(tokens)),
    }


def floors_ms(shape: Shape, device: str) -> dict[str, dict[str, float]] | None:
    """Return a lower bound for the time of each part, in milliseconds, or None if the GPU is unknown."""
    peak = next((numbers for name, numbers in DEVICES.items() if name in device), None)
    if peak is None:
        return None
    visible_pairs, floors = pairs(shape), {}
    for part, count in visible_pairs.items():
        keys = shape.blocks if part == "compressed" else shape.tokens
        work = count * shape.heads
        forward = 2 * (shape.width + shape.value_width) * work
        backward = 2 * (3 * shape.width + 2 * shape.value_width) * work
        traffic = _traffic(shape, keys)
        floors[part] = {"forward": _ms(forward, traffic, peak), "backward": _ms(backward, 2 * traffic, peak)}
    ranking = 2 * shape.width * visible_pairs["compressed"] * shape.heads
    read = _BYTES * shape.tokens * shape.heads * shape.width
    floors["importance"] = {"forward": _ms(ranking, read, peak), "backward": 0.0}
    output = _BYTES * shape.tokens * shape.heads * shape.value_width
    floors["mix"] = {"forward": _ms(0, 4 * output, peak), "backward": _ms(0, 7 * output, peak)}
    parts = ("compressed", "importance", "selected", "sliding", "mix")
    floors["whole"] = {
        direction: sum(floors[part][direction] for part in parts) for direction in ("forward", "backward")
    }
    return floors


def _traffic(shape: Shape, keys: int) -> float:
    """Return the minimum number of bytes that attention must read and write."""
    rows = shape.tokens * shape.heads
    own = rows * (shape.width + shape.value_width) * _BYTES + rows * _STAT_BYTES
    return own + keys * shape.groups * (shape.width + shape.value_width) * _BYTES


def _ms(operations: float, traffic: float, peak: tuple[float, float]) -> float:
    return 1e3 * max(operations / peak[0], traffic / peak[1])
