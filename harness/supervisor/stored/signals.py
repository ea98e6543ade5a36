"""Who sent which signal to a process of the run, as far as the senders say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.core.observed.kernel_log import killed_pids
from harness.core.observed.node import HostMemory, SentSignal
from harness.core.observed.torchrun import closing_signals

_MAX_SIGNALS = 256


def sent_signals(
    guarded: Sequence[Mapping[str, Any]], log: str, memory: HostMemory | None, ranks: Mapping[int, int], origin_ns: int
) -> tuple[SentSignal, ...]:
    """Signals of the kernel's OOM killer, of torchrun (its log), of the guardian (its journal). By pid: `ranks`."""
    found = [
        *_of_kernel(memory, ranks),
        *(_sent(pid, name, "torchrun", None, ranks) for pid, name in closing_signals(log)),
        *_of_guardian(guarded, ranks, origin_ns),
    ]
    return tuple(found[:_MAX_SIGNALS])


def _of_kernel(memory: HostMemory | None, ranks: Mapping[int, int]) -> Iterator[SentSignal]:
    """Only what it did to processes of the run; in a container its log counts processes as the host does."""
    for pid in killed_pids(memory.killed if memory else ()):
        if pid in ranks:
            yield _sent(pid, "SIGKILL", "kernel (out of memory)", None, ranks)


def _of_guardian(
    guarded: Sequence[Mapping[str, Any]], ranks: Mapping[int, int], origin_ns: int
) -> Iterator[SentSignal]:
    for record in guarded:
        if record.get("event") == "signal" and "t_ns" in record:
            at_s = (int(record["t_ns"]) - origin_ns) / 1e9
            for pid in record.get("pids") or ():
                yield _sent(pid, str(record.get("signal")), "harness", at_s, ranks)


def _sent(pid: int, name: str, sender: str, at_s: float | None, ranks: Mapping[int, int]) -> SentSignal:
    return SentSignal(pid=pid, rank=ranks.get(pid), signal=name[:20], sender=sender, at_s=at_s)
