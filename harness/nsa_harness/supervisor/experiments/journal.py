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
from nsa_harness.supervisor.experiments.cache_key import (
    CacheKey,
    changed_entries,
    mark_outputs,
    names_with_verb,
    sealed_digest,
)
from nsa_harness.supervisor.storage.adapters import json_text, type_adapter
from nsa_harness.supervisor.storage.rundir import RunDir, RunOptions, append_line, create_run, latest_runs, lock_run
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


FileEntries = Callable[[], CacheKey]  # of the program, as they are


@dataclass(kw_only=True)
class SearchDirectory:
    """The directory of one search, which this process holds locked while it searches."""

    run: RunDir
    state: SearchState
    file_entries: FileEntries
    state_file: Path
    is_continued: bool = False  # an earlier session began it
    note: str = ""  # why an earlier search does not continue, if one might be expected to

    def write(self, **changes: Any) -> None:
        redaction = self.run.redaction
        self.state = replace(self.state, **changes)
        redacted_state = replace(
            self.state, question=redaction.text(self.state.question), command=redaction.command_text(self.state.command)
        )
        self.run.directory.write(self.state_file, json.dumps(asdict(redacted_state), indent=1) + "\n")

    def ignore_program_outputs(self) -> None:
        """Leave out what has changed during the first probe: the program writes that itself."""
        before = self.state.premises
        self.write(premises=mark_outputs(before, {**before, **self.file_entries()}))

    def changed_files(self) -> tuple[str, ...]:
        """Return the files that have changed since the search began."""
        before = self.state.premises
        return changed_entries(before, {**before, **self.file_entries()})


class Journal:
    """The probes of one bisection. A stored probe answers before a new launch does, and only once."""

    def __init__(self, run: RunDir) -> None:
        self._path, self._redaction = run.search_probes, run.redaction
        self.stored: list[ProbeReport] = list(_stored_probes(run))
        self.session_probes: list[ProbeReport] = []  # of this session, in the order in which they did
        self._waiting: dict[tuple[Spans, bool], list[ProbeReport]] = defaultdict(list)
        for probe in self.stored:
            self._waiting[probe.subset, probe.in_full].append(probe)

    def take(self, subset: Subset, *, in_full: bool) -> ProbeReport | None:
        """Return the next stored probe of this configuration that has not answered yet, or None."""
        waiting = self._waiting[spans_of(subset), in_full]
        return waiting.pop(0) if waiting else None

    def restart_without_forks(self) -> None:
        """Start again for a search without forks: every other stored launch answers once more, in full or not."""
        self.session_probes.clear()
        self._waiting.clear()
        for probe in self.stored:
            if probe.launcher != Launcher.FORK:
                self._waiting[probe.subset, probe.in_full].append(probe)

    def append(self, probe: ProbeReport) -> None:
        append_line(self._path, self._redaction.value(json.loads(json_text(probe))))
        self.stored.append(probe)


def search_state(question: str, command: str, premises: CacheKey) -> SearchState:
    return SearchState(
        question=question, command=command, typed=sealed_digest(*_command_words(command)), premises=dict(premises)
    )


def _bisection_state_file(run: RunDir) -> Path:
    return run.search_state


@contextmanager
def open_search(
    options: RunOptions,
    state: SearchState,
    files: FileEntries,
    *,
    state_file: Callable[[RunDir], Path] = _bisection_state_file,
    noun: str = "search",
) -> Iterator[SearchDirectory]:
    """Open the newest earlier search that continues, or a new one. Its directory stays locked.

    `state_file`: where a run of this kind keeps its state; `noun`: what people call one.
    """
    note, has_answer = "", False
    run_options = {"redact": options.redact, "git_diff": options.git_diff}
    with ExitStack() as stack:
        for run in [RunDir(path, **run_options) for path in latest_runs(options.parent)]:
            earlier_state = _read_state(run, state_file)
            if earlier_state is None or earlier_state.ended:
                has_answer = has_answer or (earlier_state is not None and earlier_state.typed == state.typed)
                continue
            changes = changed_entries(earlier_state.premises, state.premises)
            if not changes and _try_to_lock(run, stack):
                earlier_state = _read_state(run, state_file)  # another process may have ended it meanwhile
                if earlier_state is not None and not earlier_state.ended:
                    as_begun = replace(state, premises=earlier_state.premises)
                    yield _with_state_written(
                        SearchDirectory(
                            run=run, state=as_begun, file_entries=files, state_file=state_file(run), is_continued=True
                        )
                    )
                    return
            elif not changes:
                note = note or f"{run.path} is another {noun} for the same, still running; this one begins beside it"
            elif earlier_state.typed == state.typed and not has_answer:
                note = note or f"{names_with_verb(changes)} changed since the {noun} in {run.path}; a new {noun} begins"
        run = create_run(options.parent, **run_options)
        stack.enter_context(lock_run(run))
        yield _with_state_written(
            SearchDirectory(run=run, state=state, file_entries=files, state_file=state_file(run), note=note)
        )


def _with_state_written(folder: SearchDirectory) -> SearchDirectory:
    """Write the state before anything that takes long: a search that is killed can then be identified."""
    folder.write()
    return folder


def _try_to_lock(run: RunDir, stack: ExitStack) -> bool:
    try:
        stack.enter_context(lock_run(run))
    except StoredRunError:
        return False
    return True


def unfinished_search_text(run: RunDir) -> str:
    """Return what a bisection without an answer wanted to know, and how it continues; empty: it is no such run."""
    state = _read_state(run, _bisection_state_file)
    if state is None or state.ended:
        return ""
    probe_count = len(list(_stored_probes(run)))
    probes = f"{plural(probe_count, 'probe')} made"
    search_text = f"a bisection that was ended before its answer ({visible(state.question)}), {probes}"
    return f"{run.path} is {search_text}; the same command goes on: {visible(state.command)}"


def _read_state(run: RunDir, state_file: Callable[[RunDir], Path]) -> SearchState | None:
    try:
        return type_adapter(SearchState).validate_json(run.directory.read_whole_file(state_file(run), _MAX_STATE_BYTES))
    except (OSError, ValueError):
        return None


def _command_words(command: str) -> list[str]:
    """Split a shell command, without the options that decide no probe."""
    try:
        words = shlex.split(command)
    except ValueError:  # a quote without an end
        return [command]
    pairs = pairwise(("", *words))
    return [word for before, word in pairs if before != _BUDGET and word.partition("=")[0] not in (_BUDGET, "--json")]


def _stored_probes(run: RunDir) -> Iterable[ProbeReport]:
    """A torn last line is a probe that has not ended."""
    for record in run.directory.read_records(run.search_probes):
        try:
            yield type_adapter(ProbeReport).validate_python(record)
        except ValidationError:
            continue
