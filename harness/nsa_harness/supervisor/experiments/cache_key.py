"""The cache key of an experiment: what its finished launches rest on. While it is unchanged they still answer.

It has the program's files, the interpreter with its packages, and the environment. Nothing of the program is imported
or run: its imports are followed in its source, as far as they lead to files of the user's own. Values that may be
secret enter only as digests.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import stat
import subprocess
import sys
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from nsa_harness.core.plan import RunSpec
from nsa_harness.core.redaction import Secrets, redacted, secrets_of_environment
from nsa_harness.supervisor.launch.launcher import SUBJECT, shared_environment
from nsa_harness.texts.words import listing, verb_for

CacheKey = Mapping[str, str]  # what it is, as people call it: its version or a digest
WRITTEN = "written by the program"  # in place of a digest: whatever it holds, nothing follows from it
LAUNCHED = "what is launched"
_UNKNOWN = "unknown"  # could not be read: never the same again

_PATH = "PYTHONPATH"
_MOST_FILES = 2000  # of a program, the nearest to it first
_MOST_SOURCE_BYTES = 1 << 20  # a longer file is compared and not read for imports
_MOST_DIGEST_BYTES = 64 << 20  # a longer file is compared by size and time
_MOST_ENTRIES = 10_000  # of a folder that the arguments name
_TOLD = 4  # names in a sentence, or how many more there are
_MOST_NAME = 300  # characters of a word that may name a file
_INTERPRETER_S = 60.0
_SLOW = 100_000  # rounds: who has such a digest tries few values a second

# What a terminal, a login, a build or a batch system sets anew each time; a search goes on in another one.
_OF_THE_SESSION = re.compile(
    r"_|PWD|OLDPWD|SHLVL|COLORTERM|COLUMNS|LINES|WINDOW|WINDOWID|STY|DISPLAY|MAIL|INVOCATION_ID|JOURNAL_STREAM"
    r"|LS_COLORS|LESS(OPEN|CLOSE)?|HIST[A-Z]+|PS[0-4]|PAGER|EDITOR|VISUAL|KRB5CCNAME|MAKEFLAGS|MAKELEVEL"
    r"|MFLAGS|NSA_HARNESS_.*"
    r"|(TERM|TMUX|SSH|SUDO|XDG|DBUS|WAYLAND|DESKTOP|GNOME|KDE|KONSOLE|VTE|VSCODE|ITERM|KITTY|ALACRITTY|WT|GPG|SYSTEMD"
    r"|SESSION|SHELL_SESSION|STARSHIP|JPY|PYTEST|GITHUB|SLURM|SLURMD|PBS|LSB|SGE)(_.*)?"
)


def changed(before: CacheKey, after: CacheKey) -> tuple[str, ...]:
    """Return what has changed, is new, or is gone; none: each finished probe still answers."""
    names = [name for name in {**before, **after} if WRITTEN not in (before.get(name), after.get(name))]
    return tuple(name for name in names if before.get(name) != after.get(name) or before.get(name) == _UNKNOWN)


def without_written(before: CacheKey, after: CacheKey) -> dict[str, str]:
    """Return the earlier key, with the files that one run of the program changed or made marked as its own output."""
    return {**before, **dict.fromkeys(changed(before, after), WRITTEN)}


def sealed_digest(*facts: object) -> str:
    """Return a slow digest of values that may contain secrets, against which few guesses a second can be tried."""
    return hashlib.pbkdf2_hmac("sha256", repr(facts).encode(errors="replace"), b"", _SLOW, 8).hex()


def _digest(*facts: object) -> str:
    return hashlib.sha256(repr(facts).encode(errors="replace")).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Interpreter:
    """The version, packages and folders that an interpreter reports."""

    version: str = _UNKNOWN
    packages: Mapping[str, str] = field(default_factory=dict)
    folders: tuple[Path, ...] = ()  # on its path, and none of its own: a project that is installed to be edited

    @property
    def premises(self) -> dict[str, str]:
        return {"Python": self.version, **{f"package {name}": says for name, says in sorted(self.packages.items())}}


# A record holds the digest of each file of its package: one that is built anew under the same version differs.
_ASK = """
import hashlib, importlib.metadata, json, os, platform, sys, urllib.parse
packages, edited = {}, []
for one in importlib.metadata.distributions():
    record = one.read_text("RECORD") or ""
    packages[str(one.metadata["Name"])] = f"{one.version} {hashlib.sha256(record.encode()).hexdigest()[:8]}"
    source = json.loads(one.read_text("direct_url.json") or "{}")
    if source.get("dir_info", {}).get("editable") and source["url"].startswith("file://"):
        folder = urllib.parse.unquote(source["url"][7:])
        edited += [folder, folder + "/src"]
own = tuple(os.path.realpath(one) + os.sep for one in (sys.prefix, sys.base_prefix))
there = [one for one in sys.path if one and os.path.isdir(one) and not os.path.realpath(one).startswith(own)]
print(json.dumps({"version": platform.python_version(), "packages": packages, "folders": there + edited}))
"""


def interpreter(python: str | None, environment: Mapping[str, str]) -> Interpreter:
    """Ask the interpreter that runs the program; None: the harness's own."""
    try:
        done = subprocess.run(
            [python or sys.executable, "-c", _ASK], env=dict(environment), stdin=subprocess.DEVNULL,
            capture_output=True, timeout=_INTERPRETER_S, check=True,
        )  # fmt: skip
        answer = json.loads(done.stdout)
        folders = tuple(Path(one).resolve() for one in answer["folders"])
        return Interpreter(version=answer["version"], packages=answer["packages"], folders=folders)
    except (OSError, ValueError, KeyError, subprocess.SubprocessError):
        return Interpreter()


def interpreter_of(specs: Sequence[RunSpec]) -> Interpreter:
    """Ask the interpreter that runs the first of the launches."""
    if not specs:
        return Interpreter()
    return interpreter(specs[0].python, {**os.environ, **dict(specs[0].env)})


def variables(spec: RunSpec) -> dict[str, str]:
    """Return the environment of the launch without what belongs to the terminal session."""
    passed = {name: value for name, value in shared_environment(spec).items() if not _OF_THE_SESSION.fullmatch(name)}
    found = sorted({**passed, **dict(spec.env)}.items())
    secret = {name for name, value in found if secrets_of_environment([(name, value)])}
    return {f"variable {name}": (sealed_digest if name in secret else _digest)(name, value) for name, value in found}


@dataclass(frozen=True, kw_only=True)
class Program:
    """The user's files and environment that the launches of one experiment depend on."""

    specs: Sequence[RunSpec]
    words: Sequence[str] = ()  # that any of them takes, in addition to those of `specs`
    interpreter: Interpreter
    working_dir: Path

    def environment(self) -> dict[str, str]:
        """Return the interpreter's part of the key, and the variables of the launches."""
        environment = {**self.interpreter.premises}
        for spec in self.specs:
            environment |= variables(spec)
        return environment

    def files(self) -> dict[str, str]:
        """Return every file that the program is or imports, and each file and folder that its words or source name."""
        if not self.specs:
            return {}
        home = (self.working_dir / (self.specs[0].cwd or "")).resolve()
        graph = ModuleGraph(home=home, folders=(*self._python_path(home), *self.interpreter.folders))
        places = list(self._places(home))
        for place in places:
            if place.suffix == ".py" and _is_file(place):
                graph.add(place, place.parent)
        for spec in self.specs:
            for word, following in pairwise(spec.program):
                if word == "-m":
                    graph.add_module(following, home)
        graph.follow()
        found = {place: _of_place(place) for place in sorted({*places, *graph.files})}
        return {_shown(place, self.working_dir): says for place, says in found.items() if says is not None}

    def _python_path(self, home: Path) -> list[Path]:
        paths = [dict(spec.env).get(_PATH, os.environ.get(_PATH, "")) for spec in self.specs]
        return [home / folder for folder in dict.fromkeys(os.pathsep.join(paths).split(os.pathsep)) if folder]

    def _places(self, home: Path) -> Iterator[Path]:
        """Yield the words of a command, and the values that they give to options or keys."""
        words = [word for spec in self.specs for word in spec.program]
        words += [value for spec in self.specs for name, value in spec.env if name != _PATH]
        for word in dict.fromkeys((*words, *self.words)):
            for text in dict.fromkeys((word, word.partition("=")[2])):
                place = _joined(home, text)
                if place is not None and place != SUBJECT:
                    yield place


_DYNAMIC = {"import_module", "__import__"}


@dataclass(kw_only=True)
class ModuleGraph:
    """The files that a program consists of, found through its source, the nearest first."""

    home: Path  # the working directory of the launch
    folders: Sequence[Path]  # where modules are looked for, in addition to the folder of the program
    files: dict[Path, Path] = field(default_factory=dict)  # each with the folder of the program it belongs to
    _waiting: deque[Path] = field(default_factory=deque)

    def add(self, file: Path, beside: Path) -> None:
        if len(self.files) < _MOST_FILES and file not in self.files:
            self.files[file] = beside
            self._waiting.append(file)

    def add_module(self, name: str, beside: Path, package: Path | None = None) -> None:
        """Add a module and its packages, if they are the user's own. `package`: the only directory to search."""
        *around, last = name.split(".")
        for folder in (beside, *self.folders) if package is None else (package,):
            within = folder.joinpath(*around)
            found = [within / f"{last}.py", within / last / "__init__.py", within / last / "__main__.py"]
            if any(_is_own(file) for file in found):
                found += [folder.joinpath(*around[:depth], "__init__.py") for depth in range(1, len(around) + 1)]
                for file in filter(_is_own, found):
                    self.add(file, beside)
                return

    def follow(self) -> None:
        """Follow imports until nothing new is named."""
        while self._waiting:
            file = self._waiting.popleft()
            for node in _nodes(file) if file.suffix == ".py" else ():
                self._read(node, file, self.files[file])

    def _read(self, node: ast.AST, file: Path, beside: Path) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                self.add_module(alias.name, beside)
        elif isinstance(node, ast.ImportFrom):
            self._read_from(node, file, beside)
        elif isinstance(node, ast.Call) and _called(node) in _DYNAMIC and node.args:
            self._read_dynamic(node.args[0], beside)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            self._read_text(node.value, file, beside)

    def _read_from(self, node: ast.ImportFrom, file: Path, beside: Path) -> None:
        package = file.parents[min(node.level, len(file.parents)) - 1] if node.level else None
        if node.module:
            self.add_module(node.module, beside, package)
        elif package is not None and _is_own(package / "__init__.py"):
            self.add(package / "__init__.py", beside)
        for alias in node.names:
            self.add_module(".".join(filter(None, (node.module, alias.name))), beside, package)

    def _read_dynamic(self, name: ast.expr, beside: Path) -> None:
        """Add the modules that `import_module(name)` may import.

        If the name is computed, that is every module of the package that its constant beginning names.
        """
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            self.add_module(name.value.lstrip("."), beside)
            return
        start = name.values[0] if isinstance(name, ast.JoinedStr) and name.values else name
        prefix = start.value if isinstance(start, ast.Constant) and isinstance(start.value, str) else ""
        package = prefix.strip(".").rpartition(".")[0] if not prefix.endswith(".") else prefix.strip(".")
        below = beside.joinpath(*package.split(".")) if package else beside
        for file in _sources_below(below):
            self.add(file, beside)

    def _read_text(self, text: str, file: Path, beside: Path) -> None:
        """Add the file that a string in the source names, if it exists: data, or a program that it starts."""
        if "." not in text or not text.isprintable():
            return
        for folder in dict.fromkeys((self.home, file.parent)):
            place = _joined(folder, text)
            if place is not None and _is_own(place):
                self.add(place, place.parent if place.suffix == ".py" else beside)


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _nodes(file: Path) -> Iterator[ast.AST]:
    """Yield the nodes of the file's source; none if it cannot be parsed."""
    try:
        if file.stat().st_size <= _MOST_SOURCE_BYTES:
            return ast.walk(ast.parse(file.read_bytes()))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        pass
    return iter(())


def _sources_below(folder: Path) -> Iterator[Path]:
    """Yield the sources below a folder in order, without hidden ones, environments, and runs of the harness."""
    for at, below, names in os.walk(folder):
        below[:] = sorted(one for one in below if not one.startswith((".", "__")) and not _foreign(Path(at, one)))
        yield from (Path(at, name) for name in sorted(names) if name.endswith(".py"))


def _foreign(folder: Path) -> bool:
    return _installed(folder) or (folder / "pyvenv.cfg").exists() or (folder / "latest").is_symlink()


def _installed(path: Path) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(path.parts)


def _joined(folder: Path, word: str) -> Path | None:
    if not word or len(word) > _MOST_NAME or "\0" in word:
        return None
    return Path(os.path.normpath(folder / word))


def _is_own(path: Path) -> bool:
    return _is_file(path) and not _installed(path)


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):
        return False


def _of_place(path: Path) -> str | None:
    """Return the digest of a file or folder; None: there is neither."""
    try:
        seen = path.stat()
        if stat.S_ISDIR(seen.st_mode):
            return _digest(*_entries(path))
        if not stat.S_ISREG(seen.st_mode):
            return None
        if seen.st_size > _MOST_DIGEST_BYTES:
            return _digest(seen.st_size, seen.st_mtime_ns)
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except FileNotFoundError:
        return None
    except OSError:
        return _UNKNOWN


def _entries(folder: Path) -> Iterator[tuple[str, int, int]]:
    left = _MOST_ENTRIES
    for at, below, names in os.walk(folder):
        below[:] = sorted(one for one in below if one != "__pycache__")
        for name in sorted(names)[:left]:
            left -= 1
            seen = Path(at, name).lstat()
            yield os.path.relpath(os.path.join(at, name), folder), seen.st_size, seen.st_mtime_ns
        if not left:
            return


def _shown(path: Path, working_dir: Path) -> str:
    """Return the path as seen from the working directory, redacted: a name may hold a secret too."""
    near = working_dir.resolve()
    name = str(path.relative_to(near)) if path.is_relative_to(near) else str(path)
    return redacted(name, Secrets().learned(name))


def names_text(names: Collection[str]) -> str:
    """Return "helper.py and config.yaml have" or "helper.py, model.py, config.yaml and 3 more have"."""
    own = [name for name in names if name != LAUNCHED] or list(names)  # a launch is another one where its file is
    listed = own if len(own) <= _TOLD else [*own[: _TOLD - 1], f"{len(own) - _TOLD + 1} more"]
    return f"{listing(listed)} {verb_for('has', listed)}"
