"""The exception that ended a rank, read back from the probe's record of it."""

from __future__ import annotations

from typing import Any

from harness.core.observed.evidence import Frame, Hint, Raised

_MAX_HINTS = 32


def raised_record(rank: int, record: dict[str, Any], origin_ns: int) -> Raised:
    """Raises KeyError, TypeError, ValueError or OverflowError for a record of another form."""
    frames = (
        Frame(file=str(one["file"]), line=int(one["line"]), function=str(one["function"])) for one in record["frames"]
    )
    return Raised(
        rank=rank,
        at_s=(int(record["at_ns"]) - origin_ns) / 1e9,
        type=str(record["type"]),
        message=str(record["message"]),
        frames=tuple(frames),
        proof=f"rank{rank}/raised.json",
        hints=tuple(_hint(one) for one in record.get("hints", ())[:_MAX_HINTS] if isinstance(one, dict)),
    )


def _hint(record: dict[str, Any]) -> Hint:
    placed = record.get("file") is not None
    frame = (
        Frame(file=str(record["file"]), line=int(record["line"]), function=str(record["function"])) if placed else None
    )
    return Hint(kind=str(record["kind"]), name=str(record["name"]), frame=frame)
