"""The folder repro/ of an attempt: written from its evidence, and gone where there is nothing to repeat."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from harness.core.report import Artifact
from harness.core.reproduced.reproduction import Reproduction
from harness.supervisor.stored.rundir import AttemptDir, write_document

_SCRIPT, _COMMAND = "repro/repro.py", "repro/command.txt"


def write_reproduction(attempt: AttemptDir, made: Reproduction | None) -> tuple[Artifact, ...]:
    """Write what there is; the files as artifacts, each with its reason where it is not there."""
    return tuple(_written(attempt, made))


def _written(attempt: AttemptDir, made: Reproduction | None) -> Iterator[Artifact]:
    # What an earlier judgement wrote may not fit this one.
    for path in (_SCRIPT, _COMMAND):
        with suppress(OSError):
            (attempt.path / path).unlink()
    why_not = "the run neither failed nor hung" if made is None else _no_folder(attempt)
    if made is None or why_not:
        yield from (Artifact(path=path, count=None, absent=why_not) for path in (_SCRIPT, _COMMAND))
        return
    if made.script is None:
        yield Artifact(path=_SCRIPT, count=None, absent=made.why_not)
    else:
        write_document(attempt.path / _SCRIPT, made.script)
        yield Artifact(path=_SCRIPT, count=made.script.count("\n"), absent=None)
    write_document(attempt.path / _COMMAND, made.command)
    yield Artifact(path=_COMMAND, count=made.command.count("\n"), absent=None)


def _no_folder(attempt: AttemptDir) -> str:
    """A link may lead anywhere: a stored run may come from somebody else."""
    if attempt.repro.is_symlink():
        return "repro is a link, which is not followed"
    try:
        attempt.repro.mkdir(exist_ok=True)
    except OSError as error:
        return f"repro cannot be made: {error.strerror}"
    return ""
