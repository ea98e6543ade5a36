"""Judge an attempt that has ended, using only its files.

`collect` reads the files, `judge` decides on PASS, FAIL, HANG or ERROR, `diagnose` finds the cause, and `in_words`
writes the sentences.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from nsa_harness.commands.stored_job import engine_of, read_job, repeat_command, with_engine, with_job_state
from nsa_harness.core.diagnosis.engine import diagnose
from nsa_harness.core.diagnosis.explanation import Rule
from nsa_harness.core.diagnosis.profile import PROFILE_FILE
from nsa_harness.core.evidence.evidence import Evidence
from nsa_harness.core.evidence.frame_values import ProcessValues
from nsa_harness.core.evidence.nodes import PID_SPAN
from nsa_harness.core.experiment.diagnostic_rerun import is_experiment, is_recorded
from nsa_harness.core.experiment.trial import FAILED_STATUSES
from nsa_harness.core.experiment.why import silent_difference, silent_finding
from nsa_harness.core.outcome.outcome import outcome_of, skipped_outcome, unjudged_outcome
from nsa_harness.core.outcome.reproduction import reproduction
from nsa_harness.core.outcome.values import shown_values
from nsa_harness.core.plan import RunSpec, Skip
from nsa_harness.core.report import Artifact, Facts, Outcome, Status, Trouble
from nsa_harness.core.scenario.yaml_tree import visible
from nsa_harness.core.verdict.verdict import judge
from nsa_harness.errors import HarnessError
from nsa_harness.render.documents.plain_text import profile_text
from nsa_harness.render.documents.report_json import outcome_values
from nsa_harness.render.documents.trace import trace_json
from nsa_harness.subject.files import is_launched_by, program_files
from nsa_harness.subject.tables import RULES, reported_values
from nsa_harness.supervisor.launch.launcher import command_line
from nsa_harness.supervisor.storage.collect import collect
from nsa_harness.supervisor.storage.comm_lock import schedule_misses
from nsa_harness.supervisor.storage.inventory import inventory, write_reproduction
from nsa_harness.supervisor.storage.metrics import printed_metrics
from nsa_harness.supervisor.storage.record import load_judged_spec
from nsa_harness.supervisor.storage.recordings import store_recordings
from nsa_harness.supervisor.storage.redacted_files import redact_files
from nsa_harness.supervisor.storage.rundir import AttemptDir
from nsa_harness.supervisor.storage.safe_directory import Budget
from nsa_harness.supervisor.storage.sources import with_source_text, with_sources
from nsa_harness.supervisor.storage.values import collect_values
from nsa_harness.texts.sentences import in_words, nodes_note, with_words

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
    other_misses: Sequence[Facts] = (),
) -> Outcome:
    """Judge the evidence of one attempt, with the program's `own_rules` in addition, and return its outcome.

    `other_misses`: see `outcome_of`.
    """
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
        other_misses=other_misses,
    )
    (outcome,) = with_words([replace(outcome, trouble=(*outcome.trouble, *words.trouble))])
    return outcome


def judge_attempt(
    attempt: AttemptDir, spec: RunSpec, node: str, number: int, *, read_budget: Budget | None = None
) -> Outcome:
    """Judge an attempt from its files, write the results, and return its outcome.

    `node`: name of the machine it ran on. `number`: the number of the attempt within its scenario. `read_budget`: what
    is left of the budget for reading the files of a stored run, or None for an attempt that was just launched.
    """
    attempt.redaction.learn_launch(spec)
    attempt.redaction.suspect_environment(os.environ)
    is_own_program = is_launched_by(spec)
    attempt.directory.budget = budget = read_budget or Budget()
    budget.add_ranks(spec.ranks)
    evidence = collect(attempt, spec, node, reported_values if is_own_program else None)
    if evidence.nodes:
        spec = replace(spec, notes=(*spec.notes, nodes_note(evidence)))
    evidence = with_sources(attempt, evidence, launched_here=read_budget is None)
    choice = engine_of(attempt)
    # No single command starts the agents of `watch --shared`.
    has_no_command = evidence.is_attached or (bool(attempt.nodes()) and choice is None)
    profile = "".join(f"{line}\n" for line in profile_text(evidence))
    unwritten = write_file(attempt, attempt.path / PROFILE_FILE, profile) if evidence.samples else ()
    outcome = with_source_text(
        judge_evidence(
            spec,
            evidence,
            attempt=number,
            directory=attempt.path.name,
            artifacts=inventory(attempt, evidence, program_files(spec, evidence)),
            metrics={**evidence.metrics, **printed_metrics(attempt, spec.expect)},
            repeat=None if has_no_command else repeat_command(attempt, choice),
            own_rules=RULES if is_own_program else (),
            other_misses=schedule_misses(attempt, spec),
        ),
        evidence.sources,
    )
    if spec.expect.communication and outcome.verdict.status is Status.PASS:
        check = f"a step communicates as {spec.expect.communication.file} says"
        outcome = replace(outcome, passed_checks=(*outcome.passed_checks, check))
    values, unread = _values(attempt, evidence, is_needed=outcome.verdict.status is not Status.PASS)
    outcome = replace(
        outcome,
        values=shown_values(outcome, evidence.sources, values, with_definitions=evidence.is_attached),
        artifacts=(*outcome.artifacts, *_write_repro(attempt, spec, evidence, outcome)),
        trouble=(*outcome.trouble, *unread, *attempt.directory.take_notes(), *unwritten),
    )
    if outcome.next_command is not None and outcome.next_command.startswith("nsa-harness run "):
        outcome = replace(outcome, next_command=with_engine(outcome.next_command, choice))
    unwritten = _store_recordings(attempt, evidence)
    if is_recorded(spec) and (outcome.verdict.status is not Status.PASS or silent_finding(outcome) is not None):
        outcome = _with_origin(attempt, spec, outcome, launched_here=read_budget is None)
    outcome = attempt.redaction.value(outcome)
    unwritten += redact_files(attempt)
    unwritten += write_file(attempt, attempt.verdict, json.dumps(outcome_values(outcome), indent=1) + "\n")
    unwritten += write_file(attempt, attempt.result, f"{outcome.verdict.status}\n")
    unwritten += _write_trace(attempt, evidence, outcome)  # last, so that a full disk costs the trace, not the verdict
    return replace(outcome, trouble=(*outcome.trouble, *unwritten))


def _values(
    attempt: AttemptDir, evidence: Evidence, *, is_needed: bool
) -> tuple[tuple[ProcessValues, ...], tuple[Trouble, ...]]:
    """Return the values of all ranks, and what could not be read. The files of the ranks may be those of nodes."""
    values: tuple[ProcessValues, ...] = ()
    unread: tuple[Trouble, ...] = ()
    for files, pids in _files_and_pids(attempt, evidence):
        found, trouble = collect_values(files, pids, is_needed=is_needed)
        values, unread = values + found, unread + trouble
    return values, unread


def _store_recordings(attempt: AttemptDir, evidence: Evidence) -> tuple[Trouble, ...]:
    """Store the recordings of all ranks. Return one note per failure."""
    return tuple(note for files, pids in _files_and_pids(attempt, evidence) for note in store_recordings(files, pids))


def _files_and_pids(attempt: AttemptDir, evidence: Evidence) -> Iterator[tuple[AttemptDir, Mapping[int, int | None]]]:
    """Yield the process of each rank by node, with the attempt as the agent of this node sees it.

    Without agents, the attempt is yielded once, with all ranks.
    """
    nodes: list[str | None] = [*sorted(set(evidence.nodes.values()))] or [None]
    for node in nodes:
        ranks = [rank for rank in evidence.ranks if node is None or evidence.nodes.get(rank.rank) == node]
        pids = {rank.rank: rank.pid and rank.pid % PID_SPAN for rank in ranks}
        yield attempt if node is None else attempt.with_files_of(node), pids


def _with_origin(attempt: AttemptDir, spec: RunSpec, outcome: Outcome, *, launched_here: bool) -> Outcome:
    """Return the outcome of a recorded attempt with a finding about the line that made the ranks diverge."""
    from nsa_harness.supervisor.storage.explanations import explained
    from nsa_harness.texts.why import finding_of

    explanation, trouble = explained(
        attempt, spec.ranks, launched_here=launched_here, silent=silent_difference(outcome)
    )
    trouble = (*outcome.trouble, *trouble)
    if explanation is None or is_experiment(spec) or outcome.verdict.status not in FAILED_STATUSES:
        return replace(outcome, trouble=trouble)
    finding = finding_of(explanation, [f"{attempt.path.name}/{attempt.explanation.name}"])
    findings = outcome.findings if finding is None else (*outcome.findings, finding)
    return replace(outcome, findings=findings, trouble=trouble)


def write_file(attempt: AttemptDir, path: Path, text: str) -> tuple[Trouble, ...]:
    """Write a file of the attempt. Return the error, or an empty tuple if there was none."""
    try:
        attempt.directory.write(path, text)
    except OSError as error:
        return (Trouble(what=path.name, why=f"it could not be written: {error}"),)
    return ()


def record_skip(attempt: AttemptDir, skip: Skip) -> Outcome:
    """Write the result file of a skipped scenario, and return its outcome."""
    outcome = skipped_outcome(skip)
    try:
        attempt.directory.make_directory(attempt.path)
    except OSError as error:
        return replace(outcome, trouble=(Trouble(what=attempt.path.name, why=f"it could not be created: {error}"),))
    return replace(outcome, trouble=write_file(attempt, attempt.result, f"{outcome.verdict.status}\n"))


def _write_trace(attempt: AttemptDir, evidence: Evidence, outcome: Outcome) -> tuple[Trouble, ...]:
    try:
        text = attempt.redaction.json(trace_json(evidence, outcome))
    except Exception as error:
        return (Trouble(what=attempt.trace.name, why=f"it could not be created: {type(error).__name__}: {error}"),)
    return write_file(attempt, attempt.trace, text)


def _write_repro(attempt: AttemptDir, spec: RunSpec, evidence: Evidence, outcome: Outcome) -> tuple[Artifact, ...]:
    """Write repro/ and return its files. If that fails, a placeholder gives the reason."""
    try:
        redacted_spec = attempt.redaction.spec(spec)
        command = attempt.redaction.command(command_line(spec, sys.executable, None))
        return write_reproduction(attempt, reproduction(redacted_spec, evidence, outcome, command))
    except Exception as error:
        return (Artifact(path="repro", count=None, absent=f"it could not be created: {type(error).__name__}: {error}"),)


def judge_stored(attempt: AttemptDir, budget: Budget | None = None) -> Outcome:
    """Judge an attempt of a stored run within a budget. Raise ScenarioError if its spec cannot be read."""
    attempt.directory.budget = budget = budget or Budget()
    spec = load_judged_spec(attempt)
    nodes = attempt.directory.list_files(attempt.evidence, "*.json")
    node = nodes[0].stem if nodes else "unknown"
    number = _name_and_number(attempt)[1]

    def judge() -> Outcome:
        with _without_collection(spec.ranks):
            return judge_attempt(attempt, spec, node, number, read_budget=budget)

    job = read_job(attempt)
    return judge() if job is None else with_job_state(attempt, spec, number, job, judge)


@contextmanager
def _without_collection(ranks: int) -> Iterator[None]:
    """Switch Python's cyclic garbage collector off for a large job.

    The objects of its evidence live until it is judged. Searching them for garbage again and again takes a fifth of the
    time and finds nothing.
    """
    if ranks <= _MANY_RANKS or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


_MANY_RANKS = 64


def error_outcome(attempt: AttemptDir, plan: Sequence[RunSpec | Skip], error: Exception) -> Outcome:
    """Return an outcome for an attempt that cannot be judged because of `error`."""
    name, number = _name_and_number(attempt)
    specs = [spec for spec in plan if isinstance(spec, RunSpec) and spec.scenario == name]
    reason = (
        str(error) if isinstance(error, HarnessError) else f"nsa-harness itself failed: {type(error).__name__}: {error}"
    )
    placeholder = Skip(scenario=visible(name), about=specs[0].about if specs else "", reason=reason)
    return unjudged_outcome(
        specs[0] if specs else placeholder, attempt=number, directory=attempt.path.name, error=reason
    )


def _name_and_number(attempt: AttemptDir) -> tuple[str, int]:
    name, _, number = attempt.path.name.partition("~")
    return name, int(number) if number.isascii() and number.isdigit() and len(number) < _NUMBER_DIGITS else 1
