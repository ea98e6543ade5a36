"""Summarize the reports of many CI jobs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from nsa_harness.core.report import MachineFacts, Outcome, Report, Status, counts, exit_code

NOT_JUDGED = 125
_WORST_FIRST = (Status.HANG, Status.FAIL, Status.PASS, Status.ERROR, Status.SKIP)  # as the exit code weighs them


@dataclass(frozen=True, kw_only=True)
class JobReport:
    """A report on runs, with the name of the CI job that stored it."""

    job: str
    file: str
    report: Report


@dataclass(frozen=True, kw_only=True)
class UnreadFile:
    """A report file that is missing or cannot be read, and the reason."""

    file: str
    why: str


@dataclass(frozen=True, kw_only=True)
class JobSummary:
    """A summary of all runs in one CI job, which is given exit code 125 if it has no report."""

    job: str
    outcomes: tuple[Outcome, ...]
    machines: tuple[MachineFacts, ...]
    interrupted: bool
    exit_code: int
    remark: str  # why this job is red, or empty

    @property
    def is_red(self) -> bool:
        return self.exit_code != 0


@dataclass(frozen=True, kw_only=True)
class NightSummary:
    """A summary of all jobs in a nightly CI run."""

    jobs: tuple[JobSummary, ...]
    missing: tuple[str, ...]  # expected jobs without a report
    unread: tuple[UnreadFile, ...]
    exit_code: int
    reasons: tuple[str, ...]

    def outcomes(self) -> Iterator[tuple[str, Outcome]]:
        """Yield each final outcome, preceded by the name of its job."""
        for job in self.jobs:
            yield from ((job.job, outcome) for outcome in job.outcomes if outcome.final)


@dataclass(frozen=True, kw_only=True)
class SkipReason:
    """A scenario that several jobs skipped for the same reason."""

    scenario: str
    reason: str
    jobs: tuple[str, ...]


def night_summary(
    reports: Sequence[JobReport],
    unread: Sequence[UnreadFile] = (),
    expected_jobs: Sequence[str] = (),
    may_fail: Collection[str] = (),
) -> NightSummary:
    """Summarize all reports of a nightly CI run.

    `expected_jobs`: jobs that should have stored a report, if known. `may_fail`: jobs that never make the night red.
    """
    by_job: dict[str, list[Report]] = {name: [] for name in expected_jobs}
    for item in reports:
        by_job.setdefault(item.job, []).append(item.report)
    jobs = [_job_summary(name, of_job) for name, of_job in by_job.items()]
    missing = tuple(job.job for job in jobs if not job.machines)
    counted = [item.report for item in reports if item.job not in may_fail]
    code = exit_code(_merge(counted)) if counted or not reports else 0
    reasons = tuple(
        _reasons(
            [job for job in jobs if job.job not in may_fail], [job for job in missing if job not in may_fail], unread
        )
    )
    # A missing or unreadable report was not judged, even if all others passed.
    return NightSummary(
        jobs=tuple(jobs),
        missing=missing,
        unread=tuple(unread),
        exit_code=NOT_JUDGED if reasons and code == 0 else code,
        reasons=reasons,
    )


def surprises(summary: NightSummary) -> tuple[tuple[str, Outcome], ...]:
    """Return, for each unexpected outcome, the name of its job and the outcome, worst first."""
    items = [item for item in summary.outcomes() if _is_surprising(item[1])]
    return tuple(sorted(items, key=lambda item: _WORST_FIRST.index(item[1].verdict.status)))


def skip_reasons(summary: NightSummary) -> tuple[SkipReason, ...]:
    skips: dict[tuple[str, str], list[str]] = {}
    for job, outcome in summary.outcomes():
        if outcome.verdict.status is Status.SKIP:
            skips.setdefault((outcome.spec.scenario, outcome.verdict.summary), []).append(job)
    return tuple(
        SkipReason(scenario=scenario, reason=reason, jobs=tuple(jobs)) for (scenario, reason), jobs in skips.items()
    )


def _is_surprising(outcome: Outcome) -> bool:
    return not outcome.expected or outcome.verdict.status is Status.ERROR


def _job_summary(name: str, reports: Sequence[Report]) -> JobSummary:
    whole = _merge(reports)
    return JobSummary(
        job=name,
        outcomes=whole.outcomes,
        machines=tuple(dict.fromkeys(report.machine for report in reports)),
        interrupted=whole.interrupted,
        exit_code=exit_code(whole),
        remark=_remark(whole, has_report=bool(reports)),
    )


def _remark(whole: Report, *, has_report: bool) -> str:
    if not has_report:
        return "left no report"
    if not whole.outcomes:
        return "judged nothing" + (", interrupted" if whole.interrupted else "")
    if whole.interrupted:
        return "interrupted"
    if _all_skipped(whole.outcomes):
        return "everything was skipped"
    surprising = counts([outcome for outcome in whole.outcomes if _is_surprising(outcome)])
    return ", ".join(_unexpected_text(status, number) for status, number in surprising.items() if number)


def _unexpected_text(status: Status, number: int) -> str:
    return f"{number} ERROR" if status is Status.ERROR else f"{number} unexpected {status.value}"


def _merge(reports: Sequence[Report]) -> Report:
    return Report(
        run_id="",
        harness="",
        machine=MachineFacts(host="", cpus=0, gpus=(), torch=None),
        command="",
        interrupted=any(report.interrupted for report in reports),
        outcomes=tuple(outcome for report in reports for outcome in report.outcomes),
    )


def _all_skipped(outcomes: Sequence[Outcome]) -> bool:
    return all(outcome.verdict.status is Status.SKIP for outcome in outcomes if outcome.final)


def _reasons(jobs: Sequence[JobSummary], missing: Sequence[str], unread: Sequence[UnreadFile]) -> Iterator[str]:
    whole = [outcome for job in jobs for outcome in job.outcomes]
    surprising = counts([outcome for outcome in whole if _is_surprising(outcome)])
    yield from (_unexpected_text(status, surprising[status]) for status in _WORST_FIRST if surprising[status])
    if not jobs:
        yield "no report at all"
    elif whole and _all_skipped(whole):
        yield "everything was skipped"
    else:
        yield from _count_text([job for job in jobs if job.remark == "everything was skipped"], "skipped everything")
    yield from _count_text([job for job in jobs if job.interrupted], "interrupted")
    yield from _count_text([job for job in jobs if job.machines and not job.outcomes], "judged nothing")
    yield from _count_text(missing, "left no report")
    if unread:
        yield f"{len(unread)} file{'s' if len(unread) > 1 else ''} unreadable"


def _count_text(jobs: Sequence[object], text: str) -> Iterator[str]:
    if jobs:
        yield f"{len(jobs)} job{'s' if len(jobs) > 1 else ''} {text}"
