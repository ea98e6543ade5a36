"""What nvidia-smi prints, as values."""

from __future__ import annotations

import csv
from collections.abc import Iterable

from harness.core.observed.node import Gpu

GPU_FIELDS = (
    "index", "uuid", "name", "utilization.gpu", "memory.used", "memory.total", "ecc.errors.uncorrected.volatile.total",
)  # fmt: skip
PROCESS_FIELDS = ("gpu_uuid", "pid")
_MAX_GPUS = 64
_MAX_PIDS = 64


def parse_gpus(table: str, processes: str) -> tuple[Gpu, ...]:
    """The GPUs of two answers in CSV without header and units, in the order of the fields above.

    Raises ValueError where a line has another form.
    """
    pids: dict[str, list[int]] = {}
    for uuid, pid in _rows(processes, len(PROCESS_FIELDS)):
        pids.setdefault(uuid, []).append(int(pid))
    return tuple(_gpu(row, pids) for row in list(_rows(table, len(GPU_FIELDS)))[:_MAX_GPUS])


def _rows(text: str, columns: int) -> Iterable[list[str]]:
    for line, row in enumerate(csv.reader(text.splitlines(), skipinitialspace=True), start=1):
        if len(row) != columns:
            raise ValueError(f"nvidia-smi, line {line}: {len(row)} values, expected {columns}: {','.join(row)[:100]}")
        yield [word.strip() for word in row]


def _gpu(row: list[str], pids: dict[str, list[int]]) -> Gpu:
    index, uuid, name, utilisation, used, total, errors = row
    percent, used_mib, total_mib = _number(utilisation), _number(used), _number(total)
    uncorrected = _number(errors)
    return Gpu(
        index=int(index),
        name=name[:80],
        utilisation=None if percent is None else percent / 100,
        used_bytes=None if used_mib is None else int(used_mib) << 20,
        total_bytes=None if total_mib is None else int(total_mib) << 20,
        ecc_errors=None if uncorrected is None else int(uncorrected),
        pids=tuple(sorted(pids.get(uuid, ()))[:_MAX_PIDS]),
    )


def _number(word: str) -> float | None:
    """ "[N/A]", "[Not Supported]", "[Unknown Error]" are no numbers."""
    return float(word) if word.replace(".", "", 1).isdigit() else None
