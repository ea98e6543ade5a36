"""Calibrate the model of execution times with published times of other kernels, and show its error.

    python benchmarks/calibration.py                      compare predictions with the published times on record
    python benchmarks/calibration.py --docs               rewrite the table of performance.md
    python benchmarks/calibration.py --record FOLDER      compile the kernels of FOLDER/published_kernels.py again

No time in the record was measured by this project: each is from the page named beside it. The kernels are those of the
same page, compiled like the project's own. Their code is not part of this repository. `published_kernels.cases()`
returns a list of `PublishedCase`.

One number per GPU is fitted, `Constants.slowdown`. Its error is estimated by leaving out one kernel at a time, at all
its lengths: the number is fitted to the other kernels and used to predict the one left out.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.device_model import GPUS, predict  # noqa: E402
from benchmarks.generated_docs import PAGE, markdown_table, write_page  # noqa: E402

if TYPE_CHECKING:
    from benchmarks.compiled import Launch
    from benchmarks.kernel_work import Work

RECORD = REPOSITORY / "benchmarks" / "results" / "calibration.json"
MARKS = ("<!-- calibration: begin -->", "<!-- calibration: end -->")
MAX_SLOWDOWN = 4.0


@dataclass(frozen=True, kw_only=True)
class PublishedCase:
    """A published execution time, with the launches that took it."""

    kernel: str
    gpu: str  # a key of device_model.GPUS
    source: str  # a URL
    tokens: int
    measured_ms: float  # by the source
    launches: tuple[tuple[Launch, Work], ...]
    copied_bytes: int  # that torch operations around the kernels read and write


@dataclass(frozen=True)
class Accuracy:
    """The error of the model on one GPU, as a factor. 1.2 means that the time is up to 20 % longer or shorter."""

    typical: float  # root mean square
    largest: float


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", action="store_true", help=f"write the table into {PAGE}")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="folder with published_kernels.py")
    options = parser.parse_args(arguments)
    if options.record:
        if not (options.record / "published_kernels.py").is_file():
            parser.error(f"--record {options.record}: there is no published_kernels.py in it")
        sys.path.insert(0, str(options.record))
        RECORD.write_text(json.dumps(record(importlib.import_module("published_kernels").cases()), indent=1) + "\n")
    cases = read_cases()
    if options.docs:
        write_page(REPOSITORY / PAGE, {MARKS: section(cases)})
    print(section(cases))
    return 0


def record(published_cases: Sequence[PublishedCase]) -> dict[str, Any]:
    """Compile the kernels of some published times, and return what a prediction needs."""
    # Not needed to show the record, and they import torch and Triton.
    from benchmarks.compiled import compile_and_read
    from benchmarks.kernel_model import code_row

    codes: dict[str, Any] = {}
    cases = []
    for case in published_cases:
        capability = GPUS[case.gpu].capability
        parts = []
        for launch, work in case.launches:
            tile = ",".join(f"{name}={value}" for name, value in launch.constants.items() if "BLOCK" in name)
            name = f"{launch.name} sm_{capability} {tile} warps={launch.warps} stages={launch.stages}"
            if name not in codes:
                codes[name] = code_row(compile_and_read(launch, capability), launch.stages, capability)
            parts.append({"code": name, "work": asdict(work)})
        numbers = {name: getattr(case, name) for name in ("kernel", "gpu", "source", "tokens", "measured_ms")}
        cases.append({**numbers, "parts": parts, "copied_bytes": case.copied_bytes})
    return {"codes": codes, "cases": cases}


def read_cases() -> list[dict[str, Any]]:
    """Return the recorded cases. Each part has the properties of its machine code as "code"."""
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    for case in recorded["cases"]:
        for part in case["parts"]:
            part["code"] = recorded["codes"][part["code"]]
    cases: list[dict[str, Any]] = recorded["cases"]
    return cases


def predicted_ms(case: Mapping[str, Any], slowdown: float) -> float:
    """Return the predicted execution time of a recorded case."""
    constants = replace(GPUS[case["gpu"]], slowdown=slowdown)
    kernels_ms = sum(predict(part["code"], part["work"], constants).ms for part in case["parts"])
    return kernels_ms + 1e3 * case["copied_bytes"] / constants.memory_bytes_per_s


def fit_slowdown(cases: Sequence[Mapping[str, Any]]) -> float:
    """Return the slowdown with which predictions are too long as often as too short.

    The mean logarithm of predicted by published time is 0; every kernel has the same weight, whatever the number of its
    lengths.
    """
    low, high = 1.0, MAX_SLOWDOWN
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _mean_error(cases, middle) < 0 else (low, middle)
    return (low + high) / 2


def _mean_error(cases: Sequence[Mapping[str, Any]], slowdown: float) -> float:
    errors: dict[str, list[float]] = {}
    for case in cases:
        error = math.log(predicted_ms(case, slowdown) / case["measured_ms"])
        errors.setdefault(case["kernel"], []).append(error)
    return sum(sum(values) / len(values) for values in errors.values()) / len(errors)


def left_out(cases: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], float]]:
    """Yield each case with the time predicted for it by a fit to all other kernels on the same GPU."""
    for case in cases:
        others = [one for one in cases if one["gpu"] == case["gpu"] and one["kernel"] != case["kernel"]]
        yield case, predicted_ms(case, fit_slowdown(others))


def accuracy(cases: Sequence[Mapping[str, Any]], gpu: str) -> Accuracy:
    """Return the error on kernels that were left out of the fit, on one GPU."""
    errors = [math.log(ms / case["measured_ms"]) for case, ms in left_out(cases) if case["gpu"] == gpu]
    typical = math.sqrt(sum(error**2 for error in errors) / len(errors))
    return Accuracy(math.exp(typical), math.exp(max(map(abs, errors))))


def section(cases: Sequence[Mapping[str, Any]]) -> str:
    """Return the generated Markdown section of performance.md."""
    rows = [
        [
            case["kernel"],
            case["gpu"],
            str(case["tokens"]),
            f"{case['measured_ms']:.2f}",
            f"{predicted_ms(case, 1.0):.2f}",
            f"{ms:.2f}",
            f"{ms / case['measured_ms'] - 1:+.0%}",
            f"[{_sources(cases).index(case['source']) + 1}]",
        ]
        for case, ms in left_out(cases)
    ]
    head = [
        "kernel",
        "GPU",
        "tokens",
        "published ms",
        "without slowdown ms",
        "left out of the fit ms",
        "error",
        "source",
    ]
    lines = ["", *markdown_table(head, rows), ""]
    lines += [f"{number}. {source}" for number, source in enumerate(_sources(cases), 1)]
    lines.append("")
    summary = []
    for gpu in dict.fromkeys(case["gpu"] for case in cases):
        of_gpu = [case for case in cases if case["gpu"] == gpu]
        error = accuracy(cases, gpu)
        kernels = len({case["kernel"] for case in of_gpu})
        summary.append(
            [gpu, str(kernels), f"{fit_slowdown(of_gpu):.2f}", _percent(error.typical), _percent(error.largest)]
        )
    lines += markdown_table(["GPU", "kernels", "slowdown", "typical error", "largest error"], summary)
    return "\n".join([*lines, ""])


def _sources(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(case["source"] for case in cases))


def _percent(factor: float) -> str:
    """Return an error factor as the range of a measured time around its prediction."""
    return f"-{1 - 1 / factor:.0%} to +{factor - 1:.0%}"


def band_ms(ms: float, error: Accuracy) -> tuple[float, float]:
    """Return the range in which the largest known error puts a measured time."""
    return ms / error.largest, ms * error.largest


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
