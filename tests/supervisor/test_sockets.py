"""Sockets of processes: real connections, the kernel's own numbers, and answers that are torn or refused."""

from __future__ import annotations

import os
import select
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from nsa_harness.core.evidence.host import Process, Socket
from nsa_harness.core.evidence.sockets import other_ends, parse_answers, parse_table
from nsa_harness.supervisor.capture import descriptors, procfs
from nsa_harness.supervisor.capture.descriptors import SocketTable, socket_owners
from nsa_harness.supervisor.capture.process_tree import read_process_tree

TABLE = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000002 00:00000000 00000000     0        0 71 1 0000000000000000 100 0
   1: 0100007F:1F90 0100007F:A1B2 01 00000980:000000C0 01:00000014 00000005     0        0 72 1 0000000000000000 20 4
   2: torn
"""
TABLE6 = """  sl  local_address                         remote_address                        st tx_queue rx_queue tr
   0: 0000000000000000FFFF00000100007F:A1B2 0000000000000000FFFF00000100007F:1F90 01 0:0 0:0 0 0 0 73
   1: 00000000000000000000000001000000:0050 00000000000000000000000000000000:0000 0A 0:0 0:0 0 0 0 74
"""


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection of this process."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
        with near, far:
            yield near, far


def inode(one: socket.socket) -> int:
    return os.fstat(one.fileno()).st_ino


def one_of(table: SocketTable, end: socket.socket) -> Socket:
    (found,) = table.sockets_of(os.getpid(), [inode(end)])
    return found


def test_the_kernels_table_is_read_with_queues_and_retransmits() -> None:
    found = parse_table(TABLE)
    assert found[72] == Socket(
        inode=72,
        local="127.0.0.1:8080",
        peer="127.0.0.1:41394",
        state="ESTABLISHED",
        unacked_bytes=0x980,
        unread_bytes=0xC0,
        retransmits=5,
    )
    assert (found[71].state, found[71].unread_bytes, sorted(found)) == ("LISTEN", 2, [71, 72])


def test_an_ipv4_connection_in_an_ipv6_socket_has_the_address_its_other_end_shows() -> None:
    found = parse_table(TABLE) | parse_table(TABLE6)
    assert found[74].local == "[::1]:80"
    assert other_ends(found) == {72: 73, 73: 72}


def test_acknowledged_and_received_bytes_are_the_kernels(connection: tuple[socket.socket, socket.socket]) -> None:
    near, far = connection
    looks = []
    for _ in range(2):
        table = SocketTable(owners={})
        looks.append((one_of(table, near), one_of(table, far)))
        near.sendall(b"x" * 1000)
        far.recv(1000, socket.MSG_WAITALL)
    (near_before, far_before), (near_after, far_after) = looks
    assert None not in (near_before.acked_bytes, far_before.received_bytes)
    assert far_after.received_bytes - far_before.received_bytes == 1000
    assert near_after.acked_bytes - near_before.acked_bytes == 1000


def test_bytes_that_nobody_reads_wait_at_both_ends(connection: tuple[socket.socket, socket.socket]) -> None:
    near, far = connection
    near.setblocking(False)
    while select.select([], [near], [], 0)[1]:
        near.send(b"x" * (1 << 20))
    table = SocketTable(owners={})
    assert one_of(table, far).unread_bytes > 0
    assert one_of(table, near).unacked_bytes > 0


def test_the_other_end_is_named_by_the_rank_that_holds_it(connection: tuple[socket.socket, socket.socket]) -> None:
    near, far = connection
    table = SocketTable(owners={inode(far): (3, 71)})
    assert (one_of(table, near).peer_rank, one_of(table, near).in_job) == (3, True)
    assert (one_of(table, far).peer_rank, one_of(table, far).in_job) == (None, False)
    assert (
        table.process_at_other_end(os.getpid(), inode(near)),
        table.process_at_other_end(os.getpid(), inode(far)),
    ) == (71, None)


def test_a_socket_of_the_launcher_is_in_the_run_and_of_no_rank(connection: tuple[socket.socket, socket.socket]) -> None:
    near, far = connection
    found = one_of(SocketTable(owners={inode(far): (None, 71)}), near)
    assert (found.peer_rank, found.in_job) == (None, True)


def test_a_socket_that_a_child_inherited_belongs_to_the_rank() -> None:
    rank, child = (
        Process(
            pid=pid, parent=1, command="", state="S", cpu_s=0.0, io_bytes=0, rss_bytes=0, open_ends=("socket:[9] rw",)
        )
        for pid in (71, 72)
    )
    assert socket_owners([(0, rank), (0, child), (None, replace(rank, pid=70))]) == {9: (0, 71)}


def test_a_busy_process_keeps_the_sockets_with_something_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {
        number: replace(parse_table(TABLE)[72], inode=number, unacked_bytes=0, retransmits=0)
        for number in range(1, 500)
    }
    rows[499] = replace(rows[499], retransmits=4)
    monkeypatch.setattr(descriptors, "read_socket_table", lambda _: rows)
    kept = SocketTable(owners={}).sockets_of(os.getpid(), rows)
    assert (len(kept), kept[0].inode) == (64, 499)


def test_where_the_kernel_refuses_the_table_stays_and_the_reason_is_kept(
    connection: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> Iterator[tuple[int, object]]:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(descriptors, "query_traffic", refused)
    table = SocketTable(owners={})
    found = one_of(table, connection[0])
    assert (found.state, found.acked_bytes, found.received_bytes) == ("ESTABLISHED", None, None)
    assert table.failures == ["acknowledged bytes: [Errno 1] Operation not permitted"]


def message(kind: int, body: bytes) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, 0, 1, 0) + body


def test_a_refusal_of_the_kernel_is_told_and_a_torn_answer_ends() -> None:
    with pytest.raises(ValueError, match="refused: error 13"):
        list(parse_answers(message(2, struct.pack("=i", -13))))
    with pytest.raises(ValueError, match="a netlink message of 3 bytes"):
        list(parse_answers(struct.pack("=IHHII", 3, 20, 0, 1, 0)))
    assert list(parse_answers(b"torn")) == []
    assert list(parse_answers(message(20, b"\0" * 72))) == [(0, None)]


PEER = """
import socket, sys
s = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print(flush=True)
s.recv(1)
"""


def test_two_ranks_that_talk_are_each_others_peers() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        command = [sys.executable, "-ISc", PEER, str(server.getsockname()[1])]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
            far, _ = server.accept()
            assert other.stdout is not None
            other.stdout.readline()
            tree = read_process_tree({0: os.getpid(), 1: other.pid}, 0)
            other.kill()
        far.close()
    (theirs,) = tree.processes[1].sockets
    assert (theirs.peer_rank, theirs.in_job, theirs.peer.partition(":")[0]) == (0, True, "127.0.0.1")
    assert not theirs.is_store
    assert procfs.read_process(other.pid, 0) is None


def test_a_connection_to_the_store_is_known_by_its_port_although_nobody_here_serves_it() -> None:
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as store,
        closing(socket.create_server(("127.0.0.1", 0))) as db,
    ):
        ports = [str(server.getsockname()[1]) for server in (store, db)]
        found = []
        for port in ports:
            command = [sys.executable, "-ISc", PEER, port]
            with subprocess.Popen(command, stdout=subprocess.PIPE, env={"MASTER_PORT": ports[0]}) as rank:
                assert rank.stdout is not None
                rank.stdout.readline()
                tree = read_process_tree({0: rank.pid}, 0)
                rank.kill()
            found += [(one.peer.rpartition(":")[2], one.is_store) for one in tree.processes[0].sockets]
    assert found == [(ports[0], True), (ports[1], False)]
