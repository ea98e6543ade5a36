"""Removal of rows that a resumed run will write again from its CSV files."""

from __future__ import annotations

from pathlib import Path


def forget_rows_after(directory: Path, step: int) -> None:
    """Truncate every CSV file in `directory` after the rows of `step`."""
    # The resumed run writes the rows of later steps again. An incomplete last row is removed too. Files whose first
    # column is not `step` are left unchanged.
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
