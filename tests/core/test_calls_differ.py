"""Where the calls of the ranks part: the cause, who, where, in which step, and how sure that is."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from builders import (
    USER,
    Diagnosis,
    board,
    call,
    diagnose,
    ended,
    evidence,
    frame,
    in_all_reduce,
    locked_in_backward,
    mark,
    raised,
    rank_evidence,
    rank_snapshot,
    stack,
    stalled,
)
from lockstep import ZERO_NS, Made, Run, entered, line, rounds, run
from test_reasons import DROPPED, NET, steps, through, training, went_through

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.rules import call_places, call_reasons, calls_differ
from nsa_harness.core.evidence.evidence import (
    Call,
    CaughtException,
    Collective,
    Ending,
    Evidence,
    ForwardMode,
    Frame,
    ModuleCall,
    RankEvidence,
    RankSnapshot,
    Source,
    StatusFile,
    StepRow,
    Tally,
)
from nsa_harness.core.report import CollectiveRef, Finding, Place, Status
from nsa_harness.core.source_code.collection import excerpts
from nsa_harness.core.verdict.verdict import judge
from nsa_harness.texts.words import ranks_by_text

CERTAIN, LIKELY, OPEN = 0.95, 0.8, 0.75


def diagnosed(seen: Evidence) -> Diagnosis:
    return diagnose(seen, judge(seen))


ALL_BLAMED = "this run does not show which of these ranks is wrong"


def main(seen: Evidence) -> Finding:
    return diagnosed(seen).findings[0]


def hung(*boards: StatusFile, collectives: Sequence[Sequence[Collective]], ledgers: Any = None) -> Evidence:
    """Ranks that stand in their newest collective, seen twice and ended as a stall."""
    looks = [in_all_reduce(rank, *made) for rank, made in enumerate(collectives)]
    looks = [replace(look, status_file=made) for look, made in zip(looks, boards, strict=True)]
    known = [
        rank_evidence(rank, status_file=made, collectives=tuple(entries), ledger=tuple(ledger))
        for rank, (made, entries, ledger) in enumerate(
            zip(boards, collectives, ledgers or [()] * len(boards), strict=True)
        )
    ]
    return stalled(*looks, ranks=tuple(known))


def stood(ran: Run, *frames: Sequence[Frame], **changes: Any) -> Evidence:
    """The run as it came to a stand; each rank stands in these frames of the program."""
    seen = hung(*ran.boards.values(), collectives=list(ran.collectives.values()))
    if frames:
        looks = tuple(
            replace(look, ranks=tuple(standing(rank, *above) for rank, above in zip(look.ranks, frames, strict=True)))
            for look in seen.snapshots
        )
        seen = replace(seen, snapshots=looks)
    return replace(seen, **changes)


def standing(rank: RankSnapshot, *frames: Frame) -> RankSnapshot:
    return replace(rank, stacks=(replace(rank.stacks[0], frames=(rank.stacks[0].frames[0], *frames)),))


def calling(*made: Call, **changes: Any) -> StatusFile:
    return board(mark("step", step=made[-1].step if made else 1), calls=made, zero_ns=ZERO_NS, **changes)


def blamed(seen: Evidence) -> tuple[str, tuple[int, ...], int | None, int | None, float]:
    """The cause, who, the line, the step, and how sure it is."""
    found = diagnosed(seen)
    first = found.findings[0]
    step = found.culprit.step if found.culprit else None
    return first.code, first.ranks, first.place.line if first.place else None, step, first.confidence


REDUCE, GATHER, BARRIER = Made(), Made(op="all_gather", line=41), Made(op="barrier", line=45, elements=0)
BODY = [REDUCE, GATHER, BARRIER]
MADE = rounds(BODY, 3)
OTHER = Made(op="broadcast", line=99, root=0)

FAULTS: dict[str, tuple[Sequence[Made], str, int]] = {
    "left out": ([*MADE[:6], *MADE[7:]], "rank_conditional_collective", 37),
    "left out once before": ([*MADE[:3], *MADE[4:]], "rank_conditional_collective", 37),
    "extra": ([*MADE[:7], replace(OTHER, step=3, position=9), *MADE[7:]], "rank_conditional_collective", 99),
    "in its place": ([*MADE[:6], replace(OTHER, step=3), *MADE[7:]], "collective_order_mismatch", 99),
    "another size": ([*MADE[:6], replace(MADE[6], elements=5), *MADE[7:]], "shape_mismatch", 37),
    "another type": ([*MADE[:6], replace(MADE[6], dtype="torch.float64"), *MADE[7:]], "dtype_mismatch", 37),
}


@pytest.mark.parametrize("others", [1, 3])
@pytest.mark.parametrize("name", FAULTS)
def test_the_rank_that_left_its_rounds_is_blamed_at_its_line_and_in_its_step(name: str, others: int) -> None:
    mine, code, at = FAULTS[name]
    found = blamed(stood(run(*[MADE] * others, mine)))
    assert found[:4] == (code, (others,), at, 2 if name == "left out once before" else 3)
    assert found[4] in (LIKELY, CERTAIN)


def test_the_collective_of_a_difference_is_told_with_its_number() -> None:
    culprit = diagnosed(stood(run(MADE, FAULTS["left out"][0]))).culprit
    assert culprit is not None
    assert culprit.collective == CollectiveRef(group="0", seq=7, op="all_reduce")


def test_a_call_of_one_rank_alone_within_its_step_is_that_of_rank_0_where_rank_0_made_it() -> None:
    extra = FAULTS["extra"][0]
    assert blamed(stood(run(extra, MADE, MADE)))[:4] == ("rank0_only_collective", (0,), 99, 3)
    assert blamed(stood(run(MADE, extra, MADE)))[:4] == ("rank_conditional_collective", (1,), 99, 3)


def test_fewer_rounds_of_a_loop_are_told_of_the_rank_that_left_it() -> None:
    made = rounds([REDUCE, REDUCE, REDUCE, BARRIER], 3)
    found = main(stood(run(made, made, [*made[:10], *made[11:]])))
    assert (found.code, found.ranks, found.place) == ("rank_conditional_collective", (2,), line(37))
    assert (found.facts["variant"], found.facts["remaining"]) == ("count", [0, 1])


def test_two_ranks_in_their_first_step_leave_open_which_of_them_is_wrong() -> None:
    found = main(stood(run([REDUCE], [GATHER])))
    assert (found.code, found.ranks, found.confidence) == ("collective_order_mismatch", (0, 1), OPEN)
    assert found.left_open == (ALL_BLAMED,)


def test_a_rank_that_is_only_late_makes_no_cause_of_its_own() -> None:
    assert diagnosed(stood(run(MADE, MADE[:7]))).cause not in CAUSES


def test_the_same_collective_on_every_rank_is_the_networks_whatever_a_ledger_says() -> None:
    seen = hung(calling(), calling(), collectives=[[entered(9)], [entered(9)]], ledgers=(ledger(1, 1), ledger(1, 0)))
    assert diagnosed(seen).cause not in CAUSES


def test_ranks_that_did_the_same_are_told_together_and_of_many_kinds_the_rest_is_counted() -> None:
    assert ranks_by_text([(1, "a"), (0, "a"), (2, "b")]) == [("ranks 0, 1", "a"), ("rank 2", "b")]
    told = ranks_by_text([(rank, str(rank)) for rank in range(1000)])
    assert (len(told), told[-1]) == (5, ("996 more ranks", "something else"))


# The place where the fix belongs.

SOURCE = """\
def step(rank, last):
    if rank == 0:
        dist.all_reduce(loss)
    for batch in loader:
        dist.broadcast(batch)
    dist.barrier()
"""


def with_source(seen: Evidence, first: int) -> Evidence:
    return replace(seen, sources=(Source(file=USER, first=first, text=SOURCE),))


def test_a_condition_on_the_rank_around_the_call_is_where_the_fix_belongs() -> None:
    seen = stood(run(MADE, FAULTS["left out"][0]))
    assert main(with_source(seen, 35)).place == line(36)
    assert main(with_source(seen, 33)).place == line(37), "in a loop, and under no condition"
    sizes = stood(run(MADE, FAULTS["another size"][0]))
    assert main(with_source(sizes, 35)).place == line(37), "that does not decide how large it is"


def test_a_condition_around_a_caller_leads_there_as_well() -> None:
    seen = stood(run(MADE, FAULTS["left out"][0]), [frame(37)], [frame(41)])
    above = [frame(37, function="sync"), frame(62, function="main")], [frame(41, function="sync")]
    seen = stood(run(MADE, FAULTS["left out"][0]), *above)
    source = Source(file=USER, first=60, text="def main(rank):\n    if rank:\n        sync()\n")
    assert main(replace(seen, sources=(source,))).place == Place(file=USER, line=61, function="main")


def test_a_helper_of_several_callers_is_no_place_but_the_line_above_where_the_ranks_part() -> None:
    loop, outer = frame(46, function="sync"), frame(66, function="run")
    ways = [frame(37, function="mean"), loop, outer], [frame(41, function="histogram"), loop, outer]
    place = main(stood(run(MADE, FAULTS["left out"][0]), *ways)).place
    assert place is not None
    assert (place.file, place.line, place.function) == (USER, 46, "sync")


@pytest.mark.parametrize(
    "ways",
    [
        ([frame(30, function="sync"), frame(66)], [frame(32, function="sync"), frame(66)]),
        ([frame(30, function="sync")], [frame(35, function="sync")]),
        ([frame(31, function="mean"), frame(30, function="sync")], [frame(35, function="sync")]),
    ],
    ids=["below one line", "nothing above", "within a helper"],
)
def test_where_nothing_is_seen_to_decide_it_is_the_line_that_the_other_one_did_not_reach(
    ways: Sequence[Sequence[Frame]],
) -> None:
    place = main(stood(run(MADE, FAULTS["left out"][0]), *ways)).place
    assert (place and place.line, place and place.function) == (30, "sync")


def test_who_stands_behind_a_loop_in_which_another_rank_still_is_went_fewer_rounds() -> None:
    """Rank 1 is in line 6 of the source, and rank 0 in line 5 of it, within the loop."""
    made = [Made(op="broadcast", line=104), Made(op="barrier", line=105, elements=0)]
    seen = stood(run(made[:1], made[1:]), [frame(104)], [frame(105)])
    assert main(with_source(seen, 100)).ranks == (1,)
    assert main(seen).ranks == (0, 1)


SERVES = """\
def serve(self):
    for step in range(self.steps):
        rows = collect()
        try:
            found = score(rows)
        except ValueError:
            self.skipped += 1
            continue
        hand_back(found)


def act(self):
    collect()
    hand_back()


def collect():
    gather()


def hand_back(found=None):
    scatter(found)
"""


def test_of_a_call_that_each_role_makes_in_a_function_of_its_own_the_ranks_own_way_tells() -> None:
    """Both are called in one line, and who went another way is told by the function that it stands in."""
    gather, scatter = Made(op="gather", line=47, root=0), Made(op="scatter", line=51, root=0)
    again = [replace(gather, step=step) for step in (1, 2)]
    seen = stood(
        run(
            [again[0], scatter, again[1], replace(scatter, step=2)],
            [again[0], scatter, *again[1:], replace(gather, step=3)],
        ),
        [frame(51, function="hand_back"), frame(43, function="act"), frame(20, function="main")],
        [frame(47, function="collect"), frame(32, function="serve"), frame(20, function="main")],
    )
    told = main(replace(seen, sources=served(SERVES)))
    assert (told.ranks, told.place and told.place.line) == ((1,), 37)
    by_name = served(SERVES.replace("hand_back(found)", "self.back(found)"))
    assert (main(replace(seen, sources=by_name)).place or Place()).line == 20
    ways = ((51, "hand_back"), (43, "act"), (20, "main")), ((51, "hand_back"), (38, "serve"), (20, "main"))
    led = [
        replace(
            one,
            calls=tuple(
                replace(each, chain=tuple(frame(at, function=name) for at, name in way))
                if each.op == "scatter"
                else each
                for each in one.calls
            ),
        )
        for one, way in zip((rank.status_file or board() for rank in seen.ranks), ways, strict=True)
    ]
    ranks = tuple(replace(rank, status_file=one) for rank, one in zip(seen.ranks, led, strict=True))
    assert (main(replace(seen, ranks=ranks, sources=by_name)).place or Place()).line == 37


def served(text: str) -> tuple[Source, ...]:
    return tuple(excerpts(USER, "\n" * 29 + text, set(range(30, 60))))


TRIALS = """\
def objective(args, loader):
    for epoch in range(args.epochs):
        for batch in loader:
            share(batch)
        value = mean()
        if bad(value):
            raise Pruned


def mean():
    all_gather()
"""


@pytest.mark.parametrize(
    ("text", "told"),
    [(TRIALS, 75), (TRIALS.replace("Pruned", "ValueError"), 71)],
    ids=["an exception that stops", "an error"],
)
def test_the_loop_that_was_left_is_the_one_around_the_last_call_and_an_exception_may_leave_it(
    text: str, told: int
) -> None:
    share, mean = Made(op="all_reduce", line=73), Made(op="all_gather", line=80)
    done = [share, share, mean]
    ran = run([*done, share], [*done, Made(op="broadcast", line=90, elements=0)])
    way = (frame(80, function="mean"), frame(74, function="objective"), frame(50, function="search"))
    with_ways = [
        replace(one, calls=tuple(replace(each, chain=way) if each.op == "all_gather" else each for each in one.calls))
        for one in ran.boards.values()
    ]
    seen = stood(
        replace(ran, boards=dict(enumerate(with_ways))),
        [frame(73, function="objective"), frame(50, function="search")],
        [frame(90, function="ask"), frame(49, function="search")],
    )
    found = main(replace(seen, sources=(Source(file=USER, first=70, text=text.partition("\n\n\n")[0]),)))
    assert (found.ranks, found.place and found.place.line) == ((1,), told)


ENTERS = """\
def main(launcher):
    with launcher.main_first():
        images = prepare()
        cache = build(images)
"""


def test_a_call_inside_of_a_with_that_another_rank_has_yet_to_enter_is_the_place() -> None:
    first = Source(
        file=USER, first=30, text="def main_first(self):\n    if self.rank != 0:\n        barrier()\n    yield"
    )
    seen = stood(
        run([Made(op="all_reduce", line=40)], [Made(op="barrier", line=32, elements=0)]),
        [frame(40, function="build"), frame(73, function="main")],
        [frame(32, function="main_first"), frame(71, function="main")],
    )
    block = Source(file=USER, first=70, text=ENTERS)
    found = main(replace(seen, sources=(first, block)))
    assert (found.place and found.place.line, found.place and found.place.function) == (73, "main")
    assert main(replace(seen, sources=(first,))).place == line(31, "main_first")


def test_of_a_condition_on_the_rank_for_several_statements_the_later_one_is_the_place() -> None:
    """That one rank does the rest of it alone is meant so."""
    text = "def step(rank):\n    if rank == 0:\n        save()\n        log()\n        score()\n"
    ran = run(MADE, FAULTS["left out"][0])
    seen = stood(ran, [frame(37, function="score"), frame(54)], [frame(41), frame(56)])
    found = main(replace(seen, sources=(Source(file=USER, first=50, text=text),)))
    assert found.place == line(54)
    condition = found.facts["condition"]
    assert (condition["ranks"], condition["text"], condition["line"]["line"]) == ([0], "if rank == 0", 51)
    one = text.replace("        save()\n        log()\n", "") + "    done()\n    end()\n"
    seen = stood(ran, [frame(37, function="score"), frame(52)], [frame(41), frame(54)])
    assert main(replace(seen, sources=(Source(file=USER, first=50, text=one),))).place == line(51)


WORDS = """\
def evaluate(words, own):
    for word in words:
        if word not in own:
            continue
        share(word)


def share(word):
    all_reduce(word)
"""


@pytest.mark.parametrize(
    ("source", "place"),
    [(WORDS, 72), (WORDS.replace("            continue", "            pass"), 71)],
    ids=["a jump before it", "nothing lets it out"],
)
def test_who_is_beyond_a_loop_in_which_another_makes_the_call_once_more_left_a_round_out(
    source: str, place: int
) -> None:
    """The two stand in functions of their own, called from two lines of a third one."""
    share = Made(op="all_reduce", line=78)
    seen = stood(
        run([share] * 5, [*[share] * 4, Made(op="broadcast", line=90, elements=0)]),
        [frame(78, function="share"), frame(74, function="evaluate"), frame(50, function="fit")],
        [frame(90, function="save"), frame(51, function="fit")],
    )
    sources = (Source(file=USER, first=50, text="evaluate()\nsave()"), Source(file=USER, first=70, text=source))
    found = main(replace(seen, sources=sources))
    assert (found.ranks, found.place and found.place.line) == ((1,), place)
    assert (found.facts["variant"], found.facts["remaining"]) == ("count", [0])


WITHIN_A_STEP = """\
def fit(self):
    while self.step < self.steps:
        self.train()
        if self.step % self.every == 0:
            self.log()


def train(self):
    for micro in range(self.accum):
        self.lose(micro)
    self.optimizer.step()
"""


@pytest.mark.parametrize(("optimizer", "left"), [(81, False), (80, True)], ids=["behind the loop", "in the loop"])
def test_who_is_in_a_loop_of_a_later_step_has_not_been_left_in_it(*, optimizer: int, left: bool) -> None:
    """Rank 1 logs after the step whose loop it went through, and rank 0 is in the next step."""
    gather, log = Made(op="all_gather", line=80), Made(op="all_reduce", line=90)
    seen = stood(
        run([*[gather] * 5], [*[gather] * 4, log]),
        [frame(80, function="train"), frame(73, function="fit")],
        [frame(90, function="log"), frame(75, function="fit")],
    )
    stepped = (frame(optimizer, function="train"), frame(73, function="fit"))
    steps = {0: 3, 1: 2}
    boards = {
        one.rank: replace(
            one.status_file,
            optimizer_chain=stepped,
            calls=(*one.status_file.calls[:-1], replace(one.status_file.calls[-1], step=steps[one.rank])),
        )
        for one in seen.ranks
        if one.status_file
    }
    ranks = tuple(replace(one, status_file=boards.get(one.rank)) for one in seen.ranks)
    source = Source(file=USER, first=71, text=WITHIN_A_STEP)
    found = main(replace(seen, ranks=ranks, sources=(source,)))
    assert ("left the loop" in found.claim) is left


SKIPS = """\
def step(rank):
    for step in range(9):
        if step == 4 and rank == 1:
            continue
        dist.all_reduce(loss)
    dist.barrier()
"""


@pytest.mark.parametrize(
    ("text", "line_at_fault"),
    [(SKIPS, 3), (SKIPS.replace("rank == 1", "loss < 2"), 3), (SKIPS.replace(" and rank == 1", ""), 2)],
    ids=["condition on the rank", "another condition", "equal on all ranks"],
)
def test_a_condition_that_skips_a_call_goes_before_the_line_of_the_loop(text: str, line_at_fault: int) -> None:
    reduced, barrier = frame(75, function="step"), frame(76, function="step")
    made = [[Made(line=75)] * 6, [*[Made(line=75)] * 5, Made(op="barrier", line=76)]]
    seen = stood(run(*made), [reduced], [barrier])
    chains = [[(reduced,)] * 6, [*[(reduced,)] * 5, (barrier,)]]
    finding = main(replace(with_chains(seen, chains), sources=(Source(file=USER, first=71, text=text),)))
    assert (finding.ranks, finding.place and finding.place.line) == ((1,), 70 + line_at_fault)


def with_chains(seen: Evidence, chains: Sequence[Sequence[Sequence[Frame]]]) -> Evidence:
    """The evidence with the lines that led to each call of each rank."""
    ranks = []
    for one in seen.ranks:
        assert one.status_file is not None
        pairs = zip(one.status_file.calls, chains[one.rank], strict=False)
        calls = tuple(replace(each, chain=tuple(chain)) for each, chain in pairs)
        ranks.append(replace(one, status_file=replace(one.status_file, calls=calls)))
    return replace(seen, ranks=tuple(ranks))


NEW_BEST = """\
def share(value):
    dist.all_reduce(value)
def keep(best, loss):
    if loss < best:
        share(loss)
def train(best):
    for step in range(9):
        dist.all_reduce(loss)
        keep(best, loss)
    dist.barrier()
"""


def test_a_call_in_a_helper_is_found_where_only_one_rank_made_it() -> None:
    """Rank 0 shares a new best value three times more. Equal sizes hide it."""
    first = 71
    train, keep, share = (frame(first + at, function=name) for at, name in ((7, "train"), (4, "keep"), (1, "share")))
    shared, reduced = (share, keep, frame(first + 8, function="train")), (train,)
    chains = {
        0: [reduced, shared, *[reduced] * 2, shared, *[reduced] * 2, shared, *[reduced] * 3, shared],
        1: [reduced, shared, *[reduced] * 9],
    }
    after = frame(first + 9, function="train")
    made = {rank: [Made(line=chain[0].line) for chain in of_rank] for rank, of_rank in chains.items()}
    ran = run(made[0], [*made[1], Made(op="barrier", line=after.line)])
    seen = stood(ran, [share, keep, frame(first + 8, function="train")], [after])
    chains[1].append((after,))
    functions = NEW_BEST.split("def ")[1:]
    sources, at = [], first
    for text in functions:
        sources.append(Source(file=USER, first=at, text=f"def {text}"))
        at += text.count("\n")
    finding = main(replace(with_chains(seen, [chains[0], chains[1]]), sources=tuple(sources)))
    assert finding.code == Cause.RANK_CONDITIONAL_COLLECTIVE
    assert (finding.ranks, finding.place and finding.place.line) == ((0,), first + 3)
    assert "left the loop" not in finding.claim


TRIED = """\
def evaluate(words, rank):
    for word in words:
        try:
            load(word)
        except OSError:
            continue
        share(word)


def share(word):
    all_reduce(word)
"""


@pytest.mark.parametrize(
    ("source", "cause", "place"),
    [
        (TRIED, "swallowed_exception", 75),
        (TRIED.replace("continue", "pass"), "rank_conditional_collective", 71),
    ],
    ids=["left_out", "went_on"],
)
def test_a_round_that_only_an_except_leaves_out_was_swallowed_there_whatever_was_printed(
    source: str, cause: str, place: int
) -> None:
    share = Made(op="all_reduce", line=80)
    seen = stood(
        run([share] * 5, [*[share] * 4, Made(op="broadcast", line=90, elements=0)]),
        [frame(80, function="share"), frame(76, function="evaluate"), frame(50, function="fit")],
        [frame(90, function="save"), frame(51, function="fit")],
    )
    sources = (Source(file=USER, first=50, text="evaluate()\nsave()"), Source(file=USER, first=70, text=source))
    for lines in ((), ("WARNING bad batch left out",)):
        told = tuple(replace(one, error_lines=lines) if one.rank == 1 else one for one in seen.ranks)
        found = main(replace(seen, ranks=told, sources=sources))
        assert (found.code, found.ranks, found.place and found.place.line) == (cause, (1,), place)


# Groups crossed.


def groups_crossed(**second: Any) -> Evidence:
    open_call = call(1, group="1", step=3, left_s=None)
    boards = [calling(open_call), calling(replace(open_call, group="2", **second))]
    first = [entered(1, 1.0, group="2", retired=True), entered(2, group="1")]
    return hung(*boards, collectives=[first, [entered(1, 1.0, group="1", retired=True), entered(2, group="2")]])


def test_groups_taken_in_opposite_order_are_a_deadlock_of_both_ranks() -> None:
    found = diagnosed(groups_crossed())
    assert found.cause == "cross_group_deadlock"
    waits = found.findings[0].facts["waits"]
    assert [(wait["rank"], wait["waits_for"], wait["call"]["group"]) for wait in waits] == [(0, 1, "1"), (1, 0, "2")]
    assert found.findings[0].confidence == LIKELY
    assert found.culprit is not None
    assert (found.culprit.ranks, found.culprit.step) == ((0, 1), 3)
    assert found.culprit.collective == CollectiveRef(group="1", seq=2, op="all_reduce")


UNDER_RANK = """\
def step(rank):
    dist.all_reduce(before)
    if rank == 0:
        dist.barrier(group=nodes)
    dist.all_reduce(loss)
"""


@pytest.mark.parametrize(
    ("text", "other_line", "cause", "ranks"),
    [
        (UNDER_RANK, 74, "rank0_only_collective", (0,)),
        (UNDER_RANK, 71, "cross_group_deadlock", (0, 1)),
        (UNDER_RANK.replace("rank == 0", "loss < 2"), 74, "cross_group_deadlock", (0, 1)),
    ],
    ids=["passed by", "not reached yet", "another condition"],
)
def test_a_call_under_a_condition_on_the_rank_that_the_other_rank_passed_by_is_the_one_at_fault(
    text: str, other_line: int, cause: str, ranks: tuple[int, ...]
) -> None:
    seen = groups_crossed(place=line(other_line))
    first = seen.ranks[0].status_file
    assert first is not None
    first = replace(first, calls=(replace(first.calls[0], place=line(73)),))
    seen = replace(seen, ranks=(replace(seen.ranks[0], status_file=first), *seen.ranks[1:]))
    stands = (frame(73, function="step"),), (frame(other_line, function="step"),)
    looks = tuple(
        replace(look, ranks=tuple(standing(rank, *above) for rank, above in zip(look.ranks, stands, strict=True)))
        for look in seen.snapshots
    )
    found = main(replace(seen, snapshots=looks, sources=(Source(file=USER, first=70, text=text),)))
    assert (found.code, found.ranks) == (cause, ranks)
    assert (found.place and found.place.line) == (72 if cause == "rank0_only_collective" else 73)


TABLES = """\
def embed(tables, batch):
    for name, ids in batch.items():
        for part in range(2):
            tables[name](ids)


def exchange(ids):
    all_to_all(ids)
"""


def test_ranks_on_one_line_in_different_groups_are_in_other_rounds_of_the_loop_over_things() -> None:
    """A mere count is the same on every rank."""
    seen = groups_crossed()
    stand = [frame(77, function="exchange"), frame(73, function="embed"), frame(60, function="fit")]
    looks = tuple(
        replace(look, ranks=tuple(replace(one, stacks=(stack(*stand),)) for one in look.ranks))
        for look in seen.snapshots
    )
    source = Source(file=USER, first=70, text=TABLES)
    assert main(replace(seen, snapshots=looks, sources=(source,))).place == line(71, "embed")
    assert main(replace(seen, snapshots=looks)).place == line(37), "that of the call"


def turned(rounds_before: int, *, one_line: bool = False) -> tuple[Evidence, list[list[Call]]]:
    """Rank 1 takes the second group first, other than in its rounds before."""
    made: list[list[Call]] = [[], []]
    entries: list[list[Collective]] = [[], []]
    for step in range(1, rounds_before + 2):
        last = step == rounds_before + 1
        for rank in (0, 1):
            groups = ("2",) if last and rank else ("1",) if last else ("1", "2")
            for at, group in enumerate(groups):
                at_s = 2.0 * step + at
                made[rank].append(
                    call(
                        len(made[rank]) + 1,
                        group=group,
                        step=step,
                        place=line(20 if one_line else 20 + int(group)),
                        entered_s=at_s,
                        left_s=None if last else at_s + 0.5,
                    )
                )
                entries[rank].append(entered(step, at_s + 0.1, group=group, retired=not last))
    members = {"1": (0, 1), "2": (0, 1)}
    boards = [calling(*calls, groups=members, rank=rank) for rank, calls in enumerate(made)]
    return hung(*boards, collectives=entries), made


def test_the_rank_of_a_ring_that_took_its_groups_the_other_way_round_before_is_named() -> None:
    """It may also have skipped the call that it made first in earlier steps, so the cause is not certain."""
    found = main(turned(2)[0])
    assert (found.code, found.ranks, found.place, found.confidence) == (
        "cross_group_deadlock",
        (1,),
        line(22),
        LIKELY,
    )
    assert found.facts["waits_in_earlier_call"] == 0


def test_a_line_that_calls_the_collectives_of_all_groups_has_skipped_none_of_them() -> None:
    found = main(turned(2, one_line=True)[0])
    assert (found.code, found.ranks, found.confidence) == ("cross_group_deadlock", (1,), CERTAIN)
    assert found.facts["waits_in_earlier_call"] is None


def test_a_rank_that_turned_the_order_is_placed_where_it_parts_from_one_that_kept_it() -> None:
    """The line of the program's own function, not the one of a helper that both call sooner or later."""
    seen, _ = turned(2)
    parts = (
        (frame(23, function="norm"), frame(35, function="sync")),
        (frame(27, function="average"), frame(33, function="sync")),
    )
    looks = tuple(
        replace(look, ranks=tuple(standing(rank, *above) for rank, above in zip(look.ranks, parts, strict=True)))
        for look in seen.snapshots
    )
    found = main(replace(seen, snapshots=looks))
    assert (found.code, found.ranks, found.place) == (
        "cross_group_deadlock",
        (1,),
        Place(file=USER, line=33, function="sync"),
    )


def test_a_ring_in_which_one_rank_is_further_on_is_a_skipped_collective() -> None:
    ahead = groups_crossed(position=7)
    boards = [one.status_file for one in ahead.ranks]
    assert boards[1] is not None
    members = {"1": (0, 1), "2": (0, 1)}
    moved = replace(boards[1], events=(mark("forward", step=3, position=7),), groups=members)
    ranks = (ahead.ranks[0], replace(ahead.ranks[1], status_file=moved))
    assert main(replace(ahead, ranks=ranks)).code in ("rank_conditional_collective", "rank0_only_collective")


# What ended with an abort.


def aborted(**changes: Any) -> Evidence:
    """gloo ends the rank that receives too much; it leaves no recorder behind."""
    ran = run(MADE, [*MADE[:6], replace(MADE[6], **changes)], recorder=False)
    victim = rank_evidence(
        0, status_file=ran.boards[0], exit=ended(0, -6), error_lines=("op.preamble.length <= op.nbytes",)
    )
    lost = raised(1, message="Connection reset by peer")
    return evidence(victim, rank_evidence(1, status_file=ran.boards[1], exit=ended(1, 1), exception=lost))


@pytest.mark.parametrize(
    ("changes", "code", "sizes"),
    [
        ({"elements": 5}, "shape_mismatch", ("4", "5")),
        ({"dtype": "torch.float64"}, "dtype_mismatch", ("float32", "torch.float64")),
    ],
)
def test_the_rank_that_changed_its_payload_is_blamed_and_not_the_one_that_gloo_ended(
    changes: dict[str, Any], code: str, sizes: tuple[str, str]
) -> None:
    found = main(aborted(**changes))
    assert (found.code, found.ranks, found.place) == (code, (1,), line(37))
    entered = found.facts["entered"]
    assert [(str(call["value"]), call["ranks"], call["line"]["line"]) for call in entered] == [
        (size, [rank], 37) for rank, size in enumerate(sizes)
    ]


def beside_backward(
    *,
    tid: int = 300,
    kind: str = "backward",
    left_s: float | None = None,
    lines: tuple[str, ...] = ("Received data size doesn't match expected size",),
) -> Evidence:
    """Each rank calls all_reduce in a thread while its main thread is in `kind`; gloo ends rank 0."""
    boards = [
        board(
            mark(kind, "cross.0", at_s=3.1), mark("collective", "all_reduce", tid=tid, at_s=3.0),
            rank=rank, calls=(call(8, step=7, left_s=left_s if rank == 0 else 3.2, tid=tid),),
        )
        for rank in range(2)
    ]  # fmt: skip
    victim = rank_evidence(0, status_file=boards[0], exit=ended(0, -6), error_lines=lines)
    lost = raised(1, message="Connection reset by peer")
    return evidence(victim, rank_evidence(1, status_file=boards[1], exit=ended(1, 1), exception=lost))


def test_a_thread_that_shares_a_group_with_a_backward_pass_is_named() -> None:
    found = main(beside_backward())
    assert (found.code, found.ranks, found.place, found.confidence) == (
        "collective_order_mismatch",
        (0, 1),
        line(37),
        LIKELY,
    )
    assert (found.facts["variant"], found.facts["module"]) == ("two_threads", "cross.0")
    assert found.advice.startswith("Give the thread a process group of its own")


@pytest.mark.parametrize("changes", [{"tid": 100}, {"kind": "forward"}, {"left_s": 3.05}, {"lines": ()}])
def test_a_thread_is_not_named_if_its_call_has_ended_or_the_main_thread_reduces_nothing(
    changes: dict[str, Any],
) -> None:
    assert main(beside_backward(**changes)).facts.get("variant") != "two_threads"


def test_below_python_the_recorder_shows_the_mismatch_and_leaves_open_who_is_wrong() -> None:
    found = main(hung(calling(), calling(), collectives=[[entered(9)], [entered(9, sizes=((6,),))]]))
    assert (found.code, found.ranks, found.confidence) == ("shape_mismatch", (0, 1), OPEN)
    assert [(call["number"], call["value"], call["ranks"]) for call in found.facts["entered"]] == [
        (9, 4, [0]),
        (9, 6, [1]),
    ]
    assert found.left_open == (ALL_BLAMED,)


def shapes(started: bool | None, backend: str) -> str | None:
    """Unequal all_gathers, which gloo refuses and NCCL may be given."""
    made = [call(1, "all_gather", elements=elements, left_s=None) for elements in (4, 2)]
    boards = [calling(one, rank=rank) for rank, one in enumerate(made)]
    recorded = [entered(1, 2.05, "all_gather", started=started, sizes=((size,),)) for size in (4, 2)]
    last_words = ("op.preamble.length <= op.nbytes",)
    dead = rank_evidence(
        1, status_file=boards[1], exit=ended(1, -6), error_lines=last_words, collectives=(recorded[1],)
    )
    lost = raised(0, message="Connection reset by peer")
    other = rank_evidence(0, status_file=boards[0], exit=ended(0, 1), exception=lost, collectives=(recorded[0],))
    return diagnosed(evidence(other, dead, backend=backend)).cause


def test_a_program_that_was_not_asked_for_its_backend_is_told_by_its_recorder() -> None:
    assert shapes(None, "any") == "shape_mismatch"
    assert shapes(True, "any") != "shape_mismatch"
    assert shapes(None, "nccl") != "shape_mismatch"


def hung_in_broadcast(*peers: int | None) -> Evidence:
    step_one = call(1, "broadcast", peer=0, entered_s=1.0, left_s=1.5)
    boards = [
        calling(step_one, call(2, "broadcast", step=2, peer=peer, left_s=None), rank=rank)
        for rank, peer in enumerate(peers)
    ]
    entries = [entered(1, 1.1, "broadcast", retired=True), entered(2, 2.05, "broadcast")]
    looks = [
        rank_snapshot(rank, frame(3000, file="/x/torch/distributed/distributed_c10d.py"), frame(40), status_file=made,
                      collectives=tuple(entries))
        for rank, made in enumerate(boards)
    ]  # fmt: skip
    return stalled(
        *looks,
        ranks=tuple(
            rank_evidence(rank, status_file=made, collectives=tuple(entries)) for rank, made in enumerate(boards)
        ),
    )


def test_ranks_of_one_broadcast_that_name_other_roots_wait_for_each_other_for_ever() -> None:
    seen = hung_in_broadcast(1, 2, 1)
    assert judge(seen).status is Status.HANG
    assert blamed(seen)[:4] == ("root_mismatch", (1,), 37, 2)
    assert "rank 1 at" not in main(seen).claim.partition("has")[0]
    assert [(call["value"], call["ranks"]) for call in main(seen).facts["entered"]] == [(1, [0, 2]), (2, [1])]


def test_the_same_root_everywhere_is_no_hang_that_is_proven() -> None:
    assert judge(hung_in_broadcast(1, 1, 1)).status is not Status.HANG


# Reasons: fewer reductions.


def ledger(*counts: int, gradients: int = 6, op: str = "all_reduce") -> list[StepRow]:
    return [
        StepRow(
            step=step,
            last_step=step,
            done_s=float(step),
            gradients=gradients if count else 6 * (gradients == 6),
            tallies=(Tally(group="0", op=op, from_python=False, count=count),) if count else (),
        )
        for step, count in enumerate(counts, start=1)
    ]


def fewer(ledgers: Any = None, **changes: Any) -> Evidence:
    ended_in = [[entered(9)], [entered(9, op="barrier", sizes=(), dtypes=())]]
    return hung(
        calling(), calling(), collectives=ended_in, ledgers=ledgers or (ledger(1, 1, 1), ledger(1, 0, 1, **changes))
    )


def test_a_step_without_a_reduction_is_a_no_sync_mismatch_and_names_that_step() -> None:
    seen = fewer()
    found = diagnosed(seen)
    assert (found.cause, found.findings[0].ranks) == ("no_sync_mismatch", (1,))
    facts = found.findings[0].facts
    assert (facts["op"], facts["group"]) == ("all_reduce", "0")
    assert facts["counts"] == [{"count": 1, "ranks": [0]}, {"count": 0, "ranks": [1]}]
    assert found.culprit is not None
    assert (found.culprit.ranks, found.culprit.step) == ((1,), 2)


def test_what_is_counted_by_steps_is_proven_by_the_ledger_of_steps() -> None:
    assert "step_ledger.txt" in main(fewer()).proof


def test_a_step_without_gradients_is_a_part_of_the_model_that_was_left_out() -> None:
    found = main(fewer(gradients=0))
    assert (found.code, found.ranks) == ("rank_conditional_unused_params", (1,))


def test_fewer_gathers_are_no_matter_of_no_sync() -> None:
    ledgers = (ledger(1, 1, 1, op="all_gather"), ledger(1, 0, 1, op="all_gather"))
    assert main(fewer(ledgers)).code == "rank_conditional_collective"


def test_fewer_calls_of_a_helper_are_told_with_what_leaves_one_out_on_the_way_to_the_last() -> None:
    text = "def finish(self):\n    for slot in self.slots:\n        if slot.pending:\n            continue\n"
    text += "        launch(slot)"
    way = (frame(37, function="launch"), frame(74, function="finish"))
    counts = ([7, 7, 7], [7, 6, 7])
    ledgers = [
        [replace(row, tallies=tuple(replace(one, from_python=True) for one in row.tallies)) for row in ledger(*some)]
        for some in counts
    ]
    made = [call(1, step=2, chain=way, place=line(37, "launch")), call(2, "barrier", step=3, left_s=None, elements=0)]
    boards = [calling(*made), calling(*made)]
    ended_in = [[entered(9)], [entered(9, op="barrier", sizes=(), dtypes=())]]
    seen = hung(*boards, collectives=ended_in, ledgers=ledgers)
    found = main(replace(seen, sources=(Source(file=USER, first=70, text=text),)))
    assert (found.ranks, found.place and found.place.line) == ((1,), 72)


# Reasons: no batch left, another pace, a batch given up.


def uneven(**changes: Any) -> Evidence:
    two = ((1, 1.0), (2, 2.0))
    trains = board(mark("backward", step=3), steps_s=two, zero_ns=ZERO_NS)
    barrier = call(1, "barrier", place=line(105), step=3, entered_s=6.0, left_s=None)
    fetch = mark("data", "fetch", step=3, at_s=5.0)
    finished = board(fetch, steps_s=two, calls=(barrier,), zero_ns=ZERO_NS)
    collectives = [[entered(9)], [entered(9, 6.1, "barrier", sizes=(), dtypes=())]]
    return hung(trains, finished, collectives=collectives, **changes)


def test_a_rank_that_ran_out_of_batches_is_blamed_and_not_the_one_that_had_more() -> None:
    found = diagnosed(uneven())
    assert found.cause == "uneven_inputs"
    facts = found.findings[0].facts
    assert (facts["variant"], facts["last_step"], facts["others"]) == ("out_of_batches", 2, [0])
    assert (facts["instead"]["op"], facts["instead"]["line"]["line"]) == ("barrier", 105)
    assert found.culprit is not None
    assert (found.culprit.ranks, found.culprit.step, found.culprit.place) == ((1,), 3, line(105))


def test_a_difference_in_an_earlier_step_explains_the_uneven_end() -> None:
    assert main(uneven(ledgers=(ledger(1, 1), ledger(1, 0)))).code == "no_sync_mismatch"
    gathers = (ledger(1, 1, op="all_gather"), ledger(1, 0, op="all_gather"))
    assert main(uneven(ledgers=gathers)).code == "rank_conditional_collective"


def test_a_rank_that_ran_out_and_left_is_uneven_and_not_an_early_exit() -> None:
    fetch = mark("data", "fetch", step=3, at_s=5.0)
    two = ((1, 1.0), (2, 2.0))
    gone = rank_evidence(1, status_file=board(fetch, steps_s=two, exit_s=8.0), exit=ended(1, 0, at_s=8.5))
    lost = raised(0, message="Connection closed by peer")
    left = rank_evidence(0, status_file=board(mark("backward", step=3), steps_s=two), exit=ended(0, 1), exception=lost)
    found = main(evidence(left, gone))
    assert (found.code, found.ranks) == ("uneven_inputs", (1,))
    assert found.claim == "rank 1 ran out of batches after step 2 and ended; rank 0 went on to step 3"


GRADIENTS = """\
def reduce(parameters):
    for parameter in parameters:
        if parameter.grad is None:
            continue
        dist.all_reduce(parameter.grad)
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(("last_line", "cause"), [(76, "rank_conditional_collective"), (75, "early_exit")])
def test_a_rank_that_exited_after_fewer_calls_of_a_loop_skipped_one_unless_it_exited_in_the_loop(
    last_line: int, cause: str
) -> None:
    seen = run([Made(line=75)] * 6, [Made(line=75)] * 5)
    first, second = seen.boards.values()
    reduced, last = frame(75, function="reduce"), frame(last_line, function="reduce")
    calls = [tuple(replace(one, chain=(reduced,)) for one in made.calls) for made in (first, second)]
    end = call(6, "destroy_process_group", place=line(last_line, "reduce"), entered_s=7.0, chain=(last,))
    lost = raised(0, message="Connection closed by peer")
    collectives = seen.collectives
    waits = rank_evidence(0, status_file=replace(first, calls=calls[0]), collectives=collectives[0], exception=lost)
    left = rank_evidence(1, status_file=replace(second, calls=(*calls[1], end), beat_s=1.0), collectives=collectives[1])
    ranks = replace(waits, exit=ended(0, 1, at_s=9.0)), replace(left, exit=ended(1, 0, at_s=8.5))
    found = main(evidence(*ranks, sources=(Source(file=USER, first=71, text=GRADIENTS),)))
    assert (found.code, found.ranks) == (cause, (1,))
    if cause != "early_exit":
        assert found.place is not None
        counts = [{"ranks": [0], "count": 6}, {"ranks": [1], "count": 5}]
        assert (found.place.line, found.facts["counts"]) == (73, counts)


def in_the_end(*boards: StatusFile) -> Evidence:
    """The last rank stands in a barrier behind its training, the others in a reduction below Python."""
    last = len(boards) - 1
    clocked = [replace(made, zero_ns=ZERO_NS) for made in boards]
    entries = [
        [entered(9, 6.1, "barrier", sizes=(), dtypes=()) if rank == last else entered(9, 6.1)]
        for rank in range(len(boards))
    ]
    return hung(*clocked, collectives=entries)


def swallowed(**changes: Any) -> Evidence:
    return in_the_end(training(10, 10, 10), through(10, 14, 10, rank=1, **changes))


def test_a_rank_that_began_again_in_a_step_and_came_short_of_a_batch_left_it_out_for_whatever_reason() -> None:
    found = diagnosed(swallowed())
    assert (found.cause, found.findings[0].ranks) == ("rank_conditional_collective", (1,))
    assert found.findings[0].confidence == LIKELY
    facts = found.findings[0].facts
    assert (facts["variant"], facts["others"]) == ("dropped_batch", [0])
    assert (facts["events"], facts["usual_events"], facts["exception"]) == (14, 10, None)
    assert found.culprit is not None
    assert (found.culprit.ranks, found.culprit.step) == ((1,), 2)


SKIPS = """\
def fit(loader):
    for batch in loader:
        loss = model(batch)
        if not isfinite(loss):
            continue
        loss.backward()
    barrier()"""


HANDLED = """\
def fit(loader):
    for batch in loader:
        try: loss = model(batch)
        except ValueError:
            continue
        loss.backward()
    barrier()"""


def test_where_a_batch_was_left_out_is_told_by_the_jump_before_the_line_in_which_another_rank_trains() -> None:
    """It is not the loop, though the rank stands behind it by now."""
    seen = swallowed()
    stands = ([frame(25, function="fit")], [frame(26, function="fit")])
    looks = tuple(
        replace(look, ranks=tuple(standing(rank, *above) for rank, above in zip(look.ranks, stands, strict=True)))
        for look in seen.snapshots
    )
    for text, cause in ((SKIPS, "rank_conditional_collective"), (HANDLED, "swallowed_exception")):
        source = Source(file=USER, first=20, text=text)
        found = main(replace(seen, snapshots=looks, sources=(source,)))
        assert (found.code, found.place) == (cause, Place(file=USER, line=23, function="fit"))


def test_an_exception_that_left_a_forward_in_that_step_names_the_line() -> None:
    found = main(swallowed(caught_exceptions=(CaughtException(step=2, type="ValueError", place=line(31, "loss")),)))
    assert (found.code, found.place) == ("swallowed_exception", line(31, "loss"))
    exception = found.facts["exception"]
    assert (exception["type"], exception["line"]["line"]) == ("ValueError", 31)
    elsewhere = main(swallowed(caught_exceptions=(CaughtException(step=1, type="ValueError", place=line(31)),)))
    assert elsewhere.place != line(31)


def test_what_the_rank_printed_is_quoted_where_the_exception_itself_was_not_seen() -> None:
    seen = swallowed()
    told = replace(seen.ranks[1], error_lines=("WARNING bad batch left out",))
    assert 'its stderr says "WARNING bad batch left out"' in main(replace(seen, ranks=(seen.ranks[0], told))).claim


def test_a_rank_that_raised_in_the_end_swallowed_nothing() -> None:
    seen = swallowed()
    failed = replace(seen.ranks[1], exit=ended(1, 1, at_s=5.0), exception=raised(1, at_s=4.0))
    assert diagnosed(replace(seen, ranks=(seen.ranks[0], failed))).cause == "exception"


def test_another_pace_on_one_rank_is_a_mismatch_of_accumulation() -> None:
    found = main(in_the_end(training(10, 10, 10, 10), training(10, 10, 10, 10), through(15, 15, 15)))
    assert (found.code, found.ranks, found.confidence) == ("no_sync_mismatch", (2,), LIKELY)
    assert found.facts["events_in_step"] == [{"events": 10, "ranks": [0, 1]}, {"events": 15, "ranks": [2]}]


def caught_by(rank: int, step: int, at: int = 31) -> Evidence:
    """Rank 1 leaves a reduction of step 3 out."""
    ran = run(MADE, FAULTS["left out"][0])
    error = CaughtException(step=step, type="ValueError", place=line(at, "loss"))
    boards = {
        one: replace(made, caught_exceptions=(error,)) if rank in (one, 2) else made for one, made in ran.boards.items()
    }
    return stood(replace(ran, boards=boards))


@pytest.mark.parametrize(
    ("function", "swallowed"),
    [("main", True), ("Trainer.step", True), ("log", False)],
    ids=["stands in", "made", "helper"],
)
def test_of_exceptions_that_left_no_forward_those_count_whose_handler_leads_to_a_call(
    function: str, swallowed: bool
) -> None:
    seen = caught_by(1, 3)
    board = seen.ranks[1].status_file
    assert board is not None
    (error,) = board.caught_exceptions
    error = replace(error, left_forward=False, caught_at=line(52, function))
    ranks = []
    for rank in seen.ranks:
        assert rank.status_file is not None
        came = tuple(replace(one, chain=(frame(37), frame(60, function="main"))) for one in rank.status_file.calls)
        caught = (error,) if rank.rank == 1 else ()
        ranks.append(replace(rank, status_file=replace(rank.status_file, calls=came, caught_exceptions=caught)))
    found = main(replace(seen, ranks=tuple(ranks)))
    assert (found.code == "swallowed_exception") is swallowed
    if swallowed:
        assert found.place == line(52, function)
        exception = found.facts["exception"]
        assert (exception["type"], exception["step"], exception["line"]["line"]) == ("ValueError", 3, 31)
        assert found.facts["caught_at"]["line"] == 52


def test_a_rank_that_caught_an_exception_in_the_step_in_which_it_parted_swallowed_it() -> None:
    found = main(caught_by(1, 3))
    assert (found.code, found.ranks, found.place) == ("swallowed_exception", (1,), line(31, "loss"))
    assert (found.facts["variant"], found.facts["exception"]["type"]) == ("caught_exception", "ValueError")
    assert (found.facts["exception"]["step"], found.facts["caught_at"]) == (3, None)


@pytest.mark.parametrize(("rank", "step"), [(1, 1), (2, 3)], ids=["in an earlier step", "on every rank"])
def test_an_exception_of_another_time_or_of_all_ranks_explains_nothing(rank: int, step: int) -> None:
    assert main(caught_by(rank, step)).code == "rank_conditional_collective"


# A loop that went round again without a step.


def went_round(**of_rank_1: Any) -> Evidence:
    """Both ranks broadcast at the start of each step; rank 1 does it again, while rank 0 trains in the next step."""
    sync = [
        call(step + 1, "broadcast", place=line(48), step=step, entered_s=1.0 + step, left_s=1.2 + step)
        for step in (0, 1)
    ]
    again = replace(sync[-1], number=3, entered_s=2.5, left_s=None)
    facts = {"steps_s": steps(1), "zero_ns": ZERO_NS}
    boards = (
        board(mark("backward", step=2, position=6, at_s=3.0), calls=tuple(sync), **facts),
        board(mark("step", step=1, at_s=2.0), calls=(*sync, again), **facts, **of_rank_1),
    )
    before = [entered(1, 1.1, "broadcast", retired=True), entered(2, 2.1, "broadcast", retired=True)]
    return hung(*boards, collectives=[[*before, entered(3, 2.6)], [*before, entered(3, 2.6, "broadcast")]])


def test_a_call_once_more_without_a_step_between_is_that_of_the_rank_that_made_it() -> None:
    assert main(went_round()).ranks == (1,)


def test_an_exception_before_a_call_once_more_is_the_batch_that_was_given_up() -> None:
    found = main(went_round(caught_exceptions=(CaughtException(step=1, type="ValueError", place=line(31)),)))
    assert (found.code, found.ranks, found.place) == ("swallowed_exception", (1,), line(31))


# The backward pass that one rank left and the others did not.


def left_early(position: int = 9, **changes: Any) -> Evidence:
    """Rank 1 gathers after its backward pass, as in each step before; rank 0 waits in its own for a bucket."""
    usual = call(1, "all_gather", place=line(70), step=1, position=9, entered_s=1.5, left_s=1.6)
    now = replace(usual, number=2, step=2, position=position, entered_s=2.0, left_s=None)
    facts = {"steps_s": steps(1), "zero_ns": ZERO_NS}
    boards = (
        board(mark("backward", step=2, position=9, at_s=2.0), calls=(usual,), **facts),
        board(mark("backward", step=2, position=position, at_s=2.0), calls=(usual, now), **facts, **changes),
    )
    before = entered(4, 1.55, "all_gather", retired=True)
    return hung(*boards, collectives=[[before, entered(5)], [before, entered(5, op="all_gather")]])


def test_who_leaves_the_backward_pass_early_with_less_of_the_model_left_parameters_out() -> None:
    found = main(left_early(position=7))
    assert (found.code, found.ranks, found.confidence) == ("rank_conditional_unused_params", (1,), LIKELY)
    assert (found.facts["variant"], found.facts["entered_op"]) == ("left_backward", "all_gather")


def test_who_leaves_it_early_with_all_of_the_model_reduced_nothing() -> None:
    found = main(left_early())
    assert (found.code, found.ranks, found.confidence) == ("no_sync_mismatch", (1,), LIKELY)


def test_who_evaluates_has_no_backward_pass_to_leave() -> None:
    found = main(left_early(mode=ForwardMode(training=False, gradients=False)))
    assert found.code not in ("no_sync_mismatch", "rank_conditional_unused_params")


# A branch of the model that one side took.

MODEL = Source(
    file="/home/ada/model.py",
    first=19,
    text="def forward(self, x):\n    x = self.i(x)\n    if self.keeps(x):  # no\n        x = self.b(x)\n    return x",
)


def other_modules(op: str, *, other: tuple[str, ...] = DROPPED, source: bool = True, **changes: Any) -> Evidence:
    """Rank 1 waits below Python for another collective than rank 0 in their second step, which is this one."""
    boards = (went_through(NET, NET, zero_ns=ZERO_NS), went_through(NET, other, zero_ns=ZERO_NS, **changes))
    before = entered(1, sizes=((8,),), retired=True)
    tracks = [[before, entered(2, 2.0, op=op, sizes=((4,),))], [before, entered(2, 2.0, sizes=((6,),))]]
    modules = [replace(one, modules=tuple(map(_called, one.modules))) for one in boards]
    return replace(hung(*modules, collectives=tracks), sources=(MODEL,) if source else ())


def _called(one: ModuleCall) -> ModuleCall:
    return replace(one, place=Place(file=MODEL.file, line=22 if one.name == "blocks.1" else 23, function="forward"))


@pytest.mark.parametrize(
    ("op", "code"),
    [("all_reduce", "rank_conditional_unused_params"), ("all_gather", "rank_conditional_collective")],
)
def test_a_module_that_one_rank_left_out_is_told_with_the_branch_around_its_call(op: str, code: str) -> None:
    found = main(other_modules(op))
    assert (found.code, found.ranks, found.place and found.place.line) == (code, (1,), 21)
    facts = found.facts
    assert (facts["variant"], facts["others"], facts["branch"]) == ("skipped_module", [0], "if self.keeps(x)")
    assert (facts["expected_module"]["name"], facts["expected_module"]["line"]["line"]) == ("blocks.1", 22)
    bare = main(other_modules(op, source=False))
    assert (bare.ranks, bare.place and bare.place.line) == ((1,), 22)


def test_a_module_too_much_and_one_in_place_of_another_are_told_as_such() -> None:
    more = main(other_modules("all_reduce", other=(*NET[:3], "extra", *NET[3:])))
    assert (more.facts["variant"], more.facts["others"]) == ("extra_module", [0])
    assert (more.facts["entered_module"]["name"], more.facts["entered_module"]["line"]["line"]) == ("extra", 23)
    instead = main(other_modules("all_reduce", other=(*NET[:3], "extra", "head")))
    assert (instead.facts["variant"], instead.facts["entered_module"]["name"]) == ("other_module", "extra")
    expected = instead.facts["expected_module"]
    assert (expected["name"], expected["line"]["line"]) == ("blocks.1", 22)


def test_modules_of_an_evaluation_explain_no_reduction() -> None:
    found = main(other_modules("all_reduce", mode=ForwardMode(training=False, gradients=False)))
    assert "module blocks.1" not in found.claim


# Calls of one rank alone.

SAVE = call(1, "barrier", place=line(60, "save"), step=2, position=10, entered_s=6.0, left_s=None)


def alone(ranks: int, *calls: Call, caller: int = 0, **changes: Any) -> Evidence:
    """One rank stands in a call after its second step, and the others are in the third."""
    boards = [
        through(10, 10, calls=calls or (SAVE,), zero_ns=ZERO_NS, rank=rank, **changes)
        if rank == caller
        else training(10, 10, rank=rank, zero_ns=ZERO_NS)
        for rank in range(ranks)
    ]
    return hung(*boards, collectives=[()] * ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_barrier_of_rank_0_alone_is_named_with_its_line_and_not_the_ranks_that_went_on(ranks: int) -> None:
    found = main(alone(ranks))
    assert (found.code, found.ranks, found.place) == ("rank0_only_collective", (0,), line(60, "save"))
    assert found.confidence == LIKELY  # it stands between its steps: it may also have had no more of them


def test_within_a_step_a_call_of_one_among_many_is_certain_and_of_one_among_two_is_not() -> None:
    within = {"events": (mark("forward", step=2, position=10),)}
    inside = [replace(alone(ranks), ranks=_with(alone(ranks), **within)) for ranks in (4, 2)]
    assert [(main(seen).code, main(seen).confidence) for seen in inside] == [
        ("rank0_only_collective", CERTAIN),
        ("rank0_only_collective", LIKELY),
    ]


def _with(seen: Evidence, **changes: Any) -> tuple[Any, ...]:
    first = seen.ranks[0]
    assert first.status_file is not None
    return (replace(first, status_file=replace(first.status_file, **changes)), *seen.ranks[1:])


def test_a_call_that_the_others_made_in_an_earlier_step_was_left_out_by_them() -> None:
    before = replace(SAVE, step=1, entered_s=4.0, left_s=5.0)
    boards = [through(10, 10, calls=(before, replace(SAVE, number=2))), training(10, 10, rank=1, calls=(before,))]
    found = main(hung(*boards, collectives=[(), ()]))
    assert (found.code, found.ranks) == ("rank_conditional_collective", (1,))


def test_of_two_ranks_another_one_than_the_first_may_well_be_right_and_nothing_is_certain() -> None:
    found = main(alone(2, caller=1))
    assert (found.code, found.confidence) == ("rank_conditional_collective", LIKELY)
    assert found.left_open in (
        ("rank 0 may have skipped the call instead",),
        ("rank 1 may have made a call that no other rank makes",),
    )


def test_a_rank_in_a_transfer_at_the_same_point_may_still_come_to_the_call() -> None:
    setup = call(1, "init_process_group", position=0)
    meets = calling(setup, call(2, "barrier", left_s=None))
    waits = calling(setup, call(2, "recv", peer=0, left_s=None), rank=1)
    assert diagnosed(hung(meets, waits, collectives=[(), ()])).cause not in CAUSES


def order(*sizes: int) -> list[Collective]:
    """Below Python; the last one is open."""
    return [
        entered(seq, float(seq), sizes=((size,),), retired=seq < len(sizes)) for seq, size in enumerate(sizes, start=1)
    ]


def below_python(*tracks: Sequence[Collective], first: str = "forward") -> Evidence:
    marks = [mark(first, step=2, position=3), mark("forward", step=3, position=3)]
    return hung(*[board(one, rank=rank, zero_ns=ZERO_NS) for rank, one in enumerate(marks)], collectives=tracks)


def test_a_layer_that_one_rank_went_round_is_no_mismatch_of_shapes() -> None:
    found = main(below_python(order(1, 2, 3, 4, 1, 2), order(1, 2, 3, 4, 1, 3)))
    assert (found.code, found.ranks) == ("rank_conditional_collective", (1,))


def test_a_gather_that_rank_0_adds_between_its_steps_is_its_own() -> None:
    found = main(below_python(order(1, 2, 3, 4, 1, 9), order(1, 2, 3, 4, 1, 2), first="step"))
    assert (found.code, found.ranks) == ("rank0_only_collective", (0,))


# Where the rule is silent.

SOURCE_OF_RULES = "".join(map(inspect.getsource, (calls_differ, call_places, call_reasons)))
CAUSES = {Cause[name] for name in re.findall(r"Cause\.([A-Z0-9_]+)\b", SOURCE_OF_RULES)}

ALL = {
    "cross_group_deadlock": groups_crossed,
    "collective_order_mismatch": lambda: stood(run(MADE, FAULTS["in its place"][0])),
    "no_sync_mismatch": fewer,
    "uneven_inputs": uneven,
    "rank_conditional_unused_params": lambda: fewer(gradients=0),
    "rank_conditional_collective": lambda: stood(run(MADE, FAULTS["left out"][0])),
    "rank0_only_collective": lambda: stood(run(FAULTS["extra"][0], MADE)),
    "swallowed_exception": lambda: swallowed(
        caught_exceptions=(CaughtException(step=2, type="ValueError", place=line(31)),)
    ),
    "shape_mismatch": lambda: aborted(elements=5),
    "dtype_mismatch": lambda: aborted(dtype="torch.float64"),
    "root_mismatch": lambda: hung_in_broadcast(1, 2, 1),
}


def test_every_cause_of_a_difference_has_a_run_that_it_answers() -> None:
    assert {code: diagnosed(seen()).cause for code, seen in ALL.items()} == {code: code for code in ALL}
    assert set(ALL) == set(CAUSES)


def with_failure(seen: Evidence, **changes: Any) -> Evidence:
    first: RankEvidence = replace(seen.ranks[0], **changes)
    return replace(seen, ranks=(first, *seen.ranks[1:]))


@pytest.mark.parametrize("code", ALL)
def test_no_difference_is_the_cause_where_a_rank_raised_of_itself(code: str) -> None:
    raising = with_failure(ALL[code](), exit=ended(0, 1, at_s=5.0), exception=raised(0, at_s=4.0))
    assert diagnosed(raising).cause == "exception"


@pytest.mark.parametrize("code", ["no_sync_mismatch", "cross_group_deadlock", "uneven_inputs"])
def test_no_difference_is_the_cause_where_a_rank_was_killed(code: str) -> None:
    killed = with_failure(ALL[code](), exit=ended(0, -9, at_s=5.0), exception=None, error_lines=())
    assert diagnosed(killed).cause == "killed"


@pytest.mark.parametrize("code", [code for code in ALL if not code.endswith(("shape_mismatch", "dtype_mismatch"))])
def test_a_rank_that_waits_for_no_rank_is_the_cause_and_a_run_at_its_deadline_is_slow(code: str) -> None:
    seen = ALL[code]()
    assert diagnosed(replace(seen, ending=Ending.DEADLINE)).cause == "slow"
    looks = [replace(look, ranks=(locked_in_backward(0), *look.ranks[1:])) for look in seen.snapshots]
    ranks = (replace(seen.ranks[0], status_file=None), *seen.ranks[1:])
    assert diagnosed(replace(seen, snapshots=tuple(looks), ranks=ranks)).cause == "backward_function_blocked"


def test_a_way_out_that_a_rank_has_yet_to_come_to_decides_nothing() -> None:
    """It still trains, above the line by which a rank may leave; the other one is through with it."""
    text = "def main(rank):\n    train()\n    if rank == 1:\n        return\n    total()\n"
    way_out = Source(file=USER, first=50, text=text)
    ran = run(MADE, FAULTS["left out"][0])
    at_the_end, past_it = [frame(37, function="total"), frame(54, function="main")], [frame(60, function="later")]
    seen = stood(ran, at_the_end, [frame(41, function="train"), frame(51, function="main")])
    found = main(replace(seen, sources=(way_out,)))
    assert found.facts["condition"] is None
    gone_by_it = main(replace(stood(ran, at_the_end, past_it), sources=(way_out,)))
    condition = gone_by_it.facts["condition"]
    assert (condition["ranks"], condition["text"], condition["leaves"]) == ([0], "if rank == 1", True)
    assert condition["line"]["line"] == 52
