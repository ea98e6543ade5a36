"""Asks the worker server of a process. It answers while Python is stuck there, and is not trusted.

The server is torch's own (`torch._C._distributed_c10d._WorkerServer`, private). The probe starts it in each rank, on a
unix socket. A job may have one of its own: on a port by `torch.distributed.debug.start_debug_server` (torch 2.10 and
later), on a unix socket by torch.distributed.elastic.control_plane, which takes its path from the environment.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from nsa_harness import protocol
from nsa_harness.core.evidence.evidence import Collective
from nsa_harness.core.evidence.flight import parse_flight
from nsa_harness.core.evidence.host import Socket
from nsa_harness.supervisor.capture.containers import path_of

STACKS_HANDLER = "dump_traceback"  # as Python's faulthandler writes them
LIMIT_S = 1.0
ANSWER_LIMIT_BYTES = 16 << 20  # the recorder's default 2000 entries are under 1 MB
_HEAD_LIMIT_BYTES = 16 << 10
_CHUNK = 1 << 16


def ask_flight(boards: Path, pid: int, limit_s: float = LIMIT_S) -> str:
    """The flight recorder of a process as JSON text. Raises as `ask` does."""
    return ask(boards / protocol.SOCKET.format(pid=pid), protocol.FLIGHT_HANDLER, limit_s=limit_s).decode(
        "utf-8", "replace"
    )


_NCCL_HANDLER = "dump_nccl_trace_json"
_ENV_SOCKET = "TORCH_WORKER_SERVER_SOCKET"
_EVERYWHERE = "[::]:"  # where start_debug_server listens; gloo and NCCL listen at one address
_MAX_PORTS = 4  # that are tried of one process
_PING_S = 0.3


def ask_own_flight(where: Path | int, limit_s: float = LIMIT_S) -> tuple[str, tuple[Collective, ...]]:
    """The recorder of a process that has the server by itself: of gloo, or where that is empty of NCCL.

    Raises as `ask` does.
    """
    text = ask(where, protocol.FLIGHT_HANDLER, limit_s=limit_s).decode("utf-8", "replace")
    recorded = parse_flight(text)
    if not recorded:
        with suppress(ValueError):  # a build without CUDA does not know it
            text = ask(where, _NCCL_HANDLER, limit_s=limit_s).decode("utf-8", "replace")
            recorded = parse_flight(text)
    return text, recorded


def own_server(pid: int, environment: Mapping[str, str], sockets: Sequence[Socket]) -> Path | int | None:
    """Where the job's own worker server of this process listens: a socket, or a port; None where none answers.

    `sockets`: those of the process. A port is taken for one where it answers as such; the store's is not asked.
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
    open_to_all = [one.local for one in sockets if one.state == "LISTEN" and one.local.startswith(_EVERYWHERE)]
    ports = {int(local.removeprefix(_EVERYWHERE)) for local in open_to_all}
    yield from sorted(ports - {int(port) for port in [environment.get("MASTER_PORT", "")] if port.isdigit()})[
        :_MAX_PORTS
    ]


def ask(where: Path | int, handler: str, *, limit_s: float = LIMIT_S, limit_bytes: int = ANSWER_LIMIT_BYTES) -> bytes:
    """The body of the answer, all of it within `limit_s`. `where`: a socket, or a port of this host.

    Raises FileNotFoundError where no server was started, OSError where none listens or it takes too long, and
    ValueError where the answer is an error, too large, cut short or no HTTP.
    """
    deadline_s = time.monotonic() + limit_s
    with socket.socket(socket.AF_INET if isinstance(where, int) else socket.AF_UNIX) as connection:
        _allow(connection, deadline_s)
        if isinstance(where, int):
            connection.connect(("127.0.0.1", where))
        else:
            _connect(connection, where)
        connection.sendall(f"POST /handler/{handler} HTTP/1.0\r\nHost: rank\r\nContent-Length: 0\r\n\r\n".encode())
        return _body(connection, deadline_s, limit_bytes)


def _connect(connection: socket.socket, path: Path) -> None:
    """Through the directory's descriptor where the path itself is longer than a socket's address may be."""
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
        received += _more(connection, deadline_s, "head")
    head, _, body = received.partition(b"\r\n\r\n")
    size = _announced(head, limit_bytes)
    parts, left = [body], size - len(body)
    while left > 0:
        parts.append(_more(connection, deadline_s, "body"))
        left -= len(parts[-1])
    body = b"".join(parts)[:size]
    if head.split(b"\r\n", 1)[0].split(b" ")[1:2] != [b"200"]:
        raise ValueError(f"{_first_line(head)}: {body[:200].decode('utf-8', 'replace')}")
    return body


def _more(connection: socket.socket, deadline_s: float, part: str) -> bytes:
    _allow(connection, deadline_s)
    received = connection.recv(_CHUNK)
    if not received:
        raise ValueError(f"the answer ends in the middle of its {part}")
    return received


def _allow(connection: socket.socket, deadline_s: float) -> None:
    """What is left of the time; a server that sends a byte now and then gets no more than that."""
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the answer takes too long")
    connection.settimeout(left_s)


def _announced(head: bytes, limit_bytes: int) -> int:
    """The size of the body. The server always says it."""
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
