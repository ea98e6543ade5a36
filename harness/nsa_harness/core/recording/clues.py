"""Rank candidates by the reasons for which their lines were found."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from math import prod

from nsa_harness.core.recording.explanation import Candidate, OriginKind
from nsa_harness.core.recording.statements import Statements
from nsa_harness.core.report import Place

OPEN = (OriginKind.CALL, OriginKind.UNKNOWN)  # kinds that do not say what makes the difference

_PRIOR = 0.5  # share of right lines in one more line that is assumed, so that no rate is 0 or 1
_TELLS_ORIGIN = 0.5  # rate of a clue that tells where a difference began, and not only where it shows


class Clue(Enum):
    """A reason to suspect a line, and of how many lines with this reason how many were right.

    The second pair of numbers counts only programs whose first line was wrong. They were counted in the 132 failing
    programs of the rounds 1 to 8. A line is right if a fix touches one within 2 lines of it. BEGINS, BEGINS_BY_RANK,
    SEEDED and ROLE_COMMUNICATES are newer: they were counted in 66 failing programs of the rounds 9 to 12, and DEALT in
    the same programs and one of round 13.
    """

    CHILD = (
        "a child process for which its rank waited, such as a DataLoader worker, stopped or raised here",
        (3, 5),
        (0, 0),
    )
    STALE = (
        "what differs although the run passed is made or first used here, or was left out here",
        (5, 8),
        (0, 0),
    )
    THREAD = "an exception that nothing handled ended a thread which began here", (9, 9), (0, 0)
    SHARD = (
        "data that decide were divided here by the number of the rank, into parts of different sizes",
        (4, 4),
        (0, 0),
    )
    # Data from which a number of iterations comes were dealt out by the number of the rank here.
    DEALT = "dealt by rank", (3, 6), (0, 0)
    LEAK_CALLER = "only one rank made this call, in which a value that decides was defined", (3, 3), (0, 0)
    ROLE_DEFINES = (
        "the number of the rank decides here what is passed to a function that makes the value",
        (1, 1),
        (0, 0),
    )
    LEFT_OUT = "a function ended here before a call for which a thread waits", (7, 9), (0, 0)
    PEER_LEFT = (
        "peer had left",
        (1, 1),
        (0, 0),
    )  # lost the connection in this call, which a rank that ended had finished
    HANDLER = (
        "an exception that only one rank raised here, or stopped handling here, made the ranks part",
        (14, 19),
        (1, 1),
    )
    STEP_BEFORE = "ranks parted here before an exception that reports what the step before left out", (6, 8), (0, 1)
    LEAK = "only one rank executed this definition of a value that decides soon after, or draw", (5, 7), (0, 0)
    SOURCE = "a value that decides comes from the clock, a hash, a checkpoint or another rank's file", (9, 16), (0, 0)
    # Data of the ranks first make a number, a length or a decision differ here, which made the ranks part.
    BEGINS = "data decide first", (13, 19), (0, 0)
    # A number that made the ranks part was computed from the number of the rank here.
    BEGINS_BY_RANK = "computed by rank", (1, 4), (0, 0)
    SEEDED = "seed that decides", (2, 2), (0, 0)  # a random generator from which a decision was drawn got its seed here
    # The number of the rank decides here who makes an operation that needs all of them.
    ROLE_COMMUNICATES = "role communicates alone", (2, 2), (0, 0)
    QUOTED = "named by exceptions", (1, 2), (0, 0)  # made a number that the exception of all ranks names
    RAISED = "an exception of the rank itself was raised here", (18, 37), (3, 5)
    BEFORE_ALONE = "this statement led to the latest one that only one rank ever executed", (26, 56), (2, 8)
    NEW_PARTING = "ranks parted here as they never had before, and last of all", (37, 80), (2, 9)
    DIVISION = "ranks parted here, and from here on their communication differs", (28, 66), (0, 8)
    MESSAGE = "a message for which a rank waits was left out here, or got its tag here", (6, 18), (4, 8)
    OLDER_PARTING = "ranks parted here as they never had before, and last but one", (19, 61), (5, 16)
    ALONE = "the latest statement that only one rank ever executed", (31, 114), (5, 33)
    NEAREST = "the nearest definition of a value that decides and differs", (29, 109), (4, 23)
    MESSAGE_VALUE = "decided a message", (3, 13), (2, 7)  # made what decides whether the message is left out
    NEAR = "one of the next definitions of such a value, or the condition that chose it", (56, 254), (15, 69)
    NEW_WAY = "shortly before its end a rank went on from here as it never had before", (87, 438), (23, 142)
    END = "a thread stopped here outside of communication", (16, 83), (4, 23)
    FILE_CHANGED = "a file was written or removed here whose content or existence decides", (2, 12), (1, 5)
    ROLE = "ranks parted here, but only their number decides", (21, 114), (9, 41)
    OPERATION = "only one rank made this operation", (17, 113), (6, 40)
    OWN_NUMBER = (
        "a definition that differs by the rank's number, or although nothing that it reads differs",
        (23, 173),
        (6, 54),
    )

    def rate(self, *, is_first: bool) -> float:
        """Return the share of right lines among the first lines, or among those that follow a wrong first line."""
        _, first, later = self.value
        right, found = first if is_first else later
        return (right + _PRIOR) / (found + 1)


Named = tuple[Clue, Candidate]


def likelihood(clues: Iterable[Clue], *, is_first: bool) -> tuple[bool, float]:
    """Return whether one of the clues tells an origin, and how likely a line is right that all of them name.

    A line that tells the origin comes before any line that only shows where the ranks parted, because the parting is
    its effect. The clues are taken as independent of each other.
    """
    rates = sorted(clue.rate(is_first=is_first) for clue in clues)  # a product of floats depends on their order
    return any(rate >= _TELLS_ORIGIN for rate in rates), 1 - prod(1 - rate for rate in rates)


def rank(named: Iterable[Named], statements: Statements, most: int) -> list[Candidate]:
    """Return at most `most` candidates, most likely first, and only one of those that are near to each other."""
    clues: dict[Place, set[Clue]] = {}
    best: dict[Place, Candidate] = {}
    for clue, candidate in named:
        place = candidate.place
        if place.line:
            clues.setdefault(place, set()).add(clue)
            if clue is Clue.BEGINS and candidate.is_provable:
                best[place] = candidate
            elif place not in best or best[place].kind in OPEN:
                best[place] = candidate if candidate.kind not in OPEN else best.get(place, candidate)
    # A line whose condition only tells the ranks from each other says nothing about the lines near it.
    usual = {place: found for place, found in clues.items() if Clue.ROLE not in found}
    around = {place: {Clue.ROLE} for place in clues} | {
        place: set().union(*(usual[other] for other in usual if statements.near(place, other))) for place in usual
    }
    ranked: list[Candidate] = []
    remaining = list(clues)
    while remaining and len(ranked) < most:
        scores = {
            place: tuple(likelihood(found[place], is_first=not ranked) for found in (around, clues))
            for place in remaining
        }
        chosen = max(remaining, key=scores.__getitem__)
        near = [place for place in remaining if statements.near(place, chosen)]
        # Only the line where a difference begins can be proven, of all lines near to it.
        begins = (place for place in near if Clue.BEGINS in clues[place] and best[place].is_provable)
        chosen = next(begins, chosen)
        ranked.append(best[chosen])
        remaining = [place for place in remaining if not statements.near(place, chosen)]
    return ranked
