"""Records long waits, and asynchronous collectives whose results the program never waits for.

Most waits for a store key or a collective return at once, and there may be thousands of them. So a call only leaves a
record in memory, and the heartbeat writes a wait to the status file if it lasts long enough.
"""

from __future__ import annotations

import _thread
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from .. import protocol
from .chains import Chains
from .patches import TroubleLog, patch
from .places import frame_place, innermost, is_own
from .status_file import CurrentCall, StatusFileWriter
from .step_times import StepTimes

LASTING_NS = 200_000_000  # waits of this length or longer are written
SETTERS = ("set", "add", "append", "compare_set", "queue_push")
STORE_METHODS = ("get", "multi_get", "wait", "queue_pop", "barrier")
# Methods of a handle that show when the collective has finished, or that pass the handle on to code which checks it.
QUERY_METHODS = (
    "block_current_stream", "boxed", "exception", "get_future", "get_future_result", "is_completed", "is_success",
    "result", "synchronize",
)  # fmt: skip
HANDLES_LIMIT = 4096  # latest living handles for which the call is remembered
ELLIPSIS = "..."


class Handle:
    """An asynchronous handle, described by the collective call that returned it."""

    __slots__ = ("dtype", "elements", "group", "line", "op", "peer")

    def __init__(
        self,
        op: str,
        group: int = 0,
        elements: int = 0,
        dtype: int = 0,
        peer: int = -1,
        line: CallingLine | None = None,
    ) -> None:
        self.op = op
        self.line = line
        self.group = group
        self.elements = elements
        self.dtype = dtype
        self.peer = peer


class OngoingWait:
    """A call in progress that could block: the collective call around it, or 0, and its store keys, or None."""

    __slots__ = ("began_ns", "handle", "keys", "number", "outer", "thread")

    def __init__(self, handle: Handle, keys: Any, outer: int, thread: int = 0) -> None:
        self.began_ns = time.monotonic_ns()
        self.handle = handle
        self.keys = keys
        self.outer = outer
        self.thread = thread
        self.number = 0  # the call's number in the status file, once the wait has lasted


class Waits:
    """A record of the calls in progress that could block, and of asynchronous collectives' handles."""

    def __init__(
        self,
        status_file: StatusFileWriter,
        foreign: tuple[str, ...],
        trouble: TroubleLog,
        step_times: StepTimes | None = None,
    ) -> None:
        self._status_file = status_file
        self.trouble = trouble
        self.step_times = step_times  # counts the waits of the main thread; None = nothing counts them
        self._own_thread = _thread.get_ident()
        self.foreign = foreign
        self._ongoing: dict[int, OngoingWait] = {}  # thread id -> the thread's outermost call that may block
        self._handles: dict[int, tuple[Callable[[], Any], Handle]] = {}
        self.current_call = CurrentCall()
        self.unwaited = UnwaitedHandles(status_file, foreign)

    def remember(self, work: Any, handle: Handle) -> None:
        """Remember that torch returned the object `work` from the call described by `handle`."""
        key = id(work)

        def forget(reference: Any) -> None:
            entry = self._handles.get(key)
            if entry is not None and entry[0] is reference:
                del self._handles[key]

        if len(self._handles) >= HANDLES_LIMIT:
            self._forget_oldest()
        self._handles[key] = (weakref.ref(work, forget), handle)

    def handle_of(self, work: Any) -> Handle:
        """Return the handle recorded for `work`, or an empty `Handle` if there is none."""
        entry = self._handles.get(id(work))
        return entry[1] if entry is not None and entry[0]() is work else Handle("collective")

    def note_query(self, work: Any) -> Handle:
        """Record that the program checks or waits for `work`, and return its handle."""
        handle = self.handle_of(work)
        if handle.line is not None:
            handle.line.was_queried = True
        return handle

    def _forget_oldest(self) -> None:
        """Forget the oldest handle, and treat it as queried, because a later query could not be detected."""
        _, oldest = self._handles.pop(next(iter(self._handles)))
        if oldest.line is not None:
            oldest.line.was_queried = True

    def begin(self, handle: Handle, keys: Any) -> OngoingWait | None:
        """Record that this thread begins a call that can block, for `keys` or a collective, or return None."""
        thread = _thread.get_ident()
        if thread in self._ongoing:
            return None
        self._ongoing[thread] = wait = OngoingWait(handle, keys, self.current_call.state[0], thread)
        return wait

    def end(self, wait: OngoingWait | None, *_: Any) -> None:
        """Record that a call that can block has returned or raised an exception."""
        if wait is not None:
            del self._ongoing[wait.thread]
            if self.step_times is not None and wait.thread == self._own_thread and not wait.outer:
                self.step_times.waited_ns += time.monotonic_ns() - wait.began_ns
            if wait.number:
                self.trouble.attempt("waits", lambda: self._write_end(wait))

    def write_lasting(self) -> None:
        """Write the waits that have already lasted long to the status file.

        A wait inside a collective is written as the awaited key of this collective's call. Any other wait is written as
        a separate call.
        """
        now = time.monotonic_ns()
        for thread, wait in list(self._ongoing.items()):
            if wait.number or now - wait.began_ns < LASTING_NS:
                continue
            key = self._status_file.string_number(key_text(wait.keys)) if wait.keys is not None else 0
            if wait.outer:
                wait.number = wait.outer
                self._status_file.write_awaited_key(wait.outer, key)
            else:
                wait.number = self._enter(thread, wait, key)
            if self._ongoing.get(thread) is not wait:
                self._write_end(wait)

    def _enter(self, thread: int, wait: OngoingWait, key: int) -> int:
        status_file, handle = self._status_file, wait.handle
        place = frame_place(innermost(sys._current_frames().get(thread), self.foreign))
        return status_file.enter_call(
            status_file.string_number(protocol.WAIT + handle.op),
            handle.group,
            status_file.string_number(place),
            handle.elements,
            handle.dtype,
            key=key,
            peer=handle.peer,
            entered_ns=wait.began_ns,
        )

    def _write_end(self, wait: OngoingWait) -> None:
        if wait.outer:
            self._status_file.write_awaited_key(wait.outer, 0)
        else:
            self._status_file.leave_call(wait.number)


# Patches of stores and handles.


def watch_stores(c10d: Any, waits: Waits) -> None:
    """Patch the stores of torch.distributed to record when a thread waits for a key."""
    for name in STORE_METHODS:
        if hasattr(c10d.Store, name):
            patch(c10d.Store, name, "store waits", waits.trouble, before=_store_wait(waits, name), after=waits.end)


def _store_wait(waits: Waits, name: str) -> Callable[[Any, Any], OngoingWait | None]:
    handle = Handle(f"store.{name}")

    def begin(arguments: Any, options: Any) -> OngoingWait | None:
        return waits.begin(handle, arguments[1] if len(arguments) > 1 else next(iter(options.values()), ""))

    return begin


def watch_keys(c10d: Any, status_file: StatusFileWriter, foreign: tuple[str, ...], trouble: TroubleLog) -> None:
    """Patch torch.distributed stores to record which lines of the program set keys."""
    keys = _Keys(status_file, foreign)

    def after_set(_state: object, arguments: Any, options: Any, _result: Any, error: BaseException | None) -> None:
        if error is None:
            keys.note(sys._getframe(2), arguments[1] if len(arguments) > 1 else options.get("key"))

    for name in SETTERS:
        if hasattr(c10d.Store, name):
            patch(c10d.Store, name, "store keys", trouble, after=after_set)


class _Keys:
    """A record of which lines of the program set which store keys."""

    def __init__(self, status_file: StatusFileWriter, foreign: tuple[str, ...]) -> None:
        self._status_file = status_file
        self._foreign = foreign
        self._chains = Chains(status_file, foreign)
        self._counts: dict[int, int] = {}  # node of the calling line -> its calls, in the order of their slots

    def note(self, caller: Any, key: object) -> None:
        if caller.f_code.co_filename.startswith(self._foreign):
            return
        chain = self._chains.find(caller).node
        if chain and (chain in self._counts or len(self._counts) < protocol.KEYS):
            self._counts[chain] = count = self._counts.get(chain, 0) + 1
            slot = list(self._counts).index(chain)
            self._status_file.write_key(slot, count, chain, str(key).encode("utf-8", "replace"))


def watch_handles(c10d: Any, waits: Waits, is_compiling: Callable[[], bool]) -> None:
    """Patch `work.wait()` and similar methods, outside of collectives, to record which handles are used."""

    def begin(arguments: Any, _options: Any) -> OngoingWait | None:
        return None if waits.current_call.state[0] else waits.begin(waits.note_query(arguments[0]), None)

    def query(arguments: Any, _options: Any) -> None:
        waits.note_query(arguments[0])

    patch(c10d.Work, "wait", "handles", waits.trouble, before=begin, after=waits.end, unless=is_compiling)
    for name in QUERY_METHODS:
        if hasattr(c10d.Work, name):
            patch(c10d.Work, name, "handles", waits.trouble, before=query, unless=is_compiling)


def key_text(keys: Any) -> str:
    """Return store keys as one string that fits into the status file. Of a long key, only the end is kept."""
    names = [str(name) for name in (keys if isinstance(keys, (list, tuple)) else (keys,))]
    return ",".join(_shorten(names))


def _shorten(names: list[str]) -> Iterator[str]:
    bytes_left = protocol.STRING_LIMIT - len(ELLIPSIS) - 1
    for number, name in enumerate(names):
        data = name.encode("utf-8", "replace")
        if len(data) > bytes_left:
            # The limit is in bytes, but a character is never cut in two.
            yield ELLIPSIS if number else ELLIPSIS + data[-bytes_left:].decode("utf-8", "ignore")
            return
        yield name
        bytes_left -= len(data) + 1


# Handles that are never queried. The program may read the result of such a collective before it is complete. Handles
# are counted per line that calls the collective. If a program waits for some handles of a line, it may have a reason
# not to wait for the others. If it queries no handle of a line, that is a mistake. Only lines of the program count,
# because torch passes its own handles on to C++.

MIN_UNWAITED = 3  # a program may exit with fewer unwaited handles of a line than this
LINES_LIMIT = 256
NO_PEER = -1  # unknown root
# Operations with a result on every rank, on every rank except the root, and on the root only. A rank that only sends
# (isend) gets no result, and a barrier has no result.
TO_ALL = frozenset({
    "_all_gather_base", "_reduce_scatter_base", "all_gather", "all_gather_coalesced", "all_gather_into_tensor",
    "all_gather_single", "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "irecv",
    "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor",
})  # fmt: skip
FROM_ROOT = frozenset({"broadcast", "scatter"})
TO_ROOT = frozenset({"gather", "reduce"})


class CallingLine:
    """A line that calls a collective asynchronously, its calls, and whether the program has queried a handle."""

    __slots__ = ("calls", "op", "place", "was_queried")

    def __init__(self, op: str, place: str) -> None:
        self.op = op
        self.place = place  # "" = a line that must not be reported
        self.calls = 0
        self.was_queried = False  # the program has queried a handle of this line


class UnwaitedHandles:
    """A search for lines whose asynchronous collectives are never waited for. It keeps no handle alive."""

    def __init__(self, status_file: StatusFileWriter, foreign: tuple[str, ...]) -> None:
        self._status_file = status_file
        self._foreign = foreign
        self._lines: dict[tuple[Any, int, str], CallingLine] = {}

    def count_handle(self, op: str, peer: int, frame: Any, tensors: Any) -> CallingLine | None:
        """Count an asynchronous handle for the line in `frame`. Return the line, or None if it does not count."""
        if not (
            op in TO_ALL
            or (op in FROM_ROOT and peer not in (self._status_file.rank, NO_PEER))
            or (op in TO_ROOT and peer == self._status_file.rank)
        ):
            return None
        key = (frame.f_code, frame.f_lasti, op)
        line = self._lines.get(key)
        if line is None:
            if len(self._lines) >= LINES_LIMIT:
                return None
            line = self._lines[key] = CallingLine(op, self._place(frame, tensors))
        line.calls += 1
        return line

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield one record for each line whose asynchronous handles the program never waited for."""
        for line in self._lines.values():
            if line.place and not line.was_queried and line.calls >= MIN_UNWAITED:
                yield {"at": "unwaited", "op": line.op, "place": line.place, "calls": line.calls}

    def _place(self, frame: Any, tensors: Any) -> str:
        """Return the line of the program in `frame`, or "" if this line must not be reported.

        Lines outside the program are not reported, and neither are collectives on device tensors: the program may wait
        for the stream instead of the handle.
        """
        is_reported = is_own(frame.f_code.co_filename, self._foreign) and all(map(_on_host, tensors))
        return frame_place(frame) if is_reported else ""


def _on_host(tensor: Any) -> bool:
    return bool(tensor.device.type == "cpu")
