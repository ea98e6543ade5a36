"""The board's two sides: what is written is what is read, and what others wrote never breaks the reader."""

from __future__ import annotations

import itertools
import os
import struct
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_harness import protocol
from nsa_harness.core.evidence.status_file import parse
from nsa_harness.core.report import Place
from nsa_harness.probe import status_file as board_module
from nsa_harness.probe.status_file import StatusFileWriter


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "1.board"


def test_what_is_written_is_what_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = itertools.count(time.monotonic_ns(), 1_000_000)
    monkeypatch.setattr(board_module, "_monotonic_ns", lambda: next(now_ns))
    board = StatusFileWriter(str(path), rank=3, world_size=8)
    board.write_training_event(board.event_code("forward", "blocks.2.attn"))
    board.finish_step()
    board.begin_step()
    board.write_training_event(board.event_code("data", "fetch"))
    board.write_event(board.event_code("collective", "all_reduce"))
    place = board.string_number("/home/a:b/train.py:88:step")
    inside = board.enter_call(
        board.string_number("all_reduce"), board.string_number("0"), place, 42, board.string_number("float32")
    )
    done = board.enter_call(board.string_number("barrier"), board.string_number("0"), 0, 0, 0)
    board.leave_call(done)
    board.write_heartbeat(5)
    board.write_collective_counts(9, 8)
    board.write_end(protocol.END_RAISED)
    board.write_end(protocol.END_ATEXIT)

    seen = parse(path.read_bytes(), 0)
    assert (seen.pid, seen.rank, seen.world_size, seen.step) == (os.getpid(), 3, 8, 2)
    assert [(mark.kind, mark.name, mark.step, mark.count, mark.position) for mark in seen.events] == [
        ("collective", "all_reduce", 2, 1, 1),
        ("data", "fetch", 2, 2, 1),
    ]
    assert [step for step, _ in seen.steps_s] == [1]
    assert [(call.number, call.op, call.left_s is None) for call in seen.calls] == [
        (inside, "all_reduce", True),
        (done, "barrier", False),
    ]
    assert seen.calls[0].place == Place(file="/home/a:b/train.py", line=88, function="step")
    assert (seen.calls[0].elements, seen.calls[0].dtype, seen.calls[1].place) == (42, "float32", None)
    assert (seen.enqueued, seen.completed, seen.ended_by_exception) == (9, 8, True)
    assert seen.exit_s is not None
    assert seen.beat_s is not None
    assert protocol.HEARTBEAT.unpack_from(path.read_bytes(), protocol.HEARTBEAT_AT)[1] == 5
    assert set(seen.gaps_s) == {"forward", "data"}


def test_what_follows_the_optimizer_belongs_to_its_step_until_the_next_batch_or_forward(path: Path) -> None:
    board = StatusFileWriter(str(path), rank=0, world_size=1)
    what = board.event_code("collective", "all_reduce")
    steps = []
    for begins in (True, False, True):
        if begins:
            board.begin_step()
        board.finish_step()
        board.write_training_event(what)
        steps.append(parse(path.read_bytes(), 0).events[0].step)
    assert steps == [1, 2, 3]


def test_the_file_is_private_and_never_seen_half_made(path: Path) -> None:
    StatusFileWriter(str(path), rank=0, world_size=1)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_size == protocol.STATUS_FILE_SIZE
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_board_of_an_earlier_process_with_this_id_is_replaced(path: Path) -> None:
    path.write_bytes(b"left over")
    StatusFileWriter(str(path), rank=1, world_size=2)
    assert parse(path.read_bytes(), 0).rank == 1


def test_each_thread_has_its_mark_and_more_threads_than_slots_do_no_harm(path: Path) -> None:
    board = StatusFileWriter(str(path), rank=0, world_size=1)
    what = board.event_code("backward", "head")
    together = threading.Barrier(protocol.SLOTS + 9)
    finish = threading.Event()

    def work() -> None:
        board.write_training_event(what)
        together.wait()
        finish.wait()

    threads = [threading.Thread(target=work) for _ in range(protocol.SLOTS + 8)]
    for thread in threads:
        thread.start()
    together.wait()
    marks = parse(path.read_bytes(), 0).events
    finish.set()
    for thread in threads:
        thread.join()
    assert len(marks) == len({mark.tid for mark in marks}) == protocol.SLOTS

    # All owners are gone: a new thread gets a slot of its own again.
    late = threading.Thread(target=board.write_training_event, args=(board.event_code("data", "fetch"),))
    late.start()
    late.join()
    assert parse(path.read_bytes(), 0).events[0].kind == "data"


def test_a_full_string_table_loses_names_and_nothing_else(path: Path) -> None:
    board = StatusFileWriter(str(path), rank=0, world_size=1)
    known = board.string_number("first")
    for number in range(protocol.STRINGS_SIZE // protocol.STRING_LIMIT + 2):
        board.string_number(f"{number:05d}" * 100)
    assert board.string_number("one more" * 40) == 0
    assert board.string_number("first") == known
    board.write_training_event(board.event_code("forward", "another" * 40))
    assert [(mark.kind, mark.name) for mark in parse(path.read_bytes(), 0).events] == [("forward", "")]


def test_rings_keep_the_newest_and_a_call_that_lost_its_place_is_left_alone(path: Path) -> None:
    board = StatusFileWriter(str(path), rank=0, world_size=1)
    op = board.string_number("all_reduce")
    lost = board.enter_call(op, 0, 0, 1, 0)
    for _ in range(protocol.CALLS):
        board.leave_call(board.enter_call(op, 0, 0, 1, 0))
        board.finish_step()
    board.finish_step()
    board.leave_call(lost)
    seen = parse(path.read_bytes(), 0)
    assert [call.number for call in seen.calls] == list(range(2, protocol.CALLS + 2))
    last = protocol.CALLS + 1
    assert [step for step, _ in seen.steps_s] == list(range(last - protocol.STEPS + 1, last + 1))


def test_a_forked_child_writes_to_no_board(path: Path) -> None:
    board = StatusFileWriter(str(path), rank=0, world_size=1)
    board.write_training_event(board.event_code("forward", "parent"))
    before = path.read_bytes()
    child = os.fork()
    if child == 0:
        board.write_training_event(board.event_code("forward", "child"))
        board.finish_step()
        os._exit(0 if not board.is_writing else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert path.read_bytes() == before


def test_a_torn_slot_is_left_out(path: Path) -> None:
    board = StatusFileWriter(str(path), rank=0, world_size=1)
    first_mark, second_mark = board.event_code("forward", "a"), board.event_code("backward", "b")
    board.write_training_event(first_mark)
    old = path.read_bytes()
    board.write_training_event(second_mark)
    new = path.read_bytes()
    start, size = protocol.SLOTS_AT, protocol.SLOT.size
    for cut in range(start + 8, start + size, 8):
        for first, second in ((old, new), (new, old)):
            torn = first[:cut] + second[cut : start + size] + first[start + size :]
            assert parse(torn, 0).events in ((), parse(old, 0).events, parse(new, 0).events)


def test_a_torn_step_does_not_hide_the_steps_before_it(path: Path) -> None:
    board = StatusFileWriter(str(path), rank=0, world_size=1)
    for _ in range(3):
        board.finish_step()
    data = bytearray(path.read_bytes())
    struct.pack_into("<QQ", data, protocol.STEPS_AT + 3 * protocol.STEP.size, 4, 0)
    assert [step for step, _ in parse(bytes(data), 0).steps_s] == [1, 2, 3]


@pytest.mark.parametrize(
    ("at", "bytes_there", "reason"),
    [
        (0, b"ELF", "begins with"),
        (8, struct.pack("<I", 99), "the file has 99"),
        (12, struct.pack("<I", 7), "this file names 7"),
    ],
)
def test_what_is_no_board_is_refused_with_the_reason(path: Path, at: int, bytes_there: bytes, reason: str) -> None:
    StatusFileWriter(str(path), rank=0, world_size=1)
    data = bytearray(path.read_bytes())
    data[at : at + len(bytes_there)] = bytes_there
    with pytest.raises(ValueError, match=reason):
        parse(bytes(data), 0)


@pytest.mark.parametrize("size", [0, 10, protocol.HEADER_SIZE - 1, protocol.HEADER_SIZE, protocol.STATUS_FILE_SIZE - 1])
def test_a_truncated_board_is_refused_with_the_reason(path: Path, size: int) -> None:
    StatusFileWriter(str(path), rank=0, world_size=1)
    with pytest.raises(ValueError, match=f"has {protocol.STATUS_FILE_SIZE} bytes"):
        parse(path.read_bytes()[:size], 0)


@given(
    edits=st.lists(
        st.tuples(st.integers(0, protocol.STATUS_FILE_SIZE - 1), st.binary(min_size=1, max_size=64)), max_size=12
    ),
    launched_ns=st.integers(0, 2**64 - 1),
)
def test_a_hostile_board_raises_value_error_or_nothing(edits: list[tuple[int, bytes]], launched_ns: int) -> None:
    data = bytearray(_SAMPLE)
    for at, new in edits:
        data[at : at + len(new)] = new
    _read(bytes(data), launched_ns)


@given(fill=st.binary(min_size=1, max_size=256))
def test_a_board_of_nothing_but_noise_behind_a_true_header_is_read(fill: bytes) -> None:
    header = _SAMPLE[: protocol.HEARTBEAT_AT]
    noise = (fill * (protocol.STATUS_FILE_SIZE // len(fill) + 1))[: protocol.STATUS_FILE_SIZE - len(header)]
    seen = parse(header + noise, 0)
    assert len(seen.events) <= protocol.SLOTS
    assert len(seen.calls) <= protocol.CALLS


@given(data=st.binary(max_size=400))
def test_any_bytes_raise_value_error_or_nothing(data: bytes) -> None:
    _read(data, 0)


def _read(data: bytes, launched_ns: int) -> None:
    """Hypothesis fails on any other exception."""
    reason = "read"
    try:
        parse(data, launched_ns)
    except ValueError as error:
        reason = str(error)
    assert reason


def _sample() -> bytes:
    data = bytearray(protocol.STATUS_FILE_SIZE)
    identity = (protocol.MAGIC, protocol.LAYOUT, protocol.STATUS_FILE_SIZE, 1, 0, 2, 0, 1)
    protocol.IDENTITY.pack_into(data, protocol.IDENTITY_AT, *identity)
    return bytes(data)


_SAMPLE = _sample()
