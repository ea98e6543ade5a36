"""Parse what the commands of Slurm print. Every function is pure, and text that makes no sense is no error."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nsa_harness.engine.interface import JobState, JobStatus
from nsa_harness.engine.slurm_reasons import NO_REASON, reason_text

_STATES = {
    "PENDING": JobState.PENDING,
    "CONFIGURING": JobState.PENDING,  # the nodes are being booted
    "RESV_DEL_HOLD": JobState.PENDING,
    "POWER_UP_NODE": JobState.PENDING,
    "RUNNING": JobState.RUNNING,
    "COMPLETING": JobState.RUNNING,  # its processes are being ended
    "SUSPENDED": JobState.RUNNING,
    "STOPPED": JobState.RUNNING,
    "SIGNALING": JobState.RUNNING,
    "STAGE_OUT": JobState.RUNNING,
    "RESIZING": JobState.RUNNING,
    "COMPLETED": JobState.COMPLETED,
    "FAILED": JobState.FAILED,
    "TIMEOUT": JobState.TIMEOUT,
    "DEADLINE": JobState.TIMEOUT,
    "NODE_FAIL": JobState.NODE_FAIL,
    "BOOT_FAIL": JobState.NODE_FAIL,
    "LAUNCH_FAILED": JobState.NODE_FAIL,
    "RECONFIG_FAIL": JobState.NODE_FAIL,
    "PREEMPTED": JobState.PREEMPTED,
    "OUT_OF_MEMORY": JobState.OUT_OF_MEMORY,
    "CANCELLED": JobState.CANCELLED,
    "REVOKED": JobState.CANCELLED,
    "REQUEUED": JobState.REQUEUED,
    "REQUEUE_HOLD": JobState.REQUEUED,
    "REQUEUE_FED": JobState.REQUEUED,
    "SPECIAL_EXIT": JobState.REQUEUED,
}
_ENDINGS = {
    JobState.TIMEOUT: "Slurm ended the job at its time limit",
    JobState.NODE_FAIL: "a node of the job failed",
    JobState.PREEMPTED: "Slurm ended the job for one with a higher priority",
    JobState.OUT_OF_MEMORY: "Slurm ended the job because it used more memory than it asked for",
    JobState.CANCELLED: "somebody cancelled the job",
    JobState.REQUEUED: "Slurm put the job back into the queue",
}
_FIELD = re.compile(
    r"(?:^|\s)(JobId|ArrayJobId|ArrayTaskId|JobState|Reason|ExitCode|NodeList|Restarts)=(\S*)", re.MULTILINE
)


@dataclass(frozen=True, kw_only=True)
class _Record:
    """One job, or one task of a job array."""

    state: JobState
    reason: str
    exit_code: int | None
    nodes: str


def parse_job_id(text: str) -> str | None:
    """Return the job's id from what `sbatch --parsable` prints, such as "17" or "17;cluster", or None."""
    lines = [line for line in text.splitlines() if re.fullmatch(r"[0-9]+(;\S+)?", line.strip())]
    return lines[-1].strip().partition(";")[0] if lines else None


def parse_show_job(text: str, job_id: str) -> JobStatus | None:
    """Return the state of a job from what `scontrol show job -o` prints, or None if the job is not in it.

    `job_id` is the id of a job, of a job array (17), or of one task of an array (17_3). The state of an array is
    running as long as one of its tasks runs, and its end is the worst end of a task.
    """
    return _combined(list(_shown_records(text, job_id)))


def _shown_records(text: str, job_id: str) -> Iterator[_Record]:
    wanted_job, _, wanted_task = job_id.partition("_")
    for line in text.splitlines():
        fields = dict(_FIELD.findall(line))
        state = _STATES.get(fields.get("JobState", ""))
        is_wanted = wanted_job in (fields.get("ArrayJobId"), fields.get("JobId"))
        if wanted_task and not _has_task(fields.get("ArrayTaskId", ""), wanted_task):
            is_wanted = False
        if state is not None and is_wanted:
            yield _Record(
                state=state,
                reason=fields.get("Reason", ""),
                exit_code=_exit_code(fields.get("ExitCode", "")),
                nodes="" if fields.get("NodeList", "") in NO_REASON else fields["NodeList"],
            )


def _has_task(tasks: str, wanted: str) -> bool:
    """Return whether a number is in a list of tasks, such as "1,4-7%2"."""
    for part in tasks.partition("%")[0].split(","):
        first, _, last = part.partition("-")
        if part == wanted or (first.isdigit() and last.isdigit() and int(first) <= int(wanted) <= int(last)):
            return True
    return False


def parse_sacct(text: str, job_id: str) -> JobStatus | None:
    """Return the state of a job from what `sacct -X -P -n -o JobID,State,ExitCode,NodeList` prints, or None."""
    records: list[_Record] = []
    for line in text.splitlines():
        name, state, exit_code, nodes = (*line.split("|"), "", "", "", "")[:4]
        known = _STATES.get(state.partition(" ")[0])  # "CANCELLED by 1000"
        if known is not None and (name == job_id or name.startswith(f"{job_id}_")):
            nodes = "" if nodes in NO_REASON else nodes
            record = _Record(state=known, reason="", exit_code=_exit_code(exit_code), nodes=nodes)
            if name == job_id:
                records = []  # a requeued job has several lines, of which the last one counts
            records.append(record)
    return _combined(records)


def _combined(records: Sequence[_Record]) -> JobStatus | None:
    if not records:
        return None
    worst = sorted(records, key=lambda record: _severity(record.state))[-1]
    return JobStatus(
        state=worst.state,
        reason=reason_text(worst.reason) if worst.state is JobState.PENDING else _ENDINGS.get(worst.state, ""),
        exit_code=worst.exit_code if worst.state.has_ended else None,
        nodes=",".join(dict.fromkeys(record.nodes for record in records if record.nodes)),
    )


def _severity(state: JobState) -> int:
    if state is JobState.RUNNING:
        return 4
    if state is JobState.PENDING:
        return 3
    return {JobState.COMPLETED: 0, JobState.FAILED: 1}.get(state, 2)


def _exit_code(text: str) -> int | None:
    """Return the exit status from "7:0", or -15 from "0:15", which stands for a signal."""
    match = re.fullmatch(r"([0-9]+):([0-9]+)", text)
    if match is None:
        return None
    return -int(match[2]) if int(match[2]) else int(match[1])
