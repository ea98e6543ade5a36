"""Computes the cache key of an experiment, which decides whether earlier results can be reused.

An interrupted bisection or readiness check reuses its finished launches if the key has not changed. The key contains
the program's files, the interpreter with its packages, and the environment. To find the files, the program is not
imported or run: its imports are followed in the source code, as long as they lead to the user's own files. Values that
could be secret are stored only as digests.
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
from nsa_harness.core.redaction import Secrets, find_in_variable
from nsa_harness.supervisor.launch.launcher import SUBJECT, shared_environment
from nsa_harness.texts.words import listing, verb_for

CacheKey = Mapping[str, str]  # a version or a digest by human-readable name: "Python", "package torch", "train.py"
PROGRAM_OUTPUT = "written by the program"  # replaces the digest of a file that the program writes; never compared
LAUNCH_ENTRY = "what is launched"
_UNKNOWN = "unknown"  # replaces the digest of a file that cannot be read; it always counts as changed

_PATH = "PYTHONPATH"
_MAX_FILES = 2000  # files of one program; those with the shortest import path come first
_MAX_SOURCE_BYTES = 1 << 20  # the imports of a larger file are not followed
_MAX_DIGEST_BYTES = 64 << 20  # a larger file is compared by size and modification time only
_MAX_ENTRIES = 10_000  # files that are compared in one directory
_MAX_NAMES = 4  # at most this many names are listed in a sentence
_MAX_NAME_CHARS = 300  # a longer argument is not taken for a file name
_INTERPRETER_TIMEOUT_S = 60.0
_DIGEST_ROUNDS = 100_000  # makes a digest slow, so that secret values cannot be guessed from it quickly

# Variables that a terminal, a login, a build or a batch system sets differently each time. A bisection may continue in
# another terminal, so they do not count.
_SESSION_VARIABLE = re.compile(
    r"_|PWD|OLDPWD|SHLVL|COLORTERM|COLUMNS|LINES|WINDOW|WINDOWID|STY|DISPLAY|MAIL|INVOCATION_ID|JOURNAL_STREAM"
    r"|LS_COLORS|LESS(OPEN|CLOSE)?|HIST[A-Z]+|PS[0-4]|PAGER|EDITOR|VISUAL|KRB5CCNAME|MAKEFLAGS|MAKELEVEL"
    r"|MFLAGS|NSA_HARNESS_.*"
    r"|(TERM|TMUX|SSH|SUDO|XDG|DBUS|WAYLAND|DESKTOP|GNOME|KDE|KONSOLE|VTE|VSCODE|ITERM|KITTY|ALACRITTY|WT|GPG|SYSTEMD"
    r"|SESSION|SHELL_SESSION|STARSHIP|JPY|PYTEST|GITHUB|SLURM|SLURMD|PBS|LSB|SGE)(_.*)?"
)


def changed_entries(before: CacheKey, after: CacheKey) -> tuple[str, ...]:
    """Return the names of the differing entries. If there are none, results of finished launches are still valid."""
    names = [name for name in {**before, **after} if PROGRAM_OUTPUT not in (before.get(name), after.get(name))]
    return tuple(name for name in names if before.get(name) != after.get(name) or before.get(name) == _UNKNOWN)


def mark_outputs(before: CacheKey, after: CacheKey) -> dict[str, str]:
    """Return the cache key `before`, with every file that has changed in `after` marked as an output of the program."""
    return {**before, **dict.fromkeys(changed_entries(before, after), PROGRAM_OUTPUT)}


def sealed_digest(*facts: object) -> str:
    """Return a digest of secret values that is slow to compute, which makes the values hard to guess."""
    return hashlib.pbkdf2_hmac("sha256", repr(facts).encode(errors="replace"), b"", _DIGEST_ROUNDS, 8).hex()


def _short_digest(*facts: object) -> str:
    return hashlib.sha256(repr(facts).encode(errors="replace")).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Interpreter:
    """A Python interpreter, with its version, packages and source directories."""

    version: str = _UNKNOWN
    packages: Mapping[str, str] = field(default_factory=dict)  # version and digest by package name
    folders: tuple[Path, ...] = ()  # directories on its path outside of it, such as projects in editable mode

    @property
    def key_entries(self) -> dict[str, str]:
        """Return the entries that describe this interpreter in an experiment's cache key."""
        return {"Python": self.version, **{f"package {name}": says for name, says in sorted(self.packages.items())}}


# RECORD contains the digest of each file of a package, so it also changes if the package is rebuilt with the same
# version.
_INTERPRETER_SCRIPT = """
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


def query_interpreter(python: str | None, environment: Mapping[str, str]) -> Interpreter:
    """Return the version, packages and source directories of an interpreter, unknown if it does not respond."""
    try:
        process = subprocess.run(
            [python or sys.executable, "-c", _INTERPRETER_SCRIPT], env=dict(environment), stdin=subprocess.DEVNULL,
            capture_output=True, timeout=_INTERPRETER_TIMEOUT_S, check=True,
        )  # fmt: skip
        answer = json.loads(process.stdout)
        folders = tuple(Path(one).resolve() for one in answer["folders"])
        return Interpreter(version=answer["version"], packages=answer["packages"], folders=folders)
    except (OSError, ValueError, KeyError, subprocess.SubprocessError):
        return Interpreter()


def query_interpreter_of(specs: Sequence[RunSpec]) -> Interpreter:
    """Return a description of the Python interpreter that the first of `specs` uses."""
    if not specs:
        return Interpreter()
    return query_interpreter(specs[0].python, {**os.environ, **dict(specs[0].env)})


def variable_entries(spec: RunSpec) -> dict[str, str]:
    """Return the variables of a launch as entries of the cache key, without those of the terminal session."""
    inherited = {
        name: value for name, value in shared_environment(spec).items() if not _SESSION_VARIABLE.fullmatch(name)
    }
    all_variables = sorted({**inherited, **dict(spec.env)}.items())
    secret_names = {name for name, value in all_variables if find_in_variable(name, value)}
    return {
        f"variable {name}": (sealed_digest if name in secret_names else _short_digest)(name, value)
        for name, value in all_variables
    }


@dataclass(frozen=True, kw_only=True)
class LaunchedProgram:
    """The program that an experiment launches, with the files and variables it depends on."""

    specs: Sequence[RunSpec]
    arguments: Sequence[str] = ()  # further arguments of the experiment's launches; they may name files
    interpreter: Interpreter
    working_dir: Path

    def environment_entries(self) -> dict[str, str]:
        """Return the cache key entries for the interpreter and the environment variables."""
        environment = {**self.interpreter.key_entries}
        for spec in self.specs:
            environment |= variable_entries(spec)
        return environment

    def file_entries(self) -> dict[str, str]:
        """Map the name of each file and directory that the program depends on to its digest.

        They are the program's source files with everything they import, and files or directories whose names appear in
        arguments, in variables or in the source code.
        """
        if not self.specs:
            return {}
        working_dir = (self.working_dir / (self.specs[0].cwd or "")).resolve()
        graph = ModuleGraph(home=working_dir, folders=(*self._python_path(working_dir), *self.interpreter.folders))
        paths = list(self._named_paths(working_dir))
        for path in paths:
            if path.suffix == ".py" and _is_file(path):
                graph.add(path, path.parent)
        for spec in self.specs:
            for word, following in pairwise(spec.program):
                if word == "-m":
                    graph.add_module(following, working_dir)
        graph.follow()
        digest_by_path = {path: _digest_of_path(path) for path in sorted({*paths, *graph.files})}
        return {
            _relative_name(path, self.working_dir): says for path, says in digest_by_path.items() if says is not None
        }

    def _python_path(self, working_dir: Path) -> list[Path]:
        path_variables = [dict(spec.env).get(_PATH, os.environ.get(_PATH, "")) for spec in self.specs]
        return [
            working_dir / folder
            for folder in dict.fromkeys(os.pathsep.join(path_variables).split(os.pathsep))
            if folder
        ]

    def _named_paths(self, working_dir: Path) -> Iterator[Path]:
        """Yield each path to which an argument or environment variable of the program could refer."""
        texts = [word for spec in self.specs for word in spec.program]
        texts += [value for spec in self.specs for name, value in spec.env if name != _PATH]
        for word in dict.fromkeys((*texts, *self.arguments)):
            for text in dict.fromkeys((word, word.partition("=")[2])):
                path = _named_path(working_dir, text)
                if path is not None and path != SUBJECT:
                    yield path


_DYNAMIC_IMPORTS = {"import_module", "__import__"}


@dataclass(kw_only=True)
class ModuleGraph:
    """The source files of a program, found by following its imports."""

    home: Path  # the working directory of the launch
    folders: Sequence[Path]  # directories in which modules are searched, in addition to the program's directory
    files: dict[Path, Path] = field(default_factory=dict)  # the directory of the program that uses the file, by file
    _waiting: deque[Path] = field(default_factory=deque)

    def add(self, file: Path, program_dir: Path) -> None:
        """Add a file used by a program whose directory is `program_dir`."""
        if len(self.files) < _MAX_FILES and file not in self.files:
            self.files[file] = program_dir
            self._waiting.append(file)

    def add_module(self, name: str, program_dir: Path, package: Path | None = None) -> None:
        """Add a module and its packages, if they are the user's own files. `package`: the only directory to search."""
        *package_names, last = name.split(".")
        for folder in (program_dir, *self.folders) if package is None else (package,):
            parent = folder.joinpath(*package_names)
            candidates = [parent / f"{last}.py", parent / last / "__init__.py", parent / last / "__main__.py"]
            if any(_is_own_file(file) for file in candidates):
                candidates += [
                    folder.joinpath(*package_names[:depth], "__init__.py") for depth in range(1, len(package_names) + 1)
                ]
                for file in filter(_is_own_file, candidates):
                    self.add(file, program_dir)
                return

    def follow(self) -> None:
        """Read all added files, and add the files that they import or mention, until no new file is found."""
        while self._waiting:
            file = self._waiting.popleft()
            for node in _syntax_nodes(file) if file.suffix == ".py" else ():
                self._read(node, file, self.files[file])

    def _read(self, node: ast.AST, file: Path, program_dir: Path) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                self.add_module(alias.name, program_dir)
        elif isinstance(node, ast.ImportFrom):
            self._read_from(node, file, program_dir)
        elif isinstance(node, ast.Call) and _function_name(node) in _DYNAMIC_IMPORTS and node.args:
            self._read_dynamic(node.args[0], program_dir)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            self._read_text(node.value, file, program_dir)

    def _read_from(self, node: ast.ImportFrom, file: Path, program_dir: Path) -> None:
        package = file.parents[min(node.level, len(file.parents)) - 1] if node.level else None
        if node.module:
            self.add_module(node.module, program_dir, package)
        elif package is not None and _is_own_file(package / "__init__.py"):
            self.add(package / "__init__.py", program_dir)
        for alias in node.names:
            self.add_module(".".join(filter(None, (node.module, alias.name))), program_dir, package)

    def _read_dynamic(self, name: ast.expr, program_dir: Path) -> None:
        """Add the modules that a call such as `import_module(name)` could import, given the expression `name`."""
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            self.add_module(name.value.lstrip("."), program_dir)
            return
        start = name.values[0] if isinstance(name, ast.JoinedStr) and name.values else name
        prefix = start.value if isinstance(start, ast.Constant) and isinstance(start.value, str) else ""
        package = prefix.strip(".").rpartition(".")[0] if not prefix.endswith(".") else prefix.strip(".")
        search_dir = program_dir.joinpath(*package.split(".")) if package else program_dir
        for file in _sources_below(search_dir):
            self.add(file, program_dir)

    def _read_text(self, text: str, file: Path, program_dir: Path) -> None:
        """Add the file whose path is `text`, a string in the source code of `file`, if that file exists."""
        if "." not in text or not text.isprintable():
            return
        for folder in dict.fromkeys((self.home, file.parent)):
            path = _named_path(folder, text)
            if path is not None and _is_own_file(path):
                self.add(path, path.parent if path.suffix == ".py" else program_dir)


def _function_name(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _syntax_nodes(file: Path) -> Iterator[ast.AST]:
    """Yield the syntax nodes of a source file, or nothing if it cannot be parsed."""
    try:
        if file.stat().st_size <= _MAX_SOURCE_BYTES:
            return ast.walk(ast.parse(file.read_bytes()))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        pass
    return iter(())


def _sources_below(folder: Path) -> Iterator[Path]:
    """Yield the Python files below a directory, except hidden ones and virtual environments."""
    for directory, subdirectories, names in os.walk(folder):
        subdirectories[:] = sorted(
            name
            for name in subdirectories
            if not name.startswith((".", "__")) and not _is_foreign(Path(directory, name))
        )
        yield from (Path(directory, name) for name in sorted(names) if name.endswith(".py"))


def _is_foreign(folder: Path) -> bool:
    return _is_installed(folder) or (folder / "pyvenv.cfg").exists() or (folder / "latest").is_symlink()


def _is_installed(path: Path) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(path.parts)


def _named_path(folder: Path, word: str) -> Path | None:
    if not word or len(word) > _MAX_NAME_CHARS or "\0" in word:
        return None
    return Path(os.path.normpath(folder / word))


def _is_own_file(path: Path) -> bool:
    return _is_file(path) and not _is_installed(path)


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):
        return False


def _digest_of_path(path: Path) -> str | None:
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            return _short_digest(*_directory_entries(path))
        if not stat.S_ISREG(status.st_mode):
            return None
        if status.st_size > _MAX_DIGEST_BYTES:
            return _short_digest(status.st_size, status.st_mtime_ns)
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except FileNotFoundError:
        return None
    except OSError:
        return _UNKNOWN


def _directory_entries(folder: Path) -> Iterator[tuple[str, int, int]]:
    entries_left = _MAX_ENTRIES
    for directory, subdirectories, names in os.walk(folder):
        subdirectories[:] = sorted(name for name in subdirectories if name != "__pycache__")
        for name in sorted(names)[:entries_left]:
            entries_left -= 1
            status = Path(directory, name).lstat()
            yield os.path.relpath(os.path.join(directory, name), folder), status.st_size, status.st_mtime_ns
        if not entries_left:
            return


def _relative_name(path: Path, working_dir: Path) -> str:
    """Return the path with secrets removed, relative to the working directory if possible."""
    base = working_dir.resolve()
    name = str(path.relative_to(base)) if path.is_relative_to(base) else str(path)
    return Secrets().text(name)


def names_with_verb(names: Collection[str]) -> str:
    """Return a short list of names and a verb, such as "helper.py, model.py, config.yaml and 3 more have"."""
    # If a file changes, the launch changes too, so the launch is only named if nothing else changed.
    shown_names = [name for name in names if name != LAUNCH_ENTRY] or list(names)
    more = len(shown_names) - _MAX_NAMES
    texts = [*shown_names[: _MAX_NAMES - 1], f"{more + 1} more"] if more > 0 else shown_names
    return f"{listing(texts)} {verb_for('has', texts)}"
