"""What an experiment stores on disk: its question, its cache key, and every probe as soon as it has ended.

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
from nsa_harness.core.scenario.yaml_tree import visible
from nsa_harness.core.search.question import Spans, Subset, spans_of
from nsa_harness.core.search.report import ProbeReport
from nsa_harness.errors import StoredRunError
from nsa_harness.supervisor.experiments.cache_key import CacheKey, changed, names_text, sealed_digest, without_written
from nsa_harness.supervisor.storage.adapters import adapter, json_text
from nsa_harness.supervisor.storage.rundir import RunDir, RunOptions, append_line, create_run, locked, newest
from nsa_harness.texts.words import plural

_MAX_STATE_BYTES = 4 << 20
_BUDGET = "--budget"


@dataclass(frozen=True, kw_only=True)
class SearchState:
    """The search of a run directory, and whether it has ended."""

    schema: int = 2
    question: str
    command: str  # as typed
    typed: str = ""  # a digest of the command without what decides no probe
    premises: dict[str, str] = field(default_factory=dict)
    ended: bool = False


Files = Callable[[], CacheKey]  # of the program, as they are


@dataclass(kw_only=True)
class SearchFolder:
    """The directory of one search, which this process holds locked while it searches."""

    run: RunDir
    state: SearchState
    files: Files
    state_file: Path
    goes_on: bool = False  # an earlier session began it
    note: str = ""  # why an earlier search does not continue, if one might be expected to

    def write(self, **changes: Any) -> None:
        clean = self.run.redaction
        self.state = replace(self.state, **changes)
        shown = replace(self.state, question=clean.text(self.state.question), command=clean.typed(self.state.command))
        self.run.door.write(self.state_file, json.dumps(asdict(shown), indent=1) + "\n")

    def leave_out_written(self) -> None:
        """Leave out what has changed during the first probe: the program writes that itself."""
        before = self.state.premises
        self.write(premises=without_written(before, {**before, **self.files()}))

    def edited(self) -> tuple[str, ...]:
        """Return the files that have changed since the search began."""
        before = self.state.premises
        return changed(before, {**before, **self.files()})


class Journal:
    """The probes of one bisection. A stored probe answers before a new launch does, and only once."""

    def __init__(self, run: RunDir) -> None:
        self._path, self._redaction = run.search_probes, run.redaction
        self.kept: list[ProbeReport] = list(_readable(run))
        self.answered: list[ProbeReport] = []  # of this session, in the order in which they did
        self._waiting: dict[tuple[Spans, bool], list[ProbeReport]] = defaultdict(list)
        for one in self.kept:
            self._waiting[one.subset, one.in_full].append(one)

    def take(self, subset: Subset, *, in_full: bool) -> ProbeReport | None:
        """Return the next stored probe of this configuration that has not answered yet, or None."""
        waiting = self._waiting[spans_of(subset), in_full]
        return waiting.pop(0) if waiting else None

    def begin_anew(self) -> None:
        """Start again for a search without forks: every other stored launch answers once more, in full or not."""
        self.answered.clear()
        self._waiting.clear()
        for one in self.kept:
            if one.launcher != Launcher.FORK:
                self._waiting[one.subset, one.in_full].append(one)

    def keep(self, one: ProbeReport) -> None:
        append_line(self._path, self._redaction.value(json.loads(json_text(one))))
        self.kept.append(one)


def search_state(question: str, command: str, premises: CacheKey) -> SearchState:
    return SearchState(
        question=question, command=command, typed=sealed_digest(*_words(command)), premises=dict(premises)
    )


def _of_bisection(run: RunDir) -> Path:
    return run.search_state


@contextmanager
def search_folder(
    options: RunOptions,
    state: SearchState,
    files: Files,
    *,
    state_file: Callable[[RunDir], Path] = _of_bisection,
    noun: str = "search",
) -> Iterator[SearchFolder]:
    """Open the newest earlier search that continues, or a new one. Its directory stays locked.

    `state_file`: where a run of this kind keeps its state; `noun`: what people call one.
    """
    note, answered = "", False
    kept = {"redact": options.redact, "git_diff": options.git_diff}
    with ExitStack() as stack:
        for run in [RunDir(path, **kept) for path in newest(options.parent)]:
            known = _read_state(run, state_file)
            if known is None or known.ended:
                answered = answered or (known is not None and known.typed == state.typed)
                continue
            other = changed(known.premises, state.premises)
            if not other and _taken(run, stack):
                known = _read_state(run, state_file)  # another process may have ended it meanwhile
                if known is not None and not known.ended:
                    as_begun = replace(state, premises=known.premises)
                    yield _begun(
                        SearchFolder(run=run, state=as_begun, files=files, state_file=state_file(run), goes_on=True)
                    )
                    return
            elif not other:
                note = note or f"{run.path} is another {noun} for the same, still running; this one begins beside it"
            elif known.typed == state.typed and not answered:
                note = note or f"{names_text(other)} changed since the {noun} in {run.path}; a new {noun} begins"
        run = create_run(options.parent, **kept)
        stack.enter_context(locked(run))
        yield _begun(SearchFolder(run=run, state=state, files=files, state_file=state_file(run), note=note))


def _begun(folder: SearchFolder) -> SearchFolder:
    """Write the state before anything that takes long: a search that is killed can then be identified."""
    folder.write()
    return folder


def _taken(run: RunDir, stack: ExitStack) -> bool:
    try:
        stack.enter_context(locked(run))
    except StoredRunError:
        return False
    return True


def unanswered_question(run: RunDir) -> str:
    """Return what a bisection without an answer wanted to know, and how it continues; empty: it is no such run."""
    state = _read_state(run, _of_bisection)
    if state is None or state.ended:
        return ""
    made = len(list(_readable(run)))
    probes = f"{plural(made, 'probe')} made"
    what = f"a bisection that was ended before its answer ({visible(state.question)}), {probes}"
    return f"{run.path} is {what}; the same command goes on: {visible(state.command)}"


def _read_state(run: RunDir, state_file: Callable[[RunDir], Path]) -> SearchState | None:
    try:
        return adapter(SearchState).validate_json(run.door.whole(state_file(run), _MAX_STATE_BYTES))
    except (OSError, ValueError):
        return None


def _words(command: str) -> list[str]:
    """Split a shell command, without the options that decide no probe."""
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
