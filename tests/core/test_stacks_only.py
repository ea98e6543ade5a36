"""A hang of ranks of which nothing but their stacks is known, as `attach` finds it: the cause is named all the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from textwrap import dedent
from typing import Any

import pytest
from builders import (
    BACKWARD,
    C10D,
    SITE,
    board,
    case,
    collective,
    diagnose,
    ended,
    frame,
    mark,
    rank_evidence,
    rank_snapshot,
    stalled,
)

from nsa_harness.core.diagnosis.confidence import LIKELY
from nsa_harness.core.evidence.evidence import Evidence, Frame, RankSnapshot, Snapshot
from nsa_harness.core.evidence.stacks import group_call
from nsa_harness.core.outcome.outcome import passed_checks
from nsa_harness.core.report import Culprit, Place, Status, Verdict
from nsa_harness.core.source_code.collection import excerpts
from nsa_harness.core.verdict.verdict import judge
from nsa_harness.core.verdict.wait import WaitKind

FILE = "/home/ada/train.py"
PROGRAM = dedent(
    """\
    import torch.distributed as dist

    def save(model):
        dist.barrier()

    def main(rank, model, loader, stop):
        for batch in loader:
            loss = model(batch)
            loss.backward()
            if rank == 0:
                save(model)
            if stop(loss):
                dist.all_reduce(loss)
        dist.broadcast(loss, 0)
        dist.all_gather([loss], loss)
        dist.barrier()

    def half(rank, tensor):
        if rank == 0:
            dist.recv(tensor)
        dist.barrier()
    """
)


def c10d(function: str) -> Frame:
    return frame(3000, file=C10D, function=function)


WRAPPER = frame(83, file=f"{SITE}/torch/distributed/c10d_logger.py", function="_exception_logger.<locals>.wrapper")
FSDP = f"{SITE}/torch/distributed/fsdp/_fully_shard"
UNSHARD = (
    c10d("all_gather_single"),
    WRAPPER,
    frame(119, file=f"{FSDP}/_fsdp_collectives.py", function="DefaultAllGather.__call__"),
    frame(407, file=f"{FSDP}/_fsdp_param_group.py", function="FSDPParamGroup.unshard"),
    frame(1446, file=f"{SITE}/torch/_dynamo/eval_frame.py", function="DisableContext.__call__.<locals>._fn"),
)
ENGINE_CALLERS = (
    BACKWARD,
    frame(395, file=f"{SITE}/torch/autograd/__init__.py", function="backward"),
    frame(623, file=f"{SITE}/torch/_tensor.py", function="Tensor.backward"),
)


def line(text: str, function: str = "main") -> Frame:
    number = next(number for number, one in enumerate(PROGRAM.splitlines(), start=1) if text in one)
    return frame(number, file=FILE, function=function)


IN_SAVE = (c10d("barrier"), WRAPPER, frame(4, file=FILE, function="save"), frame(11, file=FILE, function="main"))
IN_BACKWARD = (*ENGINE_CALLERS, line("loss.backward()"))


def within(op: str, text: str, function: str = "main") -> tuple[Frame, ...]:
    return (c10d(op), WRAPPER, line(text, function))


def hung(*stacks: Sequence[Frame], sources: bool = True, **changes: Any) -> Evidence:
    looks = [rank_snapshot(rank, *frames) for rank, frames in enumerate(stacks)]
    return seen(*looks, sources=sources, **changes)


def seen(*looks: RankSnapshot, sources: bool = True, at_s: float = 20.0, **changes: Any) -> Evidence:
    lines = {one.line for look in looks for stack in look.stacks for one in stack.frames if one.file == FILE}
    kept = tuple(excerpts(FILE, PROGRAM, lines)) if sources else ()
    return replace(stalled(*looks, at_s=at_s), sources=kept, **changes)


def blamed(found: Evidence) -> tuple[str | None, tuple[int, ...], int | None, float]:
    """Cause, culprits, line, confidence."""
    told = diagnose(found, judge(found))
    culprit = told.culprit or Culprit(ranks=(), step=None, collective=None, place=None)
    place = culprit.place or Place()
    return told.cause, culprit.ranks, place.line, told.findings[0].confidence


def test_a_call_under_a_condition_on_the_rank_is_named_with_its_caller() -> None:
    assert blamed(hung(IN_SAVE, IN_BACKWARD)) == ("rank0_only_collective", (0,), line("if rank == 0:").line, LIKELY)


def test_the_sentence_says_who_stands_in_what_and_no_group_or_number_that_nobody_knows() -> None:
    found = hung(IN_SAVE, IN_BACKWARD)
    told = diagnose(found, judge(found)).findings[0]
    assert told.claim == (
        "only rank 0 called barrier (ada/train.py:4); at the same point, rank 1 called all_reduce (DDP)"
        " (ada/train.py:9);"
        " rank 0 gets there only under `if rank == 0` (ada/train.py:10)"
    )
    assert diagnose(found, judge(found)).culprit.collective is None  # type: ignore[union-attr]


def in_wait(rank: int, *frames: Frame) -> RankSnapshot:
    """A rank that waits for the handle of an asynchronous collective, which only its native frames show."""
    looked = rank_snapshot(rank, *frames)
    native = ("c10d::Work::wait(std::chrono::milliseconds) (libtorch_cpu.so)",)
    return replace(looked, stacks=(replace(looked.stacks[0], native=native),))


def test_waits_for_handles_in_different_lines_are_told_apart_like_calls() -> None:
    in_save, loop, behind = IN_SAVE[2:], line("loss = "), line("dist.all_gather")
    found = seen(in_wait(0, *in_save), in_wait(1, loop))
    assert blamed(found) == ("rank0_only_collective", (0,), line("if rank == 0:").line, LIKELY)
    assert blamed(seen(in_wait(0, loop), in_wait(1, behind)))[:3] == ("rank_conditional_collective", (1,), 7)
    assert blamed(seen(in_wait(0, loop), in_wait(1, loop)))[0] == "unknown"


def test_most_ranks_are_right_whatever_their_number() -> None:
    cause, ranks, _, _ = blamed(hung(IN_SAVE, *[IN_BACKWARD] * 7))
    assert (cause, ranks) == ("rank0_only_collective", (0,))
    cause, ranks, _, _ = blamed(hung(IN_BACKWARD, IN_BACKWARD, within("broadcast", "dist.broadcast"), sources=False))
    assert (cause, ranks) == ("collective_order_mismatch", (2,))


def test_a_call_under_another_condition_is_that_of_the_rank_that_met_it() -> None:
    cause, ranks, at, sure = blamed(hung(within("all_reduce", "dist.all_reduce"), IN_BACKWARD))
    assert (cause, ranks, at) == ("rank_conditional_collective", (0,), line("if stop(loss):").line)
    assert sure < LIKELY  # the other one may have left it out


def test_a_rank_behind_a_loop_that_others_are_in_has_left_it() -> None:
    cause, ranks, at, _ = blamed(hung(IN_BACKWARD, within("broadcast", "dist.broadcast")))
    assert (cause, ranks, at) == ("rank_conditional_collective", (1,), line("for batch").line)


def test_two_calls_of_which_neither_has_a_condition_are_another_order_and_nobody_alone_is_blamed() -> None:
    first, second = within("broadcast", "dist.broadcast"), within("all_gather", "dist.all_gather")
    cause, ranks, _, sure = blamed(hung(first, second))
    assert (cause, ranks) == ("collective_order_mismatch", (0, 1))
    assert sure < LIKELY


def test_ranks_that_all_receive_are_a_transfer_without_its_other_half() -> None:
    found = hung(within("recv", "dist.recv", "half"), within("recv", "dist.recv", "half"))
    assert {wait.kind for wait in case(found).waits.values()} == {WaitKind.POINT_TO_POINT}
    assert blamed(found)[0] == "p2p_unmatched"


def test_a_receive_beside_a_barrier_is_told_as_the_transfer_it_is() -> None:
    barrier = (c10d("barrier"), WRAPPER, frame(21, file=FILE, function="half"))
    assert blamed(hung(within("recv", "dist.recv", "half"), barrier))[0] == "p2p_unmatched"


def told(op: str, text: str, function: str = "main", *, rank: int, **arguments: int) -> RankSnapshot:
    """A rank of which the source of its stack told with which root or partner it called."""
    look = rank_snapshot(rank, *within(op, text, function))
    return replace(look, stacks=tuple(replace(one, arguments=arguments) for one in look.stacks))


def test_ranks_that_take_another_one_for_the_root_of_a_call_are_told_with_it() -> None:
    apart = seen(told("broadcast", "dist.broadcast", rank=0, src=1), told("broadcast", "dist.broadcast", rank=1, src=0))
    assert blamed(apart)[:2] == ("root_mismatch", (0, 1))
    entered = diagnose(apart, judge(apart)).findings[0].facts["entered"]
    assert [(call["op"], call["value"], call["ranks"]) for call in entered] == [
        ("broadcast", 1, [0]),
        ("broadcast", 0, [1]),
    ]
    most = [told("broadcast", "dist.broadcast", rank=rank, src=3 if rank == 3 else 0) for rank in range(4)]
    assert blamed(seen(*most))[:2] == ("root_mismatch", (3,))
    crossed = [told("broadcast", "dist.broadcast", rank=rank, src=root) for rank, root in enumerate((2, 2, 0, 0))]
    assert blamed(seen(*crossed))[0] == "root_mismatch"  # no group has another one's root


def test_groups_may_have_a_root_each_and_one_call_has_one() -> None:
    roots = (0, 0, 2, 2)
    groups = [told("broadcast", "dist.broadcast", rank=rank, src=root) for rank, root in enumerate(roots)]
    assert case(seen(*groups)).difference is None
    assert case(seen(*[told("broadcast", "dist.broadcast", rank=rank, src=0) for rank in (0, 1)])).difference is None


def test_a_receive_waits_for_the_partner_that_it_names_and_for_nobody_else() -> None:
    ring = [told("recv", "dist.recv", "half", rank=rank, src=(rank + 1) % 3, tag=0) for rank in range(3)]
    waits = case(seen(*ring)).waits
    assert {rank: (wait.peers, wait.blocked_in) for rank, wait in waits.items()} == {
        0: ((1,), "recv with rank 1"),
        1: ((2,), "recv with rank 2"),
        2: ((0,), "recv with rank 0"),
    }
    assert blamed(seen(*ring))[0] == "p2p_unmatched"
    anybody = case(seen(*[told("recv", "dist.recv", "half", rank=rank, tag=0) for rank in range(3)])).waits
    assert anybody[0].peers == (1, 2)


def test_a_rank_that_has_ended_is_the_finding_while_the_others_wait() -> None:
    stands = [rank_snapshot(rank, *IN_SAVE) for rank in (0, 2)]
    everyone = tuple(rank_evidence(rank, exit=None) for rank in range(3))
    for status, how in (
        (0, "rank 1 ended with exit code 0 while the others still needed it"),
        (None, "rank 1 has ended, nobody saw how, and the others still need it"),
    ):
        found = seen(*stands, is_attached=True, is_observed=True, ranks=everyone, exits=(ended(1, status, at_s=1.0),))
        answer = diagnose(found, judge(found))
        assert (judge(found).status, answer.cause) == (Status.FAIL, "early_exit")
        facts = answer.findings[0].facts
        assert facts["failure"] == how
        assert (facts["blocked"]["ranks"], facts["blocked"]["blocked_in"]) == ([0, 2], "barrier")
        assert facts["blocked"]["line"]["line"] == 4
        assert answer.findings[0].proof == ("watch.jsonl",)
    assert answer.findings[0].confidence < LIKELY  # how it ended would say more
    found = seen(
        *stands,
        is_attached=True,
        is_observed=True,
        ranks=tuple(replace(one, exit=ended(1, 3, at_s=1.0)) if one.rank == 1 else one for one in everyone),
    )
    facts = diagnose(found, judge(found)).findings[0].facts
    assert (facts["failure"], facts["last_seen"]) == ("rank 1 ended with exit code 3", {"unseen": "not_inspected"})
    assert facts["blocked"]["ranks"] == [0, 2]


def test_of_a_job_that_is_only_looked_at_the_proof_is_what_there_is() -> None:
    found = replace(hung(IN_BACKWARD, IN_BACKWARD), is_observed=True, is_attached=True)
    found = replace(found, snapshots=tuple(with_dumps(one) for one in found.snapshots))
    first = diagnose(found, judge(found)).findings[0]
    assert (first.code, first.proof) == ("unknown", ("dumps/rank0.2.txt", "dumps/rank1.2.txt"))
    assert "output.log" not in first.advice


def with_dumps(look: Snapshot) -> Snapshot:
    return replace(
        look, ranks=tuple(replace(one, proof=f"dumps/rank{one.rank}.{look.number}.txt") for one in look.ranks)
    )


def test_ranks_in_one_call_of_one_line_do_not_differ() -> None:
    assert case(hung(IN_BACKWARD, IN_BACKWARD)).difference is None


def test_without_its_source_what_the_ranks_stand_in_is_no_less_told() -> None:
    cause, ranks, _, _ = blamed(hung(IN_SAVE, IN_BACKWARD, sources=False))
    assert (cause, ranks) == ("collective_order_mismatch", (0, 1))


def test_a_stack_decides_nothing_where_a_rank_has_a_board() -> None:
    marking = rank_snapshot(1, *IN_BACKWARD, status_file=board(mark("backward")))
    assert not case(seen(rank_snapshot(0, *IN_SAVE), marking)).stacks_only
    assert case(hung(IN_SAVE, IN_BACKWARD)).stacks_only


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        (IN_SAVE, "barrier"),
        (IN_BACKWARD, "all_reduce (DDP)"),
        ((*UNSHARD, line("model(batch)")), "all_gather_single (FSDP)"),
        ((*UNSHARD, *ENGINE_CALLERS[1:], line("loss.backward()")), "all_gather_single (FSDP)"),
        ((c10d("all_gather"), WRAPPER, c10d("all_gather_object"), WRAPPER, line("save")), "all_gather_object"),
        ((c10d("_store_based_barrier"), c10d("init_process_group"), WRAPPER, line("save")), "init_process_group"),
        (
            (
                frame(9, file=f"{FSDP}/_fsdp_param_group.py", function="FSDPParamGroup.wait_for_unshard"),
                line("model(batch)"),
            ),
            "all_gather (FSDP)",
        ),
        (
            (
                frame(9, file=f"{SITE}/torch/distributed/utils.py", function="_verify_param_shape_across_processes"),
                frame(9, file=f"{SITE}/torch/nn/parallel/distributed.py", function="__init__"),
                line("model(batch)"),
            ),
            "all_gather (DDP)",
        ),
        (
            (
                frame(9, file=f"{SITE}/torch/nn/parallel/distributed.py", function="_default_broadcast_coalesced"),
                line("model(batch)"),
            ),
            "broadcast (DDP)",
        ),
        ((frame(9, file=f"{SITE}/torch/distributed/checkpoint/filesystem.py", function="write"), line("save")), None),
        ((line("save"),), None),
        ((), None),
    ],
)
def test_the_frames_of_torch_name_the_call(frames: tuple[Frame, ...], text: str | None) -> None:
    named = group_call(frames)
    assert (named and named.text) == text


def test_no_rule_says_more_than_likely_by_stacks_alone() -> None:
    stacks = (IN_SAVE, IN_BACKWARD, within("all_reduce", "dist.all_reduce"), within("recv", "dist.recv", "half"))
    for one in stacks:
        for other in stacks:
            if one is not other:
                told = diagnose(hung(one, other), judge(hung(one, other)))
                assert told.cause != "unknown", (one, other)
                assert told.findings[0].confidence <= LIKELY, told.findings[0]


def test_what_the_stacks_alone_show_is_proven_by_their_dumps() -> None:
    looks = [
        rank_snapshot(rank, *frames, proof=f"dumps/rank{rank}.2.txt")
        for rank, frames in enumerate((IN_SAVE, IN_BACKWARD))
    ]
    found = seen(*looks)
    assert diagnose(found, judge(found)).findings[0].proof == ("dumps/rank0.2.txt",)


def test_the_calls_that_the_stacks_stand_in_lie_side_by_side() -> None:
    found = hung(IN_SAVE, IN_BACKWARD)
    told = diagnose(found, judge(found)).divergence
    assert told is not None
    assert [[one and one.op for one in row] for row in told.rows] == [["barrier", "all_reduce (DDP)"]]


def test_of_a_job_that_was_attached_to_the_looks_are_what_was_checked() -> None:
    found = replace(hung(IN_SAVE, IN_BACKWARD), is_attached=True)
    verdict = Verdict(status=Status.HANG, kind=None, cause=None, summary="")
    assert "stacks of every rank, in 2 looks" in list(passed_checks(found, verdict))
    unseen = replace(
        found, snapshots=(found.snapshots[0], replace(found.snapshots[1], ranks=found.snapshots[1].ranks[:1]))
    )
    assert "stacks of every rank, in 1 look" in list(passed_checks(unseen, verdict))


def recorded(*sizes: int, op: str = "all_reduce", at_s: float = 20.0, roots: Sequence[int] = (0, 0)) -> Evidence:
    """Ranks in one call of one line whose recorders were read, and no board."""
    looks = []
    for rank, size in enumerate(sizes):
        entries = (collective(1, retired=True), collective(2, op, sizes=((size,),), retired=False))
        looks.append(replace(told(op, f"dist.{op}", rank=rank, src=roots[rank]), collectives=entries))
    return seen(*looks, at_s=at_s)


def test_recorders_that_a_job_offers_by_itself_tell_unlike_tensors_of_one_call_of_one_line() -> None:
    found = recorded(4, 8)
    assert not case(found).stacks_only
    assert blamed(found)[:2] == ("shape_mismatch", (0, 1))


def test_where_recorders_are_alike_the_stacks_decide() -> None:
    late_s = 400.0  # all of them are in it, so that only time shows that it does not end
    found = recorded(4, 4, op="broadcast", at_s=late_s, roots=(1, 0))
    assert case(found).stacks_only
    assert blamed(found)[:2] == ("root_mismatch", (0, 1))
    assert blamed(recorded(4, 4, op="broadcast", at_s=late_s))[0] != "root_mismatch"
