"""torch's flight recorder, its JSON form, as values. Its own analyser fails on gloo dumps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from harness.core.observed.evidence import Collective

_KEPT_PER_GROUP = 16


def parse_flight(text: str) -> tuple[Collective, ...]:
    """Every recorded collective, oldest first. Raises ValueError on anything that is not a flight recorder dump."""
    try:
        dump = json.loads(text)
        if not isinstance(dump, dict):
            raise TypeError("no object at the top")
        entries = dump.get("entries") or []
        return tuple(_collective(entry) for entry in entries if not entry.get("is_p2p"))
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a flight recorder dump: {error!r}") from error


def essential(collectives: Sequence[Collective]) -> tuple[Collective, ...]:
    """The newest of each group and all that are not completed: what the question "who waits for whom" needs."""
    newest: dict[str, list[Collective]] = {}
    for collective in collectives:
        newest.setdefault(collective.group, []).append(collective)
    kept = {
        (collective.group, collective.seq)
        for group in newest.values()
        for collective in [*group[-_KEPT_PER_GROUP:], *[one for one in group if not one.retired][:_KEPT_PER_GROUP]]
    }
    return tuple(one for one in collectives if (one.group, one.seq) in kept)


def _collective(entry: dict[str, Any]) -> Collective:
    group = entry["process_group"]
    return Collective(
        group=str(group[0]),
        seq=int(entry["collective_seq_id"]),
        op=str(entry["profiling_name"]).rpartition(":")[2],
        sizes=tuple(tuple(int(size) for size in sizes) for sizes in entry.get("input_sizes") or ()),
        dtypes=tuple(str(dtype) for dtype in entry.get("input_dtypes") or ()),
        retired=_truth(entry.get("retired")) or entry.get("state") == "completed",
        created_ns=int(entry["time_created_ns"]),
    )


def _truth(value: object) -> bool:
    return value is True or str(value).lower() in ("true", "1")
