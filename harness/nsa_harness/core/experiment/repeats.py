"""Repeats: what several attempts of one launch show together: how they ended, and whether at one line."""

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
_SHOWN = 3


def same_place(attempts: Sequence[Outcome]) -> Finding | None:
    """Return how many attempts of one launch ended badly at which place.

    None for a single attempt, and if no attempt ended badly at a known place.
    """
    in_order = sorted(attempts, key=lambda one: one.attempt)
    judged = [one for one in in_order if one.verdict.status in (Status.PASS, *_BAD)]
    bad = [one for one in judged if one.verdict.status in _BAD]
    placed = [one for one in bad if location(_place(one))]
    if len(judged) < 2 or not placed:
        return None
    ends = Counter((location(_place(one)), one.verdict.status) for one in placed)
    (first, most), *others = sorted(ends.items(), key=lambda end: (-end[1], end[0]))
    places = {location(_place(one)): _place(one) for one in reversed(placed)}
    shown: list[Facts] = [
        {"count": count, "verb": _BAD[status], "line": places[word]} for (word, status), count in others[:_SHOWN]
    ]
    return make_finding(
        Cause.SAME_PLACE,
        {
            "attempts": len(judged),
            "count": most,
            "verb": _BAD[first[1]],
            "others": tuple(shown),
            "elsewhere": sum(count for _, count in others[_SHOWN:]),
            "at_no_known_line": len(bad) - len(placed),
            "passed": len(judged) - len(bad),
        },
        place=places[first[0]],
        evidence=EvidenceKind.RECORD,
        proof=tuple(f"{one.dir}/verdict.json" for one in judged if one.dir),
    )


def _place(outcome: Outcome) -> Place | None:
    return outcome.culprit.place if outcome.culprit else None


_SAYS_SOMETHING = frozenset({Status.PASS, Status.FAIL, Status.HANG})  # SKIP and ERROR tell nothing of the program


def with_flakiness(outcomes: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """The outcomes, in their order, with `final`, `flaky` and `expected` as all attempts together say.

    The last attempt of a scenario counts, and says whether all of one launch ended at the same place. Where they
    disagree, all are flaky and the one that counts is FAIL, cause `flaky`; an ERROR stays one. A deeper look is no
    repetition: it counts only where nothing else does. Applied twice it changes nothing more.
    """
    return tuple(_seen_together(outcome, outcomes) for outcome in outcomes)


def repetitions(attempts: Sequence[Outcome]) -> Sequence[Outcome]:
    """Return the attempts without the diagnostic reruns, unless there is nothing else."""
    return [one for one in attempts if one.spec.deepening is None] or attempts


def own_status(outcome: Outcome) -> Status:
    """Return how this attempt ended by itself, also where its verdict is that of all attempts together."""
    return outcome.own_status or outcome.verdict.status


def _seen_together(outcome: Outcome, outcomes: Sequence[Outcome]) -> Outcome:
    attempts = repetitions([other for other in outcomes if other.spec.scenario == outcome.spec.scenario])
    if outcome not in attempts:
        return replace(outcome, final=False, flaky=False)
    last = max(attempts, key=lambda other: other.attempt)
    final = outcome.attempt == last.attempt
    same = [other for other in attempts if other.spec.spec_hash == outcome.spec.spec_hash]
    flaky = _disagree(same)
    outcome = _placed(outcome, same) if final else outcome
    if not (final and flaky) or outcome.verdict.status not in _SAYS_SOMETHING or outcome.verdict.cause == Cause.FLAKY:
        return replace(outcome, final=final, flaky=flaky)
    verdict = Verdict(status=Status.FAIL, kind=None, cause=Cause.FLAKY, summary=_summary(same))
    own, expected = outcome.verdict.status, _announced(outcome)
    return replace(outcome, final=final, flaky=flaky, verdict=verdict, own_status=own, expected=expected)


def _placed(outcome: Outcome, same: Sequence[Outcome]) -> Outcome:
    """Add the common place as a finding, once: the verdict of a flaky attempt no longer shows how it ended."""
    found = same_place(same)
    if found is None or any(finding.code == found.code for finding in outcome.findings):
        return outcome
    return replace(outcome, findings=(*outcome.findings, found))


def _disagree(attempts: Iterable[Outcome]) -> bool:
    verdicts = [attempt.verdict for attempt in attempts if attempt.verdict.status in _SAYS_SOMETHING]
    return len({verdict.status for verdict in verdicts}) > 1 or any(
        verdict.cause == Cause.FLAKY for verdict in verdicts
    )


def _summary(attempts: Iterable[Outcome]) -> str:
    in_order = sorted(attempts, key=lambda attempt: attempt.attempt)
    return "the same launch ended differently: " + ", ".join(
        f"attempt {attempt.attempt} {attempt.verdict.status.value}" for attempt in in_order
    )


def _announced(outcome: Outcome) -> bool:
    wanted = dict(outcome.spec.criteria)
    return wanted.get("expect.verdict") == Status.FAIL and wanted.get("expect.cause") in (None, Cause.FLAKY)
