"""What an attempt that was made to look deeper shows by itself: the forward line, the names of parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from nsa_harness.core.diagnosis.case import at, layer_of, shorten
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.evidence.evidence import Debugged, Evidence, Frame, RankEvidence
from nsa_harness.core.evidence.stacks import user_frame
from nsa_harness.core.place import Place
from nsa_harness.core.plan import RunSpec
from nsa_harness.core.report import Finding

# As DDP prints them, in torch 2.11 and 2.13.
_NAMED = (
    re.compile(r"Parameters which did not receive grad for rank \d+: ([\w.]+(?:, [\w.]+)*)"),
    re.compile(r"Parameter at index \d+ with name ([\w.]+) has been marked as ready twice"),
)
_SHOWN_NAMES = 3
_FROM_THERE = "Start at that line: the stack of the failure has only the call of backward."
_WHO_OWNS = "Look at the modules that own them: which of them does this step not use, or use twice?"


def shown_deeper(spec: RunSpec, evidence: Evidence) -> Iterator[Finding]:
    """At most one finding a kind; none for an attempt that is no deepening."""
    if spec.deepening is None:
        return
    # The first in time: what others print may follow from it.
    ranks = sorted(evidence.ranks, key=_failed_at_s)
    yield from list(filter(None, map(_forward, ranks)))[:1]
    if spec.deepening.change == "names":
        yield from list(filter(None, map(_parameters, ranks)))[:1]


def _failed_at_s(rank: RankEvidence) -> float:
    at_s = rank.raised.at_s if rank.raised else None
    return math.inf if at_s is None else at_s


def _forward(rank: RankEvidence) -> Finding | None:
    told = rank.debugged
    frame = user_frame(told.frames) if told else None
    if told is None or frame is None:
        return None
    place = Place(file=frame.file, line=frame.line, function=frame.function)
    return _finding(rank, _forward_text(told, frame, place), place, f"rank{rank.rank}/stderr.log", _FROM_THERE)


def _forward_text(told: Debugged, frame: Frame, place: Place) -> str:
    where = f"{at(place)[4:]} in {frame.function}"
    if told.recomputed:
        instead = f"called {told.instead} instead" if told.instead else "did not come to it"
        return f"the recomputation parts from the forward pass at {where}: {told.operation}, and it {instead}"
    return f"the forward line is {where} ({told.operation})"


def _parameters(rank: RankEvidence) -> Finding | None:
    texts = [rank.raised.message if rank.raised else "", *rank.error_lines]
    names = _names(texts)
    if not names:
        return None
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    noun = "parameter is" if len(names) == 1 else "parameters are"
    place = Place(parameter=names[0], module=names[0].rpartition(".")[0] or None, layer=layer_of(names[0]))
    proof = rank.raised.proof if rank.raised else f"rank{rank.rank}/stderr.log"
    return _finding(rank, f"the {noun} {shorten(', '.join(names[:_SHOWN_NAMES]))}{more}", place, proof, _WHO_OWNS)


def _names(texts: Sequence[str]) -> list[str]:
    found = (match[1] for text in texts for pattern in _NAMED for match in pattern.finditer(text))
    return list(dict.fromkeys(name for listed in found for name in listed.split(", ")))


def _finding(rank: RankEvidence, claim: str, place: Place, proof: str, advice: str) -> Finding:
    return Finding(
        code=Cause.DEEPENED,
        claim=claim,
        ranks=(rank.rank,),
        place=place,
        confidence=0.95,
        proof=(proof,),
        advice=advice,
    )
