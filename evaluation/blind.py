"""Evidence and source of a program without its words: what is left is what the machine did.

Meaningless words stand for the program's own ones, the same for the same one everywhere: its files and modules,
functions, classes, variables, attributes, parameters, threads, keys and every word of its strings. Comments and
docstrings are gone, lines stay where they are. What the program prints or raises itself is "x".

These stay:
- the words of Python, torch and whatever else is imported from outside the program, as the program calls them; what
  these, the kernel and gloo print; a method or attribute that their objects have as well (`get`, `step`, `set`), since
  nothing tells whose it is; the name of an argument, unless the program has it for something else too and calls by it
  what is not known to be imported;
- `self`, names with two underscores at both ends, and that a name is in capitals: conventions of the language;
- the names of the environment variables that a launcher sets (RANK, WORLD_SIZE);
- if asked for, *names of the field*: those with the word `rank`, `world_size`, and what accelerate, Lightning and the
  examples of torch call the rank that does what is done once (`is_main_process`). A condition on the rank is known by
  RANK, by `get_rank()` and by what was computed from these in the same function. Where a variable was given elsewhere,
  its name is all that an excerpt has, and everybody gives it one of these.
"""

from __future__ import annotations

import ast
import builtins
import gzip
import json
import keyword
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from nsa_harness.core.evidence.evidence import (
    Call,
    CaughtException,
    DebugMessage,
    EarlierError,
    Evidence,
    Frame,
    Hint,
    ProgressEvent,
    RaisedException,
    RankEvidence,
    Source,
    Stack,
    StatusFile,
    StoreKeyWrites,
)
from nsa_harness.core.evidence.health_samples import (
    HealthSamples,
    NonFiniteValue,
    OverwrittenFile,
    PrintedMessage,
    Replica,
)
from nsa_harness.core.evidence.host import Process, Task
from nsa_harness.core.report import Outcome, Place
from nsa_harness.core.source_code.collection import program_sources
from nsa_harness.supervisor.storage.adapters import json_object, type_adapter

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "frozen"))

from freeze import outcome_of_stored

PROJECT = "/home/ada/project/"  # where the recordings have the program
_HOME = "/home/ada/"
_NOT_OURS = ("nsa-harness", "project", "tmp")  # folders there that say nothing of the program

_FIELD = frozenset({
    "world_size", "is_main_process", "is_local_main_process", "is_world_process_zero", "is_global_zero", "is_main",
    "is_master", "is_master_process", "is_chief", "is_coordinator", "is_leader", "main_process", "master_process",
})  # fmt: skip
_LAUNCHER_SETS = frozenset({
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "SLURM_PROCID", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK",
})  # fmt: skip

_SCANNED = re.compile(
    r"(?P<comment>#[^\n]*)"
    r"|(?P<string>(?P<prefix>(?<!\w)[rbufRBUF]{0,2})(?P<quote>\"\"\"|'''|\"|')(?P<body>(?:\\.|(?!(?P=quote)).)*)(?P=quote))"
    r"|(?P<chain>(?<!\w)(?!from\b)[^\W\d]\w*(?:\s*\.\s*[^\W\d]\w*)*)",
    re.DOTALL,
)
_WORD = re.compile(r"[A-Za-z]+")
_ENVIRONMENT = "|".join(sorted(_LAUNCHER_SETS, key=len, reverse=True))
_IN_STRING = re.compile(rf"\\.[0-9A-Fa-f]*|__\w+__|\b(?:{_ENVIRONMENT})\b|[A-Za-z]+", re.DOTALL)
_NAME = re.compile(r"[^\W\d]\w*")
_GIVEN = re.compile(r"\s*=(?!=)")
_LAST_CHAIN = re.compile(r"[^\W\d][\w.]*$")
_RELATIVE = re.compile(r"\bfrom\s*\.+$")
_PATH = re.compile(rf"{re.escape(_HOME)}[^\s\"':,\[\]()]+")
_PRINTED_FRAME = re.compile(r'^(\s+File ")(.+)(", line \d+, in )(.+)$')
_QUOTED = re.compile(r"(?<=['\"])[\w.]+(?=['\"])|\b[\w.]+\.(?:weight|bias)\b")
_ERROR_LINE = re.compile(r"^([A-Za-z_][\w.]*)(?:: (.*))?$", re.DOTALL)
_OF_THE_MACHINE = re.compile(
    r"terminate called|\s+what\(\):|Fatal Python error|Traceback|Aborted|Segmentation fault|Exception ignored"
    r"|Error in atexit|\[?[WEIF]\d{4}[ \]]|.*resource_tracker|\s+\S|Thread 0x|Current thread|.*-packages/"
)
_THREAD_LINE = re.compile(r"^(Exception in thread )(.+?)(:?)$")
_OF_A_FUNCTION = re.compile(r"^(Thread-\d+ \()(.+)(\))$")
_LIBRARY_THREAD = re.compile(
    r"|MainThread|QueueFeederThread|nsa-harness-.*|Thread-\d+|0x[0-9a-f]+|pt_.*|asyncio_\d+|Dummy-\d+"
    r"|(?:Fork|Spawn)(?:Pool)?(?:Worker|Process)-\d+|Process-\d+"
)


HOW = {"names of the field stay": True, "these are blind too": False}
_FIGURES = ("verdict", "kind", "cause", "ranks", "file", "line", "confidence", "step")


def report(home: Path) -> str:
    """Of one round of strangers: how many answers are the same, and each that is not."""
    seen = list(recordings(home))
    bare = sum(not evidence.sources for _, evidence, _ in seen)
    lines = [f"{len(seen)} recordings, {bare} without source; to these the program's is added"]
    for how, field_stays in HOW.items():
        for source in (True, False):
            changed = [
                f"  {program}: {', '.join(differences)}"
                for program, evidence, texts in seen
                if (differences := compared(evidence, texts, field_stays=field_stays, source=source))
            ]
            what = "with the source" if source else "as they were recorded"
            lines += [f"{how}, {what}: {len(seen) - len(changed)} of {len(seen)} the same", *changed]
    return "\n".join(lines)


def recordings(home: Path, wanted: Sequence[str] | None = None) -> Iterator[tuple[str, Evidence, dict[str, str]]]:
    """Program, evidence, and the files of the program by the path that the recording has. `wanted`: None = all."""
    with gzip.open(home / "evidence.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            if wanted is not None and not any(f'"{one}"' in line[:200] for one in wanted):
                continue
            stored = json.loads(line)
            folder = (home / stored["program"]).parent
            texts = {f"{PROJECT}{file.relative_to(folder)}": file.read_text() for file in folder.rglob("*.py")}
            yield stored["program"], type_adapter(Evidence).validate_python(stored["evidence"]), texts


def compared(evidence: Evidence, texts: Mapping[str, str], *, field_stays: bool, source: bool = True) -> list[str]:
    """What is answered otherwise without the program's words: "line: 12 -> 40"."""
    blindfold = Blindfold(texts, field_stays=field_stays)
    blinded = blindfold.evidence(evidence)
    if source:
        evidence, blinded = collected(evidence, texts), collected(blinded, blindfold.texts())
    before, after = answer(evidence), answer(blinded)
    after["file"] = blindfold.unblind(after["file"])
    return [f"{name}: {before[name]} -> {after[name]}" for name in _FIGURES if before[name] != after[name]]


def judge_again(evidence: Evidence) -> Outcome:
    """Return the outcome of a recording by the rules of this commit."""
    outcome: Outcome = outcome_of_stored(json_object(evidence))
    return outcome


def answer(evidence: Evidence) -> dict[str, Any]:
    outcome = judge_again(evidence)
    culprit, findings = outcome.culprit, outcome.findings if outcome.verdict.cause else ()
    place = (culprit and culprit.place) or next((one.place for one in outcome.findings), None)
    return {
        "verdict": str(outcome.verdict.status),
        "kind": outcome.verdict.kind and str(outcome.verdict.kind),
        "cause": outcome.verdict.cause,
        "ranks": culprit.ranks if culprit else (),
        "file": place and place.file,
        "line": place and place.line,
        "confidence": next((one.confidence for one in findings), None),
        "step": culprit.step if culprit else None,
    }


def collected(evidence: Evidence, texts: Mapping[str, str]) -> Evidence:
    """With the source that collection would have stored, where the recording has none; `texts` by path."""
    if evidence.sources:
        return evidence
    return replace(evidence, sources=tuple(program_sources(evidence, lambda file: texts.get(file, ""))))


class Blindfold:
    """What stands for what in one program. `texts`: all of its files, by path."""

    def __init__(self, texts: Mapping[str, str], *, field_stays: bool) -> None:
        self._texts, self._field_stays = texts, field_stays
        self._words: dict[str, str] = {}
        self._paths: dict[str, str] = {}
        trees = [ast.parse(text) for text in texts.values()]
        own = [PurePosixPath(file.removeprefix(PROJECT)).with_suffix("").parts for file in texts]
        self._modules = {part for parts in own for part in parts}
        self._imports = {parts[first:last] for parts in own for last in range(len(parts) + 1) for first in range(last)}
        self._libraries = {name for tree in trees for name in self._imported(tree)}
        self._names = {name for tree in trees for name in _bound(tree)} | self._modules
        self._overrides = {name for tree in trees for name in _methods(tree) if name in _theirs()}
        self._literals = {word for tree in trees for text in _strings(tree) for word in _WORD.findall(text)}
        self._lines = {line.strip() for text in texts.values() for line in text.splitlines()}
        self._raises = {file: _raising(tree) for file, tree in zip(texts, trees, strict=True)}
        self._errors = {one for tree in trees for one in _raised_texts(tree)}

    def evidence(self, seen: Evidence) -> Evidence:
        blinded: Evidence = self._blind(seen)
        return replace(blinded, last_lines=tuple(self._line(one, seen) for one in seen.last_lines))

    def texts(self) -> dict[str, str]:
        return {self.path(file): self.code(text, _docstrings(text)) for file, text in self._texts.items()}

    def unblind(self, path: str | None) -> str | None:
        return {after: before for before, after in self._paths.items()}.get(path or "", path)

    def path(self, path: str) -> str:
        """Folders and name each for itself, so that a name without its folders is the same one."""
        own = path.startswith(_HOME) and not path.startswith(f"{_HOME}nsa-harness/")
        if not own and not ("/" not in path and self._own(path)):
            return path
        head = _HOME if own else ""
        parts = path.removeprefix(head).split("/")
        found = head + "/".join(part if part in _NOT_OURS else self._file(part) for part in parts)
        self._paths[path] = found
        return found

    def code(self, text: str, docstrings: frozenset[int] = frozenset()) -> str:
        """The same statements on the same lines."""

        def instead(found: re.Match[str]) -> str:
            if found["comment"] is not None:
                return ""
            if found["string"] is not None:
                if text.count("\n", 0, found.start()) + 1 in docstrings:
                    return '""' + "\n" * found[0].count("\n")
                return f"{found['prefix']}{found['quote']}{self._body(found['prefix'], found['body'])}{found['quote']}"
            before, after = text[: found.start()].rstrip(), text[found.end() :]
            hangs = before.endswith(".") and not _RELATIVE.search(before)
            if _GIVEN.match(after) and self._is_theirs(_called_around(before)):
                return found[0]
            return self._chain(found[0], hangs=hangs, called=after.startswith("("))

        return "\n".join(line.rstrip() for line in _SCANNED.sub(instead, text).split("\n"))

    def _is_theirs(self, function: str) -> bool:
        """By its first name; "" = none."""
        first = function.partition(".")[0].strip()
        return first in self._libraries or (first not in self._names and hasattr(builtins, first))

    def _imported(self, tree: ast.AST) -> Iterator[str]:
        """Names that an import of somebody else's module gives."""
        for one in ast.walk(tree):
            if isinstance(one, ast.Import):
                theirs = [each for each in one.names if each.name.partition(".")[0] not in self._modules]
                yield from (each.asname or each.name.partition(".")[0] for each in theirs)
            elif isinstance(one, ast.ImportFrom) and not one.level:
                parts = (one.module or "").split(".")
                if parts[0] not in self._modules:
                    yield from (parts[0], *(each.asname or each.name for each in one.names))

    def _blind(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self._blind(each) for each in value)
        if isinstance(value, dict):
            return {key: self._blind(each) for key, each in value.items()}
        if not is_dataclass(value) or isinstance(value, type):
            return value
        inside = replace(value, **{one.name: self._blind(getattr(value, one.name)) for one in fields(value)})
        return replace(inside, **self._changes(value))

    def _changes(self, value: Any) -> dict[str, Any]:
        """Of what holds words of a program. The values within it are blind already."""
        match value:
            case Frame() | Place():
                return self._place(value)
            case Source():
                return {"file": self.path(value.file), "text": self.code(value.text, _docstrings(value.text))}
            case ProgressEvent():
                return {"name": (self._parameter if value.kind == "forward" else self._dotted)(value.name)}
            case StatusFile():
                return {"mesh": tuple((self._literal(axis), at) for axis, at in value.mesh)}
            case Call() | StoreKeyWrites():
                return {"key": self._literal(value.key)}
            case CaughtException():
                return {"type": self._dotted(value.type)}
            case RaisedException() | EarlierError():
                own = value.frames and value.frames[0].line in self._raises.get(value.frames[0].file, ())
                message = ("x" if value.message else "") if own else self._machine(value.message)
                return {"type": self._dotted(value.type), "message": message}
            case Hint():
                return {"name": self._parameter(value.name)}
            case DebugMessage():
                return {"operation": self._dotted(value.operation), "instead": self._dotted(value.instead)}
            case Stack():
                return {"thread": self._thread(value.thread), "loop": self.code(value.loop)}
            case Task():
                return {"target": self._machine(value.target)}
            case Process():
                return {
                    "command": self._command(value.command),
                    "open_ends": tuple(map(self._machine, value.open_ends)),
                }
            case Replica():
                names = tuple((self._parameter(first), self._parameter(last)) for first, last in value.names)
                return {"names": names, "hook": self._dotted(value.hook)}
            case OverwrittenFile():
                return {"path": self.path(value.path)}
            case NonFiniteValue():
                return {"names": tuple(map(self._parameter, value.names))}
            case HealthSamples():
                return {"without_gradient": tuple(map(self._parameter, value.without_gradient))}
            case PrintedMessage():
                return {"name": self._thread(value.name), "error": self._error(value.error, ())}
            case RankEvidence():
                return {"error_lines": tuple(self._line(one, value) for one in value.error_lines)}
        return {}

    def _place(self, value: Frame | Place) -> dict[str, Any]:
        if value.file is None or not self._own(value.file):
            return {}
        found: dict[str, Any] = {"file": self.path(value.file)}
        if value.function is not None:
            found["function"] = self._function(value.function)
        if isinstance(value, Place):
            found |= {name: self._dotted(text) for name in ("module", "parameter") if (text := getattr(value, name))}
            found["text"] = value.text and self.code(value.text)
        return found

    def _own(self, file: str) -> bool:
        """Some chains have no directories."""
        return file.startswith(PROJECT) or ("/" not in file and any(one.endswith(f"/{file}") for one in self._texts))

    def _file(self, part: str) -> str:
        stem, dot, ending = part.partition(".")
        return (self._renamed(stem) if stem in self._modules else self._literal(stem)) + dot + ending

    def _function(self, name: str) -> str:
        parts = (one if one.startswith("<") else self._variable(one, called=True) for one in name.split("."))
        return ".".join(parts)

    def _dotted(self, text: str) -> str:
        return _NAME.sub(lambda one: self._attribute(one[0]), text)

    def _parameter(self, text: str) -> str:
        """Of a module too, which may have its name from a string."""
        return ".".join(self._attribute(one) if one in self._names else self._literal(one) for one in text.split("."))

    def _thread(self, name: str) -> str:
        if found := _OF_A_FUNCTION.match(name):
            return f"{found[1]}{self._function(found[2])}{found[3]}"
        return name if _LIBRARY_THREAD.fullmatch(name) else self._literal(name)

    def _command(self, text: str) -> str:
        head, option, code = text.partition(" -c ")
        own = code and "multiprocessing" not in code
        return " ".join(self.path(self._machine(one)) for one in head.split(" ")) + option + ("x" if own else code)

    def _machine(self, text: str) -> str:
        """What others print, with the program's own names where they print these."""
        lines = [self._printed(line) for line in text.split("\n")]
        return "\n".join(_QUOTED.sub(lambda one: self._dotted_or_literal(one[0]), line) for line in lines)

    def _printed(self, line: str) -> str:
        if found := _PRINTED_FRAME.match(line):
            own = self._own(found[2])
            return f"{found[1]}{self.path(found[2])}{found[3]}{self._function(found[4]) if own else found[4]}"
        if line.strip() in self._lines and line.startswith("    "):
            return self.code(line)
        return _PATH.sub(lambda one: self.path(one[0]), line)

    def _dotted_or_literal(self, text: str) -> str:
        if "." in text:
            return self._dotted(text)
        return self._attribute(text) if text in self._names else self._literal(text)

    def _line(self, line: str, known: RankEvidence | Evidence) -> str:
        """Of a log: what is not known to be of others is the program's."""
        if found := _THREAD_LINE.match(line):
            return f"{found[1]}{self._thread(found[2])}{found[3]}"
        if line.strip() in self._lines and line.startswith(" "):
            return self.code(line)
        if _OF_THE_MACHINE.match(line):
            return self._machine(line)
        raised = [known.exception] if isinstance(known, RankEvidence) and known.exception else []
        return self._error(line, tuple(raised))

    def _error(self, line: str, raised: tuple[RaisedException, ...]) -> str:
        """ "ValueError: no such file" """
        found = _ERROR_LINE.match(line)
        kind = found[1] if found else ""
        errors = {one.type for one in raised} | {one.type for each in raised for one in each.chain}
        if not found or not (kind in errors or kind in self._names or _is_error(kind)):
            return "x" if line else ""
        message = found[2] or ""
        own = kind in self._names or any(len(part) > 3 and part in message for part in self._errors)
        said = "x" if own and message else self._machine(message)
        return f"{self._dotted(kind)}: {said}" if message else self._dotted(kind)

    def _body(self, prefix: str, body: str) -> str:
        if "f" not in prefix.lower():
            return self._text(body)
        parts = re.split(r"(\{\{|\}\}|\{(?:[^{}]|\{[^{}]*\})*\})", body)
        return "".join(self._part(part) for part in parts)

    def _part(self, part: str) -> str:
        if not part.startswith("{") or part == "{{":
            return self._text(part)
        found = re.fullmatch(r"\{(.*?)(![rsa])?(:(?:[^{}'\"\]]|\{[^{}]*\})*)?\}", part, re.DOTALL)
        assert found is not None, part
        return f"{{{self.code(found[1])}{found[2] or ''}{found[3] or ''}}}"

    def _text(self, text: str) -> str:
        """Of a string as it is written: escapes stay."""

        def instead(found: re.Match[str]) -> str:
            stays = found[0].startswith(("\\", "__")) or found[0] in _LAUNCHER_SETS
            return found[0] if stays else self._renamed(found[0])

        return _IN_STRING.sub(instead, text)

    def _literal(self, text: str) -> str:
        """At run time: a word that no string of the program has was not made by it."""
        return _WORD.sub(lambda one: self._renamed(one[0]) if one[0] in self._literals else one[0], text)

    def _chain(self, text: str, *, hangs: bool, called: bool) -> str:
        """`a.b.c` of some code; `hangs`: a dot comes before it, `called`: a bracket after it."""
        names = _NAME.findall(text)
        if not hangs and (names[0] in self._libraries or keyword.iskeyword(names[0])):
            return text
        at = iter(range(1, len(names) + 1))
        lengths = range(0 if hangs else len(names), 0, -1)
        modules = next((length for length in lengths if tuple(names[:length]) in self._imports), 0)

        def instead(found: re.Match[str]) -> str:
            number = next(at)
            if number <= modules:
                return self._renamed(found[0])
            attribute, calls = hangs or number > 1, called and number == len(names)
            return self._attribute(found[0], called=calls) if attribute else self._variable(found[0], called=calls)

        return _NAME.sub(instead, text)

    def _variable(self, name: str, *, called: bool) -> str:
        own = name in self._names and name not in self._libraries and not (called and name in self._overrides)
        return self._renamed(name) if own else name

    def _attribute(self, name: str, *, called: bool = False) -> str:
        """A name under which others have a method is theirs only where it is called."""
        theirs = name in _theirs() and (called or not _theirs()[name])
        return self._renamed(name) if name in self._names and not theirs else name

    def _renamed(self, word: str) -> str:
        stays = (
            (word.startswith("__") and word.endswith("__")) or hasattr(builtins, word) or word in ("self", "cls", "_")
        )
        if stays or keyword.iskeyword(word) or (self._field_stays and _of_the_field(word)):
            return word
        if word not in self._words:
            number, letters = len(self._words), ""
            for _ in range(4):
                number, letter = divmod(number, 26)
                letters = chr(ord("a") + letter) + letters
            self._words[word] = f"q{letters}".upper() if word.isupper() else f"q{letters}"
        return self._words[word]


def _called_around(before: str) -> str:
    """The function whose arguments this code ends in, as it is written; "" = in none."""
    open_ones = 0
    for at in range(len(before) - 1, -1, -1):
        open_ones += (before[at] in "([{") - (before[at] in ")]}")
        if open_ones > 0:
            found = _LAST_CHAIN.search(before[:at])
            return found[0] if found else ""
    return ""


def _of_the_field(word: str) -> bool:
    parts = word.lower().split("_")
    return word.lower().strip("_") in _FIELD or "rank" in parts or "ranks" in parts


def _is_error(kind: str) -> bool:
    """A class of Python, or of a package by its full name."""
    found = getattr(builtins, kind, None)
    return "." in kind or (isinstance(found, type) and issubclass(found, BaseException))


def _bound(tree: ast.AST) -> Iterator[str]:
    """Whatever the program gives a name of its own."""
    for one in ast.walk(tree):
        match one:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield one.name
            case ast.arg():
                yield one.arg
            case ast.Name(ctx=ast.Store()):
                yield one.id
            case ast.Attribute(ctx=ast.Store()):
                yield one.attr
            case ast.ExceptHandler(name=str(name)) | ast.alias(asname=str(name)):
                yield name
            case ast.Call(func=ast.Name(id="dict"), keywords=given):
                yield from (each.arg for each in given if each.arg)
            case ast.Call(func=ast.Attribute(attr="add_argument"), args=[ast.Constant(value=str(option)), *_]):
                yield option.lstrip("-").replace("-", "_")


def _methods(tree: ast.AST) -> Iterator[str]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    classes = (one for one in ast.walk(tree) if isinstance(one, ast.ClassDef))
    return (each.name for one in classes for each in one.body if isinstance(each, kinds))


def _strings(tree: ast.AST) -> Iterator[str]:
    return (one.value for one in ast.walk(tree) if isinstance(one, ast.Constant) and isinstance(one.value, str))


def _raising(tree: ast.AST) -> set[int]:
    """Lines of what the program raises itself."""
    raising = [one for one in ast.walk(tree) if isinstance(one, ast.Raise | ast.Assert)]
    return {line for one in raising for line in range(one.lineno, (one.end_lineno or one.lineno) + 1)}


def _raised_texts(tree: ast.AST) -> Iterator[str]:
    for one in ast.walk(tree):
        if isinstance(one, ast.Raise | ast.Assert):
            yield from (part.strip() for part in _strings(one))


def _docstrings(text: str) -> frozenset[int]:
    """The lines on which they begin. Of an excerpt, which may be indented, as of a whole file."""
    head = "if True:\n" if text[:1].isspace() else ""
    found = []
    for one in ast.walk(ast.parse(head + text)):
        if isinstance(one, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            one
        ):
            found.append(one.body[0].lineno - bool(head))
    return frozenset(found)


@cache
def _theirs() -> dict[str, bool]:
    """Attributes of the objects that a training program handles, and which of them are called."""
    import concurrent.futures
    import io
    import logging
    import multiprocessing.pool
    import queue
    import socket
    import subprocess
    import threading
    from collections import Counter, deque
    from pathlib import Path

    import torch
    from torch import distributed

    kinds: tuple[type, ...] = (
        str, bytes, list, dict, set, tuple, int, float, io.TextIOWrapper, deque, Counter, Path, logging.Logger,
        threading.Thread, threading.Event, threading.Condition, threading.Semaphore, threading.Barrier, queue.Queue,
        multiprocessing.pool.Pool, multiprocessing.Process, concurrent.futures.Future, concurrent.futures.Executor,
        socket.socket, subprocess.Popen, torch.Tensor, torch.nn.Module, torch.optim.Optimizer, torch.Generator,
        torch.optim.lr_scheduler.LRScheduler, torch.utils.data.DataLoader, torch.utils.data.DistributedSampler,
        torch.autograd.Function, distributed.Store, distributed.ProcessGroup, distributed.Work,
        distributed.DeviceMesh, torch.nn.parallel.DistributedDataParallel,
    )  # fmt: skip
    found = {name: callable(getattr(kind, name, None)) for kind in kinds for name in dir(kind)}
    return found | dict.fromkeys(("acquire", "release", "locked"), True)
