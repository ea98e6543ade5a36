"""Write the run directory of a simulated job, with the files that the probe, torchrun and the supervisor would write.

    python benchmarks/scale_job.py --ranks 64 --fault skips --out DIRECTORY

`nsa-harness report DIRECTORY/RUN` judges such a run like any other. `benchmarks/scale.py` measures what that costs.
"""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.scale_schedule import (  # noqa: E402
    AXES,
    DEFAULT_GROUP,
    NS,
    PROGRAM,
    CallRecord,
    Fault,
    SimulatedJob,
    line_of,
    simulate,
)
from nsa_harness import __version__, protocol  # noqa: E402
from nsa_harness.core.evidence.evidence import Frame, RankSnapshot, Sample, Snapshot, Source, Stack  # noqa: E402
from nsa_harness.core.evidence.flight import essential_collectives, parse_dump  # noqa: E402
from nsa_harness.core.evidence.host import Process, SignalMasks, Socket, Task  # noqa: E402
from nsa_harness.core.evidence.reduced import bounded_snapshot  # noqa: E402
from nsa_harness.core.evidence.status_file import parse as parse_status_file  # noqa: E402
from nsa_harness.core.plan import Expect, Launcher, Limits, RunSpec  # noqa: E402
from nsa_harness.core.report import MachineFacts  # noqa: E402
from nsa_harness.probe.groups import ranges  # noqa: E402
from nsa_harness.supervisor.capture.snapshot import snapshot_text  # noqa: E402
from nsa_harness.supervisor.storage.adapters import json_object, stored_snapshot, type_adapter  # noqa: E402
from nsa_harness.supervisor.storage.record import RunRecord, write_record, write_spec  # noqa: E402
from nsa_harness.supervisor.storage.rundir import AttemptDir, RunDir, create_run  # noqa: E402

NAME = "train"
SCRIPT = "/job/train.py"
_TORCH = "/job/env/lib/python3.11/site-packages/torch/distributed"
_ORIGIN_NS = 600 * NS  # CLOCK_MONOTONIC at the launch
_REALTIME_NS = 1_790_000_000 * NS  # CLOCK_REALTIME minus CLOCK_MONOTONIC
_FIRST_PID, _PIDS_PER_RANK = 10_000, 32
_LAUNCHER_PID = 9_000
_THREADS = 20  # of a rank: the main thread, the probe's, torch's worker server and gloo's
_STALL_S, _APART_S = 5.2, 1.6
_DEADLINE_S = 1800.0


def write_job(parent: Path, job: SimulatedJob) -> RunDir:
    """Write the files of a simulated job into a new run directory below `parent`, and return the run."""
    run = create_run(parent)
    spec = _spec(job)
    machine = MachineFacts(host="simulated", cpus=2, gpus=(), torch="2.13.0+cpu")
    command = f"nsa-harness run train.py --ranks {spec.ranks}"
    write_record(run, RunRecord(command=command, harness=__version__, machine=machine, controller=1, plan=(spec,)))
    attempt = run.attempt(NAME)
    attempt.directory.make_directory(attempt.path)
    write_spec(attempt, spec)
    _Writer(job=job, attempt=attempt).write()
    return run


def pid_of(rank: int) -> int:
    return _FIRST_PID + _PIDS_PER_RANK * rank


def _spec(job: SimulatedJob) -> RunSpec:
    ranks = job.mesh.world_size
    return RunSpec(
        scenario=NAME,
        about=f"train.py on {ranks} ranks",
        ranks=ranks,
        launcher=Launcher.TORCHRUN,
        program=(SCRIPT,),
        env=(),
        cwd=None,
        backend="gloo",
        device="any",
        subject="train.py",
        limits=Limits(deadline_s=_DEADLINE_S),
        expect=Expect(),
        fault=None,
        notes=(),
        not_covered=(),
        spec_hash="5ca1ab1e0000",
    )


def _frame(text: str, function: str) -> Frame:
    return Frame(file=SCRIPT, line=line_of(text), function=function)


_MAIN = _frame("train_step(*batch)", "<module>")


def _chain(line: int) -> tuple[Frame, ...]:
    """Return the frames of the program that lead to a line of it, innermost first."""
    if line < line_of("def train_step"):
        attention = Frame(file=SCRIPT, line=line, function="attention")
        return attention, _frame("= attention(hidden, tokens)", "train_step"), _MAIN
    return Frame(file=SCRIPT, line=line, function="train_step"), _MAIN


def _place(frame: Frame) -> str:
    return f"{frame.file}:{frame.line}:{frame.function}"


@dataclass(kw_only=True)
class StatusFileImage:
    """The content of a status file, written as the probe does. Only the areas in use take space on the disk."""

    areas: dict[int, bytes] = field(default_factory=dict)
    strings: dict[str, int] = field(default_factory=lambda: {"": 0})
    nodes: dict[tuple[int, int], int] = field(default_factory=dict)

    def put(self, at: int, data: bytes) -> None:
        self.areas[at] = data

    def string(self, text: str) -> int:
        return self.strings.setdefault(text, len(self.strings))

    def node(self, chain: Iterable[Frame]) -> int:
        """Return the number of the node of a call stack, given with the innermost frame first."""
        node = 0
        for frame in reversed(tuple(chain)):
            node = self.nodes.setdefault((self.string(_place(frame)), node), len(self.nodes) + 1)
        return node

    def write(self, path: Path) -> None:
        self._put_tables()
        with path.open("wb") as file:
            file.truncate(protocol.STATUS_FILE_SIZE)
            for at, data in self.areas.items():
                file.seek(at)
                file.write(data)

    def _put_tables(self) -> None:
        texts = [text.encode() for text in self.strings]
        table = b"".join(protocol.STRING_LENGTH.pack(len(text)) + text for text in texts)
        self.put(protocol.STRINGS_AT, table)
        self.put(protocol.STRINGS_USED_AT, protocol.STRINGS_USED.pack(len(table), len(texts)))
        for (place, caller), number in self.nodes.items():
            self.put(protocol.NODES_AT + number * protocol.NODE.size, protocol.NODE.pack(place, caller))
        self.put(protocol.NODES_USED_AT, protocol.NODES_USED.pack(len(self.nodes)))


@dataclass(kw_only=True)
class _Writer:
    """Writes the files of one attempt."""

    job: SimulatedJob
    attempt: AttemptDir

    def write(self) -> None:
        attempt, job = self.attempt, self.job
        for path in (attempt.probe_files, attempt.dumps, attempt.evidence):
            attempt.directory.make_directory(path)
        for rank in range(job.mesh.world_size):
            self._status_file(rank, attempt.probe_files / protocol.STATUS_FILE.format(pid=pid_of(rank)))
            self._logs(rank)
            if self._is_blocked(rank):
                self._flight_recorder(rank)
            if rank == job.culprit and job.fault is Fault.RAISES:
                self._raised(rank)
        snapshots = self._write_snapshots() if job.fault is not Fault.RAISES else []
        self._journals(snapshots)
        source = Source(file=SCRIPT, first=1, text=PROGRAM.rstrip("\n"))
        text = type_adapter(tuple[Source, ...]).dump_json((source,)).decode()
        attempt.directory.write(attempt.path / "sources.json", text)
        attempt.directory.write(attempt.output, "")
        attempt.directory.write(
            attempt.command, f"torchrun --standalone --nproc-per-node {self._world_size} {SCRIPT}\n"
        )
        attempt.directory.write(attempt.env, json.dumps({"schema": 1, "machine": {"host": "simulated"}}) + "\n")

    @property
    def _world_size(self) -> int:
        return self.job.mesh.world_size

    def _is_blocked(self, rank: int) -> bool:
        calls = self.job.calls[rank]
        return bool(calls) and calls[-1].left_ns is None

    # The files of the probe.

    def _status_file(self, rank: int, path: Path) -> None:
        job, image = self.job, StatusFileImage()
        calls, pid = job.calls[rank], pid_of(rank)
        created_ns = _ORIGIN_NS + 2 * NS
        image.put(
            protocol.IDENTITY_AT,
            protocol.IDENTITY.pack(
                protocol.MAGIC,
                protocol.LAYOUT,
                protocol.STATUS_FILE_SIZE,
                pid,
                rank,
                self._world_size,
                0,
                created_ns,
            ),
        )
        image.put(protocol.CLOCK_AT, protocol.CLOCK.pack(_REALTIME_NS))
        image.put(protocol.HEARTBEAT_AT, protocol.HEARTBEAT.pack(_ORIGIN_NS + job.stalled_ns + int(_STALL_S * NS), 0))
        ring = b"".join(self._call(image, number, call) for number, call in enumerate(calls, start=1))
        image.put(protocol.CALLS_AT, ring)
        self._put_events(image, rank)
        self._put_steps(image, rank)
        self._put_facts(image, rank)
        self._put_totals(image, rank)
        collectives = [call for call in calls if call.operation.peer is None]
        completed = sum(call.left_ns is not None for call in collectives)
        changed_ns = _ORIGIN_NS + max((call.left_ns or 0 for call in collectives), default=0)
        image.put(protocol.COLLECTIVES_AT, protocol.COLLECTIVES.pack(len(collectives), completed, changed_ns))
        image.write(path)

    def _call(self, image: StatusFileImage, number: int, call: CallRecord) -> bytes:
        operation, chain = call.operation, _chain(call.operation.line)
        return protocol.CALL.pack(
            number,
            _ORIGIN_NS + call.entered_ns,
            0 if call.left_ns is None else _ORIGIN_NS + call.left_ns,
            operation.elements,
            call.step,
            3,
            image.string(operation.op),
            image.string(operation.group),
            image.string(_place(chain[0])),
            image.string("float32"),
            0,
            protocol.CALL_GRADIENTS,
            -1 if operation.peer is None else operation.peer,
            image.node(chain),
            0,
        )

    def _put_events(self, image: StatusFileImage, rank: int) -> None:
        """Write the latest event of the training thread, and the latest call."""
        calls, ends = self.job.calls[rank], self.job.step_ends_ns[rank]
        step = self._step(rank)
        slots = [("optimizer", "AdamW", ends[-1] if ends else _START, len(ends) * 40)]
        if calls:
            kind = "collective" if self._is_blocked(rank) else "returned"
            at_ns = calls[-1].entered_ns if calls[-1].left_ns is None else calls[-1].left_ns
            slots.append((kind, calls[-1].operation.op, at_ns, 2 * len(calls)))
        for index, (kind, text, since_ns, count) in enumerate(slots):
            at_ns = _ORIGIN_NS + since_ns
            event = protocol.KIND[kind] << protocol.EVENT_KIND_SHIFT | step
            event |= image.string(text) << protocol.EVENT_STRING_SHIFT
            check = at_ns ^ count ^ event ^ 3
            slot = protocol.SLOT.pack(pid_of(rank), at_ns, count, event, 3, check)
            image.put(protocol.SLOTS_AT + index * protocol.SLOT_SIZE, slot)
        gaps = [0] * protocol.GAP_COUNT
        gaps[protocol.KIND["start"]] = 2 * NS
        gaps[protocol.KIND["collective"]] = NS // 10
        image.put(protocol.GAPS_AT, b"".join(map(protocol.GAP.pack, gaps)))

    def _step(self, rank: int) -> int:
        return len(self.job.step_ends_ns[rank]) + 1

    def _put_steps(self, image: StatusFileImage, rank: int) -> None:
        for step, end_ns in enumerate(self.job.step_ends_ns[rank], start=1):
            at = protocol.STEPS_AT + (step - 1) % protocol.STEPS * protocol.STEP.size
            image.put(at, protocol.STEP.pack(step, _ORIGIN_NS + end_ns, 12, 40))

    def _put_facts(self, image: StatusFileImage, rank: int) -> None:
        job = self.job
        mesh = " ".join(f"{axis}={at}" for axis, at in job.mesh.coordinates(rank).items())
        facts = {protocol.FACT_BACKEND: "gloo", protocol.FACT_MESH: mesh, protocol.FACT_OPTIMIZER: "AdamW"}
        facts |= {protocol.FACT_GROUP + name: ranges(job.groups[name]) for name in sorted(job.names[rank].values())}
        pairs = [protocol.FACT.pack(image.string(name), image.string(value)) for name, value in facts.items()]
        image.put(protocol.FACTS_AT, b"".join(pairs))
        image.put(protocol.FACTS_USED_AT, protocol.FACTS_USED.pack(len(pairs)))

    def _put_totals(self, image: StatusFileImage, rank: int) -> None:
        totals: dict[str, tuple[int, int]] = {}
        for call in self.job.calls[rank]:
            operation = call.operation
            if operation.peer is None:
                calls, before = totals.get(operation.group, (0, protocol.HASH_START))
                places = "\n".join(map(_place, _chain(operation.line)))
                call_hash = (zlib.crc32(operation.op.encode()) << 32 ^ zlib.crc32(places.encode())) + operation.elements
                after = (before ^ call_hash) * protocol.HASH_FACTOR & protocol.HASH_MASK
                totals[operation.group] = calls + 1, after
        for index, (group, (calls, call_hash)) in enumerate(totals.items()):
            number = image.string(group)
            total = protocol.TOTAL.pack(number, calls, call_hash, number ^ calls ^ call_hash)
            image.put(protocol.TOTALS_AT + index * protocol.TOTAL.size, total)

    def _flight_recorder(self, rank: int) -> None:
        entries = [_flight_entry(number, call) for number, call in enumerate(self.job.calls[rank])]
        dump = {"comm_lib_version": "", "entries": entries, "pg_config": {}, "pg_status": {}, "version": "2.10"}
        path = self.attempt.probe_files / protocol.FLIGHT.format(pid=pid_of(rank))
        path.write_text(json.dumps(dump))

    def _raised(self, rank: int) -> None:
        frames = [{"file": frame.file, "line": frame.line, "function": frame.function} for frame in _chain(_raising())]
        record = {
            "type": "ValueError",
            "message": "batch 8 has 3 columns, expected 4",
            "at_ns": _ORIGIN_NS + self._raised_ns(),
            "frames": frames,
            "is_uncaught": True,
        }
        path = self.attempt.probe_files / protocol.RAISED.format(pid=pid_of(rank))
        path.write_text(json.dumps(record))

    def _raised_ns(self) -> int:
        return self.job.now_ns[self.job.culprit] + NS // 100

    # The files of torchrun.

    def _logs(self, rank: int) -> None:
        logs = self.attempt.logs / "simulated_1" / "attempt_0" / str(rank)
        logs.mkdir(parents=True)
        steps = range(1, self._step(rank))
        (logs / "stdout.log").write_text("".join(f"step {step} loss {3 - step / 100:.3f}\n" for step in steps))
        traceback = ""
        if rank == self.job.culprit and self.job.fault is Fault.RAISES:
            frames = reversed(_chain(_raising()))
            lines = "".join(f'  File "{one.file}", line {one.line}, in {one.function}\n' for one in frames)
            traceback = f"Traceback (most recent call last):\n{lines}ValueError: batch 8 has 3 columns, expected 4\n"
        (logs / "stderr.log").write_text(traceback)

    # The files of the supervisor.

    def _write_snapshots(self) -> list[float]:
        """Write two snapshots, with the readable dumps of each rank, and return when they were taken."""
        first_s = self.job.stalled_ns / NS + _STALL_S
        if self.job.fault is Fault.SLOW:
            first_s = _DEADLINE_S - 2 * _APART_S
        times_s = [first_s, first_s + _APART_S]
        for number, at_s in enumerate(times_s, start=1):
            ranks = []
            for rank in range(self._world_size):
                snapshot = self._snapshot(rank, number, at_s)
                ranks.append(snapshot)
                text = "\n".join(snapshot_text(snapshot)) + "\n"
                (self.attempt.dumps / f"rank{rank}.{number}.txt").write_text(text)
            write_snapshot(self.attempt, Snapshot(number=number, at_s=at_s, ranks=tuple(ranks)))
        return times_s

    def _computes(self, rank: int) -> bool:
        return self.job.fault is Fault.SLOW and rank == self.job.culprit

    def _snapshot(self, rank: int, number: int, at_s: float) -> RankSnapshot:
        pid = pid_of(rank)
        path = self.attempt.probe_files / protocol.STATUS_FILE.format(pid=pid)
        collectives: tuple[Any, ...] = ()
        if self._is_blocked(rank):
            dump = (self.attempt.probe_files / protocol.FLIGHT.format(pid=pid)).read_bytes()
            collectives = essential_collectives(parse_dump(dump).collectives)
        return RankSnapshot(
            rank=rank,
            pid=pid,
            process=self._process(rank, number, at_s),
            stacks=tuple(self._stacks(rank, number)),
            status_file=parse_status_file(path.read_bytes(), _ORIGIN_NS),
            collectives=collectives,
            proof=f"dumps/rank{rank}.{number}.txt",
        )

    def _process(self, rank: int, number: int, at_s: float) -> Process:
        pid, computes = pid_of(rank), self._computes(rank)
        cpu_s = 40.0 + (number * _APART_S if computes else 0.0)

        def task(index: int) -> Task:
            is_main, is_probe = index == 0, index == 1
            syscall = "clock_nanosleep" if is_probe else "futex"
            return Task(
                tid=pid + index,
                comm="python3" if index < 3 else "gloo",
                state="R" if is_main and computes else "S",
                wchan="" if is_main and computes else "hrtimer_nanosleep" if is_probe else "futex_do_wait",
                syscall="running" if is_main and computes else syscall,
                wakes_at_s=at_s + 0.2 if is_probe else None,
                timed=is_probe,
                cpu_s=cpu_s if is_main else 0.1,
                io_bytes=1000,
                read_bytes=900,
            )

        neighbours = [(rank + 1) % self._world_size, (rank - 1) % self._world_size]
        return Process(
            pid=pid,
            parent=_LAUNCHER_PID,
            command=f"python3 -u {SCRIPT}",
            state="R" if computes else "S",
            cpu_s=cpu_s,
            io_bytes=24_000_000,
            rss_bytes=(2 << 30) + 4096 * rank,
            tasks=tuple(task(index) for index in range(_THREADS)),
            open_ends=tuple(f"pipe:[{pid + index}] {end}" for index in range(8) for end in "rw"),
            sockets=tuple(_socket(pid + index, peer) for index, peer in enumerate(neighbours)),
            signals=SignalMasks(pending=0, blocked=0, ignored=16781312, caught=1103806596330),
        )

    def _stacks(self, rank: int, number: int) -> Iterator[Stack]:
        threading = "/job/env/lib/python3.11/threading.py"
        yield Stack(
            thread="nsa-harness-beat",
            tid=pid_of(rank) + 1,
            active=False,
            frames=(
                Frame(file="/job/nsa_harness/probe/heartbeat.py", line=57, function="Heartbeat._run"),
                Frame(file=threading, line=982, function="Thread.run"),
                Frame(file=threading, line=1045, function="Thread._bootstrap_inner"),
            ),
            source="py-spy --nonblocking",
        )
        yield Stack(
            thread="MainThread",
            tid=pid_of(rank),
            active=self._computes(rank),
            frames=self._main_frames(rank, number),
            source="py-spy --nonblocking",
        )

    def _main_frames(self, rank: int, number: int) -> tuple[Frame, ...]:
        if not self._is_blocked(rank):
            model = Frame(file="/job/model.py", line=80 + number, function="experts")
            return model, _frame("= attention(hidden, tokens)", "train_step"), _MAIN
        operation = self.job.calls[rank][-1].operation
        return (
            Frame(file=f"{_TORCH}/distributed_c10d.py", line=3252, function=operation.op),
            Frame(file=f"{_TORCH}/c10d_logger.py", line=83, function="_exception_logger.<locals>.wrapper"),
            *_chain(operation.line),
        )

    def _values(self, rank: int) -> None:
        """Write the values that the rank's probe has read on request."""
        values = [["step", str(self.job.last_step - 1)], ["model.has_gradients", str(rank != self.job.culprit)]]
        frames = [
            {"file": frame.file, "line": frame.line, "function": frame.function, "values": values if not index else []}
            for index, frame in enumerate(_chain(self.job.calls[rank][-1].operation.line))
        ]
        stacks = [{"thread": "MainThread", "frames": frames}]
        record = {"rank": rank, "when": "request", "stacks": stacks, "is_cut": False}
        self.attempt.rank(rank).mkdir()
        (self.attempt.rank(rank) / "values.json").write_text(json.dumps(record))

    def _journals(self, times_s: list[float]) -> None:
        job, world_size = self.job, self._world_size
        watch = [{"event": "origin", "t_s": 0.4, "origin_ns": _ORIGIN_NS}]
        watch += [{"event": "rank", "t_s": 2.9, "rank": rank, "pid": pid_of(rank)} for rank in range(world_size)]
        watch.append({"event": "started", "t_s": 7.8})
        ended_s = self._raised_ns() / NS + 1.0 if job.fault is Fault.RAISES else times_s[-1] + 0.3
        signal_ns = _ORIGIN_NS + int(ended_s * NS)
        processes: list[dict[str, Any]] = [{"event": "started", "t_ns": _ORIGIN_NS, "pid": _LAUNCHER_PID}]
        if job.fault is Fault.RAISES:
            ending = "exited"
            for rank in sorted(range(world_size), key=lambda rank: rank != job.culprit):
                at_ns = self._raised_ns() + (NS // 20 if rank == job.culprit else NS // 2)
                status = 1 if rank == job.culprit else -15
                processes.append({"event": "exit", "t_ns": _ORIGIN_NS + at_ns, "pid": pid_of(rank), "status": status})
            processes.append({"event": "exit", "t_ns": signal_ns, "pid": _LAUNCHER_PID, "status": 1})
        else:
            ending = "deadline" if job.fault is Fault.SLOW else "stall"
            for rank in range(world_size):
                self._values(rank) if job.calls[rank] else None
            watch += [
                {"event": "sample", "t_s": at_s, **json_object(self._sample(rank, number, at_s))}
                for number, at_s in enumerate(times_s, start=1)
                for rank in range(world_size)
            ]
            if ending == "stall":
                watch.append({"event": "proof", "t_s": ended_s, "kind": "deadlock", "reason": "simulated"})
            pids = [_LAUNCHER_PID, *map(pid_of, range(world_size))]
            processes.append({"event": "signal", "t_ns": signal_ns, "signal": "SIGTERM", "pids": pids})
        processes.append({"event": "ended", "t_ns": signal_ns + NS, "outlived": [], "left": []})
        watch.append(
            {"event": "peaks", "t_s": ended_s, "rss_bytes": {str(rank): 2 << 30 for rank in range(world_size)}}
        )
        limits = {"stall_s": 5.0, "busy_s": 60.0, "open_wait_s": 300.0, "start_s": 120.0, "deadline_s": _DEADLINE_S}
        watch.append({"event": "limits", "t_s": ended_s, **limits})
        progress_s = times_s[-1] if job.fault is Fault.SLOW else job.stalled_ns / NS
        ended = {"event": "ending", "t_s": ended_s, "ending": ending, "last_progress_s": progress_s, "error": None}
        watch.append(ended)
        for path, records in ((self.attempt.watch, watch), (self.attempt.processes, processes)):
            with path.open("a") as journal:
                journal.writelines(json.dumps(record, separators=(",", ":")) + "\n" for record in records)

    def _sample(self, rank: int, number: int, at_s: float) -> Sample:
        frames = self._main_frames(rank, number)
        motion = "unseen" if number == 1 else "moving" if self._computes(rank) else "waiting"
        user = next(frame for frame in frames if frame.file == SCRIPT)
        return Sample(rank=rank, at_s=at_s, motion=motion, leaf=frames[0], user_frame=user, cpu_s=40.0)


_START = 8 * NS


def _raising() -> int:
    """Return the line that raises the planted exception."""
    return line_of("= attention(hidden, tokens)")


def _socket(inode: int, peer: int) -> Socket:
    return Socket(
        inode=inode,
        local=f"127.0.0.1:{1024 + inode % 60000}",
        peer=f"127.0.0.1:{1024 + pid_of(peer) % 60000}",
        state="ESTABLISHED",
        unacked_bytes=0,
        unread_bytes=0,
        retransmits=0,
        acked_bytes=288,
        received_bytes=584,
        peer_rank=peer,
        in_job=True,
    )


def _flight_entry(number: int, call: CallRecord) -> dict[str, Any]:
    operation = call.operation
    is_transfer = operation.peer is not None
    name = f"gloo:{operation.op}" + (f" 0<-{operation.peer}" if is_transfer else "")
    sizes = [[operation.elements]]
    return {
        "collective_seq_id": 0 if is_transfer else call.seq,
        "input_dtypes": ["Float"],
        "input_sizes": sizes,
        "is_p2p": is_transfer,
        "op_id": number,
        "output_dtypes": ["Float"],
        "output_sizes": sizes,
        "p2p_seq_id": call.seq if is_transfer else 0,
        "pg_id": int(operation.group),
        "process_group": [operation.group, "default_pg" if operation.group == DEFAULT_GROUP else "mesh"],
        "profiling_name": name,
        "record_id": number,
        "retired": call.left_ns is not None,
        "state": "scheduled",
        "thread_id": "140204857826176",
        "thread_name": "python3",
        "time_created_ns": _REALTIME_NS + _ORIGIN_NS + call.entered_ns,
        "time_discovered_completed_ns": 0,
        "time_discovered_started_ns": 0,
        "timeout_ms": 1_800_000,
    }


def write_snapshot(attempt: AttemptDir, snapshot: Snapshot) -> None:
    attempt.directory.write(
        attempt.dumps / f"snapshot{snapshot.number}.json", stored_snapshot(bounded_snapshot(snapshot))
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Write the run directory of a simulated job.")
    parser.add_argument("--ranks", type=int, required=True, help="a power of two")
    parser.add_argument("--fault", type=Fault, choices=list(Fault), default=Fault.SKIPS)
    parser.add_argument("--steps", type=int, default=8, help="complete steps before the fault")
    parser.add_argument("--out", type=Path, required=True, help="the directory for the run directory")
    options = parser.parse_args(arguments)
    job = simulate(options.ranks, options.fault, steps=options.steps)
    run = write_job(options.out, job)
    coordinates = job.mesh.coordinates(job.culprit)
    named = " ".join(f"{axis}={coordinates[axis]}" for axis in AXES)
    print(f"{run.path}: {options.fault} on rank {job.culprit} ({named})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
