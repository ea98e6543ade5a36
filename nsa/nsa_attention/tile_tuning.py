"""Compilation and tuning of the Triton kernels for users of `nsa_func` and `NSAttention`."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .config import Implementation
from .functional import compress_mean, nsa_func
from .ops.dispatch import MissingImplementationError, triton_reason
from .ops.rotary import rotary_cos_sin, rotary_frequencies, rotate, rotate_queries_and_keys


@dataclass(frozen=True, kw_only=True)
class TuningResult:
    """The result of a measurement of tile sizes."""

    measured: int  # tile sizes that were not known before
    seconds: float
    file: Path | None  # where the tile sizes are stored, or None if they are not
    not_stored: str | None = None  # why the file could not be written

    def __str__(self) -> str:
        text = f"{self.measured} tile sizes determined, {self.seconds:.1f} s"
        if self.not_stored is not None:
            return f"{text}; not kept: {self.not_stored}"
        return text if self.file is None else f"{text}; kept in {self.file}"


def tuning_file() -> Path:
    """Return the file that stores measured tile sizes between runs."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "nsa" / "tuning.json"


def tune(
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    tokens: int | Sequence[int],
    v_head_dim: int | None = None,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    block_size: int = 64,
    block_count: int = 16,
    compress_size: int = 32,
    compress_stride: int = 16,
    window: int = 512,
    deterministic: bool = True,
    file: Path | None = None,
) -> TuningResult:
    """Compile the kernels for these shapes, and find their fastest tile sizes on this GPU.

    Call it once in each process, before the first step. Without it, a step uses the first tile size that fits the GPU,
    and the first call of each kernel compiles it. The measurement takes minutes, but its results are stored in `file`
    (default: $XDG_CACHE_HOME/nsa/tuning.json or ~/.cache/nsa/tuning.json) and read by the next call. Other lengths than
    `tokens` use the tile sizes of the nearest measured length. If torch.distributed is initialized, call `tune` on
    every rank; all ranks take the tile sizes of rank 0.

    The remaining arguments are those of `nsa_func` and NSAttention. Raises ValueError that lists every invalid
    argument, and MissingImplementationError if the kernels cannot run on `device`, for example on a CPU, where there is
    nothing to tune.
    """
    device, lengths = torch.device(device), [tokens] if isinstance(tokens, int) else list(tokens)
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "batch": batch}
    sizes["tokens"] = min(lengths, default=0)
    if problems := [f"{name}: expected at least 1, got {size}" for name, size in sizes.items() if size < 1]:
        raise ValueError("tune: " + "; ".join(problems))
    _require_gpu(device, dtype, heads, kv_heads, max(head_dim, v_head_dim or 0))
    options: dict[str, Any] = {
        "block_size": block_size,
        "block_count": block_count,
        "compress_size": compress_size,
        "compress_stride": compress_stride,
        "window": window,
        "deterministic": deterministic,
    }

    widths = (heads, kv_heads, head_dim, v_head_dim or head_dim)
    lengths = [max(length, compress_size) for length in lengths]  # shorter sequences do not launch all kernels

    def run() -> None:
        for length in lengths:
            _run_once((batch, length, *widths), dtype, device, options, packed=False)

    def run_packed() -> None:  # packed sequences need another variant of a kernel that has no tile sizes
        _run_once((1, batch * max(lengths), *widths), dtype, device, options, packed=True)

    return measure_tiles(run, run_packed, device, file)


def measure_tiles(
    run: Callable[[], None], run_afterwards: Callable[[], None], device: torch.device, file: Path | None = None
) -> TuningResult:
    """Time the candidate tile sizes of the kernels that `run` launches, and store the fastest.

    All ranks take the tile sizes of rank 0, which stores them in `file`, by default `tuning_file()`. `run_afterwards`
    launches kernels that have no tile sizes of their own, so that they are compiled too.
    """
    tuning = importlib.import_module(".ops.fused.tuning", __package__)
    started_s, file = time.perf_counter(), file or tuning_file()
    tuning.load(file)
    previously_tuned = len(tuning.table())
    with tuning.measuring():
        run()
    is_first = True
    if dist.is_initialized() and dist.get_world_size() > 1:
        is_first = dist.get_rank() == 0
        tables = [tuning.table()]
        dist.broadcast_object_list(tables, device=device if "nccl" in dist.get_backend() else None)
        tuning.adopt(tables[0])
        run()  # rank 0 may have chosen other tile sizes, which this rank still has to compile
    run_afterwards()
    measured, seconds = len(tuning.table()) - previously_tuned, time.perf_counter() - started_s
    is_stored, not_stored = is_first and bool(tuning.table()), None
    if is_stored:
        try:
            tuning.save(file)
        except OSError as error:
            is_stored, not_stored = False, f"{file}: {error.strerror}"
    return TuningResult(measured=measured, seconds=seconds, file=file if is_stored else None, not_stored=not_stored)


def _require_gpu(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, width: int) -> None:
    if device.type != "cuda":
        reason: str | None = f"there is nothing to tune on {device.type}: the kernels with tile sizes run on CUDA"
    elif not torch.cuda.is_available():
        reason = "there is nothing to tune: torch finds no CUDA device"
    else:
        q, k = (torch.empty(1, count, 1, width, dtype=dtype, device=device) for count in (heads, kv_heads))
        reason = triton_reason(q, k, k)
    if reason is not None:
        raise MissingImplementationError(f"tune: {reason}")


def _run_once(
    shape: tuple[int, int, int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    options: dict[str, Any],
    *,
    packed: bool,
) -> None:
    """Run the operation forward and backward on random numbers."""
    batch, tokens, heads, kv_heads, width, value_width = shape
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        q, k, v, gates = (
            torch.randn(batch, tokens, *sizes, dtype=dtype, device=device, requires_grad=True)
            for sizes in ((heads, width), (kv_heads, width), (kv_heads, value_width), (heads, 3))
        )
    starts = torch.tensor([0, tokens // 2, tokens], dtype=torch.int32, device=device) if packed else None
    compress = (options["compress_size"], options["compress_stride"], starts)
    compressed = compress_mean(k, *compress), compress_mean(v, *compress)
    nsa_func(
        q, *compressed, k, v, k, v, *gates.unbind(-1), **options, cu_seqlens=starts, implementation="triton"
    ).float().sum().backward()
    if width % 2 == 0:
        _rotate_once(*(tensor.detach().transpose(1, 2) for tensor in (q, *compressed[:1], k)))
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _rotate_once(q_BHTD: Tensor, k_BGSD: Tensor, k_BGTD: Tensor) -> None:
    """Apply rotary embeddings as a layer does, to the queries and the keys of all branches, and to one alone."""
    frequencies = rotary_frequencies(q_BHTD.shape[3], device=q_BHTD.device)
    keys = [k_BGSD, k_BGTD, k_BGTD]
    tables = [rotary_cos_sin(frequencies, tensor.shape[2]).to(q_BHTD.dtype) for tensor in (q_BHTD, *keys)]
    rotate_queries_and_keys(q_BHTD, keys, tables, Implementation.TRITON)
    rotate(k_BGTD, tables[-1], Implementation.TRITON)  # the backward pass may rotate the sliding branch's keys again
