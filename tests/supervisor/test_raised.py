"""The probe's record of an exception, read back: what has another form is refused, or left out."""

from __future__ import annotations

from typing import Any

import pytest

from nsa_harness.core.evidence.evidence import Frame, Hint
from nsa_harness.supervisor.storage.collect import raised_exception

RECORD: dict[str, Any] = {"type": "RuntimeError", "message": "boom", "frames": [], "at_ns": 5_000_000_000}
PLACED = {"kind": "without gradient", "name": "head.bias", "file": "net.py", "line": 8, "function": "forward"}


def test_hints_are_read_with_their_lines_and_without() -> None:
    hints = [PLACED, {"kind": "in place", "name": "sigmoid"}]
    assert raised_exception(1, {**RECORD, "hints": hints}, 0).hints == (
        Hint(kind="without gradient", name="head.bias", frame=Frame(file="net.py", line=8, function="forward")),
        Hint(kind="in place", name="sigmoid"),
    )


def test_a_record_of_an_older_probe_has_no_hints() -> None:
    assert raised_exception(0, RECORD, 0).hints == ()


def test_what_led_to_it_is_read_and_what_a_worker_handed_on_as_text_comes_first() -> None:
    frames = [{"file": "net.py", "line": 8, "function": "forward"}]
    text = 'Original Traceback (most recent call last):\n  File "data.py", line 3, in load\nKeyError: 7\n'
    chain = [{"type": "OSError", "message": "gone", "frames": frames, "explicit": True}]
    first, second = raised_exception(0, {**RECORD, "message": text, "chain": chain}, 0).chain
    assert (first.type, first.frames) == ("KeyError", (Frame(file="data.py", line=3, function="load"),))
    assert (second.type, second.frames, second.explicit) == (
        "OSError",
        (Frame(file="net.py", line=8, function="forward"),),
        True,
    )
    assert raised_exception(0, RECORD, 0).chain == ()


def test_of_very_many_hints_the_first_are_kept_and_what_is_none_is_left_out() -> None:
    assert len(raised_exception(0, {**RECORD, "hints": ["boom", *[PLACED] * 500]}, 0).hints) < 40


@pytest.mark.parametrize("hints", [7, {"kind": 1}, [{"name": "x"}], [{**PLACED, "line": "eight"}]])
def test_hints_of_another_form_raise_what_the_reader_expects(hints: object) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        raised_exception(0, {**RECORD, "hints": hints}, 0)
