"""What made a difference between two ranks: a draw only if the generators differ, a call of the rank that makes it."""

from __future__ import annotations

import pytest

from nsa_harness.core.recording.explain import explain
from nsa_harness.core.recording.explanation import OriginKind
from nsa_harness.core.recording.recording import RankRecording
from tests.core.recorded import FILE, at, call, main, op, recorded

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
    assert next(one.kind for one in found.candidates if one.place.line == 1) is kind


LEAK = """\
if rank == main_rank:
    show()
mate = draw()
"""


@pytest.mark.parametrize("extra_on", [0, 1])
def test_a_leak_names_the_rank_that_makes_the_extra_call(extra_on: int) -> None:
    def drawn(rank: int) -> RankRecording:
        is_extra = rank == extra_on
        state = "b" if is_extra else "a"
        show = at(2, call("show", at(21, draws=[("random", "a", "b")]), first_line=20))
        draw = at(31, draws=[("random", state, state + "+")], writes={"mate": state})
        mate = at(3, call("draw", draw, first_line=30, returned=state), writes={"mate": state})
        last = at(4, op(returned=False), reads={"mate": state}) if is_extra else at(6, op("barrier"))
        decided = at(5, reads={"mate": state})
        first = at(1, reads={"rank": rank})
        return recorded(rank, main(first, *([show] if is_extra else []), mate, decided, last))

    found = explain([drawn(0), drawn(1)], {FILE: LEAK})
    leak = next(one for one in found.candidates if one.name == "generator:random" and one.kind is OriginKind.LEAK)
    assert leak.ranks == (extra_on,)
