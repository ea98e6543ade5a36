"""Asks the worker server of a process over its unix socket. It answers while Python is stuck there, and is not trusted.

The server is torch's own (`torch._C._distributed_c10d._WorkerServer`, private); the probe starts it in each rank.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from nsa_harness import protocol

LIMIT_S = 1.0
ANSWER_LIMIT_BYTES = 16 << 20  # the recorder's default 2000 entries are under 1 MB
_HEAD_LIMIT_BYTES = 16 << 10
_CHUNK = 1 << 16


def ask_flight(boards: Path, pid: int, limit_s: float = LIMIT_S) -> str:
    """The flight recorder of a process as JSON text. Raises as `ask` does."""
    return ask(boards / protocol.SOCKET.format(pid=pid), protocol.FLIGHT_HANDLER, limit_s=limit_s).decode(
        "utf-8", "replace"
    )


def ask(path: Path, handler: str, *, limit_s: float = LIMIT_S, limit_bytes: int = ANSWER_LIMIT_BYTES) -> bytes:
    """The body of the answer, all of it within `limit_s`.

    Raises FileNotFoundError where no server was started, OSError where none listens or it takes too long, and
    ValueError where the answer is an error, too large, cut short or no HTTP.
    """
    deadline_s = time.monotonic() + limit_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        _allow(connection, deadline_s)
        _connect(connection, path)
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
