"""One attempt: launch it, watch it until nothing of it is left, and judge it from what is on disk."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from nsa_harness.core.evidence.live import FirstSnapshot, Progress
from nsa_harness.core.plan import Launcher, RunSpec
from nsa_harness.core.redaction import where_to_set
from nsa_harness.core.report import MachineFacts, Outcome
from nsa_harness.render.listener import Listener
from nsa_harness.supervisor.launch.fork_client import ForkServer, without_fork
from nsa_harness.supervisor.launch.launcher import Guarded, command_line, launch
from nsa_harness.supervisor.launch.machine import describe
from nsa_harness.supervisor.storage.logs import bounded_logs
from nsa_harness.supervisor.storage.record import write_spec
from nsa_harness.supervisor.storage.rundir import SPEC, AttemptDir, append_line, write_document
from nsa_harness.supervisor.storage.safe_directory import is_full, keep_ballast

_GRACE_S = 1.0  # between TERM and KILL
_START_UP = {"none", "start", "imported", "init"}

Tell = Callable[[Callable[[Listener], None]], object]
Enough = Callable[..., bool]


class Interrupts(Protocol):
    """How often Ctrl-C or TERM came."""

    @property
    def count(self) -> int: ...

    def watching(self) -> AbstractContextManager[None]:
        """While this is entered, a second signal is a KeyboardInterrupt."""


def run_one(
    spec: RunSpec,
    attempt: AttemptDir,
    *,
    number: int,
    probe: str,
    facts: MachineFacts,
    tell: Tell,
    interruption: Interrupts,
    log: Path,
    devices: tuple[int, ...] | None = None,
    server: ForkServer | None = None,
    enough: Enough | None = None,
) -> Outcome:
    """Make one attempt and return how it ended.

    `devices`: the only GPUs that it sees. `server`: forks a spec that asks for that. `enough`: takes the arguments of
    `prove` for each snapshot of a stall that proves nothing; True ends the attempt. A fault of the harness is the ERROR
    of this attempt, with its traceback in `log`, and costs no other one.
    """
    if spec.launcher is Launcher.FORK:
        spec = server.with_launcher(spec) if server else without_fork(spec)
    try:
        prepare(attempt, spec, facts)
        shown = attempt.redaction.spec(replace(spec, scenario=attempt.path.name))
        tell(lambda listener: listener.on_launch(shown))
        guarded = (server.launch if server else launch)(spec, attempt, probe, devices)
        audience = AttemptAudience(name=attempt.path.name, tell=tell)
        with bounded_logs(attempt):
            _follow(guarded, spec, attempt, audience, interruption, enough)
        from nsa_harness.commands.judge import judge_attempt

        return judge_attempt(attempt, spec, facts.host, number)
    except Exception as error:
        with suppress(OSError):
            attempt.door.append(log, attempt.redaction.text(traceback.format_exc()))
        from nsa_harness.core.outcome.outcome import unjudged

        why = f"{type(error).__name__}: {error}; see {log.name}"
        full = is_full(error)
        unknown = unjudged(spec, attempt=number, directory=attempt.path.name, error=why, disk_full=full)
        return attempt.redaction.value(unknown)


def _follow(
    guarded: Guarded,
    spec: RunSpec,
    attempt: AttemptDir,
    audience: AttemptAudience,
    interruption: Interrupts,
    enough: Enough | None,
) -> None:
    """Watch the attempt until nothing of it is left."""
    try:
        # The ranks take longer to start than these imports do: nothing has to be loaded when they end.
        import nsa_harness.commands.judge
        import nsa_harness.render.documents.documents  # noqa: F401
        from nsa_harness.supervisor.watch.watch import Watch, WatchPolicy

        watch = Watch(
            guarded=guarded,
            spec=spec,
            attempt=attempt,
            audience=audience,
            interrupted=lambda: interruption.count > 0,
            policy=WatchPolicy(enough=enough) if enough else WatchPolicy(),
        )
        with interruption.watching():
            watch.run()
    except KeyboardInterrupt:
        append_line(attempt.watch, {"event": "ending", "ending": "interrupted"})
    finally:
        events = guarded.end(_GRACE_S if interruption.count < 2 else 0.0)
        if not any(event["event"] == "ended" for event in events):
            why = "it did not say that every process of the run has ended"
            append_line(attempt.watch, {"event": "trouble", "what": "guardian", "why": why, "rank": None})


def prepare(attempt: AttemptDir, spec: RunSpec, facts: MachineFacts) -> None:
    """Make the attempt's directory with its spec, command and environment. Raises FileExistsError if it has begun."""
    # A run that was killed before it wrote its spec has left an empty folder: that attempt has not begun.
    attempt.path.mkdir(parents=True, exist_ok=True)
    keep_ballast(attempt.path.parent)
    if attempt.door.exists(attempt.spec):
        raise FileExistsError(f"{attempt.path} holds an attempt already")
    write_spec(attempt, spec)
    attempt.redaction.learn_launch(spec)
    attempt.redaction.suspect(os.environ)
    command = attempt.redaction.command(command_line(spec, sys.executable, None), spec.env)
    write_document(attempt.command, "".join(f"{line}\n" for line in (*where_to_set(command, SPEC), command)))
    made_of = describe(replace(spec, env=attempt.redaction.pairs(spec.env)), facts, git_diff=attempt.git_diff)
    write_document(attempt.env, json.dumps(attempt.redaction.value(made_of), indent=1) + "\n")


@dataclass(frozen=True, kw_only=True)
class AttemptAudience:
    """Passes what the watcher sees to the listeners, under the name of the attempt's directory."""

    name: str
    tell: Tell

    def phase(self, progress: Progress) -> None:
        phase = phase_name(progress)
        self.tell(lambda listener: listener.on_phase(self.name, phase, progress))

    def looked(self, rows: Sequence[FirstSnapshot]) -> None:
        self.tell(lambda listener: listener.on_first_snapshot(self.name, rows))

    def suspect(self, text: str) -> None:
        self.tell(lambda listener: listener.on_stall(self.name, text))

    def released(self, text: str) -> None:
        self.tell(lambda listener: listener.on_progress_again(self.name, text))


def phase_name(progress: Progress) -> str:
    """Return the phase that the screen shows: launch, step N or finish. The slowest rank decides."""
    if not progress.ranks or any(rank.phase in _START_UP for rank in progress.ranks):
        return "launch"
    if all(rank.phase == "exit" for rank in progress.ranks):
        return "finish"
    return f"step {min(rank.step for rank in progress.ranks)}"
