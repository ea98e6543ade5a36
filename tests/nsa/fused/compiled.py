"""A program: compile every launch of the whole operation for a GPU that need not be there; one line of JSON a kernel.

    python tests/nsa/fused/compiled.py CAPABILITY DTYPE HEADS GROUPS WIDTH VALUE_WIDTH TILES

Triton compiles down to machine code without a GPU. The host functions run on tensors of the CPU, and what they would
launch is compiled with the arguments that they would pass, for the first TILES sizes that they would try. What the
kernels would have written stays as it is, so that nothing is computed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from benchmarks.nsa_op import Inputs  # noqa: E402
from benchmarks.roofline import Shape  # noqa: E402
from nsa_harness.nsa.ops.fused import importance, lists, mix, selected, spanned, tuning  # noqa: E402
from nsa_harness.nsa.ops.fused.backend import FusedBackend  # noqa: E402

_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
# What moves 16 bytes a thread between registers or shared memory and the GPU's own, or a whole tile at once.
_WIDE = re.compile(r"(?:ld|st)\.global\S*\.v4\.b32|cp\.async\.cg\.shared\.global|cp\.async\.bulk\.tensor")


def main(words: list[str]) -> None:
    capability, dtype, *numbers = words
    heads, groups, width, value_width, tiles = map(int, numbers)
    seen: set[str] = set()

    def compile_launch(
        kernel: Any, _programs: int, *arguments: Any, warps: int = 4, stages: int = 2, **constants: Any
    ) -> None:
        line = compiled(kernel, arguments, constants, int(capability), warps, stages)
        key = json.dumps(line["numbers"]) + kernel.__name__
        if key not in seen:
            seen.add(key)
            print(json.dumps(line), flush=True)

    for module in (importance, lists, mix, selected, spanned):
        module.launch = compile_launch
    for module in (tuning, importance):
        module.run_best = lambda run, situation, candidates: [run(tile) for tile in candidates(situation)[:tiles]]
    # Half types are what matters on a GPU; a CPU tensor of that dtype is enough to tell its type.
    shape = Shape(tokens=512, heads=heads, groups=groups, width=width, value_width=value_width)
    inputs = Inputs(replace(shape, window=128), torch.device("cpu"), getattr(torch, dtype))
    run(inputs)


def run(inputs: Inputs) -> None:
    backend, selection, branches = FusedBackend(), inputs.selection, inputs.branches
    lengths = {"block_len": selection.block_len, "block_stride": selection.block_stride}
    outputs = [backend.compressed(inputs.q, *branches.compressed, **lengths, scale=selection.scale)]
    indices = backend.select(inputs.q.detach(), branches.compressed[0].detach(), outputs[0][1], selection)
    indices.fill_(0)
    numbers = {"select_len": selection.select_len, "scale": selection.scale}
    outputs.append(backend.selected(inputs.q, *branches.selected, indices, **numbers))
    outputs.append(backend.sliding(inputs.q, *branches.sliding, window=inputs.shape.window, scale=selection.scale))
    mixed = backend.mixed([output for output, _ in outputs], inputs.gates)
    mixed.backward(torch.ones_like(mixed))


def compiled(
    kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any], capability: int, warps: int, stages: int
) -> dict[str, Any]:
    names = kernel.arg_names
    given = dict(zip(names, arguments, strict=False))
    constants = constants | dict.fromkeys([name for name, value in given.items() if value is None])
    given = {name: value for name, value in given.items() if value is not None}
    signature = {name: _type(given[name]) if name in given else "constexpr" for name in names}
    fixed = {(names.index(name),): value for name, value in constants.items()}
    # What Triton finds out at a launch: addresses and strides that 16 divides; of sizes it looks at none.
    even = {
        (place,): [["tt.divisibility", 16]]
        for place, (name, parameter) in enumerate(zip(names, kernel.params, strict=True))
        if isinstance(given.get(name), torch.Tensor)
        or (isinstance(given.get(name), int) and not parameter.do_not_specialize and given[name] % 16 == 0)
    }
    source = ASTSource(kernel, signature, fixed, even)
    result = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps, "num_stages": stages}
    )
    numbers = {name: value for name, value in constants.items() if name in ("ROWS", "KEYS", "CHUNK")}
    return {
        "kernel": kernel.__name__,
        "numbers": numbers | {"warps": warps, "stages": stages},
        "shared_bytes": result.metadata.shared,
        "tensor_core_operations": result.asm["ptx"].count("mma"),
        "wide_accesses": len(_WIDE.findall(result.asm["ptx"])),
        "narrow_products": narrow_products(result.asm["ttir"], names),
        **_usage(result.asm["cubin"]),
    }


def narrow_products(ttir: str, names: list[str]) -> list[str]:
    """The arguments that something is multiplied with in 32 bits, which strides and lengths may overflow."""
    # A number that is made a tensor goes by the name of the number.
    spread = dict(re.findall(r"%(\S+) = tt\.(?:splat|broadcast|expand_dims) %([^\s,]+)", ttir))
    found = set()
    for factors in re.findall(r"arith\.muli %([^\s,]+), %(\S+) : (?:tensor<[\dx]+x)?i32", ttir):
        for factor in factors:
            while factor in spread:
                factor = spread[factor]
            found.add(factor)
    return sorted(found & set(names))


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _usage(cubin: bytes) -> dict[str, int]:
    """Registers and bytes of the stack of a thread, which is where registers that do not suffice are kept."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    words = dict(word.split(":", 1) for line in text.splitlines() if "REG:" in line for word in line.split())
    return {"registers": int(words["REG"]), "spilled_bytes": int(words["STACK"])}


if __name__ == "__main__":
    main(sys.argv[1:])
