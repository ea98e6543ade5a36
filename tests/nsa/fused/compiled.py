"""A program: compile every launch of an operation for a GPU that need not be there; one line of JSON a kernel.

    python tests/nsa/fused/compiled.py WAY CAPABILITY DTYPE HEADS GROUPS WIDTH VALUE_WIDTH TILES [TOKENS [KERNEL ...]]

WAY: all branches `at_once`, as one operator, the same with `atomics`, or `apart`; or `rotary`, the rotary embeddings of
a layer. How that goes without a GPU: benchmarks/compiled.py. The first TILES sizes that would be tried are compiled, of
the named kernels or of all.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.compiled import Launch, compile_launch, launches, read_compiled, without_kernels  # noqa: E402
from benchmarks.kernel_model import code_row  # noqa: E402
from benchmarks.roofline import Shape  # noqa: E402
from nsa_attention.ops import rotary  # noqa: E402

FEW_TOKENS = 512
# What moves 16 bytes a thread between registers or shared memory and the GPU's own, or a whole tile at once.
_WIDE = re.compile(r"(?:ld|st)\.global\S*\.v4\.b32|cp\.async\.cg\.shared\.global|cp\.async\.bulk\.tensor")


def main(words: list[str]) -> None:
    way, capability, dtype, *numbers = words
    heads, groups, width, value_width, tiles = map(int, numbers[:5])
    shape = Shape(tokens=FEW_TOKENS, heads=heads, groups=groups, width=width, value_width=value_width)
    shape = replace(shape, tokens=int(numbers[5])) if numbers[5:] else replace(shape, window=FEW_TOKENS // 4)
    seen: set[str] = set()
    kind, one = getattr(torch, dtype), int(capability)
    names = numbers[6:]
    if way == "rotary":
        noted = rotary_launches(shape, kind)
    else:
        options = {"separate": way == "apart", "deterministic": way != "atomics"}
        noted = launches(shape, dtype=kind, tiles_per_kernel=tiles, capability=one, **options)
    for launch in noted:
        if names and launch.name not in names:
            continue
        line = compiled(launch, int(capability))
        key = json.dumps([line["kernel"], line["numbers"], line["variant"], line["part"] if numbers[5:] else ""])
        if key not in seen:
            seen.add(key)
            print(json.dumps(line), flush=True)


def rotary_launches(shape: Shape, dtype: torch.dtype) -> list[Launch]:
    """Forward and backward, of the views of a joint projection as a layer has them."""
    heads = (shape.heads, *[shape.groups] * 2)
    joint = torch.empty(1, shape.tokens, sum(heads) * shape.width, dtype=dtype).requires_grad_()
    parts = joint.split([count * shape.width for count in heads], -1)
    q, *keys = (part.unflatten(-1, (-1, shape.width)).transpose(1, 2) for part in parts)
    blocks = torch.empty(1, shape.groups, shape.blocks, shape.width, dtype=dtype)
    angles = torch.empty(2, shape.tokens, shape.width // 2, dtype=dtype)
    tables = [*[angles] * 3, angles[:, shape.block_len - 1 :: shape.block_stride]]
    with without_kernels() as noted:
        outputs = rotary._rotate([q, *keys, blocks], tables, 1.0, [True, *[False] * 3], "triton")
        torch.autograd.grad(outputs[:3], joint, [torch.empty_like(output) for output in outputs[:3]])
    return list(noted)


def compiled(launch: Launch, capability: int) -> dict[str, Any]:
    result = compile_launch(launch, capability)
    numbers = {name: value for name, value in launch.constants.items() if name in ("ROWS", "KEYS", "CHUNK")}
    is_atomic = launch.name == "spanned_backward_keys" and launch.argument("p_dq") is not None
    return {
        "part": launch.part,
        "kernel": launch.name,
        "variant": [name for name in ("ADDS", "SIGNED") if launch.constants.get(name)] + ["ATOMIC"] * is_atomic,
        "numbers": numbers | {"warps": launch.warps, "stages": launch.stages},
        "tensor_core_operations": result.asm["ptx"].count("mma"),
        "wide_accesses": len(_WIDE.findall(result.asm["ptx"])),
        "narrow_products": narrow_products(result.asm["ttir"], launch.kernel.arg_names),
        **code_row(read_compiled(result), launch.stages, capability),
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


if __name__ == "__main__":
    main(sys.argv[1:])
