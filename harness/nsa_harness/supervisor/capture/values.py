"""Reads the values of the names on the call stacks of all ranks: from the probe, or else with py-spy."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from nsa_harness import protocol
from nsa_harness.core.evidence.frame_values import MAX_BYTES, ProcessValues, parse_py_spy_values, parse_values
from nsa_harness.core.report import Trouble
from nsa_harness.supervisor.capture import procfs
from nsa_harness.supervisor.capture.node import CommandFailed
from nsa_harness.supervisor.capture.stacks import run_py_spy, wait_for

# The heartbeat thread answers within 0.25 s, unless the GIL is held or the machine is busy.
_ANSWER_S = 1.0
_PY_SPY_S = 1.0  # per process
_TOTAL_S = 6.0  # for all ranks together
_MAX_PARALLEL = 8
_MAX_LOAD_FACTOR = 3.0


@dataclass(kw_only=True)
class ValueReader:
    """A reader of the values on the stacks of all ranks of one job."""

    probe_dir: Path
    trouble: list[Trouble] = field(default_factory=list)

    def read(
        self, living: Mapping[int, int], ended: Mapping[int, int] | None = None, *, takes_written: bool = False
    ) -> list[ProcessValues]:
        """Return the values of the ranks, which map to their process ids.

        A rank that has ended may have written its values before. What cannot be read is noted as trouble.
        `takes_written`: a living rank may have written them too, because a failing rank requested them.
        """
        begin_s = time.monotonic()
        written = {rank: pid for rank, pid in living.items() if takes_written and self._file(pid).exists()}
        ended = {**(ended or {}), **written}
        living = {rank: pid for rank, pid in living.items() if rank not in written}
        requests = {rank: number for rank, pid in living.items() if (number := self._request(pid))}
        limit_s = _ANSWER_S * min(_MAX_LOAD_FACTOR, max(1.0, len(living) / 16))
        wait_for(lambda: all(self._is_done(living[rank], number) for rank, number in requests.items()), limit_s)
        answered = [rank for rank in requests if self._has_answered(living[rank], requests[rank])]
        found = [self._from_file(rank, pid) for rank, pid in ended.items()]
        found += [self._from_file(rank, living[rank]) for rank in answered]
        others = {rank: pid for rank, pid in living.items() if rank not in answered and procfs.is_alive(pid)}
        with ThreadPoolExecutor(max_workers=_MAX_PARALLEL) as pool:
            queries = [
                pool.submit(self._with_py_spy, rank, pid, begin_s + _TOTAL_S) for rank, pid in sorted(others.items())
            ]
            found += [query.result() for query in queries]
        return [values for values in found if values is not None]

    def _request(self, pid: int) -> int:
        """Ask the probe in a process for its values. Return the number of the request, or 0 if it cannot answer."""
        return self._with_status_file(pid, _make_request)

    def _is_done(self, pid: int, number: int) -> bool:
        return self._has_answered(pid, number) or not procfs.is_alive(pid)

    def _has_answered(self, pid: int, number: int) -> bool:
        return self._with_status_file(pid, _answer) == number

    def _with_status_file(self, pid: int, function: Callable[[mmap.mmap], int]) -> int:
        path = self.probe_dir / protocol.STATUS_FILE.format(pid=pid)
        with suppress(OSError, ValueError), path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            if memory[: len(protocol.MAGIC)] == protocol.MAGIC and len(memory) >= protocol.HEADER_SIZE:
                return function(memory)
        return 0

    def _file(self, pid: int) -> Path:
        return self.probe_dir / protocol.VALUES.format(pid=pid)

    def _from_file(self, rank: int, pid: int) -> ProcessValues | None:
        """Return the values that the probe wrote, and remove the file, which may contain secrets."""
        path = self._file(pid)
        with suppress(OSError):
            path = path.readlink() if path.is_symlink() else path
        try:
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
            path.unlink()
            return parse_values(data, rank)
        except FileNotFoundError:
            return None  # no function of the program was running
        except (OSError, ValueError) as error:
            self.trouble.append(Trouble(what="values", why=str(error)[:500], rank=rank))
            return None

    def _with_py_spy(self, rank: int, pid: int, until_s: float) -> ProcessValues | None:
        remaining_s = min(_PY_SPY_S, until_s - time.monotonic())
        try:
            if remaining_s <= 0:
                raise CommandFailed(f"not read within {_TOTAL_S:g} s")
            return parse_py_spy_values(run_py_spy(pid, ["--nonblocking", "--locals"], remaining_s), rank)
        except (CommandFailed, ValueError) as error:
            if procfs.is_alive(pid):
                self.trouble.append(Trouble(what="values", why=str(error)[:500], rank=rank))
            return None


def _make_request(memory: mmap.mmap) -> int:
    (answered,) = protocol.VALUES_ANSWER.unpack_from(memory, protocol.VALUES_ANSWER_AT)
    (number,) = protocol.VALUES_REQUEST.unpack_from(memory, protocol.VALUES_REQUEST_AT)
    if not answered:  # this process reads no values
        return 0
    protocol.VALUES_REQUEST.pack_into(memory, protocol.VALUES_REQUEST_AT, number + 1)
    return int(number) + 1


def _answer(memory: mmap.mmap) -> int:
    return int(protocol.VALUES_ANSWER.unpack_from(memory, protocol.VALUES_ANSWER_AT)[0])
