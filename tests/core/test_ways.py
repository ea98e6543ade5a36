"""Where a rank turned off from the way that leads to a call, and what decided it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from textwrap import dedent

import pytest
from builders import USER, board, call, diagnose, frame, in_all_reduce, rank_evidence, rank_snapshot, stalled
from lockstep import line

from nsa_harness.core.diagnosis.call_paths import branch_that_skipped_call, compare_paths, rank_that_skipped_wait
from nsa_harness.core.diagnosis.context import DiagnosisContext
from nsa_harness.core.diagnosis.rules import group_waits
from nsa_harness.core.evidence.evidence import Call, Evidence, Frame, Source, StatusFile, StoreKeyWrites
from nsa_harness.core.report import Finding
from nsa_harness.core.source_code.collection import excerpts
from nsa_harness.core.source_code.program_source import ProgramSource
from nsa_harness.core.verdict.verdict import judge

PROGRAM = dedent(
    """\
    def hour(self, clicks):
        if clicks is None:
            self.merge(0)
            return
        self.roll()
        for batch in clicks:
            if batch.last:
                self.sync()
        self.merge(1)

    def roll(self):
        if self.rank == 0:
            self.publish()

    def publish(self):
        if self.score <= self.best:
            return
        self.store.set(f"epoch{self.epoch}", self.score)

    def epoch(self):
        for batch in self.batches:
            if batch.bad:
                continue
            self.sync()
            self.log()

    def forward(self, batch):
        if batch.masks:
            self.mask_loss(batch)

    def mask_loss(self, batch):
        return self.mask_head(batch)
    """
)


def at(text: str) -> int:
    return next(number for number, one in enumerate(PROGRAM.splitlines(), start=1) if text in one)


def there(text: str, function: str) -> Frame:
    return frame(at(text), function=function)


MAIN = frame(60, function="main")
SOURCES = tuple(excerpts(USER, PROGRAM, set(range(1, len(PROGRAM.splitlines())))))
PUBLISHES = (MAIN, there("self.roll()", "hour"), there("self.publish()", "roll"), there("store.set", "publish"))


def case(
    stands: Sequence[Frame], waits: Sequence[Frame] = (), *boards: StatusFile, sources: Sequence[Source]
) -> DiagnosisContext:
    """Rank 0 stands there in a collective, rank 1 in a wait for a key of a store. Frames from the outside in."""
    seen = evidence_of(stands, waits, *boards, sources=sources)
    return DiagnosisContext(evidence=seen, judgement=judge(seen))


def evidence_of(
    stands: Sequence[Frame], waits: Sequence[Frame], *boards: StatusFile, sources: Sequence[Source] = SOURCES
) -> Evidence:
    own = boards or (inside(0, call(1, left_s=None)), inside(1, call(1, "wait store.get", left_s=None, key="epoch3")))
    leaf = frame(3000, file="/x/torch/distributed/distributed_c10d.py")
    looks = [
        rank_snapshot(rank, leaf, *reversed(way), status_file=own[rank]) for rank, way in enumerate((stands, waits))
    ]
    ranks = tuple(rank_evidence(rank, status_file=one) for rank, one in enumerate(own))
    return replace(stalled(*looks, ranks=ranks), sources=tuple(sources))


def inside(rank: int, now: Call, *keys: StoreKeyWrites) -> StatusFile:
    return board(rank=rank, calls=(now,), keys_set=keys)


@pytest.mark.parametrize(
    ("stands", "decides"),
    [
        # It stands within the branch that leaves before the line.
        ((MAIN, there("self.merge(0)", "hour")), "if clicks is None"),
        # It went through the same function and is out of it: what decides is deeper.
        ((MAIN, there("self.merge(1)", "hour")), "if self.rank == 0"),
        ((MAIN, there("self.merge(1)", "Trainer.hour")), "if self.rank == 0"),
        # In another function nothing is known to decide: where the ways part.
        ((MAIN, frame(80, function="train")), None),
        ((frame(61, function="main"),), "if clicks is None"),
    ],
    ids=["within a branch", "deeper", "with its class", "another function", "another line above"],
)
def test_a_rank_turned_off_where_the_ways_part_or_where_that_was_decided(
    stands: Sequence[Frame], decides: str | None
) -> None:
    found = branch_that_skipped_call(case(stands, PUBLISHES, sources=SOURCES), 0, PUBLISHES)
    assert (found and found.line) == (MAIN.line if decides is None else at(decides))


def test_a_jump_to_the_next_round_may_have_been_taken_by_who_stands_behind_it_now() -> None:
    way = (MAIN, frame(at("            continue") + 1, function="epoch"))
    found = branch_that_skipped_call(case((MAIN, there("self.log()", "epoch")), way, sources=SOURCES), 0, way)
    assert (found and found.line) == at("if batch.bad")


def test_of_a_rank_that_went_the_way_before_no_condition_on_the_rank_decides() -> None:
    seen = case((MAIN, there("self.merge(1)", "hour")), PUBLISHES, sources=SOURCES)
    found = branch_that_skipped_call(seen, 0, PUBLISHES, same_rank=True)
    assert found is not None
    assert (found.line, found.function) == (at("if self.score"), "publish")


def test_without_its_source_it_is_the_line_of_the_way_that_was_not_taken() -> None:
    found = branch_that_skipped_call(case((MAIN, there("self.merge(1)", "hour")), PUBLISHES, sources=()), 0, PUBLISHES)
    assert (found and found.line) == at("self.roll()")
    assert branch_that_skipped_call(case(PUBLISHES, PUBLISHES, sources=SOURCES), 0, PUBLISHES) is None, (
        "it stands there"
    )


def test_the_ways_part_at_the_first_line_that_differs() -> None:
    one, other = (MAIN, frame(3, function="a.step"), frame(9)), (MAIN, frame(5, function="step"))
    found = compare_paths(one, other)
    assert (found.shared, found.path_frame, found.stack_frame, found.deeper) == ((MAIN,), one[1], other[1], (one[2],))
    assert found.in_one_function
    assert not compare_paths((MAIN, frame(3, function="a.step")), (MAIN, frame(5, function="b.step"))).in_one_function
    assert not compare_paths((MAIN,), (MAIN,)).in_one_function


def told(seen: Evidence) -> Finding:
    return diagnose(seen, judge(seen)).findings[0]


def key_set(key: str, count: int, way: Sequence[Frame] = PUBLISHES) -> StoreKeyWrites:
    return StoreKeyWrites(key=key, count=count, at_s=1.0, chain=tuple(reversed(way)))


WAITS = call(1, "wait store.get", left_s=None, key="epoch3")
STANDS = (MAIN, there("self.merge(1)", "hour"))


def test_who_set_such_keys_before_is_told_with_what_let_it_out_before_the_line() -> None:
    boards = inside(0, call(1, left_s=None), key_set("epoch2", 3)), inside(1, WAITS, key_set("seen", 9))
    found = told(evidence_of(STANDS, (MAIN, frame(70)), *boards))
    assert (found.code, found.ranks, found.place) == (
        "store_key_missing",
        (0,),
        replace(line(at("if self.score")), function="publish"),
    )
    set_before = found.facts["set_before"]
    assert (set_before["rank"], set_before["key"], set_before["line"]["line"]) == (0, "epoch2", 18)
    assert set_before["turned_off_at"]["line"] == 16


def test_of_several_that_set_such_keys_the_one_that_did_it_less_often_is_behind() -> None:
    boards = inside(0, call(1, left_s=None), key_set("epoch2", 3)), inside(1, WAITS, key_set("epoch7", 4))
    assert told(evidence_of(STANDS, (MAIN, frame(70)), *boards)).ranks == (0,)
    alike = boards[0], inside(1, WAITS, key_set("epoch7", 3))
    assert told(evidence_of(STANDS, (MAIN, frame(70)), *alike, sources=())).ranks == (1,), "nobody is behind"


def test_a_rank_that_set_a_key_with_another_last_word_should_set_this_one() -> None:
    waits = call(1, "wait store.get", left_s=None, key="features/test")
    boards = inside(0, call(1, left_s=None), key_set("features/train", 1)), inside(1, waits, key_set("seen", 9))
    found = told(evidence_of(STANDS, (MAIN, frame(70)), *boards))
    assert (found.code, found.ranks, found.facts["set_before"]["key"]) == (
        "store_key_missing", (0,), "features/train",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("key", "other", "difference"),
    [
        ("epoch3", "epoch2", (0, 1)),
        ("rollout/1/2", "rollout/0/1", (0, 2)),
        ("features/test", "features/train", (1, 0)),
        ("features/test", "features/test", (0, 0)),
        ("test/features", "train/features", None),  # the first word says what the key is about
        ("features/test/1", "features/train/2", None),
        ("epoch3", "epoch3/done", None),
        ("epoch3", "seen", None),
        ("a/3", "a/b", None),
        ("", "", (0, 0)),
    ],
)
def test_keys_are_similar_if_numbers_or_one_later_word_differ(
    key: str, other: str, difference: tuple[int, int] | None
) -> None:
    assert group_waits._difference(key, other) == difference


def test_of_ranks_that_wait_for_each_others_keys_the_one_that_came_last_left_its_own_unset() -> None:
    learner = call(1, "wait store.get", left_s=None, entered_s=9.0, key="rollout/1/1")
    actors = [call(1, "wait store.get", left_s=None, entered_s=5.0, key="policy/1") for _ in range(2)]
    boards = (
        inside(0, learner, key_set("policy/0", 1)),
        inside(1, actors[0], key_set("rollout/0/1", 1)),
        inside(2, actors[1], key_set("rollout/0/2", 1)),
    )
    leaf = frame(3000, file="/x/torch/distributed/distributed_c10d.py")
    snapshots = [rank_snapshot(rank, leaf, MAIN, frame(70), status_file=one) for rank, one in enumerate(boards)]
    ranks = tuple(rank_evidence(rank, status_file=one) for rank, one in enumerate(boards))
    found = told(stalled(*snapshots, ranks=ranks))
    assert (found.code, found.ranks, found.facts["key"]) == ("store_key_missing", (0,), "policy/1")


def test_a_rank_that_sets_keys_of_another_form_went_past_nothing() -> None:
    seen = evidence_of(STANDS, (MAIN, frame(70)), sources=())
    assert told(seen).ranks == (0,)
    boards = inside(0, call(1, left_s=None), key_set("aa55", 1)), inside(1, WAITS)
    assert told(evidence_of(STANDS, (MAIN, frame(70)), *boards, sources=())).ranks == (1,)


def test_who_went_past_is_one_rank_in_a_collective_that_the_others_wait_for() -> None:
    seen = case(STANDS, (MAIN, frame(70)), sources=())
    assert rank_that_skipped_wait(seen, [1]) == 0
    assert rank_that_skipped_wait(seen, [0, 1]) is None
    leaf = frame(3000, file="/x/torch/distributed/distributed_c10d.py")
    pairs = (inside(1, call(1, "recv", left_s=None, peer=2)), inside(2, call(1, "recv", left_s=None, peer=1)))
    receive = [rank_snapshot(one.rank or 0, leaf, frame(70), status_file=one) for one in pairs]
    apart = stalled(replace(in_all_reduce(0), status_file=inside(0, call(1, left_s=None))), *receive)
    assert rank_that_skipped_wait(DiagnosisContext(evidence=apart, judgement=judge(apart)), [1, 2]) is None, (
        "they wait for each other alone"
    )
    proof = seen.judgement.proof
    assert proof is not None
    untied = tuple(replace(one, peers=()) for one in proof.graph.roots)
    alone = replace(seen.judgement, proof=replace(proof, graph=replace(proof.graph, roots=untied)))
    assert rank_that_skipped_wait(replace(seen, judgement=alone), [1]) is None, "nobody waits for it"
    both = stalled(in_all_reduce(0), in_all_reduce(1))
    assert rank_that_skipped_wait(DiagnosisContext(evidence=both, judgement=judge(both)), []) is None


def test_a_line_under_no_condition_is_guarded_by_the_one_around_its_only_caller() -> None:
    found = ProgramSource(SOURCES).guard(line(at("self.mask_head")))
    assert found is not None
    assert (found.text, found.line) == ("if batch.masks", at("if batch.masks"))
    assert ProgramSource(SOURCES).guard(line(at("self.merge(0)"))) is not None
    twice = tuple(excerpts(USER, PROGRAM + "    self.mask_loss(batch)\n", {at("self.mask_head")}))
    assert ProgramSource(twice).guard(line(at("self.mask_head"))) is None, "which of them was meant is not known"
    assert ProgramSource(()).guard(line(3)) is None


def test_the_functions_that_call_one_are_kept_with_it() -> None:
    kept = excerpts(USER, PROGRAM, {at("self.mask_head")})
    assert [one.text.split("(")[0] for one in kept] == ["def forward", "def mask_loss"]


def test_where_nothing_decides_one_line_it_is_what_decides_the_other() -> None:
    """Only the rank that stands within the condition took it."""
    source = Source(file=USER, first=80, text="def sync(self):\n    if self.due:\n        outer()\n    evaluate()")
    way = (MAIN, frame(83, function="sync"))
    found = branch_that_skipped_call(case((MAIN, frame(82, function="sync")), way, sources=(source,)), 0, way)
    assert (found and found.line) == 81
    assert ProgramSource((source,)).condition_around_only(None, line(83)) is None


def test_a_condition_that_is_the_same_on_every_rank_decides_after_one_that_is_not() -> None:
    lines = ["def fit(self):", "    for step in range(9):", "        if self.since == 4:", "            outer()"]
    lines += ["        if step % 3 == 0:", "            evaluate()"]
    source = Source(file=USER, first=80, text="\n".join(lines))
    way = (MAIN, frame(85, function="fit"))
    found = branch_that_skipped_call(case((MAIN, frame(83, function="fit")), way, sources=(source,)), 0, way)
    assert (found and found.line) == 82


FIRES = """\
def fit(self, batches):
    accum = self.cfg["accum"]
    for number, batch in enumerate(batches):
        boundary = number % accum == 0
        self.loss(batch)
        if not boundary:
            continue
        self.fire("step", self.number)

def fire(self, event, number):
    for hook in self.hooks[event]:
        try:
            hook(number)
        except Exception as error:
            self.failed += 1

def report(self, number):
    if number % self.every:
        return
    gather(self.seen)
"""


@pytest.mark.parametrize(
    ("source", "decides"),
    [
        (FIRES, "except Exception"),
        (FIRES.replace("self.failed += 1", "raise"), "if number % self.every"),
        (FIRES.replace("if not boundary", "if not boundary or batch.bad"), "if not boundary or batch.bad"),
    ],
    ids=["goes on", "raises", "another condition"],
)
def test_what_was_raised_on_the_way_may_have_been_caught_there(source: str, decides: str) -> None:
    """What follows from a counter and a setting is the same on every rank, and decides nothing."""

    def line_of(text: str) -> int:
        return next(number for number, one in enumerate(source.splitlines(), start=1) if text in one)

    stands = (MAIN, frame(line_of("self.loss(batch)"), function="fit"))
    way = (
        MAIN,
        *(
            frame(line_of(text), function=name)
            for text, name in (('self.fire("', "fit"), ("hook(number)", "fire"), ("gather(", "report"))
        ),
    )
    sources = tuple(excerpts(USER, source, {one.line for one in (*stands, *way)}))
    found = branch_that_skipped_call(case(stands, way, sources=sources), 0, way)
    assert (found and found.line) == line_of(decides)


def test_of_another_thread_its_own_function_tells_what_let_it_out_of_the_way() -> None:
    way = (frame(70, function="writer"), there("self.log()", "epoch"), there("store.set", "publish"))
    found = branch_that_skipped_call(
        case((MAIN, there("self.merge(1)", "hour")), way, sources=SOURCES), 0, way, same_rank=True
    )
    assert (found and found.line) == at("if self.score"), "the innermost"


def test_of_two_calls_in_one_line_the_one_that_the_rank_made_before_tells_where_it_turned_off() -> None:
    way, stands = (
        (MAIN, there("self.publish()", "roll"), there("store.set", "publish")),
        (MAIN, frame(90, function="loss")),
    )
    found = branch_that_skipped_call(case(stands, way, sources=SOURCES), 0, way, same_rank=True)
    assert (found and found.line) == at("if self.score")
    assert branch_that_skipped_call(case(stands, way, sources=SOURCES), 0, way) == replace(
        line(MAIN.line), function="main"
    )
