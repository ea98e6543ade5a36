"""Every error a user can cause. The text names the thing, the value, the place and the next step.

HarnessError
├── UsageError      a wrong option, pattern, override or environment value      exit 2
├── ScenarioError   a scenario file that cannot be used, all mistakes at once   exit 2
├── StoredRunError  a run directory that cannot be read                         exit 2
│   └── StillRunning    one that a nsa-harness is running: not judged yet       exit 125
├── MissingNeed     named on the command line, and this machine cannot          exit 2
├── NoSuchJob       a process to attach to that is gone, or not ours            exit 2
└── CommandNotStarted   watch: there is no such command, or it is no program    exit 127, 126
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class HarnessError(Exception):
    """An error the user can mend. Printed as it is, without a traceback."""

    exit_code = 2


class UsageError(HarnessError):
    pass


class ScenarioError(HarnessError):
    """All mistakes of the files that were read, one line each, `file:line:column: key: what is wrong`."""

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
    """With the exit code that a shell would give."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A clause that names the closest known word, or an empty text when none is close."""
    by_small_letters = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(word[:100].lower(), by_small_letters, n=1, cutoff=0.6)
    return f'; did you mean "{by_small_letters[close[0]]}"?' if close else ""
