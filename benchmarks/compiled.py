"""The fused kernels as a GPU that need not be there would run them: what is launched, and the machine code of that.

The host functions run on tensors of the CPU that nobody ever wrote to, so that 32k tokens cost no memory, and what they
would launch is noted down instead. Triton compiles it without a GPU, for the arguments that were passed: what it finds
out at a launch (alignment, a one, types) is asked of Triton itself.
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
from nsa_attention.ops.fused import descriptors, tuning
from nsa_attention.ops.fused import launch as launching
from nsa_attention.ops.fused.backend import FusedBackend
from nsa_attention.ops.fused.gated_attention import gated_attention
from nsa_attention.ops.fused.launch import Tile
from nsa_attention.ops.selection import Selection

_BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "f64": 8, "f8E4M3FN": 1, "f8E5M2": 1}


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One call of a kernel by the host."""

    part: str  # of the operation: compressed, importance, selected, sliding or mix
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
        return dict(zip(self.kernel.arg_names, self.arguments, strict=False))[name]


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What the compiler made of one launch."""

    registers: int
    spilled_bytes: int  # of a thread's stack
    shared_bytes: int
    warps: int
    dot_operations: int  # of one pass through the main loop, as the products are written: what issued ones compare to
    described_bytes: int  # that copies by descriptor bring in one pass through the main loop
    loops: tuple[sass.Loop, ...]
    instructions: int  # of the whole kernel
    code: sass.Counts  # each instruction once, that is without loops

    @property
    def loop(self) -> sass.Loop | None:
        return sass.main_loop(self.loops)


def launches(
    shape: Shape,
    tiles: dict[str, Tile] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    tried: int = 1,
    capability: int = 90,
    *,
    apart: bool = False,
) -> list[Launch]:
    """Every kernel of the operation, forward and backward, in order, with the first `tried` tiles of each.

    `tiles`, by the name of the kernel, goes before those. What a GPU of that capability copies by tiles is described.
    `apart`: with an operator for each branch and one for the sum, as a layer has them.
    """
    with without_kernels(tiles, tried, capability) as noted:
        for run in (_apart if apart else _at_once)(shape, dtype):
            run()
    return noted


@contextmanager
def without_kernels(
    tiles: dict[str, Tile] | None = None, tried: int = 1, capability: int = 90
) -> Iterator[list[Launch]]:
    """Within, what would be launched is noted down in the list instead, with the tiles that are tried first."""
    found: list[Launch] = []
    chosen: list[tuple[str, Tile]] = []

    def note(kernel: Any, programs: int, *arguments: Any, warps: int = 4, stages: int = 2, **constants: Any) -> None:
        part, tile = chosen[-1] if chosen else (_part_of(kernel.__name__), None)
        found.append(
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
        before, part = len(found), _part_of(tuning_key.pattern)
        for tile in candidates(tuning_key)[:tried]:
            chosen[:] = [(part, tile)]
            run(tile)
        # What a kernel is called is known once it is launched.
        wanted = (tiles or {}).get(found[-1].name) if len(found) > before else None
        if wanted is not None:
            del found[before:]
            chosen[:] = [(part, wanted)]
            run(wanted)
        chosen.clear()

    def supports_descriptors(tensor: Tensor) -> bool:
        return capability >= 90 and tensor.element_size() == 2

    with _replaced(launch=note, run_best=run_first, supports_descriptors=supports_descriptors):
        yield found


def _part_of(name: str) -> str:
    """Of a pattern of lengths, or of a kernel that has no tiles to choose from."""
    first = name.split()[0].split("_")[0]
    return {"ranked": "importance"}.get(first, first)


def _at_once(shape: Shape, dtype: torch.dtype) -> Iterator[Callable[[], None]]:
    """On tensors that hold whatever the memory held: what the lists hold changes no launch."""
    given = _Given.of(shape, dtype)

    def whole() -> None:
        output = gated_attention(given.q, given.pairs, given.gates, given.selection, window=shape.window)
        leaves = [given.q, given.gates, *(tensor for pair in given.pairs for tensor in pair)]
        torch.autograd.grad(output, leaves, torch.empty_like(output))

    yield whole


def _apart(shape: Shape, dtype: torch.dtype) -> Iterator[Callable[[], None]]:
    """Each part with its gradients."""
    given, backend = _Given.of(shape, dtype), FusedBackend()
    q, selection = given.q, given.selection
    compressed_pair, selected_pair, sliding_pair = given.pairs
    lengths = {"block_len": shape.block_len, "block_stride": shape.block_stride}
    lse = torch.empty(1, shape.heads, shape.tokens)
    indices = torch.zeros(1, shape.groups, shape.tokens, shape.select_count, dtype=torch.int32)
    outputs = [_leaf(dtype, shape.heads, shape.tokens, shape.value_width) for _ in range(3)]

    def differentiated(output: Tensor, leaves: Sequence[Tensor]) -> None:
        torch.autograd.grad(output, leaves, torch.empty_like(output))

    def compressed() -> None:
        output, _ = backend.attend_compressed(q, *compressed_pair, **lengths, scale=selection.scale)
        differentiated(output, [q, *compressed_pair])

    def importance() -> None:
        backend.select(q.detach(), compressed_pair[0].detach(), lse, selection)

    def selected() -> None:
        size, scale = shape.select_len, selection.scale
        output, _ = backend.attend_selected(q, *selected_pair, indices, select_len=size, scale=scale)
        differentiated(output, [q, *selected_pair])

    def sliding() -> None:
        output, _ = backend.attend_sliding(q, *sliding_pair, window=shape.window, scale=selection.scale)
        differentiated(output, [q, *sliding_pair])

    def mix() -> None:
        differentiated(backend.mix(outputs, given.gates), [*outputs, given.gates])

    yield from (compressed, importance, selected, sliding, mix)


@dataclass(frozen=True, kw_only=True)
class _Given:
    """Tensors that nobody ever wrote to."""

    q: Tensor
    pairs: tuple[tuple[Tensor, Tensor], ...]
    gates: Tensor
    selection: Selection

    @classmethod
    def of(cls, shape: Shape, dtype: torch.dtype) -> _Given:
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
def _replaced(**functions: Callable[..., Any]) -> Iterator[None]:
    """Within, every module of the fused kernels calls these in place of its own."""
    own = {
        "launch": launching.launch,
        "run_best": tuning.run_best,
        "supports_descriptors": descriptors.supports_descriptors,
    }
    package = launching.__name__.rpartition(".")[0]
    modules = [module for name, module in sys.modules.items() if name.startswith(package)]
    places = [(module, name) for module in modules for name in functions if getattr(module, name, None) is own[name]]
    for module, name in places:
        setattr(module, name, functions[name])
    try:
        yield
    finally:
        for module, name in places:
            setattr(module, name, own[name])


def compiled(launch: Launch, capability: int) -> Compiled:
    return read(compile_launch(launch, capability))


def read(result: Any) -> Compiled:
    """Of what compile_launch() gives."""
    cubin = result.asm["cubin"]
    instructions = sass.parse(disassembled(cubin))
    registers, stack = usage(cubin)
    body = loop_body(result.asm["ttgir"])
    return Compiled(
        registers=registers,
        spilled_bytes=stack,
        shared_bytes=result.metadata.shared,
        warps=result.metadata.num_warps,
        dot_operations=dot_operations(body),
        described_bytes=described_bytes(body),
        loops=tuple(sass.loops(instructions)),
        instructions=len(instructions),
        code=sass.count(instructions),
    )


def compile_launch(launch: Launch, capability: int) -> Any:
    """Triton's compiled kernel, as a launch with these arguments on such a GPU would get it."""
    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    kernel = launch.kernel
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    words = {**launch.constants, **options, "debug": False}
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, _ = bind(*launch.arguments, **words)
    made, signature, constants, attributes = kernel._pack_args(backend, words, bound, specialization, None)
    return triton.compile(ASTSource(kernel, signature, constants, attributes), target=target, options=made.__dict__)


def disassembled(cubin: bytes) -> str:
    return _tool("nvdisasm", "-c", cubin=cubin)


def usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of the stack of a thread, which is where registers that do not suffice are kept."""
    text = _tool("cuobjdump", "-res-usage", cubin=cubin)
    words = dict(word.split(":", 1) for line in text.splitlines() if "REG:" in line for word in line.split())
    return int(words["REG"]), int(words["STACK"])


def _tool(name: str, option: str, *, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([_BIN / name, option, file.name], capture_output=True, text=True, check=True).stdout


def loop_body(ttgir: str) -> list[str]:
    """The lines of the loop with the most products, or of the first one; none without a loop."""
    lines = ttgir.splitlines()
    bodies = []
    for number, line in enumerate(lines):
        if re.search(r"= scf\.(for|while)\b|^\s*scf\.(for|while)\b", line):
            indent = re.match(r"\s*", line)[0]
            stop = next(i for i in range(number + 1, len(lines)) if lines[i].startswith(indent + "}"))
            bodies.append(lines[number + 1 : stop])
    return max(bodies, key=lambda body: sum(_is_product(line) for line in body), default=[])


def dot_operations(lines: Sequence[str]) -> int:
    total = 0
    for line in filter(_is_product, lines):
        (rows, depth, _), (_, columns, _) = _tiles(line)[:2]
        total += 2 * rows * columns * depth
    return total


def described_bytes(lines: Sequence[str]) -> int:
    """Of tiles that a descriptor brings."""
    total = 0
    for line in lines:
        if "async_tma_copy_global_to_local" in line or "async_tma_gather" in line:
            *_, (sizes, kind) = re.findall(r"<((?:\d+x)+)([a-zA-Z]\w*)", line)
            total += prod(map(int, sizes.split("x")[:-1])) * _BYTES[kind]
    return total


def _is_product(line: str) -> bool:
    return bool(re.search(r"ttng\.warp_group_dot |ttng\.tc_gen5_mma |tt\.dot ", line))


def _tiles(line: str) -> list[tuple[int, int, str]]:
    types = line.split(" : ", 1)[1] if " : " in line else line
    found = re.findall(r"<(?:1x)?(\d+)x(\d+)x([a-zA-Z]\w*)", types)
    return [(int(rows), int(columns), kind) for rows, columns, kind in found]
