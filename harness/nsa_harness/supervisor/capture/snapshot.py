"""Takes snapshots of all ranks: kernel state, stacks, status files and flight recorders."""

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
from nsa_harness.core.evidence.flight import drop_incomplete_recorders, essential_collectives, parse_dump, parse_flight
from nsa_harness.core.evidence.host import (
    Gpu,
    NcclCommunicator,
    Process,
    Socket,
    Task,
    sigterm_reaction,
    with_gpu_errors,
)
from nsa_harness.core.evidence.nccl_ras import parse_ras, with_launch_counts
from nsa_harness.core.evidence.stacks import (
    UNREAD_NATIVE,
    in_probe,
    is_poller,
    stacks_that_need_native_frames,
    training_stack,
    user_frame,
)
from nsa_harness.core.evidence.status_file import parse as parse_board
from nsa_harness.core.report import Trouble
from nsa_harness.core.source_code.loops import innermost_loop
from nsa_harness.supervisor.capture import procfs
from nsa_harness.supervisor.capture.node import CommandFailed, gpu_errors, gpu_state
from nsa_harness.supervisor.capture.process_tree import ProcessTree, read_process_tree
from nsa_harness.supervisor.capture.recorder import (
    await_dump,
    find_own_server,
    find_ras,
    query_flight_recorder,
    query_own_server,
    query_ras,
    request_dump,
)
from nsa_harness.supervisor.capture.stacks import StackSources, wait_for
from nsa_harness.supervisor.storage.redaction import Redaction
from nsa_harness.supervisor.storage.rundir import write_document
from nsa_harness.supervisor.storage.sources import text_as_launched


def snapshot_text(snapshot: RankSnapshot) -> Iterator[str]:
    """Yield the lines of a readable text about one rank: its state, what it waits for, and its Python stacks."""
    process = snapshot.process
    yield f"rank {snapshot.rank}   pid {snapshot.pid}   {process.command if process else 'gone'}"
    if process:
        yield from _state_lines(process)
    if snapshot.status_file and snapshot.status_file.latest_event:
        event = snapshot.status_file.latest_event
        yield f"last progress event {event.kind} {event.name}   step {event.step}   at {event.at_s:.2f} s"
    for child in snapshot.children:
        yield f"child {child.pid}   {child.command}   state {child.state}   cpu {child.cpu_s:.2f} s"
    for stack in snapshot.stacks:
        yield ""
        state = "active" if stack.active else "idle"
        gil = ", holds the GIL" if stack.gil else ""
        yield f"thread {stack.tid or '?'} {stack.thread}   {state}{gil}   ({stack.source})"
        yield from (f"    {name}" for name in stack.native)
        frames = (frame for frame in stack.frames if not in_probe(frame.file))
        yield from (f"    {frame.function} ({frame.file}:{frame.line})" for frame in frames)
    for collective in snapshot.collectives:
        if not collective.retired:
            yield f"pending {collective.op} #{collective.seq} group {collective.group} sizes {collective.sizes}"


def _state_lines(process: Process) -> Iterator[str]:
    main = next((task for task in process.tasks if task.tid == process.pid), None)
    where = f"{main.syscall or '?'} in {main.wchan or '?'}" if main else "?"
    yield f"state {process.state}   {where}   cpu {process.cpu_s:.2f} s   rss {process.rss_bytes >> 20} MiB"
    if process.traced_by is not None:
        yield f"traced by the debugger {process.traced_by}"
    if process.is_frozen:
        yield "its control group is frozen"
    if reaction := sigterm_reaction(process):
        yield f"signals: {reaction}"
    for task in process.tasks:
        if task.target or task.held_by:
            others = "" if task.held_by is None else f", held by {', '.join(map(str, task.held_by)) or 'no process'}"
            yield f"task {task.tid} in {task.syscall} of {task.target or 'a child'}{others}"
    yield from (_socket_line(socket) for socket in process.sockets)


def _socket_line(socket: Socket) -> str:
    owner = "of this run" if socket.peer_rank is None else f"rank {socket.peer_rank}"
    owner_text = f" ({owner})" if socket.in_job else ""
    traffic = (
        "" if socket.acked_bytes is None else f"   acknowledged {socket.acked_bytes}   received {socket.received_bytes}"
    )
    queues = f"unacknowledged {socket.unacked_bytes}   unread {socket.unread_bytes}   retransmits {socket.retransmits}"
    return f"socket {socket.local} -> {socket.peer}{owner_text}   {socket.state}   {queues}{traffic}"


_FLIGHT_LIMIT_S = 1.0
_HEARTBEAT_S = 2.0  # if the last heartbeat is older, no Python runs in the rank
_EXIT_S = 0.1
_MAX_CHILDREN = 8  # children per rank whose stacks are read
_MAX_PARALLEL_QUERIES = 32
_QUERIES_AT_FULL_SPEED = 8  # with more parallel queries, their time limits are extended
_MAX_LOAD_FACTOR = 3.0  # the machine's load extends time limits at most by this factor: a query may stop its process

_FlightResult = tuple[tuple[Collective, ...], bool]  # the collectives, and whether the heartbeat thread was used
_Threads = tuple[Stack, ...]
_StackResult = tuple[_Threads, str]  # the stacks, and the dump from which they were read


@dataclass(frozen=True, kw_only=True)
class PipeRequest:
    """A request to NCCL, sent through a pipe, to dump a rank's flight recorder."""

    rank: int
    pipe: str | None  # path of the pipe; None = the process has no pipe
    at_ns: int  # time of the request, on the wall clock


@dataclass(frozen=True, kw_only=True)
class StackSampler:
    """A sampler that takes snapshots of the ranks, including their stacks, during one attempt to run a program."""

    origin_ns: int
    probe_dir: Path
    dumps: Path
    redaction: Redaction = field(default_factory=Redaction)  # removes secrets from the dumps
    trouble: list[Trouble] = field(default_factory=list)
    query_bytes: dict[int, int] = field(default_factory=dict)  # pid -> bytes read and written because of queries
    last_tasks: dict[int, Task] = field(default_factory=dict)  # thread id -> the thread at the last snapshot
    last_stacks: dict[int, tuple[Stack, ...]] = field(default_factory=dict)  # pid -> stacks of the last snapshot
    pipe_requests: dict[int, PipeRequest] = field(default_factory=dict)  # pid -> request for its recorder
    last_counts: dict[int, tuple[int, ...]] = field(default_factory=dict)  # pid -> its progress at the last snapshot
    servers: dict[int, Path | int | None] = field(default_factory=dict)  # pid -> the job's own worker server in it
    last_communicators: list[NcclCommunicator] = field(default_factory=list)  # NCCL's last answer

    def take(
        self, number: int, ranks: Mapping[int, int], *, writes_dumps: bool = True, prefers_heartbeat: bool = False
    ) -> Snapshot:
        """Take a snapshot of all ranks in parallel. `ranks` maps each rank to its pid.

        `writes_dumps`: also write human-readable dumps. `prefers_heartbeat`: request the flight recorder from a rank's
        heartbeat thread first. This takes up to one heartbeat, but no memory. The worker server has one thread per
        core, at least eight, and each thread retains the memory of its largest response: 12 MB with the recorder's
        default size.
        """
        at_s = (time.monotonic_ns() - self.origin_ns) / 1e9
        tree = read_process_tree(ranks, self.origin_ns, self.last_tasks)
        for rank, failure in tree.failures:
            self._note("kernel", failure, rank)
        with ThreadPoolExecutor(max_workers=_MAX_PARALLEL_QUERIES) as pool:
            gpus, nccl = pool.submit(self._gpus, tree), pool.submit(self._communicators, tree)
            options = {"writes_dumps": writes_dumps, "prefers_heartbeat": prefers_heartbeat}
            queries = [self._query_rank(pool, tree, rank, pid, **options) for rank, pid in sorted(ranks.items())]
            snapshots = drop_incomplete_recorders([combine(number) for combine in queries])
            before, after = tuple(self.last_communicators), nccl.result()
            self.last_communicators[:] = after
            snapshots = with_launch_counts(snapshots, before, after, time.time_ns())
            return Snapshot(number=number, at_s=at_s, ranks=snapshots, gpus=gpus.result(), communicators=after)

    def read_status_file(self, pid: int, latest_calls: int = protocol.CALLS) -> StatusFile | None:
        """Return the status file of a process with its latest `latest_calls` calls, or None if it has none."""
        try:
            data = (self.probe_dir / protocol.STATUS_FILE.format(pid=pid)).read_bytes()
            return parse_board(data, self.origin_ns, latest_calls)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._note("status file", str(error), None)
            return None

    def _query_rank(
        self,
        pool: ThreadPoolExecutor,
        tree: ProcessTree,
        rank: int,
        pid: int,
        *,
        writes_dumps: bool,
        prefers_heartbeat: bool,
    ) -> Callable[[int], RankSnapshot]:
        """Start all queries about one rank. Return a function that waits for them and returns the snapshot."""
        process, status_file = tree.processes.get(rank), self.read_status_file(pid)
        children = tree.children.get(rank, ())
        limit_factor = max(1.0, sum(1 for _ in tree.all_processes) / _QUERIES_AT_FULL_SPEED, _load_factor())
        server = self._worker_server(process) if process and status_file is None else None
        stack_query = pool.submit(self._stacks, rank, process, status_file, server, limit_factor)
        child_queries = {
            child.pid: pool.submit(self._child_stacks, rank, child, limit_factor) for child in children[:_MAX_CHILDREN]
        }
        has_moved = self._has_moved(pid, status_file)
        if status_file is None:
            flight_query = pool.submit(self._flight_without_probe, rank, pid, server)
        elif has_moved and not writes_dumps:
            flight_query = pool.submit(lambda: ((), False))
        else:
            flight_query = pool.submit(
                self._flight,
                rank,
                pid,
                is_needed=writes_dumps,
                prefers_heartbeat=prefers_heartbeat and self._has_heartbeat(status_file),
            )

        def combine(number: int) -> RankSnapshot:
            stacks, raw = stack_query.result()
            stacks = with_polling_loops(stacks, process, self.origin_ns) if process else stacks
            collectives, used_heartbeat = flight_query.result()
            snapshot = RankSnapshot(
                rank=rank,
                pid=pid,
                process=process,
                children=children,
                stacks=stacks,
                child_stacks={child: child_stacks.result() for child, child_stacks in child_queries.items()},
                status_file=status_file,
                collectives=collectives,
                query_bytes=self.query_bytes.get(pid, 0),
                proof=f"{self.dumps.name}/rank{rank}.{number}.txt" if writes_dumps else None,
            )
            # Only faulthandler and the heartbeat thread make the process itself read or write.
            by_py_spy = bool(stacks) and stacks[0].source.startswith("py-spy")
            if used_heartbeat or not by_py_spy:
                self._count_bytes(snapshot, in_main_thread=not by_py_spy)
            if writes_dumps:
                self._write(snapshot, raw, number)
            return snapshot

        return combine

    def _count_bytes(self, snapshot: RankSnapshot, *, in_main_thread: bool) -> None:
        """Record the number of bytes that the process read and wrote only because this snapshot was taken.

        `in_main_thread`: the main thread may have written them, as faulthandler does. Otherwise its bytes are the
        program's own, such as data that arrived while the snapshot was taken.
        """
        process = snapshot.process
        if process and process.io_bytes is not None:
            moved_bytes = (procfs.io_bytes(process.pid) or process.io_bytes) - process.io_bytes
            before = next((task.io_bytes for task in process.tasks if task.tid == process.pid), None)
            after = procfs.task_io_bytes(process.pid, process.pid)
            if not in_main_thread and before is not None and after is not None:
                moved_bytes -= after - before
            self.query_bytes[process.pid] = snapshot.query_bytes + moved_bytes

    def _worker_server(self, process: Process) -> Path | int | None:
        if process.pid not in self.servers:
            environment = procfs.environment(process.pid)
            self.servers[process.pid] = find_own_server(process.pid, environment, process.sockets)
        return self.servers[process.pid]

    def _stacks(
        self,
        rank: int,
        process: Process | None,
        status_file: StatusFile | None,
        server: Path | int | None,
        limit_factor: float,
    ) -> _StackResult:
        if process is None or process.state in "ZX":
            return (), ""
        sources = StackSources(
            process=process,
            probe_dir=self.probe_dir,
            limit_factor=limit_factor,
            with_arguments=status_file is None,
            server=server,
        )
        stacks, raw = sources.stacks()
        if not stacks and _has_exited(process.pid):
            return (), ""
        if not stacks or not stacks[0].source.startswith("py-spy"):
            substitute = f"; read with {stacks[0].source} instead" if stacks else ""
            self._note("stacks", "; ".join(sources.failures) + substitute, rank)
        failure_count = len(sources.failures)
        stacks = self._add_native_frames(sources, stacks, status_file)
        for failure in sources.failures[failure_count:]:
            self._note("native stacks", failure, rank)
        return stacks, raw

    def _add_native_frames(
        self, sources: StackSources, stacks: tuple[Stack, ...], status_file: StatusFile | None
    ) -> _Threads:
        """Return the stacks with the native frames of their threads, if the Python lines do not show enough.

        Reading native frames stops the process, so it is done only once while the threads stay on their lines.
        """
        process, earlier = sources.process, self.last_stacks.get(sources.process.pid, ())
        native = {(stack.tid, stack.frames): stack.native for stack in earlier if stack.native != UNREAD_NATIVE}
        stacks = tuple(replace(stack, native=native.get((stack.tid, stack.frames), ())) for stack in stacks)
        event_tids = [event.tid for event in status_file.events] if status_file else []
        last = training_stack(earlier, process.pid, event_tids)
        line, has_probe = last.frames[0] if last and last.frames else None, status_file is not None
        if needed := stacks_that_need_native_frames(stacks, process, event_tids, line, has_probe=has_probe):
            stacks = sources.native(stacks)
            if not has_probe:  # nothing else shows that a thread waits for a collective and not for a lock
                unread_tids = {stack.tid for stack in needed if not stack.gil} - {
                    task.tid for task in process.tasks if task.syscall != "futex"
                }
                stacks = tuple(
                    replace(stack, native=UNREAD_NATIVE) if stack.tid in unread_tids and not stack.native else stack
                    for stack in stacks
                )
        self.last_stacks[process.pid] = stacks
        return stacks

    def _child_stacks(self, rank: int, child: Process, limit_factor: float) -> tuple[Stack, ...]:
        if "python" not in child.command or child.state in "ZX":
            return ()
        sources = StackSources(process=child, probe_dir=self.probe_dir, limit_factor=limit_factor)
        stacks, _ = sources.stacks()
        if not stacks and not _has_exited(child.pid):
            self._note(f"stacks of child {child.pid}", "; ".join(sources.failures), rank)
        return stacks

    def _gpus(self, tree: ProcessTree) -> tuple[Gpu, ...]:
        if not any(_uses_gpu(process) for process in tree.all_processes):
            return ()
        gpus: tuple[Gpu, ...] = ()
        try:
            gpus = gpu_state()
        except (CommandFailed, ValueError) as error:
            self._note("gpus", str(error), None)
        return with_gpu_errors(gpus, gpu_errors(self.origin_ns), os.uname().nodename)

    def _communicators(self, tree: ProcessTree) -> tuple[NcclCommunicator, ...]:
        """Return the communicators of the run, as NCCL's RAS service in one of the ranks describes them."""
        ranks = {process.pid: rank for rank, process in tree.processes.items()}
        for process in tree.processes.values():
            address = find_ras(procfs.environment(process.pid), process.sockets) if _uses_gpu(process) else None
            if address is not None:
                try:
                    return parse_ras(query_ras(address), ranks)
                except (OSError, ValueError) as error:
                    self._note("NCCL's RAS service", str(error), None)
                return ()
        return ()

    # The flight recorder.

    def _flight_without_probe(self, rank: int, pid: int, server: Path | int | None) -> _FlightResult:
        """Return the collectives in the flight recorder of a rank that runs without nsa-harness's instrumentation."""
        if server is None:
            return self._flight_through_pipe(rank, pid), False
        try:
            text, collectives = query_own_server(server)
        except (OSError, ValueError) as error:
            self._note("flight recorder", f"worker server: {error}", rank)
            return (), False
        write_document(self._flight_file(pid), text)
        return essential_collectives(collectives), False

    def _has_moved(self, pid: int, status_file: StatusFile | None) -> bool:
        """Return whether the rank made progress since the last snapshot, and remember its progress.

        Such a rank waits for nobody, so a snapshot for the profile does not need its flight recorder. A dump of the
        recorder takes memory in the rank, more with each recorded collective, which would look like a leak.
        """
        if status_file is None:
            return False
        counts = (sum(event.count for event in status_file.events), status_file.completed)
        earlier, self.last_counts[pid] = self.last_counts.get(pid), counts
        return earlier is not None and earlier != counts

    def _flight_through_pipe(self, rank: int, pid: int) -> tuple[Collective, ...]:
        """Ask NCCL through a pipe to dump the flight recorder, and return the collectives in the dump."""
        environment = procfs.environment(pid)
        request = self.pipe_requests.get(pid)
        try:
            if request is None:
                now_ns = time.time_ns()
                self.pipe_requests[pid] = PipeRequest(
                    rank=rank, pipe=request_dump(pid, rank, environment), at_ns=now_ns
                )
                return ()
            if request.pipe is None:
                return ()
            return essential_collectives(
                parse_dump(await_dump(pid, rank, environment, request.at_ns, _FLIGHT_LIMIT_S)).collectives
            )
        except (OSError, ValueError) as error:
            self.pipe_requests.setdefault(pid, PipeRequest(rank=rank, pipe=None, at_ns=0))
            self._note("flight recorder", f"NCCL's pipe: {error}", rank)
            return ()

    def _flight(self, rank: int, pid: int, *, is_needed: bool, prefers_heartbeat: bool) -> _FlightResult:
        """Return a rank's recorded collectives. A rank that does not answer is trouble only if `is_needed`."""
        sources = (
            (self._from_heartbeat, self._from_worker_server)
            if prefers_heartbeat
            else (self._from_worker_server, self._from_heartbeat)
        )
        refusals = tuple(takewhile(bool, (source(pid) for source in sources)))
        used_heartbeat = prefers_heartbeat or bool(refusals)
        if len(refusals) == len(sources):
            if is_needed:
                self._note("flight recorder", "; ".join(filter(None, refusals)), rank)
            return (), used_heartbeat
        try:
            return essential_collectives(
                parse_flight(self._flight_file(pid).read_text(errors="replace"))
            ), used_heartbeat
        except FileNotFoundError:
            return (), used_heartbeat  # the process has not imported torch.distributed
        except (OSError, ValueError) as error:
            self._note("flight recorder", str(error), rank)
            return (), used_heartbeat

    def _has_heartbeat(self, status_file: StatusFile) -> bool:
        now_s = (time.monotonic_ns() - self.origin_ns) / 1e9
        return status_file.beat_s is not None and now_s - status_file.beat_s < _HEARTBEAT_S

    def _from_worker_server(self, pid: int) -> str | None:
        """Store the flight recorder dump from the worker server. Return an error message, or None on success."""
        try:
            recorder = query_flight_recorder(self.probe_dir, pid, _FLIGHT_LIMIT_S)
            parse_flight(recorder)
        except FileNotFoundError:
            return "no worker server in the process"
        except (OSError, ValueError) as error:
            return f"worker server: {error}"
        write_document(self._flight_file(pid), recorder)
        return None

    def _flight_file(self, pid: int) -> Path:
        return self.probe_dir / protocol.FLIGHT.format(pid=pid)

    def _from_heartbeat(self, pid: int) -> str | None:
        """Make the rank's heartbeat thread dump the flight recorder. Return an error message, or None on success."""
        path = self.probe_dir / protocol.STATUS_FILE.format(pid=pid)
        with suppress(OSError, ValueError), path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            (request,) = protocol.REQUEST.unpack_from(memory, protocol.REQUEST_AT)
            protocol.REQUEST.pack_into(memory, protocol.REQUEST_AT, request + 1)
            if wait_for(
                lambda: protocol.HEARTBEAT.unpack_from(memory, protocol.HEARTBEAT_AT)[1] > request, _FLIGHT_LIMIT_S
            ):
                return None
        return f"no response from the heartbeat thread within {_FLIGHT_LIMIT_S:g} s"

    def _write(self, snapshot: RankSnapshot, raw: str, number: int) -> None:
        stem, clean = f"rank{snapshot.rank}.{number}", self.redaction
        text = "\n".join(snapshot_text(snapshot)) + "\n"
        try:
            self.dumps.mkdir(exist_ok=True)
            if raw:  # an empty file would look like a dump without threads
                (self.dumps / f"{stem}.json").write_text(clean.json(raw), errors="backslashreplace")
            (self.dumps / f"{stem}.txt").write_text(clean.text(text), errors="backslashreplace")
        except OSError as error:
            self._note("dumps", str(error), snapshot.rank)

    def _note(self, source: str, reason: str, rank: int | None) -> None:
        trouble = Trouble(what=source, why=reason[:500], rank=rank)
        if trouble not in self.trouble:
            self.trouble.append(trouble)


def _uses_gpu(process: Process) -> bool:
    return any(end.startswith("/dev/nvidia") for end in process.open_ends)


def _load_factor() -> float:
    """Return the number of runnable threads per CPU core, up to a limit."""
    return min(_MAX_LOAD_FACTOR, os.getloadavg()[0] / (os.cpu_count() or 1))


def _has_exited(pid: int) -> bool:
    """Return whether the process has exited, after a moment, because killed processes do not disappear at once."""
    return wait_for(lambda: not procfs.is_alive(pid), _EXIT_S)


def with_polling_loops(stacks: Sequence[Stack], process: Process, origin_ns: int) -> tuple[Stack, ...]:
    """Return the stacks with the source code of the loop in which each sleeping thread waits, if it is unchanged."""
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
