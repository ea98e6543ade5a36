"""Finds the secrets of one run, and redacts all text before it is stored or shown."""

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
    Secret,
    Secrets,
    joined_texts,
    redact,
    redact_environment,
    redact_json,
    redact_value,
    redact_words,
    secrets_of_command,
    secrets_of_environment,
    shell_line,
    shell_words,
)
from nsa_harness.supervisor.storage.safe_directory import safe_file

T = TypeVar("T")
Launch = TypeVar("Launch", RunSpec, RunSpec | Skip)

_MAX_BYTES = 16 << 20


class Redaction:
    """A collection of the secrets of one run, which removes them from text and is shared by all attempts.

    `file` contains the secret values of the environment that a program printed. It is needed for a later judgement,
    which runs in another environment and would not recognise these values as secrets. Storing them reveals nothing,
    because the logs contain them as well. If `is_on` is False, nothing is redacted.
    """

    def __init__(self, file: Path | None = None, *, is_on: bool = True) -> None:
        self._file = file
        self.is_on = is_on
        self._lock = threading.RLock()
        self._secrets: Secrets | None = None

    @property
    def secrets(self) -> Secrets:
        with self._lock:
            if self._secrets is None:
                self._secrets = Secrets().with_secrets(
                    Secret(value=secret, everywhere=True) for secret in self._stored_values()
                )
            return self._secrets

    @property
    def printed_secrets(self) -> tuple[str, ...]:
        """The secrets from environment variables that occurred in redacted text."""
        secrets = self.secrets
        return tuple(secret.value for secret in secrets.secrets if secret.value in secrets.suspected_values)

    # Finding secrets before anything is written.

    def learn_launch(self, spec: RunSpec) -> None:
        """Find the secrets in the command line and environment variables of a launch."""
        self._learn([*secrets_of_command(spec.program), *secrets_of_environment(spec.env)])

    def suspect_environment(self, environment: Mapping[str, str]) -> None:
        """Treat the values of secret variables in `environment` as secrets in all text redacted afterwards."""
        values = [secret.value for secret in secrets_of_environment(environment.items()) if secret.everywhere]
        with self._lock:
            self._secrets = self.secrets.with_suspected(values)

    def _learn(self, secrets: Iterable[Secret]) -> None:
        with self._lock:
            self._secrets = self.secrets.with_secrets(secrets)

    # Redacting texts.

    def text(self, text: str, *, code: bool = False) -> str:
        """Return the text with secrets redacted.

        `code`: the text is source code, so an unquoted word is a name and not a value.
        """
        return redact(text, self._learn_from(text, code=code), code=code) if self.is_on else text

    def json(self, text: str) -> str:
        """Return a JSON document or JSON lines with secrets removed."""
        secrets = self._learn_from(text)
        return redact_json(text, secrets) if self.is_on and redact(text, secrets) != text else text

    def value(self, value: T) -> T:
        """Return a copy of an object in which all strings are redacted."""
        if not self.is_on:
            return value
        texts = joined_texts(value)
        secrets = self._learn_from(texts)
        return value if redact(texts, secrets) == texts else redact_value(value, secrets)

    def spec(self, spec: Launch) -> Launch:
        """Return the launch with its arguments and environment variables redacted.

        Each argument is redacted separately, because the option before it reveals even a secret of two letters.
        """
        if not self.is_on or not isinstance(spec, RunSpec):
            return spec
        self.learn_launch(spec)
        words = redact_words(spec.program, self.secrets)
        return self.value(replace(spec, program=words, env=self.pairs(spec.env)))

    def command(self, words: Sequence[str], environment: Sequence[tuple[str, str]] = ()) -> str:
        """Return a command as one shell line, in which variables replace the secrets."""
        if not self.is_on:
            return " ".join([*(f"{name}={shell_words([value])}" for name, value in environment), shell_words(words)])
        self._learn(secrets_of_command(words))
        return shell_line(redact_words(words, self.secrets), self.pairs(environment))

    def command_text(self, command: str) -> str:
        """Return a shell command with secrets removed."""
        try:
            return self.command(shlex.split(command))
        except ValueError:  # a quote without an end
            return self.text(command)

    def pairs(self, environment: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
        """Return pairs of a variable and its value, with secrets removed.

        The name of a variable reveals even a secret of two letters.
        """
        if not self.is_on:
            return tuple(environment)
        self._learn(secrets_of_environment(environment))
        return redact_environment(environment, self.secrets)

    def _learn_from(self, text: str, *, code: bool = False) -> Secrets:
        if not self.is_on:
            return Secrets()
        with self._lock:
            self._secrets = self.secrets.with_secrets_of(text, code=code)
            return self._secrets

    def _stored_values(self) -> Iterator[str]:
        if self._file is None:
            return
        directory, file = safe_file(self._file)
        try:
            values = json.loads(directory.read_whole_file(file, _MAX_BYTES))
        except (OSError, ValueError, RecursionError):
            return
        yield from (value for value in values if isinstance(value, str)) if isinstance(values, list) else ()
