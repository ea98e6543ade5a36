"""What a bisection keeps on disk: which question it is, what it rests on, and every probe as soon as it has ended.

A bisection that was killed is found again as long as all of that is as it was; it goes on where its last finished probe
ended.
"""

from __future__ import annotations

import json
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nsa_harness.core.plan import Launcher
from nsa_harness.core.report import Outcome
from nsa_harness.core.scenario.yaml_tree import visible
from nsa_harness.core.search.question import Spans, Subset, spans_of
from nsa_harness.core.search.report import ProbeReport
from nsa_harness.errors import StoredRunError
from nsa_harness.supervisor.experiments.cache_key import Premises, changed, sealed, told, without_written
from nsa_harness.supervisor.storage.adapters import adapter, json_text
from nsa_harness.supervisor.storage.rundir import RunDir, RunOptions, append_line, create_run, locked, newest

_MAX_STATE_BYTES = 4 << 20
_BUDGET = "--budget"


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
        spec_hash=outcome.spec.spec_hash,
    )


@dataclass(frozen=True, kw_only=True)
class Bookmark:
    """Which search a folder holds, and whether it has ended."""

    schema: int = 2
    question: str
    command: str  # as typed
    typed: str = ""  # a digest of the command without what decides no probe
    premises: dict[str, str] = field(default_factory=dict)
    ended: bool = False


Files = Callable[[], Premises]  # of the program, as they are


@dataclass(kw_only=True)
class SearchFolder:
    """The folder of one search, which this process has as long as it searches."""

    run: RunDir
    mark: Bookmark
    files: Files
    state: Path  # where the mark is kept
    goes_on: bool = False  # with what was found there
    note: str = ""  # why an earlier search does not go on, where one might be expected to

    def write(self, **changes: Any) -> None:
        clean = self.run.redaction
        self.mark = replace(self.mark, **changes)
        said = replace(self.mark, question=clean.text(self.mark.question), command=clean.typed(self.mark.command))
        self.run.door.write(self.state, json.dumps(asdict(said), indent=1) + "\n")

    def leave_out_written(self) -> None:
        """After one probe: what has changed meanwhile the program writes itself, so nothing follows from it."""
        before = self.mark.premises
        self.write(premises=without_written(before, {**before, **self.files()}))

    def edited(self) -> tuple[str, ...]:
        """Files that are not as they were when it began."""
        before = self.mark.premises
        return changed(before, {**before, **self.files()})


class Journal:
    """The probes of one bisection. What was kept answers first, each launch once."""

    def __init__(self, run: RunDir) -> None:
        self._path, self._redaction = run.search_probes, run.redaction
        self.kept: list[ProbeReport] = list(_readable(run))
        self.answered: list[ProbeReport] = []  # of this session, in the order in which they did
        self._waiting: dict[tuple[Spans, bool], list[ProbeReport]] = defaultdict(list)
        for one in self.kept:
            self._waiting[one.subset, one.in_full].append(one)

    def take(self, subset: Subset, *, in_full: bool) -> ProbeReport | None:
        """The next kept launch of this configuration that has not answered yet."""
        waiting = self._waiting[spans_of(subset), in_full]
        return waiting.pop(0) if waiting else None

    def begin_anew(self) -> None:
        """For a search that forks no more: what was launched otherwise answers once again, in full or not."""
        self.answered.clear()
        self._waiting.clear()
        for one in self.kept:
            if one.launcher != Launcher.FORK:
                self._waiting[one.subset, one.in_full].append(one)

    def keep(self, one: ProbeReport) -> None:
        append_line(self._path, self._redaction.value(json.loads(json_text(one))))
        self.kept.append(one)


def bookmark(question: str, command: str, premises: Premises) -> Bookmark:
    return Bookmark(question=question, command=command, typed=sealed(*_words(command)), premises=dict(premises))


def _of_bisection(run: RunDir) -> Path:
    return run.search_state


@contextmanager
def search_folder(
    options: RunOptions,
    mark: Bookmark,
    files: Files,
    *,
    state: Callable[[RunDir], Path] = _of_bisection,
    noun: str = "search",
) -> Iterator[SearchFolder]:
    """Open the newest earlier search that continues, or a new one. Its directory stays locked.

    `state`: where a run of this kind keeps its mark; `noun`: what people call one.
    """
    note, answered = "", False
    kept = {"redact": options.redact, "git_diff": options.git_diff}
    with ExitStack() as stack:
        for run in [RunDir(path, **kept) for path in newest(options.parent)]:
            known = _bookmark(run, state)
            if known is None or known.ended:
                answered = answered or (known is not None and known.typed == mark.typed)
                continue
            other = changed(known.premises, mark.premises)
            if not other and _taken(run, stack):
                known = _bookmark(run, state)  # whoever had it may have ended it meanwhile
                if known is not None and not known.ended:
                    as_begun = replace(mark, premises=known.premises)
                    yield _begun(SearchFolder(run=run, mark=as_begun, files=files, state=state(run), goes_on=True))
                    return
            elif not other:
                note = note or f"{run.path} is another {noun} for the same, still running; this one begins beside it"
            elif known.typed == mark.typed and not answered:
                note = note or f"{told(other)} changed since the {noun} in {run.path}; a new {noun} begins"
        run = create_run(options.parent, **kept)
        stack.enter_context(locked(run))
        yield _begun(SearchFolder(run=run, mark=mark, files=files, state=state(run), note=note))


def _begun(folder: SearchFolder) -> SearchFolder:
    """Before anything that takes long: whoever finds the folder of a search that was killed is told what it is."""
    folder.write()
    return folder


def _taken(run: RunDir, stack: ExitStack) -> bool:
    try:
        stack.enter_context(locked(run))
    except StoredRunError:
        return False
    return True


def unanswered_question(run: RunDir) -> str:
    """What a bisection that was ended before its answer wanted to know, and how it goes on; empty of any other run."""
    state = _bookmark(run, _of_bisection)
    if state is None or state.ended:
        return ""
    made = len(list(_readable(run)))
    probes = f"{made} probe{'' if made == 1 else 's'} made"
    what = f"a bisection that was ended before its answer ({visible(state.question)}), {probes}"
    return f"{run.path} is {what}; the same command goes on: {visible(state.command)}"


def _bookmark(run: RunDir, state: Callable[[RunDir], Path]) -> Bookmark | None:
    try:
        return adapter(Bookmark).validate_json(run.door.whole(state(run), _MAX_STATE_BYTES))
    except (OSError, ValueError):
        return None


def _words(command: str) -> list[str]:
    """Of a shell, without the options that decide no probe."""
    try:
        words = shlex.split(command)
    except ValueError:  # a quote without an end
        return [command]
    follows = pairwise(("", *words))
    return [word for before, word in follows if before != _BUDGET and word.partition("=")[0] not in (_BUDGET, "--json")]


def _readable(run: RunDir) -> Iterable[ProbeReport]:
    """A torn last line is a probe that has not ended."""
    for record in run.door.records(run.search_probes):
        try:
            yield adapter(ProbeReport).validate_python(record)
        except ValidationError:
            continue
