"""Findings that only a diagnostic rerun can make, because it ran with more checks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.context import layer_of
from nsa_harness.core.diagnosis.explanation import make_finding
from nsa_harness.core.evidence.evidence import Evidence, RankEvidence
from nsa_harness.core.evidence.stacks import user_frame
from nsa_harness.core.plan import RunSpec
from nsa_harness.core.report import Facts, Finding, Place

# The messages in which DDP names parameters, in torch 2.11 and 2.13.
_NAMED = (
    re.compile(r"Parameters which did not receive grad for rank \d+: ([\w.]+(?:, [\w.]+)*)"),
    re.compile(r"Parameter at index \d+ with name ([\w.]+) has been marked as ready twice"),
)


def rerun_findings(spec: RunSpec, evidence: Evidence) -> Iterator[Finding]:
    """Yield the additional findings from a diagnostic rerun, or nothing for other attempts."""
    if spec.deepening is None:
        return
    kinds = {"names": (_forward_line, _parameter_names), "growth": (_forward_line, _memory_growth)}
    # The rank that failed first explains most: failures of other ranks may follow from it.
    ranks = sorted(evidence.ranks, key=_failed_at_s)
    for finding_of in kinds.get(spec.deepening.change, (_forward_line,)):
        yield from list(filter(None, map(finding_of, ranks)))[:1]


def _failed_at_s(rank: RankEvidence) -> float:
    at_s = rank.exception.at_s if rank.exception else None
    return math.inf if at_s is None else at_s


def _forward_line(rank: RankEvidence) -> Finding | None:
    """Return a finding that names the forward-pass line printed by PyTorch, or None if none was printed."""
    message = rank.debug_message
    frame = user_frame(message.frames) if message else None
    if message is None or frame is None:
        return None
    place = Place(file=frame.file, line=frame.line, function=frame.function)
    facts: Facts = {"variant": "forward", "function": frame.function, "operation": message.operation}
    if message.is_recomputation:
        facts = {**facts, "variant": "recomputation", "instead": message.instead}
    return _finding(rank, facts, place, f"rank{rank.rank}/stderr.log")


def _parameter_names(rank: RankEvidence) -> Finding | None:
    """Return a finding with the parameters named in DDP error messages, or None if there are none."""
    texts = [rank.exception.message if rank.exception else "", *rank.error_lines]
    names = _names(texts)
    if not names:
        return None
    place = Place(parameter=names[0], module=names[0].rpartition(".")[0] or None, layer=layer_of(names[0]))
    proof = rank.exception.proof if rank.exception else f"rank{rank.rank}/stderr.log"
    return _finding(rank, {"variant": "parameters", "names": tuple(names)}, place, proof)


_MUCH_BYTES = 1 << 20


def _memory_growth(rank: RankEvidence) -> Finding | None:
    """Return a finding about the line whose memory usage grew the most, or None if there is none."""
    most = (
        next((line for line in rank.health.memory_growth if line.size_bytes >= _MUCH_BYTES), None)
        if rank.health
        else None
    )
    if most is None:
        return None
    facts: Facts = {
        "variant": "growth",
        "grown_bytes": most.size_bytes,
        "first_step": most.first_step,
        "last_step": most.last_step,
    }
    return _finding(rank, facts, most.place, f"rank{rank.rank}/looks.jsonl")


def _names(texts: Sequence[str]) -> list[str]:
    lists = (match[1] for text in texts for pattern in _NAMED for match in pattern.finditer(text))
    return list(dict.fromkeys(name for names in lists for name in names.split(", ")))


def _finding(rank: RankEvidence, facts: Facts, place: Place, proof: str) -> Finding:
    return make_finding(
        Cause.DEEPENED, facts, ranks=(rank.rank,), place=place, evidence=EvidenceKind.RECORD, proof=(proof,)
    )
