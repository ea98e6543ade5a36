"""Lines at which data first make a number, a length or a decision differ, and roles and seeds that are at fault."""

from __future__ import annotations

from textwrap import dedent

import pytest

from nsa_harness.core.recording.beginnings import form_of
from nsa_harness.core.recording.experiments import plan_experiments
from nsa_harness.core.recording.explanation import RETURNED, ExperimentKind, Explanation, RankValues
from nsa_harness.core.recording.recording import RankRecording, Value
from tests.core.recorded import FILE, Thing, at, call, main, op, recorded
from tests.core.test_far_origins import explained, lines


def batch(rank: int) -> Thing:
    return Thing(60 + rank, "Tensor", f"float32 [8] crc 0000000{rank}")


def generator(seed: int) -> Thing:
    return Thing(80 + seed, "Random", f"state {seed}")


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (Value("int", "3"), "3"),
        (Value("str", "'a'"), "'a'"),
        (Value("Tensor", "float32 [8] crc 1"), "[8]"),
        (Value("Tensor", "2.5"), ""),
        (Value("list", "[1, 2]"), "2 items"),
        (Value("list", "9 items crc 1"), "9 items"),
        (Value("tuple", "(1, 'x')"), "(1, 'x')"),
        (Value("dict", "9 items crc 1"), "9 items crc 1"),
        (Value("Thing", ""), ""),
    ],
)
def test_a_number_a_text_and_a_size_can_decide_and_the_content_of_a_tensor_cannot(value: Value, form: str) -> None:
    assert form_of(value) == form


MEASURING = """\
    def measure(batch):
        error = batch.mean()
        return float(error)






    score = measure(batch)




    best = min(score, 1.0)




    if best < 0.5:
        barrier()



    all_reduce()
    """


def measuring(rank: int, *, unknown: bool = False, reduces: bool = False, limit: int = 1) -> RankRecording:
    """A run in which the error of each rank's batch decides. The data may be unknown, or the error reduced.

    `limit`: another number that decides.
    """
    score = (0.75, 0.25)[rank]
    data = Thing(60 + rank, "Batch") if unknown else batch(rank)
    error = Thing(90 + rank, "Errors") if unknown else Thing(90 + rank, "Tensor", f"float32 [2] crc 0000000{rank}")
    measured = call(
        "measure",
        at(2, reads={"batch": data}, writes={"error": error}),
        at(3, *([op()] if reduces else []), reads={"error": error}),
        arguments={"batch": data},
        returned=score,
    )
    start = at(10, measured, reads={"batch": data}, writes={"score": score})
    copied = at(15, reads={"score": score, "limit": limit}, writes={"best": score})
    decides = at(20, reads={"best": score})
    last = at(21, op("barrier", returned=False)) if rank else at(25, op(returned=False))
    return recorded(rank, main(at(9, writes={"limit": limit}), start, copied, decides, last, ended=False))


def proofs(found: Explanation, source: str) -> list[tuple[ExperimentKind, int | None, int | None]]:
    """Return the experiments that prove an origin: kind, the line that they change, and the line of the origin."""
    plans = plan_experiments(found, {FILE: dedent(source)})
    return [
        (one.kind, one.place.line, (one.origin or found.candidates[one.candidate]).place.line)
        for one in plans
        if one.proves_origin
    ]


def test_a_returned_number_is_proven_by_making_it_equal_where_the_caller_assigns_it() -> None:
    found = explained(MEASURING, measuring(0), measuring(1))
    assert proofs(found, MEASURING) == [(ExperimentKind.SET_VALUE, 10, 3)]
    assert found.candidates[0].values[0] == RankValues(name=RETURNED, values=((0, "0.75"), (1, "0.25")))


def test_a_number_made_of_unknown_data_or_of_other_ranks_data_or_beside_another_number_is_no_proven_origin() -> None:
    unknown = explained(MEASURING, *(measuring(rank, unknown=True) for rank in range(2)))
    reduced = explained(MEASURING, *(measuring(rank, reduces=True) for rank in range(2)))
    two_causes = explained(MEASURING, *(measuring(rank, limit=3 + rank) for rank in range(2)))
    assert {origin for found in (unknown, reduced, two_causes) for *_, origin in proofs(found, MEASURING)} <= {9}


def test_a_number_of_the_parameters_that_a_rank_has_is_no_proven_origin() -> None:
    counting = MEASURING.replace("float(error)", "error.numel() * size")
    assert proofs(explained(counting, measuring(0), measuring(1)), counting) == []


def test_a_number_that_is_made_of_data_comes_before_the_lines_that_hand_it_on() -> None:
    assert lines(explained(MEASURING, measuring(0), measuring(1)))[0] == 3


def test_a_condition_on_the_content_of_tensors_is_where_the_decision_begins() -> None:
    def deciding(rank: int) -> RankRecording:
        last = at(21, op("barrier", returned=False)) if rank else at(25, op(returned=False))
        made = at(1, writes={"mask": batch(rank)})
        return recorded(rank, main(made, at(20, reads={"mask": batch(rank)}), last, ended=False))

    source = "mask = load()\n" + 18 * "\n" + "if mask.any():\n    barrier()\n\n\n\nall_reduce()\n"
    found = explained(source, deciding(0), deciding(1))
    assert lines(found)[0] == 20
    assert {origin for *_, origin in proofs(found, source)} == {20}


def role(*, waits: bool) -> Explanation:
    """Explain a run in which only rank 0 gathers, which all ranks have to do, unless it waits for a lock instead."""

    def gathering(rank: int) -> RankRecording:
        start = [at(1, writes={"rank": rank}), at(20, reads={"rank": rank})]
        inside = at(21) if waits else at(21, op("all_gather", returned=False))
        last = inside if rank == 0 else at(30, op("barrier", returned=False))
        return recorded(rank, main(*start, last, ended=False))

    return explained(ROLE, gathering(0), gathering(1))


ROLE = "rank = get_rank()\n" + 18 * "\n" + "if rank == 0:\n    save()\n" + 8 * "\n" + "barrier()\n"


def test_a_role_is_at_fault_if_it_alone_makes_an_operation_that_needs_all_ranks() -> None:
    found = role(waits=False)
    assert lines(found)[0] == 20
    assert proofs(found, ROLE) == [(ExperimentKind.FORCE_BRANCH, 20, 20)]
    assert lines(role(waits=True))[0] != 20


def test_a_role_by_more_than_the_number_of_the_rank_is_no_proven_origin() -> None:
    assert proofs(role(waits=False), ROLE.replace("rank == 0", "rank == 0 and due")) == []
    assert proofs(role(waits=False), ROLE.replace("rank == 0", "is_writer")) == []


def test_the_seed_of_a_generator_comes_before_the_draw_that_decides() -> None:
    source = (
        "def make(seed):\n    return Mix(seed)\n"
        + 6 * "\n"
        + "mix = make(seed_of(rank))\n"
        + 8 * "\n"
        + "def pick():\n    return rng.choices(names)\n"
        + 8 * "\n"
        + "name = pick()\n"
        + 8 * "\n"
        + "if name == 'a':\n    all_gather()\n"
        + 6 * "\n"
        + "all_reduce()\n"
    )

    def picking(rank: int) -> RankRecording:
        seed, name = 70 + rank, ("a", "b")[rank]
        made = call("make", at(2, reads={"seed": seed}, writes={"rng": generator(rank)}), arguments={"seed": seed})
        start = at(9, made, reads={"rank": rank}, writes={"mix": Thing(70, "Mix")})
        drawn = at(19, reads={"rng": generator(rank)}, writes={"name": name})
        picked = at(28, call("pick", drawn, first_line=18, returned=name), writes={"name": name})
        last = at(46, op(returned=False)) if rank else at(38, op("all_gather", returned=False))
        return recorded(rank, main(start, picked, at(37, reads={"name": name}), last, ended=False))

    found = lines(explained(source, picking(0), picking(1)))
    assert 9 in found[:2]


def test_an_exception_in_a_generator_leads_from_the_loop_into_the_generator() -> None:
    source = "for batch in batches():\n    all_reduce()\n" + 17 * "\n" + "def batches():\n    yield table[key]\n"

    def looping(rank: int) -> RankRecording:
        error = "KeyError: 'Hf'" if rank else ""
        inside = [at(21, reads={"key": "Fe"}), at(21, reads={"key": "Hf"}, raised=error)]
        made = call("batches", *inside, first_line=20, ended=bool(rank))
        steps = [at(1, made), at(2, op()), at(1, raised=error)]
        last = [] if rank else [at(2, op(returned=False))]
        return recorded(rank, main(*steps, *last, ended=bool(rank)))

    assert lines(explained(source, looping(0), looping(1)))[0] == 21


def test_state_that_a_rank_loads_by_its_number_is_a_proven_leak_although_a_file_has_to_exist() -> None:
    source = (
        "def load():\n    if rank == 0 and path.exists():\n" + 3 * "\n" + "        state.step = 6\n\n"
        "rank = get_rank()\n\nload()\n" + 6 * "\n" + "while state.step < 9:\n    all_reduce()\n\n\nbarrier()\n"
    )

    def loading(rank: int) -> RankRecording:
        state = Thing(7)
        inside = [at(2, reads={"rank": rank, "path": Thing(9, "PosixPath", "'a/b'")})]
        if rank == 0:
            inside += [at(6, reads={"state": state}, writes={"state.step": 6})]
        load = call("load", *inside)
        loop = at(17, reads={"state": state, "state.step": 9 if rank == 0 else 3})
        wait = at(21, op("barrier", returned=False)) if rank == 0 else at(18, op(returned=False))
        return recorded(rank, main(at(8, writes={"rank": rank}), at(10, load), loop, wait, ended=False))

    found = explained(source, loading(0), loading(1))
    assert (ExperimentKind.UNDO_LEAK, 6) in [(kind, line) for kind, line, _ in proofs(found, source)]
    either = source.replace("rank == 0 and path.exists()", "path.exists()")
    assert proofs(explained(either, loading(0), loading(1)), either) == []
