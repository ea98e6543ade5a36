"""Writes the values of the names on this process's call stacks to a file.

Values are written when the controller or a failing rank requests them, when an exception ends the program, and when the
program leaves. They are read without running any of the program's code. Reading is limited in time and in size.
"""

from __future__ import annotations

import dis
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Any

from .. import protocol
from .patches import TroubleLog, patch
from .places import foreign_code, is_own
from .safe_attributes import MISSING, _first, attribute
from .status_file import StatusFileWriter
from .values import frame_variables, is_code, length, read, variable

NAMES_LIMIT = 40  # per frame
TEXT_LIMIT = 200  # characters of a value
TOTAL_LIMIT = 64 << 10  # bytes of all names and values of one process
FRAMES_LIMIT = 12  # per thread
THREADS_LIMIT = 8
INSTRUCTIONS_LIMIT = 8000  # of one function, in which names are searched
TIME_LIMIT_S = 0.25
SCRIPT_LIMIT = 1 << 20  # bytes of a script whose names are searched
METHOD_DEPTH = 2  # calls of methods of the program's own objects that are followed
PARTS_LIMIT = 5  # attributes in a chain such as "self.trainer.stopper.bad"
SHOWN_LENGTH = 40  # a longer text is replaced by its length and checksum, because it may be a document or a secret

# Names whose texts never leave the process. Further secrets are removed before anything is stored.
_SECRET = re.compile(
    r"passw|passphrase|passcode|passkey|pwd|(?:^|[._])(?:pw|pass|psk|pat|pin|sid|sig)\d*$|secret|api_?key|access_?key|private_?key"
    r"|credential|creds|(?:^|[._]|auth|access|refresh|bearer|api|hf|bot)token|jwt|cookie|dsn|webhook|otp|mnemonic|bearer"
    r"|authorization|conn(?:ection)?_?str|license_?key|(?:sign|encrypt|cipher)\w*key",
    re.IGNORECASE,
)
_TEXTS = ("str", "bytes", "bytearray")
# A jump that depends on a value, and the begin of a loop: the names on such a line decide what a rank does.
_DECIDES = re.compile(r"POP_JUMP|JUMP_IF|GET_ITER|FOR_ITER|GET_LEN|MATCH_")
_LOADS_NAME = re.compile(r"LOAD_(?:FAST|NAME|GLOBAL|DEREF|CLASSDEREF)|LOAD_FROM_DICT")
_LOADS_ATTRIBUTE = re.compile(r"LOAD_(?:ATTR|METHOD)$")

Chain = tuple[str, ...]  # names: ("stopper", "bad")


class FrameValues:
    """A writer of the values on this process's stacks."""

    def __init__(self, status_file: StatusFileWriter, directory: str, trouble: TroubleLog) -> None:
        self._status_file = status_file
        self._directory = directory
        self._trouble = trouble
        self._pid = os.getpid()
        self._path = os.path.join(directory, protocol.VALUES.format(pid=self._pid))
        self._answered = 1
        status_file.answer_values(1)
        self._has_exception = False
        self._lock = threading.Lock()
        torch = sys.modules.get("torch")
        self._foreign = foreign_code(torch) if torch is not None else foreign_code(os)

    def watch_departure(self, c10d: Any, also: Iterable[Any]) -> None:
        """Arrange to write values when the program destroys its process group, which may be its last act.

        Once the main function has returned, its variables are gone.
        """
        patch(
            c10d,
            "destroy_process_group",
            "values",
            self._trouble,
            before=lambda _arguments, _options: self.write_departure(sys._getframe(2)),
            also=tuple(also),
        )

    def answer(self) -> None:
        """Write the values of all threads if they were requested since the last call."""
        request = self._status_file.last_values_request()
        if request <= self._answered:
            return
        self._answered = request
        try:
            if not self._has_exception:
                self._write("request", self._threads())
        finally:
            self._status_file.answer_values(request)

    def write_exception(self, traceback: TracebackType | None) -> None:
        """Write the values of the frames that an exception left, and request those of the other ranks of this node."""
        if os.getpid() != self._pid:
            return
        self._request_others()
        frames: list[_Frame] = []
        while traceback is not None:
            frames.append(_Frame(traceback.tb_frame, traceback.tb_lineno))
            traceback = traceback.tb_next
        self._write("exception", [("MainThread", frames[::-1])])
        self._has_exception = True

    def write_departure(self, frame: FrameType | None) -> None:
        """Write the values of this thread's frames, because the program is about to leave."""
        if os.getpid() == self._pid and not self._has_exception:
            self._trouble.attempt("values", lambda: self._write("exit", [("MainThread", list(_stack(frame)))]))

    def write_module(self) -> None:
        """Write the values of the main script, which has ended, unless values were written before."""
        module = sys.modules.get("__main__")
        file = getattr(module, "__file__", None)
        if os.getpid() != self._pid or os.path.exists(self._path) or not file or os.path.getsize(file) > SCRIPT_LIMIT:
            return
        with open(file, encoding="utf-8", errors="replace") as script:
            code = compile(script.read(), os.path.abspath(file), "exec", dont_inherit=True)
        self._write("exit", [("MainThread", [_Module(code, vars(module))])])

    def _request_others(self) -> None:
        for name in os.listdir(self._directory):
            pid = name.partition(".")[0]
            if name == protocol.STATUS_FILE.format(pid=pid) and pid != str(self._pid):
                _request_values(os.path.join(self._directory, name))

    def _threads(self) -> Iterator[_Thread]:
        """Yield the name and the stack of each thread, the main thread first."""
        names = {thread.ident: thread.name for thread in list(threading._active.values())}  # type: ignore[attr-defined]
        main, own = threading.main_thread().ident, threading.get_ident()
        stacks = sys._current_frames()
        for ident in sorted(stacks, key=lambda ident: ident != main):
            if ident != own:
                name = "MainThread" if ident == main else str(names.get(ident, ident))
                yield name[:80], list(_stack(stacks[ident]))

    def _write(self, reason: str, threads: Iterable[_Thread]) -> None:
        """Write the values of the program's own frames. Without such a frame, an earlier file is kept."""
        with self._lock:
            reader = _Reader(self._foreign)
            found = [{"name": name, "frames": frames} for name, stack in threads if (frames := reader.frames(stack))]
            if not found:
                return
            record = {
                "at_ns": time.monotonic_ns(), "reason": reason, "is_cut": reader.is_cut,
                "threads": found[:THREADS_LIMIT],
            }  # fmt: skip
            descriptor = os.open(f"{self._path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
                json.dump(record, file)
            os.replace(f"{self._path}.new", self._path)


def _request_values(path: str) -> None:
    """Ask the process with the status file `path` for its values."""
    import mmap

    with open(path, "r+b") as file, mmap.mmap(file.fileno(), protocol.HEADER_SIZE) as memory:
        (number,) = protocol.VALUES_REQUEST.unpack_from(memory, protocol.VALUES_REQUEST_AT)
        if number:  # the process reads values
            protocol.VALUES_REQUEST.pack_into(memory, protocol.VALUES_REQUEST_AT, number + 1)


class _Frame:
    """A frame of the program: its code, the line that it executes, and its variables."""

    def __init__(self, frame: FrameType, line: int) -> None:
        self.code, self.line = frame.f_code, line
        self._frame = frame

    def spaces(self) -> tuple[Any, Any]:
        """Return the local and the global variables."""
        return frame_variables(self._frame)


class _Module(_Frame):
    """The main script after its end, when it has no frame any more."""

    def __init__(self, code: CodeType, variables: dict[str, Any]) -> None:
        self.code, self.line = code, 0
        self._variables = variables

    def spaces(self) -> tuple[Any, Any]:
        return self._variables, self._variables


_Thread = tuple[str, list[_Frame]]  # the name of a thread, and its stack, innermost frame first


def _stack(frame: FrameType | None) -> Iterator[_Frame]:
    while frame is not None:
        yield _Frame(frame, frame.f_lineno or 0)
        frame = frame.f_back


class _Reader:
    """A reader of the values of frames, within the limits of time and size for one process."""

    def __init__(self, foreign: tuple[str, ...]) -> None:
        self._foreign = foreign
        self._deadline = time.monotonic() + TIME_LIMIT_S
        self._bytes_left = TOTAL_LIMIT
        self.is_cut = False  # the limits did not allow to read everything

    def frames(self, stack: list[_Frame]) -> list[dict[str, Any]]:
        """Return the values of the program's own frames in a stack, innermost first."""
        own = [frame for frame in stack if is_own(frame.code.co_filename, self._foreign)]
        self.is_cut = self.is_cut or len(own) > FRAMES_LIMIT
        return [
            {
                "file": frame.code.co_filename[-400:], "line": frame.line, "function": frame.code.co_name[:200],
                "values": self._values(frame),
            }
            for frame in own[:FRAMES_LIMIT]
            if not self._is_exhausted()
        ]  # fmt: skip

    def _is_exhausted(self) -> bool:
        is_exhausted = self._bytes_left <= 0 or time.monotonic() > self._deadline
        self.is_cut = self.is_cut or is_exhausted
        return is_exhausted

    def _values(self, frame: _Frame) -> list[tuple[str, str, str]]:
        """Return name, type and text of the values that the code of a frame uses."""
        found: list[tuple[str, str, str]] = []
        spaces = frame.spaces()
        seen: set[str] = set()
        for chain in self._chains(frame.code, spaces):
            name = ".".join(chain)
            if name in seen:
                continue
            seen.add(name)
            if len(found) >= NAMES_LIMIT or self._is_exhausted():
                self.is_cut = True
                break
            value = _resolve(chain, spaces)
            if value is not MISSING and not is_code(value):
                self._add(found, name, value)
        return found[:NAMES_LIMIT]

    def _add(self, found: list[tuple[str, str, str]], name: str, value: Any) -> None:
        kind, text, _ = read(value)
        size = MISSING if kind in _TEXTS else length(value)
        added = [(name, kind[:80], _guarded(name, kind, text))] if text else []
        added += [(f"len({name})", "int", str(size))] if type(size) is int else []
        self._bytes_left -= sum(len(part) + 4 for entry in added for part in entry)
        found += added

    def _chains(self, code: CodeType, spaces: tuple[Any, Any]) -> Iterator[Chain]:
        """Yield the variables and attributes that the code uses, those of conditions and loops first.

        Attributes that methods of the program's own objects use are included: `stopper.step()` may use `stopper.bad`.
        """
        chains = chains_of(code)
        for chain in chains:
            yield chain
            yield from self._chains_of_methods(chain, spaces, METHOD_DEPTH)

    def _chains_of_methods(self, chain: Chain, spaces: tuple[Any, Any], depth: int) -> Iterator[Chain]:
        if depth == 0 or len(chain) > PARTS_LIMIT or chain[0] == "torch":
            return
        for base, names in ((chain[:-1], chain[-1:]), (chain, ("__call__", "__len__", "__iter__", "__next__"))):
            owner = _resolve(base, spaces) if base else MISSING
            for name in names if owner is not MISSING else ():
                function = _first(type(owner), name)
                if type(function) is not FunctionType or not is_own(function.__code__.co_filename, self._foreign):
                    continue
                for used in chains_of(function.__code__):
                    if used[:1] == function.__code__.co_varnames[:1] and len(used) > 1:
                        yield (*base, *used[1:])
                        yield from self._chains_of_methods((*base, *used[1:]), spaces, depth - 1)
        if chain[-1] != "dataset":
            loaded = _resolve((*chain, "dataset"), spaces)
            if loaded is not MISSING:
                yield from self._chains_of_methods((*chain, "dataset"), spaces, depth - 1)


def _resolve(chain: Chain, spaces: tuple[Any, Any]) -> Any:
    """Return the value of a variable or of an attribute, or MISSING if it cannot be read safely."""
    value = variable(chain[0], *spaces)
    for name in chain[1:]:
        value = MISSING if value is MISSING else attribute(value, name)
    return value


_CHAINS: dict[CodeType, list[Chain]] = {}


def chains_of(code: CodeType) -> list[Chain]:
    """Return the names and attribute chains that the code loads, those on lines with a condition or a loop first."""
    if code not in _CHAINS:
        _CHAINS[code] = _find_chains(code)
    return _CHAINS[code]


def _find_chains(code: CodeType) -> list[Chain]:
    chains: dict[Chain, list[int]] = {}  # chain -> lines that load it
    deciding: set[int] = set()
    current: Chain = ()
    line = code.co_firstlineno
    starts = dict(dis.findlinestarts(code))
    for number, instruction in enumerate(dis.get_instructions(code)):
        if number > INSTRUCTIONS_LIMIT:
            break
        line = starts.get(instruction.offset) or line
        operation, value = instruction.opname, instruction.argval
        if _LOADS_ATTRIBUTE.match(operation) and current:
            current = (*current, str(value))
            continue
        if current:
            chains.setdefault(current[:PARTS_LIMIT], []).append(line)
            current = ()
        if _DECIDES.search(operation):
            deciding.add(line)
        if _LOADS_NAME.match(operation):
            names = value if isinstance(value, tuple) else (value,)
            for name in names[:-1]:
                chains.setdefault((name,), []).append(line)
            current = (str(names[-1]),)
    return sorted(chains, key=lambda chain: deciding.isdisjoint(chains[chain]))


def _guarded(name: str, kind: str, text: str) -> str:
    """Return the text of a value as it may leave the process: no long texts, and none under the name of a secret."""
    has_text = kind in _TEXTS or "'" in text or '"' in text
    if has_text and _SECRET.search(name):
        return "(not read)"
    if (has_text and len(text) > SHOWN_LENGTH) or len(text) > TEXT_LIMIT:
        import zlib

        return f"{kind} of {len(text)} characters, crc {zlib.crc32(text.encode('utf-8', 'backslashreplace')):08x}"
    return text
