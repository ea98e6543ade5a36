"""The errors that a user can cause. The text names the thing, the value, the location and the next step.

HarnessError
├── UsageError      a wrong option, pattern, override or environment value      exit 2
├── ScenarioError   a scenario file that cannot be used, all mistakes at once   exit 2
├── StoredRunError  a run directory that cannot be read                         exit 2
│   └── StillRunning    a run that is still in progress, so not judged yet      exit 125
├── MissingNeed     a need from the command line that this machine cannot meet  exit 2
├── NoSuchJob       attach: the process is gone, or belongs to another user     exit 2
└── CommandNotStarted   watch: no such command, or it is not executable         exit 127, 126
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class HarnessError(Exception):
    """An error that the user can fix. It is printed without a traceback."""

    exit_code = 2


class UsageError(HarnessError):
    pass


class ScenarioError(HarnessError):
    """Raised for mistakes in scenario files. The text has one line per mistake: `file:line:column: key: what is
    wrong`.
    """

    def __init__(self, mistakes: Sequence[str]) -> None:
        self.mistakes = tuple(mistakes)
        super().__init__("\n".join(self.mistakes))


class StoredRunError(HarnessError):
    pass


class StillRunning(StoredRunError):
    exit_code = 125


class MissingNeed(HarnessError):
    pass


class MissingTorch(HarnessError):
    exit_code = 125


class NoSuchJob(HarnessError):
    pass


class CommandNotStarted(HarnessError):
    """Raised if the command of `watch` cannot be started. The exit code is the code that a shell would return."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a clause that suggests the most similar valid word, or "" if none is similar."""
    by_small_letters = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(word[:100].lower(), by_small_letters, n=1, cutoff=0.6)
    return f'; did you mean "{by_small_letters[close[0]]}"?' if close else ""
