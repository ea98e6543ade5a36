"""The moment modules are there: calls back once, after the program itself has imported what is waited for."""

from __future__ import annotations

import sys

from .trouble import TroubleLog

# typing costs more than everything else here together, in every Python process of a run: only type checkers load it.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

# torch imports torch.distributed in its middle, so one alone is too early; some programs import the second much later.
AWAITED = ("torch", "torch.distributed")


def after(names: Sequence[str], then: Callable[[], None], trouble: TroubleLog) -> None:
    """Call `then` once all modules stand: now if they do, else at the end of the import that completes them.

    Costs one set search for each module that is imported until then, and nothing afterwards.
    """
    missing = {name for name in names if name not in sys.modules}
    if not missing:
        then()
        return
    sys.meta_path.insert(0, _Watcher(missing, then, trouble))


class _Watcher:
    """A finder that finds nothing itself: it asks the others, and listens to the loader they answer with."""

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
        self._trouble.attempt("imports", lambda: self._listen(name, spec.loader))
        return spec

    def _listen(self, name: str, loader: Any) -> None:
        """Cover exec_module on this one loader object, which belongs to this one module, and uncover it after."""
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
