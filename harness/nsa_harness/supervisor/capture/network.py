"""Follows the TCP connections of a job to other hosts."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from nsa_harness.core.evidence.host import Socket
from nsa_harness.core.evidence.network import Link, Network, UnansweredConnection, UnresolvedHost, host_of, meeting_host
from nsa_harness.core.evidence.sockets import TransferredBytes
from nsa_harness.supervisor.capture import procfs
from nsa_harness.supervisor.capture.descriptors import (
    open_sockets,
    query_traffic,
    read_socket_table,
)

_UNANSWERED_S = 8.0  # the kernel has repeated the first packet three times by then
_MIN_ATTEMPTS = 3
_FORGET_S = 12.0  # a program that tries again pauses for less
_MAX_LINKS = 4096
_MAX_PROCESSES = 4096

_Connection = tuple[int | None, int, str]  # rank, pid, address of the peer


@dataclass(kw_only=True)
class NetworkWatch:
    """The connections of a job to other hosts since the job was launched."""

    _tries: dict[_Connection, _Try] = field(default_factory=dict)
    # (rank, local host, host of the peer) -> the traffic of each connection, by the inode of its socket
    _traffic: dict[tuple[int | None, str, str], dict[int, TransferredBytes]] = field(default_factory=dict)
    _unresolved: list[UnresolvedHost] = field(default_factory=list)
    _reported: int = 0  # the number of hosts without an address that were returned
    _resolves: bool = False
    _since_s: float | None = None
    _until_s: float = 0.0

    def read(self, processes: Mapping[int, int | None], now_s: float) -> list[UnansweredConnection | UnresolvedHost]:
        """Read the connections of processes, which are given as pid -> rank. Return what has to be reported now.

        A connection that nothing answers is returned when it has waited for some seconds, and again whenever this time
        has doubled. A host name without an address is returned once.
        """
        self._since_s, self._until_s = now_s if self._since_s is None else self._since_s, now_s
        pids = list(processes)[:_MAX_PROCESSES]
        table = read_socket_table(pids[0]) if pids else {}
        outside = {inode: one for inode, one in table.items() if _is_outside(one)}
        owners = {inode: pid for pid in pids for inode in open_sockets(pid)} if outside else {}
        own = [(owners[inode], one) for inode, one in outside.items() if inode in owners]
        self._add_traffic([(processes[pid], one) for pid, one in own])
        tries = {(processes[pid], pid, one.peer): one for pid, one in own if one.state == "SYN_SENT"}
        for connection, one in tries.items():
            known = self._tries.setdefault(connection, _Try(since_s=now_s))
            known.seen_s, known.attempts = now_s, max(known.attempts, one.retransmits + 1)
        reached = {(processes[pid], pid, one.peer) for pid, one in own if one.state == "ESTABLISHED"}
        self._tries = {
            connection: known
            for connection, known in self._tries.items()
            if connection not in reached and (known.is_reported or now_s - known.seen_s <= _FORGET_S)
        }
        due = [self._unanswered(connection, known) for connection, known in self._tries.items() if known.is_due()]
        hosts = self._unresolved[self._reported :]
        self._reported += len(hosts)
        return [*due, *hosts]

    def resolve(self, launchers: Iterable[int]) -> None:
        """Look up the host at which the ranks meet, once and in a thread, because a lookup can take long."""
        names = {meeting_host(procfs.command_line(pid), procfs.environment(pid)) for pid in launchers} - {None}
        if names and not self._resolves:
            self._resolves = True
            threading.Thread(target=self._look_up, args=(sorted(filter(None, names)),), daemon=True).start()

    def _look_up(self, names: Iterable[str]) -> None:
        for name in names:
            try:
                socket.getaddrinfo(name, None)
            except (OSError, UnicodeError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                self._unresolved.append(UnresolvedHost(host=name, error=reason))

    def result(self) -> Network:
        """Return everything that was observed."""
        reported = (item for item in self._tries.items() if item[1].is_reported)
        return Network(
            unanswered=tuple(self._unanswered(connection, known) for connection, known in reported),
            unresolved=tuple(self._unresolved),
            links=tuple(self._link(*item) for item in list(self._traffic.items())[:_MAX_LINKS]),
        )

    @staticmethod
    def _unanswered(connection: _Connection, known: _Try) -> UnansweredConnection:
        waited_s = round(known.seen_s - known.since_s, 1)
        return UnansweredConnection(rank=connection[0], peer=connection[2], waited_s=waited_s, attempts=known.attempts)

    def _add_traffic(self, connections: Iterable[tuple[int | None, Socket]]) -> None:
        connections = list(connections)
        try:
            traffic = dict(query_traffic()) if connections else {}
        except (OSError, ValueError, struct.error):
            return  # the kernel refuses, as in some containers; the snapshots note this
        for rank, one in connections:
            if one.inode in traffic and one.state != "SYN_SENT":
                self._traffic.setdefault((rank, host_of(one.local), host_of(one.peer)), {})[one.inode] = traffic[
                    one.inode
                ]

    def _link(self, ends: tuple[int | None, str, str], traffic: Mapping[int, TransferredBytes]) -> Link:
        every = list(traffic.values())
        busiest = max(every, key=lambda one: one.busy_s or 0.0)
        return Link(
            rank=ends[0],
            local_host=ends[1],
            peer_host=ends[2],
            sent_bytes=sum(one.acked_bytes for one in every),
            received_bytes=sum(one.received_bytes for one in every),
            retransmitted=sum(one.retransmitted for one in every),
            observed_s=round(self._until_s - (self._since_s or 0.0), 1),
            busy_s=busiest.busy_s,
            peer_limited_s=busiest.peer_limited_s,
        )


@dataclass(kw_only=True)
class _Try:
    """An attempt to connect that has not been answered."""

    since_s: float
    seen_s: float = 0.0
    attempts: int = 0
    reported_s: float = 0.0  # for how long it had waited when it was last reported; 0 = never

    @property
    def is_reported(self) -> bool:
        return self.reported_s > 0.0

    def is_due(self) -> bool:
        """Return whether the attempt must be reported now, and remember that it is."""
        waited_s = self.seen_s - self.since_s
        if waited_s < max(_UNANSWERED_S, 2 * self.reported_s) or self.attempts < _MIN_ATTEMPTS:
            return False
        self.reported_s = waited_s
        return True


def _is_outside(one: Socket) -> bool:
    """Return whether a socket is connected to an address that is not on this host."""
    peer = host_of(one.peer)
    return (
        one.state != "LISTEN"
        and peer != host_of(one.local)
        and not peer.startswith(("127.", "[::1", "0.0.0.0", "[::]"))
    )
