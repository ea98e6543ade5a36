"""The room that a run keeps for its end: given up once, and only to what needs it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from nsa_harness.supervisor.storage.rundir import RunDir, append_line, lock_run, write_document
from nsa_harness.supervisor.storage.safe_directory import (
    BALLAST,
    DOCUMENTS_BYTES,
    SafeDirectory,
    fill_ballast,
    shrink_ballast,
    write_with_ballast,
)


class Disk:
    """Has no room for a document until the reserve is given up; as a disk does, it takes what is not written yet."""

    def __init__(self, home: Path, number: int) -> None:
        self.home, self.number = home, number
        self.write = SafeDirectory._write_atomically

    def __call__(self, door: SafeDirectory, path: Path, data: bytes) -> None:
        share = 0 if path.parent == self.home else DOCUMENTS_BYTES
        if (self.home / BALLAST).stat().st_size > share:
            raise OSError(self.number, os.strerror(self.number), str(path))
        self.write(door, path, data)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    fill_ballast(tmp_path)
    (tmp_path / "attempt" / "rank0").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("place", ["SUMMARY.md", "attempt/verdict.json", "attempt/rank0/calls.txt"])
def test_a_document_gets_the_room_of_the_reserve(
    run: Path, monkeypatch: pytest.MonkeyPatch, number: int, place: str
) -> None:
    disk = Disk(run, number)
    monkeypatch.setattr(SafeDirectory, "_write_atomically", lambda *words: disk(*words))
    write_document(run / place, "said")
    assert (run / place).read_text() == "said"
    share = 0 if place == "SUMMARY.md" else DOCUMENTS_BYTES
    assert (run / BALLAST).stat().st_size == share, "it tells that it was needed"


def test_what_fails_for_another_reason_leaves_the_reserve_alone(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(run, errno.EIO)
    monkeypatch.setattr(SafeDirectory, "_write_atomically", lambda *words: disk(*words))
    with pytest.raises(OSError, match="Input/output"):
        write_document(run / "SUMMARY.md", "said")
    assert (run / BALLAST).stat().st_size > 1 << 20


def test_a_disk_that_is_full_without_a_reserve_is_an_error_and_leaves_no_half_document(tmp_path: Path) -> None:
    (tmp_path / BALLAST).touch()
    with pytest.raises(OSError, match="No space left"):
        write_with_ballast(tmp_path / "x", lambda: _raise(errno.ENOSPC))


def _raise(number: int) -> None:
    raise OSError(number, os.strerror(number))


def test_a_reserve_that_was_needed_is_made_again_where_there_is_room(run: Path) -> None:
    os.truncate(run / BALLAST, 0)
    fill_ballast(run)
    assert (run / BALLAST).stat().st_size > 1 << 20


def test_a_reserve_for_which_there_is_no_room_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: _raise(errno.ENOSPC))
    fill_ballast(tmp_path)
    assert (tmp_path / BALLAST).stat().st_size == 0


@pytest.mark.parametrize("second", [os.symlink, os.link])
def test_a_reserve_that_is_another_file_of_the_users_is_not_emptied(
    tmp_path: Path, second: Callable[[Path, Path], None]
) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_text("kept")
    second(theirs, tmp_path / ".reserve")
    assert shrink_ballast(tmp_path / ".reserve", 0) is False
    assert theirs.read_text() == "kept"
    (tmp_path / "own").write_text("room")
    assert shrink_ballast(tmp_path / "own", 0) is True
    assert (tmp_path / "own").stat().st_size == 0


def test_a_disk_with_little_space_keeps_half_of_it_for_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fstatvfs", lambda _: SimpleNamespace(f_bavail=15, f_frsize=4096))
    fill_ballast(tmp_path)
    assert (tmp_path / BALLAST).stat().st_size == 15 * 4096 // 2


def test_a_run_that_is_over_keeps_none(run: Path) -> None:
    with lock_run(RunDir(run)):
        assert (run / BALLAST).exists()
    assert not (run / BALLAST).exists()


def test_a_line_of_a_journal_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = tmp_path / "watch.jsonl"
    append_line(journal, {"event": "first"})
    monkeypatch.setattr(os, "write", lambda one, data, write=os.write: write(one, data[:7]))
    with pytest.raises(OSError, match="No space left"):
        append_line(journal, {"event": "second"})
    assert journal.read_text() == '{"event":"first"}\n'
