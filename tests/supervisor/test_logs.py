"""The logs of a launch stay within a bound: the middle of a large one is given back, and the run says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nsa_harness.supervisor.storage.logs import free_middle, limit_logs
from nsa_harness.supervisor.storage.rundir import AttemptDir

HALF = 1 << 16
BEGINS, ENDS = b"begins\n", b"\nends\n"


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    made = AttemptDir(tmp_path / "ddp")
    (made.logs / "id" / "attempt_0" / "0").mkdir(parents=True)
    return made


def fill(path: Path) -> bytes:
    text = BEGINS + b"x" * (64 * HALF) + ENDS
    path.write_bytes(text)
    return text


def told(attempt: AttemptDir) -> list[tuple[str, str]]:
    lines = attempt.watch.read_text().splitlines() if attempt.watch.exists() else []
    return [(record["what"], record["why"]) for record in map(json.loads, lines)]


def test_a_large_log_keeps_both_ends_and_the_run_says_what_is_left_out(attempt: AttemptDir) -> None:
    of_a_rank = attempt.logs / "id" / "attempt_0" / "0" / "stdout.log"
    small = attempt.logs / "id" / "attempt_0" / "0" / "stderr.log"
    small.write_text("whole\n")
    with limit_logs(attempt, HALF):
        whole = fill(attempt.output)
        fill(of_a_rank)
    left_out = len(whole) - 2 * HALF
    for log in (attempt.output, of_a_rank):
        kept = log.read_bytes()
        assert kept == whole[:HALF] + f"\n[{left_out} bytes were cut here]\n".encode() + whole[-HALF:]
    assert small.read_text() == "whole\n"
    why = f"{left_out} bytes in the middle were removed; a log keeps its first and last 65536 bytes"
    assert told(attempt) == [("output.log", why), ("logs/id/attempt_0/0/stdout.log", why)]


def test_the_middle_of_a_log_that_grows_goes_back_to_the_disk_and_its_writer_goes_on(attempt: AttemptDir) -> None:
    with attempt.output.open("ab", buffering=0) as writer:
        text = BEGINS + b"x" * (64 * HALF)
        writer.write(text)
        before = attempt.output.stat().st_blocks
        free_middle(attempt.output, HALF)
        writer.write(ENDS)
    kept = attempt.output.read_bytes()
    assert len(kept) == len(text) + len(ENDS)
    assert kept.startswith(BEGINS + b"x")
    assert kept.endswith(b"x" + ENDS)
    assert attempt.output.stat().st_blocks < before / 8


def test_what_grows_is_looked_at_while_it_does(attempt: AttemptDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller may be killed before the end, when the rest is done."""
    monkeypatch.setattr("nsa_harness.supervisor.storage.logs._INTERVAL_S", 0.01)
    with limit_logs(attempt, HALF):
        text = fill(attempt.output)
        while attempt.output.read_bytes() == text:  # until the thread has looked; the test's limit ends it
            pass
        assert attempt.output.stat().st_size == len(text)


def test_a_log_that_cannot_be_brought_down_is_told(attempt: AttemptDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(attempt.directory, "copy_ends", fails)
    with limit_logs(attempt, HALF):
        fill(attempt.output)
    ((what, why),) = told(attempt)
    assert what == "output.log"
    assert why.endswith("its first and last 65536 bytes: [Errno 28] No space left on device")
