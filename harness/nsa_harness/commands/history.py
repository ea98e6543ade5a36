"""The commands `nsa-harness history`, `compare` and `prune`: questions about many stored runs."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, replace
from pathlib import Path

from nsa_harness.core.comparison.communication import Operation, bytes_of, changes
from nsa_harness.core.comparison.history import Comparison, Entry, compare
from nsa_harness.core.report import Outcome
from nsa_harness.errors import StillRunning, StoredRunError, UsageError, did_you_mean
from nsa_harness.render.documents.report_json import from_json
from nsa_harness.render.history import (
    comparison_lines,
    comparison_page,
    history_lines,
    history_page,
    overview_lines,
)
from nsa_harness.render.text import escape
from nsa_harness.supervisor.storage.comm_lock import change_facts, recorded
from nsa_harness.supervisor.storage.history import MAX_BYTES, History
from nsa_harness.supervisor.storage.ledger import read_ledger
from nsa_harness.supervisor.storage.rundir import (
    RunDir,
    find_run,
    latest_runs,
    refuse_if_running,
    write_document,
)

PIN = "pinned"  # a file of this name in a run's directory keeps the run


def history(
    target: str | None, parent: Path, *, most: int, as_json: bool, html: Path | None, width: int
) -> Iterator[str]:
    """Yield the history of a scenario or script, or of everything that ran, and write it to `html` if that is a file.

    Raises UsageError if `target` never ran, or if the file cannot be written.
    """
    with closing(History(parent)) as index:
        entries = index.entries()
        unreadable = index.unreadable()
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.scenario, []).append(entry)
    if target is not None:
        name = Path(target).stem if target.endswith(".py") else target
        if name not in groups:
            raise UsageError(f"{parent} has no run of {name}{did_you_mean(name, groups)}")
        groups = {name: groups[name]}
    notes = [f"{run.run_id}: {run.reason}" for run in unreadable]
    if html is not None:
        if not groups:
            raise UsageError(f"--html: {parent} has no run to show")
        _write_page(html, history_page(list(groups.values()), _address(parent, html), most, notes))
    if as_json:
        yield json.dumps(
            {
                "schema": 1,
                "entries": [asdict(entry) for group in groups.values() for entry in group],
                "unreadable": [asdict(run) for run in unreadable],
            },
            indent=2,
        )
        return
    if not groups:
        yield f"{parent} has no run"
    elif target is None:
        yield from overview_lines(list(groups.values()), width)
    else:
        yield from history_lines(groups[name], width, most)
    yield from (f"note: {escape(note)}" for note in notes)


def _address(directory: Path, page: Path) -> str:
    """Return the URL of a directory, relative to a page."""
    return os.path.relpath(directory.resolve(), page.parent.resolve())


def _write_page(file: Path, text: str) -> None:
    """Write an HTML page completely or not at all, and say so. Raise UsageError if that fails."""
    try:
        write_document(file, text)
    except OSError as error:
        raise UsageError(f"--html {file}: {error.strerror}; name a file in a writable directory") from None
    print(f"wrote {file}", file=sys.stderr)


Outcomes = Mapping[tuple[str, str], Outcome]  # by run ID and directory of the attempt


def _outcomes(runs: Sequence[RunDir]) -> Outcomes:
    """Return the attempts of the runs. Runs whose report has an older form are left out."""
    found: dict[tuple[str, str], Outcome] = {}
    for run in runs:
        with suppress(OSError, ValueError, StoredRunError):
            report = from_json(run.directory.read_whole_file(run.report, MAX_BYTES).decode(), str(run.report))
            found |= {(run.run_id, outcome.dir): outcome for outcome in report.outcomes}
    return found


def _operations(entry: Entry, run: RunDir, outcomes: Outcomes) -> Mapping[int, Sequence[Operation]]:
    """Return what each rank of an attempt communicates in a step, or nothing if its steps are not all the same."""
    outcome = outcomes.get((entry.run_id, entry.directory))
    found = recorded(run.attempt(entry.directory), outcome.spec.ranks) if outcome else None
    return found.operations if found and found.is_steady else {}


def _with_communication(entry: Entry, operations: Mapping[int, Sequence[Operation]]) -> Entry:
    numbers = {"calls per step": len(operations[0]), "sent per step": bytes_of(operations[0])} if operations else {}
    return replace(entry, numbers={**entry.numbers, **numbers})


def _compare(
    sides: Sequence[RunDir], before: Entry, after: Entry, earlier: Sequence[Entry], outcomes: Outcomes
) -> Comparison:
    """Compare two attempts with their communication."""
    old, new = (_operations(entry, run, outcomes) for entry, run in zip((before, after), sides, strict=True))
    differing = (changes(old[rank], new[rank]) for rank in sorted(old.keys() & new.keys()))
    calls = tuple(map(change_facts, next(filter(None, differing), ())))
    comparison = compare(_with_communication(before, old), _with_communication(after, new), earlier)
    return replace(comparison, calls=calls)


def compare_runs(
    before: Path, after: Path, parent: Path, *, as_json: bool, html: Path | None, width: int
) -> tuple[list[str], int]:
    """Return the lines of `compare`, and its exit code: 1 if there is a regression. Write the page `html`, if given.

    The runs are compared scenario by scenario. If each run has only one scenario, these two are compared, whatever
    their names. Raises UsageError if they have no scenario in common, or if the page cannot be written.
    """
    sides = [find_run(path, parent) for path in (before, after)]
    parents = {run.path.parent for run in sides}
    entries: dict[str, tuple[Entry, ...]] = {}
    earlier: list[Entry] = []
    for directory in parents:
        with closing(History(directory)) as index:
            earlier += index.entries()
            problems = {run.run_id: run.reason for run in index.unreadable()}
        for run in sides:
            if run.path.parent == directory:
                if run.run_id in problems:
                    raise StoredRunError(f"{run.path}: {problems[run.run_id]}")
                entries[run.run_id] = tuple(entry for entry in earlier if entry.run_id == run.run_id)
    old, new = ({entry.scenario: entry for entry in entries[run.run_id]} for run in sides)
    if len(old) == len(new) == 1:
        pairs = [(*old.values(), *new.values())]
    else:
        pairs = [(old[name], new[name]) for name in old if name in new]
    if not pairs:
        raise UsageError(f"{sides[0].run_id} and {sides[1].run_id} have no scenario in common")
    ids = {run.run_id for run in sides}
    others = [entry for entry in earlier if entry.run_id not in ids]
    outcomes = _outcomes(sides)
    found = [_compare(sides, a, b, others, outcomes) for a, b in pairs]
    if html is not None:
        addresses = [_address(run.path.parent, html) for run in sides]
        _write_page(html, comparison_page(found, outcomes, sorted(earlier, key=lambda entry: entry.run_id), addresses))
    if as_json:
        values = [{**asdict(one), "regression": one.is_regression} for one in found]
        lines = [json.dumps({"schema": 1, "comparisons": values}, indent=2)]
    else:
        lines = [
            line for number, one in enumerate(found) for line in [""] * bool(number) + [*comparison_lines(one, width)]
        ]
    return lines, int(any(one.is_regression for one in found))


def prune(named: Sequence[Path], parent: Path, *, keep: int, is_confirmed: bool) -> Iterator[str]:
    """Remove all runs but the latest `keep`, and yield a line for each.

    Runs that are named, pinned, in use, or that a claim refers to are kept. Without `is_confirmed`, nothing is removed.
    """
    kept = {find_run(path, parent).path.resolve() for path in named}
    claims = {run_id for line in read_ledger(parent).lines for run_id in line.runs}
    count = 0
    for path in latest_runs(parent)[keep:]:
        run = RunDir(path)
        reason = (
            "named" if path.resolve() in kept
            else "pinned" if (path / PIN).exists()
            else "a claim refers to it" if path.name in claims
            else "no run of nsa-harness" if not run.is_stored_run
            else ""
        )  # fmt: skip
        if reason:
            yield f"keep    {path.name}: {reason}"
            continue
        try:
            with refuse_if_running(run):
                if is_confirmed:
                    shutil.rmtree(path)
        except StillRunning:
            yield f"keep    {path.name}: still running"
            continue
        except OSError as error:
            yield f"keep    {path.name}: {error.strerror or error}"
            continue
        count += 1
        yield f"{'removed' if is_confirmed else 'remove '} {path.name}"
    if not is_confirmed and count:
        yield "nothing was removed; --yes removes these runs"
    elif not count:
        yield "nothing to remove"


def pin(named: Sequence[Path], parent: Path, *, is_pinned: bool) -> Iterator[str]:
    """Mark runs so that `prune` keeps them, or remove this mark, and yield a line for each."""
    for path in named:
        run = find_run(path, parent)
        if is_pinned:
            run.directory.write(run.path / PIN, "")
        else:
            run.directory.remove(run.path / PIN)
        yield f"{run.run_id} is {'pinned' if is_pinned else 'no longer pinned'}"
