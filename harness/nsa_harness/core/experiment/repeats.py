"""Combine several attempts of one launch into a single result, and detect flaky programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.explanation import make_finding
from nsa_harness.core.outcome.wording import location
from nsa_harness.core.report import Facts, Finding, Outcome, Place, Status, Verdict

_BAD = {Status.HANG: "hangs", Status.FAIL: "fails"}
_MAX_PLACES = 3


def same_place_finding(attempts: Sequence[Outcome]) -> Finding | None:
    """Return a finding with the lines at which several attempts of a launch failed, or None if none is known."""
    by_attempt = sorted(attempts, key=lambda attempt: attempt.attempt)
    judged_attempts = [attempt for attempt in by_attempt if attempt.verdict.status in (Status.PASS, *_BAD)]
    failures = [attempt for attempt in judged_attempts if attempt.verdict.status in _BAD]
    located_attempts = [attempt for attempt in failures if location(_place(attempt))]
    if len(judged_attempts) < 2 or not located_attempts:
        return None
    ends = Counter((location(_place(attempt)), attempt.verdict.status) for attempt in located_attempts)
    (first, most), *others = sorted(ends.items(), key=lambda end: (-end[1], end[0]))
    places = {location(_place(attempt)): _place(attempt) for attempt in reversed(located_attempts)}
    other_places: list[Facts] = [
        {"count": count, "verb": _BAD[status], "line": places[line]} for (line, status), count in others[:_MAX_PLACES]
    ]
    return make_finding(
        Cause.SAME_PLACE,
        {
            "attempts": len(judged_attempts),
            "count": most,
            "verb": _BAD[first[1]],
            "others": tuple(other_places),
            "elsewhere": sum(count for _, count in others[_MAX_PLACES:]),
            "at_no_known_line": len(failures) - len(located_attempts),
            "passed": len(judged_attempts) - len(failures),
        },
        place=places[first[0]],
        evidence=EvidenceKind.RECORD,
        proof=tuple(f"{attempt.dir}/verdict.json" for attempt in judged_attempts if attempt.dir),
    )


def _place(outcome: Outcome) -> Place | None:
    return outcome.culprit.place if outcome.culprit else None


_JUDGED = frozenset({Status.PASS, Status.FAIL, Status.HANG})  # SKIP and ERROR say nothing about the program


def with_flakiness(outcomes: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """Return the outcomes, marking those of a launch whose attempts ended in different ways as flaky.

    The last attempt of a scenario is its final one; it gets a finding about where all attempts failed. The final
    attempt of a flaky launch becomes FAIL with the cause `flaky`, unless it is an ERROR. Diagnostic reruns do not count
    as attempts if there are others. Calling this function again with its result changes nothing.
    """
    return tuple(_with_combined_verdict(outcome, outcomes) for outcome in outcomes)


def repetitions(attempts: Sequence[Outcome]) -> Sequence[Outcome]:
    """Return the attempts without the diagnostic reruns, or all attempts if there are only reruns."""
    return [attempt for attempt in attempts if attempt.spec.deepening is None] or attempts


def own_status(outcome: Outcome) -> Status:
    """Return the status of this attempt, even if its verdict was replaced with one for all attempts."""
    return outcome.own_status or outcome.verdict.status


def _with_combined_verdict(outcome: Outcome, outcomes: Sequence[Outcome]) -> Outcome:
    attempts = repetitions([other for other in outcomes if other.spec.scenario == outcome.spec.scenario])
    if outcome not in attempts:
        return replace(outcome, final=False, flaky=False)
    last = max(attempts, key=lambda other: other.attempt)
    final = outcome.attempt == last.attempt
    same_launch = [other for other in attempts if other.spec.spec_hash == outcome.spec.spec_hash]
    flaky = _disagree(same_launch)
    outcome = _with_same_place(outcome, same_launch) if final else outcome
    if not (final and flaky) or outcome.verdict.status not in _JUDGED or outcome.verdict.cause == Cause.FLAKY:
        return replace(outcome, final=final, flaky=flaky)
    verdict = Verdict(status=Status.FAIL, kind=None, cause=Cause.FLAKY, summary=_summary(same_launch))
    own_verdict, expected = outcome.verdict.status, _expects_flaky(outcome)
    return replace(outcome, final=final, flaky=flaky, verdict=verdict, own_status=own_verdict, expected=expected)


def _with_same_place(outcome: Outcome, same_launch: Sequence[Outcome]) -> Outcome:
    """Return the outcome with a finding about the lines at which the attempts of its launch failed."""
    place_finding = same_place_finding(same_launch)
    if place_finding is None or any(finding.code == place_finding.code for finding in outcome.findings):
        return outcome
    return replace(outcome, findings=(*outcome.findings, place_finding))


def _disagree(attempts: Iterable[Outcome]) -> bool:
    verdicts = [attempt.verdict for attempt in attempts if attempt.verdict.status in _JUDGED]
    return len({verdict.status for verdict in verdicts}) > 1 or any(
        verdict.cause == Cause.FLAKY for verdict in verdicts
    )


def _summary(attempts: Iterable[Outcome]) -> str:
    in_order = sorted(attempts, key=lambda attempt: attempt.attempt)
    return "the same launch ended differently: " + ", ".join(
        f"attempt {attempt.attempt} {attempt.verdict.status.value}" for attempt in in_order
    )


def _expects_flaky(outcome: Outcome) -> bool:
    criteria = dict(outcome.spec.criteria)
    return criteria.get("expect.verdict") == Status.FAIL and criteria.get("expect.cause") in (None, Cause.FLAKY)
