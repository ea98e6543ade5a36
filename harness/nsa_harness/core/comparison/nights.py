"""Compare the CI jobs of one night with earlier nights: what is new, flaky, fixed, or still failing."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from nsa_harness.core.ci import NightSummary, surprises
from nsa_harness.core.comparison.history import Entry, FlakeRate, differences, flake_rate
from nsa_harness.core.experiment.statistics import passes_to_show
from nsa_harness.core.report import Outcome, Place, Status

Key = tuple[str, str]  # a job and a scenario
Nights = Mapping[Key, Sequence[Entry]]  # the attempts of each, the oldest first

_MOST_ENTRIES = 40  # per job and scenario; older ones are forgotten
_CONFIDENCE = 0.95  # with which a flaky scenario is said to fail more often than before


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An unexpected outcome, and the jobs in which the scenario failed in this way."""

    outcome: Outcome
    jobs: tuple[str, ...]
    commit: str  # of this night; empty if unknown
    last_good: Entry | None  # None: no earlier night is known in which it was as expected
    changed: tuple[tuple[str, str, str], ...]  # (name, before, after) of each difference since the last good night

    @property
    def good_commit(self) -> str:
        """The commit of the last good night, or "" if it is unknown or the same as that of this night."""
        commit = _commit(self.last_good) if self.last_good else ""
        return commit if commit != self.commit else ""


@dataclass(frozen=True, kw_only=True)
class Flake:
    """A scenario that sometimes ends as expected, with its outcome of this night. `rate`: None if it is unknown."""

    job: str
    outcome: Outcome
    rate: FlakeRate | None


@dataclass(frozen=True, kw_only=True)
class NightComparison:
    """What changed since the last night."""

    last_night: str  # the run ID of its latest run; empty if no earlier night is known
    new: tuple[Failure, ...]
    flaky: tuple[Flake, ...]
    fixed: tuple[Failure, ...]  # with the outcome of this night
    still: tuple[Failure, ...]
    nights: Nights  # for the next comparison


def compare_nights(summary: NightSummary, tonight: Nights, earlier: Nights) -> NightComparison:
    """Compare the night with all earlier ones. A failure belongs to exactly one group, and a skipped scenario to none.

    `tonight` and `earlier`: the attempts of this night and of the earlier nights.
    """
    new: list[Failure] = []
    still: list[Failure] = []
    fixed: list[Failure] = []
    flaky: list[Flake] = []
    bad = {id(outcome) for _, outcome in surprises(summary)}
    ordered = [*surprises(summary), *(item for item in summary.outcomes() if id(item[1]) not in bad)]
    for job, outcome in ordered:
        key = (job, outcome.spec.scenario)
        before, now = _that_ran(earlier.get(key, ())), _that_ran(tonight.get(key, ()))
        is_bad, was_bad = id(outcome) in bad, bool(before) and not before[-1].expected
        failure = _failure(job, outcome, before, now)
        if (is_bad and outcome.flaky) or ((is_bad or was_bad) and now and is_flaky([*before, *now])):
            flaky.append(Flake(job=job, outcome=outcome, rate=_rate([*before, *now])))
        elif is_bad:
            known = was_bad and now and before[-1].result == now[-1].result and not is_flaky(before)
            (still if known else new).append(failure)
        elif was_bad and now:
            fixed.append(failure)
    ids = [entry.run_id for entries in earlier.values() for entry in entries]
    return NightComparison(
        last_night=max(ids, default=""),
        new=_grouped(new),
        flaky=tuple(flaky),
        fixed=_grouped(fixed),
        still=_grouped(still),
        nights={
            key: (*earlier.get(key, ()), *tonight.get(key, ()))[-_MOST_ENTRIES:]
            for key in dict.fromkeys((*earlier, *tonight))
        },
    )


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


def _rate(entries: Sequence[Entry]) -> FlakeRate | None:
    return flake_rate([_without(entry, "host", "commit") for entry in entries])


def _without(entry: Entry, *names: str) -> Entry:
    kept = {name: value for name, value in entry.surroundings.items() if name not in names}
    return replace(entry, surroundings=kept)


def _commit(entry: Entry) -> str:
    """Return the commit of an attempt, or "" if it is unknown or if the checkout had changes."""
    commit = entry.surroundings.get("commit", "")
    return "" if " " in commit else commit


def _failure(job: str, outcome: Outcome, before: Sequence[Entry], now: Sequence[Entry]) -> Failure:
    good = next((entry for entry in reversed(before) if entry.expected), None)
    return Failure(
        outcome=outcome,
        jobs=(job,),
        commit=_commit(now[-1]) if now else "",
        last_good=good,
        changed=tuple(item for item in differences(good, now[-1]) if item[0] not in ("host", "commit"))
        if good and now
        else (),
    )


def _result(outcome: Outcome) -> str:
    verdict = outcome.verdict
    return f"{verdict.status.value} {verdict.cause}" if verdict.cause else verdict.status.value


def _grouped(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """Combine the failures of several jobs that are the same failure of the same scenario."""
    groups: dict[tuple[str, str, Place | None], Failure] = {}
    for failure in failures:
        outcome = failure.outcome
        line = outcome.culprit.place if outcome.culprit else None
        place = None if line is None else Place(file=line.file, line=line.line)
        key = (outcome.spec.scenario, _result(outcome), place)
        known = groups.get(key)
        groups[key] = failure if known is None else replace(known, jobs=known.jobs + failure.jobs)
    return tuple(groups.values())
