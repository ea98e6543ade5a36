"""A rank's files, which lie by process and by stream, brought to its own folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from harness import protocol
from harness.supervisor.stored.reading import opened
from harness.supervisor.stored.rundir import AttemptDir, own_folder

_MAX_HALF_BYTES = 64 << 20
_OF_PROBE = {
    protocol.BOARD: "board",
    protocol.STACKS: "stacks.txt",
    protocol.RAISED: "raised.json",
    protocol.FLIGHT: "flight.json",
    protocol.LOOKS: "looks.jsonl",
    protocol.TROUBLE: "trouble.jsonl",
}


def bring_home(attempt: AttemptDir, rank: int, pid: int | None) -> Iterator[OSError]:
    """Copies what there is and yields what could not be; that may lie there already, from an earlier judgement."""
    home = attempt.rank(rank)
    try:
        own_folder(home)
    except OSError as error:
        yield error
        return
    for source, name in [*_logs(attempt, rank), *_boards(attempt, pid)]:
        try:
            _copy(source, home / name)
        except OSError as error:
            yield error


def _logs(attempt: AttemptDir, rank: int) -> Iterator[tuple[Path, str]]:
    """torchrun writes one directory a rank; a plain launch has one log, which is rank 0's."""
    for stream in ("stdout", "stderr"):
        written = sorted(attempt.logs.glob(f"*/attempt_*/{rank}/{stream}.log"))
        if written:
            yield written[-1], f"{stream}.log"
        elif not attempt.logs.exists() and rank == 0 and attempt.output.exists():
            yield attempt.output, f"{stream}.log"


def _boards(attempt: AttemptDir, pid: int | None) -> Iterator[tuple[Path, str]]:
    for pattern, name in _OF_PROBE.items() if pid is not None else ():
        source = attempt.boards / pattern.format(pid=pid)
        if source.exists() and (source.stat().st_size or pattern == protocol.BOARD):
            yield source, name


def _copy(source: Path, target: Path) -> None:
    """Aside and renamed: what lies at the target may be a link. Raises OSError for a source that is no file.

    Of a file beyond all measure its beginning and its end: the whole stays where it was written.
    """
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    with opened(source) as read, aside.open("wb") as written:
        size = os.fstat(read.fileno()).st_size
        left_out = size - 2 * _MAX_HALF_BYTES
        written.writelines(_pieces(read, size if left_out <= 0 else _MAX_HALF_BYTES))
        if left_out > 0:
            written.write(f"\n[{left_out} bytes are left out here]\n".encode())
            read.seek(size - _MAX_HALF_BYTES)
            written.writelines(_pieces(read, _MAX_HALF_BYTES))
    aside.replace(target)


def _pieces(file: BinaryIO, size: int) -> Iterator[bytes]:
    while size > 0 and (piece := file.read(min(size, 1 << 20))):
        size -= len(piece)
        yield piece
