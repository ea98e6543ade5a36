"""The choice of the tile size for each kernel, based on measurements during a warm-up.

Tile sizes are measured only within `measuring()`. A training step therefore never pauses to time candidates, which
would look like a hang if only some ranks did it. A step does not compile kernels either: a length that was not measured
uses the tile of the nearest length that ran in this process. The warm-up sends the measurements of rank 0 to every rank
and stores them in a file for later runs.
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

from .launch import Tile, compute_capability, next_power_of_two

_TIMED_CALLS = 5
_tiles: dict[TuningKey, Tile] = {}
# For each key that ran in this process, the key whose tile size was compiled for it.
_compiled_for: dict[TuningKey, TuningKey] = {}
_is_measuring = False


@dataclass(frozen=True, kw_only=True)
class TuningKey:
    """Everything that the best tile size of a kernel depends on.

    Lengths are rounded up to powers of two, to share measurements. Rows of stored tables from other versions have
    different fields and are skipped.
    """

    kernel: str
    pattern: str  # the branch and its lengths, which determine the keys that a query attends to
    device: str  # "cpu" under the interpreter
    capability: int  # compute capability of the GPU, times ten; 0 under the interpreter
    dtype: str
    heads: int  # query heads of a group, padded to a power of two
    width: int
    value_width: int
    tokens: int
    keys: int

    @classmethod
    def of(cls, kernel: str, q_BHTD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor, pattern: str) -> TuningKey:
        """Return the key for a kernel with these queries, keys and values."""
        return cls(
            kernel=kernel,
            pattern=pattern,
            device=torch.cuda.get_device_name(q_BHTD.device) if q_BHTD.is_cuda else q_BHTD.device.type,
            capability=compute_capability(q_BHTD.device),
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
        """Return tiles of the given sizes, with at least one row for each head of a group."""
        # For float32 and float64, `sizes` are replaced by small ones: without tensor cores, large tiles take minutes to
        # compile.
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
    """Call `run` with the best known tile size for a kernel.

    Outside `measuring()`, the tile is that of the nearest length that ran in this process, otherwise one loaded from
    earlier runs, otherwise the first candidate that fits. Within `measuring()` on a GPU, a key without a known tile
    gets the fastest candidate: all are timed by calling `trial` repeatedly (default: `run`), and `run` is called once
    afterwards. A kernel that adds to its output needs a `trial` that writes elsewhere. Raises the error of the last
    candidate if none works on this device.
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
    """Return the key with the most similar lengths for which a kernel already ran, or `tuning_key` if there is none."""

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
    """Return whether a warm-up is measuring tile sizes."""
    return _is_measuring


@contextmanager
def measuring() -> Iterator[None]:
    """In the `with` block, time all candidate tile sizes at the first call of each kernel."""
    global _is_measuring
    before, _is_measuring = _is_measuring, True
    try:
        yield
    finally:
        _is_measuring = before


def clear() -> None:
    """Forget all tile sizes found so far."""
    _tiles.clear()
    _compiled_for.clear()


def table() -> list[list[object]]:
    """Return all tile sizes for GPUs as lists of JSON values."""
    rows = (row for row in _tiles.items() if row[0].device != "cpu")
    return [[asdict(tuning_key), list(astuple(tile))] for tuning_key, tile in rows]


def adopt(rows: object) -> None:
    """Add the tile sizes that another process's `table()` returned. Unreadable rows are skipped."""
    for row in rows if isinstance(rows, list) else []:
        try:
            tuning_key, (tile_rows, keys, warps, stages) = row
            _tiles[TuningKey(**tuning_key)] = Tile(rows=tile_rows, keys=keys, warps=warps, stages=stages)
        except (TypeError, ValueError):
            continue


def load(path: Path) -> None:
    """Add the tile sizes that earlier runs stored in a file. A missing or damaged file is ignored."""
    try:
        adopt(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return


def save(path: Path) -> None:
    """Add this process's tile sizes to a file. Raise OSError if it cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        measured_here = dict(_tiles)
        load(path)
        _tiles.update(measured_here)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(table()) + "\n", encoding="utf-8")
        temporary.replace(path)


def is_unsupported_tile(error: RuntimeError | OutOfResources | PTXASError) -> bool:
    """Return whether `error` means that the tile does not work on this device."""
    # The compiler reports a tile that it cannot compile with a plain RuntimeError.
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
        return _run_first_that_fits(run, candidates)  # raises the error of the last candidate
    return min(times, key=lambda tile: times[tile])


def _milliseconds(run: Callable[[Tile], None], tile: Tile) -> float:
    """Return the shortest time of several calls of `run`, in milliseconds."""
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
