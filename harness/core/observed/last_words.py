"""What the interpreter and torch print on stderr as a process ends, although its exit code is 0."""

from __future__ import annotations

import re
from collections.abc import Sequence

from harness.core.observed.silence import LastWords
from harness.core.observed.stacks import user_frame
from harness.core.observed.tracebacks import last_traceback
from harness.core.place import Place

_LINES = 400  # of the end of the log
_MAX_WORDS = 8
_MAX_TEXT = 200
# How each of them begins. Python's own words, which are the same in 3.9 to 3.14; the last one is NCCL's in torch.
_BEGINNINGS = (
    ("atexit", re.compile(r"^Error in (atexit)\._run_exitfuncs:$|^Exception ignored in (atexit callback).*$")),
    ("left", re.compile(r"^.*resource_tracker: There appear to be (\d+ leaked .+?) objects? to clean up.*$")),
    ("process group", re.compile(r"^.*(destroy_process_group)\(\) was not called before program exit.*$")),
)


def last_words(log: str) -> tuple[LastWords, ...]:
    """In the order in which they were printed; the same one twice is one."""
    lines = log.splitlines()[-_LINES:]
    found: dict[LastWords, None] = {}
    for number, line in enumerate(lines):
        for kind, beginning in _BEGINNINGS:
            begins = beginning.match(line)
            if begins is not None and len(found) < _MAX_WORDS:
                name = next((group for group in begins.groups() if group), kind)
                found[_told(kind, name, lines[number + 1 :])] = None
    return tuple(found)


def _told(kind: str, name: str, after: Sequence[str]) -> LastWords:
    """With the traceback that follows at once, where there is one."""
    error, place = "", None
    if after and after[0].startswith("Traceback (most recent call last)"):
        end = next((n for n, line in enumerate(after) if n and line and not line[0].isspace()), len(after))
        raised = last_traceback("\n".join(after[: end + 1]))
        if raised is not None:
            error, frame = f"{raised[0]}: {raised[1]}"[:_MAX_TEXT], user_frame(raised[2])
            place = Place(file=frame.file, line=frame.line, function=frame.function) if frame else None
    return LastWords(kind=kind, name=name[:_MAX_TEXT], error=error, place=place)
