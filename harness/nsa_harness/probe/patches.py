"""Patches functions of Python and torch to observe calls to them.

`patch` is the only code of the probe that comes between a caller and a function of Python or torch. This module imports
only `os`, `sys` and `time`, because it is loaded in every Python process of a run.
"""

from __future__ import annotations

import os
import sys
import time

from .. import protocol

# Importing typing takes longer than importing everything else here, so only type checkers load it.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import TracebackType
    from typing import Any

    Before = Callable[[tuple[Any, ...], dict[str, Any]], object]
    After = Callable[[Any, tuple[Any, ...], dict[str, Any], Any, BaseException | None], object]

REASON_LIMIT = 500  # characters of an error message in the trouble file


class TroubleLog:
    """A log of the instrumentation's parts that have failed in this process."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._failed_pieces: set[str] = set()

    def note(self, piece: str, error: BaseException) -> None:
        """Record the first error of the part of the instrumentation named `piece`, if the file can be written."""
        if piece in self._failed_pieces:
            return
        self._failed_pieces.add(piece)
        try:
            import json

            reason = f"{type(error).__name__}: {error}"[:REASON_LIMIT]
            line = json.dumps({"piece": piece, "error": reason, "at_ns": time.monotonic_ns()})
            path = os.path.join(self._directory, protocol.TROUBLE.format(pid=os.getpid()))
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                os.write(descriptor, (line + "\n").encode("utf-8", "replace"))
            finally:
                os.close(descriptor)
        except (OSError, ImportError, ValueError):
            return

    def attempt(self, piece: str, do: Callable[[], object]) -> bool:
        """Call `do` and return whether it succeeded. An exception is recorded under the name `piece`."""
        try:
            do()
        except Exception as error:
            self.note(piece, error)
            return False
        return True


def patch(
    owner: Any,
    name: str,
    piece: str,
    trouble: TroubleLog,
    *,
    before: Before | None = None,
    after: After | None = None,
    unless: Callable[[], bool] | None = None,
    also: Iterable[Any] = (),
) -> None:
    """Replace `owner.name` with a function that observes its calls without changing them.

    A call runs `before(arguments, options)`, then the original exactly once with the same arguments, then `after(state,
    arguments, options, result, error)`. `state` is the return value of `before`. If the original returned, `error` is
    None; if it raised, `result` is None. The caller gets the original's result or exception. In both callbacks
    `sys._getframe(2)` is the caller's frame.

    If a callback raises, the exception is recorded under the name `piece`, and from then on the patch only calls the
    original. `unless` is called first; if it returns True (torch.compile is tracing), only the original runs. `also`
    lists further namespaces in which the same function is replaced by the same patch.

    The patch has the name, signature, docstring and attributes of the original, like the result of functools.wraps.
    """
    original = getattr(owner, name)
    is_active = True

    def stop(mistake: Exception) -> None:
        nonlocal is_active
        is_active = False
        trouble.note(piece, mistake)

    def call_original(*arguments: Any, **options: Any) -> Any:
        __tracebackhide__ = True  # for pytest
        if (unless is not None and unless()) or not is_active:
            return original(*arguments, **options)
        state = None
        if before is not None:
            try:
                state = before(arguments, options)
            except Exception as mistake:
                stop(mistake)
                state = _FAILED
        # The original is called outside of any `except`, so its exceptions get no context from the probe.
        try:
            result = original(*arguments, **options)
        except BaseException as error:
            if after is not None and state is not _FAILED:
                try:
                    after(state, arguments, options, None, error)
                except Exception as mistake:
                    stop(mistake)
            raise
        if after is not None and state is not _FAILED:
            try:
                after(state, arguments, options, result, None)
            except Exception as mistake:
                stop(mistake)
        return result

    _replace(owner, name, original, call_original, also)


_FAILED = object()


def before_first_call(
    owner: Any,
    name: str,
    piece: str,
    trouble: TroubleLog,
    do: Callable[[tuple[Any, ...], dict[str, Any]], object],
    *,
    unless: Callable[[], bool] | None = None,
    also: Iterable[Any] = (),
) -> None:
    """Run `do(arguments, options)` just before the first call to `owner.name`.

    The call then continues with the current `owner.name`, because `do` may have patched it. `piece`, `trouble`,
    `unless` and `also` have the same meaning as in `patch`. If other code has wrapped the patch in the meantime, the
    patch cannot be removed. It then stays and only calls the original.
    """
    original = getattr(owner, name)
    is_waiting = True

    def call_original(*arguments: Any, **options: Any) -> Any:
        nonlocal is_waiting
        __tracebackhide__ = True
        if (unless is not None and unless()) or not is_waiting:
            return original(*arguments, **options)
        is_waiting, function = False, original
        try:
            is_restored = restore()
            do(arguments, options)
            if is_restored:
                function = getattr(owner, name)
        except Exception as mistake:
            trouble.note(piece, mistake)
        return function(*arguments, **options)

    restore = _replace(owner, name, original, call_original, also)


_COPIED_ATTRIBUTES = (  # the attributes that functools.wraps copies; many processes have not loaded functools yet
    "__module__",
    "__name__",
    "__qualname__",
    "__doc__",
    "__annotate__" if sys.version_info >= (3, 14) else "__annotations__",
    "__type_params__",
)


def _replace(owner: Any, name: str, original: Any, replacement: Any, also: Iterable[Any]) -> Callable[[], bool]:
    """Replace `owner.name`, and return a function that restores the original.

    The namespaces in `also` that have the same function are patched too. The returned function skips every namespace
    where other code has wrapped the replacement, and returns True if `owner.name` is the original again.
    """
    for attribute in _COPIED_ATTRIBUTES:
        if hasattr(original, attribute):
            setattr(replacement, attribute, getattr(original, attribute))
    vars(replacement).update(getattr(original, "__dict__", {}))
    replacement.__wrapped__ = original
    targets = [owner, *(space for space in also if getattr(space, name, None) is original)]
    # The flag shows whether the namespace itself defines the function. If not, deleting the patch restores it.
    namespaces = [(space, name in vars(space)) for space in targets]
    for space in targets:
        setattr(space, name, replacement)

    def restore() -> bool:
        is_restored = getattr(owner, name) is replacement
        for space, has_own in namespaces:
            if getattr(space, name) is replacement and has_own:
                setattr(space, name, original)
            elif getattr(space, name) is replacement:
                delattr(space, name)
        return is_restored

    return restore


def compiling_test(torch: Any) -> Callable[[], bool]:
    """Return a function that tells whether torch.compile is tracing, without a trace in the compiled graph."""
    compiler = getattr(torch, "compiler", None)
    return getattr(compiler, "is_compiling", None) or (lambda: False)


# Waiting for imports.

# The probe waits for both modules: torch may import torch.distributed in the middle of its own import, or a program may
# import torch.distributed much later.
AWAITED = ("torch", "torch.distributed")


def after_import(names: Sequence[str], then: Callable[[], None], trouble: TroubleLog) -> None:
    """Call `then` once all modules in `names` have been imported. Until then each import costs one look-up."""
    missing = {name for name in names if name not in sys.modules}
    if not missing:
        then()
        return
    sys.meta_path.insert(0, _ImportWatcher(missing, then, trouble))


class _ImportWatcher:
    """An import finder that patches the loaders of awaited modules, to learn when these have been executed."""

    def __init__(self, missing: set[str], then: Callable[[], None], trouble: TroubleLog) -> None:
        self._missing = missing
        self._then = then
        self._trouble = trouble

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name not in self._missing:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                break
        else:
            return None
        self._trouble.attempt("imports", lambda: self._watch(name, spec.loader))
        return spec

    def _watch(self, name: str, loader: Any) -> None:
        """Patch `loader` to detect when the module `name` has been executed."""
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            del loader.exec_module
            execute(module)
            self._on_import(name)

        loader.exec_module = exec_module

    def _on_import(self, name: str) -> None:
        self._missing.discard(name)
        if self._missing:
            return
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self._then()


# Hiding the probe in tracebacks. A traceback contains every Python function that the exception passed through, and so
# the probe's patches. They are removed when a traceback is rendered: in the module `traceback`, which logging,
# multiprocessing and torchrun use, and when the interpreter prints an uncaught exception. Until then the exception is
# evidence and is not changed.

_PROBE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_WALKS = ("walk_tb", "_walk_tb_with_full_positions")  # both yield tuples with a frame first; the second is new in 3.11
_CAUSES_LIMIT = 32  # exceptions in a chain of causes from which frames are removed


def hide_probe(trouble: TroubleLog) -> None:
    """Hide the probe's frames in printed tracebacks, after torch has imported traceback and threading."""
    rendering: Any = sys.modules["traceback"]
    for name in _WALKS:
        if hasattr(rendering, name):
            setattr(rendering, name, _walk_without_probe(getattr(rendering, name)))
    threads = sys.modules["threading"]
    patch(
        threads,
        "excepthook",
        "tracebacks",
        trouble,
        before=lambda arguments, _: remove_probe_frames(arguments[0].exc_value),
    )


def _walk_without_probe(walk: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """Wrap a generator of the traceback module, so that it skips the probe's frames. `patch` changes no result.

    The first frame is never skipped: pytest asks for one entry of a traceback at a time, and needs an answer.
    """

    def walk_without_probe(traceback: TracebackType | None) -> Iterator[Any]:
        return (item for number, item in enumerate(walk(traceback)) if not number or not _is_probe(item[0]))

    walk_without_probe.__doc__ = walk.__doc__
    return walk_without_probe


def remove_probe_frames(error: BaseException | None) -> None:
    """Remove the instrumentation's frames from the tracebacks of an exception and its causes."""
    for _ in range(_CAUSES_LIMIT):
        if error is None:
            return
        error.__traceback__ = without_probe(error.__traceback__)
        error = error.__cause__ or error.__context__


def without_probe(traceback: TracebackType | None) -> TracebackType | None:
    """Remove the probe's frames from a traceback in place. Return its first entry, or None if none is left."""
    while traceback is not None and _is_probe(traceback.tb_frame):
        traceback = traceback.tb_next
    entry = traceback
    while entry is not None:
        while entry.tb_next is not None and _is_probe(entry.tb_next.tb_frame):
            entry.tb_next = entry.tb_next.tb_next
        entry = entry.tb_next
    return traceback


def _is_probe(frame: Any) -> bool:
    return bool(frame.f_code.co_filename.startswith(_PROBE))
