"""Which experiment tests which candidate, and what the recording of an experiment shows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_harness.core.recording.experiments import control_of, plan_experiments
from nsa_harness.core.recording.explanation import (
    Candidate,
    Division,
    ExperimentKind,
    ExperimentResult,
    Explanation,
    OriginKind,
    PlannedExperiment,
    RankValues,
)
from nsa_harness.core.recording.judgement import (
    EventKind,
    ExperimentEvent,
    is_same_stop,
    judge_experiment,
    read_events,
)
from nsa_harness.core.recording.recording import (
    Activation,
    Communication,
    Execution,
    RankRecording,
    ThreadRecording,
    Value,
)
from nsa_harness.core.report import Place

FILE = "/job/train.py"
SOURCE = """\
import random
class Stopper:
    def update(self):
        self.bad += 1
def train(loader, stopper, rank, optimizer):
    random.seed(rank + limit + seed)
    for x in loader:
        loss = x.mean()
        if stopper.bad >= 3:
            break
        while loss > 1:
            loss = loss / 2
        optimizer.step()
    done()
"""
UPDATE, SEED, LOOP, LOSS, CHECK, BREAK, HALVE, HALF, STEP, DONE = 4, 6, 7, 8, 9, 10, 11, 12, 13, 14


def at(line: int) -> Place:
    return Place(file=FILE, line=line)


def values(name: str, *texts: str) -> RankValues:
    return RankValues(name=name, values=tuple(enumerate(texts)))


def candidate(
    line: int, kind: OriginKind, name: str = "", *texts: str, shown: RankValues | None = None, **more: Any
) -> Candidate:
    known = (values(name, *texts),) if texts else (shown,) if shown else ()
    return Candidate(**{"place": at(line), "kind": kind, "ranks": (2,), "name": name, "values": known, **more})


def division(
    line: int = CHECK, *, ways: Any = None, shown: Sequence[RankValues] = (), occurrence: int = 33
) -> Division:
    ways = ways or (((0, 1), at(HALVE)), ((2,), at(BREAK)))
    return Division(place=at(line), occurrence=occurrence, ways=ways, condition="", values=tuple(shown))


def explanation(*candidates: Candidate, parts_at: Division | None = None, ends: Any = ()) -> Explanation:
    return Explanation(candidates=candidates, division=parts_at, ends=ends)


def planned(*candidates: Candidate, parts_at: Division | None = None) -> list[PlannedExperiment]:
    return list(plan_experiments(explanation(*candidates, parts_at=parts_at), {FILE: SOURCE}))


def told(one: PlannedExperiment, *keys: str) -> list[object]:
    return [one.instruction[key] for key in keys]


def kinds(found: Sequence[PlannedExperiment]) -> list[str]:
    return [f"{one.kind.value} {one.place.line}" for one in found]


def test_experiments_come_in_the_order_undo_generator_scalar_branch() -> None:
    found = planned(
        candidate(LOSS, OriginKind.MISSING_REDUCTION, "loss", "1.5", "1.5", "2.5"),
        candidate(SEED, OriginKind.RANDOM),
        candidate(UPDATE, OriginKind.LEAK, "self.bad", "2", "2", "3", caller=at(DONE)),
        parts_at=division(shown=[values("stopper.bad", "2", "2", "3")]),
    )
    assert kinds(found) == ["undo_leak 4", "share_generator 6", "set_value 8", "set_value 9", "force_branch 9"]
    assert [one.proves_origin for one in found] == [True, True, True, False, False]


def test_the_extra_caller_of_a_leak_is_undone_on_every_rank_that_makes_the_call() -> None:
    (found,) = planned(candidate(UPDATE, OriginKind.LEAK, "self.bad", "2", "2", "3", caller=at(DONE)))
    settings = dict(found.instruction)
    assert settings["callers"] == [[FILE, DONE]]
    assert settings["path"] == [["name", "self"], ["attribute", "bad"]]
    assert settings["ranks"] == []
    json.dumps(settings)


def test_all_calls_in_the_branch_of_the_extra_call_are_undone() -> None:
    text = "if main:\n    add(1)\n    if more:\n        add(2)\nelse:\n    x = 1\ndef add(n):\n    items.append(n)\n"
    leak = candidate(8, OriginKind.LEAK, "items", "1 items", caller=at(2))
    (found,) = plan_experiments(explanation(leak), {FILE: text})
    assert told(found, "callers") == [[[FILE, 2], [FILE, 3], [FILE, 4]]]
    text = (
        "def add(n):\n    items.append(n)\ndef log(x):\n    if rank:\n        {}\n    x = 1\n    add(x)\n    add(x)\n"
    )
    for leaves, line, lines in ("return", 6, [6, 7, 8]), ("return", 7, [7]), ("pass", 6, [6]):
        caller = replace(leak, place=at(2), caller=at(line))
        (found,) = plan_experiments(explanation(caller), {FILE: text.format(leaves)})
        assert told(found, "callers") == [[[FILE, one] for one in lines]]


def test_a_definition_is_changed_after_it_and_a_use_before_it() -> None:
    after, before = planned(
        candidate(LOSS, OriginKind.CLOCK, "loss", "1", "2", "2"),
        candidate(HALVE, OriginKind.UNKNOWN, "loss", "1", "2", "2"),
    )
    assert told(after, "after", "temporary", "reference", "ranks") == [True, False, 1, [0, 2]]
    assert told(before, "after", "temporary") == [False, True]


def test_what_an_assigned_object_holds_is_changed_after_the_assignment() -> None:
    for name in ("loss['mean']", "loss.mean"):
        (found,) = planned(candidate(LOSS, OriginKind.RANK, name, "1.5", "2.5", "2.5"))
        assert told(found, "after", "temporary") == [True, False]


def test_the_state_of_a_generator_is_shared_after_a_seed_and_before_a_draw() -> None:
    seed, draw = planned(candidate(SEED, OriginKind.RANDOM), candidate(LOOP, OriginKind.RANDOM, "generator:torch"))
    assert draw.name == "torch"
    assert told(seed, "after") + told(draw, "after") == [True, False]


def test_an_extra_draw_is_undone_at_the_statement_that_draws() -> None:
    (found,) = planned(candidate(LOSS, OriginKind.LEAK, "generator:random"))
    assert (found.kind, found.name) == (ExperimentKind.UNDO_LEAK, "random")
    assert told(found, "path", "callers", "ranks") == [[], [[FILE, LOSS]], []]
    assert planned(candidate(CHECK, OriginKind.LEAK), candidate(CHECK, OriginKind.RANDOM)) == []


def test_the_number_of_a_rank_is_never_made_equal() -> None:
    rank = candidate(CHECK, OriginKind.RANK, "me", "0", "1", "2")
    other = candidate(CHECK, OriginKind.RANK, "rank", "0", "0", "1")
    assert planned(rank, other) == []
    assert kinds(planned(candidate(SEED, OriginKind.RANK, "limit", "10", "11", "12"))) == ["set_value 6"]


def test_a_value_that_is_equal_on_all_ranks_is_not_made_equal() -> None:
    assert planned(candidate(LOSS, OriginKind.MISSING_REDUCTION, "loss", "1.5", "1.5")) == []


def test_the_variable_of_a_loop_is_no_origin_because_it_comes_from_what_the_loop_iterates_over() -> None:
    (item,) = planned(candidate(LOOP, OriginKind.MISSING_REDUCTION, "x", "1", "2", "2"))
    (read,) = planned(candidate(LOSS, OriginKind.MISSING_REDUCTION, "x", "1", "2", "2"))
    (made,) = planned(candidate(LOSS, OriginKind.MISSING_REDUCTION, "loss", "1", "2", "2"))
    assert [item.proves_origin, read.proves_origin, made.proves_origin] == [False, False, True]


def test_the_order_of_a_set_is_tested_with_a_fixed_hash_seed() -> None:
    (found,) = planned(candidate(LOOP, OriginKind.HASH_ORDER, "names"))
    assert (found.kind, found.env) == (ExperimentKind.FIX_HASH_SEED, (("PYTHONHASHSEED", "0"),))


def test_a_forced_branch_leaves_a_loop_and_never_enters_or_continues_it() -> None:
    longer = division(LOOP, ways=(((0, 1), at(LOSS)), ((2,), at(DONE))))
    (found,) = planned(parts_at=longer)
    assert told(found, "reference", "ranks", "from") == [2, [0, 1], 33]
    continued = division(ways=(((0, 1), at(LOOP)), ((2,), at(BREAK))))
    assert told(planned(parts_at=continued)[0], "reference") == [2]
    ended = division(ways=(((0, 1), None), ((2,), at(BREAK))))
    assert told(planned(parts_at=ended)[0], "reference") == [2]
    assert planned(parts_at=division(ways=(((0, 1, 2), at(BREAK)),))) == []


def test_a_value_computed_from_the_origin_proves_only_the_decision() -> None:
    chain = ((at(SEED), "limit"), (at(LOSS), "loss"), (at(CHECK), ""))
    found = planned(
        candidate(LOSS, OriginKind.MISSING_REDUCTION, "loss", "1", "2", "2"),
        candidate(SEED, OriginKind.ENVIRONMENT, "limit", "3", "4", "4", chain=chain),
    )
    assert [(one.name, one.proves_origin) for one in found] == [("limit", True), ("loss", False)]
    inputs = (values("loss", "1", "2", "2"), values("x", "3", "4", "4"), values("rank", "0", "1", "2"))
    for kind, proves in ((OriginKind.UNKNOWN, False), (OriginKind.MISSING_REDUCTION, True)):
        (one,) = planned(Candidate(place=at(LOSS), kind=kind, ranks=(0,), name="loss", values=inputs))
        assert one.proves_origin is proves
        (one,) = planned(Candidate(place=at(LOSS), kind=kind, ranks=(0,), name="loss", values=inputs[::2]))
        assert one.proves_origin


def test_data_that_rightly_differ_are_not_made_equal() -> None:
    chain = ((at(SEED), "seed"), (at(LOSS), "loss"), (at(CHECK), ""))
    data = candidate(SEED, OriginKind.RANK, "mine", "[1, 2]", "[3, 4]", chain=chain)
    drawn = candidate(SEED, OriginKind.RANDOM, "noise", "float32 [8] crc 12345678", "float32 [8] crc 12345679")
    seeded = candidate(SEED, OriginKind.RANK, "seed", "42", "43", chain=chain)
    loss = candidate(LOSS, OriginKind.MISSING_REDUCTION, "loss", "1.5", "inf", chain=chain[1:])
    for normal in (data, drawn, seeded):
        assert [(one.name, one.proves_origin) for one in planned(normal, loss)] == [("loss", True)]
    assert kinds(planned(seeded)) == ["set_value 6"]


def test_names_that_no_statement_can_set_are_left_out() -> None:
    assert planned(candidate(LOSS, OriginKind.CLOCK, "other.name", "1", "2")) == []
    assert planned(candidate(LOOP, OriginKind.LENGTH, "len(loader)", "17", "18", "18")) == []


def recording(rank: int, line: int, executions: int, communications: int, *, ended: bool = False) -> RankRecording:
    statements = [Execution(line=line, order=number) for number in range(executions)]
    calls = [
        Communication(operation="all_reduce", order=0, returned=number > 0) for number in range(communications + 1)
    ]
    statements.append(Execution(line=1, order=executions, communications=calls))
    returned = Value("NoneType", "None") if ended else None
    top = Activation(FILE, "<module>", 1, executions=statements, ended=ended, returned=returned)
    return RankRecording(rank, 3, (3, 11), [ThreadRecording("MainThread", [top])])


def run(executions: Sequence[int], communications: Sequence[int], line: int = CHECK) -> list[RankRecording]:
    return [recording(rank, line, *counts) for rank, counts in enumerate(zip(executions, communications, strict=True))]


def event(kind: EventKind, rank: int = 2, occurrence: int = 33, reason: str = "") -> ExperimentEvent:
    return ExperimentEvent(kind=kind, rank=rank, occurrence=occurrence, reason=reason)


SCALAR = planned(candidate(LOSS, OriginKind.CLOCK, "loss", "1", "2"))[0]
DECISION, BRANCH = planned(parts_at=division(shown=[values("stopper.bad", "2", "2", "3")]))
FAILED = explanation(parts_at=division())
BEFORE = run((33, 33, 33), (40, 40, 39))
CHANGED, EQUAL, REFUSED = (event(kind) for kind in (EventKind.CHANGED, EventKind.EQUAL, EventKind.REFUSED))
SECOND = explanation(parts_at=division(STEP, occurrence=2))


def judged(
    events: Sequence[ExperimentEvent],
    *,
    experiment: PlannedExperiment = SCALAR,
    after: Sequence[RankRecording] = BEFORE,
    new: Explanation | None = FAILED,
    passed: bool = False,
) -> ExperimentResult:
    return judge_experiment(experiment, FAILED, BEFORE, after, events=events, new_explanation=new, passed=passed).result


def test_an_origin_is_proven_if_every_rank_gets_ten_iterations_further() -> None:
    ten = run((43, 43, 43), (50, 50, 49))
    assert judged([CHANGED], after=ten, new=None) is ExperimentResult.WENT_ON
    assert judged([CHANGED], after=[], new=None, passed=True) is ExperimentResult.WENT_ON
    nine = run((43, 42, 43), (41, 41, 41))
    assert judged([CHANGED], after=nine, new=SECOND) is ExperimentResult.SECOND_CAUSE


def test_equal_values_and_a_forced_branch_at_the_division_prove_only_the_decision() -> None:
    assert [one.proves_origin for one in (SCALAR, DECISION, BRANCH)] == [True, False, False]
    assert judged([CHANGED], experiment=BRANCH, passed=True) is ExperimentResult.WENT_ON


def test_an_effect_that_does_not_get_the_ranks_past_the_point_is_no_origin() -> None:
    assert judged([CHANGED]) is ExperimentResult.FAILED


def test_two_causes_are_told_apart() -> None:
    after = run((35, 35, 35), (43, 43, 43))
    result = judge_experiment(SCALAR, FAILED, BEFORE, after, events=[CHANGED], new_explanation=SECOND, passed=False)
    assert (result.result, result.next_place) == (ExperimentResult.SECOND_CAUSE, at(STEP))


def test_a_run_that_passes_although_nothing_was_changed_is_a_race() -> None:
    for events in ([], [EQUAL], [REFUSED]):
        assert judged(events, passed=True) is ExperimentResult.RACE
    late = event(EventKind.CHANGED, occurrence=34)
    assert judged([late], experiment=BRANCH, passed=True) is ExperimentResult.RACE
    assert judged([EQUAL], new=SECOND) is ExperimentResult.RACE


def test_a_call_whose_effect_is_undone_on_every_rank_is_no_extra_call() -> None:
    (undo,) = planned(candidate(UPDATE, OriginKind.LEAK, "self.bad", "3"))
    assert judged([CHANGED], experiment=undo, passed=True) is ExperimentResult.WENT_ON
    everywhere = [event(EventKind.CHANGED, rank) for rank in range(3)]
    assert judged(everywhere, experiment=undo, passed=True) is ExperimentResult.INCONCLUSIVE


def test_a_change_that_was_not_made_shows_nothing() -> None:
    assert judged([]) is ExperimentResult.NOT_MADE
    assert judged([event(EventKind.REFUSED, reason="property")]) is ExperimentResult.NOT_MADE
    assert judged([EQUAL]) is ExperimentResult.NOT_MADE
    assert judged([EQUAL, REFUSED]) is ExperimentResult.NOT_MADE


def test_a_run_that_the_change_broke_earlier_shows_nothing() -> None:
    assert judged([CHANGED], new=SECOND, after=run((3, 3, 3), (4, 4, 4))) is ExperimentResult.INCONCLUSIVE
    assert judged([CHANGED], new=None, after=[]) is ExperimentResult.INCONCLUSIVE


def test_a_loop_that_waits_gets_nowhere() -> None:
    polling = run((500, 500, 500), (40, 40, 39))
    assert judged([CHANGED], after=polling) is ExperimentResult.FAILED


def test_a_control_run_that_stops_elsewhere_is_no_same_failure() -> None:
    assert is_same_stop(FAILED, FAILED)
    assert not is_same_stop(FAILED, SECOND)


def test_runs_without_a_division_are_compared_by_where_the_ranks_stopped() -> None:
    one, other = (explanation(ends=(((0, 1, 2), at(line), "barrier"),)) for line in (DONE, STEP))
    assert [is_same_stop(one, run) for run in (one, other)] == [True, False]


COUNTS = st.tuples(*[st.integers(0, 60)] * 3)
EVENTS = st.builds(
    ExperimentEvent,
    kind=st.sampled_from(EventKind),
    rank=st.integers(0, 2),
    occurrence=st.integers(1, 60),
)


@given(
    st.sampled_from([SCALAR, BRANCH]),
    st.lists(EVENTS, max_size=6),
    COUNTS,
    COUNTS,
    st.sampled_from([None, FAILED, SECOND]),
    st.booleans(),
)
def test_nothing_is_proven_without_a_change_and_ten_iterations_on_every_rank(
    experiment: PlannedExperiment,
    events: list[ExperimentEvent],
    executions: tuple[int, ...],
    communications: tuple[int, ...],
    new: Explanation | None,
    passed: bool,
) -> None:
    outcome = judged(events, experiment=experiment, after=run(executions, communications), new=new, passed=passed)
    has_changed = any(event.kind is EventKind.CHANGED for event in events)
    if outcome is ExperimentResult.WENT_ON:
        assert has_changed
        assert passed or all(
            count >= 43 or after >= before + 10
            for count, after, before in zip(executions, communications, (40, 40, 39), strict=True)
        )
    if outcome in (ExperimentResult.FAILED, ExperimentResult.SECOND_CAUSE):
        assert not passed
    if outcome is ExperimentResult.NOT_MADE:
        assert not has_changed
    if passed and not has_changed:
        assert outcome is ExperimentResult.RACE


JSON = st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists)
FIELDS = ("event", "rank", "occurrence", "count", "reason")


@given(st.lists(st.dictionaries(st.sampled_from(FIELDS), JSON | st.just("changed"))))
def test_a_damaged_record_of_an_experiment_is_read_without_an_error(records: list[dict[str, Any]]) -> None:
    good = {"event": "changed", "rank": 1, "occurrence": 3, "count": 2, "reason": "", "before": 1}
    assert list(read_events([*records, good]))[-1] == ExperimentEvent(kind=EventKind.CHANGED, rank=1, occurrence=3)


@pytest.mark.parametrize("text", ["", "def", "x" * 3 + "(", "\0"])
def test_sources_that_cannot_be_parsed_still_give_experiments(text: str) -> None:
    found = plan_experiments(
        explanation(candidate(LOSS, OriginKind.CLOCK, "loss", "1", "2"), parts_at=division()), {FILE: text}
    )
    assert kinds(found) == ["set_value 8", "force_branch 9"]


OWN = """\
def step(model, x, mine):
    try:
        loss = checked(model(x))
    except BadSample:
        return None
    loss.backward()
def checked(loss):
    if not finite(loss):
        raise BadSample
    return loss
def forward(h, has_image, n):
    if has_image.any():
        h = h + 1
    if used(has_image):
        h = h + 2
def allocation(store):
    state = store.load()
    step = state["step"]
def load(path):
    return torch.load(path)
"""
IN_TRY, HANDLER, AFTER, GUARD, RAISE, IMAGE, CALLED, RESTORED, LOADS = 3, 4, 6, 8, 9, 12, 14, 18, 20
TENSORS = "float32 [4] crc 1", "float32 [4] crc 2"


def own(*candidates: Candidate, parts_at: Division | None = None) -> list[PlannedExperiment]:
    return list(plan_experiments(explanation(*candidates, parts_at=parts_at), {FILE: OWN}))


def test_a_sequence_is_cut_to_the_shortest_one_where_its_length_begins_to_differ() -> None:
    one = candidate(
        LOSS, OriginKind.LENGTH, "loss", "int64 [48, 20]", "[1, 2, 3]", "30 items crc 1", chain=((at(8), ""),)
    )
    (found,) = planned(one)
    assert (found.kind, found.proves_origin) == (ExperimentKind.EQUAL_LENGTH, True)
    assert told(found, "kind", "reference", "ranks", "after") == ["length", 1, [0, 2], True]
    for more in (values("x", "1.5", "2.5", "2.5"), values("x", "4 items crc 1", "5 items crc 1")):
        assert planned(replace(one, values=(*one.values, more))) == []
    (found,) = planned(replace(one, values=(*one.values, values("rank", "0", "1", "2"))))
    assert found.proves_origin
    assert planned(candidate(HALVE, OriginKind.LENGTH, "loss", "3 items", "4 items")) == [], "it is only used here"
    assert planned(candidate(LOSS, OriginKind.UNKNOWN, "loss", *TENSORS)) == [], "data of the same length"


LOOP_OVER_SHARD = "def train(data, rank):\n    mine = data[rank::2]\n    for x in mine:\n        use(x)\n"


def shard(rank: int, *, line: int = 2, **reads: str) -> RankRecording:
    """A rank that assigns its part of the data twice, first with the same length on every rank."""
    before = {"data": "61 items crc 1", "rank": str(rank)} | reads
    executions = [
        Execution(
            line, number, tuple((name, Value("", text)) for name, text in before.items()),
            (("mine", Value("list", f"{30 + number * rank} items crc {rank}")),),
        )
        for number in range(2)
    ]  # fmt: skip
    loop = Execution(3, 2)
    train = Activation(FILE, "train", 1, executions=[*executions, loop])
    other = Activation(FILE, "other", 9, executions=[Execution(9, 3, (), (("mine", Value("int", "1")),))])
    return RankRecording(rank, 2, (3, 11), [ThreadRecording("MainThread", [train, other])])


def test_the_statement_that_made_the_list_of_a_loop_is_the_origin_if_its_length_begins_there() -> None:
    ways = ((0,), at(5)), ((1,), at(4))
    lengths = values("mine", "30 items crc 0", "31 items crc 1")
    where = explanation(parts_at=division(3, ways=ways, shown=[lengths]))

    def first(*recordings: RankRecording) -> PlannedExperiment:
        return plan_experiments(where, {FILE: LOOP_OVER_SHARD}, recordings)[0]

    found = first(shard(0), shard(1))
    assert (found.kind, found.place.line, found.name) == (ExperimentKind.EQUAL_LENGTH, 2, "mine")
    assert told(found, "reference", "ranks", "after") == [0, [1], True]
    assert found.proves_origin
    assert found.origin is not None
    assert (found.origin.kind, found.origin.ranks) == (OriginKind.LENGTH, (1,))
    for others in (
        [shard(0, count="5"), shard(1, count="6")],
        [shard(0), shard(1, line=1)],
        [shard(0)],
    ):
        assert first(*others).kind is ExperimentKind.FORCE_BRANCH


def test_a_handler_of_an_exception_of_one_rank_is_the_origin_unless_a_number_differs() -> None:
    ways = ((0,), at(HANDLER)), ((1,), at(AFTER))
    raised = candidate(RAISE, OriginKind.EXCEPTION)
    found = own(raised, parts_at=division(IN_TRY, ways=ways, shown=[values("x", *TENSORS)]))
    assert kinds(found) == [f"force_branch {GUARD}", f"force_branch {IN_TRY}"]
    assert [told(one, "reference", "ranks") for one in found] == [[1, [0]], [1, [0]]]
    assert [one.origin and one.origin.place.line for one in found] == [HANDLER, None]
    assert found[0].origin
    assert found[0].origin.place.text == "except BadSample:"
    assert [one.proves_origin for one in found] == [True, False], "without the exception, or only past its handler"
    found = own(raised, parts_at=division(IN_TRY, ways=ways, shown=[values("mine", "3", "4")]))
    assert {(one.origin, one.proves_origin) for one in found} == {(None, False)}
    assert [one.origin for one in own(raised, parts_at=division(IN_TRY, ways=ways[:1]))] == []


AFTER_CALL = at(3)
SKIPPING = """\
def step(model, x):
    loss = model(x)
    return loss.mean()
def fit(model, data):
    for x in data:
        try:
            step(model, x)
        except {}:
            skipped(x)
"""


@pytest.mark.parametrize(
    ("clause", "error"),
    [
        ("ValueError", "ValueError"), ("(BadSample, KeyError) as failure", "KeyError"), ("", "Exception"),
        ("BadSample", ""), ("UnicodeDecodeError", ""),
    ],
)  # fmt: skip
def test_an_exception_that_one_rank_skips_is_shared_if_it_can_be_raised_without_code_of_the_program(
    clause: str, error: str
) -> None:
    def shared(python: tuple[int, int] = (3, 12), last: Place | None = AFTER_CALL) -> list[PlannedExperiment]:
        parts = division(2, ways=(((0,), None), ((1,), last)), shown=[values("text", "'a'", "'b'")], occurrence=5)
        known = explanation(candidate(9, OriginKind.EXCEPTION, ranks=(0,)), parts_at=parts)
        recordings = [RankRecording(rank, 2, python) for rank in (0, 1)]
        found = plan_experiments(known, {FILE: SKIPPING.format(clause)}, recordings)
        return [one for one in found if one.kind is ExperimentKind.SHARE_EXCEPTION]

    assert [told(one, "kind", "line", "from", "error", "handler", "ranks") for one in shared()] == [
        ["raise", 2, 5, error, 8, [0, 1]] for _ in range(bool(error))
    ]
    assert [(one.origin and one.origin.place.line, one.proves_origin) for one in shared()] == [(8, True)][: bool(error)]
    assert shared(python=(3, 11)) == shared(last=None) == []


@pytest.mark.parametrize(("next_line", "is_after"), [(4, True), (8, False), (1, False)])
def test_a_shared_exception_comes_before_the_statement_if_the_next_one_is_outside_of_the_try(
    next_line: int, is_after: bool
) -> None:
    text = "for x in data:\n    try:\n        a = load(x)\n        b = load(a)\n    except ValueError:\n"
    text += "        continue\n    else:\n        step(b)\n"
    parts = division(3, ways=(((0,), at(5)), ((1,), at(next_line))), occurrence=5)
    recordings = [RankRecording(rank, 2, (3, 12)) for rank in (0, 1)]
    found = plan_experiments(explanation(parts_at=parts), {FILE: text}, recordings)
    shared = [one for one in found if one.kind is ExperimentKind.SHARE_EXCEPTION]
    assert [told(one, "after", "reference") for one in shared] == [[is_after, 0]]


def test_a_branch_that_tensors_decide_is_forced_both_ways() -> None:
    decides = candidate(IMAGE, OriginKind.CALL, "", ranks=(1,), shown=values("has_image", *TENSORS))
    found = own(decides)
    assert [told(one, "reference", "ranks") for one in found] == [[0, [1]], [1, [0]]]
    assert {one.proves_origin for one in found} == {True}
    for line, shown in (CALLED, values("has_image", *TENSORS)), (IMAGE, values("has_image", "1", "2")):
        assert own(candidate(line, OriginKind.CALL, "", ranks=(1,), shown=shown)) == []
    elsewhere = division(IN_TRY, ways=(((0,), at(AFTER)), ((1,), None)))
    assert {one.is_of_decision for one in own(decides, parts_at=elsewhere)} == {True}


def test_a_value_of_a_state_that_every_rank_restored_is_the_origin() -> None:
    taken = candidate(RESTORED, OriginKind.MISSING_REDUCTION, "step", "21", "20", is_provable=False)
    taken = replace(taken, values=(*taken.values, values("state", "3 items crc 1", "3 items crc 2")))
    loads = candidate(LOADS, OriginKind.RESTORED_STATE, chain=((at(LOADS), ""), (at(RESTORED), "step")))
    everywhere = replace(loads, values=(values("path", "'0'", "'1'"),))
    (found,) = own(everywhere, taken)
    assert (found.proves_origin, found.origin and found.origin.kind) == (True, OriginKind.RESTORED_STATE)
    for other in (replace(loads, values=(values("path", "'0'"),)), replace(everywhere, chain=())):
        (found,) = own(other, taken)
        assert (found.proves_origin, found.origin) == (False, None)


def test_the_control_of_an_experiment_differs_from_it_only_in_that_nothing_is_changed() -> None:
    (found,) = planned(candidate(LOSS, OriginKind.CLOCK, "loss", "1", "2", "2"))
    assert control_of(found).instruction == {**found.instruction, "control": True}
    hashes = replace(found, env=(("PYTHONHASHSEED", "0"),))
    assert control_of(hashes).env == ()


USUAL = """\
import os
class Buckets:
    def __init__(self, params, size):
        total = sum(p.numel() for p in params)
        self.count = -(-total // size)
def count(losses, limit):
    bad = sum(loss > limit for loss in losses)
    return bad
class Snapshots:
    def __init__(self, folder, rank):
        self.path = os.path.join(folder, f"rank{rank}.pt")
        self.every = 8 + rank
"""


@pytest.mark.parametrize(
    ("found", "proves"),
    [
        (candidate(7, OriginKind.MISSING_REDUCTION, "bad", "0", "0", "1"), True),
        (candidate(5, OriginKind.MISSING_REDUCTION, "self.count", "4", "4", "2"), False),
        (candidate(12, OriginKind.RANK, "self.every", "8", "9", "10"), True),
        (candidate(11, OriginKind.RANK, "self.path", "'a/rank0.pt'", "'a/rank1.pt'", "'a/rank2.pt'"), False),
    ],
    ids=["number of the data", "size of parameters", "number of the rank", "file of the rank"],
)
def test_what_rightly_differs_between_ranks_is_no_origin_although_the_run_goes_on(
    found: Candidate, proves: bool
) -> None:
    plans = plan_experiments(explanation(found, parts_at=division(7)), {FILE: USUAL})
    assert {one.proves_origin for one in plans if one.kind is ExperimentKind.SET_VALUE} == {proves}


@pytest.mark.parametrize(("made", "proves"), [("self.made(n)", False), ("list(range(n))", True)])
def test_a_length_that_a_function_of_the_program_made_begins_inside_of_it(made: str, proves: bool) -> None:
    text = f"class Windows:\n  def __init__(self, n):\n    self.index = {made}\n  def made(self, n):\n    return [n]\n"
    sequence = values("self.index", "4 items crc 1", "4 items crc 1", "2 items crc 2")
    found = candidate(3, OriginKind.UNKNOWN, "len(self.index)", shown=sequence)
    plans = plan_experiments(explanation(found, parts_at=division(3)), {FILE: text})
    assert [one.proves_origin for one in plans if one.kind is ExperimentKind.EQUAL_LENGTH] == [proves]
