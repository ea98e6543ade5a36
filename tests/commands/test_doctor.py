"""Each line of `doctor` with its condition broken, and what the command makes of the lines."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from documents import rows, words

from nsa_harness.cli import main as cli
from nsa_harness.core import doctor
from nsa_harness.core.doctor import (
    CheckLine,
    CheckState,
    ClockFacts,
    CoreFacts,
    GpuFacts,
    InterfaceFacts,
    LeftOver,
    LimitFacts,
    MachineCheckFacts,
    MemoryFacts,
    ModuleFacts,
    NameFacts,
    PortFacts,
    PySpyFacts,
    PythonFacts,
    SlurmFacts,
    SpaceFacts,
    TorchFacts,
    UnknownFacts,
    check_lines,
    is_healthy,
    lines_for_json,
    lines_text,
    size_text,
)

MIB, GIB = 1 << 20, 1 << 30
H200 = ("NVIDIA H200",) * 2
TORCH = TorchFacts(version="2.13.0+cu130", cuda="13.0", devices=2, gloo=True, nccl="2.27.5", torchrun_trouble=None)
GPU = GpuFacts(installed=H200, visible=H200, driver="580.1", visible_devices=None, trouble=None)
PRESENT = ModuleFacts(version="3.1", trouble=None)
SHARED = SpaceFacts(path="/dev/shm", trouble=None, size_bytes=8 * GIB, free_bytes=8 * GIB)
TEMPORARY = replace(SHARED, path="/tmp")
REPORTS = replace(SHARED, path="reports")
LIMITS = LimitFacts(
    processes=4096,
    processes_used=100,
    open_files=65536,
    core_bytes=0,
    core_pattern="core",
    address_space_bytes=None,
)
NAME = NameFacts(hostname="node7", addresses=("10.0.0.7",), bindable=("10.0.0.7",), resolve_s=0.01, trouble=None)
CLOCK = ClockFacts(over_s=2.0, backwards=0, drift_s=0.0001, behind_s=0.0)
SLURM = SlurmFacts(version="slurm 25.05", missing=(), job="4711", trouble=None)
PYTHON = PythonFacts(version="3.11.7", probe_trouble=None)
PORTS = PortFacts(trouble=None, first=32768, last=60999)

WELL = MachineCheckFacts(
    python=PYTHON,
    torch=TORCH,
    gpu=GPU,
    nvml=PRESENT,
    triton=PRESENT,
    flash_attn=PRESENT,
    py_spy=PySpyFacts(path="py-spy", threads=1, trouble=None, ptrace_scope=1),
    shared_memory=SHARED,
    temporary=TEMPORARY,
    reports=REPORTS,
    limits=LIMITS,
    memory=MemoryFacts(total_bytes=64 * GIB, available_bytes=32 * GIB),
    cores=CoreFacts(usable=16, quota=None),
    name=NAME,
    interface=InterfaceFacts(requested=None, available=("lo", "eth0")),
    ports=PORTS,
    clock=CLOCK,
    slurm=SLURM,
    left_over=(),
)
NO_GPU = GpuFacts(installed=None, visible=(), driver=None, visible_devices=None, trouble=None)
ABSENT = ModuleFacts(version=None, trouble=None)
UNLOADABLE = ModuleFacts(version="2.8.3", trouble="ImportError: undefined symbol: _ZN3c10")
OK, WARN, MISSING, BROKEN = CheckState.OK, CheckState.WARN, CheckState.MISSING, CheckState.BROKEN
BOARDS = LeftOver(path="/dev/shm/nsa-harness-20261121T101500-3f2a-0a0b0c0d", size_bytes=460_000)


def limits(**changes: Any) -> LimitFacts:
    return replace(LIMITS, **changes)


def torch(**changes: Any) -> TorchFacts:
    return replace(TORCH, **changes)


def memory(available_bytes: int) -> MemoryFacts:
    return MemoryFacts(total_bytes=64 * GIB, available_bytes=available_bytes)


# The line, its state, a piece of its fact, and what is changed of a machine where all is well.
CASES: list[tuple[str, CheckState, str, dict[str, Any]]] = [
    ("probe", BROKEN, "it wrote no status file", {"python": replace(PYTHON, probe_trouble="it wrote no status file")}),
    (
        "torch",
        BROKEN,
        "No module named 'torch'",
        {"torch": UnknownFacts(why="ModuleNotFoundError: No module named 'torch'")},
    ),
    ("torch", BROKEN, "did not end within 90 s", {"torch": UnknownFacts(why="did not end within 90 s")}),
    ("torch", BROKEN, "supported: 2.11 to 2.13", {"torch": torch(version="2.10.1")}),
    ("torch", WARN, "tested: 2.11 to 2.13", {"torch": torch(version="2.14.0a0+git1")}),
    ("torch", WARN, "tested: 2.11 to 2.13", {"torch": torch(version="main")}),
    ("torchrun", BROKEN, "not checked", {"torch": UnknownFacts(why="ImportError")}),
    ("torchrun", BROKEN, "ImportError: elastic", {"torch": torch(torchrun_trouble="ImportError: elastic")}),
    ("gloo", BROKEN, "not checked", {"torch": UnknownFacts(why="ImportError")}),
    ("gloo", BROKEN, "does not contain it", {"torch": torch(gloo=False)}),
    ("nccl", BROKEN, "not checked", {"torch": UnknownFacts(why="ImportError")}),
    ("nccl", BROKEN, "but runs on 2 x NVIDIA H200 need it", {"torch": torch(nccl=None)}),
    ("nccl", MISSING, "does not contain it", {"torch": torch(nccl=None), "gpu": NO_GPU}),
    ("gpu", MISSING, "nvidia-smi is not installed", {"gpu": NO_GPU}),
    ("gpu", MISSING, "lists no GPU", {"gpu": replace(NO_GPU, installed=())}),
    (
        "gpu",
        WARN,
        "version mismatch",
        {"gpu": replace(NO_GPU, installed=(), trouble="Driver/library version mismatch")},
    ),
    ("gpu", WARN, "hidden by CUDA_VISIBLE_DEVICES=-1", {"gpu": replace(GPU, visible=(), visible_devices="-1")}),
    ("gpu", BROKEN, "torch can use 0 of 2", {"torch": torch(devices=0)}),
    ("py-spy", BROKEN, "not found", {"py_spy": PySpyFacts(path=None, threads=0, trouble=None, ptrace_scope=None)}),
    (
        "py-spy",
        BROKEN,
        "Permission denied, kernel.yama.ptrace_scope is 3",
        {"py_spy": PySpyFacts(path="py-spy", threads=0, trouble="py-spy: Permission denied", ptrace_scope=3)},
    ),
    (
        "/dev/shm",
        WARN,
        "status files are written to /tmp",
        {"shared_memory": replace(SHARED, trouble="Permission denied")},
    ),
    (
        "/dev/shm",
        BROKEN,
        "neither is /tmp (Read-only file system)",
        {
            "shared_memory": replace(SHARED, trouble="Permission denied"),
            "temporary": replace(TEMPORARY, trouble="Read-only file system"),
        },
    ),
    ("/dev/shm", WARN, "need 64 MiB", {"shared_memory": replace(SHARED, free_bytes=40 * MIB)}),
    ("/dev/shm", BROKEN, "no progress of the ranks is seen", {"shared_memory": replace(SHARED, free_bytes=2 * MIB)}),
    ("reports", BROKEN, "Read-only file system", {"reports": replace(REPORTS, trouble="Read-only file system")}),
    ("reports", BROKEN, "evidence will be lost", {"reports": replace(REPORTS, free_bytes=10 * MIB)}),
    ("reports", WARN, "a long run may fill it", {"reports": replace(REPORTS, free_bytes=500 * MIB)}),
    ("memory", BROKEN, "too little for two ranks", {"memory": memory(500 * MIB)}),
    ("memory", WARN, "enough only for the smallest models", {"memory": memory(2 * GIB)}),
    ("cores", WARN, "CPU quota of 1.5 cores", {"cores": CoreFacts(usable=16, quota=1.5)}),
    ("cores", WARN, "shared by all ranks", {"cores": CoreFacts(usable=1, quota=None)}),
    ("processes", BROKEN, "ranks cannot start", {"limits": limits(processes=120)}),
    ("processes", BROKEN, "0 more can start", {"limits": limits(processes=50)}),
    ("processes", WARN, "300 more can start", {"limits": limits(processes=400)}),
    ("open files", BROKEN, "32 per process", {"limits": limits(open_files=32)}),
    ("open files", WARN, "too few for data loaders", {"limits": limits(open_files=64)}),
    ("core files", WARN, "as large as its memory (core)", {"limits": limits(core_bytes=None)}),
    ("core files", WARN, "of up to 2 GiB", {"limits": limits(core_bytes=2 * GIB)}),
    ("address space", WARN, "4 GiB per process", {"limits": limits(address_space_bytes=4 * GIB)}),
    (
        "hostname",
        BROKEN,
        "cannot be resolved (Name or service not known)",
        {"name": replace(NAME, addresses=(), bindable=(), trouble="cannot be resolved (Name or service not known)")},
    ),
    ("hostname", BROKEN, "has no address", {"name": replace(NAME, addresses=(), bindable=())}),
    ("hostname", BROKEN, "10.0.0.7, which is not an address of this machine", {"name": replace(NAME, bindable=())}),
    ("hostname", WARN, "took 5.1 s", {"name": replace(NAME, resolve_s=5.1)}),
    (
        "interface",
        BROKEN,
        "is ib0, which does not exist; available: lo",
        {"interface": InterfaceFacts(requested="ib0", available=("lo",))},
    ),
    ("interface", BROKEN, "available: none", {"interface": InterfaceFacts(requested="eth0", available=())}),
    ("ports", BROKEN, "Cannot assign", {"ports": replace(PORTS, trouble="Cannot assign requested address")}),
    ("ports", WARN, "10 available", {"ports": replace(PORTS, last=32777)}),
    ("clock", BROKEN, "went back 3 times", {"clock": replace(CLOCK, backwards=3)}),
    ("clock", WARN, "stepped by -0.400 s", {"clock": replace(CLOCK, drift_s=-0.4)}),
    ("clock", WARN, "3600 s behind", {"clock": replace(CLOCK, behind_s=3600.0)}),
    ("left over", WARN, "449 KiB", {"left_over": (BOARDS,)}),
    ("left over", WARN, "and 2 more", {"left_over": (BOARDS,) * 5}),
    ("triton", MISSING, "not installed", {"triton": ABSENT}),
    ("triton", WARN, "undefined symbol", {"triton": UNLOADABLE}),
    ("flash-attn", MISSING, "not installed", {"flash_attn": ABSENT}),
    ("flash-attn", WARN, "2.8.3 is installed, but cannot be imported", {"flash_attn": UNLOADABLE}),
    ("nvidia-ml-py", MISSING, "not installed", {"nvml": ABSENT}),
    ("nvidia-ml-py", WARN, "cannot be imported", {"nvml": UNLOADABLE}),
    (
        "slurm",
        MISSING,
        "no sinfo, scontrol or srun",
        {"slurm": SlurmFacts(version=None, missing=("sinfo", "scontrol", "srun"), job=None, trouble=None)},
    ),
    ("slurm", WARN, "no srun on PATH, inside job 4711", {"slurm": replace(SLURM, missing=("srun",))}),
    ("slurm", WARN, "Unable to contact", {"slurm": replace(SLURM, trouble="Unable to contact slurm controller")}),
]


def line(facts: MachineCheckFacts, name: str) -> CheckLine:
    (found,) = (one for one in check_lines(facts) if one.name == name)
    return found


def test_a_machine_where_all_is_well_has_nothing_to_do() -> None:
    assert [one for one in check_lines(WELL) if one.state is not OK or one.advice is not None] == []
    assert is_healthy(check_lines(WELL))


@pytest.mark.parametrize(("name", "state", "piece", "changes"), CASES, ids=[f"{c[0]}-{c[1]}-{c[2]}" for c in CASES])
def test_a_broken_condition_is_said_with_its_fact_and_what_to_do(
    name: str, state: CheckState, piece: str, changes: dict[str, Any]
) -> None:
    facts = replace(WELL, **changes)
    said = line(facts, name)
    assert (said.state, piece in said.fact, bool(said.advice)) == (state, True, True), said
    assert is_healthy(check_lines(facts)) is (BROKEN not in {one.state for one in check_lines(facts)})
    assert (state is not BROKEN) or not is_healthy(check_lines(facts))


def test_every_line_has_a_case_in_which_it_is_broken() -> None:
    assert {one.name for one in check_lines(WELL)} == {name for name, *_ in CASES}


def test_a_broken_condition_leaves_the_other_lines_as_they_were() -> None:
    facts = replace(WELL, cores=CoreFacts(usable=1, quota=None))
    changed = [
        before.name for before, after in zip(check_lines(WELL), check_lines(facts), strict=True) if before != after
    ]
    assert changed == ["cores"]


@pytest.mark.parametrize(
    ("name", "changes", "piece"),
    [
        ("processes", {"limits": limits(processes=None)}, "no limit"),
        ("open files", {"limits": limits(open_files=None)}, "no limit"),
        ("core files", {"limits": limits(core_bytes=None, core_pattern="|/lib/systemd/coredump %P")}, "coredump"),
        ("address space", {"limits": limits(address_space_bytes=64 * GIB)}, "64 GiB per process"),
        ("cores", {"cores": CoreFacts(usable=2, quota=4.0)}, "2 usable"),
        ("interface", {"interface": InterfaceFacts(requested="eth0", available=("lo", "eth0"))}, "GLOO_SOCKET_IFNAME"),
        ("slurm", {"slurm": replace(SLURM, job=None)}, "not inside a job"),
        ("torch", {"torch": torch(version="2.11.0", cuda=None)}, "built for CPU only"),
        (
            "gpu",
            {"gpu": replace(GPU, visible=H200[:1], visible_devices="0"), "torch": torch(devices=1)},
            "2 x NVIDIA H200",
        ),
    ],
)
def test_what_is_fine_in_another_way_is_ok(name: str, changes: dict[str, Any], piece: str) -> None:
    said = line(replace(WELL, **changes), name)
    assert (said.state, piece in said.fact, said.advice) == (OK, True, None), said


def test_an_optional_thing_that_is_missing_is_no_failure() -> None:
    laptop = replace(WELL, gpu=NO_GPU, torch=torch(nccl=None, devices=0), triton=ABSENT, flash_attn=ABSENT, nvml=ABSENT)
    assert is_healthy(check_lines(laptop))
    assert {one.state for one in check_lines(laptop)} == {OK, MISSING}


def test_people_see_each_line_what_to_do_below_it_and_the_verdict_last() -> None:
    lines = (
        CheckLine(name="torch", state=OK, fact="2.13.0"),
        CheckLine(name="hostname", state=BROKEN, fact="node7: \x1b[31mno", advice="fix it"),
    )
    assert list(lines_text(lines)) == [
        "ok      torch     2.13.0",
        "broken  hostname  node7: \\x1b[31mno",
        "                  do: fix it",
        "",
        "broken: hostname; fix this first, or runs will fail or lose evidence",
    ]
    assert list(lines_text(lines[:1]))[-1] == "runs work on this machine, and they lose no evidence"


def test_programs_get_every_line_with_its_state() -> None:
    shown = json.loads(json.dumps(lines_for_json(check_lines(replace(WELL, reports=replace(REPORTS, trouble="full"))))))
    assert (shown["schema"], shown["healthy"], len(shown["lines"])) == (1, False, len(check_lines(WELL)))
    assert {"name": "gloo", "state": "ok", "fact": "in torch", "advice": None} in shown["lines"]


@pytest.mark.parametrize(
    ("size_bytes", "shown"),
    [(512, "512 B"), (2048, "2 KiB"), (64 * MIB, "64 MiB"), (1536 * MIB, "1.5 GiB"), (200 * GIB + 1, "200 GiB")],
)
def test_a_size_is_told_in_the_unit_that_fits(size_bytes: int, shown: str) -> None:
    assert size_text(size_bytes) == shown


@pytest.mark.parametrize(
    ("facts", "code"), [(WELL, 0), (replace(WELL, gpu=NO_GPU), 0), (replace(WELL, torch=torch(gloo=False)), 1)]
)
def test_the_exit_code_is_1_only_where_a_line_is_broken(
    facts: MachineCheckFacts, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("nsa_harness.supervisor.doctor.measure", lambda *_: facts)
    assert cli.run_command_line(["doctor", "--json"]) == code
    shown = json.loads(capsys.readouterr().out)
    assert (shown["healthy"], shown["overhead"]) == (code == 0, None)


@pytest.mark.parametrize("typed", [["--overhead"], ["--", "true"], ["--overhead", "--", "true"]])
def test_a_command_is_answered_with_the_benchmark_that_measures_it(
    typed: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("nsa_harness.supervisor.doctor.measure", lambda *_: pytest.fail("it looked"))
    assert cli.run_command_line(["doctor", *typed]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("doctor runs no program; ")
    assert "python benchmarks/timing_pairs.py -- COMMAND" in line


def test_the_document_explains_every_line_every_state_and_every_number() -> None:
    shown = rows("docs/doctor.md", "line", "checks")
    assert [words(cells[0])[0] for cells in shown] == [one.name for one in check_lines(WELL)]
    assert all(len(cells) == 4 and all(cells) for cells in shown)
    states = {words(cells[0])[0] for cells in rows("docs/doctor.md", "state", "meaning")}
    assert states == set(CheckState)
    numbers = {words(cells[0])[0]: cells[1] for cells in rows("docs/doctor.md", "limit", "value")}
    real = {name: value for name, value in vars(doctor).items() if name.isupper()}
    real = {name: value for name, value in real.items() if name[0] != "_" and name != "STATUS_FILE_SIZE"}
    assert numbers == {name: number_text(name, value) for name, value in real.items()}


def number_text(name: str, value: Any) -> str:
    if isinstance(value, tuple):
        return ".".join(map(str, value))
    if name.endswith("_BYTES"):
        return size_text(value)
    return f"{value:g} s" if name.endswith("_S") else str(value)
