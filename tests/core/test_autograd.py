"""What DDP, autograd and checkpointing refuse: who, in which step, at which line, and how sure that is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import (
    BACKWARD,
    USER,
    Diagnosis,
    board,
    collective,
    diagnose,
    ended,
    evidence,
    frame,
    mark,
    raised,
    rank_evidence,
)

from nsa_harness.core.evidence.evidence import Evidence, Frame, Hint, RankEvidence, Source, StatusFile
from nsa_harness.core.evidence.exit_messages import known_warnings
from nsa_harness.core.evidence.health_samples import HealthSamples
from nsa_harness.core.report import Place
from nsa_harness.core.verdict.verdict import judge

UNFINISHED = (
    "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that"
    " your module has parameters that were not used in producing loss.\nParameter indices which did not receive grad"
    " for rank 1: 4 5\n"
)
SHRUNK = (
    "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that"
    " your training graph has changed in this iteration. this is not compatible with static_graph set to True.\n"
    "Parameter indices which did not receive grad for rank 0: 2"
)
GREW = (
    "Your training graph has changed in this iteration, e.g., one parameter is unused in first iteration, but then got"
    " used in the second iteration. this is not compatible with static_graph set to True."
)
TWICE = "Expected to mark a variable ready only once. Parameter at index 3 with name tied.bias has been marked"
RECOMPUTED = (
    "torch.utils.checkpoint: A different number of tensors was saved during the original forward and recomputation."
)
RECOMPUTED_SHAPES = (
    "torch.utils.checkpoint: Recomputed values for the following tensors have different metadata than during the"
    " forward pass."
)
IN_PLACE = (
    "one of the variables needed for gradient computation has been modified by an inplace operation:"
    " [torch.FloatTensor [8, 16]], which is output 0 of Sigmoid, is at version 1; expected version 0 instead."
)
PEER = "[pair.cc:553] Connection closed by peer [127.0.0.1]:1705."
CHECKPOINT = Place(file=USER, line=20, function="forward")


def hint(kind: str, name: str, line: int | None = 20) -> Hint:
    return Hint(kind=kind, name=name, frame=None if line is None else frame(line, function="forward"))


LEFT_OUT = (hint("without gradient", "policy.weight"), hint("without gradient", "policy.bias"))


def in_forward_of(step: int, rank: int = 0, position: int = 1, **changes: Any) -> StatusFile:
    """The forward pass of `step` has just begun; six parameters had a gradient in each step before."""
    done = tuple((one, float(one)) for one in range(1, step))
    facts = {"steps_s": done, "gradients": {one: 6 for one, _ in done}, "rank": rank}
    return board(mark("forward", "DistributedDataParallel", step=step, position=position), **{**facts, **changes})


def refused(rank: int, message: str, at: StatusFile | None, *hints: Hint, at_s: float = 9.0) -> RankEvidence:
    error = raised(rank, message=message, hints=hints, at_s=at_s, frames=(BACKWARD, frame(88)))
    return rank_evidence(rank, exit=ended(rank, 1), exception=error, status_file=at)


def in_backward_of(step: int, rank: int) -> StatusFile:
    at = in_forward_of(step, rank)
    marks = (mark("backward", "trunk", step=step, position=9),)
    return board(*marks, steps_s=at.steps_s, gradients=at.gradients, rank=rank)


def waiting(rank: int, step: int) -> RankEvidence:
    """In the backward pass of `step`, for its peer, until that was gone."""
    return refused(rank, PEER, in_backward_of(step, rank), at_s=9.5)


def diagnosed(*ranks: RankEvidence, **changes: Any) -> Diagnosis:
    seen: Evidence = evidence(*ranks, **{"launcher": ended(None, 1), **changes})
    return diagnose(seen, judge(seen))


def told(found: Diagnosis) -> tuple[str | None, tuple[int, ...], int | None, int | None, float]:
    assert found.culprit is not None
    place = found.culprit.place
    return (
        found.cause,
        found.culprit.ranks,
        found.culprit.step,
        place.line if place else None,
        found.findings[0].confidence,
    )


def test_parameters_that_no_rank_used_belong_to_the_step_before_and_to_their_own_line() -> None:
    both = [refused(rank, UNFINISHED, in_forward_of(4, rank), *LEFT_OUT) for rank in (0, 1)]
    found = diagnosed(*both)
    assert told(found) == ("unused_params", (0, 1), 3, 20, 0.95)
    facts = found.findings[0].facts
    assert facts["parameters"] == ["policy.weight", "policy.bias"]
    assert facts["gradients"] == [{"gradients": 6, "ranks": [0, 1]}]
    assert found.findings[0].place == Place(
        file=USER, line=20, function="forward", module="policy", parameter="policy.weight"
    )


def test_a_rank_that_used_fewer_parameters_than_those_that_wait_is_the_culprit() -> None:
    found = diagnosed(waiting(0, 3), refused(1, UNFINISHED, in_forward_of(4, 1), *LEFT_OUT))
    assert told(found) == ("rank_conditional_unused_params", (1,), 3, 20, 0.95)
    assert (found.findings[0].facts["others"], found.findings[0].facts["others_waited"]) == ([0], True)


def test_a_rank_without_a_board_may_have_lacked_the_same_gradients() -> None:
    quiet = rank_evidence(0, exit=ended(0, -15))
    found = diagnosed(quiet, refused(1, UNFINISHED, in_forward_of(4, 1), *LEFT_OUT))
    assert told(found) == ("unused_params", (0, 1), 3, 20, 0.85)


def test_a_rank_that_is_only_late_has_not_shown_that_it_waits() -> None:
    """It was ended in the same step: it may have come to lack the same gradients."""
    late = rank_evidence(0, exit=ended(0, -15), status_file=in_backward_of(3, 0))
    found = diagnosed(late, refused(1, UNFINISHED, in_forward_of(4, 1), *LEFT_OUT))
    assert told(found) == ("rank_conditional_unused_params", (1,), 3, 20, 0.75)


@pytest.mark.parametrize(("entered", "confidence"), [(7, 0.75), (8, 0.95)])
def test_a_rank_that_entered_a_reduction_more_had_the_gradients_for_it(entered: int, confidence: float) -> None:
    left_out = replace(in_forward_of(4, 1), enqueued=6)
    known = replace(refused(1, UNFINISHED, left_out, *LEFT_OUT), collectives=(collective(7),))
    other = rank_evidence(0, exit=ended(0, -15), status_file=replace(in_backward_of(3, 0), enqueued=entered))
    assert told(diagnosed(other, known)) == ("rank_conditional_unused_params", (1,), 3, 20, confidence)


def test_where_only_some_of_the_others_are_seen_to_wait_it_is_likely_only() -> None:
    found = diagnosed(waiting(0, 3), refused(1, UNFINISHED, in_forward_of(4, 1)), rank_evidence(2, exit=ended(2, -15)))
    assert told(found) == ("rank_conditional_unused_params", (1,), 3, 88, 0.75)


def test_ranks_that_each_left_out_another_part_are_told_from_ranks_that_left_out_the_same() -> None:
    other = hint("without gradient", "value.weight", 22)
    found = diagnosed(
        refused(0, UNFINISHED, in_forward_of(3), *LEFT_OUT), refused(1, UNFINISHED, in_forward_of(3, 1), other)
    )
    assert told(found) == ("rank_conditional_unused_params", (0, 1), 2, 20, 0.95)


def test_a_second_forward_of_the_same_step_blames_that_step() -> None:
    """Gradient accumulation: no optimizer step lies between the two."""
    later = [refused(rank, UNFINISHED, in_forward_of(4, rank, position=17), *LEFT_OUT) for rank in (0, 1)]
    assert told(diagnosed(*later))[2] == 4


def test_a_step_with_fewer_gradients_than_others_is_the_one_however_many_marks_followed() -> None:
    gradients = {1: 6, 2: 6, 3: 4}
    later = [
        refused(rank, UNFINISHED, in_forward_of(4, rank, position=17, gradients=gradients), *LEFT_OUT)
        for rank in (0, 1)
    ]
    assert told(diagnosed(*later))[2] == 3


def test_without_the_probes_names_the_line_is_the_users_that_called_torch() -> None:
    found = diagnosed(*(refused(rank, UNFINISHED, in_forward_of(4, rank)) for rank in (0, 1)))
    assert told(found) == ("unused_params", (0, 1), 3, 88, 0.95)
    place = found.findings[0].place
    assert place is not None
    assert place.parameter is None


def test_another_failure_that_came_first_is_the_cause() -> None:
    first = refused(0, "boom", in_forward_of(4), at_s=8.0)
    assert diagnosed(first, refused(1, UNFINISHED, in_forward_of(4, 1), *LEFT_OUT)).cause == "exception"


def test_parameters_that_vanish_from_a_static_graph_are_named_with_the_step_before() -> None:
    found = diagnosed(*(refused(rank, SHRUNK, in_forward_of(5, rank), *LEFT_OUT) for rank in (0, 1)))
    assert told(found) == ("static_graph_changed", (0, 1), 4, 20, 0.95)
    assert "(policy.weight, policy.bias) took no part" in found.findings[0].claim


def test_parameters_that_are_new_in_a_static_graph_are_named_with_the_same_step() -> None:
    new = hint("newly used", "refine.weight")
    found = diagnosed(*(refused(rank, GREW, in_forward_of(3, rank, position=9), new) for rank in (0, 1)))
    assert told(found) == ("static_graph_changed", (0, 1), 3, 20, 0.95)
    assert "refine.weight took part for the first time" in found.findings[0].claim


@pytest.mark.parametrize(
    ("message", "kind", "name", "cause"),
    [
        (TWICE, "ready twice", "tied.bias", "ready_twice"),
        (RECOMPUTED, "recomputed", "Block.forward", "checkpoint_recompute_mismatch"),
        (RECOMPUTED_SHAPES, "recomputed", "windowed", "checkpoint_recompute_mismatch"),
        (IN_PLACE, "in place", "sigmoid", "inplace_modification"),
    ],
)
def test_what_backward_refuses_is_named_with_the_line_the_probe_found(
    message: str, kind: str, name: str, cause: str
) -> None:
    at = in_forward_of(2, 1, position=12)
    found = diagnosed(waiting(0, 2), refused(1, message, at, hint(kind, name)))
    assert told(found) == (cause, (1,), 2, 20, 0.95)
    facts = found.findings[0].facts
    if kind == "in place":
        assert (facts["operation"], facts["shape"], facts["line"]["line"]) == ("Sigmoid", "8, 16", 20)
    else:
        assert name in (facts["function"] if kind == "recomputed" else facts["parameters"])


def test_a_gradient_that_is_ready_twice_is_told_with_the_checkpoint_that_is_reentrant() -> None:
    text = "def layer(self, x):\n    return checkpoint(self.block, x, use_reentrant=True)"
    ranks = [
        refused(rank, TWICE, in_forward_of(2, rank, position=12), hint("ready twice", "tied.bias")) for rank in (0, 1)
    ]
    found = diagnosed(*ranks, sources=(Source(file=USER, first=50, text=text),))
    assert told(found) == ("ready_twice", (0, 1), 2, 51, 0.95)
    assert (found.findings[0].place or Place()).parameter == "tied.bias"
    other = Source(file=USER, first=50, text=text.replace("True", "False, preserve_rng_state=True"))
    assert told(diagnosed(*ranks, sources=(other,)))[3] == 20


def test_a_part_that_one_rank_left_out_is_told_with_what_decides_whether_it_is_called() -> None:
    """`policy` is called in one line, and behind a condition; that its model is called says nothing."""
    part = Source(
        file=USER, first=50, text="def act(self, x):\n    if x.sum() < 0:\n        return x\n    return self.policy(x)"
    )
    ranks = waiting(0, 3), refused(1, UNFINISHED, in_forward_of(4, 1), *LEFT_OUT)
    assert told(diagnosed(*ranks, sources=(part,)))[3] == 51
    again = Source(file=USER, first=70, text="def dream(self, x):\n    return self.policy(x)")
    assert told(diagnosed(*ranks, sources=(part, again)))[3] == 20


def test_several_lines_in_place_leave_the_line_open_and_point_to_deepen() -> None:
    hints = (hint("in place", "sigmoid", 20), hint("in place", "sigmoid", 31))
    found = diagnosed(refused(0, IN_PLACE, in_forward_of(2, position=12), *hints))
    assert told(found)[3] == 88
    assert "--deepen" in found.findings[0].advice


def other_count(rank: int, own: int, other: int, theirs: int) -> str:
    return (
        f"DDP expects same model across all ranks, but Rank {rank} has {own} params, while rank {other} has"
        f" inconsistent {theirs} params."
    )


def test_of_several_models_the_one_unlike_the_most_is_the_culprits() -> None:
    said = [other_count(0, 8, 2, 10), other_count(1, 8, 2, 10), other_count(2, 10, 0, 8)]
    found = diagnosed(*(refused(rank, text, None) for rank, text in enumerate(said)))
    assert told(found) == ("model_mismatch", (2,), None, 88, 0.95)
    assert found.findings[0].facts["models"] == [
        {"parameters": "8", "ranks": [0, 1]},
        {"parameters": "10", "ranks": [2]},
    ]


def test_of_two_models_neither_is_certain_to_be_the_wrong_one() -> None:
    found = diagnosed(refused(0, other_count(0, 8, 1, 10), None), refused(1, other_count(1, 10, 0, 8), None))
    assert told(found) == ("model_mismatch", (0, 1), None, 88, 0.85)


def test_a_shape_unlike_that_of_rank_0_is_the_culprits_where_the_rest_agrees_with_it() -> None:
    text = (
        "[1]: params[0] in this process with sizes [21, 6] appears not to match sizes of the same param in process 0."
    )
    others = [rank_evidence(rank, exit=ended(rank, -15)) for rank in (0, 2)]
    found = diagnosed(others[0], refused(1, text, None), others[1])
    assert told(found) == ("model_mismatch", (1,), None, 88, 0.95)
    assert "parameter 0 with sizes [21, 6] on rank 1" in found.findings[0].claim


def test_a_reentrant_checkpoint_without_a_gradient_explains_what_ddp_misses() -> None:
    both = [
        refused(rank, UNFINISHED, in_forward_of(2, rank, checkpoint_without_gradient=CHECKPOINT), *LEFT_OUT)
        for rank in (0, 1)
    ]
    assert told(diagnosed(*both)) == ("reentrant_no_grad_input", (0, 1), 1, 20, 0.95)


def test_a_checkpoint_elsewhere_in_the_program_makes_it_likely_only() -> None:
    elsewhere = Place(file=USER, line=70, function="evaluate")
    both = [
        refused(rank, UNFINISHED, in_forward_of(2, rank, checkpoint_without_gradient=elsewhere), *LEFT_OUT)
        for rank in (0, 1)
    ]
    assert told(diagnosed(*both))[4] == 0.75


def passed(looks: HealthSamples | None, **changes: Any) -> Diagnosis:
    at = board(checkpoint_without_gradient=CHECKPOINT)
    return diagnosed(rank_evidence(0, exit=ended(0), status_file=at, health=looks, **changes), launcher=ended(None))


def test_a_silent_checkpoint_is_a_finding_of_a_run_that_passed() -> None:
    found = passed(
        HealthSamples(without_gradient=("lower.weight", "lower.bias"), without_gradient_count=2, sample_count=5)
    ).findings
    assert [(one.code, one.ranks, one.place) for one in found][:1] == [
        (
            "reentrant_no_grad_input",
            (0,),
            Place(file=USER, line=20, function="forward", module="lower", parameter="lower.weight"),
        )
    ]


def test_a_checkpoint_under_no_grad_alone_is_no_finding() -> None:
    """Evaluation: every parameter has a gradient in training."""
    assert passed(HealthSamples(sample_count=5)).findings == ()


def test_a_needless_search_for_unused_parameters_is_torchs_own_word() -> None:
    log = [
        "[rank0]:[W1121 reducer.cpp:1457] Warning: find_unused_parameters=True was specified in DDP constructor, but"
        " did not find any unused parameters in the forward pass. This flag results in an extra traversal",
        "nothing else",
    ]
    found = diagnosed(rank_evidence(0, exit=ended(0), warnings=known_warnings(log)), launcher=ended(None)).findings
    assert [(one.code, one.ranks, one.confidence) for one in found] == [("find_unused_needless", (0,), 0.75)]
    for steps, why in (
        ({1: 12, 2: 12, 3: 10}, "a later step had parameters without a gradient"),
        ({2: 12, 3: 12}, "a step that nobody remembers may have had some"),
    ):
        needed = rank_evidence(0, exit=ended(0), warnings=known_warnings(log), status_file=board(gradients=steps))
        assert diagnosed(needed, launcher=ended(None)).findings == (), why


# The step that a rank is in.

LOOP = (Frame(file="train.py", line=30, function="step"), Frame(file="train.py", line=19, function="main"))


@pytest.mark.parametrize(
    ("stands", "step"),
    [
        ((frame(17, function="main"),), 4),  # at the top of the loop, before the line that leads to the optimizer
        ((frame(21, function="main"),), 3),  # behind it, or behind the loop
        ((frame(33, function="step"), frame(19, function="main")), 3),  # in the same call, behind the optimizer
        ((frame(25, function="step"), frame(19, function="main")), 4),  # in the next call, before it
        ((frame(5, function="elsewhere"),), 3),  # not to be compared
    ],
)
def test_whoever_stands_before_the_line_of_the_optimizer_is_in_the_next_step(
    stands: tuple[Frame, ...], step: int
) -> None:
    at = board(mark("step", "SGD", step=3), steps_s=((3, 4.0),), optimizer_chain=LOOP)
    error = raised(0, frames=stands)
    found = diagnosed(rank_evidence(0, exit=ended(0, 1), exception=error, status_file=at))
    assert found.culprit is not None
    assert found.culprit.step == step


def test_whoever_called_exit_before_the_line_of_the_optimizer_left_in_the_next_step() -> None:
    left_from = (frame(18, function="spend", file="budget.py"), frame(17, function="main", file="train.py"))
    at = board(mark("step", "SGD", step=3), steps_s=((3, 4.0),), optimizer_chain=LOOP, exit_chain=left_from)
    found = diagnosed(rank_evidence(0, exit=ended(0, 3), status_file=at))
    assert (found.cause, found.culprit and found.culprit.step) == ("bad_exit", 4)


def test_a_step_without_a_mark_of_its_beginning_has_the_number_it_was_done_with() -> None:
    at = board(mark("step", "SGD", step=2), steps_s=((2, 3.0), (3, 4.0)), optimizer_chain=LOOP)
    error = raised(0, frames=(frame(17, function="main"),))
    found = diagnosed(rank_evidence(0, exit=ended(0, 1), exception=error, status_file=at))
    assert found.culprit is not None
    assert found.culprit.step == 4


def test_a_backward_pass_that_no_parameter_leads_to_is_no_gradient() -> None:
    words = "element 0 of tensors does not require grad and does not have a grad_fn"
    found = diagnosed(
        *(rank_evidence(rank, exit=ended(rank, 1), exception=raised(rank, message=words)) for rank in (0, 1))
    )
    assert (found.cause, found.findings[0].ranks, found.findings[0].confidence) == ("no_gradient", (0, 1), 0.85)


def test_whoever_has_begun_a_batch_is_in_the_step_that_the_board_says() -> None:
    at = board(mark("forward", "net", step=4), steps_s=((3, 4.0),), optimizer_chain=LOOP)
    found = diagnosed(
        rank_evidence(0, exit=ended(0, 1), exception=raised(0, frames=(frame(17, function="main"),)), status_file=at)
    )
    assert found.culprit is not None
    assert found.culprit.step == 4
