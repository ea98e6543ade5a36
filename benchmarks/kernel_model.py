"""What the whole operation costs on an H200, predicted without one: from machine code, work and a few constants.

    python benchmarks/kernel_model.py                                        8k, 32k and 64k tokens on random choices
    python benchmarks/kernel_model.py --choices correlated --tokens 65536    neighbours share 80, 95 and 98 %
    python benchmarks/kernel_model.py --label after --json FILE              into the file, beside what was before
    python benchmarks/kernel_model.py --docs                                 the tables of performance.md
    python benchmarks/kernel_model.py --kernel spanned_backward_keys         one kernel's loop, with the tile of today
    python benchmarks/kernel_model.py --kernel spanned_backward_keys --tile 32,64,4,3    with rows, keys, warps, stages
    python benchmarks/kernel_model.py --kernel selected_forward --arch 80 --sass out.sass

Each kernel is compiled with the tile that is tried first, its machine code read (benchmarks/sass.py), its passes
counted (benchmarks/kernel_work.py), and its milliseconds computed (benchmarks/device_model.py, with every constant and
where it comes from). All of it is arithmetic: nothing is measured, and no GPU is used.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from rich.console import Console  # noqa: E402

from benchmarks import kernel_model_report as told  # noqa: E402
from benchmarks import sass  # noqa: E402
from benchmarks.compiled import Compiled, Launch, Tile, compile_launch, compiled, disassembled, launches  # noqa: E402
from benchmarks.device_model import HISTORY, STATIONS, predicted  # noqa: E402
from benchmarks.host_cost import host_cost  # noqa: E402
from benchmarks.kernel_work import work  # noqa: E402
from benchmarks.provenance import circumstances  # noqa: E402
from benchmarks.roofline import Shape  # noqa: E402
from benchmarks.synthetic_selections import choices, shared_by_neighbours  # noqa: E402
from nsa_attention.ops.fused import tuning  # noqa: E402

RESULTS = REPOSITORY / "benchmarks" / "results" / "kernel_model.json"
CHOICES = RESULTS.with_name("nsa_choices.json")
ARCHITECTURES = (80, 90, 100)
TOKENS = [8192, 32768, 65536]
SHARED = {"random": [0.0], "correlated": [0.80, 0.95, 0.98]}
# Long enough that every kernel gets the constants of a long sequence; the kernels are the same for longer ones.
COMPILED_TOKENS = 32768


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Predict what the whole operation costs on an H200, without one.")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--choices", nargs="+", default=["random"], choices=list(SHARED))
    parser.add_argument("--arch", type=int, nargs="+", default=[90], choices=ARCHITECTURES, help="times are for 90")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the state under its label to what is there")
    parser.add_argument("--label", default="now", help="name of the state; one of the same name gives way")
    parser.add_argument("--docs", action="store_true", help=f"write the recorded tables into {told.PAGE}")
    parser.add_argument("--kernel", help="tell one kernel's loops, and nothing else")
    parser.add_argument("--tile", type=tile, metavar="R,K,W,S", help="of --kernel: rows, keys, warps and stages")
    parser.add_argument("--sass", type=Path, metavar="FILE", help="of --kernel: write its machine code there")
    options = parser.parse_args(arguments)
    if options.docs:
        model, chosen = (json.loads(path.read_text(encoding="utf-8")) for path in (RESULTS, CHOICES))
        sections = {told.MARKS: told.section(model), told.CHOICES_MARKS: told.choices_section(chosen)}
        told.write_page(REPOSITORY / told.PAGE, sections)
        return 0
    if options.kernel:
        return tell_kernel(parser, options)
    if options.tile or options.sass:
        parser.error("--tile and --sass are of one kernel: name it with --kernel")
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json {options.json}: there is no such directory")
    recorded = read(options.json) if options.json else []
    state = {"label": options.label, **circumstances(__file__, arguments), **predicted_state(options)}
    states = [one for one in recorded if one["label"] != options.label] + [state]
    if options.json:
        constants = {name: asdict(one) for name, one in HISTORY.items()}
        result = {"constants": constants, "states": states}
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for table in told.screen(state):
        Console(width=None if sys.stdout.isatty() else 200).print(table)
    return 0


def tile(text: str) -> Tile:
    try:
        rows, keys, warps, stages = map(int, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected four numbers, as in 64,64,4,2") from None
    return Tile(rows=rows, keys=keys, warps=warps, stages=stages)


def read(path: Path) -> list[dict[str, Any]]:
    states: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["states"] if path.exists() else []
    return states


def predicted_state(options: argparse.Namespace) -> dict[str, Any]:
    """Code, work and host of the tree as it stands; milliseconds follow from them (kernel_model_told.milliseconds)."""
    shape = Shape(tokens=COMPILED_TOKENS)
    return {
        "triton": version("triton"),
        "kernels": kernel_rows({one: launches(shape, capability=one) for one in sorted({90, *options.arch})}),
        "scenarios": list(_scenarios(options.tokens, [one for name in options.choices for one in SHARED[name]])),
        "host": {str(tokens): host_cost(Shape(tokens=tokens)) for tokens in options.tokens},
    }


def kernel_rows(found: Mapping[int, Sequence[Launch]]) -> dict[str, Any]:
    """By part and name: the tile, and by architecture what the code of its launches does."""
    return {
        f"{same[0].part}/{same[0].name}": {
            "tile": list(asdict(same[0].tile).values()) if same[0].tile else None,
            "stages": same[0].stages,
            **{f"sm_{one}": _row_of(launch, one) for one, launch in zip(found, same, strict=True)},
        }
        for same in zip(*found.values(), strict=True)
    }


def _row_of(launch: Launch, capability: int) -> dict[str, Any]:
    """Of a tile that the compiler cannot make for that GPU, which goes on to the next one, so much alone."""
    try:
        return code_row(compiled(launch, capability), launch.stages)
    except RuntimeError as error:
        if f"sm_{capability}" == told.ARCHITECTURE or not tuning.is_unsupported_tile(error):
            raise
        return {"refused": str(error)}


def code_row(code: Compiled, stages: int) -> dict[str, Any]:
    loop, edge = code.loop, sass.edge_loop(code.loops)
    return {
        "registers": code.registers,
        "spilled_bytes": code.spilled_bytes,
        "spills": code.code.spills,
        "shared_bytes": code.shared_bytes,
        "warps": code.warps,
        "stages": stages,
        "instructions": code.instructions,
        "outside_instructions": code.instructions - sum(one.instructions for one in (loop, edge) if one),
        "loop": asdict(loop.always) if loop else {},
        "conditional": asdict(loop.conditional) if loop else {},
        "edge_loop": asdict(edge.always) if edge else {},
        "edge_conditional": asdict(edge.conditional) if edge else {},
        "written_operations": code.dot_operations,
        "described_bytes": code.described_bytes,
    }


def _scenarios(lengths: Sequence[int], shares: Sequence[float]) -> Iterator[dict[str, Any]]:
    for tokens in lengths:
        shape = Shape(tokens=tokens)
        found = launches(shape)
        for share in shares:
            indices = choices(tokens, count=shape.select_count, select_len=shape.select_len, shared=share)
            yield {
                "tokens": tokens,
                "shared": share,
                "shared_by_neighbours": round(shared_by_neighbours(indices), 4),
                "work": {f"{one.part}/{one.name}": asdict(work(one, shape, indices)) for one in found},
            }


def tell_kernel(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    shape = Shape(tokens=TOKENS[-1])
    tiles = {options.kernel: options.tile} if options.tile else None
    for capability in options.arch:
        every = launches(shape, tiles, capability=capability)
        found = [one for one in every if one.name == options.kernel]
        if not found:
            names = ", ".join(sorted({one.name for one in every}))
            parser.error(f"--kernel {options.kernel}: the kernels are {names}")
        for launch in found:
            code = compiled(launch, capability)
            print("\n".join(_lines(launch, code, capability)))
            if capability == 90:
                print(_predicted_line(launch, code, shape))
        if options.sass:
            options.sass.write_text(disassembled(compile_launch(found[-1], capability).asm["cubin"]), encoding="utf-8")
    return 0


def _lines(launch: Launch, code: Compiled, capability: int) -> Iterator[str]:
    sizes = f"rows {launch.tile.rows}, keys {launch.tile.keys}, " if launch.tile else ""
    yield f"{launch.name} of {launch.part}, sm_{capability}: {sizes}{launch.warps} warps, {launch.stages} stages"
    yield (
        f"  {code.instructions} instructions, {code.registers} registers, {code.spilled_bytes} bytes of stack, "
        f"{code.code.spills} spills, {code.shared_bytes} bytes of shared memory"
    )
    for loop in code.loops:
        mark = "main loop" if loop is code.loop else "loop that masks" if loop is sass.edge_loop(code.loops) else "loop"
        yield f"  {mark} {loop.head:#06x} to {loop.latch:#06x}: {loop.instructions} instructions a warp"
        for label, counts in (("every pass", loop.always), ("some passes", loop.conditional)):
            if counts.instructions:
                yield f"    {label}: {_numbers(asdict(counts))}"
    if code.loop and code.dot_operations:
        issued = code.loop.always.mma_operations * launch.warps
        waste = f" ({issued / code.dot_operations:.2f}x)" if issued else ", their shape is not in the code"
        yield f"  products of a pass: {issued} operations issued for {code.dot_operations} written{waste}"
    if code.described_bytes:
        yield f"  bytes of a pass by descriptor: {code.described_bytes}"


def _predicted_line(launch: Launch, code: Compiled, shape: Shape) -> str:
    todo = asdict(work(launch, shape, choices(shape.tokens, count=shape.select_count, select_len=shape.select_len)))
    each = {name: predicted(code_row(code, launch.stages), todo, one) for name, one in HISTORY.items()}
    newest = list(each.values())[-1]
    stations = ", ".join(f"{name} {getattr(newest, f'{name}_ms'):.2f}" for name in STATIONS)
    milliseconds = ", ".join(f"{one.ms:.2f} ({name})" for name, one in each.items())
    return f"  predicted at {shape.tokens} tokens on random choices, ms: {milliseconds}; alone {stations}"


def _numbers(counts: dict[str, Any]) -> str:
    products = [f"{count} {name}" for name, count in counts.pop("mma").items()]
    return ", ".join([*(f"{name} {count}" for name, count in counts.items() if count), *products])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
