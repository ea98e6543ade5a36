"""The same place: whether attempts of one launch that ended badly did so at one line, or at several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from harness.core.diagnosed.causes import Cause
from harness.core.place import Place
from harness.core.report import Finding, Outcome, Status

_BAD = {Status.HANG: "hang", Status.FAIL: "fail"}
_SHOWN = 3


def same_place(attempts: Sequence[Outcome]) -> Finding | None:
    """Of all attempts of one launch; None for a single one, and where none ended badly at a known place."""
    in_order = sorted(attempts, key=lambda one: one.attempt)
    told = [one for one in in_order if one.verdict.status in (Status.PASS, *_BAD)]
    bad = [(one, word) for one in told if one.verdict.status in _BAD and (word := place_word(_place(one)))]
    if len(told) < 2 or not bad:
        return None
    ended = Counter((word, one.verdict.status) for one, word in bad).most_common()
    (word, status), most = min(ended, key=lambda pair: (-pair[1], pair[0]))
    there = f"{most} of {len(told)} attempts {_BAD[status]}{'s' if most == 1 else ''} at{_same(most)} {word}"
    return Finding(
        code=Cause.SAME_PLACE,
        claim="; ".join((there, *_elsewhere(told, ended, (word, status)))),
        ranks=(),
        place=next(_place(one) for one, where in bad if where == word),
        confidence=0.95,
        proof=tuple(f"{one.dir}/verdict.json" for one in told if one.dir),
        advice=Cause.SAME_PLACE.row.advice,
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


def _same(count: int) -> str:
    return " the same line" if count > 1 else ""


def _elsewhere(
    told: Sequence[Outcome], ended: Sequence[tuple[tuple[str, Status], int]], first: tuple[str, Status]
) -> list[str]:
    others = sorted(((pair, count) for pair, count in ended if pair != first), key=lambda one: (-one[1], one[0]))
    parts = [f"{count} {_BAD[pair[1]]}{'s' if count == 1 else ''} at {pair[0]}" for pair, count in others[:_SHOWN]]
    left = sum(count for _, count in others[_SHOWN:])
    unknown = sum(one.verdict.status in _BAD and not place_word(_place(one)) for one in told)
    passed = sum(one.verdict.status is Status.PASS for one in told)
    parts += [f"{left} elsewhere"] * bool(left)
    parts += [f"{unknown} at no known line"] * bool(unknown)
    return [*parts, *[f"{passed} passed"] * bool(passed)]
