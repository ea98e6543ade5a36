"""What a scenario asked for, against what was seen. The verdict is what happened; this only judges the numbers."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import asdict

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.evidence.evidence import Evidence
from nsa_harness.core.plan import Bound, Expect, Limits
from nsa_harness.core.report import Finding, Status

_COMPARE = (
    ("lt", "<", operator.lt),
    ("le", "<=", operator.le),
    ("gt", ">", operator.gt),
    ("ge", ">=", operator.ge),
    ("eq", "==", operator.eq),
)


def missed(expect: Expect, evidence: Evidence, metrics: Mapping[str, float]) -> tuple[Finding, ...]:
    """One finding for each number that was expected and not met, or not reported at all."""
    claims = [*_missing_gradients(expect, evidence), *_metrics(expect, metrics)]
    return tuple(_finding(claim, ranks) for claim, ranks in claims)


def is_expected(expect: Expect, status: Status, cause: str | None) -> bool:
    """Whether verdict and cause are what the scenario announced. SKIP is never a surprise."""
    if status is Status.SKIP:
        return True
    return status == expect.verdict and (expect.cause is None or expect.cause == cause)


def criteria(expect: Expect, limits: Limits) -> tuple[tuple[str, str], ...]:
    """What a verdict rests on besides the program: two runs are comparable where these agree."""
    given = {f"limits.{key}": value for key, value in asdict(limits).items()}
    given |= {"expect.verdict": expect.verdict, "expect.cause": expect.cause}
    given |= {"expect.missing_grads": expect.missing_grads}
    given |= {f"expect.metrics.{name}": _bound_text(bound) for name, bound in expect.metrics}
    return tuple(sorted((key, str(value)) for key, value in given.items() if value is not None))


def _bound_text(bound: Bound) -> str:
    signs = ((sign, getattr(bound, key)) for key, sign, _ in _COMPARE)
    return " ".join(f"{sign} {limit:g}" for sign, limit in signs if limit is not None)


def _missing_gradients(expect: Expect, evidence: Evidence) -> Iterator[tuple[str, tuple[int, ...]]]:
    if expect.missing_grads is None:
        return
    untraced = tuple(rank.rank for rank in evidence.ranks if rank.traces.missing is None)
    if untraced:
        yield f"expect.missing_grads is {expect.missing_grads}, and no [GRAD-TRACE] line was printed", untraced
    wrong = {rank.rank: rank.traces.missing for rank in evidence.ranks if rank.traces.missing is not None}
    off = tuple(rank for rank, missing in wrong.items() if missing != expect.missing_grads)
    if off:
        seen = ", ".join(f"rank {rank}: {wrong[rank]}" for rank in off)
        yield f"expect.missing_grads is {expect.missing_grads}, seen {seen}", off


def _metrics(expect: Expect, metrics: Mapping[str, float]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, bound in expect.metrics:
        value = metrics.get(name)
        if value is None:
            known = ", ".join(sorted(metrics)) or "none"
            yield f"expect.metrics.{name}: the run reported no such number (reported: {known})", ()
            continue
        yield from ((f"expect.metrics.{name}: {value:g} is not {wanted}", ()) for wanted in _violated(bound, value))


def _violated(bound: Bound, value: float) -> Iterator[str]:
    for key, sign, holds in _COMPARE:
        limit = getattr(bound, key)
        if limit is not None and (math.isnan(value) or not holds(value, limit)):
            yield f"{sign} {limit:g}"


def _finding(claim: str, ranks: tuple[int, ...]) -> Finding:
    return Finding(
        code=Cause.EXPECTATION_MISSED,
        claim=claim,
        ranks=ranks,
        place=None,
        confidence=1.0,
        proof=("spec.json",),
        advice=Cause.EXPECTATION_MISSED.row.advice,
    )
