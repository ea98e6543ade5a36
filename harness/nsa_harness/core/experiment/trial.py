"""The result of one run in an experiment: whether it passed, or failed in the way that the experiment looks for.

Each experiment decides when two failures are the same. A bisection compares lines, a verification compares causes or
lines, and a claim counts every failure as the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.report import Outcome, Place, Status
from nsa_harness.core.search.question import ProbeResult

SAME = "same"
ANY = "any"
HANG = "hang"
FAIL = "fail"
SLOW = "slow"
BASELINE_RUNS = 3  # runs of the good end that measure the normal step time
_MIN_SLOWDOWN = 1.25  # a slow step takes at least this many times the step time of the slowest baseline run
_SLOW = re.compile(r"(?:([0-9]+(?:\.[0-9]+)?)(s|ms)?)?", re.ASCII)
FAILED_STATUSES = (Status.HANG, Status.FAIL)


@dataclass(frozen=True, kw_only=True)
class ComputedNumber:
    """A number, such as the loss, that a run computed in one step."""

    step: int
    name: str
    value: float


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A run of a program in an experiment with its measurements. An UNRESOLVED one could not be judged."""

    config: int = 0  # index of the configuration in the experiment
    counts_as: ProbeResult
    end: str  # "HANG · deadlock · model.py:40"
    dir: str
    wall_s: float
    is_slow: bool = False  # it was still active at its deadline, and is not proven to hang
    step_s: float | None = None
    loss: float | None = None
    rss_bytes: int | None = None
    gpu_bytes: int | None = None
    without_gradient: int | None = None  # number of parameters without a gradient; None: not traced on every rank
    computed: tuple[ComputedNumber, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the run passed."""
        return self.counts_as is ProbeResult.GOOD

    @property
    def judged(self) -> bool:
        """Whether it is known that the run passed or that it failed."""
        return self.counts_as is not ProbeResult.UNRESOLVED


SameFailure = Callable[[Outcome], bool]


def make_trial(
    outcome: Outcome,
    same_failure: SameFailure,
    *,
    config: int = 0,
    step_s: float | None = None,
    numbers: tuple[ComputedNumber, ...] = (),
) -> Trial:
    """Return a trial for a run of configuration `config`. `same_failure` says which failed outcome counts as bad."""
    # A failed run may have traced only a part of a step.
    missing = outcome.missing_gradients if outcome.verdict.status is Status.PASS else None
    return Trial(
        config=config, counts_as=classify_outcome(outcome, same_failure), end=str(failure_signature(outcome)),
        dir=outcome.dir, wall_s=outcome.timing.wall_s, step_s=step_s,
        is_slow=outcome.verdict.cause == Cause.SLOW, loss=outcome.metrics.get("loss_last"),
        rss_bytes=outcome.usage.peak_rss_bytes, gpu_bytes=outcome.usage.peak_gpu_bytes,
        without_gradient=None if missing is None else len(missing), computed=numbers,
    )  # fmt: skip


def classify_outcome(outcome: Outcome, same_failure: SameFailure) -> ProbeResult:
    """Return whether a run passed, had the failure that `same_failure` recognizes, or another one."""
    if outcome.verdict.status is Status.PASS:
        return ProbeResult.GOOD
    if outcome.verdict.status not in FAILED_STATUSES:
        return ProbeResult.UNRESOLVED
    return ProbeResult.BAD if same_failure(outcome) else ProbeResult.DIFFERENT


# The failure that a bisection looks for.


@dataclass(frozen=True, kw_only=True)
class SoughtFailure:
    """The kind of failure that a bisection looks for, given by the option `--outcome`."""

    kind: str = SAME  # same (as that of the bad control), hang, fail, slow or any
    pattern: str | None = None  # for fail: a regular expression that the summary or the output must match
    times: float | None = None  # for slow: multiple of the good end's step time; None: from the spread of its runs
    step_s: float | None = None  # for slow: an absolute step time in seconds, independent of the good end

    def slow_from_s(self, good_s: Sequence[float]) -> float | None:
        """Return the step time from which on a run is slow, perhaps relative to healthy runs in `good_s`, or None."""
        if self.kind != SLOW or self.step_s is not None or not good_s:
            return self.step_s
        if self.times is not None:
            return self.times * median(good_s)
        return max(good_s) * max(_MIN_SLOWDOWN, max(good_s) / min(good_s))

    def admits(self, outcome: Outcome, output: str) -> bool:
        """Return whether a run with this output failed in the way that the bisection looks for."""
        status = outcome.verdict.status
        if self.kind == HANG:
            return status is Status.HANG
        if self.kind == FAIL:
            text = f"{outcome.verdict.summary}\n{output}"
            return status is Status.FAIL and (self.pattern is None or re.search(self.pattern, text) is not None)
        return self.kind != SLOW and status in FAILED_STATUSES


@dataclass(frozen=True, kw_only=True)
class Signature:
    """The verdict, cause and line of a failure, used to compare failures."""

    verdict: str
    cause: str | None
    place: str | None  # "model.py:40"

    def __str__(self) -> str:
        return " · ".join(filter(None, (self.verdict, self.cause, self.place)))


def parse_outcome(text: str) -> SoughtFailure:
    """Parse a value of `--outcome`, such as hang, fail:REGEX or slow:1.5. Raise ValueError if it is invalid."""
    how, _, pattern = text.partition(":")
    if how == SLOW:
        return _parse_slow(pattern)
    if how not in (SAME, ANY, HANG, FAIL) or (pattern and how != FAIL):
        raise ValueError(f"expected same, hang, fail, fail:REGEX, slow, slow:1.5 or any, got {text!r}")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    return SoughtFailure(kind=how, pattern=pattern or None)


def _parse_slow(text: str) -> SoughtFailure:
    match = _SLOW.fullmatch(text)
    number = float(match[1]) if match and match[1] else None
    unit = match[2] if match else None
    if match is None or (number is not None and number <= (0 if unit else 1)):
        raise ValueError(f"slow: expected 1.5 (a multiple of the good end's step time), 0.2s or 200ms, got {text!r}")
    if number is None or unit is None:
        return SoughtFailure(kind=SLOW, times=number)
    return SoughtFailure(kind=SLOW, step_s=number / (1000 if unit == "ms" else 1))


def failure_signature(outcome: Outcome) -> Signature:
    """Return the verdict, cause and line of a failure."""
    place = outcome.culprit.place if outcome.culprit else None
    return Signature(verdict=outcome.verdict.status.value, cause=outcome.verdict.cause, place=file_and_line(place))


def file_and_line(place: Place | None) -> str | None:
    """Return "model.py:40", which is the same in a worktree and in the user's checkout, or None."""
    if place is None or place.file is None:
        return None
    name = place.file.rpartition("/")[2]
    return name if place.line is None else f"{name}:{place.line}"


def counts_as(
    outcome: Outcome,
    sought: SoughtFailure,
    signature: Signature | None,
    output: str = "",
    *,
    step_s: float | None = None,
    slow_from_s: float | None = None,
) -> ProbeResult:
    """Return whether a test run of a bisection passed or failed in the way that is looked for.

    `signature` is the first bad failure of the bisection, or None if there is none yet. If the bisection looks for slow
    runs, `step_s` is the run's step time, and `slow_from_s` the shortest step time that counts as slow, once it is
    known.
    """
    if outcome.verdict.status is Status.PASS and sought.kind == SLOW:
        if step_s is None:
            return ProbeResult.UNRESOLVED
        return ProbeResult.BAD if slow_from_s is not None and step_s >= slow_from_s else ProbeResult.GOOD

    def is_sought(failed_outcome: Outcome) -> bool:
        is_same = (
            sought.kind != SAME or signature is None or is_same_failure(failure_signature(failed_outcome), signature)
        )
        return sought.admits(failed_outcome, output) and is_same

    return classify_outcome(outcome, is_sought)


def is_same_failure(first: Signature, second: Signature) -> bool:
    """Return whether two failures have the same verdict and line. If a line is unknown, the causes are compared."""
    if first.verdict != second.verdict:
        return False
    if first.place is not None and second.place is not None:
        return first.place == second.place
    return first.cause == second.cause
