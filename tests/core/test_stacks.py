"""Stacks: what is read from the tools, and which line belongs to the user."""

from __future__ import annotations

import json

import pytest
from builders import BACKWARD, C10D, SITE, USER, frame, stack
from hypothesis import given
from hypothesis import strategies as st

from nsa_harness.core.evidence.evidence import Frame, Stack
from nsa_harness.core.evidence.stacks import (
    died_in_native_thread,
    in_function,
    is_library,
    parse_faulthandler,
    parse_py_spy,
    training_stack,
    user_frame,
    without_variables,
)

_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["thread_name", "os_thread_id", "frames", "filename", "line", "name", "active"]), inner
        )
    ),
    max_leaves=12,
)


def py_spy(**changes: object) -> str:
    thread = {
        "pid": 7,
        "thread_id": 1,
        "thread_name": "MainThread",
        "os_thread_id": 7,
        "active": False,
        "owns_gil": True,
        "frames": [{"name": "step", "filename": "train.py", "module": None, "short_filename": None, "line": 12}],
    }
    return json.dumps([{**thread, **changes}])


def test_a_py_spy_dump_becomes_stacks_with_the_innermost_frame_first() -> None:
    assert parse_py_spy(py_spy(), "py-spy") == (
        Stack(
            thread="MainThread",
            tid=7,
            active=True,
            frames=(Frame(file="train.py", line=12, function="step"),),
            source="py-spy",
            gil=True,
        ),
    )


def local(**values: str) -> list[dict[str, object]]:
    return [{"name": name, "addr": 1, "arg": True, "repr": value} for name, value in values.items()]


def called(**values: str) -> list[dict[str, object]]:
    """The frames of a call of torch.distributed with these variables, from a line whose own are secret."""
    own = {"name": "step", "filename": USER, "line": 12, "locals": local(password="hunter2", src="7")}
    wrapper = {"name": "wrapper", "filename": f"{SITE}/torch/distributed/c10d_logger.py", "line": 83, "locals": None}
    inner = {"name": "broadcast", "filename": C10D, "line": 9, "locals": local(src="5")}
    return [
        inner,
        wrapper,
        {"name": "broadcast_object_list", "filename": C10D, "line": 8, "locals": local(**values)},
        own,
    ]


@pytest.mark.parametrize(
    ("values", "arguments"),
    [
        ({"src": "0", "group": "None", "group_src": "0", "async_op": "False"}, {"src": 0}),
        ({"dst": "1", "tag": "3", "tensor": "<Tensor at 0x7f>"}, {"dst": 1, "tag": 3}),
        ({"src": "None", "tag": "0", "group_src": "None"}, {"tag": 0}),  # from anybody
        ({"src": "None", "tag": "0", "group_src": "1"}, {}),  # of a group: nobody knows who that is
        ({"src": '"0"', "object_list": "[1]"}, {"src": 5}),  # of the call within
    ],
)
def test_root_and_partner_of_a_call_are_read_where_variables_are_told(
    values: dict[str, str], arguments: dict[str, int]
) -> None:
    (read,) = parse_py_spy(py_spy(frames=called(**values)), "py-spy")
    assert read.arguments == arguments


def test_a_dump_is_kept_without_what_variables_hold() -> None:
    kept = without_variables(py_spy(frames=called(src="0")))
    assert "hunter2" not in kept
    assert [one.frames for one in parse_py_spy(kept, "")] == [
        one.frames for one in parse_py_spy(py_spy(frames=called(src="0")), "")
    ]


def test_a_thread_without_the_gil_that_runs_is_active_and_one_that_does_neither_is_not() -> None:
    assert parse_py_spy(py_spy(active=True, owns_gil=False), "py-spy")[0].active is True
    assert parse_py_spy(py_spy(active=False, owns_gil=False), "py-spy")[0].active is False


def test_a_thread_without_a_name_or_a_number_is_still_read() -> None:
    thread = parse_py_spy(py_spy(thread_name=None, os_thread_id=None), "py-spy")[0]
    assert (thread.thread, thread.tid) == ("", None)


def test_an_endless_recursion_is_cut_to_its_innermost_frames() -> None:
    frames = [{"name": "f", "filename": "a.py", "line": line} for line in range(1000)]
    read = parse_py_spy(py_spy(frames=frames), "py-spy")[0].frames
    assert [one.line for one in read] == list(range(200))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[1]",
        "[[]]",
        py_spy(frames=None),
        py_spy(frames=[{"name": "f"}]),
        py_spy(frames=[{"name": "f", "filename": "a.py", "line": None}]),
        py_spy(frames=[{"name": "f", "filename": "a.py", "line": float("inf")}]),
        py_spy(os_thread_id=[1]),
        "[" * 100_000,
    ],
)
def test_what_is_no_py_spy_dump_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_py_spy(text, "py-spy")


@given(st.text() | _JSON.map(json.dumps) | st.lists(_JSON, max_size=2).map(json.dumps))
def test_parsing_py_spy_never_raises_anything_but_value_error(text: str) -> None:
    try:
        stacks = parse_py_spy(text, "py-spy")
    except ValueError:
        return
    assert all(isinstance(one, Stack) for one in stacks)
    assert training_stack(stacks, 7) in (None, *stacks)


FAULTHANDLER = """Fatal Python error: Segmentation fault

Thread 0x00007f02 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/home/ada/my file.py", line 5 in worker

Current thread 0x00007f01 (most recent call first):
  File "/home/ada/train.py", line 88 in step
"""


def test_the_oldest_thread_of_a_faulthandler_dump_is_the_main_thread() -> None:
    assert parse_faulthandler(FAULTHANDLER) == (
        Stack(
            thread="0x00007f02",
            tid=None,
            active=False,
            frames=(
                Frame(file="/usr/lib/python3.11/threading.py", line=327, function="wait"),
                Frame(file="/home/ada/my file.py", line=5, function="worker"),
            ),
            source="faulthandler",
        ),
        Stack(thread="MainThread", tid=None, active=False, frames=(frame(88),), source="faulthandler"),
    )


def test_of_several_faulthandler_dumps_in_one_file_the_last_one_counts() -> None:
    later = FAULTHANDLER.replace("line 88", "line 99")
    assert parse_faulthandler(FAULTHANDLER + later) == parse_faulthandler(later)


def test_a_faulthandler_file_without_a_dump_has_no_stacks() -> None:
    assert parse_faulthandler("") == ()
    assert parse_faulthandler('  File "a.py", line 1 in f\n') == ()


def test_a_fatal_signal_of_no_python_thread_came_from_a_native_one() -> None:
    thread = 'Thread 0x01 (most recent call first):\n  File "a.py", line 3 in f\n'
    fatal = f"Fatal Python error: Aborted\n\n{thread}"
    asked = f"Current {thread.lower()}"
    assert died_in_native_thread(asked + fatal)  # after a dump that somebody asked for
    assert not died_in_native_thread(fatal.replace("Thread", "Current thread"))
    assert not died_in_native_thread(asked)
    assert not died_in_native_thread("")


@given(st.text() | st.lists(st.sampled_from(FAULTHANDLER.splitlines())).map("\n".join))
def test_parsing_a_faulthandler_file_never_raises(text: str) -> None:
    assert all(one.source == "faulthandler" for one in parse_faulthandler(text))


@pytest.mark.parametrize(
    ("file", "library"),
    [
        ("/home/ada/train.py", False),
        ("/usr/lib/python3.11/threading.py", True),
        ("/usr/lib/python3.11/site-packages/torch/nn/modules/module.py", True),
        ("/usr/lib/python3/dist-packages/yaml/__init__.py", True),
        ("<frozen importlib._bootstrap>", True),
        ("/src/harness/probe/hooks.py", True),
        ("/src/harness/faults/plant.py", True),
        ("/src/harness/faults/acts.py", False),
        ("/usr/lib/python3.11/site-packages/nsa/train.py", True),
        ("/usr/lib/python3.11/site-packages/nsa_harness/fork_server/serving.py", True),
        ("/usr/lib/python3.11/site-packages/nsa_harness/protocol.py", True),
        ("/home/ada/nsa/train.py", False),
        ("/usr/lib/python3.11/site-packages/nsa_harness/nsa/ops/attend.py", False),
        ("/usr/lib/python3.11/site-packages/nsa_attention/ops/attend.py", False),
        ("/home/ada/lib/python3.11_notes/train.py", False),
    ],
)
def test_whose_file_it_is(file: str, library: bool) -> None:
    assert is_library(file) is library


def test_the_users_line_is_the_innermost_one_outside_every_library() -> None:
    frames = [frame(3252, file=C10D), frame(40), frame(99, function="main")]
    assert user_frame(frames) == frame(40)


def test_without_a_line_of_the_users_a_trainer_packages_line_is_shown_and_torchs_is_not() -> None:
    trainer = frame(5, file=f"{SITE}/lightning/trainer.py")
    assert user_frame([frame(1, file=C10D), trainer]) == trainer
    assert user_frame([frame(1, file=C10D), frame(2, file="/usr/lib/python3.11/runpy.py")]) is None
    assert user_frame([]) is None


def test_a_line_without_a_file_is_not_the_users_while_another_one_is() -> None:
    assert user_frame([frame(1, file="<string>"), frame(7)]) == frame(7)


def test_the_training_stack_is_the_main_threads() -> None:
    main, other = stack(frame(1), tid=100), stack(frame(2), tid=101, thread="worker")
    assert training_stack([other, main], 100) == main
    assert training_stack([other, main], 999) == main, "found by its name where the number is not known"
    assert training_stack([other], 999) == other
    assert training_stack([], 100) is None


def test_during_backward_a_marking_thread_with_user_code_is_the_training_stack() -> None:
    main, engine = stack(BACKWARD, tid=100), stack(frame(5), tid=101, thread="autograd")
    assert training_stack([main, engine], 100, [101]) == engine
    assert training_stack([main, engine], 100, [100]) == main
    idle = stack(frame(1, file=C10D), tid=101, thread="autograd")
    assert training_stack([main, idle], 100, [101]) == main, "no line of the user's in it"
    forward = stack(frame(3), tid=100)
    assert training_stack([forward, engine], 100, [101]) == forward, "the main thread does not wait for autograd"


def test_a_frame_is_found_by_the_end_of_its_file_and_its_function() -> None:
    frames = [frame(1, file=C10D, function="barrier"), BACKWARD]
    assert in_function(frames, "autograd/graph.py") == BACKWARD
    assert in_function(frames, "distributed_c10d.py", ["all_reduce"]) is None
    assert in_function(frames, "distributed_c10d.py", ["barrier"]) == frames[0]
