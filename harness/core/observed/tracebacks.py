"""Python tracebacks in a log: the last exception that a rank printed before it ended."""

from __future__ import annotations

import re
from collections.abc import Iterable

from harness.core.observed.evidence import Frame

_PREFIX = re.compile(r"^(?:\[rank\d+\]:? ?)+")
_START = "Traceback (most recent call last):"
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$')
_RAISED = re.compile(r"^([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning|Timeout)?)(?:: (.*))?$")
_ERROR_WORDS = re.compile(r"Error|Exception|terminate called|what\(\):|Fatal Python error|Aborted|Segmentation|FAILED")
# The same in torch 2.11 and 2.13.
_WARNINGS = re.compile(
    r"find_unused_parameters=True was specified in DDP constructor, but did not find any unused parameters"
)
_MAX_FRAMES = 200
_MAX_LINES = 20
_MAX_LENGTH = 500


def last_traceback(log: str) -> tuple[str, str, tuple[Frame, ...]] | None:
    """Type, message and frames (innermost first) of the last traceback in `log`, or None."""
    lines = [_PREFIX.sub("", line) for line in log.splitlines()]
    starts = [number for number, line in enumerate(lines) if line == _START]
    for start in reversed(starts):
        frames: list[Frame] = []
        for line in lines[start + 1 :]:
            if frame := _FRAME.match(line):
                frames.append(Frame(file=frame[1], line=int(frame[2]), function=frame[3]))
            elif not line.startswith(" ") and frames:
                raised = _RAISED.match(line)
                if raised:
                    return raised[1], (raised[2] or "")[:_MAX_LENGTH], tuple(reversed(frames[-_MAX_FRAMES:]))
                break
    return None


def warnings_of(log: Iterable[str]) -> tuple[str, ...]:
    """Those of torch's warnings that a rule reads, by their first words, each once."""
    return tuple(sorted({found[0] for line in log if (found := _WARNINGS.search(line))}))


def error_lines(log: str) -> tuple[str, ...]:
    """The last lines that name an error; where none does, the last line that says anything."""
    lines = [_PREFIX.sub("", line)[:_MAX_LENGTH] for line in log.splitlines() if line.strip()]
    found = [line for line in lines if _ERROR_WORDS.search(line)]
    return tuple(found[-_MAX_LINES:] or lines[-1:])
