"""Compare a run with the result that its scenario expects."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.explanation import make_finding
from nsa_harness.core.evidence.evidence import Evidence
from nsa_harness.core.plan import Bound, Expect, Limits
from nsa_harness.core.report import Facts, Finding, Status

# The bounds of a scenario's expectations: key, sign in texts, comparison.
_COMPARE = (
    ("lt", "<", operator.lt),
    ("le", "<=", operator.le),
    ("gt", ">", operator.gt),
    ("ge", ">=", operator.ge),
    ("eq", "==", operator.eq),
)


def missed_expectations(
    expect: Expect,
    evidence: Evidence,
    metrics: Mapping[str, float],
    codes: AbstractSet[str] = frozenset(),
    others: Sequence[Facts] = (),
) -> tuple[Finding, ...]:
    """Return a finding for each expectation that was not met.

    `codes`: the codes of this run's findings. `others`: the facts of misses that do not follow from the evidence.
    """
    misses = [*_missed_gradients(expect, evidence), *_missed_metrics(expect, metrics)]
    misses += [({"variant": "finding", "finding": code}, ()) for code in expect.findings if code not in codes]
    misses += [(facts, ()) for facts in others]
    return tuple(
        make_finding(Cause.EXPECTATION_MISSED, facts, ranks=ranks, evidence=EvidenceKind.FACT, proof=("spec.json",))
        for facts, ranks in misses
    )


def is_expected(expect: Expect, status: Status, cause: str | None, codes: AbstractSet[str] = frozenset()) -> bool:
    """Return whether the run ended as the scenario expects. A skipped scenario is always expected."""
    if status is Status.SKIP:
        return True
    return status == expect.verdict and expect.cause in (None, cause) and codes >= set(expect.findings)


def criteria(expect: Expect, limits: Limits) -> tuple[tuple[str, str], ...]:
    """Return the limits and expected numbers, as (name, value) pairs, that two comparable runs share."""
    values = {f"limits.{key}": value for key, value in asdict(limits).items()}
    values |= {"expect.verdict": expect.verdict, "expect.cause": expect.cause}
    values |= {"expect.findings": ", ".join(expect.findings) or None}
    values |= {"expect.missing_grads": expect.missing_grads}
    values |= {f"expect.metrics.{name}": _bound_text(bound) for name, bound in expect.metrics}
    return tuple(sorted((key, str(value)) for key, value in values.items() if value is not None))


def _bound_text(bound: Bound) -> str:
    signs = ((sign, getattr(bound, key)) for key, sign, _ in _COMPARE)
    return " ".join(f"{sign} {limit:g}" for sign, limit in signs if limit is not None)


_Miss = tuple[Facts, tuple[int, ...]]


def _missed_gradients(expect: Expect, evidence: Evidence) -> Iterator[_Miss]:
    if expect.missing_grads is None:
        return
    untraced_ranks = tuple(rank.rank for rank in evidence.ranks if rank.traces.missing_count is None)
    if untraced_ranks:
        yield {"variant": "gradients not traced", "missing_gradients": expect.missing_grads}, untraced_ranks
    missing_counts = {
        rank.rank: rank.traces.missing_count for rank in evidence.ranks if rank.traces.missing_count is not None
    }
    wrong_ranks = tuple(rank for rank, missing in missing_counts.items() if missing != expect.missing_grads)
    if wrong_ranks:
        counts = tuple({"rank": rank, "missing": missing_counts[rank]} for rank in wrong_ranks)
        yield {"variant": "gradients", "missing_gradients": expect.missing_grads, "seen": counts}, wrong_ranks


def _missed_metrics(expect: Expect, metrics: Mapping[str, float]) -> Iterator[_Miss]:
    for name, bound in expect.metrics:
        value = metrics.get(name)
        if value is None:
            yield {"variant": "not reported", "metric": name, "reported": tuple(sorted(metrics))}, ()
            continue
        for sign, limit in _violated_limits(bound, value):
            yield {"variant": "metric", "metric": name, "value": value, "sign": sign, "limit": limit}, ()


def _violated_limits(bound: Bound, value: float) -> Iterator[tuple[str, float]]:
    for key, sign, is_satisfied in _COMPARE:
        limit = getattr(bound, key)
        if limit is not None and (math.isnan(value) or not is_satisfied(value, limit)):
            yield sign, limit
