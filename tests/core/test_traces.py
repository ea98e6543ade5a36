"""The trace lines of the subject, and what they count."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nsa_harness.core.evidence.gradients import RankTraces, read_traces, trace_lines

LOG = [
    "[GRAD-TRACE] after_backward_step1 arrived=60 missing=2",
    "  - MISSING: blocks.0.gate.weight",
    "  - MISSING: blocks.1.gate.weight",
    "loss 3.2",
    "[DDP] rank=0 bucket_elems=1024 dtype=torch.float32",
    "[MODULE-BWD] blocks.0",
    "[GRAD-TRACE] after_backward_step2 arrived=61 missing=1",
    "  - MISSING: blocks.1.gate.weight",
    "[DDP] rank=0 bucket_elems=10 dtype=torch.bfloat16",
]


def test_the_last_step_counts_and_the_names_of_all_steps_are_kept_once() -> None:
    assert read_traces(LOG) == RankTraces(
        gradient_count=61,
        missing_count=1,
        missing_parameters=("blocks.0.gate.weight", "blocks.1.gate.weight"),
        buckets=((1024, "torch.float32"), (10, "torch.bfloat16")),
    )


def test_a_log_without_traces_says_nothing_rather_than_zero() -> None:
    assert read_traces(["loss 3.2"]) == RankTraces(
        gradient_count=None, missing_count=None, missing_parameters=(), buckets=()
    )


def test_only_whole_trace_lines_are_picked_out() -> None:
    assert list(trace_lines(LOG)) == [line for line in LOG if line != "loss 3.2"]
    assert list(trace_lines([" [DDP] rank=0", "x [GRAD-TRACE] "])) == []


def test_a_torn_trace_line_is_not_a_number() -> None:
    assert read_traces(
        ["[GRAD-TRACE] after_backward_step1 arrived=6", "[DDP] rank=0 bucket_elems=", "  - MISSING: "]
    ) == (read_traces([]))


@given(st.lists(st.text() | st.sampled_from(LOG)))
def test_reading_traces_never_raises(lines: list[str]) -> None:
    assert (read_traces(lines).gradient_count is None) == (read_traces(lines).missing_count is None)
