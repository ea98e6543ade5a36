"""TCP sockets of processes, read from the kernel: state, queues, retransmits, and the bytes that were acknowledged."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from nsa_harness.core.evidence.host import Process, Socket
from nsa_harness.core.evidence.sockets import Transferred, answers_end, other_ends, parse_answers, parse_table

_MAX_TABLE_BYTES = 16 << 20
_MAX_SOCKETS = 64  # of one process in the evidence; those with something in flight first
_LIMIT_S = 0.5
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_REQUEST_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_ALL_STATES = 0xFFFFFFFF
_WITH_INFO = 1 << 1  # the bit of INET_DIAG_INFO, less one


@dataclass(kw_only=True)
class SocketTable:
    """The sockets of this moment. Each network namespace is read once, whoever asks first."""

    owners: Mapping[int, tuple[int | None, int]]  # inode -> (rank, pid) of the run's process that holds it
    failures: list[str] = field(default_factory=list)
    _tables: dict[str, tuple[dict[int, Socket], dict[int, int]]] = field(default_factory=dict)

    def of(self, pid: int, inodes: Iterable[int]) -> tuple[Socket, ...]:
        """The TCP sockets of a process among its `inodes`, those with bytes in flight first, bounded in number."""
        table, ends = self._table(pid)
        mine = sorted((self._whose(table[inode], ends) for inode in set(inodes) & table.keys()), key=_urgency)
        return tuple(mine[:_MAX_SOCKETS])

    def other_end(self, pid: int, inode: int) -> int | None:
        """The process of the run at the other end of a connection; None = none that is known."""
        owner = self.owners.get(self._table(pid)[1].get(inode, 0))
        return owner[1] if owner else None

    def _whose(self, one: Socket, ends: Mapping[int, int]) -> Socket:
        owner = self.owners.get(ends.get(one.inode, 0))  # 0 is no socket's inode
        return replace(one, peer_rank=owner[0], in_job=True) if owner else one

    def _table(self, pid: int) -> tuple[dict[int, Socket], dict[int, int]]:
        """The sockets by inode, and the inode of each one's other end."""
        namespace = _namespace(pid)
        if namespace not in self._tables:
            table = _read_table(pid)
            if namespace == _namespace("self"):
                table = self._with_bytes(table)
            elif namespace and table:
                self.failures.append("acknowledged bytes: the process is in another network namespace")
            self._tables[namespace] = table, other_ends(table)
        return self._tables[namespace]

    def _with_bytes(self, table: dict[int, Socket]) -> dict[int, Socket]:
        try:
            carried = dict(_ask_kernel())
        except (OSError, ValueError, struct.error) as error:
            self.failures.append(f"acknowledged bytes: {error}")
            return table
        return {inode: _with(one, carried.get(inode)) for inode, one in table.items()}


def owners_of(processes: Iterable[tuple[int | None, Process]]) -> dict[int, tuple[int | None, int]]:
    """Socket inode -> (rank, pid) over the processes of a run; a socket that several hold belongs to the first."""
    found: dict[int, tuple[int | None, int]] = {}
    for rank, process in processes:
        for inode in inodes(process.holds):
            found.setdefault(inode, (rank, process.pid))
    return found


def inodes(holds: Iterable[str]) -> Iterator[int]:
    """The socket inodes among what a process holds open."""
    for end in holds:
        if end.startswith("socket:["):
            yield int(end[len("socket:[") :].partition("]")[0])


def _with(one: Socket, carried: Transferred | None) -> Socket:
    if carried is None or one.state == "LISTEN":
        return one
    return replace(one, acked_bytes=carried.acked_bytes, received_bytes=carried.received_bytes)


def _urgency(one: Socket) -> tuple[bool, bool, int]:
    return not (one.unacked_bytes or one.retransmits), one.state == "LISTEN", one.inode


def _namespace(pid: int | str) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError:
        return ""


def _read_table(pid: int) -> dict[int, Socket]:
    found: dict[int, Socket] = {}
    for name in ("tcp", "tcp6"):
        try:
            with Path(f"/proc/{pid}/net/{name}").open("rb") as table:
                found |= parse_table(table.read(_MAX_TABLE_BYTES).decode(errors="replace"))
        except OSError:
            continue
    return found


def _ask_kernel() -> Iterator[tuple[int, Transferred]]:
    """Every TCP socket of this network namespace: inode and bytes. Raises OSError or ValueError when refused."""
    deadline = time.monotonic() + _LIMIT_S
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as kernel:
        for family in (socket.AF_INET, socket.AF_INET6):
            kernel.sendto(_request(family), (0, 0))
            ended = False
            while not ended:
                kernel.settimeout(max(deadline - time.monotonic(), 0.001))
                data = kernel.recv(1 << 16)
                yield from ((inode, carried) for inode, carried in parse_answers(data) if carried)
                ended = answers_end(data)


def _request(family: int) -> bytes:
    """struct inet_diag_req_v2 behind its header: all states, any address, with tcp_info."""
    body = struct.pack("=BBBBI48x", family, socket.IPPROTO_TCP, _WITH_INFO, 0, _ALL_STATES)
    return struct.pack("=IHHII", 16 + len(body), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 1, 0) + body
