"""The model of the kernels' cost: what it reads in machine code, its arithmetic, and what is recorded of it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from documents import REPOSITORY, text
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import kernel_model_report as told
from benchmarks import sass
from benchmarks.device_model import FIRST, HISTORY, REASONS, STATIONS, Constants, predict, programs_at_once
from benchmarks.roofline import Shape, floors_ms

RESULT = json.loads((REPOSITORY / "benchmarks" / "results" / "kernel_model.json").read_text(encoding="utf-8"))

CHOICES = json.loads((REPOSITORY / "benchmarks" / "results" / "nsa_choices.json").read_text(encoding="utf-8"))
SECTIONS = {told.MARKS: told.section(RESULT), told.CHOICES_MARKS: told.choices_section(CHOICES)}

# As nvdisasm prints them: of a warpgroup's loop with a part that some passes leave out, and a trap at the end.
HOPPER = """
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/               @P0 BRA `(.L_x_0) ;
.L_x_1:
        /*0020*/                   DEPBAR.LE SB0, 0x0 ;
        /*0030*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0040*/                   WARPGROUP.ARRIVE ;
        /*0050*/                   HGMMA.64x64x16.F32.BF16 R88, gdesc[UR8], RZ, !UPT ;
        /*0060*/                   HGMMA.64x128x16.F32.BF16 R24, R120, gdesc[UR8].tnspB, R24, gsb0 ;
        /*0070*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0080*/                   MUFU.EX2 R4, R4 ;
        /*0090*/                   FSEL R5, R4, -INF , P1 ;
        /*00a0*/                   LDS.64 R6, [R26+UR11] ;
        /*00b0*/               @P2 BRA `(.L_x_2) ;
        /*00c0*/                   STSM.16.M88 [R93+0x18000], R100 ;
        /*00d0*/                   STL [R1], R5 ;
.L_x_2:
        /*00e0*/                   LDGSTS.E.BYPASS.128 [R75+0x8000], desc[UR26][R4.64], P1 ;
        /*00f0*/                   LDGDEPBAR ;
        /*0100*/              @!P0 BRA `(.L_x_1) ;
.L_x_0:
        /*0110*/                   STG.E.128 desc[UR26][R32.64], R56 ;
        /*0120*/                   EXIT ;
.L_x_3:
        /*0130*/                   BRA `(.L_x_3);
        /*0140*/                   NOP;
"""

# A wait that asks again and again, out of the way of the loop that it belongs to.
SPINNING = """
.L_x_1:
        /*0000*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR30], R4 ;
        /*0010*/              @!P1 BRA `(.L_x_2) ;
.L_x_3:
        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0030*/                   LDSM.16.M88.4 R8, [R69] ;
        /*0040*/                   UIADD3 UR4, UR4, 0x1, URZ ;
        /*0050*/                   BRA.U !UP0, `(.L_x_1) ;
        /*0060*/                   EXIT ;
.L_x_2:
        /*0070*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR30], R4 ;
        /*0080*/              @!P1 BRA `(.L_x_2) ;
        /*0090*/                   BRA `(.L_x_3) ;
"""

# As ptxas writes a short loop for sm_80: a way around a shuffle, and a call that leaves the loop for good.
DIVERGING = """
.L_x_2:
        /*0000*/                   HMMA.16816.F32.BF16 R48, R48, R40, RZ ;
        /*0010*/                   BRA.DIV ~URZ, `(.L_x_1) ;
        /*0020*/                   SHFL.BFLY PT, R32, R35, 0x2, 0x1f ;
.L_x_4:
        /*0030*/                   ISETP.LE.AND P1, PT, R73, UR4, PT ;
        /*0040*/               @P1 CALL.REL.NOINC `(.L_x_0) ;
        /*0050*/                   BRA `(.L_x_2) ;
.L_x_0:
        /*0060*/                   EXIT ;
.L_x_1:
        /*0070*/                   WARPSYNC R32 ;
        /*0080*/                   BRA `(.L_x_4) ;
"""

KERNEL: dict[str, Any] = {
    "registers": 160,
    "shared_bytes": 98304,
    "warps": 8,
    "stages": 2,
    "outside_instructions": 900,
    "described_bytes": 0,
    "loop": asdict(sass.count(sass.parse(HOPPER))) | {"instructions": 500, "half_rate": 150, "exponentials": 32},
    "conditional": {},
}
WORK: dict[str, Any] = {
    "programs": 4096,
    "passes": 4096 * 30,
    "longest": 60,
    "conditional": 1.0,
    "own_bytes": 10**8,
    "walked_bytes": 10**7,
    "reads": 1.0,
    "spread_bytes": 10**4,
    "seen": 10**9,
    "walked": 10**9,
}


def test_a_loop_is_read_with_what_some_passes_leave_out() -> None:
    (loop,) = sass.loops(sass.parse(HOPPER))
    assert (loop.head, loop.latch, loop.is_innermost) == (0x20, 0x100, True)
    assert loop.instructions == 15
    assert loop.always == sass.Counts(
        instructions=13,
        mma={"HGMMA.64x64x16.F32.BF16:SS": 1, "HGMMA.64x128x16.F32.BF16": 1},
        mma_operations=2 * 64 * (64 + 128) * 16 // 4,
        half_rate=1,
        exponentials=1,
        global_read_bytes=32 * 16,
        global_written_bytes=0,
        shared_bytes=32 * (8 + 16),
        mma_shared_bytes=(64 + 64 + 128) * 16 * 2 // 4,
        bulk_copies=0,
        barriers=1,
        waits=2,
        spills=0,
    )
    assert (loop.conditional.instructions, loop.conditional.shared_bytes, loop.conditional.spills) == (2, 32 * 4, 1)


def test_a_wait_is_no_loop_and_hides_none() -> None:
    found = sass.loops(sass.parse(SPINNING))
    assert [(loop.head, loop.latch, loop.is_innermost) for loop in found] == [(0x0, 0x50, True)]
    loop = sass.main_loop(found)
    assert loop is not None
    assert loop.always.mma_operations == 2 * 16 * 8 * 16
    assert loop.always.shared_bytes == 32 * 16
    assert loop.conditional.instructions == 3


def test_a_branch_for_diverged_threads_and_a_call_out_of_it_do_not_hide_a_loop() -> None:
    (loop,) = sass.loops(sass.parse(DIVERGING))
    assert (loop.head, loop.latch, loop.is_innermost) == (0x0, 0x50, True)
    assert (loop.always.instructions, loop.conditional.instructions) == (6, 0)
    assert loop.always.mma_operations == 2 * 16 * 8 * 16


def test_code_without_a_loop_has_no_main_loop() -> None:
    straight = "        /*0000*/                   LDC R1, c[0x0][0x28] ;\n        /*0010*/                   EXIT ;\n"
    assert sass.loops(sass.parse(straight)) == []
    assert sass.main_loop([]) is None


@pytest.mark.parametrize(
    ("opcode", "operations"),
    [
        ("HGMMA.64x256x16.F32.BF16", 2 * 64 * 256 * 16 // 4),
        ("HMMA.16816.F32.BF16", 2 * 16 * 8 * 16),
        ("HMMA.1688.F32.TF32", 2 * 16 * 8 * 8),
        ("UTCHMMA", 0),
        ("FFMA", 0),
    ],
)
def test_a_product_counts_its_operations(opcode: str, operations: int) -> None:
    assert sass.mma_operations(opcode) == operations


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "warps", "programs"),
    [(162, 98304, 8, 1), (187, 81928, 4, 2), (236, 82944, 4, 2), (40, 0, 4, 12), (32, 0, 1, 32), (255, 0, 16, 1)],
)
def test_programs_of_a_multiprocessor(registers: int, shared_bytes: int, warps: int, programs: int) -> None:
    assert programs_at_once(registers, shared_bytes, warps) == programs


@given(st.floats(0, 1), st.integers(1, 10**6), st.integers(1, 200), st.integers(0, 4))
def test_no_kernel_is_faster_than_its_busiest_station(overlap: float, programs: int, passes: int, stages: int) -> None:
    work = WORK | {"programs": programs, "passes": programs * passes, "longest": passes}
    got = predict(KERNEL | {"stages": stages}, work, replace(FIRST, overlap=overlap))
    alone = [getattr(got, f"{name}_ms") for name in STATIONS]
    assert got.ms >= max(alone) * (1 - 1e-9)
    assert got.waiting_ms == pytest.approx(got.ms - max(alone), abs=1e-9)
    # All of what every program does one after the other, each on a multiprocessor of its own, is an upper bound.
    assert predict(KERNEL | {"stages": stages}, work, FIRST).ms >= got.ms * (1 - 1e-9)


@given(st.sampled_from(["instructions", "exponentials", "global_read_bytes", "barriers", "half_rate"]))
def test_more_of_anything_is_never_faster(name: str) -> None:
    more = KERNEL | {"loop": KERNEL["loop"] | {name: 2 * KERNEL["loop"][name] + 64}}
    for constants in HISTORY.values():
        assert predict(more, WORK, constants).ms >= predict(KERNEL, WORK, constants).ms


def test_a_third_stage_hides_loads_and_a_narrow_product_pays_for_its_operands() -> None:
    assert predict(KERNEL | {"stages": 3}, WORK, FIRST).ms < predict(KERNEL, WORK, FIRST).ms
    wide, narrow = ({"HGMMA.64x128x16.F32.BF16:SS": 64}, {"HGMMA.64x32x16.F32.BF16:SS": 256})
    times = [predict(KERNEL | {"loop": KERNEL["loop"] | {"mma": mma}}, WORK, FIRST) for mma in (wide, narrow)]
    assert times[1].tensor_ms > 1.2 * times[0].tensor_ms


def test_a_working_set_beyond_l2_comes_from_memory() -> None:
    spread = WORK | {"walked_bytes": 2 * 10**8, "spread_bytes": 2 * 10**6}
    near, far = (predict(KERNEL, work, FIRST) for work in (spread | {"spread_bytes": 10**3}, spread))
    assert far.memory_ms > near.memory_ms
    assert far.l2_ms == near.l2_ms


def test_every_constant_says_where_it_comes_from() -> None:
    assert set(asdict(FIRST)) == set(REASONS)


def test_what_is_recorded_names_all_constants_it_is_told_with() -> None:
    """Constants are added, never changed: the columns of what was recorded stay what they were."""
    assert {name: Constants(**numbers) for name, numbers in RESULT["constants"].items()} == HISTORY


def test_the_sets_of_constants_differ_in_the_one_that_is_calibrated() -> None:
    first, calibrated = RESULT["constants"]["first"], RESULT["constants"]["calibrated"]
    assert {name for name in first if first[name] != calibrated[name]} == {"overlap"}


def test_the_tree_before_is_predicted_as_the_review_computed_it() -> None:
    before = RESULT["states"][0]
    assert before["label"] == "before"
    scenario = next(one for one in before["scenarios"] if one["tokens"] == 65536 and not one["shared"])
    got = told.sums(before, scenario, HISTORY["calibrated"])
    assert 35 <= got["forward"]["whole"] <= 41
    assert 66 <= got["backward"]["whole"] <= 99


def test_no_prediction_is_below_a_floor() -> None:
    for state in RESULT["states"]:
        for scenario in state["scenarios"]:
            floors = floors_ms(Shape(tokens=scenario["tokens"]), "H200")
            assert floors is not None
            for constants in HISTORY.values():
                for name, prediction in told.milliseconds(state, scenario, constants).items():
                    code, work = state["kernels"][name]["sm_90"], scenario["work"][name]
                    assert prediction.ms >= told.floor_ms(work, code, constants) * 0.999, name
                for way, parts in told.sums(state, scenario, constants).items():
                    assert parts["whole"] > floors["whole"][way]


def test_each_state_predicts_all_lengths_on_random_and_correlated_choices() -> None:
    wanted = {(tokens, shared) for tokens in (8192, 32768, 65536) for shared in (0.0, 0.8, 0.95, 0.98)}
    for state in RESULT["states"]:
        assert {(one["tokens"], one["shared"]) for one in state["scenarios"]} == wanted, state["label"]
        assert {"sm_80", "sm_90"} <= set.intersection(*(set(kernel) for kernel in state["kernels"].values()))


def test_a_mistake_in_the_command_is_one_error() -> None:
    done = run("--kernel", "spanned_forward", "--tile", "64,64")
    assert done.returncode == 2
    assert "--tile: '64,64': expected four numbers, as in 64,64,4,2" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_state_is_recorded_under_its_label_and_gives_way_to_one_of_the_same(tmp_path: Path) -> None:
    file = tmp_path / "model.json"
    file.write_text(json.dumps({"states": [{"label": "other"}, {"label": "now"}]}), encoding="utf-8")
    done = run("--tokens", "1024", "--choices", "random", "correlated", "--json", str(file))
    assert done.returncode == 0, done.stderr
    other, state = json.loads(file.read_text(encoding="utf-8"))["states"]
    assert other == {"label": "other"}
    assert [one["shared"] for one in state["scenarios"]] == [0.0, 0.8, 0.95, 0.98]
    assert set(state["kernels"]) == set(RESULT["states"][-1]["kernels"])
    assert {way: one["launches"] for way, one in state["host"]["1024"].items()} == {"forward": 6, "backward": 9}
    assert "1024 tokens, random choices: predicted milliseconds on an H200" in done.stdout
    told_kernel = run("--kernel", "selected_forward", "--arch", "80", "90")
    assert "HMMA.16816.F32.BF16" in told_kernel.stdout
    assert "HGMMA.64x128x16.F32.BF16" in told_kernel.stdout


def run(*words: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, str(REPOSITORY / "benchmarks" / "kernel_model.py"), *words]
    return subprocess.run(program, capture_output=True, text=True, check=False)


def test_the_page_tells_what_is_recorded() -> None:
    page = text(told.PAGE)
    for (begin, end), section in SECTIONS.items():
        shown = page.partition(begin)[2].partition(end)[0]
        assert shown == f"\n{section}\n", "python benchmarks/kernel_model.py --docs writes the tables anew"


def test_the_page_is_written_between_its_marks_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    (first, second), texts = SECTIONS, list(SECTIONS.values())
    page.write_text(f"a\n{first[0]}\nold\n{first[1]}\nb\n{second[0]}\n{second[1]}\nc\n", encoding="utf-8")
    told.write_page(page, SECTIONS)
    wanted = f"a\n{first[0]}\n{texts[0]}\n{first[1]}\nb\n{second[0]}\n{texts[1]}\n{second[1]}\nc\n"
    assert page.read_text(encoding="utf-8") == wanted
