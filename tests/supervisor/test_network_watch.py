"""What the watch sees of a job's connections to other hosts, with the kernel's tables faked."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from nsa_harness.core.evidence.host import Socket
from nsa_harness.core.evidence.network import UnansweredConnection, UnresolvedHost
from nsa_harness.core.evidence.sockets import TransferredBytes
from nsa_harness.supervisor.capture import network
from nsa_harness.supervisor.capture.network import NetworkWatch

LAUNCHER, RANK = 70, 71
PROCESSES = {LAUNCHER: None, RANK: 3}


@dataclass
class Kernel:
    """The kernel's tables: which process has which sockets, and what these have carried."""

    sockets: dict[int, list[Socket]] = field(default_factory=dict)
    traffic: dict[int, TransferredBytes] = field(default_factory=dict)
    refuses: bool = False

    def query(self) -> Iterator[tuple[int, TransferredBytes]]:
        if self.refuses:
            raise PermissionError(1, "Operation not permitted")
        return iter(self.traffic.items())


def connection(
    inode: int, peer: str, state: str = "ESTABLISHED", *, local: str = "10.0.0.1:4000", sent: int = 0
) -> Socket:
    return Socket(inode=inode, local=local, peer=peer, state=state, unacked_bytes=0, unread_bytes=0, retransmits=sent)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    tables = Kernel()
    everything = lambda _: {one.inode: one for own in tables.sockets.values() for one in own}  # noqa: E731
    monkeypatch.setattr(network, "read_socket_table", everything)
    monkeypatch.setattr(network, "open_sockets", lambda pid: [one.inode for one in tables.sockets.get(pid, [])])
    monkeypatch.setattr(network, "query_traffic", tables.query)
    return tables


def waits(watch: NetworkWatch, kernel: Kernel, seconds: list[float]) -> list[float]:
    """Return when a launcher's connection that nothing answers was reported, with the seconds it had waited."""
    reported = []
    for now_s in seconds:
        kernel.sockets[LAUNCHER] = [connection(1, "10.0.0.9:29400", "SYN_SENT", sent=4)]
        reported += [one.waited_s for one in watch.read(PROCESSES, now_s) if isinstance(one, UnansweredConnection)]
    return reported


def test_a_connection_that_nothing_answers_is_reported_after_some_seconds_and_when_the_time_has_doubled(
    kernel: Kernel,
) -> None:
    watch = NetworkWatch()
    assert waits(watch, kernel, [3.0 + 2 * number for number in range(20)]) == [8.0, 16.0, 32.0]
    (found,) = watch.result().unanswered
    assert (found.rank, found.peer, found.waited_s, found.attempts) == (None, "10.0.0.9:29400", 38.0, 5)


def test_a_connection_that_was_opened_in_the_end_is_forgotten(kernel: Kernel) -> None:
    watch = NetworkWatch()
    assert waits(watch, kernel, [0.0, 10.0]) == [10.0]
    kernel.sockets[LAUNCHER] = [connection(2, "10.0.0.9:29400")]
    assert watch.read(PROCESSES, 12.0) == []
    assert watch.result().unanswered == ()


def test_attempts_with_short_pauses_count_as_one_and_others_do_not(kernel: Kernel) -> None:
    watch = NetworkWatch()
    assert waits(watch, kernel, [0.0, 4.0]) == []
    kernel.sockets.clear()
    watch.read(PROCESSES, 6.0)
    assert waits(watch, kernel, [12.0]) == [12.0]
    watch = NetworkWatch()
    assert waits(watch, kernel, [0.0, 4.0]) == []
    kernel.sockets.clear()
    watch.read(PROCESSES, 30.0)
    assert waits(watch, kernel, [31.0]) == []


def test_only_connections_to_other_hosts_count(kernel: Kernel) -> None:
    kernel.sockets[RANK] = [
        connection(1, "127.0.0.1:5", "SYN_SENT", local="127.0.0.1:9", sent=5),
        connection(2, "10.0.0.1:5", "SYN_SENT", sent=5),
        connection(3, "0.0.0.0:0", "LISTEN"),
    ]
    watch = NetworkWatch()
    assert [watch.read(PROCESSES, now_s) for now_s in (0.0, 20.0)] == [[], []]
    assert watch.result().links == ()


def test_the_traffic_of_a_rank_to_a_host_is_added_up_over_its_connections(kernel: Kernel) -> None:
    kernel.sockets[RANK] = [connection(1, "10.0.0.2:5"), connection(2, "10.0.0.2:6"), connection(3, "10.0.0.3:6")]
    kernel.traffic = {
        1: TransferredBytes(acked_bytes=10, received_bytes=1, retransmitted=2, busy_s=1.0, peer_limited_s=0.5),
        2: TransferredBytes(acked_bytes=30, received_bytes=2, retransmitted=1, busy_s=4.0, peer_limited_s=0.0),
        3: TransferredBytes(acked_bytes=5, received_bytes=0),
        4: TransferredBytes(acked_bytes=999, received_bytes=0),  # of another program
    }
    watch = NetworkWatch()
    watch.read(PROCESSES, 1.0)
    kernel.sockets[RANK].pop(0)  # closed: its traffic stays
    watch.read(PROCESSES, 9.0)
    near, far = watch.result().links
    assert (near.rank, near.peer_host, near.sent_bytes, near.retransmitted, near.observed_s) == (
        3,
        "10.0.0.2",
        40,
        3,
        8.0,
    )
    assert (near.busy_s, near.peer_limited_s, near.bytes_per_s) == (4.0, 0.0, 10.0)
    assert (far.peer_host, far.busy_s, far.bytes_per_s) == ("10.0.0.3", None, None)


def test_where_the_kernel_refuses_the_traffic_the_rest_is_still_seen(kernel: Kernel) -> None:
    kernel.refuses = True
    watch = NetworkWatch()
    assert waits(watch, kernel, [0.0, 9.0]) == [9.0]
    assert watch.result().links == ()


def test_a_host_name_without_an_address_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str, _: None) -> None:
        raise socket.gaierror(-2, f"Name or service not known: {name}")

    monkeypatch.setattr(network.socket, "getaddrinfo", unknown)
    monkeypatch.setattr(network.procfs, "command_line", lambda _: ["torchrun", "--rdzv-endpoint=node-7:29400"])
    watch = NetworkWatch()
    watch.resolve([os.getpid()])
    watch.resolve([os.getpid()])
    ends = time.monotonic() + 60
    while not watch.result().unresolved and time.monotonic() < ends:
        time.sleep(0.01)
    found = UnresolvedHost(host="node-7", error="Name or service not known: node-7")
    assert [watch.read({}, 6.0), watch.read({}, 8.0)] == [[found], []]
    assert watch.result().unresolved == (found,)
