"""Run one attempt: launch it, watch it until it ends, and judge it from its files."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.evidence.live import FirstSnapshot, Progress
from nsa_harness.core.plan import Launcher, RunSpec
from nsa_harness.core.redaction import where_to_set
from nsa_harness.core.report import MachineFacts, Outcome
from nsa_harness.render.listener import Listener
from nsa_harness.supervisor.launch.fork_client import ForkServer, without_fork
from nsa_harness.supervisor.launch.launcher import LaunchedRun, command_line, launch
from nsa_harness.supervisor.launch.machine import describe
from nsa_harness.supervisor.storage.logs import limit_logs
from nsa_harness.supervisor.storage.record import write_spec
from nsa_harness.supervisor.storage.rundir import SPEC, AttemptDir
from nsa_harness.supervisor.storage.safe_directory import SafeDirectory, fill_ballast, is_disk_full

if TYPE_CHECKING:
    from nsa_harness.commands.session import Interruption

_GRACE_S = 1.0  # time between SIGTERM and SIGKILL
_LOST = "{}, the directory of this attempt, was removed or replaced, or cannot be accessed, so nothing was judged"
_STARTUP_PHASES = {"none", "start", "imported", "init"}

Notify = Callable[[Callable[[Listener], None]], object]  # calls the given function for every listener
ShouldStop = Callable[..., bool]  # takes the arguments of `prove`


def run_one(
    spec: RunSpec,
    attempt: AttemptDir,
    *,
    number: int,
    probe: str,
    facts: MachineFacts,
    notify: Notify,
    interruption: Interruption,
    log: Path,
    devices: tuple[int, ...] | None = None,
    server: ForkServer | None = None,
    should_stop: ShouldStop | None = None,
) -> Outcome:
    """Launch a run once, judge it, and return its outcome.

    `number`: the number of the attempt within its scenario. `devices`: the GPUs that the ranks can see, or None for
    all. `server`: the fork server for a spec with the launcher FORK. `should_stop`: called for each snapshot of a stall
    that proves no hang; if it returns True, the attempt ends early.

    If nsa-harness itself fails, the attempt gets the verdict ERROR, and the traceback goes to `log`.
    """
    if spec.launcher is Launcher.FORK:
        spec = server.with_launcher(spec) if server else without_fork(spec)
    try:
        prepare(attempt, spec, facts)
        redacted_spec = attempt.redaction.spec(replace(spec, scenario=attempt.path.name))
        notify(lambda listener: listener.on_launch(redacted_spec))
        guarded_run = (server.launch if server else launch)(spec, attempt, probe, devices)
        audience = AttemptAudience(name=attempt.path.name, notify=notify)
        with limit_logs(attempt):
            _follow(guarded_run, spec, attempt, audience, interruption, should_stop)
        if not attempt.directory.is_in_place(attempt.path):
            raise FileNotFoundError(attempt.path)
        from nsa_harness.commands.judge import judge_attempt

        return judge_attempt(attempt, spec, facts.host, number)
    except Exception as error:
        cause, reason = _failure(error, attempt, log)
        if cause is Cause.HARNESS_ERROR:
            with suppress(OSError):
                attempt.directory.append(log, attempt.redaction.text(traceback.format_exc()))
        from nsa_harness.core.outcome.outcome import unjudged_outcome

        outcome = unjudged_outcome(spec, attempt=number, directory=attempt.path.name, error=reason, cause=cause)
        return attempt.redaction.value(outcome)


def _failure(error: Exception, attempt: AttemptDir, log: Path) -> tuple[Cause, str]:
    """Return the cause and the sentence for an attempt that `error` kept from being judged."""
    if is_disk_full(error):
        return Cause.DISK_FULL, f"the disk of {attempt.path} is full, so the attempt could not be judged"
    if not attempt.directory.is_in_place(attempt.path):
        return Cause.ATTEMPT_DIRECTORY_LOST, _LOST.format(attempt.path)
    return Cause.HARNESS_ERROR, f"{type(error).__name__}: {error}; see {log.name}"


def _follow(
    guarded_run: LaunchedRun,
    spec: RunSpec,
    attempt: AttemptDir,
    audience: AttemptAudience,
    interruption: Interruption,
    should_stop: ShouldStop | None,
) -> None:
    """Watch an attempt until it ends, then end all its remaining processes."""
    try:
        # Imported while the ranks start, which takes longer, so that nothing has to be loaded when they end.
        import nsa_harness.commands.judge
        import nsa_harness.render.documents.documents  # noqa: F401
        from nsa_harness.supervisor.watch.watch import Watch, WatchPolicy

        watch = Watch(
            job=guarded_run,
            spec=spec,
            attempt=attempt,
            listener=audience,
            is_interrupted=lambda: interruption.count > 0,
            policy=WatchPolicy(stops_early=should_stop) if should_stop else WatchPolicy(),
        )
        with interruption.watching():
            watch.run()
    except KeyboardInterrupt:
        attempt.append_record(attempt.watch, {"event": "ending", "ending": "interrupted"})
    finally:
        events = guarded_run.end(_GRACE_S if interruption.count < 2 else 0.0)
        if not any(event["event"] == "ended" for event in events):
            reason = "the reaper did not report that every process of the run has ended"
            attempt.append_record(attempt.watch, {"event": "trouble", "what": "guardian", "why": reason, "rank": None})


def prepare(attempt: AttemptDir, spec: RunSpec, facts: MachineFacts) -> None:
    """Create an attempt's directory with spec, command and environment. Raise FileExistsError if it exists."""
    # A run that was killed before it wrote the spec has left an empty directory, which can be used.
    attempt.path.parent.mkdir(parents=True, exist_ok=True)
    SafeDirectory(attempt.path.parent).make_directory(attempt.path)
    attempt.directory.pin(attempt.path)
    fill_ballast(attempt.path.parent)
    if attempt.directory.exists(attempt.spec):
        raise FileExistsError(f"{attempt.path} already contains an attempt")
    write_spec(attempt, spec)
    attempt.redaction.learn_launch(spec)
    attempt.redaction.suspect_environment(os.environ)
    command = attempt.redaction.command(command_line(spec, sys.executable, None), spec.env)
    attempt.directory.write(attempt.command, "".join(f"{line}\n" for line in (*where_to_set(command, SPEC), command)))
    environment = describe(replace(spec, env=attempt.redaction.pairs(spec.env)), facts, git_diff=attempt.git_diff)
    attempt.directory.write(attempt.env, json.dumps(attempt.redaction.value(environment), indent=1) + "\n")


@dataclass(frozen=True, kw_only=True)
class AttemptAudience:
    """An adapter that passes the events of one attempt to all listeners."""

    name: str
    notify: Notify

    def report_progress(self, progress: Progress) -> None:
        phase = phase_name(progress)
        self.notify(lambda listener: listener.on_phase(self.name, phase, progress))

    def report_first_snapshot(self, rows: Sequence[FirstSnapshot]) -> None:
        self.notify(lambda listener: listener.on_first_snapshot(self.name, rows))

    def report_stall(self, text: str) -> None:
        self.notify(lambda listener: listener.on_stall(self.name, text))

    def report_recovery(self, text: str) -> None:
        self.notify(lambda listener: listener.on_progress_again(self.name, text))


def phase_name(progress: Progress) -> str:
    """Return the phase of the slowest rank for display: "launch", "step N" or "finish"."""
    if not progress.ranks or any(rank.phase in _STARTUP_PHASES for rank in progress.ranks):
        return "launch"
    if all(rank.phase == "exit" for rank in progress.ranks):
        return "finish"
    return f"step {min(rank.step for rank in progress.ranks)}"
