"""A draw from generators in equal states made no difference, whatever else the statement computes."""

from __future__ import annotations

import pytest

from nsa_harness.core.recording.explain import explain
from nsa_harness.core.recording.explanation import OriginKind
from nsa_harness.core.recording.recording import RankRecording
from tests.core.recorded import FILE, at, main, op, recorded

SOURCE = """\
shift = torch.rand(1) + rank * 0.3
x = torch.ones(3)
x += 1
x += 2
x += 3
if shift > 1:
    broadcast(x)
barrier()
"""


def shifted(rank: int, shift: float, state: str) -> RankRecording:
    drawn = at(1, reads={"rank": rank}, writes={"shift": shift}, draws=[("torch", state, state + "'")])
    decided = at(6, reads={"shift": shift})
    last = at(7, op("broadcast", returned=False)) if shift > 1 else at(8, op("barrier", returned=False))
    return recorded(rank, main(drawn, decided, last, ended=False))


@pytest.mark.parametrize(("state", "kind"), [("a", OriginKind.RANK), ("b", OriginKind.RANDOM)])
def test_a_draw_is_the_origin_only_if_the_generators_differ(state: str, kind: OriginKind) -> None:
    found = explain([shifted(0, 0.9, "a"), shifted(1, 1.2, state)], {FILE: SOURCE})
    assert next(one.kind for one in found.candidates if one.name == "shift") is kind
