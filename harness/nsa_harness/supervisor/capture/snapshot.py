"""Takes a snapshot of every rank: cheap sources first, each with its own limit, each failure recorded."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import takewhile
from pathlib import Path

from nsa_harness import protocol
from nsa_harness.core.evidence.evidence import Collective, RankSnapshot, Snapshot, Stack, StatusFile
from nsa_harness.core.evidence.flight import essential, parse_dump, parse_flight
from nsa_harness.core.evidence.host import Gpu, Process, Socket, Task, would_act
from nsa_harness.core.evidence.stacks import in_probe, is_poller, native_wanted, training_stack, user_frame
from nsa_harness.core.evidence.status_file import parse as parse_board
from nsa_harness.core.report import Trouble
from nsa_harness.core.source_code.loops import innermost_loop
from nsa_harness.supervisor.capture import procfs
from nsa_harness.supervisor.capture.node import CommandFailed, gpu_state
from nsa_harness.supervisor.capture.process_tree import ProcessTree, look_around
from nsa_harness.supervisor.capture.recorder import ask_flight, ask_own_flight, own_server, trigger, written
from nsa_harness.supervisor.capture.stacks import StackSources, wait_for
from nsa_harness.supervisor.storage.redaction import Redaction
from nsa_harness.supervisor.storage.rundir import write_document
from nsa_harness.supervisor.storage.sources import text_as_launched


def readable(snapshot: RankSnapshot) -> Iterator[str]:
    """The state and what the process waits on, then every Python thread, innermost frame first."""
    process = snapshot.process
    yield f"rank {snapshot.rank}   pid {snapshot.pid}   {process.command if process else 'gone'}"
    if process:
        yield from _state(process)
    if snapshot.board and snapshot.board.newest:
        mark = snapshot.board.newest
        yield f"last mark {mark.kind} {mark.name}   step {mark.step}   at {mark.at_s:.2f} s"
    for child in snapshot.children:
        yield f"child {child.pid}   {child.command}   state {child.state}   cpu {child.cpu_s:.2f} s"
    for stack in snapshot.stacks:
        yield ""
        state = "active" if stack.active else "idle"
        holds = ", holds the GIL" if stack.gil else ""
        yield f"thread {stack.tid or '?'} {stack.thread}   {state}{holds}   ({stack.source})"
        yield from (f"    {name}" for name in stack.native)
        shown = (frame for frame in stack.frames if not in_probe(frame.file))
        yield from (f"    {frame.function} ({frame.file}:{frame.line})" for frame in shown)
    for collective in snapshot.collectives:
        if not collective.retired:
            yield f"pending {collective.op} #{collective.seq} group {collective.group} sizes {collective.sizes}"


def _state(process: Process) -> Iterator[str]:
    main = next((task for task in process.tasks if task.tid == process.pid), None)
    where = f"{main.syscall or '?'} in {main.wchan or '?'}" if main else "?"
    yield f"state {process.state}   {where}   cpu {process.cpu_s:.2f} s   rss {process.rss_bytes >> 20} MiB"
    if process.traced_by is not None:
        yield f"held by the debugger {process.traced_by}"
    if process.frozen:
        yield "its control group is frozen"
    if acts := would_act(process):
        yield f"signals: {acts}"
    for task in process.tasks:
        if task.target or task.held_by:
            others = "" if task.held_by is None else f", held by {', '.join(map(str, task.held_by)) or 'nobody'}"
            yield f"task {task.tid} in {task.syscall} of {task.target or 'a child'}{others}"
    yield from (_socket(one) for one in process.sockets)


def _socket(one: Socket) -> str:
    owner = "of this run" if one.peer_rank is None else f"rank {one.peer_rank}"
    whose = f" ({owner})" if one.in_job else ""
    carried = "" if one.acked_bytes is None else f"   acknowledged {one.acked_bytes}   received {one.received_bytes}"
    queues = f"unacknowledged {one.unacked_bytes}   unread {one.unread_bytes}   retransmits {one.retransmits}"
    return f"socket {one.local} -> {one.peer}{whose}   {one.state}   {queues}{carried}"


_FLIGHT_LIMIT_S = 1.0
_BEATS_S = 2.0  # a beat thread that was last seen longer ago has no Python to run
_DYING_S = 0.1
_MAX_CHILDREN = 8  # of one rank, whose stacks are taken
_MAX_AT_ONCE = 32
_UNHURRIED = 8  # so many questions at once fit into the plain limits
_MOST_HURRIED = 3.0  # a question may stop the process it is about: not for longer than so many limits

_Recorded = tuple[tuple[Collective, ...], bool]  # and whether the beat thread was asked
_Threads = tuple[Stack, ...]
_Stacks = tuple[_Threads, str]  # and the dump they were read from


@dataclass(frozen=True, kw_only=True)
class Piped:
    """A recorder that was asked for by its pipe."""

    rank: int
    pipe: str | None  # None = the process offers none
    at_ns: int  # by the wall clock


@dataclass(frozen=True, kw_only=True)
class StackSampler:
    """What stays the same between the snapshots of one attempt."""

    origin_ns: int
    boards: Path
    dumps: Path
    redaction: Redaction = field(default_factory=Redaction)  # of what the dumps say
    trouble: list[Trouble] = field(default_factory=list)
    asked_bytes: dict[int, int] = field(default_factory=dict)  # by process, what our questions made it read and write
    stood: dict[int, Task] = field(default_factory=dict)  # by thread, the system call at the last look
    trained_in: dict[int, Stack] = field(default_factory=dict)  # by process, where its training thread stood last
    piped: dict[int, Piped] = field(default_factory=dict)  # by process, how its recorder was asked for
    servers: dict[int, Path | int | None] = field(default_factory=dict)  # by process, the job's own worker server

    def take(self, number: int, ranks: Mapping[int, int], *, written: bool = True, patient: bool = False) -> Snapshot:
        """Look at every rank (rank -> pid) at once, and leave the dumps for people unless told not to.

        `patient`: a rank whose Python runs is asked for its recorder where that costs it no memory, which takes up to a
        beat. The worker server has a thread for each core, at least eight, and each keeps the memory of the largest
        answer that it has given: 12 MB with the recorder's default size.
        """
        at_s = (time.monotonic_ns() - self.origin_ns) / 1e9
        scene = look_around(ranks, self.origin_ns, self.stood)
        for rank, failure in scene.failures:
            self._note("kernel", failure, rank)
        with ThreadPoolExecutor(max_workers=_MAX_AT_ONCE) as pool:
            gpus = pool.submit(self._gpus, scene)
            ways = {"written": written, "patient": patient}
            asked = [self._asked(pool, scene, rank, pid, **ways) for rank, pid in sorted(ranks.items())]
            seen = without_lone_recorders([received(number) for received in asked])
            return Snapshot(number=number, at_s=at_s, ranks=seen, gpus=gpus.result())

    def board(self, pid: int, newest_calls: int = protocol.CALLS) -> StatusFile | None:
        """The progress board of a process, or None where there is none (probe off, not Python, a foreign host)."""
        try:
            data = (self.boards / protocol.BOARD.format(pid=pid)).read_bytes()
            return parse_board(data, self.origin_ns, newest_calls)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._note("board", str(error), None)
            return None

    def _asked(
        self, pool: ThreadPoolExecutor, scene: ProcessTree, rank: int, pid: int, *, written: bool, patient: bool
    ) -> Callable[[int], RankSnapshot]:
        """Everything of one rank is asked at once; what is returned waits for the answers and puts them together."""
        process, board = scene.processes.get(rank), self.board(pid)
        children = scene.children.get(rank, ())
        patience = max(1.0, sum(1 for _ in scene.everyone) / _UNHURRIED, _hurried())
        server = self._own_server(process) if process and board is None else None
        own = pool.submit(self._stacks, rank, process, board, server, patience)
        below = {
            child.pid: pool.submit(self._child_stacks, rank, child, patience) for child in children[:_MAX_CHILDREN]
        }
        recorded = (
            pool.submit(self._flight, rank, pid, needed=written, patient=patient and self._beats(board))
            if board is not None
            else pool.submit(self._own_flight, rank, pid, server)
        )

        def received(number: int) -> RankSnapshot:
            stacks, raw = own.result()
            stacks = with_loops(stacks, process, self.origin_ns) if process else stacks
            collectives, by_beat = recorded.result()
            snapshot = RankSnapshot(
                rank=rank,
                pid=pid,
                process=process,
                children=children,
                stacks=stacks,
                child_stacks={child: found.result() for child, found in below.items()},
                board=board,
                collectives=collectives,
                asked_bytes=self.asked_bytes.get(pid, 0),
                proof=f"{self.dumps.name}/rank{rank}.{number}.txt" if written else None,
            )
            # Only what the process itself did for us costs it bytes: its own faulthandler, its own beat thread.
            if by_beat or not (stacks and stacks[0].source.startswith("py-spy")):
                self._count_bytes(snapshot)
            if written:
                self._write(snapshot, raw, number)
            return snapshot

        return received

    def _count_bytes(self, snapshot: RankSnapshot) -> None:
        """What the questions of this look made the process read and write, for the next look to take off."""
        process = snapshot.process
        if process and process.io_bytes is not None:
            now = procfs.io_bytes(process.pid) or process.io_bytes
            self.asked_bytes[process.pid] = snapshot.asked_bytes + now - process.io_bytes

    def _own_server(self, process: Process) -> Path | int | None:
        """Looked for once: a port that is no such server is not tried again."""
        if process.pid not in self.servers:
            environment = procfs.environment(process.pid)
            self.servers[process.pid] = own_server(process.pid, environment, process.sockets)
        return self.servers[process.pid]

    def _stacks(
        self, rank: int, process: Process | None, board: StatusFile | None, server: Path | int | None, patience: float
    ) -> _Stacks:
        if process is None or process.state in "ZX":
            return (), ""
        sources = StackSources(
            process=process, boards=self.boards, patience=patience, arguments=board is None, server=server
        )
        stacks, raw = sources.stacks()
        if not stacks and _left(process.pid):
            return (), ""
        if not stacks or not stacks[0].source.startswith("py-spy"):
            instead = f"; taken by {stacks[0].source} instead" if stacks else ""
            self._note("stacks", "; ".join(sources.failures) + instead, rank)
        known = len(sources.failures)
        stacks = self._with_native(sources, stacks, [mark.tid for mark in board.marks] if board else [])
        for failure in sources.failures[known:]:
            self._note("native stacks", failure, rank)
        return stacks, raw

    def _with_native(self, sources: StackSources, stacks: tuple[Stack, ...], marking: Sequence[int]) -> _Threads:
        """Native frames are asked for once a line, since that stops the process; they hold while it stands there."""
        process = sources.process
        last = self.trained_in.get(process.pid)
        now = training_stack(stacks, process.pid, marking)
        if last and now and last.native and last.frames == now.frames:
            stacks = tuple(replace(one, native=last.native) if one is now else one for one in stacks)
        elif native_wanted(stacks, process, marking, last.frames[0] if last and last.frames else None):
            stacks = sources.native(stacks)
        now = training_stack(stacks, process.pid, marking)
        if now is not None:
            self.trained_in[process.pid] = now
        return stacks

    def _child_stacks(self, rank: int, child: Process, patience: float) -> tuple[Stack, ...]:
        if "python" not in child.command or child.state in "ZX":
            return ()
        sources = StackSources(process=child, boards=self.boards, patience=patience)
        stacks, _ = sources.stacks()
        if not stacks and not _left(child.pid):
            self._note(f"stacks of child {child.pid}", "; ".join(sources.failures), rank)
        return stacks

    def _gpus(self, scene: ProcessTree) -> tuple[Gpu, ...]:
        if not any(end.startswith("/dev/nvidia") for process in scene.everyone for end in process.holds):
            return ()
        try:
            return gpu_state()
        except (CommandFailed, ValueError) as error:
            self._note("gpus", str(error), None)
            return ()

    # The flight recorder.

    def _own_flight(self, rank: int, pid: int, server: Path | int | None) -> _Recorded:
        """Of a rank without the probe, by what its program offers; what its server says is written down as ours is."""
        if server is None:
            return self._piped_flight(rank, pid), False
        try:
            text, recorded = ask_own_flight(server)
        except (OSError, ValueError) as error:
            self._note("flight recorder", f"worker server: {error}", rank)
            return (), False
        write_document(self._flight_file(pid), text)
        return essential(recorded), False

    def _piped_flight(self, rank: int, pid: int) -> tuple[Collective, ...]:
        """By NCCL's pipe: the first look asks, the next one reads, so that nobody waits for the first word."""
        environment = procfs.environment(pid)
        asked = self.piped.get(pid)
        try:
            if asked is None:
                now_ns = time.time_ns()
                self.piped[pid] = Piped(rank=rank, pipe=trigger(pid, rank, environment), at_ns=now_ns)
                return ()
            if asked.pipe is None:
                return ()
            return essential(parse_dump(written(pid, rank, environment, asked.at_ns, _FLIGHT_LIMIT_S)).collectives)
        except (OSError, ValueError) as error:
            self.piped.setdefault(pid, Piped(rank=rank, pipe=None, at_ns=0))
            self._note("flight recorder", f"NCCL's pipe: {error}", rank)
            return ()

    def _flight(self, rank: int, pid: int, *, needed: bool, patient: bool) -> _Recorded:
        """By the worker server, which answers while Python is stuck there, else by the beat thread, which is told.

        `patient`: the other way round. The answer lies in the boards directory in either case: after the run it is read
        from there. Where nothing is proven by it, a rank that begins or ends and has no time to answer is no trouble.
        """
        ways = (self._by_beat, self._by_server) if patient else (self._by_server, self._by_beat)
        refusals = tuple(takewhile(bool, (ask(pid) for ask in ways)))
        by_beat = patient or bool(refusals)
        if len(refusals) == len(ways):
            if needed:
                self._note("flight recorder", "; ".join(filter(None, refusals)), rank)
            return (), by_beat
        try:
            return essential(parse_flight(self._flight_file(pid).read_text(errors="replace"))), by_beat
        except FileNotFoundError:
            return (), by_beat  # the process has not imported torch.distributed: there is nothing to tell
        except (OSError, ValueError) as error:
            self._note("flight recorder", str(error), rank)
            return (), by_beat

    def _beats(self, board: StatusFile) -> bool:
        now_s = (time.monotonic_ns() - self.origin_ns) / 1e9
        return board.beat_s is not None and now_s - board.beat_s < _BEATS_S

    def _by_server(self, pid: int) -> str | None:
        """None when the answer was written, else why there is none."""
        try:
            answer = ask_flight(self.boards, pid, _FLIGHT_LIMIT_S)
            parse_flight(answer)
        except FileNotFoundError:
            return "no worker server in the process"
        except (OSError, ValueError) as error:
            return f"worker server: {error}"
        write_document(self._flight_file(pid), answer)
        return None

    def _flight_file(self, pid: int) -> Path:
        return self.boards / protocol.FLIGHT.format(pid=pid)

    def _by_beat(self, pid: int) -> str | None:
        """Raise the request number on the board and wait for the answer. None when it was written."""
        path = self.boards / protocol.BOARD.format(pid=pid)
        with suppress(OSError, ValueError), path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as board:
            (asked,) = protocol.REQUEST.unpack_from(board, protocol.REQUEST_AT)
            protocol.REQUEST.pack_into(board, protocol.REQUEST_AT, asked + 1)
            if wait_for(lambda: protocol.BEAT.unpack_from(board, protocol.BEAT_AT)[1] > asked, _FLIGHT_LIMIT_S):
                return None
        return f"no answer of the beat thread within {_FLIGHT_LIMIT_S:g} s"

    def _write(self, snapshot: RankSnapshot, raw: str, number: int) -> None:
        """For people; the judge reads the snapshot itself."""
        stem, clean = f"rank{snapshot.rank}.{number}", self.redaction
        text = "\n".join(readable(snapshot)) + "\n"
        try:
            self.dumps.mkdir(exist_ok=True)
            if raw:  # no way to the stacks gave an answer: an empty file would look like one
                (self.dumps / f"{stem}.json").write_text(clean.json(raw), errors="backslashreplace")
            (self.dumps / f"{stem}.txt").write_text(clean.text(text), errors="backslashreplace")
        except OSError as error:
            self._note("dumps", str(error), snapshot.rank)

    def _note(self, what: str, why: str, rank: int | None) -> None:
        trouble = Trouble(what=what, why=why[:500], rank=rank)
        if trouble not in self.trouble:
            self.trouble.append(trouble)


def without_lone_recorders(seen: Sequence[RankSnapshot]) -> tuple[RankSnapshot, ...]:
    """Of ranks without a board all recorders or none: one that was not read would look as if it had not come."""
    blind = [rank for rank in seen if rank.board is None and rank.process is not None]
    if all(rank.collectives for rank in blind):
        return tuple(seen)
    return tuple(replace(rank, collectives=()) if rank in blind else rank for rank in seen)


def _hurried() -> float:
    """How much longer a question takes where more wants to run than there are cores."""
    return min(_MOST_HURRIED, os.getloadavg()[0] / (os.cpu_count() or 1))


def _left(pid: int) -> bool:
    """The process has ended, which it may do while it is asked; one that was killed takes a moment to be gone."""
    return wait_for(lambda: not procfs.alive(pid), _DYING_S)


def with_loops(stacks: Sequence[Stack], process: Process, origin_ns: int) -> tuple[Stack, ...]:
    """With the loop, from its file, of each thread that sleeps; none of a file that was written after the launch."""
    launched_s = time.time() - (time.monotonic_ns() - origin_ns) / 1e9
    asleep = {task.tid for task in process.tasks if task.wakes_at_s is not None}
    return tuple(
        replace(one, loop=_loop(user.file, user.line, launched_s // 1 + 1, process.pid))
        if one.tid in asleep and not is_poller(one) and (user := user_frame(one.frames))
        else one
        for one in stacks
    )


@lru_cache(maxsize=256)
def _loop(file: str, line: int, launched_s: float, pid: int) -> str:
    return innermost_loop(text_as_launched(file, launched_s, pid), line)
