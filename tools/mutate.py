"""Check that the tests detect deliberate errors (mutations) in the code.

Each mutation of tests/mutations.json is applied to a copy of the code. The test named in its entry must then fail.

    python tools/mutate.py                        all mutations that have no result for this commit yet
    python tools/mutate.py --only harness/nsa_harness/core    the mutations of the files in this directory
    python tools/mutate.py --minutes 30 --jobs 2  one slice in two processes; the same command continues
    python tools/mutate.py --show                 only print the change that each mutation makes

The results are stored in benchmarks/results/mutations.json. The exit code is 1 if a mutation survives, or if its test
fails for another reason.

Each job has a copy of the tree and a worker process that has imported pytest and the libraries. The worker forks once
per mutation. The fork imports our code with the mutated file and runs one test.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from mutating import SOURCES, Mutation, mutated, read  # noqa: E402

from benchmarks.provenance import measurement_context  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "mutations.json"
COPIED = (
    *SOURCES, "benchmarks", "docs", "evaluation", "reports/sample", "scenarios", "tests", "tools", "pyproject.toml",
)  # fmt: skip
# Libraries that a worker imports before it forks. Our own code is not one of them, because a mutation may change it.
LIBRARIES = (
    "pytest",
    "hypothesis",
    "pytest_timeout",
    "pydantic",
    "ruamel.yaml",
    "typer",
    "rich.table",
    "jinja2",
    "psutil",
)
TORCH = "torch"  # takes seconds to import, so it is left out if no test of the batch needs it
NEAR_TORCH = ("tests/nsa", "tests/probe", "tests/end_to_end")
LIMIT_S = 250.0
NOTICED, SURVIVED, BROKEN = "noticed", "survived", "broken"
OUTCOMES = {0: SURVIVED, 1: NOTICED}  # by the exit code of pytest; other exit codes mean that the tests did not run


@dataclass(frozen=True, kw_only=True)
class Answer:
    mutation: str
    test: str
    outcome: str  # broken: the test also fails without the mutation, or cannot run with it
    seconds: float
    said: str = ""  # output of pytest if the test did not fail


@contextlib.contextmanager
def copied() -> Iterator[Path]:
    """Yield a temporary copy of the source tree, in which mutations can be applied."""
    with tempfile.TemporaryDirectory(prefix="mutated-") as folder:
        place = Path(folder)
        for name in COPIED:
            if (ROOT / name).is_dir():
                ignored = shutil.ignore_patterns(
                    "__pycache__", ".hypothesis", "evidence" if name == "docs" else "*.pyc"
                )
                shutil.copytree(ROOT / name, place / name, ignore=ignored, symlinks=True)
            else:
                shutil.copy(ROOT / name, place / name)
        yield place


def import_paths(place: Path) -> list[str]:
    """Return the directories of a copy of the source tree from which to import packages and test helpers."""
    return [str(place), str(place / "harness"), str(place / "nsa")]


class Worker:
    """A process that has already imported the libraries that tests need, and that forks to run tests."""

    def __init__(self, place: Path, libraries: Sequence[str]) -> None:
        self.place = place
        self._command = [sys.executable, str(Path(__file__).resolve()), "--serve", *libraries]
        self._process = self._started()

    def _started(self) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(import_paths(self.place))}
        return subprocess.Popen(
            self._command, cwd=self.place, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, tests: Sequence[str], *, keep_bytecode: bool) -> dict[str, Any]:
        """Run the tests in a forked process, and return the exit code, the failed tests and the output."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"tests": tests, "keep_bytecode": keep_bytecode}), file=self._process.stdin, flush=True)
        if not (line := self._process.stdout.readline()):
            # A mutation may also end the worker process.
            self._process.wait()
            self._process = self._started()
            return {"code": None, "failed": [], "said": "the process that forks has died"}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve(libraries: Sequence[str]) -> None:
    """Act as a worker process that reads requests from stdin and writes results to stdout.

    Each request is one line with tests to run in a fork. `libraries` are imported before the first fork.
    """
    for name in libraries:
        importlib.import_module(name)
    # This file has imported modules of the original tree. A fork must import those of the copy.
    for name in [name for name in sys.modules if name.split(".")[0] in ("benchmarks", "mutating")]:
        del sys.modules[name]
    sys.path[:] = [one for one in sys.path if not one.startswith(str(ROOT)) or "site-packages" in one]
    sys.path[:0] = import_paths(Path.cwd())
    out = Path(tempfile.mkdtemp(prefix="said-"))
    try:
        for line in sys.stdin:
            print(json.dumps(_forked(json.loads(line), out)), flush=True)
    finally:
        shutil.rmtree(out)


def _forked(question: dict[str, Any], out: Path) -> dict[str, Any]:
    (out / "failed.json").write_text("[]")
    child = os.fork()
    if child == 0:
        _test(question, out)
    status = _ended(child, time.monotonic() + LIMIT_S * (1 + len(question["tests"]) // 10))
    said = (out / "said.txt").read_text(errors="replace")[-4000:]
    return {"code": status, "failed": json.loads((out / "failed.json").read_text()), "said": said}


def _test(question: dict[str, Any], out: Path) -> None:
    """Run the tests for one request in a forked process, write the result to `out`, and exit."""
    import pytest

    os.setsid()
    with (out / "said.txt").open("w") as said, open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        sys.dont_write_bytecode = not question["keep_bytecode"]
        failures = Failures()
        # Slow tests are included, because only a slow test may detect the mutation.
        options = ["-q", "-m", "", "-p", "no:cacheprovider", *(() if question["keep_bytecode"] else ("-x",))]
        code = pytest.main([*options, *question["tests"]], plugins=[failures])
        (out / "failed.json").write_text(json.dumps(failures.found))
        sys.stdout.flush()
    os._exit(code)


class Failures:
    """A pytest plugin that collects the names of failed tests."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.found.append(report.nodeid.partition("[")[0])


def _ended(child: int, until_s: float) -> int | None:
    """Wait for a forked process, and return its exit code. At the time limit, kill it and return None."""
    while time.monotonic() < until_s:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def answers(worker: Worker, batch: Sequence[Mutation]) -> Iterator[Answer]:
    """Yield the result for each mutation in a batch. The tests of a batch are all in one file."""
    # All tests first run without a mutation. This leaves bytecode for all files except the mutated one.
    whole = worker.run(sorted({one.test for one in batch}), keep_bytecode=True)
    for one in batch:
        begun = time.monotonic()
        if one.test in whole["failed"] or whole["code"] not in OUTCOMES:
            outcome, said = BROKEN, f"fails without the mutation\n{whole['said']}"
        else:
            with broken(worker.place, one):
                found = worker.run([one.test], keep_bytecode=False)
            outcome, said = OUTCOMES.get(found["code"], BROKEN), found["said"]
        said = "" if outcome == NOTICED else said
        yield Answer(
            mutation=one.name,
            test=one.test,
            outcome=outcome,
            seconds=round(time.monotonic() - begun, 2),
            said=said,
        )


@contextlib.contextmanager
def broken(place: Path, mutation: Mutation) -> Iterator[None]:
    path = place / mutation.file
    whole = path.read_bytes()
    # Python detects outdated bytecode by time (in seconds) and size, which a mutation may not change.
    for bytecode in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        bytecode.unlink()
    path.write_text(mutated(whole.decode(), mutation.changes))
    try:
        yield
    finally:
        path.write_bytes(whole)


def ask(mutations: Sequence[Mutation], jobs: int, until_s: float) -> Iterator[Answer]:
    """Yield the results for all mutations as they become available.

    No mutation is started after the time `until_s`.
    """
    batches: queue.SimpleQueue[list[Mutation]] = queue.SimpleQueue()
    by_file: dict[str, list[Mutation]] = {}
    for one in mutations:
        by_file.setdefault(one.test.partition("::")[0], []).append(one)
    for batch in sorted(by_file.values(), key=len, reverse=True):
        batches.put(batch)
    found: queue.SimpleQueue[Answer | BaseException | None] = queue.SimpleQueue()
    near_torch = any(one.test.startswith(NEAR_TORCH) for one in mutations)
    libraries = [*LIBRARIES, *([TORCH] if near_torch else [])]
    for _ in range(jobs):
        threading.Thread(target=_work, args=(batches, found, libraries, until_s), daemon=True).start()
    for _ in range(jobs):
        while (answer := found.get()) is not None:
            if isinstance(answer, BaseException):
                raise answer
            yield answer


def _work(
    batches: queue.SimpleQueue[list[Mutation]],
    found: queue.SimpleQueue[Answer | BaseException | None],
    libraries: Sequence[str],
    until_s: float,
) -> None:
    try:
        with copied() as place:
            worker = Worker(place, libraries)
            while time.monotonic() < until_s and not batches.empty():
                for answer in answers(worker, batches.get()):
                    found.put(answer)
            worker.close()
    except BaseException as problem:
        found.put(problem)
    found.put(None)


def stored(commit: str) -> dict[str, Any]:
    """Return the stored mutation results for this commit, or a new record without results if there are none."""
    if RESULTS.exists():
        results: dict[str, Any] = json.loads(RESULTS.read_text())
        if results["commit"] == commit and not results["uncommitted_changes"]:
            return results
    fresh = measurement_context(__file__, [])
    fresh["versions"]["pytest"] = version("pytest")
    return {**fresh, "score": {}, "answers": []}


def shown(mutation: Mutation) -> str:
    old = mutation.text()
    new = mutated(old, mutation.changes)
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), "", "", n=0, lineterm="")
    return "\n".join([mutation.name, *(f"    {line}" for line in list(lines)[2:] if not line.startswith("@@"))])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Break the code, and demand that a test notices.")
    parser.add_argument("--only", default="", help="the mutations of the files below this path")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="begin no other file of tests after this long"
    )
    parser.add_argument("--show", action="store_true", help="print what each mutation does, and run nothing")
    options = parser.parse_args(arguments)
    wanted = [one for one in read() if one.file.startswith(options.only)]
    if options.show:
        print("\n".join(shown(one) for one in wanted))
        return 0
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    results = stored(commit)
    known = {(one["mutation"], one["test"]) for one in results["answers"]}
    left = [one for one in wanted if (one.name, one.test) not in known]
    for answer in ask(left, options.jobs, time.monotonic() + options.minutes * 60):
        results["answers"].append(asdict(answer))
        results["score"] = dict(Counter(one["outcome"] for one in results["answers"]))
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        if answer.outcome != NOTICED:
            print(f"{answer.outcome}: {answer.mutation} by {answer.test}", flush=True)
    print(f"{results['score']}, of {len(wanted)} wanted")
    return 1 if set(results["score"]) - {NOTICED} else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2:])
    else:
        raise SystemExit(main(sys.argv[1:]))
