"""Read the kernel's information about TCP sockets.

The data come from the tables in /proc/PID/net and from replies of inet_diag (netlink).
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from nsa_harness.core.evidence.host import Socket

# include/net/tcp_states.h; the same numbers in /proc/net/tcp and in inet_diag.
_STATES = {
    1: "ESTABLISHED", 2: "SYN_SENT", 3: "SYN_RECV", 4: "FIN_WAIT1", 5: "FIN_WAIT2", 6: "TIME_WAIT", 7: "CLOSE",
    8: "CLOSE_WAIT", 9: "LAST_ACK", 10: "LISTEN", 11: "CLOSING", 12: "NEW_SYN_RECV",
}  # fmt: skip
_MAPPED = b"\0" * 10 + b"\xff\xff"  # an IPv4 address in an IPv6 socket

# From linux/netlink.h and linux/inet_diag.h. The header of a message: length, type, flags, sequence, port.
_NLMSG = struct.Struct("=IHHII")
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
# A reply up to the inode: family, state, timer, retransmits, ports (network order), addresses, interface, cookie,
# expires, rqueue, wqueue, uid, inode.
_ANSWER = struct.Struct("=BBBB4s16s16sI8sIIIII")
_ATTRIBUTE = struct.Struct("=HH")
_INET_DIAG_INFO = 2
# In struct tcp_info: bytes_acked and bytes_received, since Linux 4.1.
_BYTES = struct.Struct("=QQ")
_BYTES_AT = 120
_RETRANSMITTED = struct.Struct("=I")
_RETRANSMITTED_AT = 100
# Microseconds with data to send, and those of them in which the peer's window was full, since Linux 4.10.
_BUSY = struct.Struct("=QQ")
_BUSY_AT = 168


@dataclass(frozen=True, kw_only=True)
class TransferredBytes:
    """The number of bytes that a TCP connection has transferred since it was opened."""

    acked_bytes: int
    received_bytes: int
    retransmitted: int = 0  # number of segments
    busy_s: float | None = None  # time with data to send; None = the kernel does not tell
    peer_limited_s: float | None = None  # the part of this time in which the peer's window was full


def parse_table(text: str) -> dict[int, Socket]:
    """Map inodes to the sockets listed in /proc/PID/net/tcp or tcp6. Malformed lines are skipped."""
    rows = (_row(line.split()) for line in text.splitlines()[1:])
    return {row.inode: row for row in rows if row is not None and row.inode}


def parse_answers(data: bytes) -> Iterator[tuple[int, TransferredBytes | None]]:
    """Yield the inode and the transferred bytes of each socket in an inet_diag reply.

    The bytes are None if the kernel did not report them. Raise ValueError if the kernel refused the query or the
    datagram is malformed.
    """
    for kind, body in _messages(data, _NLMSG):
        if kind == _NLMSG_ERROR:
            (number,) = struct.unpack_from("=i", body.ljust(4, b"\0"))
            raise ValueError(f"the kernel refused: error {-number}")
        if kind != _NLMSG_DONE and len(body) >= _ANSWER.size:
            yield int(_ANSWER.unpack_from(body)[-1]), _read_tcp_info(body[_ANSWER.size :])


def answers_end(data: bytes) -> bool:
    """Return whether a datagram contains the end of the kernel's reply, or raise ValueError if it is malformed."""
    return any(kind in (_NLMSG_DONE, _NLMSG_ERROR) for kind, _ in _messages(data, _NLMSG))


def other_ends(table: Mapping[int, Socket]) -> dict[int, int]:
    """Map the inode of each socket in a table to its peer's inode, for connections within this host."""
    by_address = {(socket.local, socket.peer): inode for inode, socket in table.items() if socket.state != "LISTEN"}
    pairs = (
        (inode, by_address.get((socket.peer, socket.local)))
        for inode, socket in table.items()
        if socket.state != "LISTEN"
    )
    return {inode: other for inode, other in pairs if other is not None and other != inode}


def _row(words: list[str]) -> Socket | None:
    try:
        unacked_bytes, unread_bytes = (int(half, 16) for half in words[4].split(":"))
        return Socket(
            inode=int(words[9]),
            local=_address(words[1]),
            peer=_address(words[2]),
            state=_STATES.get(int(words[3], 16), words[3]),
            unacked_bytes=unacked_bytes,
            unread_bytes=unread_bytes,
            retransmits=int(words[6], 16),
        )
    except (IndexError, ValueError):
        return None


def _address(text: str) -> str:
    """Return the address and port, such as "127.0.0.1:8080", in kernel notation such as "0100007F:1F90"."""
    address, _, port = text.partition(":")
    words = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]
    raw = struct.pack(f"={len(words)}I", *words)
    if raw.startswith(_MAPPED):
        raw = raw[len(_MAPPED) :]
    if len(raw) == 4:
        return f"{ipaddress.IPv4Address(raw)}:{int(port, 16)}"
    return f"[{ipaddress.IPv6Address(raw)}]:{int(port, 16)}"


def _read_tcp_info(attributes: bytes) -> TransferredBytes | None:
    """Return the byte counts in a socket's INET_DIAG_INFO attribute, or None if it has none."""
    with suppress(ValueError):
        for kind, info in _messages(attributes, _ATTRIBUTE):
            if kind == _INET_DIAG_INFO and len(info) >= _BYTES_AT + _BYTES.size:
                acked_bytes, received_bytes = _BYTES.unpack_from(info, _BYTES_AT)
                (retransmitted,) = _RETRANSMITTED.unpack_from(info, _RETRANSMITTED_AT)
                tells_busy = len(info) >= _BUSY_AT + _BUSY.size
                busy_us, limited_us = _BUSY.unpack_from(info, _BUSY_AT) if tells_busy else (None, None)
                return TransferredBytes(
                    acked_bytes=acked_bytes,
                    received_bytes=received_bytes,
                    retransmitted=retransmitted,
                    busy_s=None if busy_us is None else busy_us / 1e6,
                    peer_limited_s=None if limited_us is None else limited_us / 1e6,
                )
    return None


def _messages(data: bytes, header: struct.Struct) -> Iterator[tuple[int, bytes]]:
    """Yield the kind and the body of each netlink message or attribute in `data`.

    Each begins with its length and kind in the form of `header`, and is padded to four bytes. Raise ValueError for a
    length that is too small.
    """
    at = 0
    while at + header.size <= len(data):
        length, kind = header.unpack_from(data, at)[:2]
        if length < header.size:
            raise ValueError(f"a netlink message of {length} bytes")
        yield kind, data[at + header.size : at + length]
        at += (length + 3) & ~3
