"""The command `nsa-harness lock`: run once, and record what a training step communicates."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from nsa_harness.commands.session import run_directory, session
from nsa_harness.core.comparison.communication import Lock, bytes_of
from nsa_harness.core.plan import LockedSchedule, RunSpec
from nsa_harness.core.report import Status, exit_code
from nsa_harness.errors import UsageError
from nsa_harness.supervisor.launch.launcher import end_dead_runs
from nsa_harness.supervisor.storage.comm_lock import lock_text, parse_lock, recorded, varying_calls, with_large_recorder
from nsa_harness.supervisor.storage.rundir import RunOptions

_NOT_RECORDED = 125


def locked(spec: RunSpec, file: Path) -> RunSpec:
    """Return the launch, to be compared with a comm.lock file.

    Raises UsageError if the file cannot be read, and ScenarioError if it is damaged.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise UsageError(f"{file}: {reason}; `nsa-harness lock` records a healthy run in it") from None
    parse_lock(text, str(file))
    expect = replace(spec.expect, communication=LockedSchedule(file=file.name, text=text))
    return with_large_recorder(replace(spec, expect=expect))


def lock(spec: RunSpec, file: Path, options: RunOptions) -> int:
    """Run a launch once, write what a step of it communicates to `file`, and return the exit code.

    Nothing is written if the run does not pass, or if no two steps in a row communicated alike.
    """
    if not file.parent.is_dir():
        raise UsageError(f"{file}: there is no directory {file.parent}")
    end_dead_runs()
    with (
        run_directory(options) as run,
        session(run, options, [spec]) as running,
    ):
        outcome = running.launch(with_large_recorder(spec))
        running.announce(outcome)
        report = running.write_documents([outcome])
        running.broadcast(lambda listener: listener.on_done(report, run.path))
        if outcome.verdict.status is not Status.PASS or not outcome.expected:
            print(f"{file} was not written, because the run is not healthy", file=sys.stderr)
            return exit_code(report) or _NOT_RECORDED
        found = recorded(run.attempt(spec.scenario), spec.ranks)
    if found.step is None or not found.is_steady:
        print(f"{file} was not written: {found.reason or 'no two steps in a row communicated alike'}", file=sys.stderr)
        print(*varying_calls(found), sep="\n", file=sys.stderr)
        return _NOT_RECORDED
    text = lock_text(Lock(ranks=spec.ranks, roles=found.roles))
    is_same = file.is_file() and file.read_text(encoding="utf-8", errors="replace") == text
    file.write_text(text, encoding="utf-8")
    for role in found.roles:
        who = "each rank" if role.who == "all" else f"role {role.who}"
        print(f"{who} makes {len(role.operations)} calls with {bytes_of(role.operations):,} bytes in a step")
    print(f"{file} is unchanged" if is_same else f"wrote {file}")
    return 0
