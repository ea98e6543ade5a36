"""What torchrun says of the ranks that failed, when it has seen more than we have."""

from __future__ import annotations

import re
from dataclasses import dataclass

_FAILURE = re.compile(r"rank\s*:\s*(\d+) \(local_rank: \d+\)\s*\n.*?exitcode\s*:\s*(-?\d+) \(pid: (\d+)\)")
_FIRST = "Root Cause (first observed failure):"


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
