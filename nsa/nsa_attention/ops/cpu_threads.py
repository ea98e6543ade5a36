"""Parallel execution of independent pieces of work on a CPU.

PyTorch spreads every operation over all cores and waits for them at its end. For many small operations in sequence,
this waiting takes longer than the work, especially if idle threads sleep instead of spinning (OMP_WAIT_POLICY=PASSIVE).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise, product
from typing import TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")
WorkShare = tuple[slice, slice]
# Number of elements of one tile of an elementwise computation.
TILE_ELEMENTS = 1 << 16


def is_eager_on_cpu(x: Tensor) -> bool:
    """Return whether `x` is on a CPU and torch.compile is not tracing."""
    # In eager mode on a CPU, tiles are faster than whole tensors. Compiled code fuses the products on its own.
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def run_in_threads(pieces: Sequence[Callable[[], _T]]) -> list[_T]:
    """Run functions in parallel, each in its own thread, and return their results in order."""
    cores = torch.get_num_threads()
    if cores == 1 or len(pieces) < 2:
        return [piece() for piece in pieces]
    # Inference mode is thread-local too: without it, a new thread could not change tensors of inference mode.
    run = partial(_run_single_threaded, inference=torch.is_inference_mode_enabled())
    first, *others = pieces
    try:
        with ThreadPoolExecutor(min(cores - 1, len(others)), thread_name_prefix="nsa-core") as pool:
            futures = [pool.submit(run, piece) for piece in others]
            return [run(first), *(future.result() for future in futures)]
    finally:
        # The thread count is thread-local, but new threads of torch start with the value that was set last.
        torch.set_num_threads(cores)


def split_work(device: torch.device, rows: int, heads: int = 1) -> list[WorkShare]:
    """Split rows and heads into pieces that keep all CPU cores busy, and return the row and head slices of each
    piece.
    """
    cores = torch.get_num_threads() if device.type == "cpu" else 1
    parts = min(heads, -(-cores // max(1, rows)))
    if cores == 1 or rows * parts < cores:
        return [(slice(0, rows), slice(0, heads))]
    return list(product(_even_slices(rows, min(rows, cores)), _even_slices(heads, parts)))


def _even_slices(length: int, count: int) -> list[slice]:
    return [slice(*cut) for cut in pairwise(length * number // count for number in range(count + 1))]


def _run_single_threaded(piece: Callable[[], _T], *, inference: bool) -> _T:
    torch.set_num_threads(1)
    # Gradient mode is thread-local: without no_grad, a new thread would record a graph.
    with torch.inference_mode(inference), torch.no_grad():
        return piece()
