"""TCP sockets as the kernel lists them: its table and its answers, as values."""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nsa_harness.core.evidence.host import Socket

# include/net/tcp_states.h; the same numbers in /proc/net/tcp and in inet_diag.
_STATES = {
    1: "ESTABLISHED", 2: "SYN_SENT", 3: "SYN_RECV", 4: "FIN_WAIT1", 5: "FIN_WAIT2", 6: "TIME_WAIT", 7: "CLOSE",
    8: "CLOSE_WAIT", 9: "LAST_ACK", 10: "LISTEN", 11: "CLOSING", 12: "NEW_SYN_RECV",
}  # fmt: skip
_MAPPED = b"\0" * 10 + b"\xff\xff"  # an IPv4 address in an IPv6 socket

# linux/netlink.h and linux/inet_diag.h. The header of a message: length, type, flags, sequence, port.
_NLMSG = struct.Struct("=IHHII")
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
# Of an answer up to the inode: family, state, timer, retransmits, ports (network order), addresses, interface, cookie,
# expires, rqueue, wqueue, uid, inode.
_ANSWER = struct.Struct("=BBBB4s16s16sI8sIIIII")
_ATTRIBUTE = struct.Struct("=HH")
_INET_DIAG_INFO = 2
# struct tcp_info: bytes_acked and bytes_received, there since Linux 4.1.
_BYTES = struct.Struct("=QQ")
_BYTES_AT = 120


@dataclass(frozen=True, kw_only=True)
class Transferred:
    """What one connection carried over its life."""

    acked_bytes: int
    received_bytes: int


def parse_table(text: str) -> dict[int, Socket]:
    """The sockets of /proc/PID/net/tcp or tcp6, by inode; a line that is not of that form is left out."""
    rows = (_row(line.split()) for line in text.splitlines()[1:])
    return {row.inode: row for row in rows if row is not None and row.inode}


def parse_answers(data: bytes) -> Iterator[tuple[int, Transferred | None]]:
    """The sockets of one datagram of inet_diag: inode and bytes. Raises ValueError when the kernel refused."""
    at = 0
    while at + _NLMSG.size <= len(data):
        length, kind, _, _, _ = _NLMSG.unpack_from(data, at)
        if length < _NLMSG.size:
            raise ValueError(f"a netlink message of {length} bytes")
        body = data[at + _NLMSG.size : at + length]
        if kind == _NLMSG_ERROR:
            raise ValueError("the kernel refused: " + _error_text(body))
        if kind != _NLMSG_DONE and len(body) >= _ANSWER.size:
            yield int(_ANSWER.unpack_from(body)[-1]), _transferred(body[_ANSWER.size :])
        at += (length + 3) & ~3


def answers_end(data: bytes) -> bool:
    """The datagram holds the end of the answer."""
    at = 0
    while at + _NLMSG.size <= len(data):
        length, kind, _, _, _ = _NLMSG.unpack_from(data, at)
        if kind in (_NLMSG_DONE, _NLMSG_ERROR) or length < _NLMSG.size:
            return True
        at += (length + 3) & ~3
    return False


def other_ends(table: Mapping[int, Socket]) -> dict[int, int]:
    """Inode of each connection -> inode of its other end, where both are in the table (both on this host)."""
    by_address = {(one.local, one.peer): inode for inode, one in table.items() if one.state != "LISTEN"}
    pairs = ((inode, by_address.get((one.peer, one.local))) for inode, one in table.items() if one.state != "LISTEN")
    return {inode: other for inode, other in pairs if other is not None and other != inode}


def _row(words: list[str]) -> Socket | None:
    try:
        unacked, unread = (int(half, 16) for half in words[4].split(":"))
        return Socket(
            inode=int(words[9]),
            local=_address(words[1]),
            peer=_address(words[2]),
            state=_STATES.get(int(words[3], 16), words[3]),
            unacked_bytes=unacked,
            unread_bytes=unread,
            retransmits=int(words[6], 16),
        )
    except (IndexError, ValueError):
        return None


def _address(text: str) -> str:
    """ "0100007F:1F90" -> "127.0.0.1:8080". The address is in words of the host's byte order, the port is a number."""
    address, _, port = text.partition(":")
    words = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]
    raw = struct.pack(f"={len(words)}I", *words)
    if raw.startswith(_MAPPED):
        raw = raw[len(_MAPPED) :]
    if len(raw) == 4:
        return f"{ipaddress.IPv4Address(raw)}:{int(port, 16)}"
    return f"[{ipaddress.IPv6Address(raw)}]:{int(port, 16)}"


def _transferred(attributes: bytes) -> Transferred | None:
    at = 0
    while at + _ATTRIBUTE.size <= len(attributes):
        length, kind = _ATTRIBUTE.unpack_from(attributes, at)
        if length < _ATTRIBUTE.size:
            return None
        info = attributes[at + _ATTRIBUTE.size : at + length]
        if kind == _INET_DIAG_INFO and len(info) >= _BYTES_AT + _BYTES.size:
            acked, received = _BYTES.unpack_from(info, _BYTES_AT)
            return Transferred(acked_bytes=acked, received_bytes=received)
        at += (length + 3) & ~3
    return None


def _error_text(body: bytes) -> str:
    (number,) = struct.unpack_from("=i", body.ljust(4, b"\0"))
    return f"error {-number}"
