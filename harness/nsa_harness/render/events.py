"""The `--json` stream: one JSON object per line on stdout, for programs that follow a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from typing_extensions import TypedDict  # before Python 3.12, pydantic accepts only this TypedDict

from nsa_harness.core.comparison.severity import strict_exit_code
from nsa_harness.core.evidence.live import FirstSnapshot, Progress
from nsa_harness.core.plan import RunSpec, Skip
from nsa_harness.core.report import MachineFacts, Outcome, Report, counts, exit_code
from nsa_harness.core.stored_keys import to_stored
from nsa_harness.render.documents.report_json import outcome_values
from nsa_harness.render.listener import Listener
from nsa_harness.render.text import escape, escaped

SCHEMA = 1


class Events(Listener):
    """A listener that writes each event as one line of JSON. An interrupted run has a `done` event with code 130."""

    def __init__(self, stream: TextIO, run_id: str, elapsed_s: Callable[[], float], *, strict: bool = False) -> None:
        self._stream = stream
        self._run_id = run_id
        self._elapsed_s = elapsed_s
        self._strict = strict
        self._phases: dict[str, str] = {}

    def on_plan(self, facts: MachineFacts, specs: Sequence[RunSpec | Skip]) -> None:
        self._write(
            "plan", None, machine=asdict(facts), scenarios=[_planned_run(spec) for spec in escaped(tuple(specs))]
        )

    def on_launch(self, spec: RunSpec) -> None:
        self._write("launch", spec.scenario, **_planned_run(escaped(spec)))

    def on_phase(self, scenario: str, phase: str, progress: Progress) -> None:
        """Write a `phase` event if the run's phase has changed."""
        if self._phases.get(scenario) == phase:
            return
        self._phases[scenario] = phase
        self._write("phase", scenario, phase=escape(phase), **to_stored(escaped(progress)))

    def on_job(self, scenario: str, job: str, state: str, text: str) -> None:
        self._write("job", scenario, job=escape(job), state=state, text=escape(text))

    def on_first_snapshot(self, scenario: str, rows: Sequence[FirstSnapshot]) -> None:
        self._write("look", scenario, rows=[asdict(row) for row in escaped(tuple(rows))])

    def on_stall(self, scenario: str, text: str) -> None:
        self._write("suspect", scenario, text=escape(text))

    def on_progress_again(self, scenario: str, text: str) -> None:
        self._write("released", scenario, text=escape(text))

    def on_outcome(self, outcome: Outcome, run_dir: Path) -> None:
        self._phases.pop(outcome.dir, None)
        self._write("outcome", outcome.spec.scenario, outcome=outcome_values(outcome), run_dir=escape(str(run_dir)))

    def on_done(self, report: Report, run_dir: Path) -> None:
        by_verdict = {status.value: number for status, number in counts(report.outcomes).items()}
        code = strict_exit_code(report) if self._strict else exit_code(report)
        self._write("done", None, counts=by_verdict, exit_code=code, run_dir=escape(str(run_dir)))

    def _write(self, event: str, scenario: str | None, **values: Any) -> None:
        head = {
            "schema": SCHEMA,
            "event": event,
            "t_s": round(self._elapsed_s(), 3),
            "run_id": self._run_id,
            "scenario": None if scenario is None else escape(scenario),
        }
        # One write per line, so that the reader of a pipe sees only whole lines.
        self._stream.write(json.dumps({**head, **values}) + "\n")
        self._stream.flush()


class PlannedRun(TypedDict):
    """A planned run in the format of the `plan` event.

    If this machine cannot run it, `skip` is the reason and all later keys are null.
    """

    name: str
    about: str
    skip: str | None
    spec_hash: str | None
    ranks: int | None
    backend: str | None
    subject: str | None
    deadline_s: float | None
    notes: list[str] | None


def _planned_run(spec: RunSpec | Skip) -> dict[str, Any]:
    """Return a planned run with the keys of `PlannedRun`."""
    known: dict[str, Any] = {"name": spec.scenario, "about": spec.about}
    if isinstance(spec, Skip):
        known |= {"skip": spec.reason}
    else:
        keys = ("spec_hash", "ranks", "backend", "subject")
        known |= {**{key: getattr(spec, key) for key in keys}, "deadline_s": spec.limits.deadline_s}
        known |= {"notes": list(spec.notes)}
    return {key: known.get(key) for key in PlannedRun.__annotations__}
