"""torch's flight recorder, copied to a file: the newest collectives of each group."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from .. import protocol

ENTRIES_LIMIT = 512  # newest entries kept, beside those that are still open


class FlightRecorder:
    def __init__(self, directory: str) -> None:
        self._directory = directory

    def summary_function(self) -> Callable[..., bytes] | None:
        """The JSON dump of this torch; the older name knew NCCL only. None where there is none."""
        c10d = _c10d()
        return getattr(c10d, "_dump_fr_trace_json", None) or getattr(c10d, "_dump_nccl_trace_json", None)

    def write(self) -> None:
        """Write the file aside and rename it. Without a recorder in this torch there is no file."""
        record = self._record()
        if record is None:
            return
        record["entries"] = _newest(record.get("entries") or [])
        path = os.path.join(self._directory, protocol.FLIGHT.format(pid=os.getpid()))
        aside = f"{path}.new"
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
            json.dump(record, file, default=str)
        os.replace(aside, path)

    def _record(self) -> dict[str, Any] | None:
        """The JSON form. The pickled one has frames, and takes over a second to find the first of them."""
        dump = self.summary_function()
        record = json.loads(dump()) if dump is not None else None
        return record if isinstance(record, dict) else None


def _c10d() -> Any:
    return sys.modules.get("torch._C._distributed_c10d")


def _newest(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Oldest first, as the recorder gives them."""
    first_kept = len(entries) - ENTRIES_LIMIT
    return [entry for index, entry in enumerate(entries) if index >= first_kept or not _retired(entry)]


def _retired(entry: dict[str, Any]) -> bool:
    return str(entry.get("retired")).lower() == "true"
