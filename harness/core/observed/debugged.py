"""What torch prints in its debugging modes: the forward line behind a failing backward, what was recomputed otherwise.

torch says these things in its log alone. The texts are those of 2.11 and 2.13.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from harness.core.observed.evidence import Debugged, Frame

_ANOMALY = re.compile(r"Error detected in (\w{1,80})\. Traceback of forward call that caused the error:")
_FORWARD = "Operations executed during the original forward:"
_RECOMPUTED = "Operations executed during recomputation:"
_TRACE = re.compile(r"^(?P<log>\S.*)   \((?P<number>\d+) of \d+ in (?P<pass>original|recompute)\)$")
_OPERATION = re.compile(r"= torch\._ops\.([\w.]{1,80})\(")
_PRINTED = re.compile(r'^ {2,}File "(.+)", line (\d+), in (.+)$')
_LISTED = re.compile(r"^(/.+\.py|<.+>):(\d+):(\S+)$")
_PREFIX = re.compile(r"^(?:\[rank\d+\]:? ?)+")
_MOST_LINES = 200


def debugged(log: str) -> Debugged | None:
    """The last thing of this kind that a rank printed, or None."""
    if "Traceback of forward call" not in log and _RECOMPUTED not in log:
        return None
    lines = [_PREFIX.sub("", line) for line in log.splitlines()]
    return _anomaly(lines) or _recomputed(lines)


def _anomaly(lines: Sequence[str]) -> Debugged | None:
    starts = [(number, found) for number, line in enumerate(lines) if (found := _ANOMALY.search(line))]
    if not starts:
        return None
    number, found = starts[-1]
    frames = tuple(_printed_frames(lines[number + 1 : number + 1 + _MOST_LINES]))
    return Debugged(operation=found[1], frames=frames[::-1]) if frames else None


def _printed_frames(lines: Sequence[str]) -> Iterator[Frame]:
    """Outermost first, up to the first line that belongs to no traceback."""
    for line in lines:
        if frame := _PRINTED.match(line):
            yield Frame(file=frame[1], line=int(frame[2]), function=frame[3])
        elif not line.startswith("    ") and line.strip():
            return


def _recomputed(lines: Sequence[str]) -> Debugged | None:
    """The first operation in which the recomputation is not the forward pass again, where it was called."""
    if _FORWARD not in lines or _RECOMPUTED not in lines:
        return None
    start, middle = lines.index(_FORWARD), lines.index(_RECOMPUTED)
    forward, again = _operations(lines[start:middle]), _operations(lines[middle : middle + _MOST_LINES * 10])
    for (number, before), (other, after) in zip_longest(forward, again, fillvalue=(0, "")):
        if before == after:
            continue
        frames = tuple(
            _listed_frames(lines, "original", number) if number else _listed_frames(lines, "recompute", other)
        )
        return Debugged(operation=before or after, instead=after if before else "", frames=frames, recomputed=True)
    return None


def _operations(lines: Sequence[str]) -> list[tuple[int, str]]:
    """Number from 1, and name, of each operation; checkpointing itself adds calls of detach."""
    found: list[tuple[int, str]] = []
    number = 0
    for line in lines:
        if line.startswith("+--"):
            break
        operation = _OPERATION.search(line)
        number += line.startswith("$")
        if operation and "detach" not in operation[1]:
            found.append((number, operation[1]))
    return found


def _listed_frames(lines: Sequence[str], which: str, wanted: int) -> Iterator[Frame]:
    """The stack of one operation, innermost first."""
    inside = False
    for line in lines:
        if trace := _TRACE.match(line):
            inside = trace["pass"] == which and int(trace["number"]) == wanted
        elif inside and (frame := _LISTED.match(line)):
            yield Frame(file=frame[1], line=int(frame[2]), function=frame[3])
