"""Flakiness: what several attempts of one launch say together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from harness.core.compared.same_place import same_place
from harness.core.diagnosed.causes import Cause
from harness.core.report import Outcome, Status, Verdict

_SAYS_SOMETHING = frozenset({Status.PASS, Status.FAIL, Status.HANG})  # SKIP and ERROR tell nothing of the program


def with_flakiness(outcomes: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """The outcomes, in their order, with `final`, `flaky` and `expected` as all attempts together say.

    The last attempt of a scenario counts, and says whether all of one launch ended at the same place. Where they
    disagree, all are flaky and the one that counts is FAIL, cause `flaky`; an ERROR stays one. A deeper look is no
    repetition: it counts only where nothing else does. Applied twice it changes nothing more.
    """
    return tuple(_seen_together(outcome, outcomes) for outcome in outcomes)


def repetitions(attempts: Sequence[Outcome]) -> Sequence[Outcome]:
    """Without the deeper looks, unless there is nothing else: one of them run again by itself is a run like any."""
    return [one for one in attempts if one.deepening is None] or attempts


def _seen_together(outcome: Outcome, outcomes: Sequence[Outcome]) -> Outcome:
    attempts = repetitions([other for other in outcomes if other.scenario == outcome.scenario])
    if outcome not in attempts:
        return replace(outcome, final=False, flaky=False)
    last = max(attempts, key=lambda other: other.attempt)
    final = outcome.attempt == last.attempt
    same = [other for other in attempts if other.spec_hash == outcome.spec_hash]
    flaky = _disagree(same)
    outcome = _placed(outcome, same) if final else outcome
    if not (final and flaky) or outcome.verdict.status not in _SAYS_SOMETHING or outcome.verdict.cause == Cause.FLAKY:
        return replace(outcome, final=final, flaky=flaky)
    verdict = Verdict(status=Status.FAIL, kind=None, cause=Cause.FLAKY, summary=_summary(same))
    return replace(outcome, final=final, flaky=flaky, verdict=verdict, expected=_announced(outcome))


def _placed(outcome: Outcome, same: Sequence[Outcome]) -> Outcome:
    """Once told it stays told: the verdict of a flaky attempt no longer says how it ended itself."""
    found = same_place(same)
    if found is None or any(one.code == found.code for one in outcome.findings):
        return outcome
    return replace(outcome, findings=(*outcome.findings, found))


def _disagree(attempts: Iterable[Outcome]) -> bool:
    told = [attempt.verdict for attempt in attempts if attempt.verdict.status in _SAYS_SOMETHING]
    return len({verdict.status for verdict in told}) > 1 or any(verdict.cause == Cause.FLAKY for verdict in told)


def _summary(attempts: Iterable[Outcome]) -> str:
    told = sorted(attempts, key=lambda attempt: attempt.attempt)
    return "the same launch ended differently: " + ", ".join(
        f"attempt {attempt.attempt} {attempt.verdict.status.value}" for attempt in told
    )


def _announced(outcome: Outcome) -> bool:
    wanted = dict(outcome.criteria)
    return wanted.get("expect.verdict") == Status.FAIL and wanted.get("expect.cause") in (None, Cause.FLAKY)
