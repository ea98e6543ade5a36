"""The node around a run: control groups, memory, the kernel's log, GPUs, and who sent which signal."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from nsa_harness.core.evidence.exit_messages import closing_signals
from nsa_harness.core.evidence.host import Gpu, HostMemory, SentSignal, kill_messages_since, parse_gpus
from nsa_harness.supervisor.capture.node import (
    CommandFailed,
    GroupMemory,
    MemoryWatch,
    gpu_errors,
    gpu_state,
    group_memory,
    is_frozen,
)
from nsa_harness.supervisor.storage.journals import sent_signals


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def member(proc: Path, text: str) -> None:
    write(proc / "7" / "cgroup", text)


def test_version_2_names_the_smallest_limit_around_the_process_and_counts_kills(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    member(proc, "0::/job/step\n")
    write(root / "cgroup.controllers", "memory\n")
    write(root / "job/memory.max", "4096\n")
    write(root / "job/memory.current", "4000\n")
    write(root / "job/memory.events", "low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    write(root / "job/step/memory.max", "max\n")
    write(root / "job/step/memory.current", "17\n")
    write(root / "job/step/memory.events", "oom_kill 1\n")
    assert group_memory(7, root, proc) == GroupMemory(limit_bytes=4096, used_bytes=4000, oom_kills=2)


def test_version_1_reads_its_own_names_and_no_limit_is_none(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    member(proc, "4:memory:/docker/71\n3:cpuset:/\n0::/\n")
    write(root / "memory/memory.limit_in_bytes", "9223372036854771712\n")
    write(root / "memory/memory.usage_in_bytes", "55\n")
    write(root / "memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n")
    assert group_memory(7, root, proc) == GroupMemory(limit_bytes=None, used_bytes=55, oom_kills=4)


def test_groups_that_cannot_be_read_tell_nothing(tmp_path: Path) -> None:
    assert group_memory(7, tmp_path, tmp_path) == GroupMemory(limit_bytes=None, used_bytes=None, oom_kills=None)
    assert not is_frozen(7, tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("groups", "file", "text"),
    [
        ("6:freezer:/job\n", "freezer/job/freezer.state", "{1}\n"),
        ("0::/job\n", "job/cgroup.events", "populated 1\nfrozen {0}\n"),
        ("0::/job\n", "unified/job/cgroup.events", "populated 1\nfrozen {0}\n"),
    ],
    ids=["version 1", "version 2", "both mounted"],
)
def test_a_frozen_group_is_seen(tmp_path: Path, groups: str, file: str, text: str) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    member(proc, groups)
    for words, expected in ((("1", "FROZEN"), True), (("0", "THAWED"), False)):
        write(root / file, text.format(*words))
        assert is_frozen(7, root, proc) is expected


KILL = "Memory cgroup out of memory: Killed process 71 (python) total-vm:8kB, anon-rss:7kB"


def record(seconds: float, text: str) -> str:
    return f"3,17,{int(seconds * 1e6)},-;{text}"


def test_the_kernels_log_names_whom_it_killed_since_the_launch() -> None:
    records = [record(5, KILL.replace("71", "70")), record(100, KILL), record(101, "usb 1-1: new device"), "torn"]
    assert list(kill_messages_since(records, 90_000_000)) == [KILL]


def test_memory_at_the_end_tells_the_limit_what_was_left_and_the_kills_in_between(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text(f"{record(5, KILL.replace('71', '70'))}\n{record(100, KILL)}\n")
    watch = MemoryWatch(started_ns=90 * 10**9, initial=GroupMemory(limit_bytes=None, used_bytes=None, oom_kills=None))
    memory = watch.changes(log)
    assert (memory.kill_messages, memory.oom_kills) == ((KILL,), None)
    assert memory.total_bytes is not None
    assert memory.available_bytes is not None
    assert 0 < memory.available_bytes < memory.total_bytes


def test_a_log_that_nobody_may_read_is_no_error(tmp_path: Path) -> None:
    assert MemoryWatch().changes(tmp_path / "absent").kill_messages == ()


def test_reading_the_real_log_ends() -> None:
    began_s = time.monotonic()
    assert MemoryWatch().changes().kill_messages == ()
    assert time.monotonic() - began_s < 2.0


LOG = """\
W1121 10:00:00 7 torch/distributed/elastic/multiprocessing/api.py:1029] Sending process 71 closing signal SIGTERM
[rank0] a line of the program
W1121 10:00:30 7 api.py:1048] Unable to shutdown process 71 via SIGTERM, forcefully exiting via SIGKILL
"""


def test_torchrun_says_which_signals_it_sent() -> None:
    assert closing_signals(LOG) == ((71, "SIGTERM", "torchrun"), (71, "SIGKILL", "torchrun"))
    assert closing_signals("Sending process x closing signal") == ()


def test_who_sent_which_signal_is_told_by_sender() -> None:
    guarded = [{"event": "signal", "t_ns": 9_000_000_000, "signal": "SIGTERM", "pids": [70, 99]}]
    killed = HostMemory(
        total_bytes=None,
        available_bytes=None,
        limit_bytes=None,
        used_bytes=None,
        oom_kills=1,
        kill_messages=(KILL, "Killed"),
    )
    found = sent_signals(guarded, LOG, killed, {70: 0, 71: 1}, 4_000_000_000)
    assert found == (
        SentSignal(pid=71, rank=1, signal="SIGKILL", sender="kernel (out of memory)", at_s=None),
        SentSignal(pid=71, rank=1, signal="SIGTERM", sender="torchrun", at_s=None),
        SentSignal(pid=71, rank=1, signal="SIGKILL", sender="torchrun", at_s=None),
        SentSignal(pid=70, rank=0, signal="SIGTERM", sender="harness", at_s=5.0),
        SentSignal(pid=99, rank=None, signal="SIGTERM", sender="harness", at_s=5.0),
    )


def test_a_process_that_the_kernel_killed_elsewhere_is_not_of_the_run() -> None:
    killed = HostMemory(
        total_bytes=None, available_bytes=None, limit_bytes=None, used_bytes=None, oom_kills=1, kill_messages=(KILL,)
    )
    assert sent_signals([], "", killed, {70: 0}, 0) == ()


TABLE = """\
0, GPU-a, NVIDIA H200, 97, 100, 143771, 0
1, GPU-b, NVIDIA H200, [N/A], [N/A], 143771, [Not Supported]
"""


def test_gpus_are_read_with_their_processes_and_what_is_not_told_is_none() -> None:
    first, second = parse_gpus(TABLE, "GPU-a, 71, 512\nGPU-a, 70, [N/A]\n")
    assert first == Gpu(
        index=0,
        name="NVIDIA H200",
        utilisation=0.97,
        used_bytes=100 << 20,
        total_bytes=143771 << 20,
        ecc_errors=0,
        pids=(70, 71),
        used_by={71: 512 << 20},
    )
    assert (second.utilisation, second.used_bytes, second.ecc_errors, second.pids) == (None, None, None, ())


HEALTH = "00000000:65:00.0, {}, {}, {}, {}, {}, {}, {}, 16"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (("No", "[N/A]", "No", *("Not Active",) * 3, "16"), (False, False, (), 16)),
        (("Yes", "[N/A]", "Yes", *("Not Active",) * 3, "16"), (True, True, (), 16)),
        (("[N/A]", "Yes", "[N/A]", "Not Active", "Active", "Active", "8"), (True, None, ("thermal", "power brake"), 8)),
        (("[N/A]",) * 7, (None, None, (), None)),
    ],
)
def test_the_health_of_a_gpu_is_read(values: tuple[str, ...], expected: tuple[object, ...]) -> None:
    """The columns are those of `nvidia-smi --help-query-gpu`; the values were not recorded by this project."""
    (found,) = parse_gpus(f"0, GPU-a, NVIDIA H200, 97, 100, 143771, 0, {HEALTH.format(*values)}", "", with_health=True)
    assert (found.needs_reset, found.has_failed_repair, found.slowdowns, found.link_width) == expected
    assert (found.bus, found.max_link_width) == ("00000000:65:00.0", 16)


def test_a_driver_that_does_not_know_the_health_is_asked_for_the_rest(tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    refusal = """echo 'Field "clocks_event_reasons.hw_thermal_slowdown" is not a valid field to query.'; exit 2"""
    tool.write_text(f"""#!/bin/sh
case "$1" in
  *pcie*) {refusal} ;;
  --query-gpu*) echo '0, GPU-a, NVIDIA H200, 97, 100, 143771, 0' ;;
esac
""")
    tool.chmod(0o755)
    (found,) = gpu_state(str(tool))
    assert (found.name, found.bus, found.needs_reset) == ("NVIDIA H200", "", None)


def test_the_kernels_log_names_the_errors_of_gpus_since_the_launch(tmp_path: Path) -> None:
    error = "NVRM: Xid (PCI:0000:65:00): 79, GPU has fallen off the bus."
    log = tmp_path / "kmsg"
    log.write_text(f"{record(5, error.replace('79', '31'))}\n{record(100, error)}\n{record(101, KILL)}\n")
    assert gpu_errors(90 * 10**9, log) == (error,)
    assert gpu_errors(90 * 10**9, tmp_path / "absent") == ()


def test_a_line_of_another_form_is_refused_with_its_place() -> None:
    with pytest.raises(ValueError, match="nvidia-smi, line 1: 2 values, expected 7: Unable,to determine"):
        parse_gpus("Unable,to determine", "")


def test_a_tool_that_hangs_fails_or_is_absent_is_told_and_waited_for_no_longer_than_its_limit(tmp_path: Path) -> None:
    failures: list[str] = []
    tools = {"hangs": "sleep 600", "fails": "echo 'No devices were found' >&2; exit 6", "lies": "echo x"}
    for name, text in tools.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    began_s = time.monotonic()
    for name in ("hangs", "fails", "lies", "absent"):
        with pytest.raises((CommandFailed, ValueError)) as failed:
            gpu_state(str(tmp_path / name))
        failures.append(str(failed.value))
    assert time.monotonic() - began_s < 5.0
    assert [failure.partition(":")[0] for failure in failures] == ["hangs", "fails", "nvidia-smi, line 1", "absent"]
    assert "no result within" in failures[0]
    assert failures[1] == "fails: No devices were found"


def test_a_process_frozen_by_its_group_is_seen_for_what_it_is() -> None:
    """With a real group, where this machine lets us make one."""
    home = Path("/sys/fs/cgroup/freezer") / f"nsa-test-{os.getpid()}"
    try:
        home.mkdir()
    except OSError:
        pytest.skip("no control group of version 1 that we may make")
    with subprocess.Popen(["/bin/sleep", "600"]) as process:
        try:
            (home / "tasks").write_text(str(process.pid))
            (home / "freezer.state").write_text("FROZEN")
            while (home / "freezer.state").read_text() == "FREEZING\n":  # until its process has run once more
                time.sleep(0.01)
            seen = [is_frozen(process.pid)]
            (home / "freezer.state").write_text("THAWED")
            seen.append(is_frozen(process.pid))
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
            home.rmdir()
    assert seen == [True, False]
