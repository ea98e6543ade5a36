"""Record waits that last, and asynchronous collectives whose handles the program never queries.

Most waits for a store's key or a collective return at once, and there may be thousands. So a call only leaves a record
in memory, and the heartbeat writes those that have lasted to the status file.
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
from .status_file import Inside, StatusFileWriter

LASTING_NS = 200_000_000
SETTERS = ("set", "add", "append", "compare_set", "queue_push")
STORE_METHODS = ("get", "multi_get", "wait", "queue_pop", "barrier")
# A program that calls one of these on a handle notices the end of the collective, or has another thread do so.
QUESTIONS = (
    "block_current_stream", "boxed", "exception", "get_future", "get_future_result", "is_completed", "is_success",
    "result", "synchronize",
)  # fmt: skip
HANDLES_LIMIT = 4096  # living handles whose call is remembered, the latest ones
ELLIPSIS = "..."


class Handle:
    """The arguments of an asynchronous collective."""

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
    """One call that may block. `outer` is the collective that the call is part of, 0 = none."""

    __slots__ = ("began_ns", "handle", "keys", "number", "outer", "thread")

    def __init__(self, handle: Handle, keys: Any, outer: int, thread: int = 0) -> None:
        self.began_ns = time.monotonic_ns()
        self.handle = handle
        self.keys = keys
        self.outer = outer
        self.thread = thread
        self.number = 0  # the call's number in the status file, once the wait has lasted


class Waits:
    """The waits in progress, by thread, and the handles of asynchronous collectives."""

    def __init__(self, status_file: StatusFileWriter, foreign: tuple[str, ...], trouble: TroubleLog) -> None:
        self._status_file = status_file
        self.trouble = trouble
        self.foreign = foreign
        self._open: dict[int, OngoingWait] = {}  # thread -> its outermost call that may block
        self._handles: dict[int, tuple[Callable[[], Any], Handle]] = {}
        self.inside = Inside()
        self.unwaited = UnwaitedHandles(status_file, foreign)

    def remember(self, work: Any, handle: Handle) -> None:
        """Remember the call that returned the handle `work`, as long as `work` lives."""
        key = id(work)

        def forget(reference: Any) -> None:
            known = self._handles.get(key)
            if known is not None and known[0] is reference:
                del self._handles[key]

        if len(self._handles) >= HANDLES_LIMIT:
            self._forget_oldest()
        self._handles[key] = (weakref.ref(work, forget), handle)

    def handle_of(self, work: Any) -> Handle:
        known = self._handles.get(id(work))
        return known[1] if known is not None and known[0]() is work else Handle("collective")

    def note_query(self, work: Any) -> Handle:
        """Return the handle of `work`, and note that the program queries handles of this line."""
        handle = self.handle_of(work)
        if handle.line is not None:
            handle.line.asked = True
        return handle

    def _forget_oldest(self) -> None:
        """Drop the oldest handle. A later wait for it will not be seen, so its line counts as queried."""
        _, oldest = self._handles.pop(next(iter(self._handles)))
        if oldest.line is not None:
            oldest.line.asked = True

    def begin(self, handle: Handle, keys: Any) -> OngoingWait | None:
        """Note that this thread makes a call that may block; None inside another such call."""
        thread = _thread.get_ident()
        if thread in self._open:
            return None
        self._open[thread] = wait = OngoingWait(handle, keys, self.inside.call[0], thread)
        return wait

    def end(self, wait: OngoingWait | None, *_: Any) -> None:
        """Note that the call has returned or raised. Has the parameters of a patch's `after`."""
        if wait is not None:
            del self._open[wait.thread]
            if wait.number:
                self.trouble.attempt("waits", lambda: self._write_end(wait))

    def write_lasting(self) -> None:
        """Write waits that have lasted as calls, or as the key of the call they are part of. Run by the heartbeat."""
        now = time.monotonic_ns()
        for thread, wait in list(self._open.items()):
            if wait.number or now - wait.began_ns < LASTING_NS:
                continue
            key = self._status_file.string(key_text(wait.keys)) if wait.keys is not None else 0
            if wait.outer:
                wait.number = wait.outer
                self._status_file.call_waits_for(wait.outer, key)
            else:
                wait.number = self._enter(thread, wait, key)
            if self._open.get(thread) is not wait:
                self._write_end(wait)

    def _enter(self, thread: int, wait: OngoingWait, key: int) -> int:
        status_file, handle = self._status_file, wait.handle
        place = frame_place(innermost(sys._current_frames().get(thread), self.foreign))
        return status_file.enter_call(
            status_file.string(protocol.WAIT + handle.op),
            handle.group,
            status_file.string(place),
            handle.elements,
            handle.dtype,
            key=key,
            peer=handle.peer,
            entered_ns=wait.began_ns,
        )

    def _write_end(self, wait: OngoingWait) -> None:
        if wait.outer:
            self._status_file.call_waits_for(wait.outer, 0)
        else:
            self._status_file.leave_call(wait.number)


# What is patched.


def watch_stores(c10d: Any, waits: Waits) -> None:
    """Patch the blocking methods of torch's one store class in C++, from which every kind of store inherits them."""
    for name in STORE_METHODS:
        if hasattr(c10d.Store, name):
            patch(c10d.Store, name, "store waits", waits.trouble, before=_store_wait(waits, name), after=waits.end)


def _store_wait(waits: Waits, name: str) -> Callable[[Any, Any], OngoingWait | None]:
    handle = Handle(f"store.{name}")

    def begin(arguments: Any, options: Any) -> OngoingWait | None:
        return waits.begin(handle, arguments[1] if len(arguments) > 1 else next(iter(options.values()), ""))

    return begin


def watch_keys(c10d: Any, status_file: StatusFileWriter, foreign: tuple[str, ...], trouble: TroubleLog) -> None:
    """Patch the store's setters: which lines of the program, not of torch, set keys, and each line's latest key."""
    keys = _Keys(status_file, foreign)

    def was_set(_state: object, arguments: Any, options: Any, _result: Any, error: BaseException | None) -> None:
        if error is None:
            keys.note(sys._getframe(2), arguments[1] if len(arguments) > 1 else options.get("key"))

    for name in SETTERS:
        if hasattr(c10d.Store, name):
            patch(c10d.Store, name, "store keys", trouble, after=was_set)


class _Keys:
    def __init__(self, status_file: StatusFileWriter, foreign: tuple[str, ...]) -> None:
        self._status_file = status_file
        self._foreign = foreign
        self._chains = Chains(status_file, foreign)
        self._counts: dict[int, int] = {}  # node of the caller chain -> its calls; the order is that of the slots

    def note(self, caller: Any, key: object) -> None:
        if caller.f_code.co_filename.startswith(self._foreign):
            return
        chain = self._chains.of(caller).node
        if chain and (chain in self._counts or len(self._counts) < protocol.KEYS):
            self._counts[chain] = count = self._counts.get(chain, 0) + 1
            slot = list(self._counts).index(chain)
            self._status_file.key_set(slot, count, chain, str(key).encode("utf-8", "replace"))


def watch_handles(c10d: Any, waits: Waits, is_compiling: Callable[[], bool]) -> None:
    """Patch `work.wait()` and the other methods by which a program queries a handle.

    torch's own `work.wait()` inside a collective counts as part of that collective.
    """

    def begin(arguments: Any, _options: Any) -> OngoingWait | None:
        return None if waits.inside.call[0] else waits.begin(waits.note_query(arguments[0]), None)

    def query(arguments: Any, _options: Any) -> None:
        waits.note_query(arguments[0])

    patch(c10d.Work, "wait", "handles", waits.trouble, before=begin, after=waits.end, unless=is_compiling)
    for name in QUESTIONS:
        if hasattr(c10d.Work, name):
            patch(c10d.Work, name, "handles", waits.trouble, before=query, unless=is_compiling)


def key_text(keys: Any) -> str:
    """Return the keys that fit into a string of the status file, joined. Of a long key only the end remains.

    The end of a key often names the rank.
    """
    names = [str(name) for name in (keys if isinstance(keys, (list, tuple)) else (keys,))]
    return ",".join(_fitting(names))


def _fitting(names: list[str]) -> Iterator[str]:
    left = protocol.STRING_LIMIT - len(ELLIPSIS) - 1
    for number, name in enumerate(names):
        data = name.encode("utf-8", "replace")
        if len(data) > left:
            # Cut by bytes, but never inside a character.
            yield ELLIPSIS if number else ELLIPSIS + data[-left:].decode("utf-8", "ignore")
            return
        yield name
        left -= len(data) + 1


# Handles that are never queried: the program may read the result before it has arrived. They are counted per line that
# calls the collective. A line that waits for some of its handles has a reason not to wait for the rest, but a line that
# queries no handle is a mistake. Only lines of the program count: torch passes its own handles on to C++.

FEW = 3  # unwaited handles of a line that a program may leave when it ends
LINES_LIMIT = 256
NOBODY = -1  # unknown root
# Operations with a result on every rank, on all ranks but the root, and on the root only. A rank that only sends
# (isend) reads no result, and a barrier has none.
TO_ALL = frozenset({
    "_all_gather_base", "_reduce_scatter_base", "all_gather", "all_gather_coalesced", "all_gather_into_tensor",
    "all_gather_single", "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "irecv",
    "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor",
})  # fmt: skip
FROM_ROOT = frozenset({"broadcast", "scatter"})
TO_ROOT = frozenset({"gather", "reduce"})


class CallingLine:
    """One line of the program that calls a collective asynchronously."""

    __slots__ = ("asked", "calls", "op", "place")

    def __init__(self, op: str, place: str) -> None:
        self.op = op
        self.place = place  # "" = not to be reported
        self.calls = 0
        self.asked = False  # the program has queried a handle of this line


class UnwaitedHandles:
    """The program's lines that call collectives asynchronously. Has no reference to a handle."""

    def __init__(self, status_file: StatusFileWriter, foreign: tuple[str, ...]) -> None:
        self._status_file = status_file
        self._foreign = foreign
        self._lines: dict[tuple[Any, int, str], CallingLine] = {}

    def count_handle(self, op: str, peer: int, frame: Any, tensors: Any) -> CallingLine | None:
        """Count a handle that `op` returned to `frame`, and return the calling line.

        Return None if this rank gets no result from the operation.
        """
        if not (
            op in TO_ALL
            or (op in FROM_ROOT and peer not in (self._status_file.rank, NOBODY))
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
        for line in self._lines.values():
            if line.place and not line.asked and line.calls >= FEW:
                yield {"at": "unwaited", "op": line.op, "place": line.place, "calls": line.calls}

    def _place(self, frame: Any, tensors: Any) -> str:
        """Return the program's line, or "" for tensors on a device: there a later wait for the stream may cover it."""
        is_reported = is_own(frame.f_code.co_filename, self._foreign) and all(map(_on_host, tensors))
        return frame_place(frame) if is_reported else ""


def _on_host(tensor: Any) -> bool:
    return bool(tensor.device.type == "cpu")
