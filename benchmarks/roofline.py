"""The least time the operation can take on a GPU: its arithmetic and its compulsory memory traffic.

A pair (query, key) that is seen costs 2 (D + E) operations forward and 2 (3 D + 2 E) backward; each part is bound by
its operations or by the bytes it must read and write once, whichever takes longer, and parts follow each other.
"""

from __future__ import annotations

from dataclasses import dataclass

# Dense bfloat16 operations and memory bytes per second, by a part of the name that torch gives the device.
DEVICES = {"H200": (790e12, 4.3e12), "H100": (790e12, 3.0e12), "A100": (280e12, 1.8e12)}
_BYTES = 2  # of an element of bfloat16
_STAT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One sequence; lengths in tokens, with the paper's letters behind."""

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
        return max(0, (self.tokens - self.block_len) // self.block_stride + 1)


def pairs(shape: Shape) -> dict[str, int]:
    """Pairs of a query and a key that it sees, per query head."""
    tokens = shape.tokens
    compressed = sum(
        min(shape.blocks, max(0, (t + 1 - shape.block_len) // shape.block_stride + 1)) for t in range(tokens)
    )
    chosen = 0
    for t in range(tokens):
        current = t // shape.select_len
        chosen += (min(shape.select_count, current + 1) - 1) * shape.select_len + t % shape.select_len + 1
    return {
        "dense": tokens * (tokens + 1) // 2,
        "compressed": compressed,
        "selected": chosen,
        "sliding": sum(min(shape.window, t + 1) for t in range(tokens)),
    }


def floors_ms(shape: Shape, device: str) -> dict[str, dict[str, float]] | None:
    """Milliseconds of each part, forward and backward; None for a device whose peak is not known here."""
    peak = next((numbers for name, numbers in DEVICES.items() if name in device), None)
    if peak is None:
        return None
    seen, floors = pairs(shape), {}
    for part, count in seen.items():
        keys = shape.blocks if part == "compressed" else shape.tokens
        work = count * shape.heads
        forward = 2 * (shape.width + shape.value_width) * work
        backward = 2 * (3 * shape.width + 2 * shape.value_width) * work
        traffic = _traffic(shape, keys)
        floors[part] = {"forward": _ms(forward, traffic, peak), "backward": _ms(backward, 2 * traffic, peak)}
    ranking = 2 * shape.width * seen["compressed"] * shape.heads
    read = _BYTES * shape.tokens * shape.heads * shape.width
    floors["importance"] = {"forward": _ms(ranking, read, peak), "backward": 0.0}
    output = _BYTES * shape.tokens * shape.heads * shape.value_width
    floors["mix"] = {"forward": _ms(0, 4 * output, peak), "backward": _ms(0, 7 * output, peak)}
    parts = ("compressed", "importance", "selected", "sliding", "mix")
    floors["whole"] = {way: sum(floors[part][way] for part in parts) for way in ("forward", "backward")}
    return floors


def _traffic(shape: Shape, keys: int) -> float:
    """Bytes: queries, outputs and statistics once, keys and values once."""
    rows = shape.tokens * shape.heads
    own = rows * (shape.width + shape.value_width) * _BYTES + rows * _STAT_BYTES
    return own + keys * shape.groups * (shape.width + shape.value_width) * _BYTES


def _ms(operations: float, traffic: float, peak: tuple[float, float]) -> float:
    return 1e3 * max(operations / peak[0], traffic / peak[1])
