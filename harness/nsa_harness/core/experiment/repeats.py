"""Repeats: what several attempts of one launch say together: how they ended, and whether at one line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.explanation import stated
from nsa_harness.core.report import Finding, Outcome, Place, Status, Verdict

_BAD = {Status.HANG: "hang", Status.FAIL: "fail"}
_SHOWN = 3


def same_place(attempts: Sequence[Outcome]) -> Finding | None:
    """Return where the attempts of one launch failed; None: there is one attempt, or no failure at a known place."""
    in_order = sorted(attempts, key=lambda one: one.attempt)
    judged = [attempt for attempt in in_order if attempt.verdict.status in (Status.PASS, *_BAD)]
    bad = [
        (attempt, word)
        for attempt in judged
        if attempt.verdict.status in _BAD and (word := place_word(_place(attempt)))
    ]
    if len(judged) < 2 or not bad:
        return None
    ended = Counter((word, one.verdict.status) for one, word in bad).most_common()
    (word, status), most = min(ended, key=lambda pair: (-pair[1], pair[0]))
    there = f"{most} of {len(judged)} attempts {_BAD[status]}{'s at' if most == 1 else ' at the same line'} {word}"
    return stated(
        Cause.SAME_PLACE,
        "; ".join((there, *_elsewhere(judged, ended, (word, status)))),
        place=next(_place(one) for one, where in bad if where == word),
        evidence=EvidenceKind.RECORD,
        proof=tuple(f"{attempt.dir}/verdict.json" for attempt in judged if attempt.dir),
    )


def place_word(place: Place | None) -> str:
    """ "model.py:40", else the module or parameter; empty where nothing is known."""
    if place is None:
        return ""
    if place.file is not None:
        name = "/".join(place.file.split("/")[-2:])
        return name if place.line is None else f"{name}:{place.line}"
    return place.module or place.parameter or ""


def _place(outcome: Outcome) -> Place | None:
    return outcome.culprit.place if outcome.culprit else None


def _elsewhere(
    judged: Sequence[Outcome], ended: Sequence[tuple[tuple[str, Status], int]], first: tuple[str, Status]
) -> list[str]:
    others = sorted(((pair, count) for pair, count in ended if pair != first), key=lambda one: (-one[1], one[0]))
    parts = [f"{count} {_BAD[pair[1]]}{'s' if count == 1 else ''} at {pair[0]}" for pair, count in others[:_SHOWN]]
    left = sum(count for _, count in others[_SHOWN:])
    unknown = sum(attempt.verdict.status in _BAD and not place_word(_place(attempt)) for attempt in judged)
    passed = sum(attempt.verdict.status is Status.PASS for attempt in judged)
    parts += [f"{left} elsewhere"] * bool(left)
    parts += [f"{unknown} at no known line"] * bool(unknown)
    return [*parts, *[f"{passed} passed"] * bool(passed)]


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
    return [attempt for attempt in attempts if attempt.spec.deepening is None] or attempts


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
