"""Which tile sizes a kernel runs with: the first that fits, or the fastest as a warm-up has measured it.

Nothing is measured outside `measuring()`: a training step never pauses to time candidates, which on some ranks but not
on others looks like a hang. Nor does it compile: a length that was not measured takes the tile of the nearest one that
ran here. The warm-up gives every rank what rank 0 has measured, and keeps it in a file, so that the next run needs no
second look.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path

import torch
from filelock import FileLock
from torch import Tensor
from triton.runtime.errors import OutOfResources, PTXASError

from .launch import Tile, next_power_of_two

_TIMED_CALLS = 5
_tiles: dict[TuningKey, Tile] = {}
_compiled_for: dict[TuningKey, TuningKey] = {}  # what ran here, so that its tile is compiled; and whose tile that was
_is_measuring = False


@dataclass(frozen=True, kw_only=True)
class TuningKey:
    """What a good tile depends on. Lengths go by their power of two: nearby ones share a measurement.

    Rows of tables that other versions kept have other fields, and are left out.
    """

    kernel: str
    pattern: str  # which keys a query sees: the branch, and the lengths that make it
    device: str  # "cpu" under the interpreter
    dtype: str
    heads: int  # query heads of a group, padded
    width: int
    value_width: int
    tokens: int
    keys: int

    @classmethod
    def of(cls, kernel: str, q_BHTD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor, pattern: str) -> TuningKey:
        return cls(
            kernel=kernel,
            pattern=pattern,
            device=torch.cuda.get_device_name(q_BHTD.device) if q_BHTD.is_cuda else q_BHTD.device.type,
            dtype=str(q_BHTD.dtype).removeprefix("torch."),
            heads=next_power_of_two(q_BHTD.shape[1] // k_BGSD.shape[1], least=1),
            width=next_power_of_two(q_BHTD.shape[-1]),
            value_width=next_power_of_two(v_BGSE.shape[-1]),
            tokens=next_power_of_two(q_BHTD.shape[2], least=1),
            keys=next_power_of_two(k_BGSD.shape[2], least=1),
        )

    @property
    def is_half(self) -> bool:
        return self.dtype in ("float16", "bfloat16")

    def tiles(self, *sizes: tuple[int, int, int, int]) -> list[Tile]:
        """(rows, keys, warps, stages) as tiles, with rows enough for the heads of a group.

        Exact products of float32 take no tensor core, and the compiler minutes for large tiles: there they are small.
        """
        if not self.is_half:
            sizes = ((32, 32, 8, 1), (16, 16, 4, 1))
        tiles = (Tile(rows=max(rows, self.heads), keys=keys, warps=w, stages=s) for rows, keys, w, s in sizes)
        return list(dict.fromkeys(tiles))


def run_best(
    run: Callable[[Tile], None],
    tuning_key: TuningKey,
    candidates: Callable[[TuningKey], Sequence[Tile]],
    trial: Callable[[Tile], None] | None = None,
) -> None:
    """Call `run` with the tile for this situation. Raises what the last candidate raised if none is for this device.

    Outside of `measuring()` that is one that ran here, if one of any length did; then one that is known, of earlier
    runs; then the first that fits. Where times are taken `trial` runs, again and again, and `run` once behind it: a
    kernel that adds to what is there has to add elsewhere meanwhile.
    """
    source = _compiled_for.get(tuning_key)
    if source is None or (_is_measuring and source != tuning_key):
        source = _compiled_for[tuning_key] = tuning_key if _is_measuring else _nearest(tuning_key)
    tile = _tiles.get(source)
    if tile is not None:
        run(tile)
    elif _is_measuring and tuning_key.device != "cpu":
        run(_tiles.setdefault(tuning_key, _fastest(trial or run, candidates(tuning_key))))
    else:
        _tiles[tuning_key] = _run_first_that_fits(run, candidates(tuning_key))


def _nearest(tuning_key: TuningKey) -> TuningKey:
    """Of those that ran here and differ in lengths alone the nearest, by powers of two; none: the situation itself."""

    def distance(other: TuningKey) -> int:
        lengths = (tuning_key.tokens, other.tokens), (tuning_key.keys, other.keys)
        return sum(abs(candidate.bit_length() - two.bit_length()) for candidate, two in lengths)

    without_lengths = replace(tuning_key, tokens=0, keys=0)
    candidates = (
        candidate
        for candidate, source in _compiled_for.items()
        if candidate == source and replace(candidate, tokens=0, keys=0) == without_lengths
    )
    return min(candidates, key=distance, default=tuning_key)


def is_measuring() -> bool:
    """In a warm-up: what a step of another length may need is compiled as well."""
    return _is_measuring


@contextmanager
def measuring() -> Iterator[None]:
    """Within, the first call in a new situation times all candidates."""
    global _is_measuring
    before, _is_measuring = _is_measuring, True
    try:
        yield
    finally:
        _is_measuring = before


def clear() -> None:
    """As in a new process."""
    _tiles.clear()
    _compiled_for.clear()


def table() -> list[list[object]]:
    """All tile sizes for a GPU as JSON, to be shared with other ranks or kept."""
    rows = (row for row in _tiles.items() if row[0].device != "cpu")
    return [[asdict(tuning_key), list(astuple(tile))] for tuning_key, tile in rows]


def adopt(rows: object) -> None:
    """Take tile sizes over that another process made. Rows that are not understood are left out."""
    for row in rows if isinstance(rows, list) else []:
        try:
            tuning_key, (tile_rows, keys, warps, stages) = row
            _tiles[TuningKey(**tuning_key)] = Tile(rows=tile_rows, keys=keys, warps=warps, stages=stages)
        except (TypeError, ValueError):
            continue


def load(path: Path) -> None:
    """Tile sizes of earlier runs; a file that is missing or damaged is as good as none."""
    try:
        adopt(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return


def save(path: Path) -> None:
    """Add this process's tile sizes to the file. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        measured_here = dict(_tiles)
        load(path)
        _tiles.update(measured_here)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(table()) + "\n", encoding="utf-8")
        temporary.replace(path)


def is_unsupported_tile(error: RuntimeError | OutOfResources | PTXASError) -> bool:
    """The device has no room for the tile, or the compiler cannot make it: it says so by a plain RuntimeError."""
    return isinstance(error, OutOfResources | PTXASError) or "PassManager::run failed" in str(error)


def _fastest(run: Callable[[Tile], None], candidates: Sequence[Tile]) -> Tile:
    times = {}
    for tile in candidates:
        try:
            times[tile] = _milliseconds(run, tile)
        except (RuntimeError, OutOfResources, PTXASError) as error:
            if not is_unsupported_tile(error):
                raise
    if not times:
        return _run_first_that_fits(run, candidates)  # raises what the last one raised
    return min(times, key=lambda tile: times[tile])


def _milliseconds(run: Callable[[Tile], None], tile: Tile) -> float:
    """The fastest of some calls, after one that compiles."""
    run(tile)
    best = float("inf")
    for _ in range(_TIMED_CALLS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run(tile)
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end))
    return best


def _run_first_that_fits(run: Callable[[Tile], None], candidates: Sequence[Tile]) -> Tile:
    *others, last = candidates
    for tile in others:
        try:
            run(tile)
        except (RuntimeError, OutOfResources, PTXASError) as error:
            if is_unsupported_tile(error):
                continue
            raise
        return tile
    run(last)
    return last
