"""Connections of a job to other hosts: attempts that nothing answered, and how much data each connection carried."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Options of torchrun, and an environment variable, that name the host at which the ranks of all hosts meet.
_MEETING_OPTION = re.compile(r"--(?:rdzv|master)[-_](?:endpoint|addr)(?:=(?P<value>.*))?")
_MEETING_VARIABLE = "MASTER_ADDR"


@dataclass(frozen=True, kw_only=True)
class UnansweredConnection:
    """A connection that a process of the job tried to open, and that no host answered or refused."""

    rank: int | None  # None = the launcher
    peer: str  # the address that should answer, "10.0.0.1:29400"
    waited_s: float
    attempts: int  # packets sent in the last attempt to connect


@dataclass(frozen=True, kw_only=True)
class UnresolvedHost:
    """A host name on the launcher's command line, or in its environment, that has no address."""

    host: str
    error: str  # the message of the resolver


@dataclass(frozen=True, kw_only=True)
class Link:
    """All connections of one rank to one other host, added up over the run."""

    rank: int | None  # None = the launcher
    local_host: str  # the address without the port
    peer_host: str
    sent_bytes: int  # acknowledged by the peer
    received_bytes: int
    retransmitted: int  # number of segments
    observed_s: float
    # The longest time for which one of the connections had data to send. In the second one of these times, the peer
    # did not read fast enough, so that not the network was the limit. None = the kernel does not tell.
    busy_s: float | None
    peer_limited_s: float | None

    @property
    def bytes_per_s(self) -> float | None:
        """The rate at which the link carried data while there was data to send; None if it is unknown or idle."""
        return self.sent_bytes / self.busy_s if self.busy_s else None


@dataclass(frozen=True, kw_only=True)
class Network:
    """The observations of the job's connections to other hosts. They are empty if the job runs on one host."""

    unanswered: tuple[UnansweredConnection, ...] = ()
    unresolved: tuple[UnresolvedHost, ...] = ()
    links: tuple[Link, ...] = ()


def meeting_host(words: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Return the host at which the ranks of a job meet, from the launcher's command line or environment, or None."""
    for number, word in enumerate(words):
        if option := _MEETING_OPTION.fullmatch(word):
            value = option["value"] if option["value"] is not None else next(iter(words[number + 1 :]), "")
            return _host_to_resolve(value)
    return _host_to_resolve(environment.get(_MEETING_VARIABLE, ""))


def host_of(address: str) -> str:
    """Return the host of an address with a port, as the kernel's tables have it: "10.0.0.1:29400", "[::1]:29400"."""
    return address.rpartition(":")[0]


def port_of(address: str) -> str:
    """Return the port of such an address: "29400"."""
    return address.rpartition(":")[2]


def _host_to_resolve(address: str) -> str | None:
    """Return the host of "host", "host:port", "[::1]:port" or "::1". None: there is none, or it is a list or a URL."""
    if address.startswith("["):
        return address[1:].partition("]")[0] or None
    if "/" in address or "," in address:
        return None
    host, _, port = address.rpartition(":")
    return (host if port.isdigit() and ":" not in host else address) or None
