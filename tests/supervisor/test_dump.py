"""A snapshot of ranks: cheap sources first, each with its own limit, each failure told."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import rank_snapshot
from living import program, wait_for

from nsa_harness import protocol
from nsa_harness.core.evidence.host import Process, Socket
from nsa_harness.core.report import Trouble
from nsa_harness.supervisor.capture import procfs
from nsa_harness.supervisor.capture.process_tree import ProcessTree
from nsa_harness.supervisor.capture.snapshot import StackSampler

SLEEPER = """
import time

def step():
    print(flush=True)
    time.sleep(600)

step()
"""


@pytest.fixture
def sampler(tmp_path: Path) -> StackSampler:
    boards = tmp_path / "boards"
    boards.mkdir()
    return StackSampler(origin_ns=time.monotonic_ns(), probe_dir=boards, dumps=tmp_path / "dumps")


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A rank that sleeps in the function `step` of train.py."""
    program = tmp_path / "train.py"
    program.write_text(SLEEPER)
    with subprocess.Popen([sys.executable, "-S", str(program)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], 20.0)
        assert ready
        yield process
        process.kill()


def write_board(sampler: StackSampler, pid: int, rank: int) -> Path:
    data = bytearray(protocol.STATUS_FILE_SIZE)
    identity = (protocol.MAGIC, protocol.LAYOUT, protocol.STATUS_FILE_SIZE, pid, rank, 2, 0, sampler.origin_ns)
    protocol.IDENTITY.pack_into(data, protocol.IDENTITY_AT, *identity)
    path = sampler.probe_dir / protocol.STATUS_FILE.format(pid=pid)
    path.write_bytes(data)
    return path


def test_a_rank_without_a_probe_is_seen_from_outside(sampler: StackSampler, rank: subprocess.Popen[bytes]) -> None:
    snapshot = sampler.take(1, {0: rank.pid})
    (seen,) = snapshot.ranks
    assert (snapshot.number, seen.rank, seen.pid, seen.proof) == (1, 0, rank.pid, "dumps/rank0.1.txt")
    assert seen.process is not None
    assert (seen.process.pid, seen.process.parent) == (rank.pid, os.getpid())
    assert [frame.function for frame in seen.stacks[0].frames] == ["step", "<module>"]
    assert (seen.status_file, seen.collectives, sampler.trouble) == (None, (), [])


def test_the_dump_of_a_rank_is_readable_and_names_its_line(
    sampler: StackSampler, rank: subprocess.Popen[bytes]
) -> None:
    (seen,) = sampler.take(3, {0: rank.pid}).ranks
    text = (sampler.dumps / "rank0.3.txt").read_text().splitlines()
    assert text[0].startswith(f"rank 0   pid {rank.pid}   ")
    assert text[1].startswith("state ")
    innermost = next(number for number, line in enumerate(text) if line.startswith("thread ")) + 1
    assert text[innermost] == f"    step ({seen.stacks[0].frames[0].file}:6)"
    assert json.loads((sampler.dumps / "rank0.3.json").read_text())[0]["frames"][0]["name"] == "step"


def test_the_gpus_are_asked_for_only_where_a_process_holds_one(
    sampler: StackSampler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'No devices were found' >&2; exit 6\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    facts = {"pid": 7, "parent": 1, "command": "", "state": "S", "cpu_s": 0.0, "io_bytes": 0, "rss_bytes": 0}
    for holds, trouble in ((), []), (("/dev/nvidia0 rw",), ["nvidia-smi: No devices were found"]):
        sampler._gpus(ProcessTree(processes={0: Process(**facts, open_ends=holds)}, children={}, failures=()))
        assert [one.why for one in sampler.trouble] == trouble


def test_nccls_ras_service_is_asked_only_in_ranks_with_a_gpu_and_its_refusal_is_trouble(
    sampler: StackSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
    monkeypatch.setattr(procfs, "environment", lambda _: {"NCCL_RAS_ADDR": f"{host}:{port}"})
    facts = {"inode": 1, "peer": "", "unacked_bytes": 0, "unread_bytes": 0, "retransmits": 0}
    heard = Socket(local=f"{host}:{port}", state="LISTEN", **facts)
    rank = {"parent": 1, "command": "", "state": "S", "cpu_s": 0.0, "io_bytes": 0, "rss_bytes": 0}
    for sockets, ends, trouble in (
        ((), ("/dev/nvidia0 rw",), []),
        ((heard,), (), []),
        ((heard,), ("/dev/nvidia0 rw",), ["NCCL's RAS service"]),
    ):
        process = Process(pid=7, sockets=sockets, open_ends=ends, **rank)
        assert sampler._communicators(ProcessTree(processes={0: process}, children={}, failures=())) == ()
        assert [one.what for one in sampler.trouble] == trouble


def test_what_nccls_ras_service_answers_is_stored_in_the_snapshot(
    sampler: StackSampler, rank: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = f"""\
    0  1  1  2  2  2  RUNNING  MISMATCH

Warnings
========

#0-0 (abc) MISMATCH
  Communicator ranks have different AllReduce operation counts
  Rank 0 has launched up to operation 4 -- GPU 0 managed by process {rank.pid} on node n
  Rank 1 has launched up to operation 3 -- GPU 1 managed by process {os.getpid()} on node n

"""
    monkeypatch.setattr("nsa_harness.supervisor.capture.snapshot._uses_gpu", lambda _: True)
    monkeypatch.setattr("nsa_harness.supervisor.capture.snapshot.find_ras", lambda *_: ("", 0))
    monkeypatch.setattr("nsa_harness.supervisor.capture.snapshot.query_ras", lambda _: answer)
    looks = [sampler.take(number, {0: rank.pid, 1: os.getpid()}) for number in (1, 2)]
    assert [[one.job_ranks for one in look.communicators] for look in looks] == [[{0: 0, 1: 1}]] * 2
    pending = [[[one.seq for one in seen.collectives if not one.retired] for seen in look.ranks] for look in looks]
    assert pending == [[[], []], [[4], []]]


def test_a_rank_that_has_gone_is_told_as_gone(sampler: StackSampler) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (seen,) = sampler.take(1, {0: gone.pid}).ranks
    assert (seen.process, seen.stacks, seen.children) == (None, (), ())
    assert (sampler.dumps / "rank0.1.txt").read_text() == f"rank 0   pid {gone.pid}   gone\n"


def test_all_ranks_are_looked_at_and_come_in_order(sampler: StackSampler, rank: subprocess.Popen[bytes]) -> None:
    seen = sampler.take(1, {1: rank.pid, 0: os.getpid()})
    assert [(one.rank, one.pid) for one in seen.ranks] == [(0, os.getpid()), (1, rank.pid)]


def without_python() -> subprocess.Popen[bytes]:
    """Its start is behind it: it has answered once, and reads."""
    process = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"\n")
    assert process.stdout.read(1) == b"\n"
    return process


def test_a_process_without_python_has_no_stacks_and_the_reasons_are_told(sampler: StackSampler) -> None:
    with without_python() as process:
        (seen,) = sampler.take(1, {0: process.pid}).ranks
        process.kill()
    assert seen.stacks == ()
    assert [path.name for path in sampler.dumps.iterdir()] == ["rank0.1.txt"], "no file without an answer in it"
    (trouble,) = sampler.trouble
    assert (trouble.what, trouble.rank) == ("stacks", 0)
    assert trouble.why.startswith("py-spy --nonblocking: ")
    assert trouble.why.endswith("; nsa-harness's faulthandler is not registered in the process")


def test_the_same_trouble_is_told_once(sampler: StackSampler) -> None:
    with without_python() as process:
        for number in (1, 2):
            sampler.take(number, {0: process.pid})
        process.kill()
    assert len(sampler.trouble) == 1


def test_a_torn_board_is_trouble_and_a_missing_one_is_not(sampler: StackSampler) -> None:
    assert sampler.read_status_file(7) is None
    assert sampler.trouble == []
    (sampler.probe_dir / "7.board").write_bytes(b"torn")
    assert sampler.read_status_file(7) is None
    assert [one.what for one in sampler.trouble] == ["status file"]


def test_a_board_is_read_without_asking_the_process(sampler: StackSampler) -> None:
    write_board(sampler, 7, rank=1)
    board = sampler.read_status_file(7)
    assert board is not None
    assert (board.pid, board.rank, board.world_size, board.created_s) == (7, 1, 2, 0.0)


ENTRY = {
    "process_group": ["0", "default_pg"],
    "collective_seq_id": 6,
    "profiling_name": "gloo:all_reduce",
    "input_sizes": [[4]],
    "input_dtypes": ["Float"],
    "retired": False,
    "time_created_ns": 17,
}


def answer(board: Path, flight: Path, text: str, done: threading.Event) -> None:
    """Plays the beat thread of a rank: answers the request number on the board."""
    while not done.is_set():
        with board.open("r+b") as file:
            file.seek(protocol.REQUEST_AT)
            (asked,) = protocol.REQUEST.unpack(file.read(protocol.REQUEST.size))
            if asked:
                flight.write_text(text)
                file.seek(protocol.HEARTBEAT_AT)
                file.write(protocol.HEARTBEAT.pack(1, asked))
                return


@pytest.mark.parametrize(
    ("text", "operations", "trouble"),
    [
        (json.dumps({"entries": [ENTRY]}), ["all_reduce"], []),
        ("{", [], ["flight recorder"]),
        ("[" * 100_000, [], ["flight recorder"]),
    ],
    ids=["whole", "torn", "nested without end"],
)
def test_the_flight_recorder_is_asked_through_the_board(
    sampler: StackSampler, rank: subprocess.Popen[bytes], text: str, operations: list[str], trouble: list[str]
) -> None:
    board = write_board(sampler, rank.pid, rank=0)
    done = threading.Event()
    flight = sampler.probe_dir / protocol.FLIGHT.format(pid=rank.pid)
    thread = threading.Thread(target=answer, args=(board, flight, text, done))
    thread.start()
    (seen,) = sampler.take(1, {0: rank.pid}).ranks
    done.set()
    thread.join()
    assert [one.op for one in seen.collectives] == operations
    assert [one.what for one in sampler.trouble] == trouble
    pending = "pending all_reduce #6 group 0 sizes ((4,),)"
    assert (pending in (sampler.dumps / "rank0.1.txt").read_text()) is bool(operations)


SILENT = "no worker server in the process; no response from the heartbeat thread within 1 s"


def test_a_rank_that_does_not_answer_is_not_waited_for(sampler: StackSampler, rank: subprocess.Popen[bytes]) -> None:
    write_board(sampler, rank.pid, rank=0)
    (seen,) = sampler.take(1, {0: rank.pid}).ranks
    assert seen.collectives == ()
    assert sampler.trouble == [Trouble(what="flight recorder", why=SILENT, rank=0)]


def test_a_rank_that_does_not_answer_a_look_by_which_nothing_is_proven_is_no_trouble(
    sampler: StackSampler, rank: subprocess.Popen[bytes]
) -> None:
    board = write_board(sampler, rank.pid, 0)
    sampler.take(0, {0: rank.pid}, writes_dumps=False)
    asked = protocol.REQUEST.unpack_from(board.read_bytes(), protocol.REQUEST_AT)
    assert (asked, sampler.trouble) == ((1,), [])


def test_bytes_that_our_questions_cost_are_counted_for_the_next_look(
    sampler: StackSampler, rank: subprocess.Popen[bytes]
) -> None:
    looks = [sampler.take(number, {0: rank.pid}).ranks[0] for number in (1, 2)]
    assert looks[0].query_bytes == 0
    own = [
        look.process.io_bytes - look.query_bytes for look in looks if look.process and look.process.io_bytes is not None
    ]
    assert len(set(own)) == 1, "a sleeping rank moved no bytes of its own"


@pytest.mark.parametrize(("in_main_thread", "counted"), [(False, 0), (True, 7)])
def test_bytes_that_the_main_thread_reads_while_it_is_looked_at_are_the_programs_own(
    sampler: StackSampler, tmp_path: Path, *, in_main_thread: bool, counted: int
) -> None:
    """Unless faulthandler may have written them there."""
    os.mkfifo(tmp_path / "fifo")
    reads = "import os, sys\nfifo = os.open(sys.argv[1], os.O_RDWR)\nprint()\nwhile os.read(fifo, 100): pass"
    with program(reads, str(tmp_path / "fifo")) as process:
        seen = procfs.read_process(process.pid, 0)
        assert seen is not None
        assert seen.io_bytes is not None
        before = seen.io_bytes
        (tmp_path / "fifo").write_bytes(b"7 bytes")
        wait_for(lambda: procfs.io_bytes(process.pid) == before + 7, "it has read them")
        sampler._count_bytes(rank_snapshot(0, process=seen), in_main_thread=in_main_thread)
        assert sampler.query_bytes[process.pid] == counted


def test_the_python_children_of_a_rank_are_looked_at_too(sampler: StackSampler, tmp_path: Path) -> None:
    child = tmp_path / "worker.py"
    child.write_text(SLEEPER)
    program = tmp_path / "parent.py"
    program.write_text(f"import subprocess, sys\nsubprocess.run([sys.executable, '-S', {str(child)!r}])\n")
    with subprocess.Popen([sys.executable, "-S", str(program)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], 20.0)
        assert ready
        (seen,) = sampler.take(1, {0: process.pid}).ranks
        for one in seen.children:
            os.kill(one.pid, 9)
    assert [one.parent for one in seen.children] == [process.pid]
    stacks = seen.child_stacks[seen.children[0].pid]
    assert [frame.function for frame in stacks[0].frames] == ["step", "<module>"]


READER = """
import os
print(flush=True)
file = os.open("/dev/zero", os.O_RDONLY)
while True:
    os.read(file, 1)
"""


def test_bytes_that_a_rank_reads_while_others_look_at_it_are_its_own(sampler: StackSampler) -> None:
    with subprocess.Popen([sys.executable, "-ISc", READER], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        looks = [sampler.take(number, {0: process.pid}).ranks[0] for number in (1, 2)]
        process.kill()
    assert [look.query_bytes for look in looks] == [0, 0]


def serve(listening: socket.socket, text: str) -> None:
    """Plays torch's worker server for one question."""
    connection, _ = listening.accept()
    with connection:
        connection.recv(4096)
        connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())


@pytest.mark.parametrize(("text", "trouble"), [(json.dumps({"entries": [ENTRY]}), []), ("[]", ["flight recorder"])])
def test_the_worker_server_is_asked_first_and_its_answer_stays_for_the_judge(
    sampler: StackSampler, rank: subprocess.Popen[bytes], text: str, trouble: list[str]
) -> None:
    write_board(sampler, rank.pid, rank=0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(sampler.probe_dir / protocol.SOCKET.format(pid=rank.pid)))
        listening.listen()
        thread = threading.Thread(target=serve, args=(listening, text))
        thread.start()
        (seen,) = sampler.take(1, {0: rank.pid}).ranks
        thread.join()
    assert [one.what for one in sampler.trouble] == trouble
    assert [one.op for one in seen.collectives] == ([] if trouble else ["all_reduce"])
    assert (sampler.probe_dir / protocol.FLIGHT.format(pid=rank.pid)).exists() is not bool(trouble)


def answer_as_the_beat(sampler: StackSampler, pid: int) -> threading.Thread:
    """Plays the rank's beat thread for one question."""
    board = sampler.probe_dir / protocol.STATUS_FILE.format(pid=pid)

    def answer() -> None:
        asked = 0
        while not asked:
            (asked,) = protocol.REQUEST.unpack_from(board.read_bytes(), protocol.REQUEST_AT)
        (sampler.probe_dir / protocol.FLIGHT.format(pid=pid)).write_text(json.dumps({"entries": [ENTRY]}))
        with board.open("r+b") as file:
            file.seek(protocol.HEARTBEAT_AT)
            file.write(protocol.HEARTBEAT.pack(time.monotonic_ns(), asked))

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


def test_a_patient_look_asks_the_beat_of_a_rank_whose_python_runs_and_its_server_not_at_all(
    sampler: StackSampler, rank: subprocess.Popen[bytes]
) -> None:
    board = write_board(sampler, rank.pid, rank=0)
    with board.open("r+b") as file:
        file.seek(protocol.HEARTBEAT_AT)
        file.write(protocol.HEARTBEAT.pack(time.monotonic_ns(), 0))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(sampler.probe_dir / protocol.SOCKET.format(pid=rank.pid)))
        listening.listen()
        beat = answer_as_the_beat(sampler, rank.pid)
        (seen,) = sampler.take(1, {0: rank.pid}, prefers_heartbeat=True).ranks
        beat.join()
        assert select.select([listening], [], [], 0.0)[0] == [], "nobody has connected"
    assert [one.op for one in seen.collectives] == ["all_reduce"]


def test_a_patient_look_does_not_wait_for_a_beat_that_has_stopped(
    sampler: StackSampler, rank: subprocess.Popen[bytes]
) -> None:
    board = write_board(sampler, rank.pid, rank=0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(sampler.probe_dir / protocol.SOCKET.format(pid=rank.pid)))
        listening.listen()
        thread = threading.Thread(target=serve, args=(listening, json.dumps({"entries": [ENTRY]})))
        thread.start()
        (seen,) = sampler.take(1, {0: rank.pid}, prefers_heartbeat=True).ranks
        thread.join()
    assert [one.op for one in seen.collectives] == ["all_reduce"]
    assert protocol.REQUEST.unpack_from(board.read_bytes(), protocol.REQUEST_AT) == (0,)


def test_a_rank_that_moves_is_not_asked_for_its_recorder_for_the_profile(
    sampler: StackSampler, rank: subprocess.Popen[bytes]
) -> None:
    """Each dump of the recorder takes memory in the rank, more with each collective that it has recorded."""
    board = write_board(sampler, rank.pid, rank=0)

    def requests_after_a_look(completed: int, *, writes_dumps: bool) -> int:
        with board.open("r+b") as file:
            file.seek(protocol.COLLECTIVES_AT)
            file.write(protocol.COLLECTIVES.pack(completed, completed, 1))
        sampler.take(1, {0: rank.pid}, writes_dumps=writes_dumps)
        return int(protocol.REQUEST.unpack_from(board.read_bytes(), protocol.REQUEST_AT)[0])

    assert requests_after_a_look(5, writes_dumps=False) == 1, "nothing is known yet"
    assert requests_after_a_look(9, writes_dumps=False) == 1
    assert requests_after_a_look(9, writes_dumps=False) == 2, "it stands still"
    assert requests_after_a_look(12, writes_dumps=True) == 3
