"""Rules about memory, refused system resources, hidden packages, faulty and idle GPUs, and shutdowns that hang."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.context import (
    DiagnosisContext,
    dump_proof,
    exception_place,
    failed_ranks,
    first_own_exception,
    first_own_failure,
    last_heartbeat_facts,
    last_known_place,
    last_progress_facts,
    root_where,
    wait_place,
)
from nsa_harness.core.diagnosis.explanation import Explanation, rule_if
from nsa_harness.core.diagnosis.rules.threads import awaited_thread_line
from nsa_harness.core.evidence.evidence import RaisedException, Snapshot
from nsa_harness.core.evidence.host import Gpu, killed_pids
from nsa_harness.core.report import Facts
from nsa_harness.core.verdict.verdict import Failure, FailureKind, is_shutting_down
from nsa_harness.core.verdict.wait import Wait

_ASSERTION = re.compile(r"Assertion [`'].*?['`] failed")
_ERRNO = re.compile(r"\[Errno (\d+)\]")
_OS_ERRORS = frozenset({"OSError", "IOError", "BlockingIOError", "socket.error"})
# Linux error numbers that mean that the operating system is out of a resource or refuses it. The values are keys of
# [refused] in causes.toml.
_ENOSPC, _EDQUOT = "ENOSPC", "EDQUOT"
_REFUSED_ERRNOS = {
    5: "EIO",
    11: "EAGAIN",
    23: "ENFILE",
    24: "EMFILE",
    27: "EFBIG",
    28: _ENOSPC,
    30: "EROFS",
    98: "EADDRINUSE",
    99: "EADDRNOTAVAIL",
    101: "ENETUNREACH",
    113: "EHOSTUNREACH",
    116: "ESTALE",
    122: _EDQUOT,
}
# Messages of PyTorch 2.11 and 2.13 that contain no error number.
_REFUSED_TEXTS = (
    (re.compile(r"\bEADDRINUSE\b"), "EADDRINUSE"),
    (re.compile(r"No space left on device"), _ENOSPC),
    (re.compile(r"Too many open files"), "EMFILE"),
    (re.compile(r"Unable to find address for:|[Nn]o (?:usable )?socket interface found"), "interface"),
    (re.compile(r"Name or service not known|name resolution|addresses? of \(.*\) cannot be retrieved"), "resolution"),
    (re.compile(r"timed out connecting: SO_ERROR: Connection timed out|No route to host"), "EHOSTUNREACH"),
    (re.compile(r"RendezvousConnectionError"), "rendezvous"),
    (re.compile(r"can't start new thread"), "threads"),
    (re.compile(r"out of shared memory|unable to open shared memory object"), "shared_memory"),
)


@rule_if(first_own_failure)
def host_oom(context: DiagnosisContext, first: Failure) -> Explanation | None:
    """Explain a failure because the host's memory was exhausted: a failed allocation, or a kill by the kernel."""
    if first.exception is not None:
        return _explain_failed_allocation(context, first, first.exception)
    return _explain_oom_kill(context, first) if first.status == -signal.SIGKILL else None


def _explain_failed_allocation(context: DiagnosisContext, first: Failure, error: RaisedException) -> Explanation | None:
    """Explain a failure in which an allocation failed, or a worker was killed because memory ran out."""
    worker_pid = next((pid for pid in _pids_killed_by_kernel(context) if f"(pid {pid})" in error.message), None)
    if error.type != "MemoryError" and worker_pid is None and not Cause.HOST_OOM.find_message(error.message):
        return None
    return Explanation(
        cause=Cause.HOST_OOM,
        evidence=EvidenceKind.RAISED,
        facts={
            "variant": "raised",
            "killed_process": worker_pid,
            "error": first.text,
            "limit_bytes": _memory_limit_bytes(context),
        },
        ranks=failed_ranks([first]),
        place=exception_place(context, first.rank, error),
        proof=(error.proof,),
    )


def _explain_oom_kill(context: DiagnosisContext, first: Failure) -> Explanation | None:
    """Explain a failure in which the kernel's out-of-memory killer killed a rank.

    Any process may send SIGKILL. The kernel's log names the process that was killed; its counter only shows that some
    process was killed.
    """
    rank = context.rank(first.rank)
    is_named = rank is not None and rank.pid in _pids_killed_by_kernel(context)
    memory = context.evidence.memory
    if not is_named and not (memory is not None and memory.oom_kills):
        return None
    return Explanation(
        cause=Cause.HOST_OOM,
        evidence=EvidenceKind.KERNEL if is_named else EvidenceKind.PART,
        facts={
            "variant": "killed",
            "named_in_kernel_log": is_named,
            "limit_bytes": _memory_limit_bytes(context),
            "last_seen": last_progress_facts(context, first.rank),
            "last_line": last_heartbeat_facts(context, first.rank),
        },
        ranks=failed_ranks([first]),
        place=last_known_place(context, first.rank),
        proof=("watch.jsonl", "processes.jsonl"),
    )


def _pids_killed_by_kernel(context: DiagnosisContext) -> set[int]:
    memory = context.evidence.memory
    pids = set(killed_pids(memory.kill_messages)) if memory else set()
    return pids | {sending.pid for sending in context.evidence.signals if sending.sender.startswith("kernel")}


def _memory_limit_bytes(context: DiagnosisContext) -> int | None:
    memory = context.evidence.memory
    return memory.limit_bytes or memory.total_bytes if memory else None


@rule_if(first_own_exception)
def cuda_oom(context: DiagnosisContext, first: Failure, error: RaisedException) -> Explanation | None:
    """Explain a failure in which a rank ran out of GPU memory."""
    if not error.type.endswith("OutOfMemoryError") and not Cause.CUDA_OOM.find_message(error.message):
        return None
    return Explanation(
        cause=Cause.CUDA_OOM,
        evidence=EvidenceKind.RAISED,
        facts={"message": error.message},
        ranks=failed_ranks([first]),
        place=exception_place(context, first.rank, error),
        proof=(error.proof,),
    )


@rule_if(first_own_failure)
def cuda_assert(context: DiagnosisContext, first: Failure) -> Explanation | None:
    """Explain a failure in which an assertion failed in a GPU kernel."""
    rank = context.rank(first.rank)
    stderr_text = " ".join(rank.error_lines) if rank else ""
    if not Cause.CUDA_ASSERT.find_message(f"{first.text} {stderr_text}"):
        return None
    assertion = _ASSERTION.search(stderr_text)
    return Explanation(
        cause=Cause.CUDA_ASSERT,
        evidence=EvidenceKind.EFFECT,  # the cause is certain, but the line only shows where the rank noticed it
        facts={"assertion": assertion[0] if assertion else ""},
        ranks=failed_ranks([first]),
        place=exception_place(context, first.rank, first.exception) if first.exception else None,
        proof=(first.exception.proof if first.exception else f"rank{first.rank}/stderr.log",),
    )


@rule_if(first_own_exception)
def dataloader_worker_died(context: DiagnosisContext, first: Failure, error: RaisedException) -> Explanation | None:
    """Explain a failure in which a DataLoader worker died, which PyTorch may report on any line of the rank."""
    match = Cause.DATALOADER_WORKER_DIED.find_message(error.message)
    if match is None:
        return None
    return Explanation(
        cause=Cause.DATALOADER_WORKER_DIED,
        evidence=EvidenceKind.RAISED,
        facts={"worker": match[1], "ended": match[2], "noticed_at": exception_place(context, first.rank, error)},
        ranks=failed_ranks([first]),
        proof=(error.proof,),
    )


@rule_if(first_own_failure)
def infra(context: DiagnosisContext, first: Failure) -> Explanation | None:
    """Explain a failure in which the operating system refused a resource such as disk space or a port."""
    if first.exception is None:
        return _explain_launcher_refusal(context, first)
    code = _refusal_code(first.exception)
    if code is None:
        return None
    return Explanation(
        cause=Cause.INFRA,
        evidence=EvidenceKind.EFFECT,  # the program may also be at fault, if it never releases the resource
        facts={"variant": "rank", "refused": code, "message": first.text, "open_files": _open_files(first.exception)},
        ranks=failed_ranks([first]),
        place=exception_place(context, first.rank, first.exception),
        proof=(first.exception.proof,),
    )


@rule_if(first_own_failure)
def disk_full(context: DiagnosisContext, first: Failure) -> Explanation | None:
    """Explain a failure in which the disk was full."""
    disk = context.evidence.disk_full
    if disk is None or not _may_follow_from_full_disk(first):
        return None
    return Explanation(
        cause=Cause.DISK_FULL,
        evidence=EvidenceKind.PART,
        facts={"variant": "failed", "disk": disk, "failure": first.text},
        ranks=failed_ranks([first]),
        place=exception_place(context, first.rank, first.exception) if first.exception else None,
        proof=("processes.jsonl",),
    )


def _may_follow_from_full_disk(first: Failure) -> bool:
    """Return whether a full disk could have caused this failure."""
    if first.exception is not None:
        return _refusal_code(first.exception) in (_ENOSPC, _EDQUOT)
    # The kernel sends SIGBUS if a full disk has no room for a page of a memory-mapped file.
    return first.kind in (FailureKind.CODE, FailureKind.LAUNCHER) or first.status == -signal.SIGBUS


def _explain_launcher_refusal(context: DiagnosisContext, first: Failure) -> Explanation | None:
    """Explain a failure in which the launcher could not start any rank, because it was refused a resource."""
    lines = context.evidence.last_lines if first.kind is FailureKind.LAUNCHER else ()
    line, code = next(((line, line_code) for line in lines if (line_code := _refusal_code_in(line))), ("", None))
    if code is None:
        return None
    return Explanation(
        cause=Cause.INFRA,
        evidence=EvidenceKind.PART,
        facts={"variant": "launcher", "refused": code, "message": line, "failure": first.text, "open_files": None},
        proof=("output.log",),
    )


def _open_files(error: RaisedException) -> Facts | None:
    """Return what the process had open most often, and how many descriptors it had open, or None if unknown."""
    counted = [hint.name.partition(" ") for hint in error.hints if hint.kind == "open file"]
    numbers = [(int(count), name) for count, _, name in counted if count.isdecimal()]
    if len(numbers) < 2 or not numbers[0][1]:
        return None
    return {"count": numbers[0][0], "name": numbers[0][1], "total": numbers[-1][0]}


def _refusal_code(error: RaisedException) -> str | None:
    """Return the key in [refused] of causes.toml for the resource that was refused, or None."""
    number = _ERRNO.search(error.message)
    if number and (error.type in _OS_ERRORS or "DataLoader worker" in error.message):
        return _REFUSED_ERRNOS.get(int(number[1]))
    return _refusal_code_in(error.message)


def _refusal_code_in(text: str) -> str | None:
    """Return the key in section [refused] of causes.toml for the first refused resource in `text`, or None."""
    return next((code for pattern, code in _REFUSED_TEXTS if pattern.search(text)), None)


_BUSY_SHARE = 0.5  # a shared GPU with at least this utilization counts as busy
_IDLE_BYTES = 64 << 20  # a GPU with at most this much used memory counts as unused; the driver needs some of it


def idle_device(context: DiagnosisContext) -> Explanation | None:
    """Report that one GPU is idle while several ranks share another GPU of the same node."""
    snapshots = [snapshot for snapshot in context.evidence.snapshots if snapshot.gpus]
    gpus = snapshots[-1].gpus if snapshots else ()
    for node in dict.fromkeys(gpu.node for gpu in gpus):
        ranks = {
            rank.pid: rank.rank for rank in context.evidence.ranks if rank.pid and _is_on(context, node, rank.rank)
        }
        own_gpus = [gpu for gpu in gpus if gpu.node == node]
        idle_gpus = [gpu for gpu in own_gpus if all(_is_idle(snapshot, gpu) for snapshot in snapshots)]
        used_gpus = [gpu for gpu in own_gpus if ranks.keys() & set(gpu.pids)]
        is_busy = any((gpu.utilisation or 0) >= _BUSY_SHARE for gpu in used_gpus)
        if idle_gpus and is_busy and len(used_gpus) < len(ranks):
            busiest_gpu = max(used_gpus, key=lambda gpu: gpu.utilisation or 0)
            return Explanation(
                cause=Cause.IDLE_DEVICE,
                evidence=EvidenceKind.PART,
                facts={
                    "idle_gpu": _gpu_facts(idle_gpus[0]),
                    "shared_gpu": _gpu_facts(busiest_gpu),
                    "ranks_sharing": len(ranks),
                    "gpus_shared": len(used_gpus),
                },
                ranks=tuple(sorted(ranks[pid] for pid in busiest_gpu.pids if pid in ranks)),
                proof=tuple(rank.proof for rank in snapshots[-1].ranks if rank.proof),
            )
    return None


_MAX_FAULTY_GPUS = 8


def gpu_fault(context: DiagnosisContext) -> Explanation | None:
    """Report the GPUs of the run that NVIDIA's driver reports as faulty, slowed down or badly connected."""
    snapshots = [snapshot for snapshot in context.evidence.snapshots if snapshot.gpus]
    job_ranks = {rank.pid: rank.rank for rank in context.evidence.ranks if rank.pid is not None}
    gpus = snapshots[-1].gpus if snapshots else ()
    used_gpus = [gpu for gpu in gpus if job_ranks.keys() & set(gpu.pids)]
    faulty: list[Facts] = []
    ranks: set[int] = set()
    for gpu in [*used_gpus, *(gpu for gpu in gpus if gpu.index < 0)] if used_gpus else gpus:
        faults = _faults(gpu, snapshots)
        if any(faults.values()):
            own_ranks = tuple(sorted(job_ranks[pid] for pid in gpu.pids if pid in job_ranks))
            ranks.update(own_ranks)
            node = gpu.node or context.evidence.node
            faulty.append({"index": gpu.index, "bus": gpu.bus, "node": node, "ranks": own_ranks, **faults})
    if not faulty:
        return None
    return Explanation(
        cause=Cause.GPU_FAULT,
        evidence=EvidenceKind.KERNEL,
        facts={"gpus": tuple(faulty[:_MAX_FAULTY_GPUS]), "count": len(faulty)},
        ranks=tuple(sorted(ranks)),
        proof=tuple(rank.proof for rank in snapshots[-1].ranks if rank.proof),
    )


def _faults(gpu: Gpu, snapshots: Sequence[Snapshot]) -> Facts:
    """Return what is wrong with a GPU. Every value of a healthy GPU is false. A slowdown counts only if it lasts."""
    looks = [
        {
            slowdown
            for one in snapshot.gpus
            if (one.node, one.index) == (gpu.node, gpu.index)
            for slowdown in one.slowdowns
        }
        for snapshot in snapshots
    ]
    is_narrow = gpu.link_width is not None and 0 < gpu.link_width < (gpu.max_link_width or 0)
    return {
        "errors": gpu.errors,
        "ecc_errors": gpu.ecc_errors or 0,
        "needs_reset": bool(gpu.needs_reset),
        "has_failed_repair": bool(gpu.has_failed_repair),
        "slowdowns": tuple(sorted(set.intersection(*looks))),
        "lanes": (gpu.link_width, gpu.max_link_width) if is_narrow else None,
    }


def _is_on(context: DiagnosisContext, node: str, rank: int) -> bool:
    return context.evidence.nodes.get(rank, node) == node


def _is_idle(snapshot: Snapshot, same: Gpu) -> bool:
    gpu = next((one for one in snapshot.gpus if (one.node, one.index) == (same.node, same.index)), None)
    return gpu is not None and gpu.utilisation == 0 and not gpu.pids and (gpu.used_bytes or 0) <= _IDLE_BYTES


def _gpu_facts(gpu: Gpu) -> Facts:
    return {"index": gpu.index, "utilisation": gpu.utilisation or 0, "used_bytes": gpu.used_bytes or 0}


def _finished_program(context: DiagnosisContext) -> tuple[Wait, tuple[int, ...]] | None:
    """Return the wait of the first hung rank whose program has finished, and all such ranks, or None."""
    snapshot = context.last_snapshot
    return root_where(lambda root: root.rank in snapshot and is_shutting_down(snapshot[root.rank]), all_matching=True)(
        context
    )


@rule_if(_finished_program)
def shutdown_hang(context: DiagnosisContext, root: Wait, ranks: tuple[int, ...]) -> Explanation:
    """Explain a hang in which a rank's program has finished but its process does not exit."""
    thread_line = awaited_thread_line(context, root)
    place = thread_line or wait_place(context, root)
    return Explanation(
        cause=Cause.SHUTDOWN_HANG,
        evidence=EvidenceKind.CLOSED if root.is_closed and place else EvidenceKind.PART,
        facts={"joins_thread": thread_line is not None, "blocked_in": root.blocked_in},
        ranks=ranks,
        place=place,
        proof=dump_proof(context, root),
    )


@rule_if(first_own_failure)
def hidden_package(context: DiagnosisContext, first: Failure) -> Explanation | None:
    """Explain a failed import of a package that a file of the user hides, such as a torch.py beside the script."""
    error = first.exception
    hints = error.hints if error else ()
    file = next((hint.name for hint in hints if hint.kind == "hiding file"), "")
    if first.kind is FailureKind.LAUNCHER:
        file = context.evidence.hiding_file
    if not file:
        return None
    return Explanation(
        cause=Cause.HIDDEN_PACKAGE,
        evidence=EvidenceKind.RAISED,
        facts={"file": file, "launcher": error is None},
        ranks=failed_ranks([first]),
        place=exception_place(context, first.rank, error) if error else None,
        proof=(error.proof,) if error else ("output.log",),
    )
