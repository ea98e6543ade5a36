"""Predict the execution time of the full NSA operation on an A100 and an H200, without a GPU.

    python benchmarks/kernel_model.py                                        8k, 32k and 64k tokens, random selections
    python benchmarks/kernel_model.py --choices correlated --tokens 65536    neighbouring queries share 80, 95 and 98 %
    python benchmarks/kernel_model.py --atomics                              the backward pass of deterministic=False
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
from benchmarks.device_model import GPUS, STATIONS, predict  # noqa: E402
from benchmarks.generated_docs import PAGE, write_page  # noqa: E402
from benchmarks.host_cost import host_cost  # noqa: E402
from benchmarks.kernel_work import work  # noqa: E402
from benchmarks.provenance import measurement_context  # noqa: E402
from benchmarks.roofline import Shape  # noqa: E402
from benchmarks.synthetic_selections import make_selections, neighbour_overlap  # noqa: E402
from benchmarks.warp_schedule import MULTIPROCESSORS, cycles_per_pass  # noqa: E402
from nsa_attention.ops.fused import tuning  # noqa: E402

RESULTS = REPOSITORY / "benchmarks" / "results" / "kernel_model.json"
CHOICES = RESULTS.with_name("nsa_choices.json")
ARCHITECTURES = (80, 90, 100)
TOKENS = [8192, 32768, 65536]
SHARED = {"random": [0.0], "correlated": [0.80, 0.95, 0.98]}
# Long enough for every kernel to get the compile-time constants of long sequences.
COMPILED_TOKENS = 32768


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description="Predict what the whole operation costs on an A100 and an H200, without one."
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--choices", nargs="+", default=["random"], choices=list(SHARED))
    parser.add_argument(
        "--arch", type=int, nargs="+", default=[90], choices=ARCHITECTURES, help="times are for 80 and 90"
    )
    parser.add_argument("--atomics", action="store_true", help="the backward pass of deterministic=False")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the state under its label to the states in FILE")
    parser.add_argument("--label", default="now", help="name of the state; replaces a state of the same name")
    parser.add_argument("--docs", action="store_true", help=f"write the recorded tables into {PAGE}")
    parser.add_argument("--kernel", help="only print the loops of this kernel")
    parser.add_argument("--tile", type=parse_tile, metavar="R,K,W,S", help="for --kernel: rows, keys, warps and stages")
    parser.add_argument("--sass", type=Path, metavar="FILE", help="for --kernel: write its machine code to FILE")
    options = parser.parse_args(arguments)
    if options.docs:
        model, selections = (json.loads(path.read_text(encoding="utf-8")) for path in (RESULTS, CHOICES))
        sections = {report.MARKS: report.section(model), report.CHOICES_MARKS: report.choices_section(selections)}
        write_page(REPOSITORY / PAGE, sections)
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
        options.json.write_text(json.dumps({"states": states}, indent=1) + "\n", encoding="utf-8")
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
    capabilities = sorted({90, *options.arch})
    shape = Shape(tokens=COMPILED_TOKENS)
    shares = [share for name in options.choices for share in SHARED[name]]
    timed, deterministic = [each for each in capabilities if each in MULTIPROCESSORS], not options.atomics
    return {
        "triton": version("triton"),
        "kernels": kernel_rows(
            {each: launches(shape, capability=each, deterministic=deterministic) for each in capabilities}
        ),
        "scenarios": list(_scenarios(options.tokens, shares, timed, deterministic=deterministic)),
        "host": {
            str(tokens): host_cost(Shape(tokens=tokens), deterministic=deterministic) for tokens in options.tokens
        },
    }


def kernel_rows(launches_by_capability: Mapping[int, Sequence[Launch]]) -> dict[str, Any]:
    """Map the name of each kernel, and of each architecture, to the properties of its machine code."""
    rows: dict[str, Any] = {}
    for capability, launches_of_capability in launches_by_capability.items():
        for launch in launches_of_capability:
            row = _row_of(launch, capability)
            rows.setdefault(f"{launch.part}/{launch.name}", {})[f"sm_{capability}"] = row
    return rows


def _row_of(launch: Launch, capability: int) -> dict[str, Any]:
    """Return the properties of a kernel's machine code, or the error if it cannot be compiled.

    Real runs on such a GPU try the next tile.
    """
    tile = list(asdict(launch.tile).values()) if launch.tile else None
    try:
        return {"tile": tile, **code_row(compile_and_read(launch, capability), launch.stages, capability)}
    except RuntimeError as error:
        if capability in MULTIPROCESSORS or not tuning.is_unsupported_tile(error):
            raise
        return {"tile": tile, "refused": str(error)}


def code_row(code: CompiledKernel, stages: int, capability: int) -> dict[str, Any]:
    """Return the properties of a compiled kernel as a dictionary.

    The cycles of a pass are those of a program that runs alone, with and without the conditional part of the loop.
    """
    loop, edge = code.loop, sass.edge_loop(code.loops)
    cycles: dict[str, float] = {}
    if capability in MULTIPROCESSORS:
        for prefix, part in (("", loop), ("edge_", edge)):
            for name, body in (("always", part.always_body if part else ()), ("all", part.body if part else ())):
                cycles[f"{prefix}{name}_cycles"] = round(cycles_per_pass(body, code.warps, capability), 1)
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
        "reduced_bytes": code.reduced_bytes,
        **cycles,
    }


def _scenarios(
    lengths: Sequence[int], shares: Sequence[float], capabilities: Sequence[int], *, deterministic: bool
) -> Iterator[dict[str, Any]]:
    for tokens in lengths:
        shape = Shape(tokens=tokens)
        all_launches = {each: launches(shape, capability=each, deterministic=deterministic) for each in capabilities}
        for share in shares:
            indices = make_selections(tokens, count=shape.select_count, select_len=shape.select_len, shared=share)
            yield {
                "tokens": tokens,
                "shared": share,
                "shared_by_neighbours": round(neighbour_overlap(indices), 4),
                "work": {
                    f"sm_{capability}": {
                        f"{launch.part}/{launch.name}": asdict(work(launch, shape, indices)) for launch in each
                    }
                    for capability, each in all_launches.items()
                },
            }


def print_kernel(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Print the loops and the predicted execution times of one kernel."""
    shape = Shape(tokens=TOKENS[-1])
    tiles = {options.kernel: options.tile} if options.tile else None
    for capability in options.arch:
        all_launches = launches(shape, tiles, capability=capability, deterministic=not options.atomics)
        matching = [launch for launch in all_launches if launch.name == options.kernel]
        if not matching:
            names = ", ".join(sorted({launch.name for launch in all_launches}))
            parser.error(f"--kernel {options.kernel}: the kernels are {names}")
        for launch in matching:
            code = compile_and_read(launch, capability)
            print("\n".join(_lines(launch, code, capability)))
            if capability in MULTIPROCESSORS:
                print(_predicted_line(launch, code, shape, capability))
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
        yield f"  bytes of a pass by descriptor: {code.described_bytes}, and {code.reduced_bytes} added"


def _predicted_line(launch: Launch, code: CompiledKernel, shape: Shape, capability: int) -> str:
    work_counts = asdict(
        work(launch, shape, make_selections(shape.tokens, count=shape.select_count, select_len=shape.select_len))
    )
    gpu = next(gpu for gpu in report.SHOWN_GPUS if GPUS[gpu].capability == capability)
    prediction = predict(code_row(code, launch.stages, capability), work_counts, GPUS[gpu])
    stations = ", ".join(f"{name} {getattr(prediction, f'{name}_ms'):.2f}" for name in STATIONS)
    return (
        f"  predicted at {shape.tokens} tokens on random choices: {prediction.ms:.2f} ms on an {gpu}; "
        f"the stations alone {stations}"
    )


def _numbers(counts: dict[str, Any]) -> str:
    products = [f"{count} {name}" for name, count in counts.pop("mma").items()]
    return ", ".join([*(f"{name} {count}" for name, count in counts.items() if count), *products])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
