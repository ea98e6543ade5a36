"""An experiment: cases of known truth, each launched once, and their results on disk, to which each run adds."""

from __future__ import annotations

import hashlib
import json
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.provenance import measurement_context
from evaluation.scoring import Row

HOME = Path(__file__).resolve().parent
REPOSITORY = HOME.parent
PROGRAMS = HOME / "programs"
PAGES = REPOSITORY / "docs" / "internals"

Cell = Mapping[str, Any]  # what was said of one case
Results = dict[str, Any]  # circumstances, and the cells by case


def truths_of(name: str) -> dict[str, Any]:
    """Return what truth/NAME.toml says of each case."""
    return tomllib.loads((HOME / "truth" / f"{name}.toml").read_text())


def digest_of(values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What is launched, and how its results become rows of the table."""

    name: str  # also that of its results, and of `python -m evaluation run NAME`
    cases: tuple[str, ...]
    launch: Callable[..., dict[str, Any]]  # a case -> its cell; with `python`, if it `takes_python`
    describe: Callable[[str, Cell], str]  # what is printed of a cell while it runs
    rows: Callable[[Results], dict[str, Row]]
    fingerprint: Callable[[str], Cell] = lambda _: {}  # keys of a cell; a case runs again where one differs
    facts: Callable[[], Mapping[str, Any]] = dict  # stored beside the cells
    key: str = "cells"
    bare: bool = False  # the file is the cells alone, one a line
    takes_python: bool = False
    executor: Callable[[int], Executor] = ThreadPoolExecutor

    @property
    def file(self) -> Path:
        return HOME / "results" / f"{self.name}.json"

    def load(self, file: Path | None = None) -> Results:
        file = file or self.file
        if not file.exists():
            return {self.key: {}}
        stored: Results = json.loads(file.read_text())
        return {self.key: stored} if self.bare else stored

    def cells(self, file: Path | None = None) -> dict[str, Any]:
        return dict(self.load(file)[self.key])

    def due(self, cells: Mapping[str, Cell], only: str = "") -> list[str]:
        """The cases that match; without a pattern those that were never run, or that are another one since."""
        if only:
            return [case for case in self.cases if fnmatchcase(case, only)]
        return [case for case in self.cases if case not in cells or not self.is_current(case, cells[case])]

    def is_current(self, case: str, cell: Cell) -> bool:
        return all(cell[key] == value for key, value in self.fingerprint(case).items())

    def store(self, case: str, cell: Cell, file: Path | None = None) -> None:
        """Add a cell to the file, which is read again: another slice may have written meanwhile."""
        about = {**measurement_context(__file__, []), "command": f"python -m evaluation run {self.name}"}
        added = dict(cell) if self.bare else {**cell, "commit": about["commit"], "load": about["load_1min"]}
        known = {**self.cells(file), case: added}
        cells = {case: known[case] for case in self.cases if case in known}
        lines = (f" {json.dumps(case)}: {json.dumps(values)}" for case, values in cells.items())
        whole = json.dumps({**about, **self.facts(), self.key: cells}, indent=1)
        (file or self.file).write_text(("{\n" + ",\n".join(lines) + "\n}" if self.bare else whole) + "\n")

    def run(self, *, only: str, minutes: float, jobs: int, file: Path | None, **options: str) -> Iterator[str]:
        """Run what is due, and begin no case after so many minutes. Yield a line for each case that has ended."""
        until_s = time.monotonic() + 60 * minutes
        due = iter(self.due(self.cells(file), only))
        launch = partial(self.launch, **options)
        with self.executor(jobs) as pool:
            running = {pool.submit(launch, case): case for case in islice(due, jobs if minutes > 0 else 0)}
            while running:
                done = next(as_completed(running))
                case, cell = running.pop(done), done.result()
                self.store(case, cell, file)
                yield f"{case:30} {self.describe(case, cell)}"
                if time.monotonic() < until_s and (following := next(due, None)) is not None:
                    running[pool.submit(launch, following)] = following
