"""The call stacks that an answer shows: whose, which frames, and what stands around the innermost one."""

from __future__ import annotations

from dataclasses import replace

from builders import evidence, frame, in_all_reduce, raised, rank_evidence, rank_snapshot, snapshot, stack, stalled

from nsa_harness.core.evidence.evidence import Evidence, Source
from nsa_harness.core.outcome.callstacks import StackNode, call_stacks, stack_trees
from nsa_harness.core.report import CallStack, Culprit, Place
from nsa_harness.core.verdict.verdict import judge

TORCH = "/venv/lib/python3.11/site-packages/torch/distributed/c10d.py"
PROBE = "/venv/lib/python3.11/site-packages/nsa_harness/probe/waits.py"
SAVE = frame(6, file="/job/ckpt.py", function="save")
MAIN = frame(22, file="/job/train.py", function="main")
BACKWARD = frame(18, file="/job/train.py", function="main")


def culprit(rank: int, place: Place | None = None) -> Culprit:
    return Culprit(ranks=(rank,), step=None, collective=None, place=place)


def hung(**changes: object) -> Evidence:
    alone = rank_snapshot(
        1,
        stacks=(stack(frame(1, file=PROBE), frame(9, file=TORCH, function="barrier"), SAVE, MAIN, tid=100),),
        proof="dumps/rank1.txt",
    )
    others = [rank_snapshot(rank, stacks=(stack(frame(8, file=TORCH), BACKWARD),)) for rank in (0, 2, 3)]
    return replace(stalled(others[0], alone, *others[1:]), **changes)


def test_equal_stacks_are_told_once_and_the_culprits_come_first() -> None:
    told = call_stacks(hung(), judge(hung()), culprit(1))
    assert [stack.ranks for stack in told] == [(1,), (0, 2, 3)]
    assert [[(one.file, one.line) for one in stack.frames] for stack in told] == [
        [("/job/ckpt.py", 6), ("/job/train.py", 22)],
        [("/job/train.py", 18)],
    ]


def test_frames_of_libraries_are_counted_and_those_of_the_probe_are_nobody_s() -> None:
    (first, *_) = call_stacks(hung(), judge(hung()), culprit(1))
    assert (first.library, first.innermost, first.proof) == (1, "barrier", "dumps/rank1.txt")


def test_the_innermost_line_stands_between_its_neighbours() -> None:
    source = Source(file="/job/ckpt.py", first=5, text="def save(model):\n    dist.barrier()\n    torch.save(model)")
    (first, second) = call_stacks(hung(sources=(source,)), judge(hung()), culprit(1))
    assert first.around == Place(file="/job/ckpt.py", line=7, function="save", text=source.text)
    assert second.around is None


def test_a_blank_neighbour_is_left_out_as_the_last_line_gives_the_numbers() -> None:
    source = Source(file="/job/ckpt.py", first=5, text="def save(model):\n    dist.barrier()\n\n")
    (first, _) = call_stacks(hung(sources=(source,)), judge(hung()), culprit(1))
    assert first.around == replace(Place(file="/job/ckpt.py", line=6, function="save"), text=source.text.rstrip())


def test_a_comprehension_is_told_with_the_line_that_holds_it() -> None:
    inside = replace(MAIN, function="main.<locals>.<listcomp>")
    seen = stalled(rank_snapshot(0, stacks=(stack(SAVE, inside, MAIN, replace(MAIN, function="<module>")),)))
    (told,) = call_stacks(seen, judge(seen), culprit(0))
    assert [one.function for one in told.frames] == ["save", "main", "<module>"]


def test_a_thread_or_child_that_is_to_blame_has_a_stack_of_its_own() -> None:
    holder = frame(30, file="/job/cache.py", function="refresh")
    waits = rank_snapshot(
        0,
        stacks=(stack(SAVE), stack(holder, tid=101, thread="refresher")),
        child_stacks={4711: (stack(frame(3, file="/job/worker.py")),)},
    )
    seen = stalled(waits)
    thread = call_stacks(seen, judge(seen), culprit(0, Place(file="/job/cache.py", line=30)))
    assert [(stack.of, stack.frames[0].line) for stack in thread] == [("thread refresher", 30), ("", 6)]
    child = call_stacks(seen, judge(seen), culprit(0, Place(file="/job/worker.py", line=3)))
    assert [(stack.of, stack.frames[0].line) for stack in child] == [("process 4711", 3), ("", 6)]


def test_of_a_failure_it_is_the_traceback_of_what_failed_first() -> None:
    boom = raised(1, "ValueError", frames=(frame(4, file="/job/data.py", function="load"), MAIN))
    seen = evidence(rank_evidence(0), replace(rank_evidence(1), exception=boom))
    (told,) = call_stacks(seen, judge(seen), culprit(1))
    assert (told.ranks, told.of, [one.line for one in told.frames]) == ((1,), "ValueError", [4, 22])


def test_a_run_that_passed_has_none_and_neither_has_one_that_nobody_could_ask() -> None:
    passed = evidence(rank_evidence(0))
    assert call_stacks(passed, judge(passed), None) == ()
    blind = replace(hung(), snapshots=(snapshot(1, 20.0, rank_snapshot(0, stacks=())),))
    assert call_stacks(blind, judge(blind), culprit(0)) == ()


def test_ranks_in_libraries_alone_show_where_that_is() -> None:
    below = stalled(in_all_reduce(0), in_all_reduce(1))
    inside = tuple(
        replace(one, stacks=(stack(frame(8, file=TORCH, function="wait")),)) for one in below.snapshots[-1].ranks
    )
    seen = replace(below, snapshots=(snapshot(1, 20.0, *inside),))
    (told,) = call_stacks(seen, judge(seen), None)
    assert (told.ranks, told.frames[0].file, told.library, told.innermost) == ((0, 1), TORCH, 0, "")


def told(*ranks: int, of: str = "", frames: tuple[str, ...]) -> CallStack:
    """Frames as "function:line", innermost first."""
    places = [one.partition(":") for one in frames]
    return CallStack(
        ranks=ranks,
        of=of,
        frames=tuple(Place(file="/job/train.py", line=int(line), function=name) for name, _, line in places),
        innermost="",
        library=0,
        around=None,
        proof=None,
    )


def shape(node: StackNode) -> object:
    """The ranks, the lines they share, and either how they go on or that it ends."""
    lines = [place.line for place in node.frames]
    return (node.ranks, lines, [shape(one) for one in node.subtrees] if node.call_stack is None else "ends")


def test_stacks_are_merged_from_the_outermost_frame_on_and_part_where_the_ranks_part() -> None:
    trees = stack_trees(
        [
            told(1, frames=("save:6", "main:22", "<module>:30")),
            told(0, 3, frames=("main:18", "<module>:30")),
            told(2, frames=("hook:9", "main:18", "<module>:30")),
        ]
    )
    assert [shape(tree) for tree in trees] == [
        (
            (0, 1, 2, 3),
            [30],
            [((1,), [22, 6], "ends"), ((0, 2, 3), [18], [((0, 3), [], "ends"), ((2,), [9], "ends")])],
        )
    ]
    (tree,) = trees
    assert tree.diverges_in is not None
    assert tree.diverges_in.function == "main"
    assert tree.subtrees[1].diverges_in is None  # ranks 0 and 3 stand in the line itself


def test_a_stack_that_cannot_be_laid_beside_the_others_is_a_tree_of_its_own() -> None:
    train = told(0, frames=("main:18", "<module>:30"))
    thread = told(0, of="thread reader", frames=("read:4", "<module>:30"))
    elsewhere = told(1, frames=("serve:7",))
    cut = told(2, frames=("main:18", *("again:5",) * 30, "<module>:30"))
    trees = stack_trees([thread, train, elsewhere, cut])
    assert [(tree.call_stack, tree.subtrees) for tree in trees] == [
        (one, ()) for one in (thread, train, elsewhere, cut)
    ]


def test_equal_stacks_of_a_report_that_somebody_else_wrote_come_to_an_end() -> None:
    same = told(0, frames=("main:18",))
    assert [shape(tree) for tree in stack_trees([same, same])] == [((0,), [18], [((0,), [], "ends")] * 2)]
    assert stack_trees([]) == ()
