"""Why a run could not continue or end: memory, requests that the machine refused, a shutdown that never finishes."""

from __future__ import annotations

import re
import signal

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.context import (
    DiagnosisContext,
    dump_proof,
    failed_first,
    last_line,
    last_place,
    last_seen,
    raised_at,
    raised_first,
    ranks_of,
    standing,
    wait_place,
)
from nsa_harness.core.diagnosis.explanation import Explanation, given
from nsa_harness.core.diagnosis.rules.threads import line_behind
from nsa_harness.core.evidence.evidence import Raised, Snapshot
from nsa_harness.core.evidence.host import Gpu, killed_pids
from nsa_harness.core.report import Facts
from nsa_harness.core.verdict.verdict import Failure, FailureKind, is_shutting_down
from nsa_harness.core.verdict.wait import Wait

_ASSERTION = re.compile(r"Assertion [`'].*?['`] failed")
_ERRNO = re.compile(r"\[Errno (\d+)\]")
_OS_ERRORS = frozenset({"OSError", "IOError", "BlockingIOError", "socket.error"})
# The errors of a machine that has run out of something or refuses it, by their numbers on Linux. Each is a key of
# [refused] in causes.toml.
_ENOSPC, _EDQUOT = "ENOSPC", "EDQUOT"
_REFUSED = {
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
# The messages of torch 2.11 and 2.13 that come without an error number.
_REFUSED_TEXTS = (
    (re.compile(r"\bEADDRINUSE\b"), "EADDRINUSE"),
    (re.compile(r"No space left on device"), _ENOSPC),
    (re.compile(r"Too many open files"), "EMFILE"),
    (re.compile(r"RendezvousConnectionError"), "rendezvous"),
    (re.compile(r"can't start new thread"), "threads"),
    (re.compile(r"out of shared memory|unable to open shared memory object"), "shared_memory"),
)


@given(failed_first)
def host_oom(context: DiagnosisContext, first: Failure) -> Explanation | None:
    """The host had no memory for a rank: an allocation failed, or the kernel killed the rank or its process."""
    if first.raised is not None:
        return _could_not_allocate(context, first, first.raised)
    return _killed_for_memory(context, first) if first.status == -signal.SIGKILL else None


def _could_not_allocate(context: DiagnosisContext, first: Failure, raised: Raised) -> Explanation | None:
    worker = next((pid for pid in _kernel_killed(context) if f"(pid {pid})" in raised.message), None)
    if raised.type != "MemoryError" and worker is None and not Cause.HOST_OOM.said_in(raised.message):
        return None
    return Explanation(
        cause=Cause.HOST_OOM,
        evidence=EvidenceKind.RAISED,
        facts={
            "variant": "raised",
            "killed_process": worker,
            "error": first.text,
            "limit_bytes": _memory_limit_bytes(context),
        },
        ranks=ranks_of([first]),
        place=raised_at(context, first.rank, raised),
        proof=(raised.proof,),
    )


def _killed_for_memory(context: DiagnosisContext, first: Failure) -> Explanation | None:
    """Any process may send SIGKILL. The kernel's log names the killed process; its counter shows only that one died."""
    rank = context.rank(first.rank)
    named = rank is not None and rank.pid in _kernel_killed(context)
    memory = context.evidence.memory
    if not named and not (memory is not None and memory.oom_kills):
        return None
    return Explanation(
        cause=Cause.HOST_OOM,
        evidence=EvidenceKind.KERNEL if named else EvidenceKind.PART,
        facts={
            "variant": "killed",
            "named_in_kernel_log": named,
            "limit_bytes": _memory_limit_bytes(context),
            "last_seen": last_seen(context, first.rank),
            "last_line": last_line(context, first.rank),
        },
        ranks=ranks_of([first]),
        place=last_place(context, first.rank),
        proof=("watch.jsonl", "processes.jsonl"),
    )


def _kernel_killed(context: DiagnosisContext) -> set[int]:
    memory = context.evidence.memory
    killed = set(killed_pids(memory.killed)) if memory else set()
    return killed | {one.pid for one in context.evidence.signals if one.sender.startswith("kernel")}


def _memory_limit_bytes(context: DiagnosisContext) -> int | None:
    memory = context.evidence.memory
    return memory.limit_bytes or memory.total_bytes if memory else None


@given(raised_first)
def cuda_oom(context: DiagnosisContext, first: Failure, raised: Raised) -> Explanation | None:
    """A rank ran out of GPU memory."""
    if not raised.type.endswith("OutOfMemoryError") and not Cause.CUDA_OOM.said_in(raised.message):
        return None
    return Explanation(
        cause=Cause.CUDA_OOM,
        evidence=EvidenceKind.RAISED,
        facts={"message": raised.message},
        ranks=ranks_of([first]),
        place=raised_at(context, first.rank, raised),
        proof=(raised.proof,),
    )


@given(failed_first)
def cuda_assert(context: DiagnosisContext, first: Failure) -> Explanation | None:
    """An assertion failed inside a kernel on the GPU."""
    rank = context.rank(first.rank)
    printed = " ".join(rank.error_lines) if rank else ""
    if not Cause.CUDA_ASSERT.said_in(f"{first.text} {printed}"):
        return None
    assertion = _ASSERTION.search(printed)
    return Explanation(
        cause=Cause.CUDA_ASSERT,
        evidence=EvidenceKind.EFFECT,  # the cause is certain, but the line is where the rank noticed it
        facts={"assertion": assertion[0] if assertion else ""},
        ranks=ranks_of([first]),
        place=raised_at(context, first.rank, first.raised) if first.raised else None,
        proof=(first.raised.proof if first.raised else f"rank{first.rank}/stderr.log",),
    )


@given(raised_first)
def dataloader_worker_died(context: DiagnosisContext, first: Failure, raised: Raised) -> Explanation | None:
    """torch's handler of a lost child raises wherever the rank is; only its message tells it from the rank's errors."""
    lost = Cause.DATALOADER_WORKER_DIED.said_in(raised.message)
    if lost is None:
        return None
    return Explanation(
        cause=Cause.DATALOADER_WORKER_DIED,
        evidence=EvidenceKind.RAISED,
        facts={"worker": lost[1], "ended": lost[2], "noticed_at": raised_at(context, first.rank, raised)},
        ranks=ranks_of([first]),
        proof=(raised.proof,),
    )


@given(failed_first)
def infra(context: DiagnosisContext, first: Failure) -> Explanation | None:
    """The machine refused a request: disk, descriptors, ports, shared memory. The program's logic is not at fault."""
    if first.raised is None:
        return _launcher_refused(context, first)
    refused = _refused(first.raised)
    if refused is None:
        return None
    return Explanation(
        cause=Cause.INFRA,
        evidence=EvidenceKind.EFFECT,  # a limit of the machine, or a program that takes and never gives back
        facts={"variant": "rank", "refused": refused, "message": first.text},
        ranks=ranks_of([first]),
        place=raised_at(context, first.rank, first.raised),
        proof=(first.raised.proof,),
    )


@given(failed_first)
def disk_full(context: DiagnosisContext, first: Failure) -> Explanation | None:
    """The disk was full, and the failure shows nothing else: a program writes its messages to that disk too."""
    full = context.evidence.disk_full
    if full is None or not _may_be_of_disk(first):
        return None
    return Explanation(
        cause=Cause.DISK_FULL,
        evidence=EvidenceKind.PART,
        facts={"variant": "failed", "disk": full, "failure": first.text},
        ranks=ranks_of([first]),
        place=raised_at(context, first.rank, first.raised) if first.raised else None,
        proof=("processes.jsonl",),
    )


def _may_be_of_disk(first: Failure) -> bool:
    if first.raised is not None:
        return _refused(first.raised) in (_ENOSPC, _EDQUOT)
    # SIGBUS: there is no room on the disk for a page of a mapped file.
    return first.kind in (FailureKind.CODE, FailureKind.LAUNCHER) or first.status == -signal.SIGBUS


def _launcher_refused(context: DiagnosisContext, first: Failure) -> Explanation | None:
    """The launcher ended before it had a rank."""
    lines = context.evidence.last_lines if first.kind is FailureKind.LAUNCHER else ()
    line, refused = next(((line, code) for line in lines if (code := _refused_in(line))), ("", None))
    if refused is None:
        return None
    return Explanation(
        cause=Cause.INFRA,
        evidence=EvidenceKind.PART,
        facts={"variant": "launcher", "refused": refused, "message": line, "failure": first.text},
        proof=("output.log",),
    )


def _refused(raised: Raised) -> str | None:
    number = _ERRNO.search(raised.message)
    if number and (raised.type in _OS_ERRORS or "DataLoader worker" in raised.message):
        return _REFUSED.get(int(number[1]))
    return _refused_in(raised.message)


def _refused_in(text: str) -> str | None:
    return next((code for known, code in _REFUSED_TEXTS if known.search(text)), None)


_AT_WORK, _NOTHING_BYTES = 0.5, 64 << 20  # the driver alone holds some MiB on each GPU


def idle_device(context: DiagnosisContext) -> Explanation | None:
    """A GPU that no rank uses, while several of them use another one together."""
    looks = [look for look in context.evidence.snapshots if look.gpus]
    ranks = {rank.pid for rank in context.evidence.ranks if rank.pid is not None}
    idle = [gpu for gpu in looks[-1].gpus if all(_is_idle(look, gpu.index) for look in looks)] if looks else []
    used = [gpu for gpu in looks[-1].gpus if ranks & set(gpu.pids)] if looks else []
    if not idle or not 0 < len(used) < len(ranks) or not any((gpu.utilisation or 0) >= _AT_WORK for gpu in used):
        return None
    busy = max(used, key=lambda gpu: gpu.utilisation or 0)
    return Explanation(
        cause=Cause.IDLE_DEVICE,
        evidence=EvidenceKind.PART,
        facts={
            "idle_gpu": _gpu_facts(idle[0]),
            "shared_gpu": _gpu_facts(busy),
            "ranks_sharing": len(ranks),
            "gpus_shared": len(used),
        },
        ranks=tuple(rank.rank for rank in context.evidence.ranks if rank.pid in busy.pids),
        proof=tuple(rank.proof for rank in looks[-1].ranks if rank.proof),
    )


def _is_idle(look: Snapshot, index: int) -> bool:
    gpu = next((one for one in look.gpus if one.index == index), None)
    return gpu is not None and gpu.utilisation == 0 and not gpu.pids and (gpu.used_bytes or 0) <= _NOTHING_BYTES


def _gpu_facts(gpu: Gpu) -> Facts:
    return {"index": gpu.index, "utilisation": gpu.utilisation or 0, "used_bytes": gpu.used_bytes or 0}


def _over(context: DiagnosisContext) -> tuple[Wait, tuple[int, ...]] | None:
    """Find the first root whose program has finished, and the ranks of all such roots."""
    looked = context.looked
    return standing(lambda root: root.rank in looked and is_shutting_down(looked[root.rank]), anywhere=True)(context)


@given(_over)
def shutdown_hang(context: DiagnosisContext, root: Wait, ranks: tuple[int, ...]) -> Explanation:
    """A rank's program has finished, and its process does not end."""
    behind = line_behind(context, root)
    place = behind or wait_place(context, root)
    return Explanation(
        cause=Cause.SHUTDOWN_HANG,
        evidence=EvidenceKind.CLOSED if root.closed and place else EvidenceKind.PART,
        facts={"joins_thread": behind is not None, "blocked_in": root.blocked_in},
        ranks=ranks,
        place=place,
        proof=dump_proof(context, root),
    )
