"""The last exception that a rank printed."""

from __future__ import annotations

import pytest
from builders import USER, frame
from hypothesis import given
from hypothesis import strategies as st

from nsa_harness.core.evidence.exit_messages import error_lines, last_traceback

PRINTED = f"""starting
Traceback (most recent call last):
  File "{USER}", line 99, in main
    step(model)
    ~~~~^^^^^^^
  File "{USER}", line 88, in step
    raise RuntimeError("boom")
RuntimeError: boom
"""


def test_a_traceback_has_a_type_a_message_and_the_innermost_frame_first() -> None:
    assert last_traceback(PRINTED) == ("RuntimeError", "boom", (frame(88), frame(99, function="main")))


@pytest.mark.parametrize("prefix", ["[rank1] ", "[rank1]: ", "[rank1] [rank1]: "])
def test_the_prefix_of_torchrun_is_taken_off(prefix: str) -> None:
    assert last_traceback("".join(prefix + line + "\n" for line in PRINTED.splitlines())) == last_traceback(PRINTED)


def test_of_two_tracebacks_the_last_one_ended_the_program() -> None:
    later = PRINTED.replace("RuntimeError: boom", "torch.OutOfMemoryError: 2 GiB")
    assert last_traceback(PRINTED + later) == (
        "torch.OutOfMemoryError",
        "2 GiB",
        (frame(88), frame(99, function="main")),
    )


def test_a_torn_traceback_leaves_the_one_before_it() -> None:
    torn = PRINTED.partition("RuntimeError: boom")[0]
    assert last_traceback(PRINTED + torn) == last_traceback(PRINTED)
    assert last_traceback(torn) is None


def test_an_exception_without_a_message_and_a_foreign_line_after_the_frames() -> None:
    assert last_traceback(PRINTED.replace(": boom\n", "\n")) == ("RuntimeError", "", last_traceback(PRINTED)[2])  # type: ignore[index]
    assert last_traceback(PRINTED.replace("RuntimeError: boom", "!! not an exception")) is None


def test_no_traceback_is_none() -> None:
    assert last_traceback("") is None
    assert last_traceback("loss 3.1\n") is None


def test_a_message_is_cut_to_500_characters() -> None:
    assert last_traceback(PRINTED.replace("RuntimeError: boom", "RuntimeError: " + "x" * 600))[1] == "x" * 500  # type: ignore[index]


def test_only_the_last_20_lines_that_name_an_error_are_kept() -> None:
    log = "".join(f"[rank0]: ValueError {number}\nloss {number}\n" for number in range(30))
    assert error_lines(log) == tuple(f"ValueError {number}" for number in range(10, 30))


@pytest.mark.parametrize(
    "line", ["terminate called after throwing", "  what():  [enforce fail]", "Aborted (core dumped)", "FAILED"]
)
def test_a_native_death_names_its_error_too(line: str) -> None:
    assert error_lines(f"fine\n{line}\nfine\n") == (line,)


@given(st.text() | st.lists(st.sampled_from([*PRINTED.splitlines(), "[rank1]", "x"])).map("\n".join))
def test_reading_a_log_never_raises(text: str) -> None:
    found = last_traceback(text)
    assert found is None or (found[0] and found[2])
    assert len(error_lines(text)) <= 20
