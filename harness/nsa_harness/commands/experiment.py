"""Experiments: launch a program with several configurations until a question is answered."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from nsa_harness.commands.bisect_report import judge_again
from nsa_harness.commands.session import INTERRUPTED, Session, run_directory, session
from nsa_harness.core.experiment.statistics import interval
from nsa_harness.core.experiment.trial import Trial
from nsa_harness.core.plan import EngineChoice, RunSpec
from nsa_harness.core.report import MachineFacts, Outcome
from nsa_harness.errors import HarnessError
from nsa_harness.render.experiments.claim import TrialScreen
from nsa_harness.render.experiments.live import ExperimentScreen
from nsa_harness.supervisor.launch.machine import describe
from nsa_harness.supervisor.storage.adapters import json_object
from nsa_harness.supervisor.storage.ledger import LedgerLine, LedgerSide, add_line
from nsa_harness.supervisor.storage.rundir import RunDir, RunOptions


@dataclass(kw_only=True)
class Experiment:
    """A claim test or a verification in progress, with its launches and trials."""

    session: Session
    screen: ExperimentScreen
    configs: Sequence[RunSpec]
    trials: list[Trial] = field(default_factory=list)  # if the experiment was continued, with those of earlier sessions
    outcomes: list[Outcome] = field(default_factory=list)

    def trials_until(
        self,
        is_answered: Callable[[], bool],
        *,
        next_config: Callable[[], int],
        judge: Callable[[Outcome, int], Trial],
        progress: Callable[[int], str],
    ) -> Iterator[Trial]:
        """Launch, judge and yield trials until `is_answered` returns True.

        An interruption by the user also ends the trials. `next_config`: returns the index of the configuration to
        launch next. `judge`: makes a trial from the outcome of a launch and the index of its configuration. `progress`:
        returns the line to show during a launch.
        """
        while not is_answered() and not self.session.interrupted:
            config = next_config()
            self.screen.running(progress(config))
            outcome = self._launch(self.configs[config])
            self.screen.running(None)
            if self.session.interrupted:  # the outcome of an interrupted launch does not count
                return
            self.trials.append(judge(outcome, config))
            yield self.trials[-1]

    def _launch(self, spec: RunSpec) -> Outcome:
        # A killed session may have left a directory behind.
        free = (number for number in count(1) if not self.session.run.attempt(spec.scenario, number).path.exists())
        outcome = self.session.launch(spec, next(free))
        self.outcomes.append(outcome)
        self.session.announce(outcome)
        return outcome

    def show(self, lines: Callable[[int], Iterable[str]]) -> None:
        self.screen.show(lines)

    def finish(self, line: LedgerLine, code: int) -> tuple[int, Path | None]:
        """Write a ledger line and the output files. Return the exit code and the path of the ledger, if any."""
        code = INTERRUPTED if self.session.interrupted else code
        ledger = self._add_to_ledger(line) if self.trials else None
        self.session.write_documents(self.outcomes)
        claim = {"scenario": line.scenario, "claim": json_object(line)}
        self.session.stream({"event": "done", **claim, "exit_code": code, "run_dir": str(self.session.run.path)})
        if not self.session.interrupted:
            subject = f"{line.kind} {line.scenario}"
            self.session.broadcast(lambda listener: listener.on_answer(line.result, subject, [line.text, line.why]))
        return code, ledger

    def _add_to_ledger(self, line: LedgerLine) -> Path | None:
        try:
            return add_line(self.session.options.parent, line, self.session.run.redaction)
        except (OSError, HarnessError) as error:
            print(f"the ledger of claims could not be written: {error}", file=sys.stderr)
            return None

    def ledger_line(self, spec: RunSpec, runs: Sequence[str] = (), **facts: Any) -> LedgerLine:
        """Return a new line for the ledger. `runs`: earlier runs of the question. `facts`: further fields."""
        git: Mapping[str, Any] = describe(spec, self.session.facts, git_diff=False)["git"] or {}
        return LedgerLine(
            at=utc_now(), attempts=len(self.trials), commit=git.get("commit"),
            dirty=git.get("dirty"), machine=self.session.facts.host, runs=(*runs, self.session.run.run_id),
            command=self.session.run.redaction.command_text(self.session.options.command), **facts,
        )  # fmt: skip

    @property
    def took_s(self) -> float:
        """Total time of all launches in seconds, including an interrupted launch."""
        return sum(outcome.timing.wall_s for outcome in self.outcomes)


@contextmanager
def open_experiment(
    options: RunOptions, configs: Sequence[RunSpec], facts: MachineFacts, *, engine: EngineChoice | None = None
) -> Iterator[Experiment]:
    """Open a new run directory and a session for an experiment."""
    with run_directory(options) as run, experiment_in(run, options, configs, facts, engine=engine) as experiment:
        yield experiment


@contextmanager
def experiment_in(
    run: RunDir,
    options: RunOptions,
    configs: Sequence[RunSpec],
    facts: MachineFacts,
    trials: Sequence[Trial] = (),
    *,
    screen_type: type[ExperimentScreen] = TrialScreen,
    engine: EngineChoice | None = None,
) -> Iterator[Experiment]:
    """Open a session for an experiment in a locked run directory, after the `trials` of earlier sessions.

    `engine`: runs each launch as a job; None: this machine runs it.
    """
    screen = screen_type(sys.stderr if options.json else sys.stdout, live=not options.json)
    outcomes = list(judge_again(run, [trial.dir for trial in trials]).values())
    with session(run, options, configs, screen=screen, facts=facts, engine=engine) as running:
        yield Experiment(session=running, screen=screen, configs=configs, trials=list(trials), outcomes=outcomes)


def utc_now() -> str:
    """Return the current time as the ledger stores it, such as "2026-11-23T10:05:00Z"."""
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"


def ledger_side(
    label: str, spec_hash: str, failures: int, runs: int, confidence: float, ends: Mapping[str, int]
) -> LedgerSide:
    """Return one side of a ledger line with its failure rate. `ends` counts how the runs ended, as in {"HANG": 3}."""
    low, high = interval(failures, runs, confidence)
    return LedgerSide(
        what=label, spec_hash=spec_hash, failed=failures, of=runs, rate=round(failures / runs, 4) if runs else None,
        low=round(low, 4), high=round(high, 4), ends=dict(ends),
    )  # fmt: skip
