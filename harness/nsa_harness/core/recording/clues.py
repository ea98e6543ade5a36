"""Say how likely a line is the one to change, by the reasons for which it was found."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from math import prod

_PRIOR = 0.2  # share of right lines in one more line that is assumed, so that no rate is 0 or 1


class Clue(Enum):
    """A reason to suspect a line, and of how many lines with this reason how many were right.

    They were counted in the 108 failing programs of the rounds 1 to 6. A line is right if a fix touches one within 2
    lines of it.
    """

    CHILD = "a child process for which its rank waited, such as a DataLoader worker, stopped or raised here", 3, 5
    STALE = "parameters that differ were made here, or others were collected before, to make them equal", 5, 8
    THREAD = "an exception that nothing handled ended a thread which began here", 9, 9
    HANDLER = "an exception that only one rank raised here, or stopped handling here, made the ranks part", 12, 16
    STEP_BEFORE = "ranks parted here before an exception that reports what the step before left out", 6, 8
    SOURCE = "a value that decides comes from the clock, a hash, a checkpoint or another rank's file", 4, 6
    LEAK = "only one rank executed this definition of a value that decides soon after, or draw", 3, 5
    RAISED = "an exception of the rank itself was raised here", 17, 33
    NEW_PARTING = "ranks parted here as they never had before, and last of all", 33, 65
    DIVISION = "ranks parted here, and from here on their communication differs", 26, 53
    BEFORE_ALONE = "this statement led to the latest one that only one rank ever executed", 24, 49
    FILE_CHANGED = "a file was written or removed here whose content or existence decides", 2, 4
    MESSAGE = "a message for which a rank waits was left out here, or got its tag here", 6, 15
    LEAK_CALLER = "only one rank made this call, in which a value that decides was defined", 3, 8
    NEAREST = "the nearest definition of a value that decides and differs", 18, 52
    OLDER_PARTING = "ranks parted here as they never had before, and last but one", 17, 50
    ALONE = "the latest statement that only one rank ever executed", 27, 97
    NEAR = "one of the next definitions of such a value, or the condition that chose it", 41, 163
    END = "a thread stopped here outside of communication", 15, 69
    NEW_WAY = "shortly before its end a rank went on from here as it never had before", 79, 365
    ROLE = "ranks parted here, but only their number decides", 19, 95
    OPERATION = "only one rank made this operation", 13, 94
    OWN_NUMBER = "a definition that differs by the rank's number, or although nothing that it reads differs", 10, 89

    @property
    def rate(self) -> float:
        _, right, found = self.value
        return (right + _PRIOR) / (found + 1)


def likelihood(clues: Iterable[Clue]) -> float:
    """Return how likely a line is right that all these clues name. They are taken as independent of each other."""
    return 1 - prod(1 - clue.rate for clue in clues)
