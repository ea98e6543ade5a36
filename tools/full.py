"""Run all tests that work on a CPU, except those that already have a result for this commit.

    python tools/full.py                  run until every test has a result
    python tools/full.py --minutes 30     run one slice; the same command continues with the next slice

A slice ends after the test during which its time runs out. The results are stored in benchmarks/results/full.json,
together with the commit. The exit code is 1 if a test failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.provenance import measurement_context  # noqa: E402

RESULTS = REPOSITORY / "benchmarks" / "results" / "full.json"
SELECTED = ["-m", "not gpu and not multi_gpu"]


class Results:
    """A pytest plugin that records the outcome of each test, and stops at a time limit.

    The outcome of a test is the worst outcome of its phases. Tests that already have a result are skipped.
    """

    def __init__(self, known: Sequence[str], limit_s: float) -> None:
        self.found: dict[str, dict[str, Any]] = {}
        self._known = frozenset(known)
        self._session: pytest.Session | None = None
        self._due: list[str] = []
        self._end_s = time.monotonic() + limit_s

    @property
    def complete(self) -> bool:
        return all(name in self.found for name in self._due)

    @pytest.hookimpl(trylast=True)  # last, so that tests excluded by markers are already removed
    def pytest_collection_modifyitems(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid not in self._known]
        self._session, self._due = session, [item.nodeid for item in items]

    def pytest_runtest_logfinish(self) -> None:
        if self._session is not None and time.monotonic() > self._end_s:
            self._session.shouldstop = "the slice is over"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        known = self.found.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0})
        known["seconds"] = round(known["seconds"] + report.duration, 2)
        if report.outcome != "passed" and known["outcome"] != "failed":
            known["outcome"] = report.outcome


def test_files() -> list[str]:
    folders = (REPOSITORY / "tests", REPOSITORY / "evaluation" / "tests")
    return sorted(str(path.relative_to(REPOSITORY)) for folder in folders for path in folder.rglob("test_*.py"))


def stored(commit: str) -> dict[str, Any]:
    """Return the stored test results for this commit, or a new record without results if there are none."""
    if RESULTS.exists():
        results: dict[str, Any] = json.loads(RESULTS.read_text())
        if results["commit"] == commit and not results["uncommitted_changes"]:
            return results
    return {**measurement_context(__file__, []), "files_done": [], "tests": {}}


def run_file(file: str, known: Sequence[str], limit_s: float) -> tuple[dict[str, dict[str, Any]], bool]:
    """Run the tests in one file in a new process. Return the results, and whether they are complete.

    If the process crashes, only the results of this file are lost.
    """
    script = (
        "import json, sys; sys.path.insert(0, 'tools'); import pytest; from full import Results, SELECTED;"
        "r = Results(json.loads(sys.argv[3]), float(sys.argv[4]));"
        "pytest.main(['-q', '-p', 'no:cacheprovider', *SELECTED, sys.argv[1]], plugins=[r]);"
        "json.dump([r.found, r.complete], open(sys.argv[2], 'w'))"
    )
    out = REPOSITORY / "build" / "full-slice.json"
    out.parent.mkdir(exist_ok=True)
    out.unlink(missing_ok=True)
    words = [file, str(out), json.dumps(known), str(limit_s)]
    subprocess.run([sys.executable, "-c", script, *words], cwd=REPOSITORY, check=False)
    if not out.exists():
        return {file: {"outcome": "failed", "seconds": 0.0}}, True
    found, complete = json.loads(out.read_text())
    return found, complete


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Run every test a CPU can run, in slices.")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop before the next test after this long")
    options = parser.parse_args(arguments)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.strip()
    results, begun = stored(commit), time.monotonic()
    for file in test_files():
        if file in results["files_done"]:
            continue
        limit_s = options.minutes * 60 - (time.monotonic() - begun)
        if limit_s < 0:
            break
        known = [name for name in results["tests"] if name.startswith(f"{file}::")]
        found, complete = run_file(file, known, limit_s)
        results["tests"] |= found
        results["files_done"] += [file] if complete else []
        results["summary"] = dict(Counter(test["outcome"] for test in results["tests"].values()))
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    left = [file for file in test_files() if file not in results["files_done"]]
    print(f"{results.get('summary', {})}, {len(left)} files left")
    return 1 if results.get("summary", {}).get("failed") else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
