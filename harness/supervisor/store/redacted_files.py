"""Files of a run that others write where they are seen, the guardian and the probes, and those of before a secret was
known: redacted in place.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path

from nsa_harness.core.report import Trouble
from nsa_harness.supervisor.store.reading import read_whole
from nsa_harness.supervisor.store.redaction import Redaction
from nsa_harness.supervisor.store.rundir import AttemptDir, RunDir, write_document

# Not the logs and the files of the program, which are its own; not spec.json, which repeats the run.
_OF_AN_ATTEMPT = (
    "watch.jsonl", "processes.jsonl", "command.txt", "env.json", "sources.json", "profile.txt", "verdict.json",
    "dumps/*.json", "dumps/*.txt", "boards/*.json", "boards/*.jsonl", "boards/*.txt", "evidence/*.json", "repro/*",
    "rank*/raised.json", "rank*/flight.json", "rank*/looks.jsonl", "rank*/trouble.jsonl", "rank*/stacks.txt",
)  # fmt: skip
_MAX_BYTES = 64 << 20


def redact_files(attempt: AttemptDir) -> tuple[Trouble, ...]:
    """What one attempt has left. Returns what could not be written; a link is not followed."""
    paths = (path for pattern in _OF_AN_ATTEMPT for path in sorted(attempt.path.glob(pattern)))
    return tuple(_redacted(paths, attempt.redaction))


def redact_run(run: RunDir) -> None:
    """Every attempt, and what was told while they ran, once all secrets are known; and keeps what gives them away.

    Costs nothing where there is no secret.
    """
    if run.redaction.secrets.numbered:
        for attempt in run.attempts():
            redact_files(attempt)
        list(_redacted([run.events, run.log, run.search_probes], run.redaction))
    if printed := run.redaction.printed:
        write_document(run.secrets, json.dumps(printed) + "\n")


def _redacted(paths: Iterator[Path] | list[Path], redaction: Redaction) -> Iterator[Trouble]:
    for path in paths:
        try:
            if path.parent.is_symlink() or not stat.S_ISREG(path.lstat().st_mode):
                continue
            text = read_whole(path, _MAX_BYTES).decode("utf-8", errors="surrogateescape")
            clean = redaction.json(text) if path.suffix in (".json", ".jsonl") else redaction.text(text)
            if clean != text:
                write_document(path, clean)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            yield Trouble(what=path.name, why=f"it could not be redacted: {error}")
