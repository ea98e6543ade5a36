"""A command of Python's, run in a forked process as the interpreter itself would run it in a new one."""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import io
import os
import runpy
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_BOOTSTRAP = Path(__file__).resolve().parent.parent / "probe" / "bootstrap" / "sitecustomize.py"
_OPTIONS = ("-u", "-P")


class Program:
    """PYTHON [-u] [-P] FILE | DIRECTORY | -m MODULE, and its arguments."""

    def __init__(self, words: Sequence[str]) -> None:
        rest = list(words[1:])
        options = []
        while rest[0] in _OPTIONS:
            options.append(rest.pop(0))
        self._words = list(words)
        self._safe_path = "-P" in options
        self._is_module = rest[0] == "-m"
        self._name, *self._arguments = rest[1:] if self._is_module else rest

    def settle(self, environment: Mapping[str, str], *, probed: bool) -> None:
        """Everything that a new interpreter would have set before it runs the program."""
        threading.main_thread()._set_native_id()  # type: ignore[attr-defined]  # Python 3.11 keeps the parent's
        os.environ.clear()
        os.environ.update(environment)
        _draw_seeds()
        sys.orig_argv = list(self._words)
        sys.argv = ["-m" if self._is_module else self._name, *self._arguments]
        sys.modules["__main__"] = _new_main()
        if probed:
            _let_the_probe_in()
        if not self._safe_path:
            sys.path.insert(0, self._home())

    def run(self) -> None:
        """Raises SystemExit at the end of a program that failed or left; the interpreter does the rest."""
        try:
            if self._is_module:
                runpy._run_module_as_main(self._name)  # type: ignore[attr-defined]
            elif os.path.isdir(self._name):
                runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
            else:
                exec(self._code(), vars(sys.modules["__main__"]))
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            _tell(error)
            raise SystemExit(1) from None

    def run_and_leave(self) -> None:
        """For a program without last words: taking down all that was imported costs a fork a copy of its memory."""
        status: object = 0
        try:
            self.run()
        except SystemExit as left:
            status = left.code or 0
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status if isinstance(status, int) else 1)

    def _home(self) -> str:
        if self._is_module:
            return os.getcwd()
        return self._name if os.path.isdir(self._name) else os.path.dirname(os.path.realpath(self._name))

    def _code(self) -> types.CodeType:
        main = vars(sys.modules["__main__"])
        loader = importlib.machinery.SourceFileLoader("__main__", self._name)
        whole = os.path.abspath(self._name)  # as the interpreter says it, in tracebacks too
        main.update(__file__=whole, __cached__=None, __loader__=loader)
        try:
            with io.open_code(self._name) as file:
                source = file.read()
        except OSError as error:
            print(f"{sys.executable}: can't open file {os.path.abspath(self._name)!r}: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        # dont_inherit: our own `from __future__` is not the program's.
        return compile(source, whole, "exec", dont_inherit=True)


def _new_main() -> types.ModuleType:
    main = types.ModuleType("__main__")
    vars(main).update(__annotations__={}, __builtins__=builtins)
    return main


def _draw_seeds() -> None:
    """Python's own generator draws a new seed in every fork; these would give all ranks the same numbers."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    sys.modules["torch"].default_generator.seed()


def _let_the_probe_in() -> None:
    """What the interpreter does at its start. The user's own sitecustomize has run in the server, and runs once."""
    spec = importlib.util.spec_from_file_location("_nsa_harness_bootstrap", _BOOTSTRAP)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _tell(error: BaseException) -> None:
    """As the interpreter does with an exception that nobody catches, without the frames that are ours."""
    traceback = _without_ours(error.__traceback__)
    error.__traceback__ = traceback
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, traceback
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    try:
        sys.excepthook(type(error), error, traceback)
    except BaseException as worse:
        print("Error in sys.excepthook:", file=sys.stderr)
        sys.__excepthook__(type(worse), worse, _without_ours(worse.__traceback__))
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, traceback)


def _without_ours(traceback: TracebackType | None) -> TracebackType | None:
    while traceback is not None and traceback.tb_frame.f_code.co_filename.startswith(_HERE):
        traceback = traceback.tb_next
    return traceback
