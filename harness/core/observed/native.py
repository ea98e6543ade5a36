"""Native frames: when the Python stack alone cannot tell where a thread is, and what the tools say then."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from itertools import groupby, islice, takewhile

from harness.core.observed.evidence import Frame, Stack
from harness.core.observed.process import Process
from harness.core.observed.stacks import training_stack

_MAX_NATIVE = 16
_MAX_FRAMES = 200
_PYSTACK_THREAD = re.compile(r"^Traceback for thread (\d+)(?: \(.*?\))?((?: \[[^\]]*\])*) \(most recent call last\):")
_PYSTACK_FRAME = re.compile(r'^\s+\(Python\) File "(.*)", line (\d+), in (.*)$')


def native_wanted(
    stacks: Sequence[Stack], process: Process, marking: Iterable[int], last: Frame | None
) -> Stack | None:
    """The thread to ask about: it trains, and its Python line does not tell what it does.

    It keeps the interpreter's lock without running Python, runs on and on in the line `last` that an earlier look has
    shown, or stands in a system call we do not know. A process in state D or stopped cannot be asked.
    """
    stack = training_stack(stacks, process.pid, marking)
    task = next((task for task in process.tasks if stack and task.tid == (stack.tid or process.pid)), None)
    if stack is None or task is None or not stack.frames or process.state in "DTtZX":
        return None
    if not stack.source.startswith("py-spy"):  # which could not look at all
        return None
    if stack.gil and task.state != "R" and task.syscall != "running":
        return stack
    unknown = task.syscall in ("", "running") or task.syscall.isdigit()
    return stack if unknown and stack.frames[0] == last else None


def parse_native(text: str) -> dict[int, tuple[str, ...]]:
    """The C functions below each thread's innermost Python frame, of `py-spy dump --json --native`.

    Raises ValueError on anything else.
    """
    try:
        return {int(thread["os_thread_id"]): _native(thread["frames"]) for thread in json.loads(text)}
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not the form of py-spy dump --json --native: {error!r}") from error


def parse_pystack(text: str) -> tuple[Stack, ...]:
    """The threads of `pystack remote`, which prints the outermost frame first. Raises ValueError if there are none."""
    found: list[tuple[int, bool, list[Frame]]] = []
    for line in text.splitlines():
        if thread := _PYSTACK_THREAD.match(line):
            found.append((int(thread[1]), "[Has the GIL]" in thread[2], []))
        elif found and (frame := _PYSTACK_FRAME.match(line)):
            found[-1][2].append(Frame(file=frame[1], line=int(frame[2]), function=frame[3]))
    if not found:
        raise ValueError("not the form of pystack remote: no thread in it")
    return tuple(
        Stack(thread="", tid=tid, active=gil, frames=tuple(reversed(frames))[:_MAX_FRAMES], source="pystack", gil=gil)
        for tid, gil, frames in found
    )


def _native(frames: list[dict[str, object]]) -> tuple[str, ...]:
    """Python frames have no module in py-spy's words, native ones name their library."""
    native = takewhile(lambda frame: frame.get("module") is not None, frames)
    named = (f"{_function(str(frame['name']))} ({str(frame['module']).rpartition('/')[2]})" for frame in native)
    return tuple(name[:200] for name, _ in islice(groupby(named), _MAX_NATIVE))


def _function(name: str) -> str:
    """A function without a symbol has an address for a name, and a recursion of such a different one each time."""
    return "?" if name.startswith("0x") else name
