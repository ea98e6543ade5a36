"""What a rank writes on its board record by record: marks of its threads, calls of collectives, exceptions it caught.

Times are seconds since the launch of the run.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.core.place import Place


@dataclass(frozen=True, kw_only=True)
class Mark:
    """The newest mark of one thread, read from the board."""

    tid: int
    kind: str  # protocol.KINDS
    name: str  # module, operation or stage
    step: int  # optimizer step in progress, 1-based
    at_s: float
    count: int
    position: int = 0  # training marks of the process since the step began


@dataclass(frozen=True, kw_only=True)
class Call:
    """A collective called from Python, from the board."""

    number: int
    op: str
    group: str
    place: Place | None
    elements: int  # of init_process_group, the world size that it was given
    dtype: str
    step: int
    entered_s: float
    left_s: float | None  # None = still inside
    position: int = 0  # training marks (data, forward, backward, optimizer) since the step began: where in the program
    peer: int | None = None  # global rank of a point-to-point partner, or of the root of a broadcast, gather and so on
    key: str = ""  # what a store wait waits for


@dataclass(frozen=True, kw_only=True)
class Caught:
    """An exception that left a module's forward. What became of it the rest of the evidence tells."""

    step: int
    type: str
    place: Place | None
