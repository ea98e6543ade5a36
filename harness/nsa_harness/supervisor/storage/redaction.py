"""What is known of the secrets of one run, and the way by which texts pass on to its documents."""

from __future__ import annotations

import json
import shlex
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from nsa_harness.core.plan import RunSpec, Skip
from nsa_harness.core.redaction import (
    Found,
    Secrets,
    of_environment,
    of_words,
    redacted,
    redacted_environment,
    redacted_json,
    redacted_value,
    redacted_words,
    shell_line,
    texts_of,
    typed,
)
from nsa_harness.supervisor.storage.safe_directory import named

T = TypeVar("T")
Launch = TypeVar("Launch", RunSpec, RunSpec | Skip)

_MAX_BYTES = 16 << 20


class Redaction:
    """Learns secrets from every text that passes, and takes them out. Several attempts may use one at a time.

    `file`: values of the environment that the program has printed. Its logs hold them anyway, but nothing else says of
    what is found there that it is a secret, once that environment is gone.
    """

    def __init__(self, file: Path | None = None, *, on: bool = True) -> None:
        self._file = file
        self.on = on
        self._lock = threading.RLock()
        self._secrets: Secrets | None = None

    @property
    def secrets(self) -> Secrets:
        with self._lock:
            if self._secrets is None:
                self._secrets = Secrets().with_found(Found(value=one, everywhere=True) for one in self._stored())
            return self._secrets

    @property
    def printed(self) -> tuple[str, ...]:
        """What of the environment a text has shown."""
        secrets = self.secrets
        return tuple(one.value for one in secrets.numbered if one.value in secrets.suspected)

    # What is learned before anything is written.

    def know_launch(self, spec: RunSpec) -> None:
        self._learn([*of_words(spec.program), *of_environment(spec.env)])

    def suspect(self, environment: Mapping[str, str]) -> None:
        """Of what every process inherits, most is never seen in a run: no number for that."""
        values = [one.value for one in of_environment(environment.items()) if one.everywhere]
        with self._lock:
            self._secrets = self.secrets.with_suspected(values)

    def _learn(self, found: Iterable[Found]) -> None:
        with self._lock:
            self._secrets = self.secrets.with_found(found)

    # What passes on.

    def text(self, text: str, *, code: bool = False) -> str:
        """`code`: source, where a bare name may stand for a value."""
        return redacted(text, self._learned(text, code=code), code=code) if self.on else text

    def json(self, text: str) -> str:
        """A JSON document, or lines of them. One with nothing to take out is not parsed."""
        secrets = self._learned(text)
        return redacted_json(text, secrets) if self.on and redacted(text, secrets) != text else text

    def value(self, value: T) -> T:
        """A value of the core, with all texts in it."""
        if not self.on:
            return value
        texts = texts_of(value)
        secrets = self._learned(texts)
        return value if redacted(texts, secrets) == texts else redacted_value(value, secrets)

    def spec(self, spec: Launch) -> Launch:
        """Its command and its environment word by word, where a value of two letters is known by its name."""
        if not self.on or not isinstance(spec, RunSpec):
            return spec
        self.know_launch(spec)
        words = redacted_words(spec.program, self.secrets)
        return self.value(replace(spec, program=words, env=self.pairs(spec.env)))

    def command(self, words: Sequence[str], environment: Sequence[tuple[str, str]] = ()) -> str:
        """As a shell takes it, which fills in what was taken out."""
        if not self.on:
            return " ".join([*(f"{name}={typed([value])}" for name, value in environment), typed(words)])
        self._learn(of_words(words))
        return shell_line(redacted_words(words, self.secrets), self.pairs(environment))

    def typed(self, command: str) -> str:
        """A whole command in the words of a shell."""
        try:
            return self.command(shlex.split(command))
        except ValueError:  # a quote without an end
            return self.text(command)

    def pairs(self, environment: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
        """Variables with their values, where one of two letters is known by its name."""
        if not self.on:
            return tuple(environment)
        self._learn(of_environment(environment))
        return redacted_environment(environment, self.secrets)

    def _learned(self, text: str, *, code: bool = False) -> Secrets:
        if not self.on:
            return Secrets()
        with self._lock:
            self._secrets = self.secrets.learned(text, code=code)
            return self._secrets

    def _stored(self) -> Iterator[str]:
        if self._file is None:
            return
        door, file = named(self._file)
        try:
            values = json.loads(door.whole(file, _MAX_BYTES))
        except (OSError, ValueError, RecursionError):
            return
        yield from (one for one in values if isinstance(one, str)) if isinstance(values, list) else ()
