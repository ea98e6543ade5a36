"""Findings about runs that say nothing: a run for each rule, and the healthy ones that look much like it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import board, call, case, ended, evidence, finding_of, rank_evidence

from nsa_harness.core.diagnosis.rules import replicas as of_replicas
from nsa_harness.core.diagnosis.rules import silent_faults as of_silence
from nsa_harness.core.evidence.evidence import Frame, RankEvidence
from nsa_harness.core.evidence.exit_messages import read_exit_messages
from nsa_harness.core.evidence.health_records import MAX_POINTS, read_health_samples
from nsa_harness.core.evidence.health_samples import (
    DataWait,
    Exchange,
    HealthSamples,
    MemorySample,
    NonFiniteValue,
    OverwrittenFile,
    ParameterBlock,
    PrintedMessage,
    Replica,
    ReplicaSample,
)
from nsa_harness.core.report import Place

MIB = 1 << 20
LINE = Place(file="/home/ada/train.py", line=18, function="step")
SAME = ParameterBlock(checksum="aa", size=4.0, total=1.0)
OTHER = ParameterBlock(checksum="bb", size=5.0, total=1.0)


def rank(number: int, looks: HealthSamples | None = None, **changes: Any) -> RankEvidence:
    return rank_evidence(number, exit=ended(number), health=looks, **changes)


def found(rule: Any, *ranks: RankEvidence) -> Any:
    explanation = rule(case(evidence(*ranks)))
    return finding_of(explanation) if explanation else None


# NaN.

HOLDS = NonFiniteValue(step=5, value="nan", names=("head.weight",))


def test_the_rank_whose_loss_was_broken_first_and_its_line_are_named() -> None:
    first = HealthSamples(non_finite_loss=NonFiniteValue(step=4, value="nan", place=LINE), non_finite_parameters=HOLDS)
    later = HealthSamples(non_finite_loss=NonFiniteValue(step=5, value="nan", place=LINE), non_finite_parameters=HOLDS)
    one = found(of_silence.nan, rank(0, later), rank(1, first))
    assert (one.code, one.ranks, one.place, one.confidence) == ("nan", (1,), LINE, 0.95)
    assert (one.facts["variant"], one.facts["value"], one.facts["other_ranks_broke_later"]) == ("loss", "nan", True)
    assert one.facts["parameter"] == "head.weight"


def test_parameters_that_broke_before_any_loss_came_out_of_the_backward_pass_of_an_unknown_rank() -> None:
    one = found(
        of_silence.nan,
        rank(0, HealthSamples(non_finite_parameters=HOLDS)),
        rank(1, HealthSamples(non_finite_parameters=HOLDS)),
    )
    assert (one.code, one.ranks, one.place) == ("nan", (0, 1), Place(parameter="head.weight"))
    assert one.confidence == 0.85


@pytest.mark.parametrize("in_a_row", [0, 1, 2])
def test_a_broken_batch_that_the_program_skipped_is_no_finding(in_a_row: int) -> None:
    skipped = HealthSamples(
        non_finite_loss=NonFiniteValue(step=4, value="inf", place=LINE), bad_losses=9, bad_in_a_row=in_a_row
    )
    assert found(of_silence.nan, rank(0, skipped)) is None


def test_losses_that_stay_broken_to_the_end_are_likely_one() -> None:
    one = found(
        of_silence.nan,
        rank(0, HealthSamples(non_finite_loss=NonFiniteValue(step=4, value="inf", place=LINE), bad_in_a_row=3)),
    )
    assert (one.ranks, one.confidence) == ((0,), 0.8)


# Replicas.


def replica(
    *checksums: str, part: ParameterBlock = SAME, steps: tuple[int, ...] = (0, 0, 1, 1, 2), **changes: Any
) -> HealthSamples:
    """Made, before step 1, after it, before step 2, after it."""
    moments = (("made", 0), ("begun", 0), ("stepped", 1), ("begun", 1), ("stepped", 2))
    looks = tuple(
        ReplicaSample(at=at, round=number, steps=done, checksum=one)
        for (at, number), done, one in zip(moments, steps, checksums, strict=False)
    )
    facts = {
        "number": 0,
        "ranks": (0, 1),
        "names": (("head.weight", "head.weight"),),
        "samples": looks,
        "blocks": (part,),
    }
    return HealthSamples(replicas=(Replica(**{**facts, **changes}),))


def test_a_rank_that_changed_its_replica_outside_of_a_step_is_named() -> None:
    one = found(of_replicas.replica_divergence, rank(0, replica(*"aabbc")), rank(1, replica(*"aabxy", part=OTHER)))
    assert (one.code, one.ranks, one.place) == ("replica_divergence", (1,), Place(parameter="head.weight"))
    assert (one.facts["since"], one.facts["last_step"], one.facts["identified_by"]) == ("begun", 1, "outside")
    assert (one.facts["parts"], round(one.facts["difference"], 1)) == (["head.weight"], 0.2)


def test_a_rank_that_loads_other_weights_after_the_constructor_is_named() -> None:
    one = found(of_replicas.replica_divergence, rank(0, replica(*"axyzw", part=OTHER)), rank(1, replica(*"aabbc")))
    assert one.ranks == (0,)
    assert (one.facts["since"], one.facts["last_step"], one.facts["identified_by"]) == ("begun", 0, "outside")


def test_a_rank_that_steps_once_more_than_it_goes_backward_is_named() -> None:
    more = replica(*"aabbx", part=OTHER, steps=(0, 0, 1, 1, 3))
    one = found(of_replicas.replica_divergence, rank(0, replica(*"aabbc")), rank(1, more))
    assert (one.ranks, one.facts["identified_by"]) == ((1,), "extra step")


def test_of_three_the_one_that_comes_out_of_a_step_unlike_the_others_is_named_and_of_two_neither() -> None:
    members = {"ranks": (0, 1, 2)}
    lone = replica(*"aabbx", part=OTHER, **members)
    three = [rank(0, replica(*"aabbc", **members)), rank(1, replica(*"aabbc", **members)), rank(2, lone)]
    assert found(of_replicas.replica_divergence, *three).ranks == (2,)
    two = found(of_replicas.replica_divergence, rank(0, replica(*"aabbc")), rank(1, replica(*"aabbx", part=OTHER)))
    assert two.ranks == (0, 1)


def test_what_was_before_the_oldest_look_is_left_open() -> None:
    looks = [replica(*sums, part=part) for sums, part in (("aabbc", SAME), ("xyzvw", OTHER))]
    kept = [replace(one, replicas=(replace(one.replicas[0], samples=one.replicas[0].samples[3:]),)) for one in looks]
    one = found(of_replicas.replica_divergence, rank(0, kept[0]), rank(1, kept[1]))
    assert (one.ranks, one.facts["since"], one.facts["last_step"]) == ((0, 1), "before", 1)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(replica(*"aabbc"), replica(*"aabbc"), id="equal"),
        pytest.param(replica(*"aabbc"), replica(*"aaxyc", part=OTHER), id="equal again: averaged on purpose"),
        pytest.param(replica(*"aabbc"), replica(*"aabbx", part=replace(SAME, checksum="bb")), id="rounding only"),
        pytest.param(replica(*"aabbc"), replica(*"aabbx", part=OTHER, hook="gossip"), id="own communication hook"),
        pytest.param(replica(*"aabbc"), replica(*"aabb"), id="one rank looked once less"),
        pytest.param(replica(*"aabbc"), replica(*"aabbx", part=OTHER, names=()), id="other parameters"),
        pytest.param(replica(*"aabbc"), replica(*"aabbx", part=OTHER, number=1), id="another model"),
        pytest.param(replica(*"aabbc"), None, id="a rank without looks"),
    ],
)
def test_replicas_that_are_equal_or_need_not_be_are_no_finding(
    first: HealthSamples, second: HealthSamples | None
) -> None:
    assert found(of_replicas.replica_divergence, rank(0, first), rank(1, second)) is None


ORDERED = {"order": ("a1", "b2"), "name_set": "ab", "names": (("up.weight", "up.bias"), ("down.weight", "down.bias"))}
SWAPPED = {**ORDERED, "order": ("b2", "a1"), "names": (("down.weight", "down.bias"), ("up.weight", "up.bias"))}


def test_equal_values_under_other_names_are_found_because_ddp_goes_by_position() -> None:
    one = found(
        of_replicas.replica_divergence, rank(0, replica(*"aabbc", **ORDERED)), rank(1, replica(*"aabbc", **SWAPPED))
    )
    assert (one.ranks, one.facts["identified_by"], one.place) == ((0, 1), "order", Place(parameter="up.weight"))
    assert one.facts["parts"] == ["up.weight", "down.weight"]


@pytest.mark.parametrize(
    "other",
    [ORDERED, {**SWAPPED, "name_set": "other"}, {**SWAPPED, "in_ddp": False}, {**SWAPPED, "order": ()}],
    ids=["same order", "other parameters", "outside of DDP", "not recorded"],
)
def test_names_that_need_not_be_in_one_order_are_no_finding(other: dict[str, Any]) -> None:
    samples = [replica(*"aabbc", **names) for names in (ORDERED, other)]
    assert found(of_replicas.replica_divergence, rank(0, samples[0]), rank(1, samples[1])) is None


def accumulating(steps: int, losses: int = 32, **changes: Any) -> HealthSamples:
    samples = replica("a", number=0, **changes)
    return replace(samples, steps=steps, losses=losses, open_group=False)


def test_ranks_that_accumulate_over_different_numbers_of_micro_batches_are_found() -> None:
    one = found(of_replicas.replica_divergence, rank(0, accumulating(16)), rank(1, accumulating(32)))
    assert (one.ranks, one.facts["identified_by"]) == ((0, 1), "steps")
    assert one.facts["optimizer_steps"] == [{"ranks": [0], "steps": 16}, {"ranks": [1], "steps": 32}]
    members = {"ranks": (0, 1, 2)}
    three = [rank(number, accumulating(32 if number == 1 else 16, **members)) for number in range(3)]
    assert found(of_replicas.replica_divergence, *three).ranks == (1,)


@pytest.mark.parametrize(
    "other",
    [
        accumulating(16),
        accumulating(20, losses=20),
        replace(accumulating(32), open_group=None),
        accumulating(32, in_ddp=False),
        accumulating(32, hook="local SGD"),
    ],
    ids=["equal", "fewer batches", "ended early", "outside of DDP", "own communication hook"],
)
def test_unequal_steps_for_another_reason_are_no_finding(other: HealthSamples) -> None:
    assert found(of_replicas.replica_divergence, rank(0, accumulating(16)), rank(1, other)) is None


def past_ddp(checksums: str, *bypassed: int, keep: int = 0, **changes: Any) -> HealthSamples:
    """A replica whose forward passes went past DDP before the samples with the numbers `bypassed`."""
    (one,) = replica(*checksums, part=OTHER if "x" in checksums else SAME, **changes).replicas
    samples = [
        replace(sample, bypass_place=LINE if number in bypassed else None) for number, sample in enumerate(one.samples)
    ]
    return HealthSamples(replicas=(replace(one, samples=tuple(samples[keep:])),))


def test_the_line_that_called_the_model_past_ddp_is_named_if_its_step_made_the_replicas_differ() -> None:
    one = found(of_replicas.replica_divergence, rank(0, past_ddp("aabbc", 4)), rank(1, past_ddp("aabbx", 4)))
    assert (one.facts["identified_by"], one.ranks, one.confidence >= 0.9) == ("bypassed", (0, 1), True)
    assert one.place == replace(LINE, parameter="head.weight")
    assert "called the model inside of DDP (ada/train.py:18) in that step, and not DDP itself" in one.claim
    lost = [past_ddp("aabbc", 2, 4, keep=3), past_ddp("aaxxx", 2, 4, keep=3)]
    assert (
        found(of_replicas.replica_divergence, rank(0, lost[0]), rank(1, lost[1])).facts["identified_by"] == "bypassed"
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (past_ddp("aabbc", 2, 4), past_ddp("aabbx", 2, 4)),
        (past_ddp("aabbc", 4), past_ddp("aabbx")),
        (past_ddp("aabbc", 4), past_ddp("aabxx", 4)),
    ],
    ids=["harmless before", "one rank only", "changed before that step"],
)
def test_a_call_past_ddp_is_not_the_reason_of_another_difference(first: HealthSamples, second: HealthSamples) -> None:
    assert found(of_replicas.replica_divergence, rank(0, first), rank(1, second)).facts["identified_by"] != "bypassed"


UNREDUCED: dict[str, Any] = {"kind": "added", "type": "Net", "in_ddp": False, "wrap_place": LINE}


@pytest.mark.parametrize(
    ("kind", "checksums", "is_certain"),
    [("added", "axxyy", True), ("added", "xxyyz", False), ("beside", "axxyy", False)],
)
def test_trained_parameters_that_no_ddp_averages_are_named_with_the_line_of_ddp(
    kind: str, checksums: str, is_certain: bool
) -> None:
    facts = {**UNREDUCED, "kind": kind}
    one = found(
        of_replicas.replica_divergence,
        rank(0, replica(*"aabbc", **facts)),
        rank(1, replica(*checksums, part=OTHER, **facts)),
    )
    assert (one.facts["identified_by"], one.ranks, one.place) == (kind, (0, 1), replace(LINE, parameter="head.weight"))
    assert (one.confidence >= 0.9) is is_certain
    assert "no DDP averages the gradients of head.weight of Net" in one.claim


@pytest.mark.parametrize(
    ("first", "second"), [("aabbc", "aabbc"), ("aabbc", "aabbx"), ("aabbc", "axxbc")], ids=["equal", "once", "again"]
)
def test_trained_parameters_that_no_ddp_averages_but_the_program_does_are_no_finding(first: str, second: str) -> None:
    pair = [replica(*first, **UNREDUCED), replica(*second, part=OTHER, **UNREDUCED)]
    assert found(of_replicas.replica_divergence, rank(0, pair[0]), rank(1, pair[1])) is None


def test_experts_that_each_rank_trains_for_itself_are_no_finding() -> None:
    pair = [replica(*"aabbc", **UNREDUCED), replica(*"axxyy", part=OTHER, **UNREDUCED)]
    exchanges = board(calls=(call(op="all_to_all_single"),))
    ranks = [rank(number, looks, status_file=exchanges) for number, looks in enumerate(pair)]
    assert found(of_replicas.replica_divergence, *ranks) is None


def test_replicas_of_another_group_are_not_compared() -> None:
    ranks = [rank(0, replica(*"aabbc", ranks=(0, 2))), rank(1, replica(*"aabbx", part=OTHER, ranks=(1, 3)))]
    assert found(of_replicas.replica_divergence, *ranks) is None


def test_the_learning_rate_or_the_state_of_the_optimizer_is_named_that_differed_at_the_first_difference() -> None:
    def at_step_2(checksums: str, **changes: Any) -> HealthSamples:
        one = replica(*checksums, part=OTHER if "x" in checksums else SAME)
        looks = [replace(look, **changes) if look.round else look for look in one.replicas[0].samples]
        return replace(one, replicas=(replace(one.replicas[0], samples=tuple(looks)),))

    rates = [at_step_2("aabbc", learning_rates=(0.1,)), at_step_2("aabbx", learning_rates=(0.05,))]
    one = found(of_replicas.replica_divergence, rank(0, rates[0]), rank(1, rates[1]))
    assert (one.facts["identified_by"], one.confidence >= 0.9) == ("learning rate", True)
    assert "ranks 0, 1 train with different learning rates: 0.1 on rank 0, 0.05 on rank 1" in one.claim
    states = [at_step_2("aabbc", optimizer_state="1"), at_step_2("aabbx", optimizer_state="2")]
    one = found(of_replicas.replica_divergence, rank(0, states[0]), rank(1, states[1]))
    assert one.facts["identified_by"] == "optimizer state"
    unknown = [at_step_2("aabbc", optimizer_state="1"), at_step_2("aabbx", optimizer_state="")]
    assert found(of_replicas.replica_divergence, rank(0, unknown[0]), rank(1, unknown[1])).facts["identified_by"] == ""


def test_the_part_that_differs_first_is_the_place_if_others_follow_it() -> None:
    def with_parts(checksums: str, parts: tuple[str, ...], last: ParameterBlock) -> HealthSamples:
        one = replica(*checksums, names=(("a", "a"), ("b", "b")), blocks=(last, last))
        looks = zip(one.replicas[0].samples, parts, strict=True)
        samples = tuple(replace(look, block_checksums=text) for look, text in looks)
        return replace(one, replicas=(replace(one.replicas[0], samples=samples),))

    first = with_parts("aabbc", ("1111aaaa",) * 5, SAME)
    second = with_parts("aabyz", (*("1111aaaa",) * 3, "1111bbbb", "2222bbbb"), OTHER)
    one = found(of_replicas.replica_divergence, rank(0, first), rank(1, second))
    assert (one.place, one.facts["first_parts"], one.facts["parts"]) == (Place(parameter="b"), ["b"], ["a", "b"])
    assert "next forward pass, first in b: rank 1" in one.claim


# Buffers and copies of a model.


def companion(
    *parts: str, kind: str = "buffers", last: tuple[ParameterBlock, ...] = (SAME, SAME), **changes: Any
) -> Any:
    looks = tuple(
        ReplicaSample(at="stepped", round=number, steps=number, checksum=text, block_checksums=text)
        for number, text in enumerate(parts)
    )
    names = (("codes", "codes"), ("seen", "seen"))
    facts = {"samples": looks, "names": names, "blocks": last, "in_ddp": False, "kind": kind, "type": "Quantizer"}
    return replica(**{**facts, **changes})


CODES = tuple(f"{number:04}" for number in range(8))
OWN = companion(*(f"{code}own{number}" for number, code in enumerate(CODES)), last=(SAME, OTHER))
RESTARTED = companion(*(f"{code}aaaa" for code in (*CODES[:5], "xxxx", "yyyy", "zzzz")), last=(OTHER, SAME))
BY_CHANCE = ("0000", "0001", "xxxx", "yyyy", "zzzz", "vvvv", "wwww", "uuuu")


def test_a_buffer_that_several_changes_kept_equal_and_that_then_differs_to_the_end_is_found() -> None:
    equal = companion(*(f"{code}aaaa" for code in CODES))
    one = found(of_replicas.replica_divergence, rank(0, equal), rank(1, RESTARTED))
    assert (one.code, one.ranks, one.confidence) == ("replica_divergence", (0, 1), 0.85)
    assert (one.place, one.facts["last_step"]) == (Place(parameter="codes"), 5)
    assert (
        "the buffers codes of Quantizer changed alike on ranks 0, 1, and have differed since the end of step 5"
        in one.claim
    )
    copies = [
        companion(*(f"{code}aaaa" for code in CODES), kind="copy"),
        replace(RESTARTED, replicas=(replace(RESTARTED.replicas[0], kind="copy"),)),
    ]
    one = found(of_replicas.replica_divergence, rank(0, copies[0]), rank(1, copies[1]))
    assert "Quantizer, a copy of the model, changed alike on ranks 0, 1, and has differed since" in one.claim


def test_buffers_that_never_changed_alike_are_named_if_all_parameters_are_equal() -> None:
    mine, theirs = companion(*(f"{code}aaaa" for code in CODES)), companion(*(f"9{code[1:]}aaaa" for code in CODES))
    theirs = replace(theirs, replicas=(replace(theirs.replicas[0], blocks=(OTHER, SAME)),))
    ranks = [rank(number, both(one, replica(*"abbcd"))) for number, one in enumerate((mine, theirs))]
    one = found(of_replicas.replica_divergence, *ranks)
    assert (one.facts["identified_by"], one.facts["parts"], one.confidence) == ("local buffers", ["codes"], 0.75)
    assert one.left_open == ("the buffers may belong to each rank on purpose, like statistics of its own batches",)
    drifted = [
        rank(number, both(one, replica(*model))) for number, one, model in ((0, mine, "abbcd"), (1, theirs, "abbcx"))
    ]
    assert found(of_replicas.replica_divergence, *drifted) is None, "the parameters differ as well"
    constant = companion(*("9000aaaa" for _ in CODES), last=(OTHER, SAME))
    ranks = [rank(number, both(one, replica(*"abbcd"))) for number, one in enumerate((mine, constant))]
    assert found(of_replicas.replica_divergence, *ranks) is None, "constants of the rank"


def both(copies: HealthSamples, model: HealthSamples) -> HealthSamples:
    """Samples of a model in DDP, and of a copy of it with the same parameters."""
    (original,) = model.replicas
    (copied,) = copies.replicas
    return replace(copies, replicas=(replace(original, number=1, names=copied.names), copied))


@pytest.mark.parametrize(
    ("mine", "theirs", "models", "is_found"),
    [
        ("abcdefgh", "ijklmnop", ("abbcd", "abbcd"), True),
        ("abcdefgh", "ijklmnop", ("abbcd", "abbcx"), False),
        ("aaaaaaaa", "iiiiiiii", ("abbcd", "abbcd"), False),
        ("abcdefgh", "ijcdmnop", ("abbcd", "abbcd"), False),
    ],
    ids=["never equal", "the model differs too", "does not change", "was equal once"],
)
def test_a_copy_that_was_never_equal_although_its_model_always_was(
    mine: str, theirs: str, models: tuple[str, str], is_found: bool
) -> None:
    copies = [companion(*(f"{code}aaaa" for code in codes), kind="copy") for codes in (mine, theirs)]
    copies[1] = replace(copies[1], replicas=(replace(copies[1].replicas[0], blocks=(OTHER, SAME)),))
    ranks = [rank(number, both(copies[number], replica(*models[number]))) for number in (0, 1)]
    divergence = found(of_replicas.replica_divergence, *ranks)
    assert (divergence is not None and divergence.facts["identified_by"] == "unequal copy") is is_found
    if is_found:
        assert "Quantizer, a copy of the model, was never equal on ranks 0, 1, although the model in DDP" in (
            divergence.claim
        )


@pytest.mark.parametrize(
    "other",
    [
        companion(*(f"{code}aaaa" for code in CODES)),
        OWN,
        companion(*(f"{code}aaaa" for code in BY_CHANCE), last=(OTHER, SAME)),
        companion(*(f"{code}aaaa" for code in (*CODES[:5], "xxxx", "yyyy", "0007"))),
        companion(*(f"{code}aaaa" for code in (*CODES[:6], "xxxx", "yyyy")), last=(OTHER, SAME)),
        replace(RESTARTED, replicas=(replace(RESTARTED.replicas[0], type="Ema"),)),
        replace(RESTARTED, replicas=(replace(RESTARTED.replicas[0], blocks=(replace(SAME, checksum="bb"), SAME)),)),
    ],
    ids=["equal", "own statistics", "equal by chance", "equal again", "only at the end", "another module", "rounding"],
)
def test_buffers_that_need_not_be_equal_are_no_finding(other: HealthSamples) -> None:
    equal = companion(*(f"{code}aaaa" for code in CODES))
    assert found(of_replicas.replica_divergence, rank(0, equal), rank(1, other)) is None


# Models outside of DDP.


def alone(*checksums: str, over: str | None = None, **changes: Any) -> HealthSamples:
    """Met before step 1, looked at after it, before step 2, and so on; at the end where it still lives."""
    moments = [("made", 0), ("stepped", 1), ("begun", 1), ("stepped", 2), ("begun", 2), ("stepped", 3)]
    taken = [*zip(moments, checksums, strict=False), *([(("over", 3), over)] if over else [])]
    looks = tuple(ReplicaSample(at=at, round=number, steps=number, checksum=one) for (at, number), one in taken)
    return replica(samples=looks, in_ddp=False, **changes)


def test_a_model_outside_of_ddp_is_a_replica_once_a_step_has_changed_it_alike_on_all_ranks() -> None:
    first, second = alone(*"abbccd"), alone(*"abbxxy", part=OTHER)
    one = found(of_replicas.replica_divergence, rank(0, first), rank(1, second))
    assert (one.code, one.ranks, one.confidence) == ("replica_divergence", (0, 1), 0.85)
    assert "since the end of step 2" in one.claim
    assert "Call the model through DistributedDataParallel" in one.advice


def test_a_model_whose_parameters_were_broadcast_is_a_replica_from_the_start() -> None:
    first, second = alone(*"abbccd", was_broadcast=True), alone(*"axxyyz", part=OTHER, was_broadcast=True)
    one = found(of_replicas.replica_divergence, rank(0, first), rank(1, second))
    assert (one.ranks, "since the end of step 1" in one.claim) == ((0, 1), True)
    seed = [rank(0, alone(*"abbccd", was_broadcast=True)), rank(1, alone(*"axxyyz", part=OTHER))]
    assert found(of_replicas.replica_divergence, *seed) is None, "one rank had it from elsewhere"


def exchanging(checksums: str, *elements: int, part: ParameterBlock = SAME) -> HealthSamples:
    """A model of 10 elements that was sampled before its first step and after each step, with the data exchanged."""
    samples = (
        ReplicaSample(at="made", round=0, steps=0, checksum=checksums[0]),
        *(
            ReplicaSample(at="stepped", round=number, steps=number, checksum=checksum, elements=count)
            for number, (checksum, count) in enumerate(zip(checksums[1:], elements, strict=True), 1)
        ),
    )
    return replica(samples=samples, in_ddp=False, numel=10, part=part)


@pytest.mark.parametrize(
    ("elements", "function", "is_found"),
    [
        ((0, 10, 10, 12, 10), "step", True),
        ((0, 10, 9, 10, 10), "step", False),
        ((0, 10, 10, 10, 10), "forward", False),
        ((0, 10, 10, 10), "step", False),
    ],
    ids=["each step", "not each step", "in the forward of a divided model", "few steps"],
)
def test_a_model_of_one_seed_is_a_replica_if_each_step_exchanges_as_much_as_it_has(
    elements: tuple[int, ...], function: str, is_found: bool
) -> None:
    made = call(op="all_reduce", chain=(Frame(function=function, file="/home/ada/net.py", line=4),))
    models = exchanging("abcdef"[: len(elements) + 1], *elements), exchanging("avwxyz"[: len(elements) + 1], *elements)
    models = models[0], replace(models[1], replicas=(replace(models[1].replicas[0], blocks=(OTHER,)),))
    ranks = [rank(n, one, status_file=board(calls=(made,))) for n, one in enumerate(models)]
    assert (found(of_replicas.replica_divergence, *ranks) is not None) is is_found


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(alone(*"abbccd"), alone(*"axxyyz", part=OTHER), id="one seed"),
        pytest.param(alone(*"abbccd"), alone(*"wxxyyz", part=OTHER), id="models of their own"),
        pytest.param(
            alone(*"abbccd", was_broadcast=True), alone(*"axxccz", part=OTHER, was_broadcast=True), id="averaged"
        ),
        pytest.param(
            alone(*"abbccd", over="e", was_broadcast=True),
            alone(*"axxyyz", over="e", was_broadcast=True),
            id="averaged last",
        ),
        pytest.param(alone(*"abbccd", over="d"), alone(*"abbccd", over="b", part=OTHER), id="the best one, loaded"),
        pytest.param(
            alone(*"abbccd", reduces_gradients=True), alone(*"wxxyyz", part=OTHER), id="one rank sums its gradients"
        ),
        pytest.param(
            alone(*"abb", reduces_gradients=True), alone(*"wxx", part=OTHER, reduces_gradients=True), id="few looks"
        ),
        pytest.param(
            alone(*"abbccd", reduces_gradients=True),
            alone(*"wxxccz", part=OTHER, reduces_gradients=True),
            id="summed and averaged",
        ),
    ],
)
def test_models_outside_of_ddp_that_were_not_meant_to_be_equal_are_no_finding(
    first: HealthSamples, second: HealthSamples
) -> None:
    assert found(of_replicas.replica_divergence, rank(0, first), rank(1, second)) is None


def exchanged(checksums: str, *, elements: int = 10, first: str = "a", **changes: Any) -> HealthSamples:
    """A model that was sampled after each exchange, and whose last step has a number that no other rank has."""
    exchanges = tuple(
        Exchange(number=number, calls=3 * number, elements=elements, checksum=checksum, blocks=(OTHER,))
        for number, checksum in enumerate(checksums, 1)
    )
    steps = {"a": 5, "b": 7}[changes.pop("client", "a")]
    samples = (ReplicaSample(at="stepped", round=steps, steps=steps, checksum="z"),)
    facts = {"samples": samples, "exchanges": exchanges, "first_checksum": first, "numel": 10, "was_broadcast": True}
    return replica(**{**facts, "in_ddp": False, **changes})


DRIFTING = exchanged("uvwx", client="b")


def test_replicas_that_full_exchanges_never_made_equal_are_found_whatever_the_number_of_steps() -> None:
    mine = exchanged("bcde", exchanges=tuple(replace(one, blocks=(SAME,)) for one in EXCHANGES))
    one = found(of_replicas.replica_divergence, rank(0, mine), rank(1, DRIFTING))
    assert (one.ranks, one.facts["identified_by"], one.facts["exchanges"]) == ((0, 1), "never equal again", 4)
    assert "exchanged data of the size of the model 4 times, and the replicas differed after each exchange" in one.claim
    assert "write their results back" in one.advice


EXCHANGES = exchanged("bcde").replicas[0].exchanges


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"checksums": "bcdx"}, id="equal after one exchange"),
        pytest.param({"checksums": "bcde", "elements": 9}, id="less than the model was exchanged"),
        pytest.param({"checksums": "bc"}, id="few exchanges"),
        pytest.param({"checksums": "bcde", "was_broadcast": False}, id="not broadcast"),
        pytest.param({"checksums": "bcde", "first": "b"}, id="not equal at first"),
    ],
)
def test_replicas_that_need_not_be_equal_after_an_exchange_are_no_finding(changes: dict[str, Any]) -> None:
    mine = exchanged(**changes)
    blocks = tuple(replace(one, blocks=(SAME,)) for one in mine.replicas[0].exchanges)
    mine = replace(mine, replicas=(replace(mine.replicas[0], exchanges=blocks),))
    assert found(of_replicas.replica_divergence, rank(0, mine), rank(1, DRIFTING)) is None


def parts_of_model(summed: str, left_out: str, block: ParameterBlock = SAME) -> HealthSamples:
    """Samples of the parameters whose gradients the program sums, and of those that it leaves out."""
    body, head = alone(*summed, kind="summed", type="Net"), alone(*left_out, kind="left out", type="Net", part=block)
    return replace(body, replicas=(body.replicas[0], replace(head.replicas[0], number=1, names=(("head", "head"),))))


def test_parameters_whose_gradients_are_left_out_of_the_sum_are_named() -> None:
    first, second = parts_of_model("abbccd", "abbccd"), parts_of_model("abbccd", "wxxyyz", OTHER)
    one = found(of_replicas.replica_divergence, rank(0, first), rank(1, second))
    assert (one.ranks, one.facts["identified_by"], one.place) == ((0, 1), "left out", Place(parameter="head"))
    assert "sums some gradients of Net over all ranks, but not those of head, and these parameters" in one.claim
    assert "Sum the gradients of these parameters as well" in one.advice


def test_parameters_left_out_of_the_sum_are_no_finding_if_they_are_equal_or_the_rest_differs_or_is_divided() -> None:
    first, second = parts_of_model("abbccd", "abbccd"), parts_of_model("abbccd", "wxxyyz", OTHER)
    assert found(of_replicas.replica_divergence, rank(0, first), rank(1, first)) is None
    drifting = parts_of_model("abbccx", "wxxyyz", OTHER)
    assert found(of_replicas.replica_divergence, rank(0, first), rank(1, drifting)) is None
    for function, is_found in (("forward", False), ("launch", True)):
        made = call(op="all_reduce", chain=(Frame(function=function, file="/home/ada/net.py", line=4),))
        ranks = [rank(n, one, status_file=board(calls=(made,))) for n, one in enumerate((first, second))]
        assert (found(of_replicas.replica_divergence, *ranks) is not None) is is_found


def test_models_that_were_never_equal_and_whose_gradients_are_summed_were_meant_to_be() -> None:
    first, second = alone(*"abbccd", reduces_gradients=True), alone(*"wxxyyz", part=OTHER, reduces_gradients=True)
    one = found(of_replicas.replica_divergence, rank(0, first), rank(1, second))
    assert (one.code, one.ranks, one.confidence) == ("replica_divergence", (0, 1), 0.85)
    assert (one.facts["in_ddp"], one.facts["since"], one.facts["identified_by"]) == (False, "made", "")
    assert one.advice.startswith("Broadcast every parameter from one rank")
    members = {"ranks": (0, 1, 2), "reduces_gradients": True}
    three = [alone(*"abbccd", **members), alone(*"abbccd", **members), alone(*"wxxyyz", part=OTHER, **members)]
    one = found(of_replicas.replica_divergence, *(rank(number, looks) for number, looks in enumerate(three)))
    assert (one.ranks, one.facts["since"], one.facts["identified_by"]) == ((2,), "made", "fewer")


# Files.


def test_a_file_that_several_ranks_begin_anew_is_told_with_the_line_of_the_first() -> None:
    last, other = (OverwrittenFile(path=f"/tmp/{name}.pt", place=LINE, step=6) for name in ("last", "other"))
    one = found(
        of_silence.shared_file,
        rank(0, HealthSamples(overwritten_files=(last,))),
        rank(1, HealthSamples(overwritten_files=(other, last))),
    )
    assert (one.code, one.ranks, one.place, one.confidence) == ("shared_file", (0, 1), LINE, 0.8)
    assert (one.facts["path"], one.facts["more_files"]) == ("/tmp/last.pt", 0)


def test_a_file_of_each_rank_is_no_finding() -> None:
    first, second = (OverwrittenFile(path=f"/tmp/{number}.pt", place=LINE, step=6) for number in range(2))
    assert (
        found(
            of_silence.shared_file,
            rank(0, HealthSamples(overwritten_files=(first,))),
            rank(1, HealthSamples(overwritten_files=(second,))),
        )
        is None
    )


# Memory.


def memory(amounts: dict[int, float], gpu: dict[int, float] | None = None) -> HealthSamples:
    """MiB by step."""
    return HealthSamples(
        memory=tuple(
            MemorySample(step=step, anonymous_bytes=int(amount * MIB), gpu_bytes=int(gpu[step] * MIB) if gpu else None)
            for step, amount in amounts.items()
        )
    )


STEPS = [*range(1, 17), *range(18, 33, 2), *range(36, 65, 4), *range(72, 129, 8), *range(144, 257, 16)]


def test_memory_that_grows_with_each_step_to_the_end_is_told_with_its_slope() -> None:
    leaking = memory({step: 250 + step for step in STEPS})
    one = found(of_silence.memory_growth, rank(0, memory(dict.fromkeys(STEPS, 250.0))), rank(1, leaking))
    assert (one.code, one.ranks, one.confidence) == ("memory_growth", (1,), 0.8)
    facts = one.facts
    assert (facts["memory"], facts["bytes_per_step"], facts["grown_bytes"]) == ("host", 1 << 20, 224 << 20)
    assert (facts["first_step"], facts["last_step"]) == (32, 256)


FEWER = range(1, 26)


def test_of_a_short_run_more_growth_and_no_pause_in_it_is_asked() -> None:
    leaking = memory({step: 200.0 + 20 * step for step in FEWER})
    little = memory({step: 2000.0 + 20 * step for step in FEWER})
    pausing = memory({step: 200.0 + 40 * (step // 2) for step in FEWER})
    assert found(of_silence.memory_growth, rank(0, leaking)).ranks == (0,)
    assert found(of_silence.memory_growth, rank(0, little)) is None
    assert found(of_silence.memory_growth, rank(0, pausing)) is None
    assert found(of_silence.memory_growth, rank(0, memory({step: 20.0 * step for step in range(1, 20)}))) is None


def test_memory_of_the_gpu_counts_as_well() -> None:
    looks = memory(dict.fromkeys(STEPS, 250.0), {step: 100 + step for step in STEPS})
    facts = found(of_silence.memory_growth, rank(0, looks)).facts
    assert (facts["memory"], facts["bytes_per_step"]) == ("GPU", 1 << 20)


@pytest.mark.parametrize(
    "amounts",
    [
        pytest.param({step: 250 + 2 * min(step, 100) for step in STEPS}, id="levels off"),
        pytest.param({step: 250 + 3 * min(step, 100) + 0.3 * max(step - 100, 0) for step in STEPS}, id="slows down"),
        pytest.param({step: 250 + 100 * (step % 32) / 32 for step in STEPS}, id="saw teeth of the collector"),
        pytest.param({step: 250 + step / 10 for step in STEPS}, id="too little"),
        pytest.param({step: 250 + 4 * step for step in STEPS if step < 30}, id="too few steps"),
        pytest.param({step: 250 + (300 if step > 100 else 0) for step in STEPS}, id="one jump: an evaluation"),
        pytest.param({step: 400 - step for step in STEPS}, id="shrinks"),
        pytest.param({}, id="not seen"),
    ],
)
def test_memory_that_does_not_grow_on_is_no_finding(amounts: dict[int, float]) -> None:
    assert found(of_silence.memory_growth, rank(0, memory(amounts))) is None


# Gradients that never came.


def test_a_parameter_whose_module_ran_and_that_never_had_a_gradient_is_named() -> None:
    looks = HealthSamples(without_gradient=("encoder.weight", "encoder.bias"), without_gradient_count=2, sample_count=6)
    one = found(of_silence.no_gradient, rank(0, looks), rank(1, looks))
    assert (one.code, one.ranks, one.confidence) == ("no_gradient", (0, 1), 0.85)
    assert one.place == Place(parameter="encoder.weight", module="encoder")


def test_the_line_that_uses_such_a_parameter_is_its_place() -> None:
    used = Place(file="/home/ada/train.py", line=30, function="features")
    looks = HealthSamples(
        without_gradient=("encoder.weight",), without_gradient_count=1, sample_count=6, without_gradient_place=used
    )
    one = found(of_silence.no_gradient, rank(0), rank(1, looks))
    assert one.place == replace(used, parameter="encoder.weight", module="encoder")


def test_a_collective_without_autograd_that_got_the_results_is_named_as_the_reason() -> None:
    cut = HealthSamples(
        without_gradient=("text.weight",), without_gradient_count=1, sample_count=6, gradient_cut_place=LINE,
        gradient_cut_op="all_gather",
    )  # fmt: skip
    one = found(of_silence.no_gradient, rank(0, cut), rank(1, cut))
    assert (one.facts["variant"], one.place.line) == ("gathered_without_gradient", LINE.line)
    assert "Their results go into all_gather (" in one.claim
    assert one.advice.startswith("Use torch.distributed.nn.functional.all_gather")


def test_gradients_that_are_zero_at_every_look_are_told_of_the_ranks_that_have_them() -> None:
    one = found(
        of_silence.no_gradient,
        rank(0, HealthSamples(sample_count=9)),
        rank(1, HealthSamples(sample_count=9, zero_gradient_count=8, zero_gradient_samples=9)),
    )
    assert (one.code, one.ranks) == ("no_gradient", (1,))
    assert (one.facts["variant"], one.facts["count"], one.facts["samples"]) == ("optimizer_has_zeros", 8, 9)
    assert (
        found(
            of_silence.no_gradient,
            rank(1, HealthSamples(sample_count=3, zero_gradient_count=8, zero_gradient_samples=3)),
        )
        is None
    )


def test_of_several_optimizers_one_that_is_given_zeros_alone_is_told_and_one_that_was_not_once_is_not() -> None:
    seen = [(0, 1, 4), (1, 1, 6), (0, 2, 0), (1, 2, 6)]
    read = read_health_samples(step(number, optimizer=optimizer, still=still) for optimizer, number, still in seen)
    assert read is not None
    assert (read.zero_gradient_count, read.zero_gradient_samples) == (6, 2)


def test_after_few_looks_nothing_is_said_of_gradients() -> None:
    looks = HealthSamples(without_gradient=("encoder.weight",), without_gradient_count=1, sample_count=3)
    assert found(of_silence.no_gradient, rank(0, looks)) is None


# Dirty ends.

ATEXIT = """\
Error in atexit._run_exitfuncs:
Traceback (most recent call last):
  File "/home/ada/train.py", line 18, in step
    print(self.file.read_text())
FileNotFoundError: [Errno 2] No such file or directory: 'journal.txt'
"""
SEMAPHORES = (
    "/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be"
    " 3 leaked semaphore objects to clean up at shutdown\n"
)
GROUP = "[W1121] Warning: WARNING: destroy_process_group() was not called before program exit, which can leak\n"


def test_last_words_are_read_with_their_error_and_the_users_line() -> None:
    assert read_exit_messages("epoch 1\n" + SEMAPHORES + GROUP + ATEXIT + "left alone\n" + SEMAPHORES) == (
        PrintedMessage(kind="left", name="3 leaked semaphore", error="", place=None),
        PrintedMessage(kind="process group", name="destroy_process_group", error="", place=None),
        PrintedMessage(
            kind="atexit",
            name="atexit",
            error="FileNotFoundError: [Errno 2] No such file or directory: 'journal.txt'",
            place=LINE,
            entry_place=LINE,
        ),
    )


@pytest.mark.parametrize("first", ["", "Exception in thread telemetry (send):\n", "ERROR could not write:\n"])
def test_a_traceback_of_a_thread_or_a_logged_one_is_no_dirty_end(first: str) -> None:
    assert read_exit_messages(first + ATEXIT.partition("\n")[2]) == ()


def test_a_rank_whose_end_failed_is_named_with_the_line() -> None:
    one = found(of_silence.dirty_exit, rank(0), rank(1, exit_messages=read_exit_messages(SEMAPHORES + ATEXIT)))
    assert (one.code, one.ranks, one.place) == ("dirty_exit", (1,), LINE)
    assert (one.facts["variant"], one.facts["more_messages"]) == ("atexit", 1)
    assert one.facts["error"] == "FileNotFoundError: [Errno 2] No such file or directory: 'journal.txt'"


def test_of_a_run_that_failed_the_end_is_not_told_twice() -> None:
    dirty = rank_evidence(0, exit=ended(0, 1), exit_messages=read_exit_messages(ATEXIT))
    assert found(of_silence.dirty_exit, dirty) is None


# The file of looks.


def step(number: int, **changes: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {"at": "step", "optimizer": 0, "step": number, "anon": 1000 + number, "gpu": None}
    facts |= {"broken": 0, "names": [], "value": "", "never": 0, "never_names": []}
    return {**facts, "losses": number, "bad_losses": 0, "bad_in_a_row": 0, **changes}


def test_the_newest_line_that_uses_what_never_learns_is_kept_and_older_files_have_none() -> None:
    told = {"never": 1, "never_names": ["a.weight"], "never_place": "/home/ada/train.py:30:features"}
    known = read_health_samples([step(1), step(2, **told)])
    assert known is not None
    assert known.without_gradient_place == Place(file="/home/ada/train.py", line=30, function="features")
    old = read_health_samples([step(1, **{key: value for key, value in told.items() if key != "never_place"})])
    assert old is not None
    assert (old.without_gradient, old.without_gradient_place) == (("a.weight",), None)


def test_looks_are_read_back_and_of_parameters_that_recovered_nothing_is_kept() -> None:
    broken = {"broken": 2, "names": ["a.weight"], "value": "inf"}
    healed = read_health_samples([step(1), step(2, **broken), step(3)])
    held = read_health_samples([step(1), step(2, **broken), step(3, **broken)])
    assert healed is not None
    assert held is not None
    assert (healed.non_finite_parameters, healed.sample_count, healed.losses) == (None, 3, 3)
    assert held.non_finite_parameters == NonFiniteValue(step=2, value="inf", names=("a.weight",))
    assert held.memory[-1] == MemorySample(step=3, anonymous_bytes=1003, gpu_bytes=None)


def test_a_loss_that_broken_parameters_made_is_not_taken_for_the_beginning() -> None:
    loss = {"at": "loss", "step": 40, "value": "nan", "place": "/home/ada/train.py:18:step"}
    begun, made = (read_health_samples([step(36), {**loss, "held": held}]) for held in ([], ["a.weight"]))
    assert begun is not None
    assert made is not None
    assert (begun.non_finite_loss, begun.non_finite_parameters) == (
        NonFiniteValue(step=40, value="nan", place=LINE),
        None,
    )
    assert (made.non_finite_loss, made.non_finite_parameters) == (
        None,
        NonFiniteValue(step=39, value="nan", names=("a.weight",)),
    )


def test_replicas_are_read_back_with_the_parts_of_the_last_look() -> None:
    made = {"at": "made", "ddp": 0, "ranks": "0-1", "parts": [["a", "b"]], "sum": "1", "seen": [["1", "2", "3"]]}
    stepped = {"at": "stepped", "ddp": 0, "round": 1, "steps": 1, "sum": "2", "seen": [["4", "nan", "6"]]}
    looks = read_health_samples([{**made, "hook": ""}, {**stepped, "hook": "gossip"}])
    assert looks is not None
    (one,) = looks.replicas
    assert (one.ranks, one.names, one.hook) == ((0, 1), (("a", "b"),), "gossip")
    assert [(look.at, look.round, look.checksum) for look in one.samples] == [("made", 0, "1"), ("stepped", 1, "2")]
    assert (one.blocks[0].checksum, one.blocks[0].total) == ("4", 6.0)
    assert (one.in_ddp, one.was_broadcast) == (True, False), "as an older probe wrote it"
    bare = read_health_samples(
        [{**made, "hook": "", "wrapped": False, "broadcast": True}, {**stepped, "at": "over", "hook": ""}]
    )
    assert bare is not None
    assert (bare.replicas[0].in_ddp, bare.replicas[0].was_broadcast) == (False, True)
    assert bare.replicas[0].samples[-1].at == "over"


def test_exchanges_are_read_back_with_the_first_checksum_of_their_model() -> None:
    made = {"at": "made", "ddp": 0, "ranks": "0-1", "parts": [["a", "b"]], "sum": "1", "seen": [["1", "2", "3"]]}
    facts = {"at": "exchanged", "ddp": 0, "sum": "2", "seen": [["4", "5", "6"]], "calls": 7, "elements": 90, "round": 2}
    looks = read_health_samples([{**made, "hook": "", "numel": 12}, facts])
    assert looks is not None
    (one,) = looks.replicas
    assert (one.first_checksum, one.numel, len(one.samples)) == ("1", 12, 1)
    block = ParameterBlock(checksum="4", size=5.0, total=6.0)
    assert one.exchanges == (Exchange(number=2, calls=7, elements=90, checksum="2", blocks=(block,)),)


def test_written_files_are_read_back() -> None:
    looks = read_health_samples(
        [{"at": "wrote", "path": "/tmp/a.pt", "place": "/home/ada/train.py:18:step", "step": 6}]
    )
    assert looks is not None
    assert looks.overwritten_files == (OverwrittenFile(path="/tmp/a.pt", place=LINE, step=6),)


def test_many_points_are_thinned_and_the_newest_stay() -> None:
    looks = read_health_samples([step(number) for number in range(1, 300)])
    assert looks is not None
    assert len(looks.memory) <= MAX_POINTS
    assert [point.step for point in looks.memory[-3:]] == [297, 298, 299]


@pytest.mark.parametrize("record", [{"at": "step"}, {**step(1), "step": "x"}, {"at": "begun", "ddp": 3}])
def test_a_record_of_another_form_is_refused(record: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        read_health_samples([record])


def test_no_record_is_no_look() -> None:
    assert read_health_samples([]) is None


# Waiting for data.


def fetched(*points: tuple[int, float, float]) -> HealthSamples:
    """Each of a step, the seconds waited until it ended, and the seconds passed."""
    return HealthSamples(data_waits=tuple(DataWait(step=a, waited_s=b, elapsed_s=c, place=LINE) for a, b, c in points))


WAITS = fetched((1, 0.0, 9.0), (3, 1.0, 10.0), (8, 5.0, 15.0), (16, 13.0, 24.0), (24, 17.0, 30.0))


def test_who_waits_for_its_loader_most_of_the_time_is_told_with_the_line() -> None:
    one = found(of_silence.input_bound, rank(0, fetched((3, 0.1, 10.0), (24, 0.5, 30.0))), rank(1, WAITS))
    assert (one.code, one.ranks, one.place, one.confidence) == ("input_bound", (1,), LINE, 0.8)
    assert (one.facts["waited_s"], one.facts["passed_s"], one.facts["last_step"]) == (16.0, 20.0, 24)


@pytest.mark.parametrize(
    "looks",
    [
        fetched((1, 0.0, 0.0), (2, 19.0, 20.0), (12, 19.5, 30.0), (24, 20.0, 40.0)),  # while it warmed up
        fetched((3, 1.0, 10.0), (12, 11.0, 20.0), (24, 12.0, 30.0)),  # once, and not again
        fetched((3, 0.0, 10.0), (12, 2.0, 12.0), (24, 4.0, 14.0)),  # for a short time
        fetched((3, 0.0, 10.0), (6, 9.0, 20.0), (10, 18.0, 30.0)),  # in few steps
        fetched((3, 0.0, 10.0), (12, 4.0, 20.0), (24, 8.0, 30.0)),  # less than half of it
        HealthSamples(),
    ],
)
def test_a_wait_that_is_short_or_over_is_no_finding(looks: HealthSamples) -> None:
    assert found(of_silence.input_bound, rank(0, looks)) is None


STEPPED = {
    "at": "step", "optimizer": 0, "step": 3, "anon": None, "gpu": None, "broken": 0, "names": [], "value": "",
    "never": 0, "never_names": [], "losses": 3, "bad_losses": 0, "bad_in_a_row": 0,
    "waited_at": "/home/ada/train.py:18:step",
}  # fmt: skip


def test_waits_are_read_back_and_numbers_that_are_none_refused() -> None:
    looks = read_health_samples([{**STEPPED, "waited_s": 1.5, "passed_s": 2.0}])
    assert looks is not None
    assert looks.data_waits == (DataWait(step=3, waited_s=1.5, elapsed_s=2.0, place=LINE),)
    for wrong in ({"waited_s": float("inf"), "passed_s": 2.0}, {"waited_s": 1.0, "passed_s": float("nan")}):
        with pytest.raises(ValueError, match="waited"):
            read_health_samples([{**STEPPED, **wrong}])
