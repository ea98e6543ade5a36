"""Why a run could not go on, or could not end: memory, what the machine refused, a shutdown that never finishes."""

from __future__ import annotations

import errno
import re
import signal

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.context import (
    DiagnosisContext,
    at,
    dump_proof,
    failed_first,
    last_line,
    last_place,
    last_seen,
    raised_at,
    raised_first,
    ranks_of,
    shorten,
    standing,
    wait_place,
)
from nsa_harness.core.diagnosis.explanation import Explanation, explained, given
from nsa_harness.core.diagnosis.rank_text import ranks_text
from nsa_harness.core.diagnosis.rules.threads import line_behind
from nsa_harness.core.evidence.evidence import Raised, Snapshot
from nsa_harness.core.evidence.host import Gpu, killed_pids
from nsa_harness.core.verdict.verdict import Failure, FailureKind, is_shutting_down
from nsa_harness.core.verdict.wait import Wait

_ASSERTION = re.compile(r"Assertion [`'].*?['`] failed")
_ERRNO = re.compile(r"\[Errno (\d+)\]")
_OS_ERRORS = frozenset({"OSError", "IOError", "BlockingIOError", "socket.error"})
# Numbers as Linux has them; what the machine has run out of, or refuses.
_REFUSED = {
    5: "a device reports an input/output error",
    11: "a resource is used up for the moment",
    23: "the machine has no file descriptor left",
    24: "the process has no file descriptor left",
    27: "a file would grow past the size that is allowed",
    28: "no space is left on the device",
    30: "the file system is read-only",
    98: "the address is taken by another process",
    99: "the address does not belong to this machine",
    101: "the network cannot be reached",
    113: "the other machine cannot be reached",
    116: "the file handle of a network file system is stale",
    122: "the disk quota is used up",
}
# torch's own texts, alike in 2.11 and 2.13, where no errno comes with the exception.
_REFUSED_TEXTS = (
    (re.compile(r"\bEADDRINUSE\b"), _REFUSED[98]),
    (re.compile(r"No space left on device"), _REFUSED[28]),
    (re.compile(r"Too many open files"), _REFUSED[24]),
    (re.compile(r"RendezvousConnectionError"), "the rendezvous of the launcher cannot be reached"),
    (re.compile(r"can't start new thread"), "no further thread may be started"),
    (re.compile(r"out of shared memory|unable to open shared memory object"), "/dev/shm is full"),
)


@given(failed_first)
def host_oom(context: DiagnosisContext, first: Failure) -> Explanation | None:
    if first.raised is not None:
        return _could_not_allocate(context, first, first.raised)
    return _killed_for_memory(context, first) if first.status == -signal.SIGKILL else None


def _could_not_allocate(context: DiagnosisContext, first: Failure, raised: Raised) -> Explanation | None:
    worker = next((pid for pid in _kernel_killed(context) if f"(pid {pid})" in raised.message), None)
    if raised.type != "MemoryError" and worker is None and not Cause.HOST_OOM.said_in(raised.message):
        return None
    place = raised_at(context, first.rank, raised)
    what = "could not get memory" if worker is None else f"lost its process {worker}, killed by the kernel"
    return explained(
        Cause.HOST_OOM,
        f"rank {first.rank} {what}: {shorten(first.text)}{at(place)}{_memory(context)}",
        ranks=ranks_of([first]),
        place=place,
        evidence=EvidenceKind.RAISED,
        proof=(raised.proof,),
        advice="Make what this line allocates smaller (batch, sequence length, a list that grows), or raise the limit:"
        " `ulimit -v`, the control group's memory.max.",
    )


def _killed_for_memory(context: DiagnosisContext, first: Failure) -> Explanation | None:
    """SIGKILL alone may come from anyone: the kernel's log names the process, its counter only says that one died."""
    rank = context.rank(first.rank)
    named = rank is not None and rank.pid in _kernel_killed(context)
    memory = context.evidence.memory
    if not named and not (memory is not None and memory.oom_kills):
        return None
    who = f"rank {first.rank}" if rank else "the launcher"
    why = "the kernel's log says that it ran out of memory" if named else "the kernel killed for want of memory there"
    return explained(
        Cause.HOST_OOM,
        f"{who} was killed by SIGKILL, and {why}{_memory(context)}; {last_seen(context, first.rank)}"
        f"{last_line(context, first.rank)}",
        ranks=ranks_of([first]),
        place=last_place(context, first.rank),
        evidence=EvidenceKind.KERNEL if named else EvidenceKind.PART,
        proof=("watch.jsonl", "processes.jsonl"),
        advice="Compare the peak of each rank's memory in the report with the limit; look for a list that grows, for"
        " workers that copy the data set, or raise the limit.",
    )


def _kernel_killed(context: DiagnosisContext) -> set[int]:
    memory = context.evidence.memory
    killed = set(killed_pids(memory.killed)) if memory else set()
    return killed | {one.pid for one in context.evidence.signals if one.sender.startswith("kernel")}


def _memory(context: DiagnosisContext) -> str:
    memory = context.evidence.memory
    limit = memory.limit_bytes or memory.total_bytes if memory else None
    return "" if limit is None else f" (limit {limit / 2**30:.1f} GiB)"


@given(raised_first)
def cuda_oom(context: DiagnosisContext, first: Failure, raised: Raised) -> Explanation | None:
    if not raised.type.endswith("OutOfMemoryError") and not Cause.CUDA_OOM.said_in(raised.message):
        return None
    place = raised_at(context, first.rank, raised)
    return explained(
        Cause.CUDA_OOM,
        f"rank {first.rank} ran out of GPU memory{at(place)}: {shorten(raised.message)}",
        ranks=ranks_of([first]),
        place=place,
        evidence=EvidenceKind.RAISED,
        proof=(raised.proof,),
    )


@given(failed_first)
def cuda_assert(context: DiagnosisContext, first: Failure) -> Explanation | None:
    rank = context.rank(first.rank)
    said = " ".join(rank.error_lines) if rank else ""
    if not Cause.CUDA_ASSERT.said_in(f"{first.text} {said}"):
        return None
    place = raised_at(context, first.rank, first.raised) if first.raised else None
    failed = _ASSERTION.search(said)
    return explained(
        Cause.CUDA_ASSERT,
        f"an assertion failed inside a kernel on the GPU of rank {first.rank}{f': {failed[0]}' if failed else ''};"
        f" rank {first.rank} noticed it{at(place) or ' later'}, and the kernel was launched there or earlier",
        ranks=ranks_of([first]),
        place=place,
        evidence=EvidenceKind.EFFECT,  # of the cause more: but the line is where it was noticed
        proof=(first.raised.proof if first.raised else f"rank{first.rank}/stderr.log",),
    )


@given(raised_first)
def dataloader_worker_died(context: DiagnosisContext, first: Failure, raised: Raised) -> Explanation | None:
    """torch's handler of a lost child raises in whatever the rank does; its words alone tell it from the rank's own."""
    lost = Cause.DATALOADER_WORKER_DIED.said_in(raised.message)
    if lost is None:
        return None
    noticed = raised_at(context, first.rank, raised)
    return explained(
        Cause.DATALOADER_WORKER_DIED,
        f"rank {first.rank} lost a worker of its DataLoader: process {lost[1]} {lost[2]}; it was noticed{at(noticed)},"
        " wherever the rank was",
        ranks=ranks_of([first]),
        evidence=EvidenceKind.RAISED,
        proof=(raised.proof,),
    )


@given(failed_first)
def infra(context: DiagnosisContext, first: Failure) -> Explanation | None:
    """The machine refused, not the program's logic: disk, descriptors, ports, shared memory."""
    raised = first.raised
    if raised is None:
        return _launcher_refused(context, first)
    place = raised_at(context, first.rank, raised)
    refused = _refused(raised)
    return (
        None
        if refused is None
        else explained(
            Cause.INFRA,
            f"rank {first.rank} was refused{at(place)}: {refused} ({shorten(first.text, 120)})",
            ranks=ranks_of([first]),
            place=place,
            evidence=EvidenceKind.EFFECT,  # a limit of the machine, or a program that takes and never gives back
            proof=(raised.proof,),
        )
    )


@given(failed_first)
def disk_full(context: DiagnosisContext, first: Failure) -> Explanation | None:
    """Only of a failure that says nothing else: what a program wants to say of a full disk goes to that disk."""
    full = context.evidence.disk_full
    if full is None or not _may_be_of_disk(first):
        return None
    return explained(
        Cause.DISK_FULL,
        f"{first.text}, and the disk of the run was full ({full})",
        ranks=ranks_of([first]),
        place=raised_at(context, first.rank, first.raised) if first.raised else None,
        evidence=EvidenceKind.PART,
        proof=("processes.jsonl",),
    )


def _may_be_of_disk(first: Failure) -> bool:
    if first.raised is not None:
        return _refused(first.raised) in (_REFUSED[errno.ENOSPC], _REFUSED[errno.EDQUOT])
    # SIGBUS: a page of a mapped file that has no room on the disk.
    return first.kind in (FailureKind.CODE, FailureKind.LAUNCHER) or first.status == -signal.SIGBUS


def _launcher_refused(context: DiagnosisContext, first: Failure) -> Explanation | None:
    """The launcher ended before it had a rank."""
    lines = context.evidence.last_lines if first.kind is FailureKind.LAUNCHER else ()
    line, refused = next(((line, words) for line in lines if (words := _words(line))), ("", None))
    return (
        None
        if refused is None
        else explained(
            Cause.INFRA,
            f"{first.text} before it started a rank: {refused} ({shorten(line, 120)})",
            evidence=EvidenceKind.PART,
            proof=("output.log",),
        )
    )


def _refused(raised: Raised) -> str | None:
    number = _ERRNO.search(raised.message)
    if number and (raised.type in _OS_ERRORS or "DataLoader worker" in raised.message):
        return _REFUSED.get(int(number[1]))
    return _words(raised.message)


def _words(text: str) -> str | None:
    return next((words for known, words in _REFUSED_TEXTS if known.search(text)), None)


_AT_WORK, _NOTHING_BYTES = 0.5, 64 << 20  # of a driver alone, which holds some MiB on each GPU


def idle_device(context: DiagnosisContext) -> Explanation | None:
    """A GPU that no rank uses, while several of them use another one together."""
    looks = [look for look in context.evidence.snapshots if look.gpus]
    ranks = {rank.pid for rank in context.evidence.ranks if rank.pid is not None}
    idle = [gpu for gpu in looks[-1].gpus if all(_is_idle(look, gpu.index) for look in looks)] if looks else []
    used = [gpu for gpu in looks[-1].gpus if ranks & set(gpu.pids)] if looks else []
    if not idle or not 0 < len(used) < len(ranks) or not any((gpu.utilisation or 0) >= _AT_WORK for gpu in used):
        return None
    busy = max(used, key=lambda gpu: gpu.utilisation or 0)
    return explained(
        Cause.IDLE_DEVICE,
        f"{_gpu(idle[0])}, and no process uses it, while {len(ranks)} ranks share {len(used)}: {_gpu(busy)}",
        ranks=tuple(rank.rank for rank in context.evidence.ranks if rank.pid in busy.pids),
        evidence=EvidenceKind.PART,
        proof=tuple(rank.proof for rank in looks[-1].ranks if rank.proof),
    )


def _is_idle(look: Snapshot, index: int) -> bool:
    gpu = next((one for one in look.gpus if one.index == index), None)
    return gpu is not None and gpu.utilisation == 0 and not gpu.pids and (gpu.used_bytes or 0) <= _NOTHING_BYTES


def _gpu(gpu: Gpu) -> str:
    used, share = gpu.used_bytes or 0, gpu.utilisation or 0
    return f"GPU {gpu.index} is at {100 * share:.0f} % and holds {used >> 20} MiB"


def _over(context: DiagnosisContext) -> tuple[Wait, tuple[int, ...]] | None:
    """The first root whose program is over, and the ranks of all such."""
    looked = context.looked
    return standing(lambda root: root.rank in looked and is_shutting_down(looked[root.rank]), anywhere=True)(context)


@given(_over)
def shutdown_hang(context: DiagnosisContext, root: Wait, ranks: tuple[int, ...]) -> Explanation:
    """The program is over on this rank, and its process is not."""
    behind = line_behind(context, root)
    place = behind or wait_place(context, root)
    what = "a thread that is no daemon waits" if behind else f"it is blocked in {root.blocked_in}"
    return explained(
        Cause.SHUTDOWN_HANG,
        f"the program of {ranks_text(ranks)} is over, and its process does not end: {what}{at(place)}",
        ranks=ranks,
        place=place,
        evidence=EvidenceKind.CLOSED if root.closed and place else EvidenceKind.PART,
        proof=dump_proof(context, root),
    )
