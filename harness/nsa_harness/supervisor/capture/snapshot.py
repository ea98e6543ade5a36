"""Takes a snapshot of every rank: cheap sources first, each with its own limit; every failure is recorded."""

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
from nsa_harness.core.evidence.flight import essential_collectives, parse_dump, parse_flight
from nsa_harness.core.evidence.host import Gpu, Process, Socket, Task, sigterm_reaction
from nsa_harness.core.evidence.stacks import (
    in_probe,
    is_poller,
    stack_that_needs_native_frames,
    training_stack,
    user_frame,
)
from nsa_harness.core.evidence.status_file import parse as parse_board
from nsa_harness.core.report import Trouble
from nsa_harness.core.source_code.loops import innermost_loop
from nsa_harness.supervisor.capture import procfs
from nsa_harness.supervisor.capture.node import CommandFailed, gpu_state
from nsa_harness.supervisor.capture.process_tree import ProcessTree, read_process_tree
from nsa_harness.supervisor.capture.recorder import (
    ask_flight,
    ask_worker_server,
    await_dump,
    find_worker_server,
    request_dump,
)
from nsa_harness.supervisor.capture.stacks import StackSources, wait_for
from nsa_harness.supervisor.storage.redaction import Redaction
from nsa_harness.supervisor.storage.rundir import write_document
from nsa_harness.supervisor.storage.sources import text_as_launched


def readable(snapshot: RankSnapshot) -> Iterator[str]:
    """Yield a rank as text: its state and what it waits for, then each Python thread, innermost frame first."""
    process = snapshot.process
    yield f"rank {snapshot.rank}   pid {snapshot.pid}   {process.command if process else 'gone'}"
    if process:
        yield from _state(process)
    if snapshot.status_file and snapshot.status_file.latest_event:
        mark = snapshot.status_file.latest_event
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
    if process.is_frozen:
        yield "its control group is frozen"
    if acts := sigterm_reaction(process):
        yield f"signals: {acts}"
    for task in process.tasks:
        if task.target or task.held_by:
            others = "" if task.held_by is None else f", held by {', '.join(map(str, task.held_by)) or 'nobody'}"
            yield f"task {task.tid} in {task.syscall} of {task.target or 'a child'}{others}"
    yield from (_socket(socket) for socket in process.sockets)


def _socket(socket: Socket) -> str:
    owner = "of this run" if socket.peer_rank is None else f"rank {socket.peer_rank}"
    owner_text = f" ({owner})" if socket.in_job else ""
    carried = (
        "" if socket.acked_bytes is None else f"   acknowledged {socket.acked_bytes}   received {socket.received_bytes}"
    )
    queues = f"unacknowledged {socket.unacked_bytes}   unread {socket.unread_bytes}   retransmits {socket.retransmits}"
    return f"socket {socket.local} -> {socket.peer}{owner_text}   {socket.state}   {queues}{carried}"


_FLIGHT_LIMIT_S = 1.0
_HEARTBEAT_S = 2.0  # if the last heartbeat is older, Python does not run in the rank
_DYING_S = 0.1
_MAX_CHILDREN = 8  # child stacks per rank
_MAX_AT_ONCE = 32
_UNSLOWED = 8  # queries at once that fit into the plain limits
_MAX_LOAD_FACTOR = 3.0  # maximal factor on limits: a query may stop its process that long

_Recorded = tuple[tuple[Collective, ...], bool]  # and whether the heartbeat thread was asked
_Threads = tuple[Stack, ...]
_Stacks = tuple[_Threads, str]  # and the dump that they were read from


@dataclass(frozen=True, kw_only=True)
class Piped:
    """A recorder that was requested through its pipe."""

    rank: int
    pipe: str | None  # None = the process has none
    at_ns: int  # wall clock


@dataclass(frozen=True, kw_only=True)
class StackSampler:
    """Takes the snapshots of one attempt, and remembers what later snapshots need from earlier ones."""

    origin_ns: int
    boards: Path
    dumps: Path
    redaction: Redaction = field(default_factory=Redaction)  # removes secrets from the dumps
    trouble: list[Trouble] = field(default_factory=list)
    # Each of these has process ids as keys, `last_tasks` thread ids.
    asked_bytes: dict[int, int] = field(default_factory=dict)  # bytes read and written because of queries
    last_tasks: dict[int, Task] = field(default_factory=dict)  # the system call at the last snapshot
    trained_in: dict[int, Stack] = field(default_factory=dict)  # the training thread's last stack
    piped: dict[int, Piped] = field(default_factory=dict)  # how the recorder was requested
    servers: dict[int, Path | int | None] = field(default_factory=dict)  # the job's own worker server

    def take(self, number: int, ranks: Mapping[int, int], *, written: bool = True, patient: bool = False) -> Snapshot:
        """Take a snapshot of all ranks (rank -> pid) at once. `written`: also write human-readable dumps.

        `patient`: request the flight recorder from a rank's heartbeat thread, which takes up to one heartbeat but no
        memory. The worker server has a thread per core, at least eight, and each thread retains the memory of its
        largest answer: 12 MB with the recorder's default size.
        """
        at_s = (time.monotonic_ns() - self.origin_ns) / 1e9
        tree = read_process_tree(ranks, self.origin_ns, self.last_tasks)
        for rank, failure in tree.failures:
            self._note("kernel", failure, rank)
        with ThreadPoolExecutor(max_workers=_MAX_AT_ONCE) as pool:
            gpus = pool.submit(self._gpus, tree)
            ways = {"written": written, "patient": patient}
            queries = [self._query_rank(pool, tree, rank, pid, **ways) for rank, pid in sorted(ranks.items())]
            seen = without_lone_recorders([combine(number) for combine in queries])
            return Snapshot(number=number, at_s=at_s, ranks=seen, gpus=gpus.result())

    def board(self, pid: int, newest_calls: int = protocol.CALLS) -> StatusFile | None:
        """Return the status file of a process, or None without one (probe off, not Python, another host)."""
        try:
            data = (self.boards / protocol.STATUS_FILE.format(pid=pid)).read_bytes()
            return parse_board(data, self.origin_ns, newest_calls)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._note("board", str(error), None)
            return None

    def _query_rank(
        self, pool: ThreadPoolExecutor, tree: ProcessTree, rank: int, pid: int, *, written: bool, patient: bool
    ) -> Callable[[int], RankSnapshot]:
        """Start all queries about one rank, and return a function that waits for the answers and combines them."""
        process, board = tree.processes.get(rank), self.board(pid)
        children = tree.children.get(rank, ())
        patience = max(1.0, sum(1 for _ in tree.everyone) / _UNSLOWED, _load_factor())
        server = self._worker_server(process) if process and board is None else None
        own = pool.submit(self._stacks, rank, process, board, server, patience)
        below = {
            child.pid: pool.submit(self._child_stacks, rank, child, patience) for child in children[:_MAX_CHILDREN]
        }
        recorded = (
            pool.submit(self._flight, rank, pid, needed=written, patient=patient and self._beats(board))
            if board is not None
            else pool.submit(self._flight_without_probe, rank, pid, server)
        )

        def combine(number: int) -> RankSnapshot:
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
                status_file=board,
                collectives=collectives,
                query_bytes=self.asked_bytes.get(pid, 0),
                proof=f"{self.dumps.name}/rank{rank}.{number}.txt" if written else None,
            )
            # Only queries that the process answers itself make it read or write: by faulthandler or heartbeat thread.
            if by_beat or not (stacks and stacks[0].source.startswith("py-spy")):
                self._count_bytes(snapshot)
            if written:
                self._write(snapshot, raw, number)
            return snapshot

        return combine

    def _count_bytes(self, snapshot: RankSnapshot) -> None:
        """Note the bytes that the process read and wrote because of this snapshot, which the next one subtracts."""
        process = snapshot.process
        if process and process.io_bytes is not None:
            now = procfs.io_bytes(process.pid) or process.io_bytes
            self.asked_bytes[process.pid] = snapshot.query_bytes + now - process.io_bytes

    def _worker_server(self, process: Process) -> Path | int | None:
        """Return the worker server that the job itself started in this process. Each process is searched only once."""
        if process.pid not in self.servers:
            environment = procfs.environment(process.pid)
            self.servers[process.pid] = find_worker_server(process.pid, environment, process.sockets)
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
        if not stacks and _has_exited(process.pid):
            return (), ""
        if not stacks or not stacks[0].source.startswith("py-spy"):
            instead = f"; taken by {stacks[0].source} instead" if stacks else ""
            self._note("stacks", "; ".join(sources.failures) + instead, rank)
        known = len(sources.failures)
        stacks = self._with_native(sources, stacks, [mark.tid for mark in board.events] if board else [])
        for failure in sources.failures[known:]:
            self._note("native stacks", failure, rank)
        return stacks, raw

    def _with_native(self, sources: StackSources, stacks: tuple[Stack, ...], marking: Sequence[int]) -> _Threads:
        """Read native frames once per line, since that stops the process. They are valid while it stays in the line."""
        process = sources.process
        last = self.trained_in.get(process.pid)
        now = training_stack(stacks, process.pid, marking)
        if last and now and last.native and last.frames == now.frames:
            stacks = tuple(replace(stack, native=last.native) if stack is now else stack for stack in stacks)
        elif stack_that_needs_native_frames(stacks, process, marking, last.frames[0] if last and last.frames else None):
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
        if not stacks and not _has_exited(child.pid):
            self._note(f"stacks of child {child.pid}", "; ".join(sources.failures), rank)
        return stacks

    def _gpus(self, tree: ProcessTree) -> tuple[Gpu, ...]:
        if not any(end.startswith("/dev/nvidia") for process in tree.everyone for end in process.open_ends):
            return ()
        try:
            return gpu_state()
        except (CommandFailed, ValueError) as error:
            self._note("gpus", str(error), None)
            return ()

    # The flight recorder.

    def _flight_without_probe(self, rank: int, pid: int, server: Path | int | None) -> _Recorded:
        """Return the recorder of a rank without the probe: from the job's worker server, else from NCCL's pipe.

        The server's answer is stored.
        """
        if server is None:
            return self._piped_flight(rank, pid), False
        try:
            text, recorded = ask_worker_server(server)
        except (OSError, ValueError) as error:
            self._note("flight recorder", f"worker server: {error}", rank)
            return (), False
        write_document(self._flight_file(pid), text)
        return essential_collectives(recorded), False

    def _piped_flight(self, rank: int, pid: int) -> tuple[Collective, ...]:
        """Return the recorder from NCCL's pipe: the first snapshot requests it, and the next one reads it."""
        environment = procfs.environment(pid)
        request = self.piped.get(pid)
        try:
            if request is None:
                now_ns = time.time_ns()
                self.piped[pid] = Piped(rank=rank, pipe=request_dump(pid, rank, environment), at_ns=now_ns)
                return ()
            if request.pipe is None:
                return ()
            return essential_collectives(
                parse_dump(await_dump(pid, rank, environment, request.at_ns, _FLIGHT_LIMIT_S)).collectives
            )
        except (OSError, ValueError) as error:
            self.piped.setdefault(pid, Piped(rank=rank, pipe=None, at_ns=0))
            self._note("flight recorder", f"NCCL's pipe: {error}", rank)
            return ()

    def _flight(self, rank: int, pid: int, *, needed: bool, patient: bool) -> _Recorded:
        """Return the recorder from the worker server, which answers while Python is stuck, else from the heartbeat.

        `patient`: try the heartbeat first. Either answer is stored in the probe directory. A rank that starts or exits
        does not answer, which counts as trouble only if the recorder is `needed` for a proof.
        """
        sources = (
            (self._from_heartbeat, self._from_worker_server)
            if patient
            else (self._from_worker_server, self._from_heartbeat)
        )
        refusals = tuple(takewhile(bool, (ask(pid) for ask in sources)))
        by_beat = patient or bool(refusals)
        if len(refusals) == len(sources):
            if needed:
                self._note("flight recorder", "; ".join(filter(None, refusals)), rank)
            return (), by_beat
        try:
            return essential_collectives(parse_flight(self._flight_file(pid).read_text(errors="replace"))), by_beat
        except FileNotFoundError:
            return (), by_beat  # the process has not imported torch.distributed
        except (OSError, ValueError) as error:
            self._note("flight recorder", str(error), rank)
            return (), by_beat

    def _beats(self, board: StatusFile) -> bool:
        now_s = (time.monotonic_ns() - self.origin_ns) / 1e9
        return board.beat_s is not None and now_s - board.beat_s < _HEARTBEAT_S

    def _from_worker_server(self, pid: int) -> str | None:
        """Store the worker server's answer. Return None, or the reason why there is no answer."""
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

    def _from_heartbeat(self, pid: int) -> str | None:
        """Request the recorder through the status file, and wait until the heartbeat thread has written it.

        Return None, or the reason why there is no answer.
        """
        path = self.boards / protocol.STATUS_FILE.format(pid=pid)
        with suppress(OSError, ValueError), path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as board:
            (request,) = protocol.REQUEST.unpack_from(board, protocol.REQUEST_AT)
            protocol.REQUEST.pack_into(board, protocol.REQUEST_AT, request + 1)
            if wait_for(
                lambda: protocol.HEARTBEAT.unpack_from(board, protocol.HEARTBEAT_AT)[1] > request, _FLIGHT_LIMIT_S
            ):
                return None
        return f"no answer of the beat thread within {_FLIGHT_LIMIT_S:g} s"

    def _write(self, snapshot: RankSnapshot, raw: str, number: int) -> None:
        """Write the human-readable dumps. The judge reads the snapshot itself."""
        stem, clean = f"rank{snapshot.rank}.{number}", self.redaction
        text = "\n".join(readable(snapshot)) + "\n"
        try:
            self.dumps.mkdir(exist_ok=True)
            if raw:  # without an answer, an empty file would look like one
                (self.dumps / f"{stem}.json").write_text(clean.json(raw), errors="backslashreplace")
            (self.dumps / f"{stem}.txt").write_text(clean.text(text), errors="backslashreplace")
        except OSError as error:
            self._note("dumps", str(error), snapshot.rank)

    def _note(self, what: str, why: str, rank: int | None) -> None:
        trouble = Trouble(what=what, why=why[:500], rank=rank)
        if trouble not in self.trouble:
            self.trouble.append(trouble)


def without_lone_recorders(seen: Sequence[RankSnapshot]) -> tuple[RankSnapshot, ...]:
    """Remove the recorders of ranks without a status file unless every such rank has one.

    Next to the recorders of other ranks, a recorder that could not be read would look like skipped calls.
    """
    blind = [rank for rank in seen if rank.status_file is None and rank.process is not None]
    if all(rank.collectives for rank in blind):
        return tuple(seen)
    return tuple(replace(rank, collectives=()) if rank in blind else rank for rank in seen)


def _load_factor() -> float:
    """Return how much longer a query takes on a machine with more running threads than cores."""
    return min(_MAX_LOAD_FACTOR, os.getloadavg()[0] / (os.cpu_count() or 1))


def _has_exited(pid: int) -> bool:
    """Whether the process has exited during the query. A killed process takes a moment to disappear."""
    return wait_for(lambda: not procfs.alive(pid), _DYING_S)


def with_loops(stacks: Sequence[Stack], process: Process, origin_ns: int) -> tuple[Stack, ...]:
    """Add to each sleeping thread the loop around its line, from files that have not changed since the launch."""
    launched_s = time.time() - (time.monotonic_ns() - origin_ns) / 1e9
    asleep = {task.tid for task in process.tasks if task.wakes_at_s is not None}
    return tuple(
        replace(stack, loop=_loop(user.file, user.line, launched_s // 1 + 1, process.pid))
        if stack.tid in asleep and not is_poller(stack) and (user := user_frame(stack.frames))
        else stack
        for stack in stacks
    )


@lru_cache(maxsize=256)
def _loop(file: str, line: int, launched_s: float, pid: int) -> str:
    return innermost_loop(text_as_launched(file, launched_s, pid), line)
