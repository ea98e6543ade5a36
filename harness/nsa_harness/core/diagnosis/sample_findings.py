"""Explain a finding from the health samples of the ranks that show it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.context import DiagnosisContext
from nsa_harness.core.diagnosis.explanation import Explanation, OpenQuestion
from nsa_harness.core.evidence.health_samples import HealthSamples
from nsa_harness.core.report import Facts, Place

MIN_GRADIENT_SAMPLES = 4  # with fewer samples, a parameter may still receive a gradient later

Sample = TypeVar("Sample")
ByRank = list[tuple[int, Sample]]


def samples_by_rank(
    context: DiagnosisContext, values_of: Callable[[HealthSamples], Iterable[Sample]]
) -> ByRank[Sample]:
    """Return the values that `values_of` extracts from the health samples, each with its rank."""
    return [(rank.rank, sample) for rank in context.evidence.ranks if rank.health for sample in values_of(rank.health)]


def explain_samples(
    cause: Cause,
    ranks: Iterable[int],
    facts: Facts,
    *,
    place: Place | None = None,
    step: int | None = None,
    evidence: EvidenceKind = EvidenceKind.EFFECT,
    left_open: tuple[OpenQuestion, ...] = (),
) -> Explanation:
    """Create an explanation whose proof is the health samples of the given ranks."""
    ranks = tuple(sorted(set(ranks)))
    return Explanation(
        cause=cause,
        evidence=evidence,
        facts=facts,
        ranks=ranks,
        place=place,
        step=step,
        proof=tuple(f"rank{rank}/looks.jsonl" for rank in ranks),
        left_open=left_open,
    )
