"""From the recordings of ranks to the lines that may have to change."""

from __future__ import annotations

from textwrap import dedent

from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_harness.core.recording.explain import explain
from nsa_harness.core.recording.explanation import Explanation, OriginKind
from nsa_harness.core.recording.recording import Activation, Execution, RankRecording
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

OPERATIONS = st.builds(
    op,
    st.sampled_from(["all_reduce", "send", "irecv", "backward", "barrier"]),
    ranks=st.sampled_from([(), (0, 1), (1, 2)]),
    returned=st.booleans(),
    peer=st.sampled_from([None, 0, 1]),
)
SCALARS = st.sampled_from([0, 1, 2.5, "a", Thing(7), Thing(8, "list", "[1]"), Thing(8, "list", "[2]")])
NAMES = st.dictionaries(st.sampled_from(["x", "self", "self.n", "d['k']", "len(x)"]), SCALARS, max_size=3)


def executions_of(calls: st.SearchStrategy[Activation]) -> st.SearchStrategy[Execution]:
    return st.builds(
        lambda line, parts, reads, writes, draws, raised: at(
            line, *parts, reads=reads, writes=writes, draws=draws, raised=raised, handled=line % 2 == 0
        ),
        st.integers(1, 5),
        st.lists(st.one_of(OPERATIONS, calls), max_size=2),
        NAMES,
        NAMES,
        st.sampled_from([(), (("torch", "1", "2"),), (("torch", "2", "3"),)]),
        st.sampled_from(["", "", "", "ValueError", "StopIteration"]),
    )


def activations_of(calls: st.SearchStrategy[Activation]) -> st.SearchStrategy[Activation]:
    return st.builds(
        lambda function, executions, ended, arguments: call(
            function, *executions, first_line=ord(function), ended=ended, arguments=arguments
        ),
        st.sampled_from("fg"),
        st.lists(executions_of(calls), max_size=6),
        st.booleans(),
        NAMES,
    )


ACTIVATIONS = st.recursive(activations_of(st.nothing()), activations_of, max_leaves=8)
TREES = st.lists(ACTIVATIONS, max_size=3)
SOURCE = "if x:\n    f(x)\nfor x in d:\n    opt.step()\nd['k'] = self.n\n"


@settings(max_examples=40)
@given(st.lists(TREES, min_size=0, max_size=3))
def test_any_recordings_have_an_explanation_that_does_not_depend_on_their_order(trees: list[list[Activation]]) -> None:
    recordings = [recorded(rank, *tree) for rank, tree in enumerate(trees)]
    found = explained(SOURCE, *recordings)
    assert explained(SOURCE, *reversed(recordings)) == found


@settings(max_examples=30)
@given(TREES, st.integers(2, 4))
def test_equal_recordings_have_no_division(tree: list[Activation], count: int) -> None:
    found = explained(SOURCE, *(recorded(rank, *tree, world_size=count) for rank in range(count)))
    assert found.division is None
    assert "no_difference" in found.notes
