"""Errors that a user can cause and fix.

HarnessError
├── UsageError      a wrong option, pattern, override or environment value      exit 2
├── ScenarioError   a scenario file that cannot be used, all errors at once     exit 2
├── StoredRunError  a run directory that cannot be read                         exit 2
│   └── StillRunning    a run that is still in progress, so not judged yet      exit 125
├── MissingNeed     a need from the command line that this machine cannot meet  exit 2
├── MissingTorch    no interpreter with torch was found                         exit 125
├── NoSuchJob       attach: the process is gone, or belongs to another user     exit 2
└── CommandNotStarted   watch: no such command, or it is not executable         exit 127, 126
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class HarnessError(Exception):
    """An error that the user can fix and that is therefore printed without a traceback."""

    exit_code = 2


class UsageError(HarnessError):
    """Raised if an option, pattern, override or environment value is wrong."""


class ScenarioError(HarnessError):
    """Raised if scenario files contain errors. The message has one line per error."""

    def __init__(self, mistakes: Sequence[str]) -> None:
        self.mistakes = tuple(mistakes)
        super().__init__("\n".join(self.mistakes))


class StoredRunError(HarnessError):
    """Raised if a run directory cannot be read or used."""


class StillRunning(StoredRunError):
    """Raised if a run is still in progress and cannot be judged yet."""

    exit_code = 125


class MissingNeed(HarnessError):
    """Raised if the machine lacks something that the command line requires, such as a GPU."""


class MissingTorch(HarnessError):
    """Raised if no Python interpreter with torch was found."""

    exit_code = 125


class NoSuchJob(HarnessError):
    """Raised if the job to attach to does not exist or belongs to another user."""


class CommandNotStarted(HarnessError):
    """Raised if the command of `nsa-harness watch` cannot be started.

    The exit code is the code that a shell would return.
    """

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def did_you_mean(name: str, valid_names: Iterable[str]) -> str:
    """Return a sentence that suggests the most similar valid name, or "" if no name is similar."""
    by_lower_case = {candidate.lower(): candidate for candidate in valid_names}
    matches = difflib.get_close_matches(name[:100].lower(), by_lower_case, n=1, cutoff=0.6)
    return f'; did you mean "{by_lower_case[matches[0]]}"?' if matches else ""
