"""torch's debugging modes read from a log: the forward line of a backward, and where a recomputation parts from it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nsa_harness.core.evidence.evidence import DebugMessage, Frame
from nsa_harness.core.evidence.exit_messages import read_debug_message

ANOMALY = """\
[rank1]: step 1
/usr/lib/python3.11/site-packages/torch/autograd/graph.py:869: UserWarning: Error detected in MulBackward0. \
Traceback of forward call that caused the error:
  File "/home/ada/train.py", line 23, in <module>
    main()
  File "/home/ada/model.py", line 11, in forward
    y = g * x
 (Triggered internally at /pytorch/torch/csrc/autograd/python_anomaly_mode.cpp:124.)
  return Variable._execution_engine.run_backward(
Traceback (most recent call last):
  File "/home/ada/train.py", line 20, in main
    loss.backward()
RuntimeError: modified by an inplace operation
"""
RECOMPUTED = """\
$4: f32[4, 8] = torch._ops.aten.tanh.default($0)   (1 of 2 in original)

/usr/lib/python3.11/site-packages/torch/_ops.py:800:__call__
/home/ada/model.py:14:inner


$5: f32[4, 8] = torch._ops.aten.addmm.default($1, $4, $3)   (2 of 2 in original)

/home/ada/model.py:15:inner


$4: f32[4, 8] = torch._ops.aten.addmm.default($1, $0, $3)   (1 of 1 in recompute)

/home/ada/model.py:15:inner


Operations executed during the original forward:

$4: f32[4, 8] = torch._ops.aten.tanh.default($0)
$5: f32[4, 8] = torch._ops.aten.addmm.default($1, $4, $3)

Operations executed during recomputation:

$4: f32[4, 8] = torch._ops.aten.addmm.default($1, $0, $3)

+------------------------------------------------------------------------------+
"""


def test_the_frames_of_the_forward_come_innermost_first_and_end_with_its_traceback() -> None:
    assert read_debug_message(ANOMALY) == DebugMessage(
        operation="MulBackward0",
        frames=(
            Frame(file="/home/ada/model.py", line=11, function="forward"),
            Frame(file="/home/ada/train.py", line=23, function="<module>"),
        ),
    )


def test_the_first_operation_that_was_recomputed_otherwise_is_named_with_its_line() -> None:
    told = read_debug_message(RECOMPUTED)
    assert told is not None
    assert (told.operation, told.instead, told.is_recomputation) == ("aten.tanh.default", "aten.addmm.default", True)
    assert told.frames[-1] == Frame(file="/home/ada/model.py", line=14, function="inner")


def test_calls_of_detach_that_checkpointing_adds_are_no_difference() -> None:
    same = RECOMPUTED.replace(
        "$4: f32[4, 8] = torch._ops.aten.tanh.default($0)\n$5",
        "$4: f32[4, 8] = torch._ops.aten.detach.default($0)\n$5",
    )
    assert read_debug_message(same) is None


def test_a_log_without_either_says_nothing() -> None:
    assert read_debug_message("RuntimeError: boom\n") is None


@given(st.integers(0, len(ANOMALY)), st.integers(0, len(RECOMPUTED)))
def test_a_log_cut_anywhere_is_read_without_a_fault(one: int, other: int) -> None:
    for text in (ANOMALY[:one] + RECOMPUTED[other:], RECOMPUTED[:other] + ANOMALY[one:]):
        told = read_debug_message(text)
        assert told is None or told.operation
