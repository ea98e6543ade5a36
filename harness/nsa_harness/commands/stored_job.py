"""The job of an attempt that an engine runs, as the directory of the attempt stores it, and what it says of a run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.explanation import make_finding
from nsa_harness.core.outcome.outcome import unjudged_outcome
from nsa_harness.core.plan import RunSpec
from nsa_harness.core.report import Outcome, Status
from nsa_harness.engine.interface import OUTPUT, JobHandle, JobStatus
from nsa_harness.errors import StoredRunError
from nsa_harness.supervisor.storage.adapters import json_text, type_adapter
from nsa_harness.supervisor.storage.rundir import NODES, AttemptDir, RunDir
from nsa_harness.texts.sentences import with_words

JOB = "job.json"  # in the directory of an attempt: the job, with which any later command finds it again
SHARED = "job"  # the directory that the agents share, until the job has ended
_MAX_BYTES = 1 << 20
_LAST_LINES = 3
_JUDGED = (Status.PASS, Status.HANG)  # verdicts that the end of the job cannot have caused


@dataclass(frozen=True, kw_only=True)
class StoredJob:
    """The contents of job.json."""

    schema: int = 1
    handle: JobHandle
    status: JobStatus | None = None  # None: the job has not ended, or nobody has looked since
    queue_s: float = 0.0  # time in the queue, as it was followed
    cancelled: bool = False  # by nsa-harness, because the user interrupted it


def read_job(attempt: AttemptDir) -> StoredJob | None:
    """Return the job of an attempt, or None if it has none. Raise StoredRunError if job.json is damaged."""
    path = attempt.path / JOB
    try:
        return type_adapter(StoredJob).validate_json(attempt.directory.read_whole_file(path, _MAX_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise StoredRunError(f"{path}: cannot be read: {str(error).partition(chr(10))[0]}") from None


def write_job(attempt: AttemptDir, job: StoredJob) -> None:
    attempt.directory.write(attempt.path / JOB, json_text(job, indent=1) + "\n")


def is_open(attempt: AttemptDir) -> bool:
    """Return whether the job of an attempt may still be in progress, or was perhaps submitted without a record."""
    job = read_job(attempt)
    has_script = any(attempt.directory.list_files(attempt.path, "job.s*"))
    return has_script if job is None else job.status is None


def adopt_evidence(attempt: AttemptDir) -> None:
    """Move what the agents stored into the attempt, so that it is judged like any other attempt."""
    shared = RunDir(attempt.path / SHARED)
    stored = list(shared.attempts())
    if attempt.nodes() or not stored:
        return
    last = stored[-1]
    for record in last.directory.read_records(last.watch):
        if record.get("event") != "spec":
            attempt.append_record(attempt.watch, record)
    with suppress(OSError):
        attempt.directory.move(last.path / NODES, attempt.path / NODES)
        if len(stored) == 1:
            shutil.rmtree(shared.path, ignore_errors=True)


def with_job_state(
    attempt: AttemptDir, spec: RunSpec, number: int, job: StoredJob, judge: Callable[[], Outcome]
) -> Outcome:
    """Return the outcome of a job that has ended. `judge` judges the evidence of the agents.

    If something other than the program ended the job, such as the failure of a node, the verdict is ERROR, unless the
    evidence shows a PASS or proves a HANG.
    """
    status = job.status
    if status is None:
        reason = f"job {job.handle.id} had not ended; nsa-harness run --resume={attempt.path.parent} follows it again"
        return unjudged(spec, attempt, number, reason, Cause.INTERRUPTED)
    outcome = judge() if attempt.nodes() else None
    if outcome is not None and (outcome.verdict.status in _JUDGED or not status.state.is_abnormal):
        return outcome
    output = attempt.directory.read_tail(attempt.path / OUTPUT).strip().splitlines()[-_LAST_LINES:]
    facts = {
        "variant": "job",
        "job": job.handle.id,
        "state": status.state.value,
        "reason": status.reason or f"ended with exit code {status.exit_code}",
        "nodes": status.nodes,
        "started": outcome is not None or status.state.is_abnormal,
        "output": " | ".join(line.strip() for line in output),
    }
    proof = (f"{attempt.path.name}/{JOB}",)
    finding = make_finding(Cause.INFRA, facts, evidence=EvidenceKind.FACT, proof=proof)
    error = replace(unjudged(spec, attempt, number, "", Cause.INFRA), findings=(finding,))
    if outcome is not None:
        error = replace(error, trouble=outcome.trouble, timing=outcome.timing, artifacts=outcome.artifacts)
    (error,) = with_words([error])
    verdict = replace(error.verdict, summary=error.findings[0].claim)
    return attempt.redaction.value(replace(error, verdict=verdict))


def refused(spec: RunSpec, attempt: AttemptDir, number: int, reason: str) -> Outcome:
    """Return the outcome of a job that the engine did not start, because of `reason`."""
    facts = {"variant": "refused job", "reason": reason, "open_files": None}
    finding = make_finding(Cause.INFRA, facts, evidence=EvidenceKind.FACT, proof=())
    (outcome,) = with_words([replace(unjudged(spec, attempt, number, reason, Cause.INFRA), findings=(finding,))])
    verdict = replace(outcome.verdict, summary=outcome.findings[0].claim)
    return attempt.redaction.value(replace(outcome, verdict=verdict, ending_text="nothing was started"))


def unjudged(spec: RunSpec, attempt: AttemptDir, number: int, reason: str, cause: Cause) -> Outcome:
    outcome = unjudged_outcome(spec, attempt=number, directory=attempt.path.name, error=reason, cause=cause)
    return replace(outcome, ending_text=f"see {OUTPUT}")
