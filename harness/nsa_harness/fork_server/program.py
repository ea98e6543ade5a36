"""Runs a Python command line in a forked process as if in a newly started interpreter."""

from __future__ import annotations

import builtins
import ctypes
import importlib.machinery
import importlib.util
import io
import os
import runpy
import sys
import threading
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_BOOTSTRAP = Path(__file__).resolve().parent.parent / "probe" / "bootstrap" / "sitecustomize.py"
_OPTIONS = ("-u", "-P")


class Program:
    """A program to run in a forked process: PYTHON [-u] [-P] FILE | DIRECTORY | -m MODULE, with arguments."""

    def __init__(self, arguments: Sequence[str]) -> None:
        remaining = list(arguments[1:])
        options = []
        while remaining[0] in _OPTIONS:
            options.append(remaining.pop(0))
        self._command_line = list(arguments)
        self._safe_path = "-P" in options
        self._is_module = remaining[0] == "-m"
        self._name, *self._arguments = remaining[1:] if self._is_module else remaining

    def prepare(self, environment: Mapping[str, str], *, with_probe: bool) -> None:
        """Make this process look as if its interpreter had just been started. `with_probe`: also start the probe."""
        # Without this, Python 3.11 keeps the native thread id of the parent process.
        threading.main_thread()._set_native_id()  # type: ignore[attr-defined]
        os.environ.clear()
        os.environ.update(environment)
        _draw_seeds()
        sys.modules["torch.distributed"].set_debug_level_from_env()  # torch read the variable when it was imported
        sys.orig_argv = list(self._command_line)
        sys.argv = ["-m" if self._is_module else self._name, *self._arguments]
        sys.modules["__main__"] = _new_main()
        if with_probe:
            _start_probe()
        if not self._safe_path:
            sys.path.insert(0, self._import_directory())

    def run(self) -> None:
        """Run the program. If it raises an exception, print the exception and raise SystemExit(1)."""
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
            _print_exception(error)
            raise SystemExit(1) from None

    def run_and_exit(self) -> None:
        """Run the program and exit with its status, without exit handlers, which would copy shared memory."""
        status: object = 0
        try:
            self.run()
        except SystemExit as system_exit:
            status = system_exit.code or 0
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status if isinstance(status, int) else 1)

    def _import_directory(self) -> str:
        """Return the directory that a newly started interpreter would put first on sys.path."""
        if self._is_module:
            return os.getcwd()
        return self._name if os.path.isdir(self._name) else os.path.dirname(os.path.realpath(self._name))

    def _code(self) -> types.CodeType:
        main = vars(sys.modules["__main__"])
        loader = importlib.machinery.SourceFileLoader("__main__", self._name)
        path = os.path.abspath(self._name)  # tracebacks of the interpreter contain absolute paths
        main.update(__file__=path, __cached__=None, __loader__=loader)
        try:
            with io.open_code(self._name) as file:
                source = file.read()
        except OSError as error:
            print(f"{sys.executable}: can't open file {path!r}: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        # dont_inherit: the `from __future__` import of this module must not apply to the program.
        return compile(source, path, "exec", dont_inherit=True)


def _new_main() -> types.ModuleType:
    main = types.ModuleType("__main__")
    vars(main).update(__annotations__={}, __builtins__=builtins)
    return main


def _draw_seeds() -> None:
    """Reseed numpy and torch, because every fork would draw the same numbers. `random` reseeds itself."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    sys.modules["torch"].default_generator.seed()


def _start_probe() -> None:
    spec = importlib.util.spec_from_file_location("_nsa_harness_bootstrap", _BOOTSTRAP)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _print_exception(error: BaseException) -> None:
    """Print an uncaught exception as the interpreter does, but without the frames of this package."""
    traceback = _without_fork_server(error.__traceback__)
    error.__traceback__ = traceback
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, traceback
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    try:
        sys.excepthook(type(error), error, traceback)
    except BaseException as hook_error:
        print("Error in sys.excepthook:", file=sys.stderr)
        sys.__excepthook__(type(hook_error), hook_error, _without_fork_server(hook_error.__traceback__))
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, traceback)


def _without_fork_server(traceback: TracebackType | None) -> TracebackType | None:
    while traceback is not None and traceback.tb_frame.f_code.co_filename.startswith(_HERE):
        traceback = traceback.tb_next
    return traceback


# In a new process, a program imports these modules after the probe has started, so they get the probe's patches.
# The fork server has imported them earlier, with torch's original functions, so these names must be bound again.
_COLLECTIVES = "torch.distributed.distributed_c10d"


@dataclass(frozen=True, kw_only=True)
class EarlyBinding:
    """A reference from a preloaded module to a function of torch.distributed.

    `holder` is the namespace of the module, or a dict in this namespace. The function is either the value of `key` in
    `holder` or the key itself.
    """

    holder: dict[Any, Any]
    key: Any
    name: str  # name of the function in torch.distributed


def early_bindings(modules: Iterable[str]) -> list[EarlyBinding]:
    """Return the references in `modules` to functions of torch.distributed."""
    # Compare exact types: reading the class of some torch objects prints a warning (torch 2.11: reduce_op).
    functions = vars(sys.modules[_COLLECTIVES]).items()
    names = {function: name for name, function in functions if type(function) is types.FunctionType}
    bindings = []
    for module in (sys.modules[name] for name in modules):
        namespace = vars(module)
        for key, value in namespace.items():
            if type(value) is types.FunctionType and value in names:
                bindings.append(EarlyBinding(holder=namespace, key=key, name=names[value]))
            elif type(value) is dict:
                keys = (key for key in value if type(key) is types.FunctionType and key in names)
                bindings += [EarlyBinding(holder=value, key=function, name=names[function]) for function in keys]
    return bindings


def rebind(bindings: Iterable[EarlyBinding]) -> None:
    """Replace each referenced function with the version that the instrumentation has patched."""
    current = vars(sys.modules[_COLLECTIVES])
    for binding in bindings:
        function = current[binding.name]
        if isinstance(binding.key, str):
            binding.holder[binding.key] = function
        else:
            binding.holder[function] = binding.holder.pop(binding.key)


# Fields of /proc/self/stat after the command name: the start and end addresses of the arguments and of the environment.
_ARGUMENTS, _ENVIRONMENT = slice(45, 47), slice(47, 49)
_FIRST_VARIABLE = b"RANK="


class ProcessTitle:
    """The command line and environment that the kernel shows for this process.

    A forked process shows those of its parent. Then ps, py-spy and the search for the run's tag would mistake it for
    the server. Therefore the server is started with a long blank last argument and a long blank last variable, and
    `show` writes new values into their memory. Create this object once, before the environment changes; every fork of
    the process can then call `show`.
    """

    def __init__(self) -> None:
        fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(") ")[2].split()
        self._arguments_region = _region(fields[_ARGUMENTS])
        start, end = _region(fields[_ENVIRONMENT])
        self._initial_entries: list[tuple[int, bytes]] = []
        for entry in ctypes.string_at(start, end - start).removesuffix(b"\0").split(b"\0"):
            self._initial_entries.append((start, entry))
            start += len(entry) + 1
        address, reserved_entry = self._initial_entries.pop()
        self._reserved_region = (address, address + len(reserved_entry))
        self.reserved_variable = os.fsdecode(reserved_entry.partition(b"=")[0])

    def show(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Make the kernel show this command line and environment. Raise ValueError if they are too long."""
        new_entries = dict.fromkeys(os.fsencode(f"{name}={value}") for name, value in environment.items())
        _write(self._arguments_region, [os.fsencode(word) for word in arguments])
        for address, entry in self._initial_entries:
            # Unchanged variables stay at their address: a library may have stored the pointer from getenv.
            is_unchanged = entry in new_entries
            new_entries.pop(entry, None)
            ctypes.memmove(address, entry if is_unchanged else bytes(len(entry)), len(entry))
        _write(self._reserved_region, sorted(new_entries, key=lambda entry: not entry.startswith(_FIRST_VARIABLE)))


def _region(fields: Sequence[str]) -> tuple[int, int]:
    start, end = fields
    return int(start), int(end)


def _write(region: tuple[int, int], entries: Sequence[bytes]) -> None:
    """Write `entries` with NULs between them, the first byte last. Raise ValueError if they do not fit."""
    start, end = region
    text = b"\0".join(entries)
    if len(text) >= end - start:
        raise ValueError(f"{len(text)} bytes of arguments or environment; there is room for {end - start - 1}")
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start + 1, text[1:], len(text[1:]))
    ctypes.memmove(start, text[:1], len(text[:1]))
