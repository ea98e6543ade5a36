"""What `doctor` measures, each with the real condition broken where a test can break it."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsa_harness.core.doctor import ModuleFacts, TorchFacts, UnknownFacts
from nsa_harness.protocol import ENV_RUN
from nsa_harness.supervisor import doctor
from nsa_harness.supervisor.doctor import (
    ClockComparison,
    clock_facts,
    gpu_facts,
    left_over,
    measure,
    name_facts,
    port_facts,
    slurm_facts,
    space_facts,
)

GIB = 1 << 30


def tool(directory: Path, name: str, body: str) -> None:
    path = directory / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def importing(directory: Path) -> dict[str, str]:
    """An environment in which `directory` comes first on the import path."""
    return {**os.environ, "PYTHONPATH": str(directory)}


def test_this_machine_is_measured_whole(tmp_path: Path) -> None:
    facts = measure(tmp_path, os.environ)
    assert isinstance(facts.torch, TorchFacts)
    assert (facts.torch.gloo, facts.torch.torchrun_trouble) == (True, None)
    assert facts.python.probe_trouble is None
    assert facts.reports.path == str(tmp_path)
    assert facts.cores.usable == len(os.sched_getaffinity(0))
    assert 0 < facts.memory.available_bytes <= facts.memory.total_bytes
    assert "lo" in facts.interface.available


# --- children


def test_a_torch_that_raises_on_import_is_unknown_with_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')\n")
    facts = doctor.torch_facts(importing(tmp_path))
    assert facts == UnknownFacts(why="OSError: libcudart.so.13: cannot open shared object file")


def test_a_torch_that_crashes_on_import_is_unknown_with_the_signal(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    assert doctor.torch_facts(importing(tmp_path)) == UnknownFacts(why="ended by SIGSEGV")


def test_a_torch_without_distributed_has_neither_backend_nor_torchrun(tmp_path: Path) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text(
        "__version__ = '2.12.0'\n"
        "class version:\n    cuda = None\n"
        "class cuda:\n    is_available = staticmethod(lambda: False)\n"
    )
    (package / "distributed.py").write_text("def is_available():\n    return False\n")
    facts = doctor.torch_facts(importing(tmp_path))
    assert isinstance(facts, TorchFacts)
    assert (facts.version, facts.gloo, facts.nccl, facts.devices) == ("2.12.0", False, None, 0)
    assert facts.torchrun_trouble is not None
    assert "ModuleNotFoundError" in facts.torchrun_trouble


def test_an_import_that_does_not_end_is_unknown_after_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("import signal\nsignal.pause()\n")
    monkeypatch.setattr(doctor, "_IMPORT_LIMIT_S", 1.0)
    assert doctor.torch_facts(importing(tmp_path)) == UnknownFacts(why="did not end within 1 s")


def test_a_module_that_is_found_and_not_importable_is_said_to_be_so(tmp_path: Path) -> None:
    (tmp_path / "flash_attn.py").write_text("raise ImportError('undefined symbol: _ZN3c10')\n")
    facts = doctor.module_facts("flash_attn", "no-such-package", importing(tmp_path))
    assert facts == ModuleFacts(version="a build", trouble="ImportError: undefined symbol: _ZN3c10")


def test_a_module_that_ends_the_interpreter_on_import_is_there_and_not_importable(tmp_path: Path) -> None:
    (tmp_path / "triton.py").write_text("import os\nos._exit(3)\n")
    facts = doctor.module_facts("triton", "no-such-package", importing(tmp_path))
    assert facts == ModuleFacts(version="a build", trouble="ended with exit code 3")


def test_a_module_that_is_not_there_has_no_version_and_one_that_is_has_its_own(tmp_path: Path) -> None:
    (tmp_path / "triton.py").write_text("print('hello')\n__version__ = '3.9'\n")
    assert doctor.module_facts("absent_module", "absent-module") == ModuleFacts(version=None, trouble=None)
    facts = doctor.module_facts("triton", "no-such-package", importing(tmp_path))
    assert facts == ModuleFacts(version="3.9", trouble=None)


@pytest.mark.parametrize(
    ("text", "trouble"),
    [
        ("raise SystemExit('no guests here')", "SystemExit: no guests here"),
        ("import os\ndel os.environ['_NSA_HARNESS_BOARDS']", "it wrote no status file"),
    ],
)
def test_a_sitecustomize_can_keep_the_probe_out_or_end_the_interpreter(text: str, trouble: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(text)
    assert doctor.python_facts(importing(tmp_path)).probe_trouble == trouble


def test_a_py_spy_that_may_not_look_is_told_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool(tmp_path, "py-spy", "echo 'Error: Permission Denied: Try running again with sudo' >&2; exit 1")
    (tmp_path / "ptrace_scope").write_text("2\n")
    monkeypatch.setattr(doctor, "py_spy_path", lambda: str(tmp_path / "py-spy"))
    monkeypatch.setattr("nsa_harness.supervisor.capture.stacks.py_spy_path", lambda: str(tmp_path / "py-spy"))
    facts = doctor.py_spy_facts(tmp_path / "ptrace_scope")
    assert (facts.threads, facts.ptrace_scope) == (0, 2)
    assert facts.trouble is not None
    assert "Permission Denied" in facts.trouble


def test_a_py_spy_that_is_nowhere_has_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "py_spy_path", lambda: "no-such-py-spy")
    assert doctor.py_spy_facts().path is None


def test_py_spy_really_reads_a_child() -> None:
    facts = doctor.py_spy_facts()
    assert (facts.threads, facts.trouble) == (1, None)


# --- GPUs and Slurm, by what their commands say


def test_the_gpus_come_with_their_driver_and_what_is_left_of_them(tmp_path: Path) -> None:
    tool(tmp_path, "nvidia-smi", "printf 'NVIDIA H200, 580.1\\nNVIDIA H200, 580.1\\n'")
    facts = gpu_facts({"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "1"})
    assert (facts.installed, facts.visible) == (("NVIDIA H200",) * 2, ("NVIDIA H200",))
    assert (facts.driver, facts.visible_devices, facts.trouble) == ("580.1", "1", None)


def test_an_nvidia_smi_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    tool(tmp_path, "nvidia-smi", "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    facts = gpu_facts({"PATH": str(tmp_path)})
    assert (facts.installed, facts.trouble) == ((), "Failed to initialize NVML: Driver/library version mismatch")


def test_without_nvidia_smi_nothing_is_installed(tmp_path: Path) -> None:
    assert gpu_facts({"PATH": str(tmp_path)}).installed is None


def test_slurm_is_asked_whether_its_controller_answers(tmp_path: Path) -> None:
    tool(tmp_path, "sinfo", '[ "$1" = --version ] && echo slurm 25.05 || { echo "Unable to contact" >&2; exit 1; }')
    tool(tmp_path, "srun", ":")
    facts = slurm_facts({"PATH": str(tmp_path), "SLURM_JOB_ID": "4711"})
    assert (facts.version, facts.missing, facts.job) == ("slurm 25.05", ("scontrol",), "4711")
    assert facts.trouble == "Unable to contact"
    assert slurm_facts({"PATH": str(tmp_path / "none")}).missing == ("sinfo", "scontrol", "srun")


# --- places


def test_a_directory_that_takes_no_file_is_told_with_the_reason(tmp_path: Path) -> None:
    assert space_facts(tmp_path / "absent").trouble == "No such file or directory"
    (tmp_path / "file").write_text("")
    assert space_facts(tmp_path / "file").trouble == "Not a directory"
    assert space_facts(Path("/proc/self")).trouble is not None  # no file can be made there, not even by root


def test_a_file_system_that_is_full_is_told(tmp_path: Path) -> None:
    code = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from nsa_harness.supervisor.doctor import space_facts\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "sys.exit(space_facts(Path(sys.argv[1])).trouble)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (1, "File too large")


# --- network


def test_a_name_that_does_not_resolve_has_no_address() -> None:
    def nowhere(_: str) -> list[str]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    facts = name_facts(lambda: "node7", nowhere)
    assert (facts.hostname, facts.addresses, facts.bindable) == ("node7", (), ())
    assert facts.trouble == "cannot be resolved (Name or service not known)"


def test_a_name_that_resolves_to_another_machine_cannot_be_bound() -> None:
    facts = name_facts(lambda: "node7", lambda _: ["192.0.2.7"])  # an address kept for documents
    assert (facts.addresses, facts.bindable, facts.trouble) == (("192.0.2.7",), (), None)
    assert name_facts(lambda: "node7", lambda _: ["192.0.2.7", "127.0.0.1"]).bindable == ("127.0.0.1",)


def test_a_port_that_cannot_be_bound_is_told_with_the_range(tmp_path: Path) -> None:
    (tmp_path / "range").write_text("40000\t40009\n")
    facts = port_facts("192.0.2.7", tmp_path / "range")
    assert (facts.trouble, facts.first, facts.last) == ("Cannot assign requested address", 40000, 40009)
    assert port_facts(ranges=tmp_path / "absent").trouble is None


# --- clock


def ticking(*times_ns: int) -> Iterator[int]:
    yield from times_ns
    while True:
        yield times_ns[-1]


def test_a_monotonic_clock_that_goes_back_is_counted() -> None:
    readings = ticking(0, 10, 5, 20, 15, 30)
    assert clock_facts(ClockComparison(monotonic_ns=lambda: next(readings))).backwards == 2
    assert clock_facts(ClockComparison()).backwards == 0


def test_a_wall_clock_that_is_set_is_seen_against_the_monotonic_one() -> None:
    walls, readings = iter([1000.0, 1007.0]), iter([0, 5_000_000_000])
    over_s, drift_s = ClockComparison(lambda: next(walls), lambda: next(readings)).passed_s()
    assert (over_s, drift_s) == (5.0, 2.0)


def test_a_wall_clock_behind_the_installed_files_is_seen() -> None:
    assert clock_facts(ClockComparison(wall_s=lambda: 1000.0)).behind_s > 1e9
    assert clock_facts(ClockComparison()).behind_s == 0.0


# --- limits and control groups


def groups(root: Path, own: str, files: dict[str, str]) -> tuple[Path, Path]:
    """A fake /proc and /sys/fs/cgroup."""
    proc, tree = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(own)
    (proc / "meminfo").write_text(f"MemTotal: {64 << 20} kB\nMemAvailable: {32 << 20} kB\n")
    for name, content in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(content + "\n")
    return proc, tree


def test_the_control_group_that_grants_least_memory_counts_without_its_file_pages(tmp_path: Path) -> None:
    files = {
        "job/memory.max": str(8 * GIB),
        "job/memory.current": str(5 * GIB),
        "job/memory.stat": f"anon 1\ninactive_file {GIB}",
        "job/step/memory.max": "max",
        "job/step/memory.current": "1",
    }
    facts = doctor.memory_facts(*groups(tmp_path, "0::/job/step\n", files))
    assert (facts.total_bytes, facts.available_bytes) == (8 * GIB, 4 * GIB)


def test_version_1_of_control_groups_is_read_too(tmp_path: Path) -> None:
    files = {
        "memory/box/memory.limit_in_bytes": str(2 * GIB),
        "memory/box/memory.usage_in_bytes": str(GIB),
        "memory/memory.limit_in_bytes": "9223372036854771712",
        "memory/memory.usage_in_bytes": str(GIB),
        "cpu/box/cpu.cfs_quota_us": "150000",
        "cpu/box/cpu.cfs_period_us": "100000",
        "cpu/cpu.cfs_quota_us": "-1",
        "cpu/cpu.cfs_period_us": "100000",
    }
    proc, tree = groups(tmp_path, "4:memory:/box\n2:cpu:/box\n", files)
    assert doctor.memory_facts(proc, tree).available_bytes == GIB
    assert doctor.core_facts(proc, tree).quota == 1.5


def test_a_cpu_quota_is_told_in_cores_and_no_quota_is_none(tmp_path: Path) -> None:
    proc, tree = groups(tmp_path, "0::/job\n", {"job/cpu.max": "50000 100000", "cpu.max": "max 100000"})
    assert doctor.core_facts(proc, tree).quota == 0.5
    (tree / "job/cpu.max").unlink()
    assert doctor.core_facts(proc, tree).quota is None


def test_the_limit_of_processes_is_the_one_that_leaves_least(tmp_path: Path) -> None:
    files = {"job/pids.max": "100", "job/pids.current": "90", "pids.max": "50", "pids.current": "10"}
    facts = doctor.limit_facts(*groups(tmp_path, "0::/job\n", files))
    assert (facts.processes, facts.processes_used) == (100, 90)
    assert doctor.tightest([(None, 0), (20, 15), (9, 1)]) == (20, 15)
    assert doctor.tightest([(None, 7)]) == (None, 0)


def test_the_limits_of_this_process_are_those_it_was_started_with() -> None:
    code = (
        "import resource\n"
        "from nsa_harness.supervisor.doctor import limit_facts\n"
        "facts = limit_facts()\n"
        "print(facts.open_files, facts.core_bytes, facts.address_space_bytes)\n"
    )

    def lowered() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (4 * GIB, 4 * GIB))

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, preexec_fn=lowered)
    assert done.stdout.split() == ["200", "0", str(4 * GIB)]


# --- what runs left


@pytest.fixture
def living() -> Iterator[subprocess.Popen[bytes]]:
    """A process of a run that still lives."""
    code = "print(flush=True); import signal; signal.pause()"
    environment = {**os.environ, ENV_RUN: "20261121T101500-aaaa-01020304"}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()


def test_boards_without_a_living_process_are_left_over(tmp_path: Path, living: subprocess.Popen[bytes]) -> None:
    assert living.poll() is None
    names = ("20261121T101500-aaaa-01020304", "20261121T101500-bbbb-05060708", "20261121T101500-cccc-09000a0b")
    for name in names:
        directory = tmp_path / f"nsa-harness-{name}"
        directory.mkdir()
        (directory / "7.board").write_bytes(b"x" * 100)
        os.utime(directory, (1000.0, 5000.0 if name == names[2] else 1000.0))
    (found,) = left_over([tmp_path, tmp_path], now_s=5001.0)
    assert (found.path, found.size_bytes) == (str(tmp_path / f"nsa-harness-{names[1]}"), 100)
