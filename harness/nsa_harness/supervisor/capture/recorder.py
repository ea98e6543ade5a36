"""Read a rank's flight recorder while its Python is stuck: from torch's worker server, or through NCCL's pipe.

The worker server (`torch._C._distributed_c10d._WorkerServer`, private) also answers with stacks. The probe starts it in
each rank, on a unix socket. A job may have its own: on a port by `torch.distributed.debug.start_debug_server` (torch
2.10 and later), or on a unix socket by torch.distributed.elastic.control_plane, with a path from the environment. The
server's answers are not trusted.
"""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from nsa_harness import protocol
from nsa_harness.core.evidence.evidence import Collective
from nsa_harness.core.evidence.flight import MAX_BYTES, parse_flight
from nsa_harness.core.evidence.host import Socket
from nsa_harness.supervisor.capture.procfs import path_of

STACKS_HANDLER = "dump_traceback"  # answers in the format of Python's faulthandler
LIMIT_S = 1.0
ANSWER_LIMIT_BYTES = 16 << 20  # the recorder's default 2000 entries are under 1 MB
_HEAD_LIMIT_BYTES = 16 << 10
_CHUNK = 1 << 16


def ask_flight(boards: Path, pid: int, limit_s: float = LIMIT_S) -> str:
    """Return the flight recorder of a process as JSON text. Raises like `ask`."""
    return ask(boards / protocol.SOCKET.format(pid=pid), protocol.FLIGHT_HANDLER, limit_s=limit_s).decode(
        "utf-8", "replace"
    )


_NCCL_HANDLER = "dump_nccl_trace_json"
_ENV_SOCKET = "TORCH_WORKER_SERVER_SOCKET"
_ANY_ADDRESS = "[::]:"  # start_debug_server listens on all addresses; gloo and NCCL listen on one
_MAX_PORTS = 4  # tried per process
_PING_S = 0.3


def ask_worker_server(where: Path | int, limit_s: float = LIMIT_S) -> tuple[str, tuple[Collective, ...]]:
    """Return the flight recorder from a job's own worker server, as text and parsed. Raises like `ask`.

    It is gloo's recorder, or NCCL's if gloo's is empty.
    """
    text = ask(where, protocol.FLIGHT_HANDLER, limit_s=limit_s).decode("utf-8", "replace")
    recorded = parse_flight(text)
    if not recorded:
        with suppress(ValueError):  # a torch built without CUDA has no such handler
            text = ask(where, _NCCL_HANDLER, limit_s=limit_s).decode("utf-8", "replace")
            recorded = parse_flight(text)
    return text, recorded


def find_worker_server(pid: int, environment: Mapping[str, str], sockets: Sequence[Socket]) -> Path | int | None:
    """Return the socket or port of the worker server that the job itself started in this process, or None.

    Try the socket that the environment names, then the ports on which the process listens (`sockets`), except the
    store's.
    """
    for where in _candidates(pid, environment, sockets):
        try:
            if ask(where, "ping", limit_s=_PING_S) == b"pong":
                return where
        except (OSError, ValueError):
            continue
    return None


def _candidates(pid: int, environment: Mapping[str, str], sockets: Sequence[Socket]) -> Iterator[Path | int]:
    if environment.get(_ENV_SOCKET):
        yield path_of(pid, environment[_ENV_SOCKET])
    listening = [connection.local for connection in sockets if connection.state == "LISTEN"]
    ports = {int(local.removeprefix(_ANY_ADDRESS)) for local in listening if local.startswith(_ANY_ADDRESS)}
    store_port = environment.get("MASTER_PORT", "")
    yield from sorted(ports - ({int(store_port)} if store_port.isdigit() else set()))[:_MAX_PORTS]


def ask(where: Path | int, handler: str, *, limit_s: float = LIMIT_S, limit_bytes: int = ANSWER_LIMIT_BYTES) -> bytes:
    """Return the body of the answer within `limit_s`. `where`: a unix socket, or a port of this host.

    Raises FileNotFoundError if no server was started, OSError if none listens or answers in time, and ValueError if the
    answer is an error, too large, incomplete or no HTTP.
    """
    deadline_s = time.monotonic() + limit_s
    with socket.socket(socket.AF_INET if isinstance(where, int) else socket.AF_UNIX) as connection:
        _limit_to_remaining_time(connection, deadline_s)
        if isinstance(where, int):
            connection.connect(("127.0.0.1", where))
        else:
            _connect(connection, where)
        connection.sendall(f"POST /handler/{handler} HTTP/1.0\r\nHost: rank\r\nContent-Length: 0\r\n\r\n".encode())
        return _body(connection, deadline_s, limit_bytes)


def _connect(connection: socket.socket, path: Path) -> None:
    """Connect to a unix socket. A path that is too long for a socket's address goes through the directory's fd."""
    if len(os.fsencode(path)) <= protocol.SOCKET_PATH_LIMIT:
        connection.connect(os.fspath(path))
        return
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        connection.connect(f"/proc/self/fd/{directory}/{path.name}")
    finally:
        os.close(directory)


def _body(connection: socket.socket, deadline_s: float, limit_bytes: int) -> bytes:
    received = b""
    while b"\r\n\r\n" not in received:
        if len(received) > _HEAD_LIMIT_BYTES:
            raise ValueError(f"no end of the head within {_HEAD_LIMIT_BYTES} bytes")
        received += _receive(connection, deadline_s, "head")
    head, _, body = received.partition(b"\r\n\r\n")
    size = _body_size(head, limit_bytes)
    parts, left = [body], size - len(body)
    while left > 0:
        parts.append(_receive(connection, deadline_s, "body"))
        left -= len(parts[-1])
    body = b"".join(parts)[:size]
    if head.split(b"\r\n", 1)[0].split(b" ")[1:2] != [b"200"]:
        raise ValueError(f"{_first_line(head)}: {body[:200].decode('utf-8', 'replace')}")
    return body


def _receive(connection: socket.socket, deadline_s: float, part: str) -> bytes:
    _limit_to_remaining_time(connection, deadline_s)
    received = connection.recv(_CHUNK)
    if not received:
        raise ValueError(f"the answer ends in the middle of its {part}")
    return received


def _limit_to_remaining_time(connection: socket.socket, deadline_s: float) -> None:
    """Set the socket's timeout to the remaining time, so that a slow server gets no more than that."""
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the answer takes too long")
    connection.settimeout(left_s)


def _body_size(head: bytes, limit_bytes: int) -> int:
    """Return the size of the body from an HTTP answer's head.

    Raises ValueError if this is no HTTP answer, has no Content-Length, or announces more than `limit_bytes`.
    """
    if not head.startswith(b"HTTP/1."):
        raise ValueError(f"no HTTP: {_first_line(head)}")
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length" and value.strip().isdigit() and len(value) < 20:
            size = int(value)
            if size > limit_bytes:
                raise ValueError(f"an answer of {size} bytes, {limit_bytes} are read at most")
            return size
    raise ValueError(f"an answer without a length: {_first_line(head)}")


def _first_line(head: bytes) -> str:
    return head.split(b"\r\n", 1)[0][:100].decode("utf-8", "replace")


# NCCL's pipe. A process has it if TORCH_NCCL_DEBUG_INFO_PIPE_FILE is set: any byte makes NCCL's watchdog write the
# recorder, within about a second.

_PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")  # a prefix; the first variable takes precedence
_DEFAULTS = (".cache/torch/comm_lib_trace_rank_", ".cache/torch/nccl_trace_rank_")  # below HOME
_OLD_DEFAULT = "/tmp/nccl_trace_rank_"
_SETTLES_S = 0.05


def request_dump(pid: int, rank: int, environment: Mapping[str, str]) -> str | None:
    """Make NCCL write the recorder. Return the pipe's path, as the process names it, or None without a pipe.

    Raises OSError if no process reads the pipe.
    """
    stem = environment.get(_PIPE)
    if not stem:
        return None
    name = f"{stem}{rank}.pipe"
    try:
        pipe = os.open(path_of(pid, name), os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        if not stat.S_ISFIFO(os.fstat(pipe).st_mode):
            return None
        os.write(pipe, b"1\n")
    finally:
        os.close(pipe)
    return name


def await_dump(pid: int, rank: int, environment: Mapping[str, str], since_ns: int, limit_s: float) -> bytes:
    """Wait for a dump of the recorder that is newer than `since_ns` (wall clock), and return its bytes.

    Raises OSError, and TimeoutError after `limit_s`.
    """
    prefix = next((environment[name] for name in _FILES if environment.get(name)), None)
    home = environment.get("HOME", "/")
    names = [prefix] if prefix else [*(os.path.join(home, name) for name in _DEFAULTS), _OLD_DEFAULT]
    files = [path_of(pid, f"{name}{rank}") for name in names]
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        for file in files:
            if _is_complete(file, since_ns):
                with file.open("rb") as dump:
                    return dump.read(MAX_BYTES + 1)
        time.sleep(_SETTLES_S)
    raise TimeoutError(f"no {names[0]}{rank} was written within {limit_s:.1f} s")


def _is_complete(file: Path, since_ns: int) -> bool:
    """Whether a regular file was written after `since_ns` and has not changed for a moment."""
    try:
        status = file.lstat()
    except OSError:
        return False
    quiet = time.time_ns() - status.st_mtime_ns > _SETTLES_S * 1e9
    return stat.S_ISREG(status.st_mode) and status.st_size > 0 and status.st_mtime_ns >= since_ns and quiet
