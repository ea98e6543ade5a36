"""Why a run could not go on, or could not end: memory, what the machine refused, a shutdown that never finishes."""

from __future__ import annotations

import errno
import re
import signal

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.context import (
    Case,
    Explanation,
    at,
    dump_proof,
    explained,
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
from nsa_harness.core.diagnosis.phases import RulePhase, rule, rule_given
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


@rule_given(failed_first, RulePhase.FIRST_FAILURE, Cause.HOST_OOM, outranks=("infra",))
def host_oom(case: Case, first: Failure) -> Explanation | None:
    if first.raised is not None:
        return _could_not_allocate(case, first, first.raised)
    return _killed_for_memory(case, first) if first.status == -signal.SIGKILL else None


def _could_not_allocate(case: Case, first: Failure, raised: Raised) -> Explanation | None:
    worker = next((pid for pid in _kernel_killed(case) if f"(pid {pid})" in raised.message), None)
    if raised.type != "MemoryError" and worker is None and not Cause.HOST_OOM.said_in(raised.message):
        return None
    place = raised_at(case, first.rank, raised)
    what = "could not get memory" if worker is None else f"lost its process {worker}, killed by the kernel"
    return explained(
        Cause.HOST_OOM,
        f"rank {first.rank} {what}: {shorten(first.text)}{at(place)}{_memory(case)}",
        ranks=ranks_of([first]),
        place=place,
        seen=EvidenceKind.RAISED,
        proof=(raised.proof,),
        advice="Make what this line allocates smaller (batch, sequence length, a list that grows), or raise the limit:"
        " `ulimit -v`, the control group's memory.max.",
    )


def _killed_for_memory(case: Case, first: Failure) -> Explanation | None:
    """SIGKILL alone may come from anyone: the kernel's log names the process, its counter only says that one died."""
    rank = case.rank(first.rank)
    named = rank is not None and rank.pid in _kernel_killed(case)
    memory = case.evidence.memory
    if not named and not (memory is not None and memory.oom_kills):
        return None
    who = f"rank {first.rank}" if rank else "the launcher"
    why = "the kernel's log says that it ran out of memory" if named else "the kernel killed for want of memory there"
    return explained(
        Cause.HOST_OOM,
        f"{who} was killed by SIGKILL, and {why}{_memory(case)}; {last_seen(case, first.rank)}"
        f"{last_line(case, first.rank)}",
        ranks=ranks_of([first]),
        place=last_place(case, first.rank),
        seen=EvidenceKind.KERNEL if named else EvidenceKind.PART,
        proof=("watch.jsonl", "processes.jsonl"),
        advice="Compare the peak of each rank's memory in the report with the limit; look for a list that grows, for"
        " workers that copy the data set, or raise the limit.",
    )


def _kernel_killed(case: Case) -> set[int]:
    memory = case.evidence.memory
    killed = set(killed_pids(memory.killed)) if memory else set()
    return killed | {one.pid for one in case.evidence.signals if one.sender.startswith("kernel")}


def _memory(case: Case) -> str:
    memory = case.evidence.memory
    limit = memory.limit_bytes or memory.total_bytes if memory else None
    return "" if limit is None else f" (limit {limit / 2**30:.1f} GiB)"


@rule_given(raised_first, RulePhase.FIRST_FAILURE, Cause.CUDA_OOM, outranks=("exception",))
def cuda_oom(case: Case, first: Failure, raised: Raised) -> Explanation | None:
    if not raised.type.endswith("OutOfMemoryError") and not Cause.CUDA_OOM.said_in(raised.message):
        return None
    place = raised_at(case, first.rank, raised)
    return explained(
        Cause.CUDA_OOM,
        f"rank {first.rank} ran out of GPU memory{at(place)}: {shorten(raised.message)}",
        ranks=ranks_of([first]),
        place=place,
        seen=EvidenceKind.RAISED,
        proof=(raised.proof,),
    )


@rule_given(failed_first, RulePhase.FIRST_FAILURE, Cause.CUDA_ASSERT, outranks=("exception",))
def cuda_assert(case: Case, first: Failure) -> Explanation | None:
    rank = case.rank(first.rank)
    said = " ".join(rank.error_lines) if rank else ""
    if not Cause.CUDA_ASSERT.said_in(f"{first.text} {said}"):
        return None
    place = raised_at(case, first.rank, first.raised) if first.raised else None
    failed = _ASSERTION.search(said)
    return explained(
        Cause.CUDA_ASSERT,
        f"an assertion failed inside a kernel on the GPU of rank {first.rank}{f': {failed[0]}' if failed else ''};"
        f" rank {first.rank} noticed it{at(place) or ' later'}, and the kernel was launched there or earlier",
        ranks=ranks_of([first]),
        place=place,
        seen=EvidenceKind.EFFECT,  # of the cause more: but the line is where it was noticed
        proof=(first.raised.proof if first.raised else f"rank{first.rank}/stderr.log",),
    )


@rule_given(raised_first, RulePhase.FIRST_FAILURE, Cause.DATALOADER_WORKER_DIED, outranks=("exception",))
def dataloader_worker_died(case: Case, first: Failure, raised: Raised) -> Explanation | None:
    """torch's handler of a lost child raises in whatever the rank does; its words alone tell it from the rank's own."""
    lost = Cause.DATALOADER_WORKER_DIED.said_in(raised.message)
    if lost is None:
        return None
    noticed = raised_at(case, first.rank, raised)
    return explained(
        Cause.DATALOADER_WORKER_DIED,
        f"rank {first.rank} lost a worker of its DataLoader: process {lost[1]} {lost[2]}; it was noticed{at(noticed)},"
        " wherever the rank was",
        ranks=ranks_of([first]),
        seen=EvidenceKind.RAISED,
        proof=(raised.proof,),
    )


@rule_given(failed_first, RulePhase.FIRST_FAILURE, Cause.INFRA, outranks=("dataloader_worker_died",))
def infra(case: Case, first: Failure) -> Explanation | None:
    """The machine refused, not the program's logic: disk, descriptors, ports, shared memory."""
    raised = first.raised
    if raised is None:
        return _launcher_refused(case, first)
    place = raised_at(case, first.rank, raised)
    refused = _refused(raised)
    return (
        None
        if refused is None
        else explained(
            Cause.INFRA,
            f"rank {first.rank} was refused{at(place)}: {refused} ({shorten(first.text, 120)})",
            ranks=ranks_of([first]),
            place=place,
            seen=EvidenceKind.EFFECT,  # a limit of the machine, or a program that takes and never gives back
            proof=(raised.proof,),
        )
    )


@rule_given(failed_first, RulePhase.FIRST_FAILURE, Cause.DISK_FULL, outranks=("infra",))
def disk_full(case: Case, first: Failure) -> Explanation | None:
    """Only of a failure that says nothing else: what a program wants to say of a full disk goes to that disk."""
    full = case.evidence.disk_full
    if full is None or not _may_be_of_disk(first):
        return None
    return explained(
        Cause.DISK_FULL,
        f"{first.text}, and the disk of the run was full ({full})",
        ranks=ranks_of([first]),
        place=raised_at(case, first.rank, first.raised) if first.raised else None,
        seen=EvidenceKind.PART,
        proof=("processes.jsonl",),
    )


def _may_be_of_disk(first: Failure) -> bool:
    if first.raised is not None:
        return _refused(first.raised) in (_REFUSED[errno.ENOSPC], _REFUSED[errno.EDQUOT])
    # SIGBUS: a page of a mapped file that has no room on the disk.
    return first.kind in (FailureKind.CODE, FailureKind.LAUNCHER) or first.status == -signal.SIGBUS


def _launcher_refused(case: Case, first: Failure) -> Explanation | None:
    """The launcher ended before it had a rank."""
    lines = case.evidence.last_lines if first.kind is FailureKind.LAUNCHER else ()
    line, refused = next(((line, words) for line in lines if (words := _words(line))), ("", None))
    return (
        None
        if refused is None
        else explained(
            Cause.INFRA,
            f"{first.text} before it started a rank: {refused} ({shorten(line, 120)})",
            seen=EvidenceKind.PART,
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


@rule(RulePhase.SILENT, Cause.IDLE_DEVICE, outranks=("dirty_exit",), outranked_by=("memory_growth",))
def idle_device(case: Case) -> Explanation | None:
    """A GPU that no rank uses, while several of them use another one together."""
    looks = [look for look in case.evidence.snapshots if look.gpus]
    ranks = {rank.pid for rank in case.evidence.ranks if rank.pid is not None}
    idle = [gpu for gpu in looks[-1].gpus if all(_is_idle(look, gpu.index) for look in looks)] if looks else []
    used = [gpu for gpu in looks[-1].gpus if ranks & set(gpu.pids)] if looks else []
    if not idle or not 0 < len(used) < len(ranks) or not any((gpu.utilisation or 0) >= _AT_WORK for gpu in used):
        return None
    busy = max(used, key=lambda gpu: gpu.utilisation or 0)
    return explained(
        Cause.IDLE_DEVICE,
        f"{_gpu(idle[0])}, and no process uses it, while {len(ranks)} ranks share {len(used)}: {_gpu(busy)}",
        ranks=tuple(rank.rank for rank in case.evidence.ranks if rank.pid in busy.pids),
        seen=EvidenceKind.PART,
        proof=tuple(rank.proof for rank in looks[-1].ranks if rank.proof),
    )


def _is_idle(look: Snapshot, index: int) -> bool:
    gpu = next((one for one in look.gpus if one.index == index), None)
    return gpu is not None and gpu.utilisation == 0 and not gpu.pids and (gpu.used_bytes or 0) <= _NOTHING_BYTES


def _gpu(gpu: Gpu) -> str:
    used, share = gpu.used_bytes or 0, gpu.utilisation or 0
    return f"GPU {gpu.index} is at {100 * share:.0f} % and holds {used >> 20} MiB"


def _over(case: Case) -> tuple[Wait, tuple[int, ...]] | None:
    """The first root whose program is over, and the ranks of all such."""
    looked = case.looked
    return standing(lambda root: root.rank in looked and is_shutting_down(looked[root.rank]), anywhere=True)(case)


@rule_given(_over, RulePhase.WAITS_BY_ITSELF, Cause.SHUTDOWN_HANG, outranks=("thread_died",))
def shutdown_hang(case: Case, root: Wait, ranks: tuple[int, ...]) -> Explanation:
    """The program is over on this rank, and its process is not."""
    behind = line_behind(case, root)
    place = behind or wait_place(case, root)
    what = "a thread that is no daemon waits" if behind else f"it is blocked in {root.stands_in}"
    return explained(
        Cause.SHUTDOWN_HANG,
        f"the program of {ranks_text(ranks)} is over, and its process does not end: {what}{at(place)}",
        ranks=ranks,
        place=place,
        seen=EvidenceKind.CLOSED if root.closed and place else EvidenceKind.PART,
        proof=dump_proof(case, root),
    )
