"""The values that a rank reads from its own stacks, without running the program's code."""

from __future__ import annotations

import json
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nsa_harness import protocol
from nsa_harness.probe import frame_values
from nsa_harness.probe.frame_values import NAMES_LIMIT, TOTAL_LIMIT, FrameValues, chains_of
from nsa_harness.probe.patches import TroubleLog
from nsa_harness.probe.status_file import StatusFileWriter
from nsa_harness.probe.values import MISSING, own_length


@pytest.fixture
def values(tmp_path: Path) -> Iterator[FrameValues]:
    path = str(tmp_path / protocol.STATUS_FILE.format(pid=1))
    status_file = StatusFileWriter(path, rank=0, world_size=1)
    yield FrameValues(status_file, str(tmp_path), TroubleLog(str(tmp_path)))
    status_file.is_writing = False


def function(source: str, **names: Any) -> Callable[..., Any]:
    """A function of a program in /job/train.py."""
    scope: dict[str, Any] = {"__name__": "train", **names}
    exec(compile(source, "/job/train.py", "exec"), scope)
    found: Callable[..., Any] = scope["main"]
    return found


def written(values: FrameValues) -> dict[str, Any]:
    return json.loads(Path(values._path).read_text())


def read_in(values: FrameValues, source: str, **names: Any) -> dict[str, str]:
    """The values of the function `main`, which calls `look` where it is asked."""
    function(source, look=lambda: values.write_departure(sys._getframe(1)), **names)()
    (thread,) = written(values)["threads"]
    return {name: text for name, _, text in thread["frames"][0]["values"]}


STOPPER = """
class Limits:
    def __init__(self):
        self.patience = 3
class Stopper:
    def __init__(self):
        self.bad, self.note, self.limits = 2, "unused", Limits()
    def step(self, loss):
        self.bad += loss > 1
        return self.bad >= self.limits.patience
def main():
    stopper, unused, mode = Stopper(), 5, "train"
    while mode == "train":
        if stopper.step(0.5):
            break
        look()
        return
"""


def test_a_method_of_an_object_leads_to_the_attributes_that_it_uses(values: FrameValues) -> None:
    found = read_in(values, STOPPER)
    assert found == {"mode": "'train'", "stopper.bad": "2", "stopper.limits.patience": "3"}
    record = written(values)
    frame = record["threads"][0]["frames"][0]
    assert (record["reason"], record["is_cut"]) == ("exit", False)
    assert (frame["file"], frame["line"], frame["function"]) == ("/job/train.py", 16, "main")


def test_names_of_conditions_and_loops_come_first() -> None:
    code = function(
        "def main(a, b, c, d):\n    print(a.x.y, b)\n    for one in c.items:\n        if d > one:\n            print(a)"
    ).__code__
    assert chains_of(code)[:3] == [("c", "items"), ("d",), ("one",)]
    assert ("a", "x", "y") in chains_of(code)


@pytest.mark.parametrize("name", ["password", "self.api_key", "hf_token", "DB_DSN", "client_secret", "pw", "cookie"])
def test_a_text_under_the_name_of_a_secret_stays_in_the_process(name: str) -> None:
    assert frame_values._guarded(name, "str", "'hunter2'") == "(not read)"
    assert frame_values._guarded(name, "dict", "{'a': 'hunter2'}") == "(not read)"
    assert frame_values._guarded(name, "int", "7") == "7"


def test_a_long_text_is_known_by_its_length_and_checksum() -> None:
    text = repr("x" * 70)
    assert frame_values._guarded("note", "str", text) == "str of 72 characters, crc 0dfeda9e"
    assert frame_values._guarded("pad_token_id", "int", "3") == "3"
    assert frame_values._guarded("mode", "str", "'train'") == "'train'"


HOSTILE = """
class Meta(type):
    def __getattribute__(cls, name):
        ran.append(name)
        raise SystemExit
class Hostile(metaclass=Meta):
    def __getattribute__(self, name):
        ran.append(name)
        raise SystemExit
    def __len__(self):
        ran.append("len")
        return 3
    def __repr__(self):
        ran.append("repr")
        return "x"
    def __eq__(self, other):
        ran.append("eq")
        raise SystemExit
    def __iter__(self):
        ran.append("iter")
        raise SystemExit
    __class__ = property(lambda self: ran.append("class"))
def main():
    hostile, plain = made, 3
    look()
    if plain:
        return
    for one in hostile:
        print(hostile.bad, len(hostile), one)
"""


def test_no_code_of_the_program_runs(values: FrameValues) -> None:
    ran: list[str] = []
    scope: dict[str, Any] = {}
    exec(HOSTILE.partition("def main")[0], {"ran": ran}, scope)
    made = object.__new__(scope["Hostile"])
    ran.clear()
    assert read_in(values, HOSTILE, ran=ran, made=made) == {"plain": "3"}
    assert ran == []


def test_a_frame_of_many_names_is_cut(values: FrameValues) -> None:
    count = 3 * NAMES_LIMIT
    lines = [f"    name{number} = {number}" for number in range(count)]
    uses = ", ".join(f"name{number}" for number in range(count))
    source = "\n".join(["def main():", *lines, "    look()", f"    return {uses}"])
    assert len(read_in(values, source)) == NAMES_LIMIT
    assert written(values)["is_cut"]


def test_one_process_writes_64_kb_at_most(values: FrameValues, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_values, "TOTAL_LIMIT", 400)
    names = [f"number_{at}" for at in range(30)]
    source = f"def main():\n    {' = '.join(names)} = 7\n    look()\n    return {', '.join(names)}"
    assert 10 < len(read_in(values, source)) < 20
    assert written(values)["is_cut"]
    assert TOTAL_LIMIT == 65536


def test_reading_ends_when_its_time_is_over(values: FrameValues, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_values, "TIME_LIMIT_S", -1.0)
    values.write_departure(sys._getframe())
    assert not Path(values._path).exists()


def test_a_request_is_answered_once_and_for_all_threads(values: FrameValues) -> None:
    begun, end = threading.Event(), threading.Event()
    main = function("def main():\n    size = 4\n    begun.set()\n    end.wait()\n    return size", begun=begun, end=end)
    thread = threading.Thread(target=main, name="reader")
    thread.start()
    begun.wait()
    memory = values._status_file._memory
    values.answer()
    assert not Path(values._path).exists()
    protocol.VALUES_REQUEST.pack_into(memory, protocol.VALUES_REQUEST_AT, 2)
    values.answer()
    end.set()
    thread.join()
    assert protocol.VALUES_ANSWER.unpack_from(memory, protocol.VALUES_ANSWER_AT) == (2,)
    record = written(values)
    (reader,) = [one for one in record["threads"] if one["name"] == "reader"]
    assert record["reason"] == "request"
    assert ["size", "int", "4"] in reader["frames"][0]["values"]


def test_an_exception_shows_the_frames_that_it_left_and_asks_the_other_ranks(
    values: FrameValues, tmp_path: Path
) -> None:
    other = StatusFileWriter(str(tmp_path / protocol.STATUS_FILE.format(pid=2)), rank=1, world_size=2)
    without_values = StatusFileWriter(str(tmp_path / protocol.STATUS_FILE.format(pid=3)), rank=2, world_size=2)
    other.answer_values(1)
    fails = function(
        "def check(row):\n    return 1 // row\ndef main():\n    width = 0\n    check(width)\n    return width"
    )
    with pytest.raises(ZeroDivisionError) as raised:
        fails()
    values.write_exception(raised.tb)
    values.write_departure(sys._getframe())
    record = written(values)
    frames = [(frame["function"], frame["values"]) for frame in record["threads"][0]["frames"]]
    assert record["reason"] == "exception"
    assert frames[:2] == [("check", [["row", "int", "0"]]), ("main", [["width", "int", "0"]])]
    assert (other.last_values_request(), without_values.last_values_request()) == (2, 0)


class Sized:
    def __init__(self) -> None:
        self.rows, self.count = [1, 2, 3], 9


def sized(source: str) -> Any:
    scope: dict[str, Any] = {}
    exec(f"def __len__(self):\n    {source}", {"other": 4}, scope)
    return type("Own", (Sized,), {"__len__": scope["__len__"]})()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("return len(self.rows)", 3),
        ("return self.count", 9),
        ("return len(self.rows) // 2", MISSING),
        ("return self.rows", MISSING),
        ("return self.compute()", MISSING),
        ("return other", MISSING),
        ("return len(self.missing)", MISSING),
        ("return 7", MISSING),
        ("self.rows.clear(); return self.count", MISSING),
    ],
)
def test_a_simple_length_is_known_without_running_it(source: str, expected: Any) -> None:
    assert own_length(sized(source)) is expected or own_length(sized(source)) == expected


def test_a_length_of_anything_else_is_unknown() -> None:
    assert own_length(types.SimpleNamespace()) is MISSING
    assert own_length([1]) is MISSING
