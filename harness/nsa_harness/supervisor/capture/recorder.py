"""Reads a rank's flight recorder even while its Python code is stuck.

It is read from PyTorch's worker server or through NCCL's pipe. The worker server (the private class
`torch._C._distributed_c10d._WorkerServer`) can also return stacks. The probe starts it in each rank, on a Unix socket.
A job can start its own worker server: on a port with `torch.distributed.debug.start_debug_server` (torch 2.10 and
later), or on a Unix socket with torch.distributed.elastic.control_plane, whose path is in the environment. Responses of
a server are not trusted.
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
from nsa_harness.supervisor.capture.procfs import path_in_process

STACKS_HANDLER = "dump_traceback"  # responds in the format of Python's faulthandler
LIMIT_S = 1.0
RESPONSE_LIMIT_BYTES = 16 << 20  # 2000 entries, the recorder's default, are less than 1 MB
_HEAD_LIMIT_BYTES = 16 << 10
_CHUNK = 1 << 16


def query_flight_recorder(probe_dir: Path, pid: int, limit_s: float = LIMIT_S) -> str:
    """Return the flight recorder dump of a process as JSON text, from the worker server that the probe started."""
    return query(probe_dir / protocol.SOCKET.format(pid=pid), protocol.FLIGHT_HANDLER, limit_s=limit_s).decode(
        "utf-8", "replace"
    )


_NCCL_HANDLER = "dump_nccl_trace_json"
_ENV_SOCKET = "TORCH_WORKER_SERVER_SOCKET"
_ANY_ADDRESS = "[::]:"  # start_debug_server listens on all addresses; gloo and NCCL listen on a single address
_MAX_PORTS = 4  # ports that are tried per process
_PING_S = 0.3


def query_own_server(address: Path | int, limit_s: float = LIMIT_S) -> tuple[str, tuple[Collective, ...]]:
    """Return gloo's, or else NCCL's, recorder dump from the job's own worker server, as text and parsed."""
    text = query(address, protocol.FLIGHT_HANDLER, limit_s=limit_s).decode("utf-8", "replace")
    collectives = parse_flight(text)
    if not collectives:
        with suppress(ValueError):  # a torch that was built without CUDA does not have this handler
            text = query(address, _NCCL_HANDLER, limit_s=limit_s).decode("utf-8", "replace")
            collectives = parse_flight(text)
    return text, collectives


def find_own_server(pid: int, environment: Mapping[str, str], sockets: Sequence[Socket]) -> Path | int | None:
    """Return the address of the job's own worker server, from `environment` or among `sockets`, or None."""
    for address in _candidates(pid, environment, sockets):
        try:
            if query(address, "ping", limit_s=_PING_S) == b"pong":
                return address
        except (OSError, ValueError):
            continue
    return None


def _candidates(pid: int, environment: Mapping[str, str], sockets: Sequence[Socket]) -> Iterator[Path | int]:
    if environment.get(_ENV_SOCKET):
        yield path_in_process(pid, environment[_ENV_SOCKET])
    listening = [connection.local for connection in sockets if connection.state == "LISTEN"]
    ports = {int(local.removeprefix(_ANY_ADDRESS)) for local in listening if local.startswith(_ANY_ADDRESS)}
    store_port = environment.get("MASTER_PORT", "")
    yield from sorted(ports - ({int(store_port)} if store_port.isdigit() else set()))[:_MAX_PORTS]


def query(
    address: Path | int, handler: str, *, limit_s: float = LIMIT_S, limit_bytes: int = RESPONSE_LIMIT_BYTES
) -> bytes:
    """Send a request to the worker server at `address`, and return the body of the response.

    `address` is the path of a Unix socket, or a port of this host. Raise FileNotFoundError if no server was started,
    OSError if no server responds within `limit_s`, and ValueError if the response is an error, too large, incomplete,
    or not HTTP.
    """
    deadline_s = time.monotonic() + limit_s
    with socket.socket(socket.AF_INET if isinstance(address, int) else socket.AF_UNIX) as connection:
        _limit_to_remaining_time(connection, deadline_s)
        if isinstance(address, int):
            connection.connect(("127.0.0.1", address))
        else:
            _connect(connection, address)
        connection.sendall(f"POST /handler/{handler} HTTP/1.0\r\nHost: rank\r\nContent-Length: 0\r\n\r\n".encode())
        return _body(connection, deadline_s, limit_bytes)


_RAS_PORT = 28028
_RAS_LIMIT_S = 4.0
_RAS_HANDSHAKE_S = 0.5
# NCCL waits 2 s for the answers of other nodes. A version without JSON refuses that line and answers in text.
_RAS_REQUEST = b"TIMEOUT 2\nSET FORMAT json\nVERBOSE STATUS\n"


def find_ras(environment: Mapping[str, str], sockets: Sequence[Socket]) -> tuple[str, int] | None:
    """Return the address on which NCCL's RAS service of a process listens, or None if it does not."""
    port = environment.get("NCCL_RAS_ADDR", "").rpartition(":")[2] or str(_RAS_PORT)
    addresses = (connection.local.rpartition(":") for connection in sockets if connection.state == "LISTEN")
    return next(((host.strip("[]"), int(port)) for host, _, own_port in addresses if own_port == port), None)


def query_ras(address: tuple[str, int], limit_s: float = _RAS_LIMIT_S) -> str:
    """Return the answer of NCCL's RAS service. Raise OSError or ValueError if it gives none within `limit_s`.

    All ranks of a node listen on one address, and the kernel picks one of them for each connection. If that rank does
    not answer, because its process is stopped, another connection is tried.
    """
    deadline_s = time.monotonic() + limit_s
    while True:
        with socket.create_connection(address, timeout=_RAS_HANDSHAKE_S) as connection:
            connection.sendall(b"CLIENT PROTOCOL 2\n")
            try:
                answer = connection.recv(_CHUNK)
            except TimeoutError:
                if time.monotonic() > deadline_s - 2 * _RAS_HANDSHAKE_S:
                    raise
                continue
            if not answer.startswith(b"SERVER PROTOCOL "):
                raise ValueError(f"not NCCL's RAS service: {answer[:100]!r}")
            connection.sendall(_RAS_REQUEST)
            parts, size = [answer], len(answer)
            while answer:
                _limit_to_remaining_time(connection, deadline_s)
                answer = connection.recv(_CHUNK)
                parts.append(answer)
                size += len(answer)
                if size > RESPONSE_LIMIT_BYTES:
                    raise ValueError(f"an answer of more than {RESPONSE_LIMIT_BYTES} bytes")
            return b"".join(parts).decode("utf-8", "replace")


def _connect(connection: socket.socket, path: Path) -> None:
    """Connect to a Unix socket, even if its path is too long for a socket address."""
    if len(os.fsencode(path)) <= protocol.SOCKET_PATH_LIMIT:
        connection.connect(os.fspath(path))
        return
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        connection.connect(f"/proc/self/fd/{directory}/{path.name}")
    finally:
        os.close(directory)


def _body(connection: socket.socket, deadline_s: float, limit_bytes: int) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        if len(data) > _HEAD_LIMIT_BYTES:
            raise ValueError(f"the response header does not end within {_HEAD_LIMIT_BYTES} bytes")
        data += _receive(connection, deadline_s, "header")
    head, _, body = data.partition(b"\r\n\r\n")
    size = _body_size(head, limit_bytes)
    parts, bytes_left = [body], size - len(body)
    while bytes_left > 0:
        parts.append(_receive(connection, deadline_s, "body"))
        bytes_left -= len(parts[-1])
    body = b"".join(parts)[:size]
    if head.split(b"\r\n", 1)[0].split(b" ")[1:2] != [b"200"]:
        raise ValueError(f"{_first_line(head)}: {body[:200].decode('utf-8', 'replace')}")
    return body


def _receive(connection: socket.socket, deadline_s: float, part: str) -> bytes:
    _limit_to_remaining_time(connection, deadline_s)
    data = connection.recv(_CHUNK)
    if not data:
        raise ValueError(f"the response ends in the middle of its {part}")
    return data


def _limit_to_remaining_time(connection: socket.socket, deadline_s: float) -> None:
    remaining_s = deadline_s - time.monotonic()
    if remaining_s <= 0:
        raise TimeoutError("the response takes too long")
    connection.settimeout(remaining_s)


def _body_size(head: bytes, limit_bytes: int) -> int:
    """Return the size in bytes of the body of an HTTP response. Raise ValueError if the header is invalid."""
    if not head.startswith(b"HTTP/1."):
        raise ValueError(f"not an HTTP response: {_first_line(head)}")
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length" and value.strip().isdigit() and len(value) < 20:
            size = int(value)
            if size > limit_bytes:
                raise ValueError(f"the response has {size} bytes; at most {limit_bytes} are read")
            return size
    raise ValueError(f"a response without a length: {_first_line(head)}")


def _first_line(head: bytes) -> str:
    return head.split(b"\r\n", 1)[0][:100].decode("utf-8", "replace")


# NCCL's pipe. A process has this pipe if TORCH_NCCL_DEBUG_INFO_PIPE_FILE is set. If any byte is written to it, NCCL's
# watchdog writes the recorder to a file within about a second.

_PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
# Variables with the prefix of the file's name. The first variable takes precedence.
_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_DEFAULTS = (".cache/torch/comm_lib_trace_rank_", ".cache/torch/nccl_trace_rank_")  # relative to HOME
_OLD_DEFAULT = "/tmp/nccl_trace_rank_"
_UNCHANGED_S = 0.05  # a file that has not changed for this long is complete


def request_dump(pid: int, rank: int, environment: Mapping[str, str]) -> str | None:
    """Ask NCCL to dump a rank's flight recorder.

    Return the path of the rank's pipe as the process sees it, or None if the process has no pipe. Raise OSError if no
    process reads the pipe.
    """
    prefix = environment.get(_PIPE)
    if not prefix:
        return None
    name = f"{prefix}{rank}.pipe"
    try:
        pipe = os.open(path_in_process(pid, name), os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
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
    """Return the bytes of the dump that NCCL writes after `since_ns`. Raise TimeoutError or OSError without one."""
    prefix = next((environment[name] for name in _FILES if environment.get(name)), None)
    home = environment.get("HOME", "/")
    names = [prefix] if prefix else [*(os.path.join(home, name) for name in _DEFAULTS), _OLD_DEFAULT]
    files = [path_in_process(pid, f"{name}{rank}") for name in names]
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        for file in files:
            if _is_complete(file, since_ns):
                with file.open("rb") as dump:
                    return dump.read(MAX_BYTES + 1)
        time.sleep(_UNCHANGED_S)
    raise TimeoutError(f"no {names[0]}{rank} was written within {limit_s:.1f} s")


def _is_complete(file: Path, since_ns: int) -> bool:
    """Return whether the dump in `file` was written after `since_ns` and is no longer changing."""
    try:
        status = file.lstat()
    except OSError:
        return False
    is_unchanged = time.time_ns() - status.st_mtime_ns > _UNCHANGED_S * 1e9
    return stat.S_ISREG(status.st_mode) and status.st_size > 0 and status.st_mtime_ns >= since_ns and is_unchanged
