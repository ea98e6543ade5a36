"""Flakiness: what several attempts of one launch say together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from harness.core.report import Outcome, Status, Verdict

_SAYS_SOMETHING = frozenset({Status.PASS, Status.FAIL, Status.HANG})  # SKIP and ERROR tell nothing of the program


def with_flakiness(outcomes: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """The outcomes, in their order, with `final`, `flaky` and `expected` as all attempts together say.

    The last attempt of a scenario counts. Where attempts of one launch disagree, all are flaky and the one that counts
    is FAIL, cause `flaky`; an ERROR stays one. Applied twice it changes nothing more.
    """
    return tuple(_seen_together(outcome, outcomes) for outcome in outcomes)


def _seen_together(outcome: Outcome, outcomes: Sequence[Outcome]) -> Outcome:
    attempts = [other for other in outcomes if other.scenario == outcome.scenario]
    last = max(attempts, key=lambda other: other.attempt)
    final = outcome.attempt == last.attempt
    same = [other for other in attempts if other.spec_hash == outcome.spec_hash]
    flaky = _disagree(same)
    if not (final and flaky) or outcome.verdict.status not in _SAYS_SOMETHING or outcome.verdict.cause == "flaky":
        return replace(outcome, final=final, flaky=flaky)
    verdict = Verdict(status=Status.FAIL, kind=None, cause="flaky", summary=_summary(same))
    return replace(outcome, final=final, flaky=flaky, verdict=verdict, expected=_announced(outcome))


def _disagree(attempts: Iterable[Outcome]) -> bool:
    told = [attempt.verdict for attempt in attempts if attempt.verdict.status in _SAYS_SOMETHING]
    return len({verdict.status for verdict in told}) > 1 or any(verdict.cause == "flaky" for verdict in told)


def _summary(attempts: Iterable[Outcome]) -> str:
    told = sorted(attempts, key=lambda attempt: attempt.attempt)
    return "the same launch ended differently: " + ", ".join(
        f"attempt {attempt.attempt} {attempt.verdict.status.value}" for attempt in told
    )


def _announced(outcome: Outcome) -> bool:
    wanted = dict(outcome.criteria)
    return wanted.get("expect.verdict") == Status.FAIL and wanted.get("expect.cause") in (None, "flaky")
