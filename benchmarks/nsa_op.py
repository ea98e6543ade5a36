"""Measure the execution time of the full NSA operation on a GPU, and compare it with dense attention.

    python benchmarks/nsa_op.py                             1k to 128k tokens on this machine's GPU
    python benchmarks/nsa_op.py --tokens 4096 65536         only these lengths
    python benchmarks/nsa_op.py --shared 0 0.95             selections of which neighbouring queries share this fraction
    python benchmarks/nsa_op.py --checkpoint DIRECTORY      also with the selections of a trained model
    python benchmarks/nsa_op.py --table FILE                print the Markdown table of a recorded result
    python benchmarks/nsa_op.py --plot FILE --out plot.svg  draw its plot (needs matplotlib)

The operation is the compressed branch, the selection of blocks, the selected and the sliding branch, and the gated sum,
with 64 query heads, 4 key heads, width 128, bfloat16 and one sequence, as in published results of other projects. It is
compared in one process with torch's attention (each of its kernels), and, if they can be imported, with flash-attn 2
and 3 and flash-linear-attention's NSA. Each figure is the median of several runs, measured between two CUDA events.
"Floor" is the lower bound of benchmarks/roofline.py.

The full operation selects its blocks from random keys. In addition, the selected branch and the full operation are
measured with given selections (benchmarks/synthetic_selections.py, benchmarks/nsa_choices.py), which the kernels of
other projects also get. `--device cpu` only tests this script on a CPU; its figures say nothing about the kernels.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.nsa_choices import trained_selections  # noqa: E402
from benchmarks.nsa_op_report import plot, table  # noqa: E402
from benchmarks.provenance import measurement_context  # noqa: E402
from benchmarks.roofline import Shape, floors_ms  # noqa: E402
from benchmarks.synthetic_selections import make_selections, neighbour_overlap  # noqa: E402
from nsa_attention.checkpoints.load import read_weights  # noqa: E402
from nsa_attention.config import Implementation  # noqa: E402
from nsa_attention.ops.dispatch import implementation_for, implementation_for_selected  # noqa: E402
from nsa_attention.ops.mixing import gated_sum  # noqa: E402
from nsa_attention.ops.selection import Selection  # noqa: E402
from nsa_attention.ops.sparse_attention import KeysAndValues, sparse_attention  # noqa: E402
from nsa_attention.world import CannotRunError  # noqa: E402

LENGTHS = [2**power for power in range(10, 18)]
REPEATS = 10
SHARED = (0.0, 0.80, 0.95, 0.98)
PACKAGES = (
    *("torch", "triton", "flash-attn", "flash-attn-3", "flash-linear-attention", "native-sparse-attention-triton"),
    "numpy",
)

Forward = Callable[[], Tensor]


class Inputs:
    """Random input tensors of a given size, which are the same for all implementations."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        self.shape = shape
        generator = torch.Generator(device).manual_seed(0)

        def leaf(heads: int, length: int, width: int) -> Tensor:
            tensor = torch.randn(1, heads, length, width, generator=generator, device=device, dtype=dtype)
            return tensor.requires_grad_()

        self.q = leaf(shape.heads, shape.tokens, shape.width)
        lengths = {"compressed": shape.blocks, "selected": shape.tokens, "sliding": shape.tokens}
        pairs = {
            name: (leaf(shape.groups, length, shape.width), leaf(shape.groups, length, shape.value_width))
            for name, length in lengths.items()
        }
        self.branches = KeysAndValues(**pairs)
        self.gates = torch.rand(3, 1, shape.heads, shape.tokens, generator=generator, device=device, dtype=dtype)
        self.gates.requires_grad_()
        self.selection = Selection(
            block_len=shape.block_len,
            block_stride=shape.block_stride,
            select_len=shape.select_len,
            select_count=shape.select_count,
            scale=shape.width**-0.5,
        )

    def leaves(self) -> list[Tensor]:
        """Return the input tensors that require gradients."""
        pairs = _pairs_of(self.branches)
        return [self.q, self.gates, *(tensor for pair in pairs for tensor in pair)]


def named_selections(
    shape: Shape, device: torch.device, shares: Sequence[float], checkpoint: Path | None
) -> dict[str, Tensor]:
    """Map names such as "random choices" to block selections [1, G, T, n].

    A synthetic selection is made for each value in `shares`, the fraction of blocks shared by neighbouring queries. If
    a checkpoint is given, the selections of its layers are added.
    """
    numbers = {"count": shape.select_count, "select_len": shape.select_len}
    selections = {
        f"neighbours share {share:.0%}" if share else "random choices": make_selections(
            shape.tokens, groups=shape.groups, shared=share, **numbers
        )
        for share in shares
    }
    if checkpoint is not None:
        layers = trained_selections(checkpoint, shape.tokens, **numbers, device=str(device))
        for name, indices in layers.items():
            # If the model has fewer groups than the benchmark, each of its groups is used for several.
            group = torch.arange(shape.groups) * indices.shape[1] // shape.groups
            selections[f"trained {name.removesuffix('.chooser')}"] = indices[:, group]
    return {name: indices.to(device) for name, indices in selections.items()}


def with_named_selections(inputs: Inputs, selections: dict[str, Tensor]) -> Iterator[tuple[str, Forward | str]]:
    """Yield named functions that run the selected branch and the full operation, for each block selection.

    The full operation still ranks blocks, but then uses the given selection. A missing implementation has an error text
    instead of a function.
    """
    shape, branches, selection = inputs.shape, inputs.branches, inputs.selection
    q, pair, scale = inputs.q, inputs.branches.selected, inputs.selection.scale
    backend, _ = implementation_for(Implementation.AUTO, q, *pair)
    reader, _ = implementation_for_selected(Implementation.AUTO, q, *pair, shape.select_count, shape.select_len)
    lengths = {"block_len": shape.block_len, "block_stride": shape.block_stride}

    def attend_selected(indices: Tensor) -> Tensor:
        return reader.attend_selected(q, *pair, indices, select_len=shape.select_len, scale=scale)[0]

    def run_all(indices: Tensor) -> Tensor:
        compressed_output, lse = backend.attend_compressed(q, *branches.compressed, **lengths, scale=scale)
        backend.select(q.detach(), branches.compressed[0].detach(), lse, selection)
        sliding_output, _ = backend.attend_sliding(q, *branches.sliding, window=shape.window, scale=scale)
        return gated_sum((compressed_output, attend_selected(indices), sliding_output), inputs.gates)

    for name, indices in selections.items():
        yield f"nsa.selected, {name}", partial(attend_selected, indices)
        yield f"nsa, {name}", partial(run_all, indices)
        yield f"native-sparse-attention-triton selected, {name}", _external_selected(inputs, indices)


def _external_selected(inputs: Inputs, indices: Tensor) -> Forward | str:
    """Return native-sparse-attention-triton's selected branch, or an error message if that package is missing."""
    try:
        function = importlib.import_module("native_sparse_attention.ops").topk_sparse_attention
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"cannot be imported: {error}"
    shape, tensors = inputs.shape, (inputs.q, *inputs.branches.selected)
    starts = torch.tensor([0, shape.tokens], dtype=torch.int32, device=indices.device)
    # It requires the valid indices first, followed by -1.
    last = torch.where(indices[0] < 0, torch.iinfo(torch.int32).max, indices[0]).sort(-1).values
    sorted_indices = torch.where(last == torch.iinfo(torch.int32).max, -1, last).to(torch.int32)

    def run() -> Tensor:
        q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in tensors)
        return function(q, k, v, sorted_indices, shape.select_len, starts)

    return run


def _pairs_of(branches: KeysAndValues) -> list[tuple[Tensor, Tensor]]:
    return [branches.compressed, branches.selected, branches.sliding]


def our_parts(inputs: Inputs) -> Iterator[tuple[str, Forward]]:
    """Yield (name, function) pairs for the full operation and for each of its parts."""
    shape, branches, selection = inputs.shape, inputs.branches, inputs.selection
    yield "nsa", lambda: sparse_attention(inputs.q, branches, inputs.gates, selection, window=shape.window)
    backend, used = implementation_for(Implementation.AUTO, inputs.q, *branches.selected)
    reader, _ = implementation_for_selected(
        Implementation.AUTO, inputs.q, *branches.selected, shape.select_count, shape.select_len
    )
    lengths = {"block_len": shape.block_len, "block_stride": shape.block_stride}
    scale = selection.scale
    with torch.no_grad():
        output, lse = backend.attend_compressed(inputs.q, *branches.compressed, **lengths, scale=scale)
        indices = backend.select(inputs.q, branches.compressed[0], lse, selection)
    yield "nsa.compressed", lambda: backend.attend_compressed(inputs.q, *branches.compressed, **lengths, scale=scale)[0]
    yield "nsa.importance", lambda: backend.select(inputs.q, branches.compressed[0], lse, selection)
    yield (
        "nsa.selected",
        lambda: reader.attend_selected(inputs.q, *branches.selected, indices, select_len=shape.select_len, scale=scale)[
            0
        ],
    )
    yield (
        "nsa.sliding",
        lambda: backend.attend_sliding(inputs.q, *branches.sliding, window=shape.window, scale=scale)[0],
    )
    leaves = [output.detach().clone().requires_grad_() for _ in range(3)]
    yield "nsa.mix", lambda: gated_sum(leaves, inputs.gates)
    print(f"nsa runs by {used.name}: {used.reason}", file=sys.stderr)


def dense(inputs: Inputs) -> Iterator[tuple[str, Forward | str]]:
    """Yield (name, function) for each dense causal attention, or (name, error message) for a missing one."""
    q, (k, v) = inputs.q, inputs.branches.selected

    def by_torch(kernel: SDPBackend) -> Forward:
        def run() -> Tensor:
            with sdpa_kernel(kernel):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        return run

    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    for kernel in kernels if q.is_cuda else [SDPBackend.FLASH_ATTENTION]:
        yield f"torch.{kernel.name.removesuffix('_ATTENTION').lower()}", by_torch(kernel)
    for name, module in (("flash-attn 2", "flash_attn"), ("flash-attn 3", "flash_attn_interface")):
        yield name, _flash(module, inputs)
    yield "flash-linear-attention", _fla(inputs)


def _flash(module: str, inputs: Inputs) -> Forward | str:
    try:
        function = importlib.import_module(module).flash_attn_func
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"cannot be imported: {error}"
    q, k, v = (tensor.transpose(1, 2) for tensor in (inputs.q, *inputs.branches.selected))

    def run() -> Tensor:
        output = function(q, k, v, causal=True)
        return output[0] if isinstance(output, tuple) else output

    return run


def _fla(inputs: Inputs) -> Forward | str:
    """Return the NSA function from flash-linear-attention, or an error message if that package is missing."""
    try:
        function = importlib.import_module("fla.ops.nsa").parallel_nsa
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"cannot be imported: {error}"
    shape = inputs.shape
    q, k, v = (tensor.transpose(1, 2) for tensor in (inputs.q, *inputs.branches.selected))
    gates = inputs.gates.permute(0, 1, 3, 2)

    def run() -> Tensor:
        return function(
            q,
            k,
            v,
            g_cmp=gates[0],
            g_slc=gates[1],
            g_swa=gates[2],
            block_counts=shape.select_count,
            block_size=shape.select_len,
            window_size=shape.window,
        )

    return run


def measure(name: str, forward: Forward, inputs: Inputs, repeats: int) -> dict[str, Any]:
    """Return the forward and backward times of a function, in milliseconds, and its peak memory."""
    device = inputs.q.device
    try:
        with torch.no_grad():
            forward_ms = [_elapsed_ms(device, forward) for _ in range(repeats + 2)][2:]
        output = forward()
        backward_ms, upstream = [], torch.randn_like(output) if output.is_floating_point() else None
        for _ in range(repeats + 2 if output.requires_grad else 0):
            output = forward()
            backward_ms.append(_elapsed_ms(device, lambda output=output: output.backward(upstream)))
            _forget_gradients(inputs)
        del output
        peak_bytes = _peak_bytes(device, forward, upstream, inputs)
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        _forget_gradients(inputs)
        return {"name": name, "missing": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    return {
        "name": name,
        "forward_ms": forward_ms,
        "backward_ms": backward_ms[2:],
        "peak_bytes": peak_bytes,
        "output_bytes": inputs.q.shape[1] * inputs.shape.tokens * inputs.shape.value_width * inputs.q.element_size(),
    }


def _elapsed_ms(device: torch.device, work: Callable[[], Any]) -> float:
    if device.type != "cuda":
        started_s = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - started_s)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _peak_bytes(device: torch.device, forward: Forward, upstream: Tensor | None, inputs: Inputs) -> int | None:
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    output = forward()
    if output.requires_grad:
        output.backward(upstream)
    _forget_gradients(inputs)
    return torch.cuda.max_memory_allocated(device) - before


def _forget_gradients(inputs: Inputs) -> None:
    for leaf in inputs.leaves():
        leaf.grad = None


def measure_length(
    shape: Shape, device: torch.device, repeats: int, shares: Sequence[float] = (), checkpoint: Path | None = None
) -> dict[str, Any]:
    inputs = Inputs(shape, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    selections = named_selections(shape, device, shares, checkpoint)
    with _tuning_enabled(device):
        for _, forward in our_parts(inputs):
            output = forward()
            if output.requires_grad:
                output.backward(torch.randn_like(output))
            _forget_gradients(inputs)
    candidates = [*our_parts(inputs), *with_named_selections(inputs, selections), *dense(inputs)]
    rows = [
        {"name": name, "missing": forward} if isinstance(forward, str) else measure(name, forward, inputs, repeats)
        for name, forward in candidates
    ]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {
        "shape": asdict(shape),
        "rows": rows,
        "floors_ms": floors_ms(shape, name),
        "shared_by_neighbours": {name: round(neighbour_overlap(indices), 4) for name, indices in selections.items()},
    }


@contextmanager
def _tuning_enabled(device: torch.device) -> Iterator[None]:
    """Within the `with` block, enable tuning of the fused kernels."""
    if device.type != "cuda":
        yield
        return
    with importlib.import_module("nsa_attention.ops.fused.tuning").measuring():
        yield


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Measure the whole operation against dense attention.")
    parser.add_argument("--tokens", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--heads", type=int, default=Shape(tokens=1).heads)
    parser.add_argument("--groups", type=int, default=Shape(tokens=1).groups)
    parser.add_argument("--width", type=int, default=Shape(tokens=1).width)
    parser.add_argument(
        "--shared", type=_part, nargs="*", default=SHARED, help="fractions of blocks that neighbouring queries share"
    )
    parser.add_argument(
        "--checkpoint", type=Path, help="a checkpoint of nsa.train: also measure with its model's selections"
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "results" / "nsa_op.json")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the table of a recorded result")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a recorded result into --out")
    options = parser.parse_args(arguments)
    if options.table or options.plot:
        result = json.loads((options.table or options.plot).read_text(encoding="utf-8"))
        print(table(result)) if options.table else plot(result, options.out)
        return 0
    if options.checkpoint:
        try:
            read_weights(options.checkpoint)
        except CannotRunError as error:
            parser.error(f"--checkpoint: {error}")
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here: nothing measured (--device cpu tries the path on a CPU)", file=sys.stderr)
        return 1
    device = torch.device(options.device)
    shape = replace(
        Shape(tokens=1), heads=options.heads, groups=options.groups, width=options.width, value_width=options.width
    )
    result = {
        **measurement_context(__file__, arguments),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "packages": {name: _version(name) for name in PACKAGES},
        "repeats": options.repeats,
        "lengths": [],
    }
    for tokens in options.tokens:
        of_length = replace(shape, tokens=tokens)
        result["lengths"].append(measure_length(of_length, device, options.repeats, options.shared, options.checkpoint))
        options.out.write_text(
            json.dumps(result, indent=1) + "\n", encoding="utf-8"
        )  # stored after each length, in case a later one fails
        print(f"T={tokens} done", file=sys.stderr)
    print(table(result))
    return 0


def _part(text: str) -> float:
    part = float(text)
    if not 0 <= part <= 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a part of all, from 0 to 1")
    return part


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
