"""An experiment: launch configurations one after another until a question is answered, and add it to the ledger."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nsa_harness.commands.session import INTERRUPTED, Session, run_directory, session
from nsa_harness.core.experiment.statistics import interval
from nsa_harness.core.experiment.trial import Trial
from nsa_harness.core.plan import RunSpec
from nsa_harness.core.report import MachineFacts, Outcome
from nsa_harness.errors import HarnessError
from nsa_harness.render.experiments.claim import TrialScreen
from nsa_harness.supervisor.launch.machine import describe
from nsa_harness.supervisor.storage.adapters import plain
from nsa_harness.supervisor.storage.ledger import LedgerLine, LedgerSide, add_line
from nsa_harness.supervisor.storage.rundir import RunOptions


@dataclass(kw_only=True)
class Experiment:
    """The launches of a claim or of a verification, while it is carried out."""

    session: Session
    screen: TrialScreen
    configs: Sequence[RunSpec]
    trials: list[Trial] = field(default_factory=list)
    _outcomes: list[Outcome] = field(default_factory=list)

    def trials_until(
        self,
        answered: Callable[[], bool],
        *,
        next_config: Callable[[], int],
        judge: Callable[[Outcome, int], Trial],
        progress: Callable[[int], str],
    ) -> Iterator[Trial]:
        """Launch, judge and yield one trial after another until the question is answered or the user interrupts.

        `next_config` chooses the configuration to launch, `judge` makes a trial from its outcome, and `progress`
        returns the line that the screen shows during the launch.
        """
        while not answered() and not self.session.interrupted:
            config = next_config()
            self.screen.running(progress(config))
            outcome = self._launch(self.configs[config])
            self.screen.running(None)
            if self.session.interrupted:  # the outcome of an interrupted launch does not count
                return
            self.trials.append(judge(outcome, config))
            yield self.trials[-1]

    def _launch(self, spec: RunSpec) -> Outcome:
        made = sum(outcome.spec.scenario == spec.scenario for outcome in self._outcomes)
        outcome = self.session.launch(spec, 1 + made)
        self._outcomes.append(outcome)
        self.session.tell_outcome(outcome)
        return outcome

    def show(self, lines: Callable[[int], Iterable[str]]) -> None:
        self.screen.show(lines)

    def show_line(self, line: Callable[[int], str]) -> None:
        self.screen.show(lambda width: [line(width)])

    def finish(self, line: LedgerLine, code: int) -> tuple[int, Path | None]:
        """Add the line to the ledger, and write the documents of the run.

        Return the exit code and the ledger's path; None: no trial was made, or the ledger could not be written, which
        is printed.
        """
        code = INTERRUPTED if self.session.interrupted else code
        ledger = self._add_to_ledger(line) if self.trials else None
        self.session.write_documents(self._outcomes)
        claim = {"scenario": line.scenario, "claim": plain(line)}
        self.session.stream({"event": "done", **claim, "exit_code": code, "run_dir": str(self.session.run.path)})
        return code, ledger

    def _add_to_ledger(self, line: LedgerLine) -> Path | None:
        try:
            return add_line(self.session.options.parent, line, self.session.run.redaction)
        except (OSError, HarnessError) as error:
            print(f"the ledger could not be written: {error}", file=sys.stderr)
            return None

    def ledger_line(self, spec: RunSpec, runs: Sequence[str] = (), **facts: Any) -> LedgerLine:
        """Return a line for the ledger: `facts`, and the session's own data.

        `spec`: the launch whose checkout counts.
        """
        git: Mapping[str, Any] = describe(spec, self.session.facts, git_diff=False)["git"] or {}
        return LedgerLine(
            at=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", attempts=len(self.trials), commit=git.get("commit"),
            dirty=git.get("dirty"), machine=self.session.facts.host, runs=(*runs, self.session.run.run_id),
            command=self.session.run.redaction.typed(self.session.options.command), **facts,
        )  # fmt: skip

    @property
    def took_s(self) -> float:
        """The time of all launches together, including an interrupted one."""
        return sum(outcome.timing.wall_s for outcome in self._outcomes)


@contextmanager
def open_experiment(options: RunOptions, configs: Sequence[RunSpec], facts: MachineFacts) -> Iterator[Experiment]:
    screen = TrialScreen(sys.stderr if options.json else sys.stdout, live=not options.json)
    with run_directory(options) as run, session(run, options, configs, screen=screen, facts=facts) as opened:
        yield Experiment(session=opened, screen=screen, configs=configs)


def ledger_side(what: str, spec_hash: str, bad: int, of: int, confidence: float, ends: Mapping[str, int]) -> LedgerSide:
    low, high = interval(bad, of, confidence)
    return LedgerSide(
        what=what, spec_hash=spec_hash, failed=bad, of=of, rate=round(bad / of, 4) if of else None,
        low=round(low, 4), high=round(high, 4), ends=dict(ends),
    )  # fmt: skip
