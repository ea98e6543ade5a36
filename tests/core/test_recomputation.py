"""A collective that one rank calls only while activation checkpointing recomputes a forward in the backward pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import ALL_REDUCE, BACKWARD, SITE, board, diagnose, frame, mark, rank_snapshot, stack, stalled
from lockstep import run
from test_calls_differ import FAULTS, MADE, stood
from test_outcome import outcome

from nsa_harness.core.evidence.evidence import Evidence, Frame
from nsa_harness.core.evidence.stacks import recomputed_frame
from nsa_harness.core.report import Finding
from nsa_harness.core.verdict.verdict import judge

CHECKPOINT = f"{SITE}/torch/utils/checkpoint.py"
FORWARD, TRAIN = frame(99, function="Block.forward"), frame(26, function="main")
MODULE = frame(1832, file=f"{SITE}/torch/nn/modules/module.py", function="Module._call_impl")
AGAIN = (
    ALL_REDUCE, FORWARD, MODULE, frame(1688, file=CHECKPOINT, function="make.<locals>.recompute_fn"),
    frame(1183, file=CHECKPOINT, function="_checkpoint_hook.__init__.<locals>.unpack_hook"), BACKWARD, TRAIN,
)  # fmt: skip
IN_REENTRANT = (
    ALL_REDUCE,
    FORWARD,
    frame(300, file=CHECKPOINT, function="CheckpointFunction.backward"),
    BACKWARD,
    TRAIN,
)
IN_FORWARD = (ALL_REDUCE, FORWARD, frame(500, file=CHECKPOINT, function="checkpoint"), TRAIN)
AFTER = (ALL_REDUCE, frame(27, function="main"))


@pytest.mark.parametrize(
    ("frames", "again"), [(AGAIN, FORWARD), (IN_REENTRANT, FORWARD), (IN_FORWARD, None), (AFTER, None)]
)
def test_frames_of_checkpointing_show_what_is_run_a_second_time(frames: tuple[Frame, ...], again: Frame | None) -> None:
    assert recomputed_frame(frames) == again


def standing(*stacks: tuple[Frame, ...]) -> Evidence:
    """Rank 0 made one call more than the others; each rank stands in these frames."""
    seen = stood(run(FAULTS["extra"][0], *[MADE] * (len(stacks) - 1)))
    looks = tuple(
        replace(
            look,
            ranks=tuple(
                replace(rank, stacks=(stack(*frames, tid=rank.pid),))
                for rank, frames in zip(look.ranks, stacks, strict=True)
            ),
        )
        for look in seen.snapshots
    )
    return replace(seen, snapshots=looks)


def finding(*stacks: tuple[Frame, ...]) -> Finding:
    seen = standing(*stacks)
    return diagnose(seen, judge(seen)).findings[0]


def test_a_call_of_one_rank_in_a_recomputation_is_told_with_the_recomputation() -> None:
    found = finding(AGAIN, AFTER, AFTER)
    assert (found.code, found.ranks, found.facts["variant"]) == ("rank0_only_collective", (0,), "recomputed")
    assert (found.facts["recomputed_function"], found.facts["finished"]) == ("Block.forward", [1, 2])


@pytest.mark.parametrize(
    "stacks", [(IN_FORWARD, AFTER, AFTER), (AGAIN, AGAIN, AFTER), (AGAIN, (ALL_REDUCE, BACKWARD, TRAIN), AFTER)]
)
def test_a_call_that_others_may_still_make_in_their_backward_is_not(stacks: tuple[tuple[Frame, ...], ...]) -> None:
    assert finding(*stacks).facts["variant"] != "recomputed"


@pytest.mark.parametrize(("frames", "phase"), [(AGAIN, "recomputation in backward"), (IN_FORWARD, "forward")])
def test_a_hang_in_a_recomputation_is_not_one_in_a_forward(frames: tuple[Frame, ...], phase: str) -> None:
    seen = rank_snapshot(0, stacks=(stack(*frames[1:]),), status_file=board(mark("forward", "l", at_s=8.0)))
    assert outcome(stalled(seen)).phase == phase
