"""Predict the execution time of the full NSA operation on an H200, without a GPU.

    python benchmarks/kernel_model.py                                        8k, 32k and 64k tokens, random selections
    python benchmarks/kernel_model.py --choices correlated --tokens 65536    neighbouring queries share 80, 95 and 98 %
    python benchmarks/kernel_model.py --label after --json FILE              add the state to those in FILE
    python benchmarks/kernel_model.py --docs                                 rewrite the tables of performance.md
    python benchmarks/kernel_model.py --kernel spanned_backward_keys         print one kernel's loops
    python benchmarks/kernel_model.py --kernel spanned_backward_keys --tile 32,64,4,3    with rows, keys, warps, stages
    python benchmarks/kernel_model.py --kernel selected_forward --arch 80 --sass out.sass

Each kernel is compiled with its first candidate tile. Its machine code is analysed (benchmarks/sass.py), its passes are
counted (benchmarks/kernel_work.py), and its time is computed (benchmarks/device_model.py, which has every constant with
its source). Everything is arithmetic: nothing is measured.
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

from benchmarks import kernel_model_report as report  # noqa: E402
from benchmarks import sass  # noqa: E402
from benchmarks.compiled import CompiledKernel, Launch, Tile, compile_and_read, compile_launch, disassemble, launches  # noqa: E402
from benchmarks.device_model import HISTORY, STATIONS, predict  # noqa: E402
from benchmarks.host_cost import host_cost  # noqa: E402
from benchmarks.kernel_work import work  # noqa: E402
from benchmarks.provenance import measurement_context  # noqa: E402
from benchmarks.roofline import Shape  # noqa: E402
from benchmarks.synthetic_selections import make_selections, neighbour_overlap  # noqa: E402
from nsa_attention.ops.fused import tuning  # noqa: E402

RESULTS = REPOSITORY / "benchmarks" / "results" / "kernel_model.json"
CHOICES = RESULTS.with_name("nsa_choices.json")
ARCHITECTURES = (80, 90, 100)
TOKENS = [8192, 32768, 65536]
SHARED = {"random": [0.0], "correlated": [0.80, 0.95, 0.98]}
# Long enough for every kernel to get the compile-time constants of long sequences.
COMPILED_TOKENS = 32768


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Predict what the whole operation costs on an H200, without one.")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--choices", nargs="+", default=["random"], choices=list(SHARED))
    parser.add_argument("--arch", type=int, nargs="+", default=[90], choices=ARCHITECTURES, help="times are for 90")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the state under its label to the states in FILE")
    parser.add_argument("--label", default="now", help="name of the state; replaces a state of the same name")
    parser.add_argument("--docs", action="store_true", help=f"write the recorded tables into {report.PAGE}")
    parser.add_argument("--kernel", help="only print the loops of this kernel")
    parser.add_argument("--tile", type=parse_tile, metavar="R,K,W,S", help="for --kernel: rows, keys, warps and stages")
    parser.add_argument("--sass", type=Path, metavar="FILE", help="for --kernel: write its machine code to FILE")
    options = parser.parse_args(arguments)
    if options.docs:
        model, selections = (json.loads(path.read_text(encoding="utf-8")) for path in (RESULTS, CHOICES))
        sections = {report.MARKS: report.section(model), report.CHOICES_MARKS: report.choices_section(selections)}
        report.write_page(REPOSITORY / report.PAGE, sections)
        return 0
    if options.kernel:
        return print_kernel(parser, options)
    if options.tile or options.sass:
        parser.error("--tile and --sass are of one kernel: name it with --kernel")
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json {options.json}: there is no such directory")
    recorded_states = read_states(options.json) if options.json else []
    state = {"label": options.label, **measurement_context(__file__, arguments), **predicted_state(options)}
    states = [old_state for old_state in recorded_states if old_state["label"] != options.label] + [state]
    if options.json:
        constants = {name: asdict(constants) for name, constants in HISTORY.items()}
        result = {"constants": constants, "states": states}
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for table in report.screen(state):
        Console(width=None if sys.stdout.isatty() else 200).print(table)
    return 0


def parse_tile(text: str) -> Tile:
    """Parse a tile size in the form "rows,keys,warps,stages"."""
    try:
        rows, keys, warps, stages = map(int, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected four numbers, as in 64,64,4,2") from None
    return Tile(rows=rows, keys=keys, warps=warps, stages=stages)


def read_states(path: Path) -> list[dict[str, Any]]:
    """Return the predictions recorded in a file, or [] if the file does not exist."""
    states: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["states"] if path.exists() else []
    return states


def predicted_state(options: argparse.Namespace) -> dict[str, Any]:
    """Analyse the current source code, and return the data needed to predict execution times.

    Times are computed from them later, by kernel_model_report.milliseconds.
    """
    shape = Shape(tokens=COMPILED_TOKENS)
    return {
        "triton": version("triton"),
        "kernels": kernel_rows(
            {capability: launches(shape, capability=capability) for capability in sorted({90, *options.arch})}
        ),
        "scenarios": list(_scenarios(options.tokens, [share for name in options.choices for share in SHARED[name]])),
        "host": {str(tokens): host_cost(Shape(tokens=tokens)) for tokens in options.tokens},
    }


def kernel_rows(launches_by_capability: Mapping[int, Sequence[Launch]]) -> dict[str, Any]:
    """Map the name of each kernel to its tile size and the properties of its machine code."""
    return {
        f"{launches_of_kernel[0].part}/{launches_of_kernel[0].name}": {
            "tile": list(asdict(launches_of_kernel[0].tile).values()) if launches_of_kernel[0].tile else None,
            "stages": launches_of_kernel[0].stages,
            **{
                f"sm_{capability}": _row_of(launch, capability)
                for capability, launch in zip(launches_by_capability, launches_of_kernel, strict=True)
            },
        }
        for launches_of_kernel in zip(*launches_by_capability.values(), strict=True)
    }


def _row_of(launch: Launch, capability: int) -> dict[str, Any]:
    """Return the properties of a kernel's machine code, or the error if it cannot be compiled.

    Real runs on such a GPU try the next tile.
    """
    try:
        return code_row(compile_and_read(launch, capability), launch.stages)
    except RuntimeError as error:
        if f"sm_{capability}" == report.ARCHITECTURE or not tuning.is_unsupported_tile(error):
            raise
        return {"refused": str(error)}


def code_row(code: CompiledKernel, stages: int) -> dict[str, Any]:
    """Return the properties of a compiled kernel as a dictionary."""
    loop, edge = code.loop, sass.edge_loop(code.loops)
    return {
        "registers": code.registers,
        "spilled_bytes": code.spilled_bytes,
        "spills": code.code.spills,
        "shared_bytes": code.shared_bytes,
        "warps": code.warps,
        "stages": stages,
        "instructions": code.instructions,
        "outside_instructions": code.instructions - sum(part.instructions for part in (loop, edge) if part),
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
        all_launches = launches(shape)
        for share in shares:
            indices = make_selections(tokens, count=shape.select_count, select_len=shape.select_len, shared=share)
            yield {
                "tokens": tokens,
                "shared": share,
                "shared_by_neighbours": round(neighbour_overlap(indices), 4),
                "work": {
                    f"{launch.part}/{launch.name}": asdict(work(launch, shape, indices)) for launch in all_launches
                },
            }


def print_kernel(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Print the loops and the predicted execution times of one kernel."""
    shape = Shape(tokens=TOKENS[-1])
    tiles = {options.kernel: options.tile} if options.tile else None
    for capability in options.arch:
        all_launches = launches(shape, tiles, capability=capability)
        matching = [launch for launch in all_launches if launch.name == options.kernel]
        if not matching:
            names = ", ".join(sorted({launch.name for launch in all_launches}))
            parser.error(f"--kernel {options.kernel}: the kernels are {names}")
        for launch in matching:
            code = compile_and_read(launch, capability)
            print("\n".join(_lines(launch, code, capability)))
            if capability == 90:
                print(_predicted_line(launch, code, shape))
        if options.sass:
            options.sass.write_text(
                disassemble(compile_launch(matching[-1], capability).asm["cubin"]), encoding="utf-8"
            )
    return 0


def _lines(launch: Launch, code: CompiledKernel, capability: int) -> Iterator[str]:
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


def _predicted_line(launch: Launch, code: CompiledKernel, shape: Shape) -> str:
    work_counts = asdict(
        work(launch, shape, make_selections(shape.tokens, count=shape.select_count, select_len=shape.select_len))
    )
    predictions = {
        name: predict(code_row(code, launch.stages), work_counts, constants) for name, constants in HISTORY.items()
    }
    newest = list(predictions.values())[-1]
    stations = ", ".join(f"{name} {getattr(newest, f'{name}_ms'):.2f}" for name in STATIONS)
    milliseconds = ", ".join(f"{prediction.ms:.2f} ({name})" for name, prediction in predictions.items())
    return f"  predicted at {shape.tokens} tokens on random choices, ms: {milliseconds}; alone {stations}"


def _numbers(counts: dict[str, Any]) -> str:
    products = [f"{count} {name}" for name, count in counts.pop("mma").items()]
    return ", ".join([*(f"{name} {count}" for name, count in counts.items() if count), *products])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
