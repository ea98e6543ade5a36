"""The kernels compile for GPUs that are not here, within the memory and the registers those have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import pytest

# Shared memory that one program may have, by compute capability.
SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
KERNELS = {
    "spanned_forward",
    "spanned_backward_queries",
    "spanned_backward_keys",
    "ranked_blocks",
    "selected_unions",
    "selected_forward",
    "selected_backward_queries",
    "selected_keys",
    "selected_segments",
    "selected_backward_keys",
    "selected_backward_sum",
    "mix_forward",
}
APART = KERNELS - {"mix_forward"}  # with an operator for each branch; torch computes the sum
ATOMICS = KERNELS - {"spanned_backward_queries"} | {"spanned_statistics"}  # with deterministic=False
WAYS = {"at_once": KERNELS, "atomics": ATOMICS, "apart": APART}
LISTS = {"selected_unions", "selected_keys", "selected_segments"}
WITHOUT_PRODUCTS = LISTS | {"selected_backward_sum", "mix_forward", "spanned_statistics"}
RECORD = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "kernel_model.json"
GROWTH = 1.1
FEW = 3  # instructions, so that short loops may move a little
# Arguments in products of 32 bits. None of these is an offset into a tensor of keys or values: tokens x heads of a
# sequence, numbers of programs, places of a tile of queries, places of the list of a row.
NARROW = {
    "selected_forward": ["places"],
    "selected_backward_queries": ["places"],
    "selected_backward_keys": ["length"],
    "mix_forward": ["tokens"],
    "spanned_statistics": ["tokens"],
    "spanned_backward_keys": ["batch_groups", "parts"],
}
# Accesses of 16 bytes a thread in the first choice of tiles: what a tile of rows is moved by, unrolled.
WIDE = dict.fromkeys({*KERNELS, "spanned_statistics"} - LISTS, 8)


def compiled(tmp_path: Path, way: str, capability: int, dtype: str, *numbers: int | str) -> list[dict[str, Any]]:
    program = Path(__file__).with_name("compiled.py")
    done = subprocess.run(
        [sys.executable, program, way, *map(str, (capability, dtype, *numbers))],
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def first_choice(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Every kernel with the tile that is tried first, as an H200 gets it at the shape of the benchmark."""
    tokens = 32768  # that of benchmarks/kernel_model.py
    return compiled(tmp_path_factory.mktemp("cache"), "at_once", 90, "bfloat16", 64, 4, 128, 128, 1, tokens)


# The expected products and lengths of loops are those of the machine code that the record was made with.
TRITON = version(packages_distributions()["triton"][0])  # of a nightly build, the package has another name
OF_THE_RECORD = pytest.mark.skipif(not TRITON.startswith("3.7."), reason=f"recorded with triton 3.7, not {TRITON}")


@OF_THE_RECORD
def test_the_first_choice_of_tiles_compiles_for_an_h200_and_fills_tensor_cores_without_spilling(
    first_choice: list[dict[str, Any]],
) -> None:
    """64 query heads, 4 key heads, width 128, bfloat16: the shape of the benchmark."""
    assert {line["kernel"] for line in first_choice} == KERNELS
    assert_fills_tensor_cores(first_choice)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_kernels_of_atomics_alone_compile_too(tmp_path: Path, capability: int) -> None:
    names = ("spanned_statistics", "spanned_backward_keys")
    lines = compiled(tmp_path, "atomics", capability, "bfloat16", 64, 4, 128, 128, 1, 32768, *names)
    variants = [(line["part"], line["kernel"], line["variant"]) for line in lines]
    assert variants == [
        (part, kernel, variant)
        for part in ("compressed", "sliding")
        for kernel, variant in (("spanned_statistics", []), ("spanned_backward_keys", ["SIGNED", "ATOMIC"]))
    ]
    assert_spills_nothing(lines, capability)
    if capability == 90:
        assert_fills_tensor_cores(lines)
    for line in lines[1::2]:
        assert line["tensor_core_operations"] > 0
        # Since capability 9.0, one copy for all threads adds a tile to the gradient of the queries.
        assert (line["reduced_bytes"] > 0) == (capability >= 90)


@pytest.mark.slow
def test_so_does_that_of_an_operator_for_each_branch(tmp_path: Path) -> None:
    lines = compiled(tmp_path, "apart", 90, "bfloat16", 64, 4, 128, 128, 1, 32768)
    assert {line["kernel"] for line in lines} == APART
    assert_fills_tensor_cores(lines)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("capability", [80, 100])
def test_the_first_choice_of_tiles_for_other_gpus_is_accepted_and_spills_nothing(
    tmp_path: Path, capability: int, way: str
) -> None:
    lines = compiled(tmp_path, way, capability, "bfloat16", 64, 4, 128, 128, 1, 32768)
    assert {line["kernel"] for line in lines} == WAYS[way]
    assert_spills_nothing(lines, capability)


def test_first_tiles_that_spilled_or_were_refused_are_others_for_those_gpus(tmp_path: Path) -> None:
    """The quick part of the test above: with the tiles for an H200 the first spills, and the second is refused."""
    for capability, kernel in ((80, "spanned_forward"), (100, "selected_forward")):
        lines = compiled(tmp_path, "at_once", capability, "bfloat16", 64, 4, 128, 128, 1, 32768, kernel)
        assert {line["kernel"] for line in lines} == {kernel}
        assert_spills_nothing(lines, capability)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_rotary_embeddings_are_loaded_and_stored_16_bytes_at_a_time(tmp_path: Path, capability: int) -> None:
    (line,) = compiled(tmp_path, "rotary", capability, "bfloat16", 64, 4, 128, 128, 1, 32768)
    assert_spills_nothing([line], capability)
    assert line["shared_bytes"] == line["tensor_core_operations"] == 0
    # Of each of four tensors both halves of a row, their cosines and sines, and both halves of the result.
    assert line["wide_accesses"] == 4 * 6
    assert line["registers"] <= 64  # 2048 threads of a multiprocessor have 32 each; half of them hide the latency
    assert set(line["narrow_products"]) <= {"batch", *(f"tokens_{number}" for number in range(1, 5))}


def assert_spills_nothing(lines: list[dict[str, Any]], capability: int) -> None:
    for line in lines:
        assert line["shared_bytes"] <= SHARED_BYTES[capability], line
        assert line["spilled_bytes"] == line["spills"] == 0, line


def assert_fills_tensor_cores(lines: list[dict[str, Any]]) -> None:
    assert_spills_nothing(lines, 90)
    for line in lines:
        assert (line["tensor_core_operations"] > 0) == (line["kernel"] not in WITHOUT_PRODUCTS), line
        # Of sizes no kernel knows what divides them; of addresses and strides of rows it does, so that these stay wide.
        assert line["wide_accesses"] >= WIDE.get(line["kernel"], 0), line
        # Rows of keys and values of 64k tokens and 128 heads lie more than 2^31 elements apart.
        assert set(line["narrow_products"]) <= set(NARROW.get(line["kernel"], [])), line


@OF_THE_RECORD
def test_no_loop_is_a_tenth_longer_than_recorded(first_choice: list[dict[str, Any]]) -> None:
    """A loop that grew for a reason: `benchmarks/kernel_model.py --label NAME --json` records it, and its time."""
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))["states"][-1]["kernels"]
    known = {line["kernel"]: line for line in first_choice if f"{line['part']}/{line['kernel']}" in recorded}
    assert KERNELS - set(known) <= LISTS, "kernels that nobody recorded yet"
    for line in first_choice:
        name = f"{line['part']}/{line['kernel']}"
        before = recorded.get(name, {}).get("sm_90", {})
        for region in ("loop", "conditional", "edge_loop", "edge_conditional"):
            if region in before:
                limit = GROWTH * before[region].get("instructions", 0) + FEW
                assert line[region].get("instructions", 0) <= limit, (name, region)


@pytest.mark.parametrize(
    "numbers",
    [("at_once", "16", "bfloat16"), ("atomics", "16", "bfloat16"), ("apart", "24", "float16")],
    ids=str,
)
def test_after_the_warm_up_no_step_of_any_length_compiles_a_kernel(
    tmp_path: Path, numbers: tuple[str, str, str]
) -> None:
    """Lengths with every residue of 16, of one sequence a row and of packed ones; Triton itself says what is new."""
    program = Path(__file__).with_name("variants.py")
    done = subprocess.run(
        [sys.executable, program, *numbers],
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    warm_up, packed, *steps, unaligned = map(json.loads, done.stdout.splitlines())
    # Two branches go by tiles of their own, and parts of a gradient are of another dtype than the whole. At once one
    # branch writes the gradient of the queries, and the others add to it.
    own = [*WAYS[numbers[0]], *["spanned_backward_queries"] * (numbers[0] == "at_once")]
    # Rows that 16 does not divide, by their width or by that of values beside them, are read by narrower loads.
    rotary = ["rotated"] * (2 if numbers[1] == "16" else 1)
    # With atomics, both branches have the same tiles.
    key_kernels = 2 if numbers[0] == "atomics" else 4
    assert sorted(warm_up["new"]) == sorted(
        [*own, *rotary, "spanned_forward", *["spanned_backward_keys"] * (key_kernels - 1)]
    )
    # By tables of where a sequence or its blocks begin, which without documents are none.
    by_starts = {"ranked_blocks", "selected_backward_keys", "selected_backward_sum", *LISTS}
    # Without documents, the angles of blocks are a view, which begins off a multiple of 16 bytes for some widths.
    assert {*packed["new"]} == by_starts | ({"rotated"} if numbers[1] == "24" else set())
    assert {step["tokens"] % 16 for step in steps if not step["packed"]} == set(range(16))
    assert [step for step in steps if step["new"]] == []
    # A view that begins off a multiple of 16 bytes is read by narrower loads: kernels of its own, of all that read it.
    others = {"mix_forward", "selected_backward_sum", "spanned_statistics", *LISTS}
    assert {*unaligned["new"]} == {"rotated", *own} - others


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("capability", [80, 86, 90])
@pytest.mark.parametrize(
    ("dtype", "numbers"),
    [
        ("bfloat16", (64, 4, 128, 128)),
        ("bfloat16", (16, 16, 64, 64)),
        ("bfloat16", (64, 1, 64, 64)),
        ("bfloat16", (32, 4, 192, 128)),
        ("float16", (12, 2, 64, 64)),
        ("float32", (12, 2, 64, 64)),
        ("float64", (4, 2, 16, 16)),
    ],
    ids=str,
)
def test_some_choice_of_tiles_fits_each_gpu(
    tmp_path: Path, capability: int, dtype: str, numbers: tuple[int, int, int, int]
) -> None:
    """All of them compile; a tile that does not fit is passed over at the launch, so one that fits must be there."""
    for way, kernels in WAYS.items():
        launches = compiled(tmp_path, way, capability, dtype, *numbers, 99)
        fitting = {line["kernel"] for line in launches if line["shared_bytes"] <= SHARED_BYTES[capability]}
        assert fitting == kernels
