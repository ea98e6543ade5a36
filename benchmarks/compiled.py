"""Compile the fused kernels for a GPU architecture on a machine without a GPU.

The host functions run on uninitialized CPU tensors, so 32k tokens take no physical memory, and their kernel launches
are recorded instead of executed. Triton then compiles the kernels without a GPU for the recorded arguments. Triton
itself determines the specialization (alignment, arguments equal to 1, dtypes), as in a real launch.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from benchmarks import sass
from benchmarks.roofline import Shape
from nsa_attention.ops.fused import launch as launching
from nsa_attention.ops.fused import tuning
from nsa_attention.ops.fused.backend import FusedBackend
from nsa_attention.ops.fused.gated_attention import gated_attention
from nsa_attention.ops.fused.launch import Tile
from nsa_attention.ops.selection import Selection

_BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "f64": 8, "f8E4M3FN": 1, "f8E5M2": 1}


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One recorded launch of a kernel, with its arguments."""

    part: str  # part of the operation: compressed, importance, selected, sliding or mix
    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    warps: int
    stages: int
    tile: Tile | None  # None for a kernel that is not tuned

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    def argument(self, name: str) -> Any:
        """Return the value of the kernel argument called `name`."""
        return dict(zip(self.kernel.arg_names, self.arguments, strict=False))[name]


@dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """The properties of a compiled kernel, such as its register count and its loops."""

    registers: int
    spilled_bytes: int  # stack bytes per thread
    shared_bytes: int
    warps: int
    dot_operations: int  # operations of the products in one pass through the main loop, as written in the source
    described_bytes: int  # bytes that descriptors copy in one pass through the main loop
    reduced_bytes: int  # bytes that descriptors add to memory in one pass through the main loop
    loops: tuple[sass.Loop, ...]
    instructions: int  # in the whole kernel
    code: sass.Counts  # counts of the whole kernel, each instruction once

    @property
    def loop(self) -> sass.Loop | None:
        """Return the kernel's main loop, or None if the kernel has no loop."""
        return sass.main_loop(self.loops)


def launches(
    shape: Shape,
    tiles: dict[str, Tile] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    tiles_per_kernel: int = 1,
    capability: int = 90,
    *,
    separate: bool = False,
    deterministic: bool = True,
) -> list[Launch]:
    """Return all kernel launches in one forward and backward pass, in order.

    Each kernel is launched with its first `tiles_per_kernel` candidate tiles, or with its tile in `tiles`, by kernel
    name. Tiles and descriptors are those of a GPU of this compute capability (90 means 9.0). With `separate`, each
    branch and the gated sum are operators of their own, as in a layer with hooks; otherwise a single operator computes
    everything. `deterministic` is the option of `nsa_func`; separate operators do not have it.
    """
    runs = _separate_operators(shape, dtype) if separate else _joint_operator(shape, dtype, deterministic)
    with without_kernels(tiles, tiles_per_kernel, capability) as noted_launches:
        for run in runs:
            run()
    return noted_launches


@contextmanager
def without_kernels(
    tiles: dict[str, Tile] | None = None, tiles_per_kernel: int = 1, capability: int = 90
) -> Iterator[list[Launch]]:
    """Within the `with` block, record kernel launches in the yielded list instead of executing them.

    Parameters are as in `launches`.
    """
    noted_launches: list[Launch] = []
    current: list[tuple[str, Tile]] = []

    def note(
        kernel: Any,
        programs: int,
        *arguments: Any,
        warps: int = 4,
        stages: int = 2,
        row_stride: int = 0,  # noqa: ARG001
        **constants: Any,
    ) -> None:
        part, tile = current[-1] if current else (_part_of(kernel.__name__), None)
        if kernel.__name__ == "spanned_statistics":
            part = ("compressed", "selected", "sliding")[dict(zip(kernel.arg_names, arguments, strict=False))["branch"]]
        noted_launches.append(
            Launch(
                part=part,
                kernel=kernel,
                programs=programs,
                arguments=arguments,
                constants=constants,
                warps=warps,
                stages=stages,
                tile=tile,
            )
        )

    def run_first(
        run: Callable[[Tile], None], tuning_key: Any, candidates: Callable[[Any], Sequence[Tile]], _trial: Any = None
    ) -> None:
        before, part = len(noted_launches), _part_of(tuning_key.pattern)
        for tile in candidates(tuning_key)[:tiles_per_kernel]:
            current[:] = [(part, tile)]
            run(tile)
        # The kernel's name is known only after its launch.
        preferred = (tiles or {}).get(noted_launches[-1].name) if len(noted_launches) > before else None
        if preferred is not None:
            del noted_launches[before:]
            current[:] = [(part, preferred)]
            run(preferred)
        current.clear()

    def compute_capability(_device: torch.device) -> int:
        return capability

    with _replace_functions(launch=note, run_best=run_first, compute_capability=compute_capability):
        yield noted_launches


def _part_of(name: str) -> str:
    """Return the part of the attention operation to which a kernel belongs, such as "selected"."""
    first = name.split()[0].split("_")[0]
    return {"ranked": "importance"}.get(first, first)


def _joint_operator(shape: Shape, dtype: torch.dtype, deterministic: bool) -> Iterator[Callable[[], None]]:
    """Yield a function that runs the whole attention operation as a single operator."""
    inputs = _Inputs.of(shape, dtype)

    def whole() -> None:
        arguments, options = (inputs.q, inputs.pairs, inputs.gates, inputs.selection), {"deterministic": deterministic}
        output = gated_attention(*arguments, window=shape.window, **options)[0]
        leaves = [inputs.q, inputs.gates, *(tensor for pair in inputs.pairs for tensor in pair)]
        torch.autograd.grad(output, leaves, torch.empty_like(output))

    yield whole


def _separate_operators(shape: Shape, dtype: torch.dtype) -> Iterator[Callable[[], None]]:
    """Yield one function for each part of the attention operation. It runs the part's forward and backward pass."""
    inputs, backend = _Inputs.of(shape, dtype), FusedBackend()
    q, selection = inputs.q, inputs.selection
    compressed_pair, selected_pair, sliding_pair = inputs.pairs
    lengths = {"block_len": shape.block_len, "block_stride": shape.block_stride}
    lse = torch.empty(1, shape.heads, shape.tokens)
    indices = torch.zeros(1, shape.groups, shape.tokens, shape.select_count, dtype=torch.int32)

    def run_backward(output: Tensor, leaves: Sequence[Tensor]) -> None:
        torch.autograd.grad(output, leaves, torch.empty_like(output))

    def run_compressed() -> None:
        output, _ = backend.attend_compressed(q, *compressed_pair, **lengths, scale=selection.scale)
        run_backward(output, [q, *compressed_pair])

    def run_importance() -> None:
        backend.select(q.detach(), compressed_pair[0].detach(), lse, selection)

    def run_selected() -> None:
        size, scale = shape.select_len, selection.scale
        output, _ = backend.attend_selected(q, *selected_pair, indices, select_len=size, scale=scale)
        run_backward(output, [q, *selected_pair])

    def run_sliding() -> None:
        output, _ = backend.attend_sliding(q, *sliding_pair, window=shape.window, scale=selection.scale)
        run_backward(output, [q, *sliding_pair])

    yield from (run_compressed, run_importance, run_selected, run_sliding)


@dataclass(frozen=True, kw_only=True)
class _Inputs:
    """Uninitialized input tensors for sparse attention, with the parameters of block selection."""

    q: Tensor
    pairs: tuple[tuple[Tensor, Tensor], ...]
    gates: Tensor
    selection: Selection

    @classmethod
    def of(cls, shape: Shape, dtype: torch.dtype) -> _Inputs:
        return cls(
            q=_leaf(dtype, shape.heads, shape.tokens, shape.width),
            pairs=tuple(
                (_leaf(dtype, shape.groups, length, shape.width), _leaf(dtype, shape.groups, length, shape.value_width))
                for length in (shape.blocks, shape.tokens, shape.tokens)
            ),
            gates=torch.empty(3, 1, shape.heads, shape.tokens, dtype=dtype).requires_grad_(),
            selection=Selection(
                block_len=shape.block_len,
                block_stride=shape.block_stride,
                select_len=shape.select_len,
                select_count=shape.select_count,
                scale=shape.width**-0.5,
            ),
        )


def _leaf(dtype: torch.dtype, heads: int, length: int, width: int) -> Tensor:
    return torch.empty(1, heads, length, width, dtype=dtype).requires_grad_()


@contextmanager
def _replace_functions(**functions: Callable[..., Any]) -> Iterator[None]:
    """Within the `with` block, replace functions in all modules of the fused kernels."""
    originals = {
        "launch": launching.launch,
        "run_best": tuning.run_best,
        "compute_capability": launching.compute_capability,
    }
    package = launching.__name__.rpartition(".")[0]
    modules = [module for name, module in sys.modules.items() if name.startswith(package)]
    patched_places = [
        (module, name) for module in modules for name in functions if getattr(module, name, None) is originals[name]
    ]
    for module, name in patched_places:
        setattr(module, name, functions[name])
    try:
        yield
    finally:
        for module, name in patched_places:
            setattr(module, name, originals[name])


def compile_and_read(launch: Launch, capability: int) -> CompiledKernel:
    """Compile a launched kernel for a compute capability (90 means 9.0), and return its properties."""
    return read_compiled(compile_launch(launch, capability))


def read_compiled(result: Any) -> CompiledKernel:
    """Return the properties of a kernel compiled by `compile_launch`."""
    cubin = result.asm["cubin"]
    instructions = sass.parse(disassemble(cubin))
    registers, stack = register_usage(cubin)
    body = main_loop_body(result.asm["ttgir"])
    return CompiledKernel(
        registers=registers,
        spilled_bytes=stack,
        shared_bytes=result.metadata.shared,
        warps=result.metadata.num_warps,
        dot_operations=dot_operations(body),
        described_bytes=described_bytes(body, "async_tma_copy_global_to_local", "async_tma_gather"),
        reduced_bytes=described_bytes(body, "async_tma_reduce"),
        loops=tuple(sass.loops(instructions)),
        instructions=len(instructions),
        code=sass.count(instructions),
    )


def compile_launch(launch: Launch, capability: int) -> Any:
    """Compile a launched kernel with Triton for a compute capability (90 means 9.0)."""
    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    kernel = launch.kernel
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    keywords = {**launch.constants, **options, "debug": False}
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound_arguments, specialization, _ = bind(*launch.arguments, **keywords)
    compile_options, signature, constants, attributes = kernel._pack_args(
        backend, keywords, bound_arguments, specialization, None
    )
    return triton.compile(
        ASTSource(kernel, signature, constants, attributes), target=target, options=compile_options.__dict__
    )


def disassemble(cubin: bytes) -> str:
    """Return the machine code (SASS) of a compiled kernel as text."""
    return _tool("nvdisasm", "-c", "-hex", cubin=cubin)


def register_usage(cubin: bytes) -> tuple[int, int]:
    """Return the number of registers and the bytes of stack that a compiled kernel uses per thread."""
    text = _tool("cuobjdump", "-res-usage", cubin=cubin)
    keywords = dict(word.split(":", 1) for line in text.splitlines() if "REG:" in line for word in line.split())
    return int(keywords["REG"]), int(keywords["STACK"])


def _tool(name: str, *options: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([_BIN / name, *options, file.name], capture_output=True, text=True, check=True).stdout


def main_loop_body(ttgir: str) -> list[str]:
    """Return the lines of the main loop in Triton's intermediate code, or [] if there is no loop."""
    lines = ttgir.splitlines()
    bodies = []
    for number, line in enumerate(lines):
        if re.search(r"= scf\.(for|while)\b|^\s*scf\.(for|while)\b", line):
            indent = re.match(r"\s*", line)[0]
            stop = next(i for i in range(number + 1, len(lines)) if lines[i].startswith(indent + "}"))
            bodies.append(lines[number + 1 : stop])
    return max(bodies, key=lambda body: sum(_is_product(line) for line in body), default=[])


def dot_operations(lines: Sequence[str]) -> int:
    """Count the arithmetic operations for the matrix products in lines of Triton's intermediate code."""
    total = 0
    for line in filter(_is_product, lines):
        (rows, depth, _), (_, columns, _) = _tiles(line)[:2]
        total += 2 * rows * columns * depth
    return total


def described_bytes(lines: Sequence[str], *operations: str) -> int:
    """Count the bytes that some operations on descriptors move in lines of Triton's intermediate code."""
    total = 0
    for line in lines:
        if any(operation in line for operation in operations):
            *_, (sizes, kind) = re.findall(r"<((?:\d+x)+)([a-zA-Z]\w*)", line)
            total += prod(map(int, sizes.split("x")[:-1])) * _BYTES[kind]
    return total


def _is_product(line: str) -> bool:
    return bool(re.search(r"ttng\.warp_group_dot |ttng\.tc_gen5_mma |tt\.dot ", line))


def _tiles(line: str) -> list[tuple[int, int, str]]:
    types = line.split(" : ", 1)[1] if " : " in line else line
    matches = re.findall(r"<(?:1x)?(\d+)x(\d+)x([a-zA-Z]\w*)", types)
    return [(int(rows), int(columns), kind) for rows, columns, kind in matches]
