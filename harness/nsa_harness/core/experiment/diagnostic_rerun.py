"""Run a failed program again with more checks, to find out what the original run did not show.

This module decides which rerun is worth making, and turns its result into a finding about the original run.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from nsa_harness import protocol
from nsa_harness.core.diagnosis.causes import Cause, SecondRun, row_of
from nsa_harness.core.diagnosis.confidence import CERTAIN, EvidenceKind
from nsa_harness.core.diagnosis.explanation import make_finding
from nsa_harness.core.experiment.why import ranks_part
from nsa_harness.core.plan import DiagnosticRerun, RunSpec
from nsa_harness.core.report import Culprit, Facts, Finding, Outcome, Place, Status

MAX_RERUNS = 3

_DEBUG = "TORCH_DISTRIBUTED_DEBUG"
# These messages of DDP give only the indices of parameters. With TORCH_DISTRIBUTED_DEBUG=INFO they give the names.
_BY_INDEX = re.compile(r"ready only once|did not receive grad|finished reduction|same model across all ranks")
_RECOMPUTED = re.compile(r"CheckpointError|recomputation|recomputed values", re.IGNORECASE)
_IN_BACKWARD = re.compile(r"modified by an inplace operation|backward through the graph|returned nan values")
_CALLS_BACKWARD = re.compile(r"\bbackward\(|\.grad\(")


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change to a launch that makes a rerun show more, such as anomaly detection in autograd."""

    name: str  # a SecondRun, or a name that only this program knows
    description: str
    env: tuple[tuple[str, str], ...] = ()  # additional environment variables
    program: tuple[str, ...] = ()  # the new command line; empty: the command line does not change
    backend: str | None = None  # the new backend; None: the backend does not change
    setting: tuple[str, str] | None = None  # the change as a scenario key with its value, if there is one


NAMES = Change(name=SecondRun.NAMES, description=f"{_DEBUG}=INFO", env=((_DEBUG, "INFO"),))
ANOMALY = Change(name=SecondRun.ANOMALY, description="autograd's anomaly detection", env=((protocol.ENV_ANOMALY, "1"),))
CHECKPOINT_DEBUG = Change(
    name=SecondRun.CHECKPOINT_DEBUG, description="checkpoint's debug mode", env=((protocol.ENV_CHECKPOINT_DEBUG, "1"),)
)
LAUNCH_BLOCKING = Change(
    name=SecondRun.LAUNCH_BLOCKING, description="CUDA_LAUNCH_BLOCKING=1", env=(("CUDA_LAUNCH_BLOCKING", "1"),)
)
GROWTH = Change(
    name=SecondRun.GROWTH,
    description="tracemalloc, and the objects alive after two steps",
    env=((protocol.ENV_GROWTH, "1"),),
)
AGAIN = Change(name=SecondRun.AGAIN, description="no change, with the same seed")
RECORDED = Change(
    name=SecondRun.RECORDED,
    description="recorded statements and values",
    env=((protocol.ENV_RECORD, json.dumps({"values": True, "experiment": None})),),
)

_ANY_PROGRAM = (RECORDED, NAMES, CHECKPOINT_DEBUG, ANOMALY, LAUNCH_BLOCKING)
# Reruns for findings that are noted in addition to the verdict, even if the run passed.
_FOR_NOTES = (GROWTH,)


def next_change(
    spec: RunSpec,
    outcome: Outcome,
    earlier_changes: Collection[str],
    *,
    probe: str,
    program_changes: Sequence[Change] = (),
) -> Change | None:
    """Return the change for the next diagnostic rerun, or None if no rerun would help.

    `outcome` is the final attempt of `spec`. `earlier_changes` are the names of the changes of earlier reruns.
    `program_changes` are changes that the program supports on its own command line; they replace changes with the same
    name. `probe` is how much of the probe was active in the ranks.
    """
    if len(earlier_changes) >= MAX_RERUNS:
        return None
    requested = {run for finding in outcome.findings for run in row_of(finding.code).second_run or ()}
    for_notes = (change for change in _FOR_NOTES if change.name in requested and change.name not in earlier_changes)
    if (
        for_note := next((change for change in for_notes if _is_possible(change, spec, outcome, probe)), None)
    ) is not None:
        return for_note
    cause_reruns = row_of(outcome.verdict.cause).second_run
    if outcome.verdict.status not in (Status.FAIL, Status.HANG) or cause_reruns is None:
        return None
    # A recorded run also shows whether the failure happens again.
    again = () if SecondRun.RECORDED in earlier_changes else (AGAIN,)
    changes = {change.name: change for change in (*_ANY_PROGRAM, *program_changes, *again)}
    suggested = (changes[run] for run in _suggested_reruns(outcome, cause_reruns, changes) if run in changes)
    possible = (
        change
        for change in suggested
        if change.name not in earlier_changes and _is_possible(change, spec, outcome, probe)
    )
    return next(possible, None)


def with_change(spec: RunSpec, change: Change, attempt: int) -> RunSpec:
    """Return the launch with this change, as a rerun of `attempt` that need not show the findings it investigates."""
    expected_findings = tuple(
        finding for finding in spec.expect.findings if change.name not in (row_of(finding).second_run or ())
    )
    env = {**dict(spec.env), **dict(change.env)}
    settings = dict(spec.settings) | {f"run.env.{name}": value for name, value in change.env}
    settings |= dict([change.setting]) if change.setting else {}
    return replace(
        spec,
        program=change.program or spec.program,
        env=tuple(sorted(env.items())),
        backend=change.backend or spec.backend,
        expect=replace(spec.expect, findings=expected_findings),
        settings=tuple(sorted(settings.items())),
        notes=(*spec.notes, f"diagnostic rerun of attempt {attempt}: {change.description}"),
        spec_hash=hashlib.sha256(f"{spec.spec_hash} deeper {change.name}".encode()).hexdigest()[:12],
        deepening=DiagnosticRerun(of=attempt, change=str(change.name), says=change.description),
    )


def is_recorded(spec: RunSpec) -> bool:
    """Return whether each rank of a launch records its statements."""
    return protocol.ENV_RECORD in dict(spec.env)


def is_experiment(spec: RunSpec) -> bool:
    """Return whether an experiment changes what the ranks of a recorded launch do."""
    try:
        return bool(json.loads(dict(spec.env)[protocol.ENV_RECORD])["experiment"])
    except (ValueError, KeyError, TypeError):
        return False


def recording_change(*, values: bool, experiment: Mapping[str, object] | None = None, description: str = "") -> Change:
    """Return a change that makes ranks record statements, with `values` or for an `experiment`, if given."""
    settings = json.dumps({"values": values, "experiment": experiment})
    return replace(RECORDED, env=((protocol.ENV_RECORD, settings),), description=description or RECORDED.description)


def _suggested_reruns(outcome: Outcome, cause_reruns: Sequence[SecondRun], all_changes: Iterable[str]) -> Iterator[str]:
    """Yield the names of useful reruns, with the most useful first."""
    if _BY_INDEX.search(outcome.verdict.summary):
        yield SecondRun.NAMES
    if _RECOMPUTED.search(outcome.verdict.summary):
        yield SecondRun.CHECKPOINT_DEBUG
    yield from cause_reruns
    if min((finding.confidence for finding in outcome.findings[:1]), default=0.0) < CERTAIN:
        yield from all_changes


def _failed_in_backward(outcome: Outcome) -> bool:
    place = outcome.culprit.place if outcome.culprit else None
    statement = (place.text or "").splitlines()[-1:] if place else []
    calls_backward = any(map(_CALLS_BACKWARD.search, statement)) or _IN_BACKWARD.search(outcome.verdict.summary)
    return outcome.phase == "backward" or bool(calls_backward)


def _names_parameter(outcome: Outcome) -> bool:
    place = outcome.culprit.place if outcome.culprit else None
    return place is not None and place.parameter is not None


def _is_possible(change: Change, spec: RunSpec, outcome: Outcome, probe: str) -> bool:
    """Return whether this change can be applied to the launch and could explain its failure."""
    env, has_failed = dict(spec.env), outcome.verdict.status is Status.FAIL
    if change.program == spec.program:
        return False
    match change.name:
        case SecondRun.RECORDED:
            return probe == protocol.PROBE_FULL and protocol.ENV_RECORD not in env and ranks_part(outcome, spec.ranks)
        case SecondRun.NAMES:
            return has_failed and spec.ranks > 1 and env.get(_DEBUG, "OFF") == "OFF" and not _names_parameter(outcome)
        case SecondRun.ANOMALY:
            possible = protocol.ENV_ANOMALY not in env and (probe != protocol.PROBE_OFF or bool(change.program))
            return has_failed and possible and _failed_in_backward(outcome)
        case SecondRun.CHECKPOINT_DEBUG:
            is_mismatch = outcome.verdict.cause == Cause.CHECKPOINT_RECOMPUTE_MISMATCH
            is_about_recomputation = is_mismatch or _RECOMPUTED.search(outcome.verdict.summary)
            return has_failed and probe != protocol.PROBE_OFF and bool(is_about_recomputation)
        case SecondRun.GROWTH:
            return probe == protocol.PROBE_FULL and protocol.ENV_GROWTH not in env
        case SecondRun.LAUNCH_BLOCKING:
            return spec.device == "cuda" and "CUDA_LAUNCH_BLOCKING" not in env
    return True


class _RerunEnd(StrEnum):
    """The way a diagnostic rerun ended, compared with the original run."""

    PASSED = "passed"
    SAME = "the same"
    OTHERWISE = "otherwise"


def with_diagnostic_reruns(outcomes: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """Return the outcomes with a finding, and perhaps the culprit's line, from each diagnostic rerun."""
    return tuple(_with_rerun_findings(outcome, outcomes) for outcome in outcomes)


def rerun_finding(outcome: Outcome, rerun_outcome: Outcome) -> Finding:
    """Return a finding that says what a diagnostic rerun shows about the original run."""
    rerun = rerun_outcome.spec.deepening
    assert rerun is not None
    own_finding = _own_finding(rerun_outcome)
    end = _compare_ends(outcome, rerun_outcome)
    return make_finding(
        Cause.DEEPENED,
        {
            "variant": "rerun",
            "change": rerun.change,
            "changed": rerun.says,
            "attempt": rerun_outcome.attempt,
            "shown": own_finding.claim if own_finding else "",
            "shown_advice": own_finding.advice if own_finding else "",
            "ended": end.value,
            "verdict": rerun_outcome.verdict.status.value,
            "cause": rerun_outcome.verdict.cause or "",
            "line_before": outcome.culprit.place if outcome.culprit else None,
            "line_now": rerun_outcome.culprit.place if rerun_outcome.culprit else None,
            "losses": _losses(outcome, rerun_outcome) if rerun.change == SecondRun.AGAIN else None,
            "repeat": rerun_outcome.repeat_command or "",
        },
        ranks=own_finding.ranks if own_finding else (),
        place=own_finding.place if own_finding else None,
        # One pair of runs makes the finding likely, but not certain. Only an experiment proves an origin.
        evidence=EvidenceKind.RECORD
        if own_finding and end is _RerunEnd.SAME and rerun.change != SecondRun.RECORDED
        else EvidenceKind.OPEN,
        proof=own_finding.proof
        if own_finding
        else ((f"{rerun_outcome.dir}/verdict.json",) if rerun_outcome.dir else ()),
    )


def _with_rerun_findings(outcome: Outcome, outcomes: Sequence[Outcome]) -> Outcome:
    reruns = sorted(
        (finding for finding in outcomes if _is_rerun_of(finding, outcome)), key=lambda finding: finding.attempt
    )
    noted_attempts = {finding.facts.get("attempt") for finding in outcome.findings if finding.code == Cause.DEEPENED}
    new_findings = [(rerun, rerun_finding(outcome, rerun)) for rerun in reruns if rerun.attempt not in noted_attempts]
    if not new_findings:
        return outcome
    place = next(
        (
            finding.place
            for rerun, finding in new_findings
            if finding.place and _compare_ends(outcome, rerun) is _RerunEnd.SAME
        ),
        None,
    )
    return replace(
        outcome,
        findings=(*outcome.findings, *(finding for _, finding in new_findings)),
        culprit=_with_place(outcome.culprit, place),
    )


def _is_rerun_of(candidate: Outcome, outcome: Outcome) -> bool:
    rerun = candidate.spec.deepening
    if rerun is None or outcome.spec.deepening is not None:
        return False
    return (candidate.spec.scenario, rerun.of) == (outcome.spec.scenario, outcome.attempt)


def _own_finding(rerun_outcome: Outcome) -> Finding | None:
    return next((finding for finding in rerun_outcome.findings if finding.code == Cause.DEEPENED), None)


def _compare_ends(outcome: Outcome, rerun_outcome: Outcome) -> _RerunEnd:
    if Status.PASS is rerun_outcome.verdict.status is not outcome.verdict.status:
        return _RerunEnd.PASSED
    is_same = (outcome.verdict.status, outcome.verdict.cause) == (
        rerun_outcome.verdict.status,
        rerun_outcome.verdict.cause,
    )
    rerun = rerun_outcome.spec.deepening
    if rerun and rerun.change == "checkpoint_debug" and _own_finding(rerun_outcome):
        # In checkpoint's debug mode, PyTorch raises the same mismatch with another message.
        is_same = outcome.verdict.status == rerun_outcome.verdict.status
    return _RerunEnd.SAME if is_same else _RerunEnd.OTHERWISE


def _losses(outcome: Outcome, rerun_outcome: Outcome) -> Facts | None:
    before, now = (run.metrics.get("loss_last") for run in (outcome, rerun_outcome))
    return None if before is None or now is None else {"before": before, "now": now}


def _with_place(culprit: Culprit | None, place: Place | None) -> Culprit | None:
    """Return the culprit with its location replaced. Fields that the new location lacks are kept."""
    if culprit is None or place is None:
        return culprit
    old_place = culprit.place or Place()
    if place.file is None:
        new_place = replace(old_place, module=place.module, layer=place.layer, parameter=place.parameter)
    else:
        new_place = replace(old_place, file=place.file, line=place.line, function=place.function, text=place.text)
    return replace(culprit, place=new_place)
