"""What each fused kernel's machine code does, read without a GPU.

python benchmarks/kernel_model.py --kernel spanned_backward_keys                     its loop, with the tile of today
python benchmarks/kernel_model.py --kernel spanned_backward_keys --tile 32,64,4,3    with rows, keys, warps, stages
python benchmarks/kernel_model.py --kernel selected_forward --arch 80 --sass out.sass
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.compiled import Compiled, Launch, Tile, compile_launch, compiled, disassembled, launches  # noqa: E402
from benchmarks.roofline import Shape  # noqa: E402

ARCHITECTURES = (80, 90, 100)
# Long enough that every kernel gets the constants of a long sequence; the kernels are the same for longer ones.
COMPILED_TOKENS = 32768


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="What each fused kernel's machine code does.")
    parser.add_argument("--kernel", required=True, help="name of a kernel")
    parser.add_argument(
        "--tile", type=tile, metavar="R,K,W,S", help="rows, keys, warps and stages; else those of today"
    )
    parser.add_argument("--arch", type=int, nargs="+", default=[90], choices=ARCHITECTURES)
    parser.add_argument(
        "--sass", type=Path, metavar="FILE", help="write the machine code of the last architecture there"
    )
    options = parser.parse_args(arguments)
    tiles = {options.kernel: options.tile} if options.tile else None
    found = [one for one in launches(Shape(tokens=COMPILED_TOKENS), tiles) if one.name == options.kernel]
    if not found:
        names = ", ".join(sorted({one.name for one in launches(Shape(tokens=COMPILED_TOKENS))}))
        parser.error(f"--kernel {options.kernel}: the kernels are {names}")
    for capability in options.arch:
        for launch in found:
            print("\n".join(told(launch, compiled(launch, capability), capability)))
        if options.sass:
            options.sass.write_text(disassembled(compile_launch(found[-1], capability).asm["cubin"]), encoding="utf-8")
    return 0


def tile(text: str) -> Tile:
    rows, keys, warps, stages = map(int, text.split(","))
    return Tile(rows=rows, keys=keys, warps=warps, stages=stages)


def told(launch: Launch, code: Compiled, capability: int) -> list[str]:
    tile = launch.tile
    sizes = f"rows {tile.rows}, keys {tile.keys}, " if tile else ""
    lines = [
        f"{launch.name} of {launch.part}, sm_{capability}: {sizes}{launch.warps} warps, {launch.stages} stages",
        f"  {code.instructions} instructions, {code.registers} registers, {code.spilled_bytes} bytes of stack, "
        f"{code.code.spills} spills, {code.shared_bytes} bytes of shared memory",
    ]
    for loop in code.loops:
        mark = "main loop" if loop is code.loop else "loop"
        lines.append(f"  {mark} {loop.head:#06x} to {loop.latch:#06x}: {loop.instructions} instructions a warp")
        for label, counts in (("every pass", loop.always), ("some passes", loop.conditional)):
            if counts.instructions:
                lines += [f"    {label}: {_numbers(asdict(counts))}"]
    if code.loop and code.dot_operations:
        issued = code.loop.always.mma_operations * launch.warps
        lines.append(
            f"  products of a pass: {issued} operations issued for {code.dot_operations} written"
            + (f" ({issued / code.dot_operations:.2f}x)" if issued else ", their shape is not in the code")
        )
    if code.described_bytes:
        lines.append(f"  bytes of a pass by descriptor: {code.described_bytes}")
    return lines


def _numbers(counts: dict[str, object]) -> str:
    shapes = counts.pop("mma")
    assert isinstance(shapes, dict)
    products = [f"{count} {name}" for name, count in shapes.items()]
    return ", ".join([*(f"{name} {count}" for name, count in counts.items() if count), *products])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
