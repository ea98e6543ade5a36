"""Measure what it costs to judge a large job: from the files of its run to SUMMARY.md, report.json and report.html.

    python benchmarks/scale.py --ranks 8 1024            into benchmarks/results/scale.json
    python benchmarks/scale.py --ranks 16384 --out F     one size, into F
    python benchmarks/scale.py --plot                    write docs/images/scale.svg and the table of docs/scaling.md

`scale_job.py` writes the files of a simulated job with a planted fault, which is not measured. A child process then
executes `nsa-harness report RUN`, and its CPU time, wall time and largest resident memory are measured. The answer
must name the planted rank, with its mesh coordinates. Results of other sizes that the output file has are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.provenance import measurement_context  # noqa: E402
from benchmarks.scale_plot import plot, table  # noqa: E402
from benchmarks.scale_schedule import Fault, mesh_of  # noqa: E402

RESULTS = REPOSITORY / "benchmarks" / "results" / "scale.json"
PAGE = REPOSITORY / "docs" / "scaling.md"
_BEGIN, _END = "<!-- scale: begin -->", "<!-- scale: end -->"
PLOT = REPOSITORY / "docs" / "images" / "scale.svg"
LIMITS = {"1024": {"wall_s": 20.0, "peak_bytes": 1 << 30}, "16384": {"wall_s": 300.0, "peak_bytes": 4 << 30}}
DOCUMENTS = ("SUMMARY.md", "report.html", "report.json")


def write_run(ranks: int, fault: Fault, steps: int, directory: Path) -> Path:
    """Write the run of a simulated job below `directory`, in a child process, and return the directory of the run."""
    arguments = ["--ranks", str(ranks), "--fault", fault, "--steps", str(steps), "--out", str(directory)]
    subprocess.run([sys.executable, str(REPOSITORY / "benchmarks" / "scale_job.py"), *arguments], check=True)
    return next(path for path in directory.iterdir() if not path.is_symlink())


def measure(run: Path, ranks: int, fault: Fault) -> dict[str, Any]:
    """Judge the run of a simulated job in a child process, and return its costs."""
    stored = sum(path.stat().st_blocks * 512 for path in run.rglob("*") if path.is_file())
    cost = _judge(run)
    outcome = json.loads((run / "report.json").read_text())["outcomes"][0]
    culprit, mesh = ranks * 2 // 3, mesh_of(ranks)
    coordinates = " ".join(f"{axis}={at}" for axis, at in mesh.coordinates(culprit).items())
    return {
        "ranks": ranks,
        "mesh": dict(mesh.sizes),
        "fault": str(fault),
        "planted_rank": culprit,
        "verdict": outcome["verdict"],
        "cause": outcome["cause"],
        "named_ranks": (outcome["culprit"] or {}).get("ranks", []),
        "is_right": (outcome["culprit"] or {}).get("ranks") == [culprit]
        and f"rank {culprit} ({coordinates})" in (run / "SUMMARY.md").read_text(),
        **cost,
        "evidence_bytes": stored,
        "document_bytes": {name: (run / name).stat().st_size for name in DOCUMENTS},
    }


def _judge(run: Path) -> dict[str, Any]:
    """Execute `nsa-harness report` and return its CPU seconds, wall seconds and largest resident memory in bytes."""
    started_s = time.perf_counter()
    command = [sys.executable, "-m", "nsa_harness", "report", str(run)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, _, usage = os.wait4(process.pid, 0)
    process.returncode = 0
    return {
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 2),
        "wall_s": round(time.perf_counter() - started_s, 2),
        "peak_bytes": usage.ru_maxrss * _MAXRSS_UNIT,
    }


_MAXRSS_UNIT = 1024  # bytes, on Linux


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Measure what it costs to judge a large job.")
    parser.add_argument("--ranks", type=int, nargs="*", default=[], help="numbers of ranks, each a power of two")
    parser.add_argument("--fault", type=Fault, choices=list(Fault), default=Fault.SKIPS)
    parser.add_argument("--steps", type=int, default=8, help="complete steps before the fault")
    parser.add_argument("--run", type=Path, help="judge this run, which scale_job.py has written, with --ranks RANKS")
    parser.add_argument("--plot", action="store_true", help="write the picture and the table of docs/scaling.md")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    earlier = json.loads(options.out.read_text())["sizes"] if options.out.exists() else []
    results = []
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
            given = ["RUN" if argument == str(options.run) else argument for argument in arguments]
            context = {**measurement_context(__file__, given), "steps": options.steps}
            run = options.run or write_run(ranks, options.fault, options.steps, Path(directory))
            results.append({**measure(run, ranks, options.fault), "measured": context})
        print(json.dumps(results[-1], indent=1), flush=True)
        measured = {(result["ranks"], result["fault"]) for result in results}
        kept = [result for result in earlier if (result["ranks"], result["fault"]) not in measured]
        sizes = sorted([*kept, *results], key=lambda result: (result["fault"], result["ranks"]))
        options.out.write_text(json.dumps({"limits": LIMITS, "sizes": sizes}, indent=1) + "\n")
    if options.plot:
        sizes = json.loads(options.out.read_text())["sizes"]
        PLOT.write_text(plot(sizes))
        before, _, rest = PAGE.read_text().partition(_BEGIN)
        PAGE.write_text(f"{before}{_BEGIN}\n{table(sizes)}\n{_END}{rest.partition(_END)[2]}")
    return 0 if all(result["is_right"] for result in results) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
