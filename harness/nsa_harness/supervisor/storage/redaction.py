"""Redacts all text of one run before it is stored or shown, and keeps the numbers of its secrets."""

from __future__ import annotations

import getpass
import json
import os
import secrets
import shlex
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from nsa_harness.core.plan import RunSpec, Skip
from nsa_harness.core.redaction import Secrets, shell_line, shell_words
from nsa_harness.supervisor.storage.safe_directory import safe_file

T = TypeVar("T")
Launch = TypeVar("Launch", RunSpec, RunSpec | Skip)

_MAX_BYTES = 16 << 20


class Redaction:
    """A collection of the secrets of one run, which removes them from text and is shared by all attempts.

    `file` keeps the number of each secret for later judgements, as a keyed hash of the secret. If `is_on` is False,
    nothing is redacted.
    """

    def __init__(self, file: Path | None = None, *, is_on: bool = True) -> None:
        self._file = file
        self.is_on = is_on
        self._lock = threading.RLock()
        self._loaded: Secrets | None = None
        self._key = b""

    @property
    def _secrets(self) -> Secrets:
        if self._loaded is None:
            stored = self._stored()
            with suppress(ValueError, TypeError, AttributeError, KeyError):
                self._key = bytes.fromhex(stored["key"])
                digests = [(str(digest), int(length)) for digest, length in stored["secrets"]]
                self._loaded = Secrets(self._key[:64], digests, _common_words(self._file))
        if self._loaded is None:
            self._key = secrets.token_bytes(16)
            self._loaded = Secrets(self._key, common=_common_words(self._file))
        return self._loaded

    @property
    def found_secrets(self) -> bool:
        """Whether any text so far contained a secret."""
        return bool(self._secrets)

    def to_store(self) -> str:
        """Return the contents of `file`: the key, and one hash for each secret."""
        return json.dumps({"key": self._key.hex(), "secrets": self._secrets.to_store()}) + "\n"

    # Finding secrets before anything is written.

    def learn_launch(self, spec: RunSpec) -> None:
        """Find the secrets in the command line and environment variables of a launch."""
        paths = (*spec.program, spec.cwd or "", spec.scenario)
        with self._lock:
            self._secrets.common |= {part.lower() for path in paths if "=" not in path for part in _parts(path)}
            self._secrets.words(spec.program)
            self.pairs(spec.env)

    def suspect_environment(self, environment: Mapping[str, str]) -> None:
        """Treat the values of secret variables in `environment` as secrets in all text redacted afterwards."""
        with self._lock:
            self._secrets.suspect(environment)

    # Redacting texts.

    def text(self, text: str, *, code: bool = False) -> str:
        """Return the text with secrets redacted. `code`: an unquoted word is a name and not a value."""
        with self._lock:
            return self._secrets.text(text, code=code) if self.is_on else text

    def json(self, text: str) -> str:
        """Return a JSON document or JSON lines with secrets removed."""
        with self._lock:
            return self._secrets.json(text) if self.is_on else text

    def value(self, value: T) -> T:
        """Return a copy of an object in which all strings are redacted."""
        with self._lock:
            return self._secrets.value(value) if self.is_on else value

    def mask(self, data: bytes) -> bytes:
        """Return binary data of the same length in which stars replace the secrets."""
        with self._lock:
            return self._secrets.mask(data) if self.is_on else data

    def spec(self, spec: Launch) -> Launch:
        """Return the launch with its arguments and environment variables redacted."""
        if not self.is_on or not isinstance(spec, RunSpec):
            return spec
        self.learn_launch(spec)
        return self.value(replace(spec, program=self._words(spec.program), env=self.pairs(spec.env)))

    def command(self, words: Sequence[str], environment: Sequence[tuple[str, str]] = ()) -> str:
        """Return a command as one shell line, in which variables replace the secrets."""
        if not self.is_on:
            return " ".join([*(f"{name}={shell_words([value])}" for name, value in environment), shell_words(words)])
        return shell_line(self._words(words), self.pairs(environment))

    def command_text(self, command: str) -> str:
        """Return a shell command with secrets removed."""
        try:
            return self.command(shlex.split(command))
        except ValueError:  # a quote without an end
            return self.text(command)

    def pairs(self, environment: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
        """Return pairs of variable and value without secrets. A name reveals even a secret of two letters."""
        if not self.is_on:
            return tuple(environment)
        with self._lock:
            return tuple((name, self._secrets.variable(name, value)) for name, value in environment)

    def _words(self, words: Sequence[str]) -> tuple[str, ...]:
        with self._lock:
            return self._secrets.words(words)

    def _stored(self) -> Any:
        if self._file is None:
            return None
        directory, file = safe_file(self._file)
        try:
            return json.loads(directory.read_whole_file(file, _MAX_BYTES))
        except (OSError, ValueError, RecursionError):
            return None


def _common_words(file: Path | None) -> set[str]:
    """Return words that texts of the run contain for other reasons: the user, the host, and parts of our paths."""
    words = {socket.gethostname(), socket.gethostname().partition(".")[0]}
    with suppress(OSError, KeyError, ImportError):
        words.add(getpass.getuser())
    for path in (str(file or ""), os.getcwd(), str(Path.home()), os.path.realpath(".")):
        words.update(_parts(path))
    return words


def _parts(path: str) -> list[str]:
    """Return the names of directories and files in a path, with and without their suffixes."""
    names = path.replace("\\", "/").split("/") if "/" in path or path.endswith(".py") else []
    return [part for name in names for part in (name, name.partition(".")[0])]
