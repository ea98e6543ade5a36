"""Why a run hangs below Python: a C function that keeps the interpreter's lock, or computes without end."""

from __future__ import annotations

from collections.abc import Sequence

from nsa_harness.core.diagnosis.case import (
    Case,
    Explanation,
    at,
    dump_proof,
    explained,
    hung_roots,
    in_function,
    loop_place,
    wait_place,
)
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.phases import Phase, rule
from nsa_harness.core.evidence.evidence import Stack
from nsa_harness.core.verdict.motion import rank_stack
from nsa_harness.core.verdict.proof import LOOP_SAMPLES, loop_lines
from nsa_harness.core.verdict.wait import Wait, WaitKind

_SILENT_S = 2.0  # the beat thread of the probe writes four times a second whenever it gets the interpreter's lock
# What stands between a Python line and the C function it calls, and says nothing about either.
_BRIDGES = ("ffi_", "libffi", "_ctypes", "_call_function_pointer", "?", "cpython-", "libpython", "_PyEval", "PyObject_")


@rule(Phase.WAITS_BY_ITSELF, Cause.GIL_HELD_NATIVE, outranks=("native_busy_loop",))
def gil_held_native(case: Case) -> Explanation | None:
    held = [(root, stack) for root in hung_roots(case) if (stack := _stack(case, root)) and _keeps(case, root, stack)]
    waiting = next((one for one in held if one[0].kind is not WaitKind.COMPUTE), None)
    if waiting is None:
        return _computes_and_keeps(case, held)
    root, stack = waiting
    place = wait_place(case, root)
    return explained(
        Cause.GIL_HELD_NATIVE,
        f"rank {root.rank} stands in native code{_named(stack)} called{in_function(root)}{at(place)} and keeps the"
        " interpreter's lock: no other Python thread of the process can run",
        ranks=(root.rank,),
        place=place,
        confidence=0.95 if stack.native else 0.85,
        proof=dump_proof(case, root),
        advice="Release the GIL around what may wait (ctypes.CDLL instead of PyDLL, Py_BEGIN_ALLOW_THREADS, pybind11's"
        " call_guard), and give the wait a limit.",
    )


def _computes_and_keeps(case: Case, held: Sequence[tuple[Wait, Stack]]) -> Explanation | None:
    """A function of the interpreter itself, such as a search with a regular expression, that never returns.

    A loop in Python hands the lock on when another thread asks for it; so the beat is heard.
    """
    silent = ((root, stack) for root, stack in held if not _in_library(stack) and _silent_in_all_samples(case, root))
    root, stack = next(silent, (None, None))
    if root is None or stack is None:
        return None
    place = loop_place(case, root)
    return explained(
        Cause.GIL_HELD_NATIVE,
        f"rank {root.rank} computes without end in native code{_named(stack)} called{in_function(root)}{at(place)} and"
        " keeps the interpreter's lock: no other Python thread of the process can run",
        ranks=(root.rank,),
        place=place,
        confidence=0.85,
        proof=dump_proof(case, root),
        advice="Look at what the call is given: a regular expression with nested repetitions, a number with very many"
        " digits, a huge list. Check sizes before it, or run it in a process that can be ended.",
    )


def _silent_in_all_samples(case: Case, root: Wait) -> bool:
    last = case.evidence.snapshots[-1]
    board = next((rank.board for rank in last.ranks if rank.rank == root.rank), None)
    seen = [one.at_s for one in case.evidence.samples if one.rank == root.rank][-LOOP_SAMPLES:]
    silent_s = last.at_s - board.beat_s if board is not None and board.beat_s is not None else 0.0
    lines = loop_lines(root.rank, case.evidence.samples)
    return len(lines) == 1 and bool(seen) and silent_s >= max(_SILENT_S, last.at_s - seen[0])


@rule(Phase.WAITS_BY_ITSELF, Cause.NATIVE_BUSY_LOOP, outranks=("shutdown_hang",))
def native_busy_loop(case: Case) -> Explanation | None:
    looping = [root for root in hung_roots(case) if root.kind is WaitKind.COMPUTE]
    native = [(root, stack) for root in looping if (stack := _stack(case, root)) and _stays_native(case, root, stack)]
    if not native:
        return None
    root, stack = native[0]
    place = loop_place(case, root)
    return explained(
        Cause.NATIVE_BUSY_LOOP,
        f"rank {root.rank} computes without end in native code ({_called(stack)}), called{in_function(root)}"
        f"{at(place)}: no mark, no step",
        ranks=(root.rank,),
        place=place,
        confidence=0.85 if stack.gil else 0.9,  # a lock that is kept is a fault of its own
        proof=dump_proof(case, root),
    )


def _stack(case: Case, root: Wait) -> Stack | None:
    """The stack of the rank's training thread at the last look."""
    last = case.evidence.snapshots[-1:]
    return next((rank_stack(rank) for snapshot in last for rank in snapshot.ranks if rank.rank == root.rank), None)


def _stays_native(case: Case, root: Wait, stack: Stack) -> bool:
    """It never comes back to Python: one line in all samples, and the lock given away, or kept so that nobody beats.

    A Python loop that calls small C functions shows some of them too; but it holds the lock, and hands it on.
    """
    one_line = len(loop_lines(root.rank, case.evidence.samples)) == 1
    return one_line and _in_library(stack) and (not stack.gil or _beats_no_more(case, root))


def _keeps(case: Case, root: Wait, stack: Stack) -> bool:
    """It holds the interpreter's lock; without native frames the silence of the beat has to show that it keeps it."""
    return stack.gil and (bool(stack.native) or _beats_no_more(case, root))


def _beats_no_more(case: Case, root: Wait) -> bool:
    last = case.evidence.snapshots[-1]
    board = next((rank.board for rank in last.ranks if rank.rank == root.rank), None)
    return board is not None and board.beat_s is not None and last.at_s - board.beat_s >= _SILENT_S


def _in_library(stack: Stack) -> bool:
    """The thread runs in a library's function, not in the interpreter's own."""
    return bool(stack.native) and not any(word in stack.native[0] for word in ("libpython", "_PyEval"))


def _named(stack: Stack) -> str:
    return f" ({_called(stack)})" if stack.native else ""


def _called(stack: Stack) -> str:
    """The native function nearest to Python that is no bridge, and the innermost one."""
    named = [name for name in stack.native if not any(word in name for word in _BRIDGES)]
    outermost, innermost = (named or list(stack.native))[-1], (named or list(stack.native))[0]
    return outermost if outermost == innermost else f"{outermost}, in {innermost}"
