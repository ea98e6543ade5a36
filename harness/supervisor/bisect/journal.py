"""What a bisection keeps on disk: which question it is, and every probe as soon as it has ended.

A bisection that was killed is found again by its question; it goes on where its last finished probe ended.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from nsa_harness.core.bisect.question import Spans, Subset, spans_of
from nsa_harness.core.bisect.report import ProbeReport
from nsa_harness.core.report import Outcome
from nsa_harness.errors import StoredRunError
from nsa_harness.supervisor.launch.machine import package_version
from nsa_harness.supervisor.store.adapters import adapter, json_text
from nsa_harness.supervisor.store.reading import read_lines
from nsa_harness.supervisor.store.rundir import RunDir, append_line, locked, write_document

_PACKAGES = ("torch", "numpy", "triton", "flash-attn")


def as_seen(probe: ProbeReport, outcome: Outcome) -> ProbeReport:
    """The probe with what its launch has shown."""
    culprit, verdict = outcome.culprit, outcome.verdict
    quiet = [vital.longest_quiet_s for vital in outcome.vitals if vital.longest_quiet_s is not None]
    return replace(
        probe,
        verdict=verdict.status.value,
        kind=verdict.kind,
        cause=verdict.cause,
        summary=verdict.summary,
        place=culprit.place if culprit else None,
        culprits=culprit.ranks if culprit else (),
        phase=outcome.phase,
        wall_s=outcome.timing.wall_s,
        longest_quiet_s=max(quiet, default=None),
        dir=outcome.dir,
        spec_hash=outcome.spec_hash,
    )


@dataclass(frozen=True, kw_only=True)
class _State:
    schema: int = 1
    key: str
    question: str
    command: str
    ended: bool


class Journal:
    """The probes of one bisection. What was kept answers first, each launch once."""

    def __init__(self, run: RunDir) -> None:
        self._path, self._redaction = run.search_probes, run.redaction
        self.kept: list[ProbeReport] = list(_readable(self._path))
        self.answered: list[ProbeReport] = []  # of this session, in the order in which they did
        self._waiting: dict[tuple[Spans, bool], list[ProbeReport]] = defaultdict(list)
        for one in self.kept:
            self._waiting[one.subset, one.in_full].append(one)

    def take(self, subset: Subset, *, in_full: bool) -> ProbeReport | None:
        """The next kept launch of this configuration that has not answered yet."""
        waiting = self._waiting[spans_of(subset), in_full]
        return waiting.pop(0) if waiting else None

    def keep(self, one: ProbeReport) -> None:
        append_line(self._path, self._redaction.value(json.loads(json_text(one))))
        self.kept.append(one)


def question_key(*facts: object) -> str:
    """Sixteen hex digits over a question, what it runs, and the packages it runs with."""
    versions = {name: package_version(name) for name in _PACKAGES}
    text = repr((facts, versions, platform.python_version()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_state(run: RunDir, key: str, question: str, command: str, *, ended: bool) -> None:
    clean = run.redaction
    state = _State(key=key, question=clean.text(question), command=clean.typed(command), ended=ended)
    write_document(run.search_state, json.dumps(asdict(state), indent=1) + "\n")


def unfinished(parent: Path, key: str) -> RunDir | None:
    """The newest bisection of this very question below `parent` that nobody is running and that has not ended."""
    found = (RunDir(path) for path in sorted(parent.glob("2*"), reverse=True))
    return next((run for run in found if _waits(run, key)), None)


def _waits(run: RunDir, key: str) -> bool:
    try:
        state = adapter(_State).validate_json(run.search_state.read_bytes())
    except (OSError, ValidationError):
        return False
    if state.key != key or state.ended:
        return False
    try:
        with locked(run):
            return True
    except StoredRunError:
        return False


def _readable(path: Path) -> Iterable[ProbeReport]:
    """A torn last line is a probe that has not ended."""
    for record in read_lines(path):
        try:
            yield adapter(ProbeReport).validate_python(record)
        except ValidationError:
            continue
