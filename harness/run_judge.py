"""What a run needs from its first launch on: the watch, the judgement of what is on disk, and the documents."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from harness.core.diagnosed.profile import PROFILE_FILE, profile_text
from harness.core.observed.evidence import Evidence
from harness.core.plan import RunSpec
from harness.core.report import Artifact, Outcome
from harness.core.reproduced.reproduction import reproduction
from harness.core.told.outcome import outcome_of
from harness.render.documents import write_documents
from harness.render.report_json import outcome_values
from harness.supervisor.launch import command_line
from harness.supervisor.stored.collect import collect
from harness.supervisor.stored.inventory import inventory
from harness.supervisor.stored.reported import foreign_metrics
from harness.supervisor.stored.reproduced import write_reproduction
from harness.supervisor.stored.rundir import AttemptDir, write_document
from harness.supervisor.stored.source import quoted
from harness.supervisor.stored.stored_spec import load_spec
from harness.supervisor.watch import Watch

__all__ = ["Watch", "judge_attempt", "judge_stored", "write_documents"]


def judge_attempt(attempt: AttemptDir, spec: RunSpec, node: str, number: int) -> Outcome:
    """Evidence from the attempt's files, then the verdict; writes verdict.json and result.txt."""
    evidence = collect(attempt, spec, node)
    if evidence.samples:
        write_document(attempt.path / PROFILE_FILE, "".join(f"{line}\n" for line in profile_text(evidence)))
    outcome = quoted(
        outcome_of(
            spec,
            evidence,
            attempt=number,
            directory=attempt.path.name,
            artifacts=inventory(attempt, spec, evidence),
            metrics={**evidence.metrics, **foreign_metrics(attempt, spec.expect)},
            repeat=f"nsa-harness run {shlex.quote(_shown(attempt.spec))}",
        ),
        attempt.spec,
    )
    outcome = replace(outcome, artifacts=(*outcome.artifacts, *_reproduced(attempt, spec, evidence, outcome)))
    write_document(attempt.verdict, json.dumps(outcome_values(outcome), indent=1) + "\n")
    write_document(attempt.result, f"{outcome.verdict.status}\n")
    return outcome


def _reproduced(attempt: AttemptDir, spec: RunSpec, evidence: Evidence, outcome: Outcome) -> tuple[Artifact, ...]:
    """A verdict is never lost for want of a way to repeat it."""
    try:
        bare = shlex.join(command_line(spec, sys.executable, None))
        return write_reproduction(attempt, reproduction(spec, evidence, outcome, bare))
    except Exception as error:
        return (Artifact(path="repro", count=None, absent=f"it could not be made: {type(error).__name__}: {error}"),)


def judge_stored(attempt: AttemptDir) -> Outcome:
    """An attempt of an earlier run, from its files alone."""
    _, _, number = attempt.path.name.partition("~")
    spec = load_spec(attempt.spec)
    nodes = sorted(attempt.evidence.glob("*.json"))
    node = nodes[0].stem if nodes else "unknown"
    return judge_attempt(attempt, spec, node, int(number) if number.isdigit() else 1)


def _shown(path: Path) -> str:
    """Relative to the working directory when it lies below it."""
    resolved = path.resolve()
    return str(resolved.relative_to(Path.cwd())) if resolved.is_relative_to(Path.cwd()) else str(resolved)
