"""Accuracy: the figures of many answers: which parts are right, each cause said rightly, and how sure one was."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nsa_harness.core.report import Status
from nsa_harness.core.selftest.corpus import Answer
from nsa_harness.core.selftest.selftest import Score, score

_BANDS = (("certain", 0.9, 2.0), ("likely", 0.6, 0.9), ("unknown", 0.0, 0.6))  # as a report words a confidence


@dataclass(frozen=True, kw_only=True)
class Share:
    """So many of so many were right; of none, there is no rate."""

    right: int
    of: int

    @property
    def rate(self) -> float | None:
        return self.right / self.of if self.of else None

    def __str__(self) -> str:
        return "-" if self.rate is None else f"{100 * self.rate:.1f} % ({self.right} of {self.of})"


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Of all answers the verdict; of faults the parts that a label names; of sound programs what is said in error."""

    verdict: Share
    culprit: Share
    cause: Share
    line: Share
    step: Share
    causes: dict[str, Score]
    bands: dict[str, Share]  # by how sure one was: cause and culprit both right
    certain_and_wrong: tuple[str, ...]
    false_hangs: tuple[str, ...]
    false_alarms: tuple[str, ...]  # a finding on a program with nothing wrong
    latency_median_s: float | None  # of a HANG, from the culprit's last mark to the verdict
    latency_95_s: float | None


def accuracy(answers: Sequence[Answer]) -> Accuracy:
    faults = [one for one in answers if not one.trial.sound]
    sound = [one for one in answers if one.trial.sound]
    pairs = [(one.trial.label.cause, one.cause) for one in faults] + [(None, one.cause) for one in sound]
    causes = sorted({cause for pair in pairs for cause in pair if cause is not None})
    latencies = sorted(one.detected_s for one in faults if one.detected_s is not None and one.verdict == Status.HANG)
    return Accuracy(
        verdict=_share(answers, "verdict"),
        culprit=_share([one for one in faults if one.trial.label.culprit], "culprit"),
        cause=_share(faults, "cause"),
        line=_share([one for one in faults if one.trial.label.line is not None], "line"),
        step=_share([one for one in faults if one.trial.label.step is not None], "step"),
        causes={cause: score(cause, pairs) for cause in causes},
        bands={name: _band(faults, low, high) for name, low, high in _BANDS},
        certain_and_wrong=tuple(one.trial.name for one in faults if _sure(one) and not _blamed_rightly(one)),
        false_hangs=tuple(one.trial.name for one in sound if one.verdict == Status.HANG),
        false_alarms=tuple(one.trial.name for one in sound if one.cause is not None),
        latency_median_s=statistics.median(latencies) if latencies else None,
        latency_95_s=latencies[round(0.95 * (len(latencies) - 1))] if latencies else None,
    )


def accuracy_lines(answers: Sequence[Answer]) -> Iterator[str]:
    """For people, below the lines of the trials."""
    found = accuracy(answers)
    for name in ("verdict", "culprit", "cause", "line", "step"):
        yield f"{name:<18}{getattr(found, name)}"
    for name, share in found.bands.items():
        yield f"{f'{name}, and right':<18}{share}"
    yield f"{'false HANG':<18}{_listed(found.false_hangs)}"
    yield f"{'false alarm':<18}{_listed(found.false_alarms)}"
    yield f"{'latency':<18}median {_seconds(found.latency_median_s)}, 95 % {_seconds(found.latency_95_s)}"


def accuracy_values(answers: Sequence[Answer]) -> dict[str, object]:
    """As JSON: the figures, and every answer they come from."""
    found = accuracy(answers)
    shares = {name: getattr(found, name) for name in ("verdict", "culprit", "cause", "line", "step")}
    return {
        "schema": 1,
        "programs": len({one.trial.label.name for one in answers}),
        "rates": {name: _share_values(share) for name, share in shares.items()},
        "calibration": {name: _share_values(share) for name, share in found.bands.items()},
        "certain_and_wrong": list(found.certain_and_wrong),
        "false_hangs": list(found.false_hangs),
        "false_alarms": list(found.false_alarms),
        "hang_detected_s": {"median": found.latency_median_s, "p95": found.latency_95_s},
        "causes": {
            cause: {
                "planted": one.planted,
                "said": one.said,
                "right": one.right,
                "precision": one.precision,
                "recall": one.recall,
            }
            for cause, one in found.causes.items()
        },
        "answers": [answer_values(one) for one in answers],
    }


def answer_values(one: Answer) -> dict[str, object]:
    """One trial as JSON: what is due, what was said."""
    label = one.trial.label
    due = None if one.trial.sound else label
    return {
        "name": one.trial.name,
        "ranks": label.ranks,
        "due": {
            "verdict": one.trial.due,
            "cause": due.cause if due else None,
            "culprit": list(due.culprit) if due else [],
            "line": due.line if due else None,
            "step": due.step if due else None,
        },
        "said": {
            "verdict": one.verdict,
            "kind": one.kind,
            "cause": one.cause,
            "culprit": list(one.culprit),
            "line": one.line,
            "step": one.step,
        },
        "confidence": one.confidence,
        "detected_s": one.detected_s,
        "wall_s": one.wall_s,
        "wrong": list(one.wrong),
    }


def _share(answers: Sequence[Answer], part: str) -> Share:
    return Share(right=sum(part not in one.wrong for one in answers), of=len(answers))


def _band(faults: Sequence[Answer], low: float, high: float) -> Share:
    within = [one for one in faults if one.confidence is not None and low <= one.confidence < high]
    return Share(right=sum(map(_blamed_rightly, within)), of=len(within))


def _sure(one: Answer) -> bool:
    return (one.confidence or 0.0) >= _BANDS[0][1]


def _blamed_rightly(one: Answer) -> bool:
    return not {"verdict", "cause", "culprit"} & set(one.wrong)


def _share_values(share: Share) -> dict[str, object]:
    return {"right": share.right, "of": share.of, "rate": share.rate}


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"
