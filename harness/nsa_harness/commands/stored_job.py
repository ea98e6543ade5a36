"""The job of an attempt that an engine runs, as the directory of the attempt stores it, and what it says of a run."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.explanation import make_finding
from nsa_harness.core.outcome.outcome import unjudged_outcome
from nsa_harness.core.plan import EngineChoice, RunSpec
from nsa_harness.core.report import Outcome, Status
from nsa_harness.engine.interface import OUTPUT, JobHandle, JobState, JobStatus
from nsa_harness.errors import StoredRunError
from nsa_harness.supervisor.storage.adapters import json_text, type_adapter
from nsa_harness.supervisor.storage.recordings import RECORDINGS
from nsa_harness.supervisor.storage.rundir import NODES, AttemptDir, RunDir, working_directory
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
    has_started: bool = False  # it was seen to run
    cancelled: bool = False  # by nsa-harness, because the user interrupted it
    choice: EngineChoice | None = None  # how the job was requested; None: stored by an old nsa-harness
    refusal: str = ""  # why the engine did not start it


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


def engine_of(attempt: AttemptDir) -> EngineChoice | None:
    """Return the engine that ran an attempt, or None if nsa-harness started the ranks itself."""
    job = read_job(attempt)
    return None if job is None else job.choice


def repeat_command(attempt: AttemptDir, choice: EngineChoice | None) -> str:
    """Return the command that launches an attempt again, on the engine that ran it."""
    return with_engine(f"nsa-harness run {shlex.quote(_relative_path(attempt.spec))}", choice)


def with_engine(command: str, choice: EngineChoice | None) -> str:
    """Return a command of nsa-harness with the options that choose the engine, before the program's arguments."""
    if choice is None:
        return command
    own, separator, arguments = command.partition(" -- ")
    return f"{own} {shlex.join(choice.words)}{separator}{arguments}"


def _relative_path(path: Path) -> str:
    here = working_directory()
    if here is None:
        return str(path)
    absolute = path.resolve()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(absolute)


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
        # The agents have judged the job too, and then removed the files from which recordings are made.
        for recording in last.directory.list_files(last.path, RECORDINGS):
            attempt.directory.make_directory(attempt.path / recording.parent.name)
            attempt.directory.move(recording, attempt.path / recording.parent.name / recording.name)
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
    if job.refusal:
        return refused(spec, attempt, number, job.refusal, job.choice)
    if status is None:
        reason = f"job {job.handle.id} had not ended; nsa-harness run --resume={attempt.path.parent} follows it again"
        return unjudged(spec, attempt, number, reason, Cause.INTERRUPTED, job.choice)
    if job.cancelled and status.state is not JobState.COMPLETED:
        in_queue = "" if job.has_started else " while it waited in the queue"
        reason = f"job {job.handle.id} was cancelled{in_queue}, because nsa-harness was interrupted"
        return unjudged(spec, attempt, number, reason, Cause.INTERRUPTED, job.choice)
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
    error = replace(unjudged(spec, attempt, number, "", Cause.INFRA, job.choice), findings=(finding,))
    if outcome is not None:
        error = replace(error, trouble=outcome.trouble, timing=outcome.timing, artifacts=outcome.artifacts)
    (error,) = with_words([error])
    verdict = replace(error.verdict, summary=error.findings[0].claim)
    return attempt.redaction.value(replace(error, verdict=verdict))


def refused(
    spec: RunSpec, attempt: AttemptDir, number: int, reason: str, choice: EngineChoice | None = None
) -> Outcome:
    """Return the outcome of a job that the engine did not start, because of `reason`."""
    facts = {"variant": "refused job", "reason": reason, "open_files": None}
    finding = make_finding(Cause.INFRA, facts, evidence=EvidenceKind.FACT, proof=())
    error = unjudged(spec, attempt, number, reason, Cause.INFRA, choice)
    (outcome,) = with_words([replace(error, findings=(finding,))])
    verdict = replace(outcome.verdict, summary=outcome.findings[0].claim)
    return attempt.redaction.value(replace(outcome, verdict=verdict, ending_text="nothing was started"))


def unjudged(
    spec: RunSpec,
    attempt: AttemptDir,
    number: int,
    reason: str,
    cause: Cause,
    choice: EngineChoice | None = None,
) -> Outcome:
    """Return an ERROR for a job that could not be judged because of `reason`."""
    outcome = unjudged_outcome(spec, attempt=number, directory=attempt.path.name, error=reason, cause=cause)
    has_output = attempt.directory.read_tail(attempt.path / OUTPUT).strip()
    ending_text = f"see {attempt.path.name}/{OUTPUT}" if has_output else "the job printed nothing"
    return replace(outcome, ending_text=ending_text, repeat_command=repeat_command(attempt, choice))
