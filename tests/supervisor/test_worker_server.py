"""Asking a worker server: a good answer is given on, a bad one is refused in time and with the reason."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_harness import protocol
from nsa_harness.core.evidence.host import Socket
from nsa_harness.supervisor.capture import recorder
from nsa_harness.supervisor.capture.recorder import find_ras, query, query_flight_recorder, query_ras

Answer = Callable[[socket.socket], object]


@contextmanager
def server(path: Path, answer: Answer) -> Iterator[list[bytes]]:
    """One connection is accepted, its request read, and `answer` called with it."""
    asked: list[bytes] = []
    with socket.socket(socket.AF_UNIX) as listener:
        descriptor = os.open(path.parent, os.O_RDONLY)
        listener.bind(f"/proc/self/fd/{descriptor}/{path.name}")
        os.close(descriptor)
        listener.listen()
        thread = threading.Thread(target=lambda: _serve(listener, answer, asked))
        thread.start()
        try:
            yield asked
        finally:
            thread.join()


def _serve(listener: socket.socket, answer: Answer, asked: list[bytes]) -> None:
    connection, _ = listener.accept()
    with connection:
        asked.append(connection.recv(4096))
        try:
            answer(connection)
        except OSError:
            asked.append(b"the asker has gone")


def says(*parts: bytes) -> Answer:
    return lambda connection: [connection.sendall(part) for part in parts]


OK = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 12\r\nContent-Type: application/json\r\n\r\n"


def test_a_whole_answer_in_pieces_is_given_on(tmp_path: Path) -> None:
    path = tmp_path / protocol.SOCKET.format(pid=7)
    with server(path, says(OK[:10], OK[10:], b'{"entri', b'es":1', b"} and more")) as asked:
        assert query_flight_recorder(tmp_path, 7) == '{"entries":1'
    assert asked[0].startswith(b"POST /handler/fr_trace_json HTTP/1.0\r\n")


def test_a_server_behind_a_long_path_is_reached(tmp_path: Path) -> None:
    directory = tmp_path / ("d" * 120)
    directory.mkdir()
    with server(directory / "7.sock", says(OK, b'{"entries":1}')):
        assert query(directory / "7.sock", "ping") == b'{"entries":1'


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([b"HTTP/1.1 404 Not Found\r\nContent-Length: 8\r\n\r\n", b"Handler!"], "HTTP/1.1 404 Not Found: Handler!"),
        ([b"SSH-2.0-OpenSSH\r\n\r\n"], "not an HTTP response: SSH-2.0-OpenSSH"),
        ([b"HTTP/1.1 200 OK\r\n\r\n{}"], "a response without a length: HTTP/1.1 200 OK"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n"], "a response without a length"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n"], "the response has 99999999 bytes; at most"),
        ([OK, b"short"], "the response ends in the middle of its body"),
        ([b"HTTP/1.1 200"], "the response ends in the middle of its header"),
        ([b""], "the response ends in the middle of its header"),
        ([b"x" * 40000], "the response header does not end within 16384 bytes"),
    ],
)
def test_a_bad_answer_is_refused_with_the_reason(tmp_path: Path, parts: list[bytes], reason: str) -> None:
    path = tmp_path / "7.sock"
    with server(path, says(*parts)), pytest.raises(ValueError, match=reason.replace("(", r"\(")):
        query(path, "fr_trace_json")


def test_a_server_that_says_nothing_costs_no_more_than_the_limit(tmp_path: Path) -> None:
    path, gone = tmp_path / "7.sock", threading.Event()
    with server(path, lambda _: gone.wait()):
        try:
            with pytest.raises(TimeoutError):
                query(path, "fr_trace_json", limit_s=0.2)
        finally:
            gone.set()


def test_a_server_that_drips_costs_no_more_than_the_limit(tmp_path: Path) -> None:
    path, gone = tmp_path / "7.sock", threading.Event()

    def drip(connection: socket.socket) -> None:
        connection.sendall(OK.replace(b"12", b"9999"))
        while not gone.wait(0.02):
            connection.sendall(b"x")

    with server(path, drip):
        try:
            with pytest.raises(TimeoutError):
                query(path, "fr_trace_json", limit_s=0.3)
        finally:
            gone.set()


def test_no_server_and_a_dead_one_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        query_flight_recorder(tmp_path, 7)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "7.sock"))
    with pytest.raises(ConnectionRefusedError):
        query_flight_recorder(tmp_path, 7)


@given(data=st.binary(max_size=300))
def test_any_bytes_raise_value_error_or_give_a_body(data: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("any") / "7.sock"
    with server(path, says(b"HTTP/1.1 200 OK\r\nContent-Le", data)):
        body, reason = b"", ""
        try:
            body = query(path, "fr_trace_json", limit_s=60)
        except ValueError as error:
            reason = str(error)
    assert body in data
    assert bool(body) is not bool(reason) or b"0" in data


# NCCL's RAS service, played by a server on a port: each connection gets the next of its answers.

RAS_HELLO = b"SERVER PROTOCOL 2\n"


@contextmanager
def ras_service(*answers: Callable[[socket.socket], object]) -> Iterator[tuple[tuple[str, int], list[bytes]]]:
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for answer in answers:
                _serve(listener, answer, asked)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname(), asked
        finally:
            thread.join()


def ras_says(*parts: bytes) -> Answer:
    """The service greets, reads the request, and answers in pieces until it closes the connection."""

    def answer(connection: socket.socket) -> None:
        connection.sendall(RAS_HELLO)
        assert connection.recv(4096) == b"TIMEOUT 2\nSET FORMAT json\nVERBOSE STATUS\n"
        for part in parts:
            connection.sendall(part)

    return answer


def until_closed(connection: socket.socket) -> None:
    assert connection.recv(4096) == b""


def test_the_ras_service_of_nccl_is_asked_in_its_protocol() -> None:
    with ras_service(ras_says(b"OK\nOK\n", b"{}\n")) as (address, asked):
        assert query_ras(address) == "SERVER PROTOCOL 2\nOK\nOK\n{}\n"
    assert asked == [b"CLIENT PROTOCOL 2\n"]


def test_a_rank_that_is_stopped_does_not_keep_another_from_answering() -> None:
    with ras_service(until_closed, ras_says(b"OK\n")) as (address, _):
        assert query_ras(address).endswith("OK\n")


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ([until_closed], TimeoutError),
        ([ras_says(b"x" * 70)], ValueError),
        ([says(b"SSH-2.0-OpenSSH\r\n")], ValueError),
        ([says()], ValueError),
    ],
)
def test_a_service_that_is_silent_endless_or_another_costs_no_more_than_the_limits(
    monkeypatch: pytest.MonkeyPatch, answers: list[Answer], error: type[Exception]
) -> None:
    monkeypatch.setattr(recorder, "RESPONSE_LIMIT_BYTES", 64)
    monkeypatch.setattr(recorder, "_RAS_HANDSHAKE_S", 0.2)
    began_s = time.monotonic()
    with ras_service(*answers) as (address, _), pytest.raises(error):
        query_ras(address, limit_s=0.6)
    assert time.monotonic() - began_s < 5.0


def test_a_service_that_stops_in_the_middle_costs_no_more_than_the_limit() -> None:
    gone = threading.Event()

    def stops(connection: socket.socket) -> None:
        ras_says(b"OK\n")(connection)
        gone.wait()

    with ras_service(stops) as (address, _):
        try:
            with pytest.raises(TimeoutError):
                query_ras(address, limit_s=0.3)
        finally:
            gone.set()


def listening(local: str) -> Socket:
    facts = {"inode": 1, "peer": "0.0.0.0:0", "unacked_bytes": 0, "unread_bytes": 0, "retransmits": 0}
    return Socket(local=local, state="LISTEN", **facts)


@pytest.mark.parametrize(
    ("environment", "local", "expected"),
    [
        ({}, "127.0.0.1:28028", ("127.0.0.1", 28028)),
        ({}, "[::1]:28028", ("::1", 28028)),
        ({"NCCL_RAS_ADDR": "localhost:12012"}, "127.0.0.1:12012", ("127.0.0.1", 12012)),
        ({"NCCL_RAS_ADDR": "localhost:12012"}, "127.0.0.1:28028", None),
        ({"NCCL_RAS_ADDR": "nonsense"}, "127.0.0.1:28028", None),
        ({}, "127.0.0.1:29500", None),
    ],
)
def test_the_address_of_the_ras_service_is_one_on_which_the_rank_listens(
    environment: dict[str, str], local: str, expected: tuple[str, int] | None
) -> None:
    assert find_ras(environment, (listening(local),)) == expected
