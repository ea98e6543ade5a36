"""Memory, refusals of the machine, and ends that never come: a run for each rule, and one that it must refuse."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from builders import (
    USER,
    Diagnosis,
    board,
    collective,
    diagnose,
    ended,
    evidence,
    frame,
    in_all_reduce,
    mark,
    process,
    raised,
    rank_evidence,
    rank_snapshot,
    stack,
    stalled,
    task,
)

from nsa_harness.core.evidence.evidence import Ending, Evidence, Hint, RankSnapshot
from nsa_harness.core.evidence.host import Gpu, HostMemory, SentSignal, with_gpu_errors
from nsa_harness.core.report import Finding, HangKind, Place, Status
from nsa_harness.core.verdict.verdict import is_shutting_down, judge

THREADING = "/usr/lib/python3.11/threading.py"
SHUTDOWN = frame(1590, file=THREADING, function="_shutdown")
QUIET = HostMemory(
    total_bytes=None, available_bytes=None, limit_bytes=8 << 30, used_bytes=None, oom_kills=0, kill_messages=()
)


def diagnosed(seen: Evidence) -> Diagnosis:
    return diagnose(seen, judge(seen))


def failed(type: str, message: str, **changes: Any) -> Evidence:
    """Rank 1 raised this; rank 0 lost its connection because of it."""
    lost = raised(0, message="Connection closed by peer", at_s=9.5)
    error = raised(1, type, message)
    return evidence(
        rank_evidence(0, exit=ended(0, 1), exception=lost),
        rank_evidence(1, exit=ended(1, 1), exception=error),
        **changes,
    )


def killed(**changes: Any) -> Evidence:
    return evidence(rank_evidence(0, exit=ended(0, -15)), rank_evidence(1, exit=ended(1, -9, at_s=9.0)), **changes)


# Memory.


@pytest.mark.parametrize(
    ("type", "message"),
    [
        ("MemoryError", ""),
        (
            "RuntimeError",
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"
            " allocate 1125899906842624 bytes. Error code 12 (Cannot allocate memory)",
        ),
        ("OSError", "[Errno 12] Cannot allocate memory"),
    ],
)
def test_a_rank_whose_allocation_was_refused_is_out_of_host_memory(type: str, message: str) -> None:
    found = diagnosed(failed(type, message, memory=QUIET))
    assert found.cause == "host_oom"
    assert found.culprit is not None
    assert (found.culprit.ranks, found.culprit.place) == ((1,), Place(file=USER, line=88, function="step"))
    assert found.findings[0].facts["limit_bytes"] == 8 << 30


def test_a_rank_that_the_kernels_log_names_was_killed_for_memory() -> None:
    log = ("Out of memory: Killed process 101 (python) total-vm:9kB",)
    found = diagnosed(killed(memory=replace(QUIET, oom_kills=1, kill_messages=log)))
    assert (found.cause, found.findings[0].confidence) == ("host_oom", 0.95)


def test_a_kill_that_the_kernel_only_counted_is_likely_a_kill_for_memory() -> None:
    found = diagnosed(killed(memory=replace(QUIET, oom_kills=1)))
    assert (found.cause, found.findings[0].confidence) == ("host_oom", 0.8)


def test_a_kill_that_the_kernel_is_known_to_have_sent_is_one_for_memory() -> None:
    sent = SentSignal(pid=101, rank=1, signal="SIGKILL", sender="kernel (out of memory)", at_s=None)
    assert diagnosed(killed(signals=(sent,))).cause == "host_oom"


@pytest.mark.parametrize("memory", [None, QUIET])
def test_a_kill_beside_a_kernel_that_killed_nobody_came_from_somebody_else(memory: HostMemory | None) -> None:
    assert diagnosed(killed(memory=memory)).cause == "killed"


def test_a_data_loader_that_lost_its_worker_to_the_kernel_ran_out_of_memory() -> None:
    log = ("Memory cgroup out of memory: Killed process 207 (pt_data_worker)",)
    message = "DataLoader worker (pid 207) is killed by signal: Killed."
    found = diagnosed(failed("RuntimeError", message, memory=replace(QUIET, kill_messages=log)))
    assert found.cause == "host_oom"
    assert found.findings[0].facts["killed_process"] == 207


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("DataLoader worker (pid 207) is killed by signal: Segmentation fault. ", "process 207 is killed by signal"),
        ("DataLoader worker (pid(s) 207, 208) exited unexpectedly", "process 207, 208 exited unexpectedly"),
        ("DataLoader worker (pid 207) exited unexpectedly with exit code 3. Details are lost", "with exit code 3"),
    ],
)
def test_a_data_loader_whose_worker_died_is_no_exception_of_the_rank(message: str, words: str) -> None:
    found = diagnosed(failed("RuntimeError", message)).findings[0]
    assert (found.code, found.ranks, found.confidence) == ("dataloader_worker_died", (1,), 0.95)
    assert words in found.claim
    assert found.place is None, "it was noticed wherever the rank was"


def test_what_a_worker_raised_and_what_the_machine_refused_it_are_told_as_themselves() -> None:
    handed_on = "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):"
    assert diagnosed(failed("ValueError", handed_on)).cause == "exception"
    bus = "DataLoader worker (pid 7) is killed by signal: Bus error. Its workers may be out of shared memory."
    assert diagnosed(failed("RuntimeError", bus)).cause == "infra"


@pytest.mark.parametrize(
    ("type", "message"),
    [
        ("torch.OutOfMemoryError", "Allocation on device 0 would exceed allowed memory."),
        ("torch.cuda.OutOfMemoryError", "CUDA out of memory. Tried to allocate 20.00 GiB."),
        ("RuntimeError", "CUDA error: out of memory"),
    ],
)
def test_a_device_without_memory_is_named_by_the_exceptions_class_or_words(type: str, message: str) -> None:
    found = diagnosed(failed(type, message))
    assert (found.cause, found.findings[0].ranks) == ("cuda_oom", (1,))


def test_an_assertion_on_the_device_is_told_with_its_text_and_says_that_its_line_is_where_it_was_noticed() -> None:
    text = "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"
    seen = failed("torch.AcceleratorError", text)
    line = "Indexing.cu:1093: block: [0,0,0], thread: [0,0,0] Assertion `srcIndex < srcSelectDimSize` failed."
    seen = replace(seen, ranks=(seen.ranks[0], replace(seen.ranks[1], error_lines=(line,))))
    found = diagnosed(seen).findings[0]
    assert found.code == "cuda_assert"
    assert found.confidence < 0.9
    assert "Assertion `srcIndex < srcSelectDimSize` failed" in found.claim
    assert "launched there or earlier" in found.claim


def test_a_watchdog_that_aborts_over_a_device_assertion_is_one_too() -> None:
    said = ("what():  CUDA error: device-side assert triggered",)
    seen = evidence(rank_evidence(0, exit=ended(0, -signal.SIGABRT), error_lines=said))
    assert diagnosed(seen).cause == "cuda_assert"


# Refusals.


@pytest.mark.parametrize(
    ("type", "message", "word"),
    [
        ("OSError", "[Errno 24] Too many open files: '/dev/null'", "file descriptor"),
        ("OSError", "[Errno 28] No space left on device", "no space"),
        ("OSError", "[Errno 27] File too large", "size"),
        ("OSError", "[Errno 122] Disk quota exceeded", "quota"),
        ("OSError", "[Errno 98] Address already in use", "uses the address"),
        (
            "torch.distributed.DistNetworkError",
            "The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code:"
            " -98, name: EADDRINUSE, message: address already in use",
            "uses the address",
        ),
        ("RuntimeError", "can't start new thread", "thread"),
        ("RuntimeError", "unable to write to file </torch_71_3>: No space left on device (28)", "no space"),
    ],
)
def test_what_the_machine_refused_is_no_fault_of_the_programs_logic(type: str, message: str, word: str) -> None:
    found = diagnosed(failed(type, message))
    assert found.cause == "infra"
    assert word in found.findings[0].claim
    assert found.culprit is not None
    assert found.culprit.place == Place(file=USER, line=88, function="step")


@pytest.mark.parametrize(
    ("type", "message"),
    [
        ("FileNotFoundError", "[Errno 2] No such file or directory: 'a.pt'"),
        ("PermissionError", "[Errno 13] Permission denied: 'a.pt'"),
        ("ValueError", "expected [Errno 28] in the table"),
        ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_an_exception_of_the_program_stays_one(type: str, message: str) -> None:
    assert diagnosed(failed(type, message)).cause == "exception"


def test_the_files_that_a_process_has_open_most_often_are_counted() -> None:
    names = ("114 /data/part.bin", "9 socket", "126 ")
    error = raised(1, "OSError", "[Errno 24] Too many open files", hints=tuple(hint("open file", *names)))
    found = diagnosed(evidence(rank_evidence(0, exit=ended(0, 1)), rank_evidence(1, exit=ended(1, 1), exception=error)))
    assert found.findings[0].code == "infra"
    assert found.findings[0].facts["open_files"] == {"count": 114, "name": "/data/part.bin", "total": 126}
    assert found.findings[0].claim.endswith("of its 126 open files, 114 are /data/part.bin")


def test_a_file_that_hides_a_package_is_named_by_a_rank_and_by_the_launcher() -> None:
    message = "No module named 'torch.distributed'; 'torch' is not a package"
    error = raised(1, "ModuleNotFoundError", message, hints=tuple(hint("hiding file", "/own/torch.py")))
    seen = evidence(rank_evidence(0, exit=ended(0, 1)), rank_evidence(1, exit=ended(1, 1), exception=error))
    found = diagnosed(seen).findings[0]
    assert (found.code, found.ranks, found.facts["file"]) == ("hidden_package", (1,), "/own/torch.py")
    assert diagnosed(failed("ModuleNotFoundError", message)).findings[0].code == "exception"  # nothing hides it

    launched = evidence(rank_evidence(0, pid=None), launcher=ended(None, 1), hiding_file="/path/torch.py")
    found = diagnosed(launched).findings[0]
    assert (found.code, found.ranks, found.facts["file"]) == ("hidden_package", (), "/path/torch.py")


def hint(kind: str, *names: str) -> Iterator[Hint]:
    return (Hint(kind=kind, name=name) for name in names)


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("torch.distributed.DistNetworkError: The server socket has failed to listen: EADDRINUSE", "infra"),
        ("RendezvousConnectionError: The connection to the C10d store has failed.", "infra"),
        ("error: unrecognized arguments: --nproc", "unknown"),
    ],
)
def test_a_launcher_that_found_its_port_taken_was_refused_by_the_machine(line: str, cause: str) -> None:
    assert diagnosed(evidence(launcher=ended(None, 1), last_lines=(line,))).cause == cause


# Shutdown.


def joins_at_the_end(rank: int = 1) -> RankSnapshot:
    """The main thread joins the last threads; one of them waits for a lock in a line of the user's."""
    pid = 100 + rank
    stacks = (
        stack(frame(1132, file=THREADING, function="join"), SHUTDOWN, tid=pid),
        stack(frame(14, function="upload"), tid=500, thread="Thread-1"),
    )
    return rank_snapshot(rank, stacks=stacks, process=process(pid, tasks=(task(pid), task(500))))


def test_a_thread_that_keeps_the_process_alive_after_its_program_hangs_the_shutdown() -> None:
    seen = stalled(joins_at_the_end(), exits=(ended(0, 0, at_s=9.0),))
    judgement = judge(seen)
    found = diagnosed(seen)
    assert (judgement.status, judgement.proof.kind if judgement.proof else None) == (Status.HANG, HangKind.DEADLOCK)
    assert (found.cause, found.findings[0].ranks) == ("shutdown_hang", (1,))
    assert found.findings[0].place == Place(file=USER, line=14, function="upload")


def test_an_exception_goes_before_the_thread_that_keeps_its_process_alive() -> None:
    """The harness ended the process in the end; the exception had ended the program long before."""
    ended_by_us = ended(1, -15, at_s=20.0, by_us=True)
    known = rank_evidence(1, exception=raised(1, "IndexError", "out of range"), exit=ended_by_us)
    seen = stalled(joins_at_the_end(), ranks=(known,))
    assert (judge(seen).status, diagnosed(seen).cause) == (Status.FAIL, "exception")
    still_runs = replace(seen, ranks=(replace(known, exception=None),))
    assert (judge(still_runs).status, diagnosed(still_runs).cause) == (Status.HANG, "shutdown_hang")
    in_its_program = stalled(rank_snapshot(1, frame(12)), ranks=(known,))  # who prints its hook's words and goes on
    assert judge(in_its_program).status is Status.HANG


def test_a_handler_at_exit_that_waits_is_named_with_its_own_line() -> None:
    at_exit = board(mark("exit", "shutdown"), rank=1)
    seen = stalled(rank_snapshot(1, frame(19, function="close"), status_file=at_exit), exits=(ended(0, 0, at_s=9.0),))
    found = diagnosed(seen)
    assert found.cause == "shutdown_hang"
    assert found.findings[0].place == Place(file=USER, line=19, function="close")


def test_a_rank_that_left_is_to_blame_while_another_one_is_still_in_its_program() -> None:
    seen = stalled(joins_at_the_end(), in_all_reduce(2, collective(6)), exits=(ended(0, 0, at_s=9.0),))
    assert judge(seen).status is Status.FAIL
    assert diagnosed(seen).cause == "early_exit"


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (rank_snapshot(0, frame(10)), False),
        (rank_snapshot(0), False),
        (rank_snapshot(0, frame(10), status_file=board(mark("forward"))), False),
        (rank_snapshot(0, frame(7, function="_shutdown")), False),
        (rank_snapshot(0, frame(3), SHUTDOWN), True),
        (rank_snapshot(0, frame(3, file="/x/torch/distributed/distributed_c10d.py", function="_shutdown")), False),
        (
            rank_snapshot(
                0, frame(3, file="/x/torch/distributed/distributed_c10d.py", function="destroy_process_group"), frame(9)
            ),
            True,
        ),
    ],
)
def test_a_rank_is_at_its_end_when_the_interpreter_or_the_group_is_taken_down(
    rank: RankSnapshot, expected: bool
) -> None:
    assert is_shutting_down(rank) is expected


def test_an_end_that_is_noted_late_explains_those_who_felt_it_at_once() -> None:
    lost = rank_evidence(0, exit=ended(0, 1), exception=raised(0, message="Connection closed by peer", at_s=9.0))
    seen = evidence(lost, rank_evidence(1, exit=ended(1, 0, at_s=9.3)), ending=Ending.EXITED)
    assert diagnosed(seen).cause == "early_exit"


# A full disk, which takes the words of whoever wants to tell of it.

FULL = "No space left on device: reports/run/a/processes.jsonl"


@pytest.mark.parametrize(
    "seen",
    [
        evidence(rank_evidence(0, exit=ended(0, 0)), rank_evidence(1, exit=ended(1, 1, at_s=9.0)), disk_full=FULL),
        evidence(rank_evidence(0, exit=ended(0, -signal.SIGBUS)), disk_full=FULL),
        evidence(launcher=ended(None, 1), disk_full=FULL),
        failed("OSError", "[Errno 28] No space left on device", disk_full=FULL),
        failed("OSError", "[Errno 122] Disk quota exceeded", disk_full=FULL),
    ],
)
def test_a_failure_without_another_reason_on_a_full_disk_is_that_of_the_disk(seen: Evidence) -> None:
    assert judge(seen).status is Status.FAIL
    found = diagnosed(seen)
    assert found.cause == "disk_full"
    assert found.findings[0].claim.endswith(f", and the disk of the run was full ({FULL})")


@pytest.mark.parametrize(
    ("seen", "cause"),
    [
        (failed("ValueError", "expected 3 columns", disk_full=FULL), "exception"),
        (killed(disk_full=FULL), "killed"),
        (failed("OSError", "[Errno 28] No space left on device"), "infra"),
        (evidence(ending=Ending.INTERRUPTED, disk_full=FULL), "interrupted"),
    ],
)
def test_a_failure_that_says_why_is_not_that_of_the_disk(seen: Evidence, cause: str) -> None:
    assert diagnosed(seen).cause == cause


def test_a_run_that_cannot_be_judged_for_want_of_records_on_a_full_disk_says_so() -> None:
    seen = evidence(rank_evidence(0), launcher=None, disk_full=FULL)
    found = diagnosed(seen)
    assert (judge(seen).status, found.cause) == (Status.ERROR, "disk_full")
    assert found.findings[0].claim == (
        f"the disk of the run was full ({FULL}): nobody saw how the run ended: the record of its processes is missing"
    )


def gpu(index: int, utilisation: float, used_mib: int, *pids: int) -> Gpu:
    return Gpu(
        index=index,
        name="A100",
        utilisation=utilisation,
        used_bytes=used_mib << 20,
        total_bytes=80 << 30,
        ecc_errors=0,
        pids=pids,
    )


def with_gpus(*looks: tuple[Gpu, ...]) -> Evidence:
    """Two ranks that wait for each other, as seed 3 recorded their GPUs."""
    ranks = (rank_evidence(0, pid=71), rank_evidence(1, pid=72))
    seen = stalled(in_all_reduce(0), in_all_reduce(1), ranks=ranks)
    return replace(
        seen, snapshots=tuple(replace(one, gpus=gpus) for one, gpus in zip(seen.snapshots, looks, strict=True))
    )


HEALTHY = {
    "bus": "00000000:65:00.0",
    "needs_reset": False,
    "has_failed_repair": False,
    "link_width": 16,
    "max_link_width": 16,
}


def gpu_faults(*looks: tuple[dict[str, Any], dict[str, Any]], errors: tuple[str, ...] = ()) -> list[Finding]:
    """What is found of two GPUs, one for each rank, whose values differ from healthy ones as given in each look."""
    gpus = [
        tuple(
            replace(gpu(index, 1.0, 40_000, 71 + index), **HEALTHY | {"bus": f"00000000:6{index}:00.0"} | changes)
            for index, changes in enumerate(look)
        )
        for look in looks
    ]
    seen = with_gpus(*(with_gpu_errors(look, errors, "node3") for look in gpus))
    return [one for one in diagnosed(seen).findings if one.code == "gpu_fault"]


@pytest.mark.parametrize(
    ("changes", "errors", "claim"),
    [
        ({"ecc_errors": 2}, (), "has 2 uncorrected memory errors since its driver was loaded"),
        ({"needs_reset": True}, (), "has defective memory that is only replaced at its next reset"),
        ({"has_failed_repair": True}, (), "has defective memory that could not be replaced"),
        ({"slowdowns": ("thermal",)}, (), "runs more slowly because it is too hot"),
        ({"link_width": 8}, (), "uses only 8 of the 16 lanes of its PCIe connection"),
        ({}, ("NVRM: Xid (PCI:0000:61:00): 48, pid=72",), "reported Xid 48, pid=72"),
    ],
)
def test_a_faulty_gpu_is_named_with_its_node_and_rank(
    changes: dict[str, Any], errors: tuple[str, ...], claim: str
) -> None:
    (found,) = gpu_faults(({}, changes), ({}, changes), errors=errors)
    assert (found.claim, found.ranks) == (f"GPU 1 of node3 (rank 1) {claim}", (1,))
    assert found.confidence == 0.95


def test_a_gpu_that_the_driver_has_lost_is_named_by_its_address() -> None:
    (found,) = gpu_faults(({}, {}), ({}, {}), errors=("NVRM: Xid (PCI:0000:83:00): 79, GPU has fallen off the bus.",))
    assert found.claim == "the GPU at 0000:83:00 of node3 reported Xid 79, GPU has fallen off the bus."


@pytest.mark.parametrize(
    ("before", "after", "errors"),
    [
        ({}, {}, ()),
        ({"needs_reset": None, "has_failed_repair": None, "link_width": None, "ecc_errors": None}, {}, ()),
        ({}, {"slowdowns": ("thermal",)}, ()),  # it does not last
        ({}, {"pids": (5,), "ecc_errors": 3}, ("NVRM: Xid (PCI:0000:61:00): 48",)),  # no rank uses it
        ({}, {}, ("NVRM: loading NVIDIA UNIX Open Kernel Module", "torn")),
        ({"bus": ""}, {"bus": ""}, ("NVRM: Xid (PCI:0000:83:00): 79",)),  # it is unknown whose GPU this is
    ],
)
def test_healthy_gpus_and_those_of_others_are_not_told(
    before: dict[str, Any], after: dict[str, Any], errors: tuple[str, ...]
) -> None:
    assert gpu_faults(({}, before), ({}, after), errors=errors) == []


BOTH_ON_ONE = (gpu(0, 1.0, 73_260, 71, 72), gpu(1, 0.0, 4))
EACH_ITS_OWN = (gpu(0, 1.0, 40_000, 71), gpu(1, 0.0, 40_000, 72))


def test_a_gpu_that_nobody_uses_beside_two_ranks_on_one_is_idle() -> None:
    (found,) = [one for one in diagnosed(with_gpus(BOTH_ON_ONE, BOTH_ON_ONE)).findings if one.code == "idle_device"]
    assert (found.facts["idle_gpu"]["index"], found.facts["shared_gpu"]["index"]) == (1, 0)
    assert (found.facts["ranks_sharing"], found.facts["gpus_shared"]) == (2, 1)
    assert (found.ranks, found.confidence) == ((0, 1), 0.8)


@pytest.mark.parametrize(("ranks_on", "is_found"), [(("n1", "n1"), False), (("n2", "n2"), True)])
def test_gpus_of_different_nodes_with_the_same_number_are_not_mixed_up(
    ranks_on: tuple[str, str], is_found: bool
) -> None:
    one_gpu, two_gpus = ("n1", BOTH_ON_ONE[:1]), ("n2", (gpu(0, 0.0, 4), gpu(1, 0.0, 4)))
    if is_found:
        one_gpu, two_gpus = ("n1", ()), ("n2", BOTH_ON_ONE)
    look = tuple(replace(one, node=node) for node, gpus in (one_gpu, two_gpus) for one in gpus)
    seen = replace(with_gpus(look, look), nodes=dict(enumerate(ranks_on)))
    assert [one.code for one in diagnosed(seen).findings if one.code == "idle_device"] == ["idle_device"] * is_found


@pytest.mark.parametrize(
    "looks",
    [
        (EACH_ITS_OWN, EACH_ITS_OWN),  # a rank's GPU may rest
        ((*EACH_ITS_OWN, gpu(2, 0.0, 4)), (*EACH_ITS_OWN, gpu(2, 0.0, 4))),  # a GPU that the run does not need
        ((gpu(0, 1.0, 73_260, 71, 72), gpu(1, 0.4, 4)), BOTH_ON_ONE),  # it did something before
        ((gpu(0, 1.0, 73_260, 71, 72), gpu(1, 0.0, 4, 5)),) * 2,  # somebody else's
        ((gpu(0, 0.1, 73_260, 71, 72), gpu(1, 0.0, 4)),) * 2,  # nothing works at all
        ((), ()),
    ],
)
def test_a_gpu_that_rests_for_another_reason_is_not_idle(looks: tuple[tuple[Gpu, ...], ...]) -> None:
    assert [one for one in diagnosed(with_gpus(*looks)).findings if one.code == "idle_device"] == []
