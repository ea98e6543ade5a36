"""Asks nvidia-smi for the state of the GPUs, which may hang where a driver does."""

from __future__ import annotations

import time
from collections.abc import Iterable

from harness.core.observed.gpus import GPU_FIELDS, PROCESS_FIELDS, parse_gpus
from harness.core.observed.node import Gpu
from harness.core.observed.process import Process
from harness.supervisor.sources.commands import CommandFailed, answer_of

_LIMIT_S = 2.5  # for both questions


def gpu_in_use(processes: Iterable[Process]) -> bool:
    """One of them holds a GPU open."""
    return any(end.startswith("/dev/nvidia") for process in processes for end in process.holds)


def gpu_state(failures: list[str], tool: str = "nvidia-smi") -> tuple[Gpu, ...]:
    """Every GPU of the node; where there is no answer the reason is appended to `failures`."""
    deadline = time.monotonic() + _LIMIT_S
    try:
        table = _ask(tool, "gpu", GPU_FIELDS, deadline)
        processes = _ask(tool, "compute-apps", PROCESS_FIELDS, deadline)
        return parse_gpus(table, processes)
    except (CommandFailed, ValueError) as error:
        failures.append(str(error))
        return ()


def _ask(tool: str, what: str, fields: tuple[str, ...], deadline: float) -> str:
    query = f"--query-{what}={','.join(fields)}"
    return answer_of([tool, query, "--format=csv,noheader,nounits"], deadline - time.monotonic())
