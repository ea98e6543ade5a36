"""Lines at which data first make a number, a length or a decision differ, and roles and seeds that are at fault."""

from __future__ import annotations

import pytest

from nsa_harness.core.recording.beginnings import form_of
from nsa_harness.core.recording.explanation import Explanation
from nsa_harness.core.recording.recording import RankRecording, Value
from tests.core.recorded import Thing, at, call, main, op, recorded
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


def measuring(rank: int) -> RankRecording:
    score = (0.75, 0.25)[rank]
    measured = call(
        "measure",
        at(2, reads={"batch": batch(rank)}, writes={"error": Thing(90 + rank, "Tensor", str(score))}),
        at(3, reads={"error": Thing(90 + rank, "Tensor", str(score))}),
        arguments={"batch": batch(rank)},
        returned=score,
    )
    start = at(10, measured, reads={"batch": batch(rank)}, writes={"score": score})
    copied = at(15, reads={"score": score}, writes={"best": score})
    decides = at(20, reads={"best": score})
    last = at(21, op("barrier", returned=False)) if rank else at(25, op(returned=False))
    return recorded(rank, main(start, copied, decides, last, ended=False))


def test_a_number_that_is_made_of_data_comes_before_the_lines_that_hand_it_on() -> None:
    assert lines(explained(MEASURING, measuring(0), measuring(1)))[0] == 3


def test_a_condition_on_the_content_of_tensors_is_where_the_decision_begins() -> None:
    def deciding(rank: int) -> RankRecording:
        last = at(21, op("barrier", returned=False)) if rank else at(25, op(returned=False))
        made = at(1, writes={"mask": batch(rank)})
        return recorded(rank, main(made, at(20, reads={"mask": batch(rank)}), last, ended=False))

    source = "mask = load()\n" + 18 * "\n" + "if mask.any():\n    barrier()\n\n\n\nall_reduce()\n"
    assert lines(explained(source, deciding(0), deciding(1)))[0] == 20


def role(*, waits: bool) -> Explanation:
    """Explain a run in which only rank 0 gathers, which all ranks have to do, unless it waits for a lock instead."""

    def gathering(rank: int) -> RankRecording:
        start = [at(1, writes={"rank": rank}), at(20, reads={"rank": rank})]
        inside = at(21) if waits else at(21, op("all_gather", returned=False))
        last = inside if rank == 0 else at(30, op("barrier", returned=False))
        return recorded(rank, main(*start, last, ended=False))

    source = "rank = get_rank()\n" + 18 * "\n" + "if rank == 0:\n    save()\n" + 8 * "\n" + "barrier()\n"
    return explained(source, gathering(0), gathering(1))


def test_a_role_is_at_fault_if_it_alone_makes_an_operation_that_needs_all_ranks() -> None:
    assert lines(role(waits=False))[0] == 20
    assert lines(role(waits=True))[0] != 20


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
