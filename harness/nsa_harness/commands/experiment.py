"""An experiment: configurations launched one after another until a question is answered, and a line in the ledger."""

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
    """The launches of a claim or of a verification."""

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

        `next_config` chooses among the configurations, `judge` makes a trial of an outcome of it, and `progress` is
        the line that the screen shows meanwhile.
        """
        while not answered() and not self.session.interrupted:
            config = next_config()
            self.screen.running(progress(config))
            outcome = self._launch(self.configs[config])
            self.screen.running(None)
            if self.session.interrupted:  # such an outcome shows nothing
                return
            self.trials.append(judge(outcome, config))
            yield self.trials[-1]

    def _launch(self, spec: RunSpec) -> Outcome:
        outcome = self.session.launch(spec, 1 + sum(one.spec.scenario == spec.scenario for one in self._outcomes))
        self._outcomes.append(outcome)
        self.session.tell_outcome(outcome)
        return outcome

    def show(self, lines: Callable[[int], Iterable[str]]) -> None:
        self.screen.show(lines)

    def show_line(self, line: Callable[[int], str]) -> None:
        self.screen.show(lambda width: [line(width)])

    def finish(self, line: LedgerLine, code: int) -> tuple[int, Path | None]:
        """Write the line of the ledger and the documents of the run.

        Returns the exit code, and the ledger; None: no trial was made, or it could not be written, which is printed.
        """
        code = INTERRUPTED if self.session.interrupted else code
        ledger = self._file(line) if self.trials else None
        self.session.write_documents(self._outcomes)
        claim = {"scenario": line.scenario, "claim": plain(line)}
        self.session.stream({"event": "done", **claim, "exit_code": code, "run_dir": str(self.session.run.path)})
        return code, ledger

    def _file(self, line: LedgerLine) -> Path | None:
        try:
            return add_line(self.session.options.parent, line, self.session.run.redaction)
        except (OSError, HarnessError) as error:
            print(f"the ledger could not be written: {error}", file=sys.stderr)
            return None

    def ledger_line(self, spec: RunSpec, runs: Sequence[str] = (), **facts: Any) -> LedgerLine:
        """Return the line of the ledger: the facts, and what the session knows. `spec`: whose checkout is named."""
        git: Mapping[str, Any] = describe(spec, self.session.facts, git_diff=False)["git"] or {}
        return LedgerLine(
            at=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", attempts=len(self.trials), commit=git.get("commit"),
            dirty=git.get("dirty"), machine=self.session.facts.host, runs=(*runs, self.session.run.run_id),
            command=self.session.run.redaction.typed(self.session.options.command), **facts,
        )  # fmt: skip

    @property
    def took_s(self) -> float:
        """The time of all launches together, also of one that was interrupted."""
        return sum(one.timing.wall_s for one in self._outcomes)


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
