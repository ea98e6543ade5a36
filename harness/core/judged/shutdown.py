"""Shutdown: whether a rank's program is over and its interpreter, or its process group, is being taken down."""

from __future__ import annotations

from harness.core.observed.evidence import Frame, RankSnapshot, Stack
from harness.core.observed.stacks import in_function

_GROUPS = "torch/distributed/distributed_c10d.py"


def ending(rank: RankSnapshot) -> bool:
    """The interpreter is on its way out: it joins the last threads, or calls what wanted to be called at the end.

    The probe marks the first of these, and the stack shows it where there is no probe.
    """
    if rank.board is not None and any(mark.kind == "exit" for mark in rank.board.marks):
        return True
    main = _main_thread(rank)
    if main is None or not main.frames:
        return False
    return _is_shutdown(main.frames[-1]) or in_function(main.frames, _GROUPS, ("destroy_process_group",)) is not None


def _is_shutdown(outermost: Frame) -> bool:
    return outermost.function == "_shutdown" and outermost.file.endswith("/threading.py")


def _main_thread(rank: RankSnapshot) -> Stack | None:
    by_id = next((stack for stack in rank.stacks if stack.tid == rank.pid), None)
    return by_id or next((stack for stack in rank.stacks if stack.tid is None and stack.thread == "MainThread"), None)
