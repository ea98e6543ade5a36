"""What a job offers by itself: the worker servers of torch.distributed.debug, the pipe of NCCL's flight recorder."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from living import program, wait_for

from nsa_harness.core.evidence.evidence import Collective, RankSnapshot
from nsa_harness.core.evidence.host import Socket
from nsa_harness.supervisor.capture import procfs, stacks
from nsa_harness.supervisor.capture.recorder import await_dump, find_own_server, request_dump
from nsa_harness.supervisor.capture.snapshot import StackSampler, drop_incomplete_recorders

PROGRAMS = Path(__file__).parent.parent / "programs"
RECORDED = {
    "entries": [
        {
            "process_group": ["0", "default_pg"],
            "profiling_name": "gloo:all_reduce",
            "collective_seq_id": 2,
            "input_sizes": [[5]],
            "input_dtypes": ["Float"],
            "state": "scheduled",
            "retired": False,
            "is_p2p": False,
            "time_created_ns": 1,
        }
    ]
}
STACKS = b'Thread 0x00007ff0 (most recent call first):\n  File "train.py", line 7 in train\n'


@contextmanager
def worker_server(answers: dict[str, bytes]) -> Iterator[tuple[int, list[str]]]:
    """Speaks as torch's does, at a port of all addresses; what it does not know is 404."""
    asked: list[str] = []
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    handler = connection.recv(4096).split()[1].decode().rpartition("/")[2]
                    asked.append(handler)
                    body, status = answers.get(handler, b"Handler!"), b"200 OK" if handler in answers else b"404 No"
                    connection.sendall(b"HTTP/1.1 " + status + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1], asked
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def listening(port: int, at: str = "[::]", state: str = "LISTEN") -> Socket:
    return Socket(
        inode=port, local=f"{at}:{port}", peer="[::]:0", state=state, unacked_bytes=0, unread_bytes=0, retransmits=0
    )


def refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No process may be traced."""
    path = tmp_path / "py-spy"
    path.write_text("#!/bin/sh\necho 'Error: Permission Denied' >&2\nexit 1\n")
    path.chmod(0o755)
    monkeypatch.setattr(stacks, "tool_path", lambda name: str(path) if name == "py-spy" else None)


def test_a_port_that_answers_as_torchs_server_is_one_and_no_other_is_asked() -> None:
    with worker_server({"ping": b"pong"}) as (port, asked), worker_server({}) as (other, strange):
        found = find_own_server(1, {"MASTER_PORT": "x"}, [listening(other), listening(port)])
        assert found == port
        assert (asked, strange) in ((["ping"], []), (["ping"], ["ping"]))
        assert find_own_server(1, {"MASTER_PORT": str(port)}, [listening(port)]) is None  # the store is left alone
        assert find_own_server(1, {}, [listening(port, "127.0.0.1"), listening(port, state="ESTABLISHED")]) is None
        assert asked == ["ping"]


def test_a_server_on_a_unix_socket_is_found_by_the_environment() -> None:
    gone = {"TORCH_WORKER_SERVER_SOCKET": "/nowhere/worker.sock"}
    assert find_own_server(os.getpid(), gone, []) is None


def test_without_the_right_to_trace_stacks_and_recorder_are_those_that_the_process_gives(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refused(monkeypatch, tmp_path)
    answers = {"ping": b"pong", "dump_traceback": STACKS, "fr_trace_json": json.dumps(RECORDED).encode()}
    sampler = StackSampler(origin_ns=time.monotonic_ns(), probe_dir=tmp_path, dumps=tmp_path / "dumps")
    with worker_server(answers) as (_, asked):
        for number in (1, 2):
            (rank,) = sampler.take(number, {0: os.getpid()}).ranks
    assert [(one.source, one.frames[0].file, one.frames[0].line) for one in rank.stacks] == [
        ("worker server", "train.py", 7)
    ]
    assert [(one.op, one.seq, one.sizes, one.retired) for one in rank.collectives] == [
        ("all_reduce", 2, ((5,),), False)
    ]
    assert asked.count("ping") == 1
    assert json.loads((tmp_path / f"{os.getpid()}.flight.json").read_text()) == RECORDED
    (told,) = {trouble.why for trouble in sampler.trouble if trouble.what == "stacks"}
    assert told.endswith("read with worker server instead")


def test_an_empty_recorder_of_gloo_gives_way_to_that_of_nccl(tmp_path: Path) -> None:
    nccl = json.dumps({"entries": [{**RECORDED["entries"][0], "profiling_name": "nccl:all_reduce"}]}).encode()
    answers = {"ping": b"pong", "fr_trace_json": b'{"version":"2.10"}', "dump_nccl_trace_json": nccl}
    sampler = StackSampler(origin_ns=time.monotonic_ns(), probe_dir=tmp_path, dumps=tmp_path / "dumps")
    with worker_server(answers):
        (rank,) = sampler.take(1, {0: os.getpid()}).ranks
    assert [(one.op, one.started) for one in rank.collectives] == [("all_reduce", False)]


def test_recorders_count_only_where_each_rank_has_given_its_own() -> None:
    entry = Collective(group="0", seq=1, op="barrier", sizes=(), dtypes=(), retired=False, created_ns=1)
    process = procfs.read_process(os.getpid(), 0)
    whole = [RankSnapshot(rank=rank, pid=7, process=process, collectives=(entry,)) for rank in (0, 1)]
    assert drop_incomplete_recorders(whole) == tuple(whole)
    half = [whole[0], replace(whole[1], collectives=())]
    assert [rank.collectives for rank in drop_incomplete_recorders(half)] == [(), ()]


# As torch's ProcessGroupNCCL.hpp makes and reads its pipe (struct DumpPipe: mkfifo of the stem, the rank and ".pipe",
# opened to read without blocking, whatever comes is a request) and FlightRecorder writes the file: the prefix and rank.
PIPED = """
import os, pickle, sys, time
pipe, file = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + "1.pipe", os.environ["TORCH_FR_DUMP_TEMP_FILE"] + "1"
os.mkfifo(pipe)
reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
print(flush=True)
while True:
    try:
        asked = os.read(reader, 128)
    except BlockingIOError:
        asked = b""
    if asked:
        entry = {"process_group": ("0", "default_pg"), "profiling_name": "nccl:all_gather", "collective_seq_id": 7,
                 "input_sizes": ((4,),), "input_dtypes": ["Float"], "state": "started", "is_p2p": False,
                 "time_created_ns": 1, "retired": False}
        with open(file, "wb") as dump:
            dump.write(pickle.dumps({"version": "2.10", "entries": [entry]}, protocol=2))
    time.sleep(0.02)
"""


def test_a_recorder_is_asked_for_by_its_pipe_and_read_at_the_next_look(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", str(tmp_path / "pipe"))
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "trace"))
    stale = tmp_path / "trace1"
    stale.write_text("{}")
    os.utime(stale, (1, 1))
    sampler = StackSampler(origin_ns=time.monotonic_ns(), probe_dir=tmp_path, dumps=tmp_path / "dumps")
    with program(PIPED, options=("-S", "-u")) as rank:
        first, second = (sampler.take(number, {1: rank.pid}).ranks[0].collectives for number in (1, 2))
    assert first == ()
    assert [(one.op, one.seq, one.sizes, one.started, one.retired) for one in second] == [
        ("all_gather", 7, ((4,),), True, False)
    ]
    assert [(one.rank, one.pipe) for one in sampler.pipe_requests.values()] == [(1, str(tmp_path / "pipe1.pipe"))]
    assert [trouble.why for trouble in sampler.trouble if trouble.what == "flight recorder"] == []


def test_a_pipe_that_nobody_reads_or_that_is_none_is_left_alone(tmp_path: Path) -> None:
    environment = {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(tmp_path / "pipe"), "HOME": str(tmp_path)}
    assert request_dump(os.getpid(), 0, {}) is None
    assert request_dump(os.getpid(), 0, environment) is None
    plain = tmp_path / "pipe0.pipe"
    plain.touch()
    assert request_dump(os.getpid(), 0, environment) is None
    assert plain.read_bytes() == b""
    plain.unlink()
    os.mkfifo(plain)
    with pytest.raises(OSError, match="No such device"):
        request_dump(os.getpid(), 0, environment)
    with pytest.raises(TimeoutError, match=r"comm_lib_trace_rank_0 was written within 0\.1 s"):
        await_dump(os.getpid(), 0, environment, 0, 0.1)
    old = tmp_path / ".cache" / "torch" / "comm_lib_trace_rank_0"
    old.parent.mkdir(parents=True)
    old.write_text("{}")
    os.utime(old, (1, 1))
    with pytest.raises(TimeoutError):
        await_dump(os.getpid(), 0, environment, 2 * 10**9, 0.1)
    assert await_dump(os.getpid(), 0, environment, 10**9, 0.1) == b"{}"


@pytest.mark.slow
def test_the_servers_of_a_real_job_give_its_stacks_and_recorders(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refused(monkeypatch, tmp_path)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": "100", "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(
        [*command, str(PROGRAMS / "served.py")], env=environment, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        ranks: Callable[[], list[psutil.Process]] = lambda: psutil.Process(job.pid).children()  # noqa: E731
        sleeps = lambda pid: procfs.kernel_text(f"/proc/{pid}/wchan") == "hrtimer_nanosleep"  # noqa: E731
        wait_for(lambda: any(sleeps(one.pid) for one in ranks()), "rank 1 sleeps", limit_s=60.0)
        pids = {int(one.environ()["RANK"]): one.pid for one in ranks()}
        sampler = StackSampler(origin_ns=time.monotonic_ns(), probe_dir=tmp_path, dumps=tmp_path / "dumps")
        looked = sampler.take(1, pids).ranks
    finally:
        for one in psutil.Process(job.pid).children(recursive=True):
            one.kill()
        job.kill()
        job.communicate()
    assert [next(f.function for f in one.stacks[-1].frames if f.file.endswith("served.py")) for one in looked] == [
        "wait_for_the_others",
        "train",
    ]
    pending = [[(one.op, one.sizes) for one in rank.collectives if not one.retired] for rank in looked]
    assert pending == [[("all_reduce", ((5,),))], []]
