"""The tables of a run that goes on: each step stands in them once."""

from __future__ import annotations

from pathlib import Path


def forget_rows_after(directory: Path, step: int) -> None:
    """Cut off the rows of later steps, which are done again, and a row that was never written to its end."""
    for path in sorted(directory.glob("*.csv")):
        with path.open("r+b") as file:
            header = file.readline()
            if not header.startswith(b"step,"):
                continue
            kept_bytes = len(header) if header.endswith(b"\n") else 0
            for row in file:
                number = row.partition(b",")[0]
                if not (row.endswith(b"\n") and number.isdigit() and int(number) <= step):
                    break
                kept_bytes += len(row)
            file.truncate(kept_bytes)
