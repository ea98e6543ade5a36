"""Summarize the reports of many CI jobs, and compare a night with earlier nights."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from nsa_harness.core.comparison.history import Entry, FlakeRate, differences, flake_rate
from nsa_harness.core.experiment.statistics import passes_to_show
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


# The comparison with earlier nights.

Key = tuple[str, str]  # a job and a scenario
Nights = Mapping[Key, Sequence[Entry]]  # the attempts of each, the oldest first

_MOST_ENTRIES = 40  # per job and scenario; older ones are forgotten
_CONFIDENCE = 0.95  # with which a flaky scenario is said to fail more often than before


class Group(StrEnum):
    """The groups of outcomes of a night, by comparison with the earlier nights."""

    NEW = "new_failures"
    FLAKY = "flaky"
    STILL = "still_failing"
    FIXED = "fixed"


@dataclass(frozen=True, kw_only=True)
class News:
    """An outcome of this night that belongs to a group, and the jobs in which the scenario ended in this way."""

    outcome: Outcome
    jobs: tuple[str, ...]
    commit: str  # of this night; empty if unknown
    last_good: Entry | None  # None: no earlier night is known in which it was as expected
    changed: tuple[tuple[str, str, str], ...]  # (name, before, after) of each difference since the last good night
    rate: FlakeRate | None  # of all attempts with these settings; None if all of them ended in the same way

    @property
    def good_commit(self) -> str:
        """The commit of the last good night, or "" if it is unknown or the same as that of this night."""
        commit = _commit(self.last_good) if self.last_good else ""
        return commit if commit != self.commit else ""


@dataclass(frozen=True, kw_only=True)
class NightComparison:
    """The changes since the last night, and the attempts that the next comparison needs."""

    last_night: str  # the run ID of its latest run; empty if no earlier night is known
    groups: Mapping[Group, tuple[News, ...]]
    nights: Nights  # for the next comparison


def compare_nights(summary: NightSummary, tonight: Nights, earlier: Nights) -> NightComparison:
    """Compare the night with all earlier ones. A failure belongs to exactly one group, and a skipped scenario to none.

    `tonight` and `earlier`: the attempts of this night and of the earlier nights.
    """
    groups: dict[Group, list[News]] = {group: [] for group in Group}
    bad = surprises(summary)
    for job, outcome in (*bad, *(item for item in summary.outcomes() if item not in bad)):
        key = (job, outcome.spec.scenario)
        before, now = _that_ran(earlier.get(key, ())), _that_ran(tonight.get(key, ()))
        group = _group(outcome, before, now, is_bad=(job, outcome) in bad)
        if group is not None:
            groups[group].append(_news(job, outcome, before, now))
    return NightComparison(
        last_night=max((entry.run_id for entries in earlier.values() for entry in entries), default=""),
        groups={group: tuple(news) if group is Group.FLAKY else _grouped(news) for group, news in groups.items()},
        nights={
            key: (*earlier.get(key, ()), *tonight.get(key, ()))[-_MOST_ENTRIES:]
            for key in dict.fromkeys((*earlier, *tonight))
        },
    )


def _group(outcome: Outcome, before: Sequence[Entry], now: Sequence[Entry], *, is_bad: bool) -> Group | None:
    was_bad = bool(before) and not before[-1].expected
    if is_bad and outcome.flaky:
        return Group.FLAKY
    if not is_bad and not (was_bad and now):
        return None
    if now and is_flaky([*before, *now]):
        return Group.FLAKY
    if not is_bad:
        return Group.FIXED
    is_known = was_bad and now and before[-1].result == now[-1].result and not is_flaky(before)
    return Group.STILL if is_known else Group.NEW


def is_flaky(entries: Sequence[Entry]) -> bool:
    """Return whether the attempts show that the result is a matter of chance.

    One commit gave both results under the same circumstances, or the same failure came back after it had gone. But the
    failure is no longer a matter of chance if the latest attempts failed more often in a row than such a rate explains.
    """
    streak = len(list(itertools.takewhile(lambda entry: not entry.expected, reversed(entries))))
    rest = entries[: len(entries) - streak]
    good = sum(entry.expected for entry in rest)
    if streak and streak >= passes_to_show(good, len(rest), _CONFIDENCE) and rest:
        return False
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        commit = _commit(entry)
        groups.setdefault(commit or entry.run_id, []).append(_without(entry, "host"))
    begins = [after.result for before, after in itertools.pairwise(entries) if before.expected and not after.expected]
    return len(set(begins)) < len(begins) or any(flake_rate(group) is not None for group in groups.values())


def _that_ran(entries: Sequence[Entry]) -> list[Entry]:
    """Return the attempts without skipped ones. An attempt that could not be judged never counts as expected."""
    return [
        replace(entry, expected=False) if entry.verdict == Status.ERROR.value else entry
        for entry in entries
        if entry.verdict != Status.SKIP.value
    ]


def _without(entry: Entry, *names: str) -> Entry:
    kept = {name: value for name, value in entry.surroundings.items() if name not in names}
    return replace(entry, surroundings=kept)


def _commit(entry: Entry) -> str:
    """Return the commit of an attempt, or "" if it is unknown or if the checkout had changes."""
    commit = entry.surroundings.get("commit", "")
    return "" if " " in commit else commit


def _news(job: str, outcome: Outcome, before: Sequence[Entry], now: Sequence[Entry]) -> News:
    good = next((entry for entry in reversed(before) if entry.expected), None)
    moving = ("host", "commit")
    return News(
        outcome=outcome,
        jobs=(job,),
        commit=_commit(now[-1]) if now else "",
        last_good=good,
        changed=tuple(item for item in differences(good, now[-1]) if item[0] not in moving) if good and now else (),
        rate=flake_rate([_without(entry, *moving) for entry in (*before, *now)]),
    )


def _grouped(news: Iterable[News]) -> tuple[News, ...]:
    """Combine the jobs in which a scenario ended in the same way."""
    groups: dict[object, News] = {}
    for item in news:
        verdict, culprit = item.outcome.verdict, item.outcome.culprit
        place = culprit.place if culprit else None
        line = (place.file, place.line) if place else None
        key = (item.outcome.spec.scenario, verdict.status, verdict.cause, line)
        known = groups.get(key)
        groups[key] = item if known is None else replace(known, jobs=known.jobs + item.jobs)
    return tuple(groups.values())
