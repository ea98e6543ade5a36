"""The kernels that read pages compile for GPUs that are not here, without spilling, and once for all lengths."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
KERNELS = ["cached_parts", "cached_output"]
COUNTER = {"cached_parts": [], "cached_output": ["STG", "BAR", "MEMBAR", "ATOMG", "CCTL", "BAR", "LDG"]}


def lines(cache: Path, *words: str | Path) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, *words],
        env=os.environ | {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def compiled(cache: Path, *options: str) -> list[dict[str, Any]]:
    return lines(cache, ROOT / "benchmarks" / "decode_cost.py", *options)


def test_they_fit_each_gpu_and_fill_tensor_cores_without_spilling(tmp_path: Path) -> None:
    """64 query heads, 4 key heads, width 128, bfloat16: the shape of the benchmark."""
    told = compiled(tmp_path, "--arch", *map(str, SHARED_BYTES))
    rows = [row for row in told if "kernel" in row]
    assert [(row["sm"], row["kernel"]) for row in rows] == [(sm, kernel) for sm in SHARED_BYTES for kernel in KERNELS]
    for row in rows:
        assert row["shared_bytes"] <= SHARED_BYTES[row["sm"]], row
        assert row["spilled_bytes"] == row["spills"] == 0, row
        assert row["tensor_core_operations"] > 0, row
        # 64 keys and values of 256 bytes each by 128 threads: no load of a row is narrower than it may be.
        assert row["copies_of_16_bytes"] >= 64 * 2 * 256 // 128 // 16, row
        # All threads have written before one of them counts the program, and none reads before it is counted.
        assert row["around_counter"] == COUNTER[row["kernel"]], row
    layers = {(row["tokens"], row["sequences"]): row for row in told if "tokens" in row}
    for (_, sequences), row in layers.items():
        assert (row["programs"]["cached_output"], row["unshared"]["programs"]["cached_output"]) == (
            (36, 4) if sequences == 1 else (128, 128)
        )
        assert row["passes"]["cached_output"]["keys"] == (2 if sequences == 1 else 16)
        assert row["launches"] == len(KERNELS)
    # Of one layer: below some thousand tokens it is the host that a step waits for.
    host = {row["host"]: row for row in told if "host" in row}
    assert host["pages, fused"]["launches"] == 3  # with the one for rotary embeddings
    assert host["pages, fused"]["operations"] <= 51 < 200 <= host["pages, plain torch"]["operations"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("--heads", "12", "--groups", "2", "--width", "64"),
        ("--heads", "64", "--groups", "1", "--width", "256"),
        ("--heads", "16", "--groups", "16", "--width", "64", "--dtype", "float16"),
        ("--heads", "12", "--groups", "2", "--width", "64", "--dtype", "float32"),
    ],
    ids=" ".join,
)
def test_some_choice_of_tiles_fits_each_gpu(tmp_path: Path, options: tuple[str, ...]) -> None:
    rows = compiled(tmp_path, "--arch", "80", "90", "--tried", "99", *options)
    rows = [row for row in rows if "kernel" in row]
    fitting = {(row["sm"], row["kernel"]) for row in rows if row["shared_bytes"] <= SHARED_BYTES[row["sm"]]}
    assert fitting == {(sm, kernel) for sm in (80, 90) for kernel in KERNELS}


@pytest.mark.parametrize("words", [("16", "bfloat16"), ("24", "float16")], ids=str)
def test_no_length_and_no_number_of_sequences_compiles_them_again(tmp_path: Path, words: tuple[str, str]) -> None:
    first, *others = lines(tmp_path, Path(__file__).with_name("variants_paged.py"), *words)
    assert sorted(first["new"]) == sorted(KERNELS)
    assert {row["longest"] % 16 for row in others} == set(range(16))
    assert [row for row in others if row["new"]] == []
