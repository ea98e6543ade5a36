"""Exceptions that the program's own code caught are told with both lines, from what `sys.monitoring` says.

Where this Python has none, a stand-in says the same of the same code: when an `except` begins, and what passes it on.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_harness.core.evidence.evidence import CaughtException
from nsa_harness.core.evidence.status_file import parse
from nsa_harness.probe import exceptions
from nsa_harness.probe.exceptions import CAUGHT_LIMIT, HANDLERS_LIMIT, TOOLS, CaughtExceptions
from nsa_harness.probe.patches import TroubleLog
from nsa_harness.probe.places import foreign_code
from nsa_harness.probe.status_file import StatusFileWriter

HERE = Path(__file__).name


class Monitoring:
    """As much of `sys.monitoring` as the probe uses."""

    events = SimpleNamespace(EXCEPTION_HANDLED=1, RERAISE=2)

    def __init__(self, *taken: int) -> None:
        self.tools: dict[int, str] = dict.fromkeys(taken, "another")
        self.callbacks: dict[int, Any] = {}
        self.on = 0

    def get_tool(self, tool: int) -> str | None:
        return self.tools.get(tool)

    def use_tool_id(self, tool: int, name: str) -> None:
        self.tools[tool] = name

    def free_tool_id(self, tool: int) -> None:
        del self.tools[tool]

    def register_callback(self, _tool: int, event: int, callback: Any) -> None:
        self.callbacks[event] = callback

    def set_events(self, _tool: int, events: int) -> None:
        self.on = events


class Watched:
    def __init__(self, tmp_path: Path, monitoring: Monitoring) -> None:
        self._path = tmp_path / "1.board"
        self.board = StatusFileWriter(str(self._path), rank=0, world_size=1)
        self.caught = CaughtExceptions(self.board, foreign_code(torch))
        self._directory = tmp_path
        self.monitoring = monitoring
        exceptions.monitor(monitoring, self.caught, TroubleLog(str(tmp_path)))

    def told(self) -> tuple[CaughtException, ...]:
        return parse(self._path.read_bytes(), 0).caught_exceptions

    def troubles(self) -> str:
        return "".join(path.read_text() for path in self._directory.glob("*.trouble.jsonl"))

    @property
    def handles(self) -> Any:
        return self.monitoring.callbacks[1]

    @property
    def passes_on(self) -> Any:
        return self.monitoring.callbacks[2]


def here(error: BaseException) -> tuple[Any, int, BaseException]:
    """What the interpreter says of the function that calls: its code, the instruction, the exception."""
    frame = sys._getframe(1)
    return frame.f_code, frame.f_lasti, error


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path, Monitoring())


def missing() -> None:
    raise KeyError("k")


def line_of(place: object) -> tuple[str, int, str]:
    return Path(place.file).name, place.line, place.function  # type: ignore[attr-defined]


def catches(watched: Watched) -> int:
    try:
        missing()
    except KeyError as error:
        watched.handles(*here(error))
        return sys._getframe().f_lineno - 1
    raise AssertionError


def test_what_own_code_caught_is_told_with_the_line_that_raised_and_the_one_that_caught(watched: Watched) -> None:
    lines = {catches(watched) for _ in range(3)}
    watched.board.finish_step()
    watched.board.begin_step()
    lines |= {catches(watched)}
    (one,) = watched.told()
    assert (one.type, one.step, one.count, one.last_step, one.left_forward) == ("KeyError", 1, 4, 2, False)
    assert line_of(one.place) == (HERE, missing.__code__.co_firstlineno + 1, "missing")
    assert line_of(one.caught_at) == (HERE, *lines, "catches")
    assert [frame.function for frame in one.chain][:2] == ["missing", "catches"]


def test_what_only_passed_a_line_was_caught_by_the_one_further_out(watched: Watched) -> None:
    def past() -> None:
        try:
            missing()
        except KeyError as error:
            watched.handles(*here(error))
            watched.passes_on(*here(error))
            raise

    for _ in range(2):
        try:
            past()
        except KeyError as error:
            watched.handles(*here(error))
    (one,) = watched.told()
    assert (one.count, line_of(one.caught_at)[2]) == (2, sys._getframe().f_code.co_name)


def test_what_nobody_of_the_program_caught_is_no_exception_that_was_caught(watched: Watched) -> None:
    try:
        missing()
    except KeyError as error:
        watched.handles(*here(error))
        watched.passes_on(*here(error))
    assert watched.told() == ()


def test_code_of_a_library_and_control_flow_say_nothing(watched: Watched) -> None:
    library = compile(
        "def f(watched):\n try: missing()\n except KeyError as e: watched.handles(*here(e))",
        "/x/site-packages/y.py",
        "exec",
    )
    names: dict[str, Any] = {"here": here, "missing": missing}
    exec(library, names)
    names["f"](watched)
    try:
        next(iter(()))
    except StopIteration as error:
        watched.handles(*here(error))
    assert watched.told() == ()


def test_kinds_and_lines_are_bounded(watched: Watched) -> None:
    for number in range(CAUGHT_LIMIT + 2):
        kind = type(f"Error{number}", (ValueError,), {})
        try:
            raise kind
        except kind as error:
            watched.handles(*here(error))
    assert [one.type for one in watched.told()] == [f"Error{number}" for number in range(CAUGHT_LIMIT)]

    assert not watched.troubles()


def test_of_one_kind_the_first_lines_it_is_handled_by_are_kept(watched: Watched) -> None:
    tries = "\n".join(
        f"def f{at}():\n try: f{at - 1}()\n except KeyError as e:\n  handles(*here(e))\n  passes_on(*here(e))\n  raise"
        for at in range(1, HANDLERS_LIMIT + 3)
    )
    names: dict[str, Any] = {"here": here, "f0": missing}
    names |= {"handles": watched.handles, "passes_on": watched.passes_on}
    exec(compile(tries, "/home/ada/run.py", "exec"), names)
    try:
        names[f"f{HANDLERS_LIMIT + 2}"]()
    except KeyError as error:
        watched.handles(*here(error))
    assert watched.told() == ()  # where it was caught there was no room for: then nothing is said
    assert not watched.troubles()


def test_another_tool_is_left_alone_and_without_a_free_one_it_is_said(tmp_path: Path) -> None:
    beside = Watched(tmp_path, Monitoring(TOOLS[0]))
    assert beside.monitoring.tools == {TOOLS[0]: "another", TOOLS[1]: "nsa-harness"}
    with pytest.raises(RuntimeError, match="are taken"):
        Watched(tmp_path, Monitoring(*TOOLS))


def test_a_piece_that_fails_is_switched_off_and_noted(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError("planted")

    monkeypatch.setattr(CaughtExceptions, "note_handler", fails)
    catches(watched)
    assert (watched.monitoring.on, watched.monitoring.tools) == (0, {})
    assert "OSError: planted" in watched.troubles()


@pytest.mark.skipif(not hasattr(sys, "monitoring"), reason="this Python has no sys.monitoring")
def test_the_interpreter_itself_tells_it(tmp_path: Path) -> None:
    monitoring = vars(sys)["monitoring"]
    board = StatusFileWriter(str(tmp_path / "1.board"), rank=0, world_size=1)
    caught = CaughtExceptions(board, foreign_code(torch))
    tool = next(tool for tool in TOOLS if monitoring.get_tool(tool) is None)
    exceptions.monitor(monitoring, caught, TroubleLog(str(tmp_path)))
    try:
        try:
            try:
                missing()
            finally:
                board.begin_step()
        except KeyError:
            line = sys._getframe().f_lineno - 1
    finally:
        monitoring.set_events(tool, 0)
        monitoring.free_tool_id(tool)
    (one,) = parse((tmp_path / "1.board").read_bytes(), 0).caught_exceptions
    assert (one.type, one.count, one.caught_at and one.caught_at.line) == ("KeyError", 1, line)
