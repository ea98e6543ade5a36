"""Collectives whose result nothing uses, and conditions that skipped one, in runs that passed."""

from __future__ import annotations

from textwrap import dedent

import pytest

from nsa_harness.core.recording.explain import explain
from nsa_harness.core.recording.explanation import Explanation, OriginKind, SilentDifference
from tests.core.recorded import FILE, Thing, at, call, main, op, recorded

AVERAGING = """\
def average(model):
    for p in model.parameters():
        sent = p.data.to(float32)
        sent.mul_(weight)
        all_reduce(sent)
        count += sent.numel()

average(model)
"""
NEVER_EQUAL = SilentDifference(kind="never equal again", names=("0.weight",))


def averaging(source: str, read: str = "float64 [4]", written: str = "float32 [4]") -> Explanation:
    """Explain two ranks that execute the lines of AVERAGING once, with tensors of these types."""
    used = {"p": Thing(1, "Parameter", f"{read} crc 1")}
    made = {"sent": Thing(2, "Tensor", f"{written} crc 2")}
    lines = [at(2), at(3, reads=used, writes=made), at(4), at(5, op(), reads=made), at(6)]
    ranks = [recorded(rank, main(at(8, call("average", *lines, first_line=1)))) for rank in (0, 1)]
    return explain(ranks, {FILE: dedent(source)}, NEVER_EQUAL)


def discarded(explanation: Explanation) -> list[int | None]:
    return [one.place.line for one in explanation.candidates if one.kind is OriginKind.DISCARDED_RESULT]


def test_a_collective_on_a_copy_that_nothing_uses_is_named_with_the_copy() -> None:
    found = averaging(AVERAGING)
    assert discarded(found) == [5]
    assert found.candidates[0].name == "sent"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("count += sent.numel()", "p.data.copy_(sent)", id="written back"),
        pytest.param("all_reduce(sent)", "total = all_reduce(sent)", id="its own result is assigned"),
        pytest.param("sent = p.data.to(float32)", "sent = own(p)", id="perhaps no copy"),
        pytest.param("sent = p.data.to(float32)", "sent, _ = p, 1", id="no copy"),
        pytest.param("    for p in model", "    sent = p\n    for p in model", id="assigned elsewhere"),
    ],
)
def test_collectives_whose_result_may_be_used_are_not_named(before: str, after: str) -> None:
    assert discarded(averaging(AVERAGING.replace(before, after))) == []


def test_a_use_that_was_never_executed_does_not_count() -> None:
    source = AVERAGING.replace("count += sent.numel()", "if not wrong:\n            p.data.copy_(sent)")
    assert discarded(averaging(source)) == [5]


def test_a_conversion_to_the_same_type_is_the_parameter_itself() -> None:
    assert discarded(averaging(AVERAGING, written="float64 [4]")) == []
    assert discarded(averaging(AVERAGING.replace("p.data.to(float32)", "p.clone()"), written="float64 [4]")) == [5]


BALANCING = """\
class Router:
    def __init__(self):
        self.is_summed = is_initialized()

    def rebalance(self):
        load = self.seen.clone()
        if self.is_summed:
            all_reduce(load)
        self.bias += load

router = Router()
router.rebalance()
"""


def balancing(rank: int, *, is_summed: bool) -> object:
    load = {"load": Thing(3, "Tensor", f"float32 [4] crc {0 if is_summed else rank}")}
    bias = {"self.bias": Thing(4, "Tensor", f"float32 [4] crc {rank}")}
    own = {"self": Thing(1, "Router")}
    made = call("__init__", at(3, writes={"self.is_summed": is_summed}), first_line=2, arguments=own)
    lines = [
        at(6, reads={"self.seen": Thing(5, "Tensor", f"float32 [4] crc 7{rank}")}, writes=load),
        at(7, reads={"self.is_summed": is_summed}),
        *([at(8, op(), reads=load)] if is_summed else []),
        at(9, reads={**bias, **load}, writes=bias),
    ]
    rebalanced = call("rebalance", *lines, first_line=5, arguments=own)
    return recorded(rank, main(at(11, made), at(12, rebalanced)))


def test_the_condition_that_skips_a_collective_is_named_and_where_it_got_its_value() -> None:
    silent = SilentDifference(kind="local buffers", names=("bias",))
    ranks = [balancing(rank, is_summed=False) for rank in (0, 1)]
    found = explain(ranks, {FILE: BALANCING}, silent).candidates
    skipped = [one for one in found if one.kind is OriginKind.SKIPPED_COLLECTIVE]
    assert [(one.place.line, one.name) for one in skipped] == [(7, "self.is_summed"), (3, "self.is_summed")]


def test_a_condition_that_did_not_skip_its_collective_is_not_named() -> None:
    silent = SilentDifference(kind="local buffers", names=("bias",))
    ranks = [balancing(rank, is_summed=True) for rank in (0, 1)]
    found = explain(ranks, {FILE: BALANCING}, silent).candidates
    assert [one for one in found if one.kind is OriginKind.SKIPPED_COLLECTIVE] == []
    both = [balancing(0, is_summed=False), balancing(1, is_summed=True)]
    assert explain(both, {FILE: BALANCING}, None).division is not None
