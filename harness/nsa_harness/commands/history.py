"""The commands `nsa-harness history`, `compare` and `prune`: questions about many stored runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from nsa_harness.core.comparison.history import Comparison, Entry, compare
from nsa_harness.errors import StillRunning, StoredRunError, UsageError, did_you_mean
from nsa_harness.render.history import comparison_lines, history_lines, overview_lines
from nsa_harness.supervisor.storage.history import History
from nsa_harness.supervisor.storage.ledger import read_ledger
from nsa_harness.supervisor.storage.rundir import RunDir, find_run, latest_runs, refuse_if_running

PIN = "pinned"  # a file of this name in a run's directory keeps the run


def history(target: str | None, parent: Path, *, most: int, as_json: bool, width: int) -> Iterator[str]:
    """Yield the history of a scenario or script, or of everything that ran.

    Raises UsageError if `target` never ran.
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
    for run in unreadable:
        yield f"note: {run.run_id}: {run.reason}"


def comparisons(before: Path, after: Path, parent: Path) -> tuple[Comparison, ...]:
    """Compare two stored runs, scenario by scenario. Raises UsageError if they have no scenario in common.

    If each run has only one scenario, these two are compared, whatever their names.
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
    return tuple(compare(a, b, others) for a, b in pairs)


def compare_runs(before: Path, after: Path, parent: Path, *, as_json: bool, width: int) -> tuple[list[str], int]:
    """Return the lines of `compare`, and its exit code: 1 if there is a regression."""
    found = comparisons(before, after, parent)
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
