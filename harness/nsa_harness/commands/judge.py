"""Judge an attempt that has ended from its files alone. What `run` does at once, `report` does years later.

`collect` reads the files, `judge` says PASS, FAIL, HANG or ERROR, `diagnose` names the cause, and `in_words` makes the
sentences.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from nsa_harness.core.diagnosis.engine import diagnose
from nsa_harness.core.diagnosis.explanation import Rule
from nsa_harness.core.diagnosis.profile import PROFILE_FILE
from nsa_harness.core.evidence.evidence import Evidence
from nsa_harness.core.outcome.outcome import outcome_of, skipped, unjudged
from nsa_harness.core.outcome.reproduction import reproduction
from nsa_harness.core.plan import RunSpec, Skip
from nsa_harness.core.report import Artifact, Outcome, Trouble
from nsa_harness.core.scenario.yaml_tree import visible
from nsa_harness.core.verdict.verdict import judge
from nsa_harness.errors import HarnessError
from nsa_harness.render.documents.plain_text import profile_text
from nsa_harness.render.documents.report_json import outcome_values
from nsa_harness.render.documents.trace import trace_json
from nsa_harness.subject.files import is_launched_by, program_files
from nsa_harness.subject.tables import RULES, reported
from nsa_harness.supervisor.launch.launcher import command_line
from nsa_harness.supervisor.storage.collect import collect
from nsa_harness.supervisor.storage.inventory import inventory, write_reproduction
from nsa_harness.supervisor.storage.metrics import foreign_metrics
from nsa_harness.supervisor.storage.record import judged_spec
from nsa_harness.supervisor.storage.redacted_files import redact_files
from nsa_harness.supervisor.storage.rundir import AttemptDir
from nsa_harness.supervisor.storage.safe_directory import Budget
from nsa_harness.supervisor.storage.sources import quoted, with_sources
from nsa_harness.texts.sentences import in_words, with_words

_NUMBER_DIGITS = 9


def judge_evidence(
    spec: RunSpec,
    evidence: Evidence,
    *,
    attempt: int,
    directory: str,
    artifacts: Sequence[Artifact],
    metrics: Mapping[str, float],
    repeat: str | None,
    own_rules: tuple[Rule, ...] = (),
) -> Outcome:
    """Judge the evidence: return its verdict and cause, in words. `own_rules` are rules for the program that ran."""
    judgement = judge(evidence)
    diagnosis = diagnose(evidence, judgement, own_rules)
    words = in_words(diagnosis)
    outcome = outcome_of(
        spec,
        evidence,
        judgement,
        diagnosis,
        findings=words.findings,
        attempt=attempt,
        directory=directory,
        artifacts=artifacts,
        metrics=metrics,
        repeat=repeat,
    )
    (outcome,) = with_words([replace(outcome, trouble=(*outcome.trouble, *words.trouble))])
    return outcome


def judge_attempt(
    attempt: AttemptDir, spec: RunSpec, node: str, number: int, *, stored_by: Budget | None = None
) -> Outcome:
    """Read the attempt's evidence and judge it. Write the evidence, profile, repro, verdict and result.

    `stored_by`: the budget for reading a stored run, if the attempt belongs to one; None: it was just launched here.
    """
    attempt.redaction.learn_launch(spec)
    attempt.redaction.suspect(os.environ)
    ours = is_launched_by(spec)
    attempt.door.budget = budget = stored_by or Budget()
    budget.add_ranks(spec.ranks)
    evidence = collect(attempt, spec, node, reported if ours else None)
    evidence = with_sources(attempt, evidence, launched_here=stored_by is None)
    profile = "".join(f"{line}\n" for line in profile_text(evidence))
    unwritten = kept(attempt, attempt.path / PROFILE_FILE, profile) if evidence.samples else ()
    outcome = quoted(
        judge_evidence(
            spec,
            evidence,
            attempt=number,
            directory=attempt.path.name,
            artifacts=inventory(attempt, evidence, program_files(spec, evidence)),
            metrics={**evidence.metrics, **foreign_metrics(attempt, spec.expect)},
            repeat=None if evidence.is_attached else f"nsa-harness run {shlex.quote(_shown(attempt.spec))}",
            own_rules=RULES if ours else (),
        ),
        evidence.sources,
    )
    outcome = replace(
        outcome,
        artifacts=(*outcome.artifacts, *_reproduced(attempt, spec, evidence, outcome)),
        trouble=(*outcome.trouble, *attempt.door.cuts(), *unwritten),
    )
    outcome = attempt.redaction.value(outcome)
    unwritten = redact_files(attempt)
    unwritten += kept(attempt, attempt.verdict, json.dumps(outcome_values(outcome), indent=1) + "\n")
    unwritten += kept(attempt, attempt.result, f"{outcome.verdict.status}\n")
    unwritten += _traced(attempt, evidence, outcome)  # last: on a full disk it must not cost the verdict
    return replace(outcome, trouble=(*outcome.trouble, *unwritten))


def kept(attempt: AttemptDir, path: Path, text: str) -> tuple[Trouble, ...]:
    """Write a file of the attempt. Return what could not be written: a stored run may be read-only."""
    try:
        attempt.door.write(path, text)
    except OSError as error:
        return (Trouble(what=path.name, why=f"it could not be written: {error}"),)
    return ()


def keep_skip(attempt: AttemptDir, skip: Skip) -> Outcome:
    """Return the outcome of a skipped scenario, and make its directory, for programs that read those of a run."""
    outcome = skipped(skip)
    try:
        attempt.door.make_folder(attempt.path)
    except OSError as error:
        return replace(outcome, trouble=(Trouble(what=attempt.path.name, why=f"it could not be made: {error}"),))
    return replace(outcome, trouble=kept(attempt, attempt.result, f"{outcome.verdict.status}\n"))


def _traced(attempt: AttemptDir, evidence: Evidence, outcome: Outcome) -> tuple[Trouble, ...]:
    """Write the trace. Return what could not be written: a failure here must not cost the verdict."""
    try:
        text = attempt.redaction.json(trace_json(evidence, outcome))
    except Exception as error:
        return (Trouble(what=attempt.trace.name, why=f"it could not be made: {type(error).__name__}: {error}"),)
    return kept(attempt, attempt.trace, text)


def _reproduced(attempt: AttemptDir, spec: RunSpec, evidence: Evidence, outcome: Outcome) -> tuple[Artifact, ...]:
    """Write repro/ and return its files, or why it could not be made: a failure here must not cost the verdict."""
    try:
        shown = attempt.redaction.spec(spec)
        bare = attempt.redaction.command(command_line(spec, sys.executable, None))
        return write_reproduction(attempt, reproduction(shown, evidence, outcome, bare))
    except Exception as error:
        return (Artifact(path="repro", count=None, absent=f"it could not be made: {type(error).__name__}: {error}"),)


def judge_stored(attempt: AttemptDir, budget: Budget | None = None) -> Outcome:
    """Judge an attempt of a stored run from its files. `budget`: the rest of its run's budget. Raises ScenarioError."""
    attempt.door.budget = budget = budget or Budget()
    spec = judged_spec(attempt)
    nodes = attempt.door.files(attempt.evidence, "*.json")
    node = nodes[0].stem if nodes else "unknown"
    return judge_attempt(attempt, spec, node, _named(attempt)[1], stored_by=budget)


def not_judged(attempt: AttemptDir, plan: Sequence[RunSpec | Skip], error: Exception) -> Outcome:
    """Return the ERROR outcome of an attempt that cannot be judged. `plan` may still contain its scenario."""
    name, number = _named(attempt)
    known = [spec for spec in plan if isinstance(spec, RunSpec) and spec.scenario == name]
    why = str(error) if isinstance(error, HarnessError) else f"the harness failed: {type(error).__name__}: {error}"
    empty = Skip(scenario=visible(name), about=known[0].about if known else "", reason=why)
    return unjudged(known[0] if known else empty, attempt=number, directory=attempt.path.name, error=why)


def _named(attempt: AttemptDir) -> tuple[str, int]:
    """Return the scenario and the number in the directory's name."""
    name, _, number = attempt.path.name.partition("~")
    return name, int(number) if number.isascii() and number.isdigit() and len(number) < _NUMBER_DIGITS else 1


def _shown(path: Path) -> str:
    """Return the path relative to the working directory if it lies below it."""
    resolved = path.resolve()
    return str(resolved.relative_to(Path.cwd())) if resolved.is_relative_to(Path.cwd()) else str(resolved)
