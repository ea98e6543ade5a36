"""Waits that last: a key of a store that nobody sets, an asynchronous collective that does not complete.

Most such calls return at once, and there may be thousands. So a call only leaves a note of itself in memory, and the
beat writes down those that have lasted.
"""

from __future__ import annotations

import _thread
import functools
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from .. import protocol
from .chains import Chains
from .places import innermost, place_text
from .status_file import Inside, StatusFileWriter
from .trouble import TroubleLog
from .unwaited import CallingLine, Unwaited

LASTING_NS = 200_000_000
SETTERS = ("set", "add", "append", "compare_set", "queue_push")
STORE_METHODS = ("get", "multi_get", "wait", "queue_pop", "barrier")
# Who asks a handle for one of these wants to know of its end, or has somebody else see to it.
ASKED = (
    "block_current_stream",
    "boxed",
    "exception",
    "get_future",
    "get_future_result",
    "is_completed",
    "is_success",
    "result",
    "synchronize",
)
REMEMBERED = 4096  # handles that are out; a program that keeps more loses the names of the oldest
ELLIPSIS = "..."


class Handle:
    """What an asynchronous collective was called with."""

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
    """One call that may block. `outer` is the collective it is part of, 0 = none."""

    __slots__ = ("began_ns", "handle", "keys", "number", "outer")

    def __init__(self, handle: Handle, keys: Any, outer: int) -> None:
        self.began_ns = time.monotonic_ns()
        self.handle = handle
        self.keys = keys
        self.outer = outer
        self.number = 0  # of the call on the board, once the wait has lasted


class Waits:
    def __init__(self, board: StatusFileWriter, foreign: tuple[str, ...], trouble: TroubleLog) -> None:
        self._board = board
        self._trouble = trouble
        self.foreign = foreign
        self._open: dict[int, OngoingWait] = {}  # by thread
        self._handles: dict[int, tuple[Callable[[], Any], Handle]] = {}
        self.inside = Inside()
        self.unwaited = Unwaited(board, foreign)

    def remember(self, work: Any, handle: Handle) -> None:
        """`work` is the handle of this call. It is known as long as it lives."""
        key = id(work)

        def forget(reference: Any) -> None:
            known = self._handles.get(key)
            if known is not None and known[0] is reference:
                del self._handles[key]

        if len(self._handles) >= REMEMBERED:
            self._forget_oldest()
        self._handles[key] = (weakref.ref(work, forget), handle)

    def handle_of(self, work: Any) -> Handle:
        known = self._handles.get(id(work))
        return known[1] if known is not None and known[0]() is work else Handle("collective")

    def asked(self, work: Any) -> Handle:
        """Somebody wants to know of the end of `work`, and so of what else its line hands out."""
        handle = self.handle_of(work)
        if handle.line is not None:
            handle.line.asked = True
        return handle

    def _forget_oldest(self) -> None:
        """Whether that one will be waited for is not seen any more."""
        _, oldest = self._handles.pop(next(iter(self._handles)))
        if oldest.line is not None:
            oldest.line.asked = True

    def during(self, handle: Handle, keys: Any, call: Callable[[], Any]) -> Any:
        """Run `call`, which may block. Only the outermost wait of a thread counts."""
        thread = _thread.get_ident()
        if thread in self._open:
            return call()
        self._open[thread] = wait = OngoingWait(handle, keys, self.inside.call[0])
        try:
            return call()
        finally:
            del self._open[thread]
            if wait.number:
                self._trouble.attempt("waits", lambda: self._over(wait))

    def write_down(self) -> None:
        """From the beat: those that have lasted become calls on the board, or the key of the call they are part of."""
        now = time.monotonic_ns()
        for thread, wait in list(self._open.items()):
            if wait.number or now - wait.began_ns < LASTING_NS:
                continue
            key = self._board.string(key_text(wait.keys)) if wait.keys is not None else 0
            if wait.outer:
                wait.number = wait.outer
                self._board.call_waits_for(wait.outer, key)
            else:
                wait.number = self._enter(thread, wait, key)
            if self._open.get(thread) is not wait:
                self._over(wait)

    def _enter(self, thread: int, wait: OngoingWait, key: int) -> int:
        board, handle = self._board, wait.handle
        frame = innermost(sys._current_frames().get(thread), self.foreign)
        place = place_text(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) if frame is not None else ""
        return board.enter_call(
            board.string(protocol.WAIT + handle.op),
            handle.group,
            board.string(place),
            handle.elements,
            handle.dtype,
            key=key,
            peer=handle.peer,
            entered_ns=wait.began_ns,
        )

    def _over(self, wait: OngoingWait) -> None:
        if wait.outer:
            self._board.call_waits_for(wait.outer, 0)
        else:
            self._board.leave_call(wait.number)


def watch_stores(c10d: Any, waits: Waits) -> None:
    """Every kind of store inherits its waits from one class of C++, whose methods can be covered."""
    for name in STORE_METHODS:
        method = getattr(c10d.Store, name, None)
        if method is not None:
            setattr(c10d.Store, name, _covered_store(waits, Handle(f"store.{name}"), method))


def watch_keys(c10d: Any, board: StatusFileWriter, foreign: tuple[str, ...], trouble: TroubleLog) -> None:
    """Which lines of the program set keys of a store, and the newest key of each; not what torch sets itself."""
    keys = _Keys(board, foreign)

    def covered(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def setter(self: Any, *arguments: Any, **options: Any) -> Any:
            done, caller = method(self, *arguments, **options), sys._getframe(1)
            trouble.attempt("store keys", lambda: keys.note(caller, arguments[0] if arguments else options.get("key")))
            return done

        return setter

    for name in SETTERS:
        method = getattr(c10d.Store, name, None)
        if method is not None:
            setattr(c10d.Store, name, covered(method))


class _Keys:
    def __init__(self, board: StatusFileWriter, foreign: tuple[str, ...]) -> None:
        self._board = board
        self._foreign = foreign
        self._chains = Chains(board, foreign)
        self._counts: dict[int, int] = {}  # by chain, in the order of their slots

    def note(self, caller: Any, key: object) -> None:
        if caller.f_code.co_filename.startswith(self._foreign):
            return
        chain = self._chains.of(caller).node
        if chain and (chain in self._counts or len(self._counts) < protocol.KEYS):
            self._counts[chain] = count = self._counts.get(chain, 0) + 1
            slot = list(self._counts).index(chain)
            self._board.key_set(slot, count, chain, str(key).encode("utf-8", "replace"))


def watch_handles(c10d: Any, waits: Waits, is_compiling: Callable[[], bool]) -> None:
    """`work.wait()` as the program calls it; torch's own calls inside a collective are part of that collective."""
    method = c10d.Work.wait

    @functools.wraps(method)
    def wait(self: Any, *arguments: Any, **options: Any) -> Any:
        if is_compiling() or waits.inside.call[0]:
            return method(self, *arguments, **options)
        return waits.during(waits.asked(self), None, lambda: method(self, *arguments, **options))

    c10d.Work.wait = wait
    for name in ASKED:
        if hasattr(c10d.Work, name):
            setattr(c10d.Work, name, _covered_question(waits, getattr(c10d.Work, name), is_compiling))


def _covered_question(waits: Waits, method: Callable[..., Any], is_compiling: Callable[[], bool]) -> Callable[..., Any]:
    @functools.wraps(method)
    def question(self: Any, *arguments: Any, **options: Any) -> Any:
        if not is_compiling():
            waits.asked(self)
        return method(self, *arguments, **options)

    return question


def key_text(keys: Any) -> str:
    """As many keys as the board keeps whole. Of a long one the end stays: there stands whom a rendezvous waits for."""
    names = [str(name) for name in (keys if isinstance(keys, (list, tuple)) else (keys,))]
    return ",".join(_whole(names))


def _whole(names: list[str]) -> Iterator[str]:
    left = protocol.STRING_LIMIT - len(ELLIPSIS) - 1
    for number, name in enumerate(names):
        data = name.encode("utf-8", "replace")
        if len(data) > left:
            # Counted in bytes, and never from the middle of a character.
            yield ELLIPSIS if number else ELLIPSIS + data[-left:].decode("utf-8", "ignore")
            return
        yield name
        left -= len(data) + 1


def _covered_store(waits: Waits, handle: Handle, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def covered(self: Any, *arguments: Any, **options: Any) -> Any:
        keys = arguments[0] if arguments else next(iter(options.values()), "")
        return waits.during(handle, keys, lambda: method(self, *arguments, **options))

    return covered
