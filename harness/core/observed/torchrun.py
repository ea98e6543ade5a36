"""What torchrun says of the ranks that failed, when it has seen more than we have."""

from __future__ import annotations

import re
from dataclasses import dataclass

_FAILURE = re.compile(r"rank\s*:\s*(\d+) \(local_rank: \d+\)\s*\n.*?exitcode\s*:\s*(-?\d+) \(pid: (\d+)\)")
_CLOSING = re.compile(r"Sending process (\d+) closing signal (\w+)")
_FORCED = re.compile(r"Unable to shutdown process (\d+) via \w+, forcefully exiting via (\w+)")
_FIRST = "Root Cause (first observed failure):"

_MAX_SIGNALS = 256


@dataclass(frozen=True, kw_only=True)
class AgentFailure:
    """One rank in the agent's summary. `first`: the one it observed first."""

    rank: int
    pid: int
    status: int
    first: bool


def agent_failures(log: str) -> tuple[AgentFailure, ...]:
    """The failures in the summary at the end of torchrun's own output; empty where there is none."""
    others, found, first = log.partition(_FIRST)
    return tuple(
        AgentFailure(rank=int(rank), pid=int(pid), status=int(status), first=part is first and bool(found))
        for part in (others, first)
        for rank, status, pid in _FAILURE.findall(part)
    )


def closing_signals(log: str) -> tuple[tuple[int, str], ...]:
    """The signals that the agent says it sent, in order: (process, "SIGTERM")."""
    said = sorted([*_CLOSING.finditer(log), *_FORCED.finditer(log)], key=lambda match: match.start())
    return tuple((int(match[1]), match[2]) for match in said[:_MAX_SIGNALS])
