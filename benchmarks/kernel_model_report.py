"""Show the results of benchmarks/kernel_model.py in the terminal and in performance.md.

The record contains no times. They are computed from code, work and the constants of a GPU, so every recorded state can
be shown with the newest constants.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from benchmarks.calibration import Accuracy, accuracy, band_ms, read_cases
from benchmarks.device_model import GPUS, STATIONS, Constants, Prediction, host_ms, predict, torch_ms
from benchmarks.generated_docs import markdown_table
from benchmarks.roofline import Shape, floors_ms

MARKS = ("<!-- kernel model: begin -->", "<!-- kernel model: end -->")
CHOICES_MARKS = ("<!-- choices: begin -->", "<!-- choices: end -->")
PASSES = ("forward", "backward")
PARTS = ("compressed", "importance", "selected", "sliding", "mix", "torch")
# The GPUs that times are predicted for, with the GPU whose published times calibrate them.
SHOWN_GPUS = {"H200": "H100", "A100": "A100"}
SHOWN_TOKENS = 65536


def architecture(gpu: str) -> str:
    """Return the name of a GPU's architecture, such as "sm_90"."""
    return f"sm_{GPUS[gpu].capability}"


def milliseconds(state: Mapping[str, Any], scenario: Mapping[str, Any], gpu: str) -> dict[str, Prediction]:
    """Map the name "part/kernel" of each kernel to its predicted execution time."""
    name_of_code = architecture(gpu)
    return {
        name: predict(state["kernels"][name][name_of_code], work, GPUS[gpu])
        for name, work in scenario["work"][name_of_code].items()
    }


def pass_of(kernel: str) -> str:
    """Return the pass, "backward" or "forward", in which the named kernel runs."""
    return "backward" if "backward" in kernel or kernel.endswith(BACKWARD_OTHERS) else "forward"


BACKWARD_OTHERS = ("selected_keys", "selected_segments", "spanned_statistics")


def sums(state: Mapping[str, Any], scenario: Mapping[str, Any], gpu: str) -> dict[str, dict[str, float]]:
    """Return, for each pass (forward or backward), the predicted time of each part of the operation in milliseconds."""
    result, constants = {}, GPUS[gpu]
    for direction in PASSES:
        parts = dict.fromkeys(PARTS, 0.0)
        for name, prediction in milliseconds(state, scenario, gpu).items():
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
        for gpu in _gpus(state):
            title = f"{scenario['tokens']} tokens, {_choices(scenario)}: predicted milliseconds on an {gpu}"
            table = Table(title=title, title_justify="left")
            for number, name in enumerate(("kernel", *_COLUMNS, "ms", "floor", "limit")):
                table.add_column(name, justify="left" if number == 0 else "right")
            for cells in _kernel_rows(state, scenario, gpu):
                table.add_row(*cells)
            yield table
    table = Table(title="sums", title_justify="left")
    for name in ("GPU", *_SUM_COLUMNS):
        table.add_column(name, justify="right")
    for cells in _sum_rows([state]):
        table.add_row(*cells[1:])
    yield table


def _gpus(state: Mapping[str, Any]) -> list[str]:
    """Return the GPUs for whose architecture a state was recorded."""
    return [gpu for gpu in SHOWN_GPUS if all(architecture(gpu) in kernel for kernel in state["kernels"].values())]


_COLUMNS = ("tile", "loop", "registers", "spills", "barriers", "KB a pass", "issued", "walked", "passes", "k")


def _kernel_rows(state: Mapping[str, Any], scenario: Mapping[str, Any], gpu: str) -> Iterator[list[str]]:
    for name, prediction in milliseconds(state, scenario, gpu).items():
        work, code = scenario["work"][architecture(gpu)][name], state["kernels"][name][architecture(gpu)]
        yield [
            name.replace("/", " "),
            *_code_cells(code, work),
            str(prediction.programs_at_once),
            f"{prediction.ms:.2f}",
            f"{floor_ms(work, code, GPUS[gpu]):.2f}",
            prediction.limit,
        ]


def _code_cells(code: Mapping[str, Any], work: Mapping[str, Any]) -> list[str]:
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
        ", ".join(map(str, code["tile"])) if code["tile"] else "",
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


_SUM_COLUMNS = ("tokens", "choices", "pass", "ms", "range", "floor", "torch operations", "launches", "host ms")


def _sum_rows(states: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    cases = read_cases()
    errors = {gpu: accuracy(cases, calibrated) for gpu, calibrated in SHOWN_GPUS.items()}
    for state in states:
        for scenario in state["scenarios"]:
            for gpu in _gpus(state):
                floors = floors_ms(Shape(tokens=scenario["tokens"]), gpu)
                assert floors is not None
                times = sums(state, scenario, gpu)
                for direction in PASSES:
                    operations = state["host"][str(scenario["tokens"])][direction]
                    yield [
                        state["label"],
                        gpu,
                        str(scenario["tokens"]),
                        _choices(scenario),
                        direction,
                        f"{times[direction]['whole']:.1f}",
                        _range(times[direction]["whole"], errors[gpu]),
                        f"{floors['whole'][direction]:.1f}",
                        str(operations["operations"]),
                        str(operations["launches"]),
                        f"{times[direction]['host']:.2f}",
                    ]


def _range(ms: float, error: Accuracy) -> str:
    low, high = band_ms(ms, error)
    return f"{low:.0f} to {high:.0f}" if low >= 10 else f"{low:.1f} to {high:.1f}"


def section(result: Mapping[str, Any]) -> str:
    """Return the generated Markdown section of docs/internals/nsa/performance.md."""
    states = result["states"]
    lines = ["", "### The whole operation", "", *_whole(states), "", "### By part", "", *_by_part(states)]
    for state in states:
        for gpu in _gpus(state):
            lines += ["", f"### Kernels on an {gpu}: {state['label']}", "", _origin(state, gpu), ""]
            lines += _kernels(state, gpu)
        lines += ["", f"### Code for sm_100: {state['label']}", "", *_newest_architecture(state)]
    return "\n".join([*lines, ""])


def _origin(state: Mapping[str, Any], gpu: str) -> str:
    return (
        f"The kernels are from commit `{state['commit'][:12]}`, compiled by triton {state['triton']} for "
        f"{architecture(gpu)} with the first candidate tile of each kernel. The times are in milliseconds, for "
        f"{SHOWN_TOKENS} tokens and randomly selected blocks."
    )


def _whole(states: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield from markdown_table(["state", "GPU", *_SUM_COLUMNS], _sum_rows(states))


def _by_part(states: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    cells = []
    for state in states:
        for gpu in _gpus(state):
            for scenario in (candidate for candidate in state["scenarios"] if candidate["tokens"] == SHOWN_TOKENS):
                for direction, parts in sums(state, scenario, gpu).items():
                    times = [f"{parts[part]:.2f}" for part in PARTS]
                    cells.append([state["label"], gpu, _choices(scenario), direction, *times])
    yield from markdown_table(["state", "GPU", "choices", "pass", *PARTS], cells)


def _kernels(state: Mapping[str, Any], gpu: str) -> Iterator[str]:
    scenario = _shown_scenario(state)
    stations = [f"{name} ms" for name in STATIONS]
    rows = []
    predictions = milliseconds(state, scenario, gpu)
    for cells, prediction in zip(_kernel_rows(state, scenario, gpu), predictions.values(), strict=True):
        rows.append([*cells, *(f"{getattr(prediction, f'{name}_ms'):.2f}" for name in STATIONS)])
    yield from markdown_table(["kernel", *_COLUMNS, "ms", "floor ms", "limit", *stations], rows)


def _newest_architecture(state: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table of the code for compute capability 10.0, for which no times are predicted."""
    rows = []
    for name, kernel in state["kernels"].items():
        code = kernel.get("sm_100", {"refused": "not compiled"})
        if "refused" in code:
            rows.append([name.replace("/", " "), "refused", "", "", "", ""])
            continue
        length = code["loop"].get("instructions", 0) + code["conditional"].get("instructions", 0)
        tile = ", ".join(map(str, code["tile"])) if code["tile"] else ""
        shared = f"{code['shared_bytes'] / 1024:.0f}"
        rows.append(
            [name.replace("/", " "), tile, str(length or ""), str(code["registers"]), _spill_cell(code), shared]
        )
    yield from markdown_table(["kernel", "tile", "loop", "registers", "spills", "shared KB"], rows)


def _shown_scenario(state: Mapping[str, Any]) -> Mapping[str, Any]:
    scenarios = [candidate for candidate in state["scenarios"] if not candidate["shared"]] or state["scenarios"]
    scenario: Mapping[str, Any] = next(
        (candidate for candidate in scenarios if candidate["tokens"] == SHOWN_TOKENS), scenarios[-1]
    )
    return scenario


def choices_section(result: Mapping[str, Any]) -> str:
    """Return a Markdown section that compares the block selections of random and trained models."""
    sizes = [name for name in result["rows"]["random"] if name.startswith("union_of_")]
    head = ["choices", "shared by neighbours", *(f"union of {name.removeprefix('union_of_')}" for name in sizes)]
    rows = [
        [name, f"{row['shared_by_neighbours']:.0%}", *(f"{row[size]:.1f}" for size in sizes)]
        for name, row in result["rows"].items()
    ]
    introduction = (
        f"The model was trained for {result['steps']} steps of {result['train_tokens']} tokens. Then each query of "
        f"{result['tokens']} tokens selected {result['places']} blocks of {result['select_len']} tokens. `union of N` "
        "is the number of different blocks that N neighbouring queries select together:"
    )
    return "\n".join(["", introduction, "", *markdown_table(head, rows), ""])
