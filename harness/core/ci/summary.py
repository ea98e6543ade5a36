"""The reports of many jobs as one: what happened, what is missing, and the exit code that says so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nsa_harness.core.report import MachineFacts, Outcome, Report, Status, counts, exit_code

NOT_JUDGED = 125
_WORST_FIRST = (Status.HANG, Status.FAIL, Status.PASS, Status.ERROR, Status.SKIP)  # as the exit code weighs them


@dataclass(frozen=True, kw_only=True)
class StoredReport:
    """A report and the job that left it."""

    job: str
    file: str
    report: Report


@dataclass(frozen=True, kw_only=True)
class Unread:
    """A file that holds no report, or a place where one should be; never counted as anything else."""

    file: str
    why: str


@dataclass(frozen=True, kw_only=True)
class JobSummary:
    """Every run of one job together. Without a report there is no machine, and the exit code is 125."""

    job: str
    outcomes: tuple[Outcome, ...]
    machines: tuple[MachineFacts, ...]
    interrupted: bool
    exit_code: int
    remark: str  # why this job is red; empty when it is not

    @property
    def red(self) -> bool:
        return self.exit_code != 0


@dataclass(frozen=True, kw_only=True)
class NightSummary:
    """All jobs together. `reasons` says why the exit code is not 0, the worst first; empty when it is."""

    jobs: tuple[JobSummary, ...]
    missing: tuple[str, ...]  # jobs of the matrix that left no report
    unread: tuple[Unread, ...]
    exit_code: int
    reasons: tuple[str, ...]

    def outcomes(self) -> Iterator[tuple[str, Outcome]]:
        """Every outcome that counts, with its job."""
        for job in self.jobs:
            yield from ((job.job, outcome) for outcome in job.outcomes if outcome.final)


@dataclass(frozen=True, kw_only=True)
class SkipReason:
    """The same scenario skipped for the same reason, on all its jobs."""

    scenario: str
    reason: str
    jobs: tuple[str, ...]


def night_summary(
    reports: Sequence[StoredReport], unread: Sequence[Unread] = (), expected_jobs: Sequence[str] = ()
) -> NightSummary:
    """`expected_jobs`: the names in the matrix, or nothing where it is unknown which jobs there should be."""
    left: dict[str, list[Report]] = {name: [] for name in expected_jobs}
    for item in reports:
        left.setdefault(item.job, []).append(item.report)
    jobs = [_job(name, found) for name, found in left.items()]
    missing = tuple(job.job for job in jobs if not job.machines)
    code = exit_code(_together([item.report for item in reports]))
    reasons = tuple(_reasons(jobs, missing, unread))
    # What is missing or cannot be read was not judged, however well the rest went.
    return NightSummary(
        jobs=tuple(jobs),
        missing=missing,
        unread=tuple(unread),
        exit_code=NOT_JUDGED if reasons and code == 0 else code,
        reasons=reasons,
    )


def surprises(summary: NightSummary) -> tuple[tuple[str, Outcome], ...]:
    """What nobody expected, worst first."""
    found = [item for item in summary.outcomes() if _surprising(item[1])]
    return tuple(sorted(found, key=lambda item: _WORST_FIRST.index(item[1].verdict.status)))


def skip_reasons(summary: NightSummary) -> tuple[SkipReason, ...]:
    found: dict[tuple[str, str], list[str]] = {}
    for job, outcome in summary.outcomes():
        if outcome.verdict.status is Status.SKIP:
            found.setdefault((outcome.scenario, outcome.verdict.summary), []).append(job)
    return tuple(
        SkipReason(scenario=scenario, reason=reason, jobs=tuple(jobs)) for (scenario, reason), jobs in found.items()
    )


def _surprising(outcome: Outcome) -> bool:
    return not outcome.expected or outcome.verdict.status is Status.ERROR


def _job(name: str, reports: Sequence[Report]) -> JobSummary:
    whole = _together(reports)
    return JobSummary(
        job=name,
        outcomes=whole.outcomes,
        machines=tuple(dict.fromkeys(report.machine for report in reports)),
        interrupted=whole.interrupted,
        exit_code=exit_code(whole),
        remark=_remark(whole, left_a_report=bool(reports)),
    )


def _remark(whole: Report, *, left_a_report: bool) -> str:
    if not left_a_report:
        return "left no report"
    if not whole.outcomes:
        return "judged nothing" + (", interrupted" if whole.interrupted else "")
    if whole.interrupted:
        return "interrupted"
    if _only_skips(whole.outcomes):
        return "everything was skipped"
    found = counts([outcome for outcome in whole.outcomes if _surprising(outcome)])
    return ", ".join(_unexpected(status, number) for status, number in found.items() if number)


def _unexpected(status: Status, number: int) -> str:
    return f"{number} ERROR" if status is Status.ERROR else f"{number} unexpected {status.value}"


def _together(reports: Sequence[Report]) -> Report:
    """One report, so that one rule gives every exit code."""
    return Report(
        run_id="",
        harness="",
        machine=MachineFacts(host="", cpus=0, gpus=(), torch=None),
        command="",
        interrupted=any(report.interrupted for report in reports),
        outcomes=tuple(outcome for report in reports for outcome in report.outcomes),
    )


def _only_skips(outcomes: Sequence[Outcome]) -> bool:
    return all(outcome.verdict.status is Status.SKIP for outcome in outcomes if outcome.final)


def _reasons(jobs: Sequence[JobSummary], missing: Sequence[str], unread: Sequence[Unread]) -> Iterator[str]:
    whole = [outcome for job in jobs for outcome in job.outcomes]
    found = counts([outcome for outcome in whole if _surprising(outcome)])
    yield from (_unexpected(status, found[status]) for status in _WORST_FIRST if found[status])
    if not jobs:
        yield "no report at all"
    elif whole and _only_skips(whole):
        yield "everything was skipped"
    else:
        yield from _counted([job for job in jobs if job.remark == "everything was skipped"], "skipped everything")
    yield from _counted([job for job in jobs if job.interrupted], "interrupted")
    yield from _counted([job for job in jobs if job.machines and not job.outcomes], "judged nothing")
    yield from _counted(missing, "left no report")
    if unread:
        yield f"{len(unread)} file{'s' if len(unread) > 1 else ''} unreadable"


def _counted(jobs: Sequence[object], what: str) -> Iterator[str]:
    if jobs:
        yield f"{len(jobs)} job{'s' if len(jobs) > 1 else ''} {what}"
