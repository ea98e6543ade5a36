"""The probe's way into a program: it patches functions, waits for imports, and notes its own failures.

`patch` is the only code of the probe that puts itself between a caller and a function of Python or torch. Nothing here
imports more than `os`, `sys` and `time`: it is loaded in every Python process of a run.
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

REASON_LIMIT = 500  # characters of an error in the trouble file


class TroubleLog:
    """The file in which the probe of one process notes the pieces that failed."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._noted: set[str] = set()

    def note(self, piece: str, error: BaseException) -> None:
        """Append one line the first time that `piece` fails. If the file cannot be written, the line is lost."""
        if piece in self._noted:
            return
        self._noted.add(piece)
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
        """Call `do`, note an exception under the name `piece`, and return whether there was none."""
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
    """Replace `owner.name` by a function that watches its calls and changes none of them.

    A call runs `before(arguments, options)`, then the original exactly once with the same arguments, then
    `after(state, arguments, options, result, error)`, where `state` is what `before` returned and one of `result` and
    `error` is None. The caller gets the original's result or exception. In both callbacks `sys._getframe(2)` is the
    caller's frame.

    If a callback raises, the exception is noted under the name `piece` and the patch only calls the original from then
    on. `unless` is called first: if it returns True (torch.compile is tracing), only the original runs. `also`: further
    namespaces in which the same function is replaced by the same patch.

    The patch has the name, signature, documentation and attributes of the original, as functools.wraps gives them.
    """
    original = getattr(owner, name)
    works = True

    def stop(mistake: Exception) -> None:
        nonlocal works
        works = False
        trouble.note(piece, mistake)

    def patched(*arguments: Any, **options: Any) -> Any:
        if (unless is not None and unless()) or not works:
            return original(*arguments, **options)
        state = None
        if before is not None:
            try:
                state = before(arguments, options)
            except Exception as mistake:
                stop(mistake)
                state = _FAILED
        # The original is called outside of any `except`, so that its exceptions get no context of the probe's.
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

    _replace(owner, name, original, patched, also)


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
    """Call `do(arguments, options)` at the first call of `owner.name`, after the original was put back.

    Then call what `owner.name` is now, since `do` may have patched it. The parameters are those of `patch`. If other
    code has wrapped the patch in the meantime, it stays, and only calls the original from then on.
    """
    original = getattr(owner, name)
    waits = True

    def patched(*arguments: Any, **options: Any) -> Any:
        nonlocal waits
        if (unless is not None and unless()) or not waits:
            return original(*arguments, **options)
        waits, function = False, original
        try:
            is_back = put_back()
            do(arguments, options)
            if is_back:
                function = getattr(owner, name)
        except Exception as mistake:
            trouble.note(piece, mistake)
        return function(*arguments, **options)

    put_back = _replace(owner, name, original, patched, also)


_COPIED_ATTRIBUTES = (  # those of functools.wraps; many processes have not loaded functools yet
    "__module__",
    "__name__",
    "__qualname__",
    "__doc__",
    "__annotate__" if sys.version_info >= (3, 14) else "__annotations__",
    "__type_params__",
)


def _replace(owner: Any, name: str, original: Any, patched: Any, also: Iterable[Any]) -> Callable[[], bool]:
    """Replace `owner.name` by its patch, also in those namespaces of `also` that have the same function.

    Return a function that puts the original back wherever no other code has wrapped the patch, and that returns whether
    `owner.name` is the original again.
    """
    for attribute in _COPIED_ATTRIBUTES:
        if hasattr(original, attribute):
            setattr(patched, attribute, getattr(original, attribute))
    vars(patched).update(getattr(original, "__dict__", {}))
    patched.__wrapped__ = original
    spaces = [owner, *(space for space in also if getattr(space, name, None) is original)]
    # Whether a namespace defines the function itself: an inherited function is put back by deleting the patch.
    places = [(space, name in vars(space)) for space in spaces]
    for space in spaces:
        setattr(space, name, patched)

    def put_back() -> bool:
        is_back = getattr(owner, name) is patched
        for space, has_own in places:
            if getattr(space, name) is patched and has_own:
                setattr(space, name, original)
            elif getattr(space, name) is patched:
                delattr(space, name)
        return is_back

    return put_back


def compiling_test(torch: Any) -> Callable[[], bool]:
    """Return torch.compiler.is_compiling, or a function that returns False in a torch without it.

    torch.compile replaces a call of is_compiling by True, so a patch that calls it first adds nothing to a graph.
    """
    compiler = getattr(torch, "compiler", None)
    return getattr(compiler, "is_compiling", None) or (lambda: False)


# Waiting for imports.

# torch imports torch.distributed in the middle of its own import, and some programs import torch.distributed much
# later: the probe waits for both.
AWAITED = ("torch", "torch.distributed")


def after_import(names: Sequence[str], then: Callable[[], None], trouble: TroubleLog) -> None:
    """Call `then` once all modules are imported: now, or at the end of the import that completes them.

    Costs one look-up in a set per imported module until then, and nothing afterwards.
    """
    missing = {name for name in names if name not in sys.modules}
    if not missing:
        then()
        return
    sys.meta_path.insert(0, _ImportWatcher(missing, then, trouble))


class _ImportWatcher:
    """An import finder that patches the loader which the other finders return for an awaited module."""

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
        """Patch exec_module of the loader, which loads only this module, for one call."""
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            del loader.exec_module
            execute(module)
            self._arrived(name)

        loader.exec_module = exec_module

    def _arrived(self, name: str) -> None:
        self._missing.discard(name)
        if self._missing:
            return
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self._then()


# Hiding the probe in tracebacks. Every Python function that an exception passes is in its traceback, so the probe's
# patches are, too. They are removed where a traceback is rendered: in the module `traceback`, which logging,
# multiprocessing and torchrun use, and where the interpreter prints an uncaught exception. Until then the exception is
# evidence and is not changed.

_PROBE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_WALKS = ("walk_tb", "_walk_tb_with_full_positions")  # each yields the frame first; the second exists since 3.11
_CAUSES_LIMIT = 32


def hide_probe(trouble: TroubleLog) -> None:
    """Remove the probe's frames from printed tracebacks. Call it after torch has imported traceback and threading."""
    rendering: Any = sys.modules["traceback"]
    for name in _WALKS:
        if hasattr(rendering, name):
            setattr(rendering, name, _without_probe(getattr(rendering, name)))
    threads = sys.modules["threading"]
    patch(threads, "excepthook", "tracebacks", trouble, before=lambda arguments, _: leave_out(arguments[0].exc_value))


def _without_probe(walk: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """Return `walk` without the probe's frames. This replacement changes a result, so `patch` cannot do it."""

    def walk_without_probe(traceback: TracebackType | None) -> Iterator[Any]:
        return (item for item in walk(traceback) if not _is_probe(item[0]))

    walk_without_probe.__doc__ = walk.__doc__
    return walk_without_probe


def leave_out(error: BaseException | None) -> None:
    """Remove the probe's frames from an exception that no code will catch, and from its causes."""
    for _ in range(_CAUSES_LIMIT):
        if error is None:
            return
        error.__traceback__ = without_probe(error.__traceback__)
        error = error.__cause__ or error.__context__


def without_probe(traceback: TracebackType | None) -> TracebackType | None:
    """Remove the probe's frames from `traceback` in place, and return its first remaining entry, or None."""
    while traceback is not None and _is_probe(traceback.tb_frame):
        traceback = traceback.tb_next
    kept = traceback
    while kept is not None:
        while kept.tb_next is not None and _is_probe(kept.tb_next.tb_frame):
            kept.tb_next = kept.tb_next.tb_next
        kept = kept.tb_next
    return traceback


def _is_probe(frame: Any) -> bool:
    return bool(frame.f_code.co_filename.startswith(_PROBE))
