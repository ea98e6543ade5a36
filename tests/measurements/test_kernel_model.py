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

from benchmarks import calibration, sass
from benchmarks import kernel_model_report as told
from benchmarks.device_model import GPUS, H200, REASONS, STATIONS, predict, programs_at_once
from benchmarks.generated_docs import PAGE, write_page
from benchmarks.roofline import Shape, floors_ms
from benchmarks.warp_schedule import MULTIPROCESSORS, SOURCES, cycles_per_pass

RESULT = json.loads((REPOSITORY / "benchmarks" / "results" / "kernel_model.json").read_text(encoding="utf-8"))

CHOICES = json.loads((REPOSITORY / "benchmarks" / "results" / "nsa_choices.json").read_text(encoding="utf-8"))
PUBLISHED = calibration.read_cases()
SECTIONS = {
    told.MARKS: told.section(RESULT),
    told.CHOICES_MARKS: told.choices_section(CHOICES),
    calibration.MARKS: calibration.section(PUBLISHED),
}

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
    "loop": asdict(sass.count(sass.parse(HOPPER)))
    | {"instructions": 500, "half_rate": 150, "exponentials": 32, "global_written_bytes": 0},
    "conditional": {},
    "always_cycles": 2500.0,
    "all_cycles": 2500.0,
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


@given(st.floats(1, 4), st.integers(1, 10**6), st.integers(1, 200), st.integers(0, 4))
def test_no_kernel_is_faster_than_its_busiest_station(slowdown: float, programs: int, passes: int, stages: int) -> None:
    work = WORK | {"programs": programs, "passes": programs * passes, "longest": passes}
    got = predict(KERNEL | {"stages": stages}, work, replace(H200, slowdown=slowdown))
    alone = [getattr(got, f"{name}_ms") for name in STATIONS]
    assert got.ms >= max(alone) * (1 - 1e-9)
    assert got.waiting_ms == pytest.approx(got.ms - max(alone), abs=1e-9)
    assert predict(KERNEL | {"stages": stages}, work, replace(H200, slowdown=slowdown + 1)).ms >= got.ms * (1 - 1e-9)


@given(st.sampled_from(["instructions", "exponentials", "global_read_bytes", "half_rate"]))
def test_more_of_anything_is_never_faster(name: str) -> None:
    more = KERNEL | {"loop": KERNEL["loop"] | {name: 2 * KERNEL["loop"][name] + 64}}
    longer = KERNEL | {"all_cycles": 2 * KERNEL["all_cycles"]}
    for constants in GPUS.values():
        assert predict(more, WORK, constants).ms >= predict(KERNEL, WORK, constants).ms
        assert predict(longer, WORK, constants).ms >= predict(KERNEL, WORK, constants).ms


def test_what_atomics_add_passes_through_l2_and_a_sum_through_memory() -> None:
    """By descriptor, a count for the whole program, or by pointers, a count for each warp."""
    warps, added = KERNEL["warps"], 1 << 15
    described = KERNEL | {"reduced_bytes": added}
    by_pointers = KERNEL | {"loop": KERNEL["loop"] | {"global_written_bytes": added // warps}}
    plain = predict(KERNEL, WORK, H200)
    for kernel in (described, by_pointers):
        more_ms = predict(kernel, WORK, H200).l2_ms - plain.l2_ms
        assert more_ms == pytest.approx(1e3 * WORK["passes"] * added / H200.l2_bytes_per_s)
    more_ms = predict(KERNEL, WORK | {"sum_bytes": 10**9}, H200).memory_ms - plain.memory_ms
    assert more_ms == pytest.approx(1e12 / H200.memory_bytes_per_s)


def test_a_third_stage_hides_copies_by_descriptor_and_a_narrow_product_pays_for_its_operands() -> None:
    short = KERNEL["loop"] | {"instructions": 40, "half_rate": 10, "exponentials": 2}
    copies = KERNEL | {"described_bytes": 256, "loop": short, "always_cycles": 100.0, "all_cycles": 100.0}
    assert predict(copies | {"stages": 3}, WORK, H200).ms < predict(copies, WORK, H200).ms
    wide, narrow = ({"HGMMA.64x128x16.F32.BF16:SS": 64}, {"HGMMA.64x32x16.F32.BF16:SS": 256})
    times = [predict(KERNEL | {"loop": KERNEL["loop"] | {"mma": mma}}, WORK, H200) for mma in (wide, narrow)]
    assert times[1].tensor_ms > 1.2 * times[0].tensor_ms


def test_a_working_set_beyond_l2_comes_from_memory() -> None:
    spread = WORK | {"walked_bytes": 2 * 10**8, "spread_bytes": 2 * 10**6}
    near, far = (predict(KERNEL, work, H200) for work in (spread | {"spread_bytes": 10**3}, spread))
    assert far.memory_ms > near.memory_ms
    assert far.l2_ms == near.l2_ms


def test_every_constant_says_where_it_comes_from() -> None:
    assert set(asdict(H200)) == set(REASONS)
    assert set(asdict(MULTIPROCESSORS[80])) == set(SOURCES)


def instruction(opcode: str, operands: str = "", *, address: int = 0, **schedule: Any) -> sass.Instruction:
    return sass.Instruction(address, "", opcode, operands, schedule=sass.Schedule(**schedule))


def test_the_compilers_schedule_is_read_from_the_code() -> None:
    """LDSM sets scoreboard 1, the product waits for it (bit 1), and 15 cycles pass until the next instruction."""
    upper = [(4 | 1 << 5 | 7 << 8) << 41, (15 | 7 << 5 | 7 << 8 | 0b10 << 11) << 41]
    text = "".join(
        f"        /*00{place}0*/   {name} ;   /* 0x0000000000000000 */\n        /* 0x{word:016x} */\n"
        for place, (name, word) in enumerate(
            zip(("LDSM.16.M88.4 R8, [R69]", "HMMA.16816.F32 R4, R8, R12, R4"), upper, strict=True)
        )
    )
    load, product = (each.schedule for each in sass.parse(text))
    assert load == sass.Schedule(stall=4, sets=1)
    assert product == sass.Schedule(stall=15, waits=(1,))


def test_a_pass_takes_its_stalls_and_waits_for_its_loads() -> None:
    stalls = [instruction("IADD3", stall=10), instruction("IADD3", stall=5)]
    assert cycles_per_pass(stalls, 4, 90) == 15
    loads = [instruction("LDS", stall=1, sets=0), instruction("IADD3", stall=1, waits=(0,))]
    assert cycles_per_pass(loads, 4, 90) == MULTIPROCESSORS[90].shared_latency + 1


def test_a_unit_serves_one_instruction_after_the_other() -> None:
    assert cycles_per_pass([instruction("MUFU.EX2", stall=1)], 4, 90) == MULTIPROCESSORS[90].exponential_cycles
    floats = [instruction("FFMA", stall=1)]
    assert [cycles_per_pass(floats, 4, capability) for capability in (80, 90)] == [2, 1]


def test_warps_of_a_program_meet_at_a_barrier() -> None:
    body = [instruction("IADD3", stall=10), instruction("BAR.SYNC", stall=1)]
    alone, together = (cycles_per_pass(body, warps, 90) for warps in (4, 8))
    assert alone == pytest.approx(11 + MULTIPROCESSORS[90].barrier_latency, abs=1)
    assert alone <= together <= alone + 4


def test_a_warpgroup_waits_for_its_products() -> None:
    """One of them is 64 x 128 x 16, half of which reads operands at 128 bytes a cycle."""
    processor = MULTIPROCESSORS[90]
    body = [
        instruction("HGMMA.64x128x16.F32.BF16", "R24, R4, gdesc[UR8], R24, gsb0", stall=1),
        instruction("WARPGROUP.DEPBAR.LE", "gsb0, 0x0", stall=1),
    ]
    took = 2 * 64 * 128 * 16 / 4 / processor.mma_operations_per_cycle + processor.product_latency
    assert cycles_per_pass(body, 4, 90) == pytest.approx(took, abs=2)


def test_the_slowdown_of_each_gpu_is_that_of_the_published_times() -> None:
    for gpu in ("A100", "H100"):
        fitted = calibration.fit_slowdown([case for case in PUBLISHED if case["gpu"] == gpu])
        assert GPUS[gpu].slowdown == pytest.approx(fitted, abs=0.005)
    assert GPUS["H200"].slowdown == GPUS["H100"].slowdown


def test_kernels_that_were_left_out_of_the_fit_are_predicted_within_a_third() -> None:
    """Every kernel is left out once. Two of the sources are others than that of most kernels."""
    for gpu in ("A100", "H100"):
        error = calibration.accuracy(PUBLISHED, gpu)
        assert 1 < error.typical < 1.15
        assert error.typical <= error.largest < 4 / 3
        kernels = {case["kernel"] for case in PUBLISHED if case["gpu"] == gpu}
        assert len(kernels) >= 6
        assert len({case["source"] for case in PUBLISHED if case["gpu"] == gpu}) >= 2
    low, high = calibration.band_ms(30.0, calibration.Accuracy(1.1, 1.5))
    assert (low, high) == (20.0, 45.0)


def test_a_fit_to_one_kernel_reproduces_its_time() -> None:
    (case,) = [case for case in PUBLISHED if case["gpu"] == "H100" and "width 128" in case["kernel"]]
    slowdown = calibration.fit_slowdown([case])
    assert calibration.predicted_ms(case, slowdown) == pytest.approx(case["measured_ms"], rel=1e-6)


def test_no_prediction_is_below_a_floor() -> None:
    for state in RESULT["states"]:
        for scenario in state["scenarios"]:
            for gpu in told.SHOWN_GPUS:
                floors = floors_ms(Shape(tokens=scenario["tokens"]), gpu)
                assert floors is not None
                for name, prediction in told.milliseconds(state, scenario, gpu).items():
                    architecture = told.architecture(gpu)
                    code, work = state["kernels"][name][architecture], scenario["work"][architecture][name]
                    assert prediction.ms >= told.floor_ms(work, code, GPUS[gpu]) * 0.999, name
                for way, parts in told.sums(state, scenario, gpu).items():
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
    assert {way: one["launches"] for way, one in state["host"]["1024"].items()} == {"forward": 6, "backward": 10}
    assert "1024 tokens, random choices: predicted milliseconds on an H200" in done.stdout
    told_kernel = run("--kernel", "selected_forward", "--arch", "80", "90")
    assert "HMMA.16816.F32.BF16" in told_kernel.stdout
    assert "HGMMA.64x128x16.F32.BF16" in told_kernel.stdout


def run(*words: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, str(REPOSITORY / "benchmarks" / "kernel_model.py"), *words]
    return subprocess.run(program, capture_output=True, text=True, check=False)


def test_the_page_tells_what_is_recorded() -> None:
    page = text(PAGE)
    for (begin, end), section in SECTIONS.items():
        shown = page.partition(begin)[2].partition(end)[0]
        assert shown == f"\n{section}\n", "python benchmarks/kernel_model.py --docs writes the tables anew"


def test_the_page_is_written_between_its_marks_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    (first, second, _), texts = SECTIONS, list(SECTIONS.values())
    page.write_text(f"a\n{first[0]}\nold\n{first[1]}\nb\n{second[0]}\n{second[1]}\nc\n", encoding="utf-8")
    write_page(page, dict(list(SECTIONS.items())[:2]))
    wanted = f"a\n{first[0]}\n{texts[0]}\n{first[1]}\nb\n{second[0]}\n{texts[1]}\n{second[1]}\nc\n"
    assert page.read_text(encoding="utf-8") == wanted
