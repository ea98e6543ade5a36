"""Creates the configurations between both ends of a bisection: commits, mixed config files and environments."""

from __future__ import annotations

import hashlib
import io
import json
import re
import secrets
import shutil
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from nsa_harness.core.scenario.yaml_tree import Plain, value_text, visible
from nsa_harness.core.search.subject import PACKAGE
from nsa_harness.errors import HarnessError, UsageError
from nsa_harness.supervisor.storage.safe_directory import SafeDirectory, safe_file

_MAX_BYTES = 4 << 20
_ABSENT = object()  # the value of a key that one of two files does not have


class CannotMixError(HarnessError):
    """Raised if two configurations cannot be mixed on this machine."""


@dataclass(frozen=True, kw_only=True)
class DifferentKey:
    """A key with different values in two config files. A value is None if the file lacks the key or sets it to null."""

    path: tuple[str, ...]
    good: Plain
    bad: Plain

    @property
    def label(self) -> str:
        return ".".join(self.path)


def different_keys(good: Path, bad: Path) -> tuple[DifferentKey, ...]:
    """Return the keys whose values differ in two config files. Raise UsageError if a file is not a map."""
    good_config, bad_config = (_read_config(path) for path in (good, bad))
    return tuple(
        DifferentKey(
            path=path, good=_plain_value(_value_at(good_config, path)), bad=_plain_value(_value_at(bad_config, path))
        )
        for path in _differences(good_config, bad_config, ())
    )


def mixed_text(good: Path, bad: Path, bad_keys: Collection[str]) -> str:
    """Return the text of the good config file, with the values of `bad_keys` taken from the bad file."""
    config, bad_config = (_read_config(path) for path in (good, bad))
    for key in different_keys(good, bad):
        if key.label in bad_keys:
            _set_value(config, key.path, _value_at(bad_config, key.path))
    if good.suffix == ".json":
        return json.dumps(config, indent=1) + "\n"
    text = io.StringIO()
    _yaml().dump(config, text)
    return text.getvalue()


def digest(path: Path) -> str:
    directory, file = safe_file(path)
    return hashlib.sha256(directory.read_whole_file(file, _MAX_BYTES)).hexdigest()


def _read_config(path: Path) -> dict[str, Any]:
    try:
        directory, file = safe_file(path)
        text = directory.read_whole_file(file, _MAX_BYTES).decode("utf-8")
        config = json.loads(text) if path.suffix == ".json" else _yaml().load(text)
    except (OSError, ValueError, YAMLError) as error:
        why = visible(" ".join(str(error).split()), 200)
        raise UsageError(f"--set: {value_text(str(path))} cannot be read: {why}") from None
    if not isinstance(config, dict) or not all(isinstance(key, str) for key in config):
        raise UsageError(f"--set: {value_text(str(path))}: expected keys with values, as in lr: 0.1")
    return config


def _yaml() -> YAML:
    """Return a YAML parser that keeps comments, quotes and the format of numbers."""
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 10_000
    return yaml


def _differences(good: Any, bad: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if isinstance(good, dict) and isinstance(bad, dict):
        for key in dict.fromkeys((*good, *bad)):
            yield from _differences(good.get(key, _ABSENT), bad.get(key, _ABSENT), (*path, str(key)))
    # The texts are compared, because 1, 1.0 and true differ.
    elif (good is _ABSENT) != (bad is _ABSENT) or repr(_plain_value(good)) != repr(_plain_value(bad)):
        yield path


def _value_at(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree.get(key, _ABSENT) if isinstance(tree, dict) else _ABSENT
    return tree


def _set_value(tree: Any, path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        tree = tree[key]
    if value is _ABSENT:
        del tree[path[-1]]
    else:
        tree[path[-1]] = value


def _plain_value(value: Any) -> Plain:
    if isinstance(value, dict):
        return {str(key): _plain_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain_value(item) for item in value]
    if value is _ABSENT or value is None:
        return None
    if isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return str(value)


# Environments.


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The environment variables and packages of a bisection's known-good or known-bad configuration.

    `packages` maps a normalized name to a version, or to a requirement with a URL. `python` is the interpreter if the
    environment is a virtual environment, otherwise None.
    """

    variables: Mapping[str, str]
    packages: Mapping[str, str]
    python: str | None = None


_VARIABLE = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(?!=)(.*)")
_PINNED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;]+)(?:\s*;.*)?")
_FROM_URL = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*@\s*(\S+)")
_PACKAGES_SCRIPT = """
import importlib.metadata as m, json
found = {}
for one in m.distributions():
    name = one.metadata["Name"]
    if name and name not in found:
        files = [str(file).replace(chr(92), "/").split("/") for file in one.files or ()]
        tops = {parts[0].removesuffix(".py") for parts in files if len(parts) > 1 or parts[0].endswith(".py")}
        found[name] = [one.version, sorted(top for top in tops if top.isidentifier() and top != "__pycache__")]
print(json.dumps(found))
"""


def read_environment(path: Path) -> Environment:
    """Read a virtual environment, or a file of NAME=VALUE or name==version lines. Raise UsageError if that fails."""
    if path.is_dir():
        python = path / "bin" / "python"
        if not python.exists():
            raise UsageError(
                f"--env-file: {value_text(str(path))} is a directory without bin/python, so not a virtual environment"
            )
        packages = {name: version for name, (version, _) in installed_packages(str(python)).items()}
        return Environment(variables={}, packages=packages, python=str(python))
    try:
        directory, file = safe_file(path)
        text = directory.read_whole_file(file, _MAX_BYTES).decode("utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"--env-file: {value_text(str(path))} cannot be read: {error}") from None
    return _parse_environment(path, text)


def _parse_environment(path: Path, text: str) -> Environment:
    variables: dict[str, str] = {}
    packages: dict[str, str] = {}
    mistakes = []
    for number, line in enumerate(map(str.strip, text.splitlines()), start=1):
        if not line or line.startswith("#"):
            continue
        if match := _VARIABLE.fullmatch(line):
            variables[match[1]] = _unquote(match[2].strip())
        elif match := _PINNED.fullmatch(line):
            packages[_normalize(match[1])] = match[2]
        elif match := _FROM_URL.fullmatch(line):
            packages[_normalize(match[1])] = line
        else:
            mistakes.append(
                f"{path}:{number}: expected NAME=VALUE, name==version or name @ URL, got {value_text(line)}"
            )
    if mistakes:
        raise UsageError("\n".join(f"--env-file: {mistake}" for mistake in mistakes))
    return Environment(variables=variables, packages=packages)


def _unquote(text: str) -> str:
    match = re.fullmatch(r"(['\"])(.*)\1\s*(?:#.*)?", text)
    return match[2] if match else re.sub(r"\s+#.*", "", text)


def _normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@cache
def installed_packages(python: str) -> Mapping[str, tuple[str, tuple[str, ...]]]:
    """Map the normalized name of each installed package to its version and modules. Raise UsageError if that fails."""
    try:
        process = subprocess.run(
            [python, "-c", _PACKAGES_SCRIPT], capture_output=True, text=True, timeout=60.0, check=True
        )
        distributions = json.loads(process.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise UsageError(f"the packages of {python} cannot be listed: {error}") from None
    return {_normalize(name): (version, tuple(tops)) for name, (version, tops) in distributions.items()}


_PIP_TIMEOUT_S = 600.0
_PIP = ("-m", "pip", "install", "--no-deps", "--no-input", "--disable-pip-version-check", "--quiet", "--target")


@dataclass(kw_only=True)
class Mixtures:
    """The directory for a bisection's mixed configurations. The user's own environments are never changed."""

    home: Path
    _pip_errors: dict[str, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def file(self, name: str, text: str) -> Path:
        """Write a config file to this directory, and return its path."""
        self._make_home()
        path = self.home / name
        SafeDirectory(self.home).write(path, text)
        return path

    def python_path(self, packages: Mapping[str, Plain], python: str | None) -> tuple[str, ...]:
        """Return directories for PYTHONPATH from which an interpreter imports the package versions in `packages`.

        They must come first. A package whose version is None is hidden. Raise CannotMixError with the reason from pip
        if an installation fails.
        """
        interpreter = python or sys.executable
        distributions = installed_packages(interpreter)
        folders = []
        with self._lock:
            for name, wanted_version in packages.items():
                version, modules = distributions.get(name, (None, ()))
                if wanted_version == version:
                    continue
                if wanted_version is None:
                    others = {top for other, (_, tops) in distributions.items() if other != name for top in tops}
                    folders.append(self._without_package(name, modules, others))
                else:
                    folders.append(self._with_package(name, str(wanted_version), interpreter))
        return tuple(map(str, folders))

    def _with_package(self, name: str, wanted_version: str, python: str) -> Path:
        requirement = wanted_version if "@" in wanted_version else f"{name}=={wanted_version}"
        folder = self.home / f"{name}-{hashlib.sha256(f'{requirement} {python}'.encode()).hexdigest()[:8]}"
        if folder.is_dir():
            return folder
        if requirement not in self._pip_errors:
            self._make_home()
            unfinished = folder.with_name(f".{folder.name}")
            shutil.rmtree(unfinished, ignore_errors=True)
            why = _pip_install(unfinished, requirement, python)
            if not why:
                unfinished.rename(folder)
                return folder
            self._pip_errors[requirement] = f"pip install {requirement}: {why}"
        raise CannotMixError(self._pip_errors[requirement])

    def _without_package(self, name: str, modules: Collection[str], others: Collection[str]) -> Path:
        """Return a directory for PYTHONPATH that hides a package. Raise CannotMixError if it cannot be hidden."""
        shared_module = next((module for module in modules if module in others), None)
        if shared_module is not None or not modules:
            why = (
                f"its module {shared_module} has other packages in it"
                if shared_module
                else "it has no module of its own"
            )
            raise CannotMixError(f"{name} cannot be taken away: {why}")
        folder = self.home / f"without-{name}"
        self._make_home()
        directory = SafeDirectory(self.home)
        directory.make_directory(folder)
        for module in modules:
            text = f"raise ModuleNotFoundError({f'No module named {module!r}'!r}, name={module!r})\n"
            directory.write(folder / f"{module}.py", text)
        return folder

    def _make_home(self) -> None:
        self.home.mkdir(mode=0o700, parents=True, exist_ok=True)


def _pip_install(folder: Path, requirement: str, python: str) -> str:
    """Install a package into a directory. Return the error message, or "" on success."""
    try:
        process = subprocess.run(
            [python, *_PIP, str(folder), requirement],
            capture_output=True,
            text=True,
            timeout=_PIP_TIMEOUT_S,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return visible(str(error))
    if process.returncode == 0:
        return ""
    lines = [line for line in process.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")] or lines or ["no reason given"]
    return visible(errors[-1].removeprefix("ERROR: "))


def environment_differences(good: Environment, bad: Environment) -> Iterator[tuple[str, Plain, Plain]]:
    """Yield the name, good and bad value of each different variable or "package.NAME". None: it is missing."""
    for name in sorted({*good.variables, *bad.variables}):
        if good.variables.get(name) != bad.variables.get(name):
            yield name, good.variables.get(name), bad.variables.get(name)
    for name in sorted({*good.packages, *bad.packages}):
        if good.packages.get(name) != bad.packages.get(name):
            yield f"{PACKAGE}{name}", good.packages.get(name), bad.packages.get(name)


# Commits.

_GIT_TIMEOUT_S = 120.0
_MAX_SUBJECT_CHARS = 60


def commits_between(inside: Path, good: str, bad: str) -> tuple[str, dict[str, str]]:
    """Return the good commit, and the later ones up to `bad` along first parents, oldest first, with their labels.

    Raise UsageError if a name is not a commit, or if there is no such path.
    """
    shas = [commit_of(inside, name) for name in (good, bad)]
    if _git(inside, "merge-base", "--is-ancestor", *shas).returncode != 0:
        raise UsageError(f"--commits: {good} is not an ancestor of {bad}; name the older, good commit first")
    log = _git(inside, "log", "--reverse", "--first-parent", "--format=%h %s", f"{shas[0]}..{shas[1]}")
    later = [line.partition(" ") for line in log.stdout.splitlines()]
    if not later:
        raise UsageError(f"--commits: there is no commit between {good} and {bad}")
    labels = {sha: f"{sha} {text[:_MAX_SUBJECT_CHARS]}" for sha, _, text in later}
    return _git(inside, "rev-parse", "--short", shas[0]).stdout.strip(), labels


# A script for a separate process that waits until its input is closed, which also happens if nsa-harness is killed. Its
# arguments are the repository and a directory. It removes all worktrees in this directory.
_REMOVE_WORKTREES = """
while read -r _; do :; done
for tree in "$2"/*/ "$2"/*/*/; do [ -e "$tree.git" ] && git -C "$1" worktree remove --force --force "$tree"; done
rm -rf "$2"
rmdir "${2%/*}"
git -C "$1" worktree prune
"""


@dataclass(kw_only=True)
class Worktrees:
    """Git worktrees for an experiment's commits. `close` removes them, or a separate process if this one is killed."""

    repository: Path  # any directory in the repository
    home: Path  # contains only worktrees of this experiment, in one directory per session
    checkouts: dict[str, Path] = field(default_factory=dict)
    # A new session must not use a directory that the remover of a killed session may be deleting.
    _session_dir: Path = field(init=False)
    _remover: subprocess.Popen[bytes] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._session_dir = self.home / secrets.token_hex(4)

    def checkout(self, sha: str) -> Path:
        """Check out a commit, and return the directory that corresponds to `repository`, or raise UsageError."""
        if sha not in self.checkouts:
            self._remover = self._remover or self._start_remover(self._session_dir)
            path = self._session_dir / sha
            process = _git(self.repository, "worktree", "add", "--detach", "--force", str(path), sha)
            if process.returncode != 0:
                raise UsageError(f"git worktree of {sha}: {_last_line(process.stderr)}")
            self.checkouts[sha] = path
        root = _git(self.repository, "rev-parse", "--show-toplevel").stdout.strip()
        inside = self.repository.resolve().relative_to(root)
        if not (self.checkouts[sha] / inside).is_dir():
            raise UsageError(f"{sha} has no directory {inside}")
        return self.checkouts[sha] / inside

    def close(self) -> None:
        """Remove all worktrees in `home`, including those of earlier sessions that were killed."""
        if self._remover is not None:
            self._let_remove(self._remover)
        if self.home.is_dir():
            self._let_remove(self._start_remover(self.home))
        self._remover = None
        self.checkouts.clear()

    def _start_remover(self, directory: Path) -> subprocess.Popen[bytes]:
        """Start the process that removes all worktrees in `directory` once its input is closed."""
        return subprocess.Popen(
            ["sh", "-c", _REMOVE_WORKTREES, "sh", str(self.repository.resolve()), str(directory)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal must not end it
        )  # fmt: skip

    def _let_remove(self, remover: subprocess.Popen[bytes]) -> None:
        """Let a remover remove its worktrees, and wait until it has ended."""
        try:
            remover.communicate(timeout=_GIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            remover.kill()
            remover.wait()


def commit_of(inside: Path, name: str) -> str:
    """Return the full hash of the commit that `name` refers to. Raise UsageError if there is no such commit."""
    process = _git(inside, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    if process.returncode != 0:
        why = f": {_last_line(process.stderr)}" if process.stderr.strip() else ""
        raise UsageError(f"--commits: {name!r} is not a commit of the repository at {inside}{why}")
    return process.stdout.strip()


def _git(inside: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = ["git", "-C", str(inside), *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"git {words[0]}: {error}; is git installed?") from None


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1] if text.strip() else "no reason given"
