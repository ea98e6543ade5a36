"""Compare the CI jobs of one night with earlier nights: what is new, flaky, fixed, or still failing."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from nsa_harness.core.ci import NightSummary, surprises
from nsa_harness.core.comparison.history import Entry, FlakeRate, differences, flake_rate
from nsa_harness.core.experiment.statistics import passes_to_show
from nsa_harness.core.report import Outcome, Status

Key = tuple[str, str]  # a job and a scenario
Nights = Mapping[Key, Sequence[Entry]]  # the attempts of each, the oldest first

_MOST_ENTRIES = 40  # per job and scenario; older ones are forgotten
_CONFIDENCE = 0.95  # with which a flaky scenario is said to fail more often than before


class Group(StrEnum):
    """What an outcome of this night is, compared with the earlier nights."""

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
    """What changed since the last night."""

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
