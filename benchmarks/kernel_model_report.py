"""Show the results of benchmarks/kernel_model.py in the terminal and in performance.md.

The record contains no times. They are computed from code, work and a set of constants, so every state can be shown with
every set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.device_model import HISTORY, STATIONS, Constants, Prediction, host_ms, predict, torch_ms
from benchmarks.roofline import Shape, floors_ms

PAGE = "docs/internals/nsa/performance.md"
MARKS = ("<!-- kernel model: begin -->", "<!-- kernel model: end -->")
CHOICES_MARKS = ("<!-- choices: begin -->", "<!-- choices: end -->")
PASSES = ("forward", "backward")
PARTS = ("compressed", "importance", "selected", "sliding", "mix", "torch")
DEVICE = "H200"
ARCHITECTURE = "sm_90"
NEWEST = list(HISTORY)[-1]
SHOWN_TOKENS = 65536


def milliseconds(state: Mapping[str, Any], scenario: Mapping[str, Any], constants: Constants) -> dict[str, Prediction]:
    """Map the name "part/kernel" of each kernel to its predicted execution time."""
    return {
        name: predict(state["kernels"][name][ARCHITECTURE], work, constants) for name, work in scenario["work"].items()
    }


def pass_of(kernel: str) -> str:
    """Return the pass, "backward" or "forward", in which the named kernel runs."""
    return "backward" if "backward" in kernel else "forward"


def sums(state: Mapping[str, Any], scenario: Mapping[str, Any], constants: Constants) -> dict[str, dict[str, float]]:
    """Return, for each pass (forward or backward), the predicted time of each part of the operation in milliseconds."""
    result = {}
    for direction in PASSES:
        parts = dict.fromkeys(PARTS, 0.0)
        for name, prediction in milliseconds(state, scenario, constants).items():
            if pass_of(name) == direction:
                parts[name.split("/")[0]] += prediction.ms
        operations = state["host"][str(scenario["tokens"])][direction]
        parts["torch"] = torch_ms(operations, constants)
        device, host = sum(parts.values()), host_ms(operations, constants)
        result[direction] = parts | {"device": device, "host": host, "whole": max(device, host)}
    return result


def floor_ms(work: Mapping[str, Any], code: Mapping[str, Any], constants: Constants) -> float:
    """Return a lower bound, in milliseconds, for the execution time of one kernel."""
    # The operations of all passes, scaled by the fraction of visible pairs.
    needed_operations = code["written_operations"] * work["passes"] * work["seen"] / max(1, work["walked"])
    moved_bytes = work["own_bytes"] + work["walked_bytes"]
    return 1e3 * max(needed_operations / constants.operations_per_s, moved_bytes / constants.memory_bytes_per_s)


def screen(state: Mapping[str, Any]) -> Iterator[Table]:
    """Yield the tables that show one recorded prediction in the terminal."""
    for scenario in state["scenarios"]:
        title = f"{scenario['tokens']} tokens, {_choices(scenario)}: predicted milliseconds on an {DEVICE}"
        table = Table(title=title, title_justify="left")
        for number, name in enumerate(("kernel", *_COLUMNS, *(f"{name} ms" for name in HISTORY), "floor", "limit")):
            table.add_column(name, justify="left" if number == 0 else "right")
        for cells in _kernel_rows(state, scenario):
            table.add_row(*cells)
        yield table
    table = Table(title="sums", title_justify="left")
    for name in ("tokens", "choices", "way", *HISTORY, "floor", "torch operations", "launches", "host"):
        table.add_column(name, justify="right")
    for cells in _sum_rows([state]):
        table.add_row(*cells[1:])
    yield table


_COLUMNS = ("tile", "loop", "registers", "spills", "barriers", "KB a pass", "issued", "walked", "passes", "k")


def _kernel_rows(state: Mapping[str, Any], scenario: Mapping[str, Any]) -> Iterator[list[str]]:
    columns = [milliseconds(state, scenario, constants) for constants in HISTORY.values()]
    constants = HISTORY[NEWEST]
    for name, work in scenario["work"].items():
        kernel = state["kernels"][name]
        code, newest = kernel[ARCHITECTURE], columns[-1][name]
        yield [
            name.replace("/", " "),
            *_code_cells(kernel, work),
            str(newest.programs_at_once),
            *(f"{column[name].ms:.2f}" for column in columns),
            f"{floor_ms(work, code, constants):.2f}",
            newest.limit,
        ]


def _code_cells(kernel: Mapping[str, Any], work: Mapping[str, Any]) -> list[str]:
    code = kernel[ARCHITECTURE]
    loop, conditional = code["loop"], code["conditional"]
    if not loop:
        return ["", "", str(code["registers"]), _spill_cell(code), "", "", "", "", ""]
    loaded_bytes = loop["global_read_bytes"] * code["warps"] + code["described_bytes"]
    length = str(loop["instructions"])
    if conditional["instructions"]:
        length += f" + {conditional['instructions']} x {work['conditional']:.2f}"
    if code.get("edge_loop") and work.get("edges"):
        length += f"; {code['edge_loop']['instructions']} in {work['edges'] / work['passes']:.0%}"
    written_operations = code["written_operations"]
    return [
        ", ".join(map(str, kernel["tile"])) if kernel["tile"] else "",
        length,
        str(code["registers"]),
        _spill_cell(code),
        str(loop["barriers"]),
        f"{loaded_bytes / 1024:.1f}",
        f"{loop['mma_operations'] * code['warps'] / written_operations:.2f}x" if written_operations else "",
        f"{work['walked'] / work['seen']:.2f}x" if work["seen"] else "",
        str(work["passes"]),
    ]


def _spill_cell(code: Mapping[str, Any]) -> str:
    return str(max(code["spills"], code["spilled_bytes"]))


def _choices(scenario: Mapping[str, Any]) -> str:
    return f"neighbours share {scenario['shared']:.0%}" if scenario["shared"] else "random choices"


def _sum_rows(states: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    for state in states:
        for scenario in state["scenarios"]:
            floors = floors_ms(Shape(tokens=scenario["tokens"]), DEVICE)
            assert floors is not None
            columns = [sums(state, scenario, constants) for constants in HISTORY.values()]
            for direction in PASSES:
                operations = state["host"][str(scenario["tokens"])][direction]
                yield [
                    state["label"],
                    str(scenario["tokens"]),
                    _choices(scenario),
                    direction,
                    *(f"{column[direction]['whole']:.2f}" for column in columns),
                    f"{floors['whole'][direction]:.2f}",
                    str(operations["operations"]),
                    str(operations["launches"]),
                    f"{columns[-1][direction]['host']:.2f}",
                ]


def section(result: Mapping[str, Any]) -> str:
    """Return the generated Markdown section of docs/internals/nsa/performance.md."""
    states = result["states"]
    lines = ["", "### The whole operation", "", *_whole(states), "", "### By part", "", *_by_part(states)]
    for state in states:
        lines += ["", f"### Kernels: {state['label']}", "", _origin(state), "", *_kernels(state)]
        lines += ["", *_other_architectures(state)]
    return "\n".join([*lines, ""])


def _origin(state: Mapping[str, Any]) -> str:
    return (
        f"Commit `{state['commit'][:12]}`, triton {state['triton']}, compiled for {ARCHITECTURE} with the tile that is "
        f"tried first. Milliseconds of {SHOWN_TOKENS} tokens on random choices."
    )


def _whole(states: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    head = ["state", "tokens", "choices", "way", *(f"{name} ms" for name in HISTORY), "floor ms"]
    head += ["torch operations", "launches", "host ms"]
    yield from _table(head, _sum_rows(states))


def _by_part(states: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    cells = []
    for state in states:
        for scenario in (candidate for candidate in state["scenarios"] if candidate["tokens"] == SHOWN_TOKENS):
            for direction, parts in sums(state, scenario, HISTORY[NEWEST]).items():
                cells.append([state["label"], _choices(scenario), direction, *(f"{parts[part]:.2f}" for part in PARTS)])
    yield from _table(["state", "choices", "way", *PARTS], cells)


def _kernels(state: Mapping[str, Any]) -> Iterator[str]:
    scenario = _shown_scenario(state)
    stations = [f"{name} ms" for name in STATIONS]
    head = ["kernel", *_COLUMNS, *(f"{name} ms" for name in HISTORY), "floor ms", "limit", *stations]
    rows = []
    predictions = milliseconds(state, scenario, HISTORY[NEWEST])
    for cells, prediction in zip(_kernel_rows(state, scenario), predictions.values(), strict=True):
        rows.append([*cells, *(f"{getattr(prediction, f'{name}_ms'):.2f}" for name in STATIONS)])
    yield from _table(head, rows)


def _other_architectures(state: Mapping[str, Any]) -> Iterator[str]:
    others = sorted(
        {name for kernel in state["kernels"].values() for name in kernel if name.startswith("sm_")} - {ARCHITECTURE},
        key=lambda name: int(name[3:]),
    )
    columns = ("loop", "registers", "spills", "shared KB")
    head = ["kernel", *(f"{name} {column}" for name in others for column in columns)]
    rows = []
    for name, kernel in state["kernels"].items():
        cells = [name.replace("/", " ")]
        for other in others:
            code = kernel[other]
            if "refused" in code:
                cells += ["refused", "", "", ""]
                continue
            length = code["loop"].get("instructions", 0) + code["conditional"].get("instructions", 0)
            cells += [
                str(length or ""),
                str(code["registers"]),
                _spill_cell(code),
                f"{code['shared_bytes'] / 1024:.0f}",
            ]
        rows.append(cells)
    yield from _table(head, rows) if others else ()


def _shown_scenario(state: Mapping[str, Any]) -> Mapping[str, Any]:
    scenarios = [candidate for candidate in state["scenarios"] if not candidate["shared"]] or state["scenarios"]
    scenario: Mapping[str, Any] = next(
        (candidate for candidate in scenarios if candidate["tokens"] == SHOWN_TOKENS), scenarios[-1]
    )
    return scenario


def _table(head: Sequence[str], rows: Iterator[list[str]] | Sequence[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "|".join([" --- ", *(" ---: " for _ in head[1:])]) + "|"
    for cells in rows:
        yield f"| {' | '.join(cells)} |"


def choices_section(result: Mapping[str, Any]) -> str:
    """Return a Markdown section that compares the block selections of random and trained models."""
    sizes = [name for name in result["rows"]["random"] if name.startswith("union_of_")]
    head = ["choices", "shared by neighbours", *(f"union of {name.removeprefix('union_of_')}" for name in sizes)]
    rows = [
        [name, f"{row['shared_by_neighbours']:.0%}", *(f"{row[size]:.1f}" for size in sizes)]
        for name, row in result["rows"].items()
    ]
    introduction = (
        f"{result['tokens']} tokens, {result['places']} slots, blocks of {result['select_len']} tokens; trained for "
        f"{result['steps']} steps of {result['train_tokens']} tokens. `union of N` is the number of different blocks"
        " that N neighbouring queries select together:"
    )
    return "\n".join(["", introduction, "", *_table(head, rows), ""])


def write_page(page: Path, sections: Mapping[tuple[str, str], str]) -> None:
    """Replace the generated sections of a page, each of which lies between a pair of marks."""
    text = page.read_text(encoding="utf-8")
    for (begin, end), section in sections.items():
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{section}\n{end}{rest.partition(end)[2]}"
    page.write_text(text, encoding="utf-8")
