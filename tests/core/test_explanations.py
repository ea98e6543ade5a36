"""From the recordings of ranks to the lines that may have to change."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import dedent

from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_harness.core.recording.explain import explain
from nsa_harness.core.recording.explanation import Explanation
from nsa_harness.core.recording.recording import Activation, Communication, Execution, RankRecording
from tests.core.recorded import FILE, Thing, at, call, main, op, recorded


def lines(explanation: Explanation) -> list[int | None]:
    return [candidate.place.line for candidate in explanation.candidates]


def explained(source: str, *recordings: RankRecording) -> Explanation:
    return explain(recordings, {FILE: dedent(source)})


STOPPING = """\
for step in range(9):
    loss = evaluate()
    if loss > best:
        break
    all_reduce(grads)
barrier()
"""


def stopping(rank: int, losses: list[float], *, stops: bool) -> RankRecording:
    """A rank that leaves its loop by its own loss, or that waits in the loop."""
    executions = []
    for step, loss in enumerate(losses):
        executions += [
            at(1, writes={"step": step}),
            at(2, call("evaluate", at(11), first_line=10, returned=loss), writes={"loss": loss}),
            at(3, reads={"loss": loss, "best": 5.0}),
        ]
        last = step == len(losses) - 1
        executions.append(at(4) if stops and last else at(5, op(returned=not last)))
    if stops:
        executions.append(at(6, op("barrier", returned=False)))
    return recorded(rank, main(*executions, ended=False))


def test_a_rank_that_leaves_its_loop_early_divides_from_the_others_at_the_condition() -> None:
    found = explained(
        STOPPING,
        stopping(0, [1.0, 2.0, 3.0], stops=False),
        stopping(1, [1.0, 2.0, 9.0], stops=True),
        stopping(2, [1.0, 2.0, 3.0], stops=False),
    )
    assert found.division is not None
    assert (found.division.place.line, found.division.occurrence, found.division.condition) == (3, 3, "loss > best")
    assert [(ranks, place and place.line) for ranks, place in found.division.ways] == [((1,), 4), ((0, 2), 5)]
    assert found.division.values[0].name == "loss"
    assert found.division.values[0].values == ((0, "3.0"), (1, "9.0"), (2, "3.0"))
    assert found.candidates[0].place.line == 3
    assert found.candidates[0].ranks == (1,)
    assert {(ranks, operation) for ranks, _, operation in found.ends} == {((0, 2), "all_reduce"), ((1,), "barrier")}


# Whatever the recordings hold.

COLLECTIVES = ["all_reduce", "backward", "barrier"]
SCALARS = st.sampled_from([0, 1, 2.5, "a", Thing(7), Thing(8, "list", "[1]"), Thing(8, "list", "[2]")])
NAMES = st.dictionaries(st.sampled_from(["x", "self", "self.n", "d['k']", "len(x)"]), SCALARS, max_size=2)


@st.composite
def trees(draw: st.DrawFn, operations: Sequence[str] = (*COLLECTIVES, "send", "irecv")) -> list[Activation]:
    """Draw the activations of a rank, with about 20 executions."""
    budget = [draw(st.integers(0, 20))]

    def activation(depth: int) -> Activation:
        function = draw(st.sampled_from("fg"))
        executions = []
        while budget[0] > 0 and draw(st.integers(0, 4)):
            budget[0] -= 1
            executions.append(execution(depth))
        return call(function, *executions, first_line=ord(function), ended=draw(st.booleans()), arguments=draw(NAMES))

    def execution(depth: int) -> Execution:
        parts: list[Activation | Communication] = []
        kind = draw(st.integers(0, 5))
        if kind == 0 and depth < 3:
            parts.append(activation(depth + 1))
        if kind == 1:
            ranks, peer = draw(st.sampled_from([(), (0, 1), (1, 2)])), draw(st.sampled_from([None, 0, 1]))
            parts.append(op(draw(st.sampled_from(operations)), ranks=ranks, returned=draw(st.booleans()), peer=peer))
        line = draw(st.integers(1, 5))
        raised = draw(st.sampled_from(["", "", "", "ValueError", "StopIteration"]))
        draws = draw(st.sampled_from([(), (("torch", "1", "2"),), (("torch", "2", "3"),)]))
        reads, writes = draw(NAMES), draw(NAMES)
        return at(line, *parts, reads=reads, writes=writes, draws=draws, raised=raised, handled=line % 2 == 0)

    return [activation(0) for _ in range(draw(st.integers(0, 2)))]


SOURCE = "if x:\n    f(x)\nfor x in d:\n    opt.step()\nd['k'] = self.n\n"


@settings(max_examples=40)
@given(st.lists(trees(), max_size=3))
def test_any_recordings_have_an_explanation_that_does_not_depend_on_their_order(ranks: list[list[Activation]]) -> None:
    recordings = [recorded(rank, *tree) for rank, tree in enumerate(ranks)]
    found = explained(SOURCE, *recordings)
    assert explained(SOURCE, *reversed(recordings)) == found


@settings(max_examples=30)
@given(trees(COLLECTIVES), st.integers(2, 4))
def test_equal_recordings_have_no_division(tree: list[Activation], count: int) -> None:
    found = explained(SOURCE, *(recorded(rank, *tree, world_size=count) for rank in range(count)))
    assert found.division is None
    assert "no_difference" in found.notes
