"""Takes a snapshot of every rank: cheap sources first, each with its own limit, each failure recorded.

Order per rank: /proc, stacks (py-spy without stopping the process, then stopping it, then the faulthandler signal),
the children's stacks, the flight recorder. Ranks are asked in parallel; two ranks take well under 3 s.
"""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from harness import protocol
from harness.core.observed.board import parse as parse_board
from harness.core.observed.evidence import Board, Collective, Process, RankSnapshot, Snapshot, Stack
from harness.core.observed.flight import essential, parse_flight
from harness.core.observed.stacks import parse_faulthandler, parse_py_spy
from harness.core.trouble import Trouble
from harness.supervisor import procfs

_PY_SPY_LIMIT_S = 5.0
_SIGNAL_LIMIT_S = 1.0
_FLIGHT_LIMIT_S = 1.0
_MAX_CHILDREN = 8


@dataclass(frozen=True, kw_only=True)
class Camera:
    """What stays the same between the snapshots of one attempt."""

    origin_ns: int
    boards: Path
    dumps: Path
    trouble: list[Trouble] = field(default_factory=list)
    asked_bytes: dict[int, int] = field(default_factory=dict)  # by process, what our questions made it read and write

    def take(self, number: int, ranks: Mapping[int, int]) -> Snapshot:
        """Look at every rank (rank -> pid) at once."""
        at_s = (time.monotonic_ns() - self.origin_ns) / 1e9
        with ThreadPoolExecutor(max_workers=max(1, min(16, len(ranks)))) as pool:
            taken = list(pool.map(lambda item: self._rank(number, *item), sorted(ranks.items())))
        return Snapshot(number=number, at_s=at_s, ranks=tuple(taken))

    def _rank(self, number: int, rank: int, pid: int) -> RankSnapshot:
        process = procfs.read_process(pid, self.origin_ns)
        board = self.board(pid)
        stacks, raw = self._stacks(rank, pid, process)
        children = tuple(self._children(pid))
        collectives = self._flight(rank, pid, board)
        asked_bytes = self.asked_bytes.get(pid, 0)
        snapshot = RankSnapshot(
            rank=rank,
            pid=pid,
            process=process,
            children=children,
            stacks=stacks,
            child_stacks={child.pid: self._child_stacks(rank, child) for child in children[:_MAX_CHILDREN]},
            board=board,
            collectives=collectives,
            asked_bytes=asked_bytes,
            proof=f"{self.dumps.name}/rank{rank}.{number}.txt",
        )
        if process and process.io_bytes is not None:
            self.asked_bytes[pid] = asked_bytes + (procfs.io_bytes(pid) or process.io_bytes) - process.io_bytes
        self._write(snapshot, raw, number)
        return snapshot

    def board(self, pid: int) -> Board | None:
        """The progress board of a process, or None where there is none (probe off, not Python, a foreign host)."""
        try:
            return parse_board((self.boards / protocol.BOARD.format(pid=pid)).read_bytes(), self.origin_ns)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._note("board", str(error), None)
            return None

    def _children(self, pid: int) -> Iterator[Process]:
        for stat in procfs.descendants(pid):
            process = procfs.read_process(stat.pid, self.origin_ns)
            if process is not None:
                yield process

    def _stacks(self, rank: int, pid: int, process: Process | None) -> tuple[tuple[Stack, ...], str]:
        if process is None or process.state in "ZX":
            return (), ""
        failures: list[str] = []
        for options in (["--nonblocking"], []):
            if not options and process.state in "Tt":  # ptrace cannot seize a stopped process
                continue
            stacks, raw = py_spy(pid, options, failures)
            if stacks:
                return stacks, raw
        stacks, raw = self._signalled_stacks(pid, failures)
        if not stacks:
            self._note("stacks", "; ".join(failures), rank)
        return stacks, raw

    def _child_stacks(self, rank: int, child: Process) -> tuple[Stack, ...]:
        if "python" not in child.command or child.state in "ZX":
            return ()
        failures: list[str] = []
        stacks, _ = py_spy(child.pid, ["--nonblocking"], failures)
        if not stacks:
            self._note(f"stacks of child {child.pid}", "; ".join(failures), rank)
        return stacks

    def _signalled_stacks(self, pid: int, failures: list[str]) -> tuple[tuple[Stack, ...], str]:
        """Ask the process's own faulthandler. Sent only where the handler is the probe's."""
        number = signal.SIGRTMIN + protocol.STACKS_SIGNAL_OFFSET
        target = self.boards / protocol.STACKS.format(pid=pid)
        if not target.exists() or not procfs.handles_signal(pid, number):
            failures.append("no faulthandler of ours in the process")
            return (), ""
        before = target.stat().st_size
        os.kill(pid, number)
        if not _wait_for(lambda: target.stat().st_size > before, _SIGNAL_LIMIT_S):
            failures.append(f"no answer to the faulthandler signal within {_SIGNAL_LIMIT_S:g} s")
            return (), ""
        raw = target.read_text(errors="replace")[before:]
        return parse_faulthandler(raw), raw

    def _flight(self, rank: int, pid: int, board: Board | None) -> tuple[Collective, ...]:
        if board is None:
            return ()
        answer = self.boards / protocol.FLIGHT.format(pid=pid)
        if not self._ask(pid):
            self._note("flight recorder", f"no answer within {_FLIGHT_LIMIT_S:g} s", rank)
            return ()
        try:
            return essential(parse_flight(answer.read_text(errors="replace")))
        except FileNotFoundError:
            return ()  # the process has not imported torch.distributed: there is nothing to tell
        except (OSError, ValueError) as error:
            self._note("flight recorder", str(error), rank)
            return ()

    def _ask(self, pid: int) -> bool:
        """Raise the request number on the board and wait for the beat thread's answer."""
        path = self.boards / protocol.BOARD.format(pid=pid)
        try:
            with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as board:
                (asked,) = protocol.REQUEST.unpack_from(board, protocol.REQUEST_AT)
                protocol.REQUEST.pack_into(board, protocol.REQUEST_AT, asked + 1)
                return _wait_for(lambda: protocol.BEAT.unpack_from(board, protocol.BEAT_AT)[1] > asked, _FLIGHT_LIMIT_S)
        except (OSError, ValueError):
            return False

    def _write(self, snapshot: RankSnapshot, raw: str, number: int) -> None:
        self.dumps.mkdir(exist_ok=True)
        (self.dumps / f"rank{snapshot.rank}.{number}.json").write_text(raw, errors="backslashreplace")
        text = "\n".join(_readable(snapshot)) + "\n"
        (self.dumps / f"rank{snapshot.rank}.{number}.txt").write_text(text, errors="backslashreplace")

    def _note(self, what: str, why: str, rank: int | None) -> None:
        trouble = Trouble(what=what, why=why[:500], rank=rank)
        if trouble not in self.trouble:
            self.trouble.append(trouble)


def leaf_line(snapshot: RankSnapshot, stack: Stack | None) -> int | None:
    """The line of the readable dump that shows the innermost frame of `stack`."""
    for number, line in enumerate(_readable(snapshot), start=1):
        if stack and line == _thread_line(stack):
            return number + 1
    return None


def py_spy(pid: int, options: list[str], failures: list[str]) -> tuple[tuple[Stack, ...], str]:
    """The stacks of a process, and the dump they were read from; a failure is appended to `failures`."""
    command = [py_spy_path(), "dump", "--json", *options, "--pid", str(pid)]
    source = " ".join(["py-spy", *options])
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PY_SPY_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        _unfreeze(pid)
        failures.append(f"{source}: {error}")
        return (), ""
    if done.returncode != 0:
        failures.append(f"{source}: {_last_line(done.stderr)}")
        return (), ""
    try:
        return parse_py_spy(done.stdout, source), done.stdout
    except ValueError as error:
        failures.append(f"{source}: {error}")
        return (), ""


def py_spy_path() -> str:
    """The one that was installed with us, else the one on PATH."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.exists() else shutil.which("py-spy") or "py-spy"


def _readable(snapshot: RankSnapshot) -> Iterator[str]:
    """The text a person reads first: the state, then every Python thread, innermost frame first."""
    process = snapshot.process
    yield f"rank {snapshot.rank}   pid {snapshot.pid}   {process.command if process else 'gone'}"
    if process:
        main = next((task for task in process.tasks if task.tid == snapshot.pid), None)
        where = f"{main.syscall or '?'} in {main.wchan or '?'}" if main else "?"
        yield f"state {process.state}   {where}   cpu {process.cpu_s:.2f} s   rss {process.rss_bytes >> 20} MiB"
    if snapshot.board and snapshot.board.newest:
        mark = snapshot.board.newest
        yield f"last mark {mark.kind} {mark.name}   step {mark.step}   at {mark.at_s:.2f} s"
    for stack in snapshot.stacks:
        yield ""
        yield _thread_line(stack)
        yield from (f"    {frame.function} ({frame.file}:{frame.line})" for frame in stack.frames)
    for collective in snapshot.collectives:
        if not collective.retired:
            yield f"pending {collective.op} #{collective.seq} group {collective.group} sizes {collective.sizes}"


def _thread_line(stack: Stack) -> str:
    return f"thread {stack.tid or '?'} {stack.thread}   {'active' if stack.active else 'idle'}   ({stack.source})"


def _unfreeze(pid: int) -> None:
    """A py-spy that was killed while it held the process stopped must not leave it so."""
    stat = procfs.read_stat(pid)
    if stat and stat.state == "t":
        os.kill(pid, signal.SIGCONT)


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no message"


def _wait_for(condition: Callable[[], bool], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
