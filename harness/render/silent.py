"""Silent: a listener that takes everything and says nothing, for listeners that care for a few things only."""
# ruff: noqa: ARG002

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.core.observed.live import Progress
from harness.core.plan import RunSpec, Skip
from harness.core.report import MachineFacts, Outcome, Report
from harness.render.listener import Listener


class Silent(Listener):
    def plan(self, facts: MachineFacts, specs: Sequence[RunSpec | Skip]) -> None:
        return

    def launched(self, spec: RunSpec) -> None:
        return

    def phase(self, attempt: str, phase: str, progress: Progress) -> None:
        return

    def suspect(self, attempt: str, text: str) -> None:
        return

    def released(self, attempt: str, text: str) -> None:
        return

    def interrupted(self, count: int) -> None:
        return

    def outcome(self, outcome: Outcome, run_dir: Path) -> None:
        return

    def done(self, report: Report, run_dir: Path) -> None:
        return

    def error(self, text: str) -> None:
        return

    def close(self) -> None:
        return
