"""Stores the progress of an experiment, so that the same command can continue it after an interruption."""

from __future__ import annotations

import json
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from nsa_harness.core.experiment.trial import Trial
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

_Record = TypeVar("_Record", ProbeReport, Trial)
_MAX_STATE_BYTES = 4 << 20
_BUDGET = "--budget"


@dataclass(frozen=True, kw_only=True)
class SearchState:
    """The state of an experiment, as stored in its run directory."""

    schema: int = 2
    question: str
    command: str  # as the user typed it
    typed: str = ""  # a digest of the command without options that do not affect the results
    premises: dict[str, str] = field(default_factory=dict)  # the cache key
    order_seed: int = 0  # of a claim; decides which side of each pair runs first
    ended: bool = False  # the experiment has finished


FileEntries = Callable[[], CacheKey]  # returns the entries of the cache key for the program's files, as they are now


@dataclass(kw_only=True)
class SearchDirectory:
    """The run directory of one experiment, which is locked while the experiment runs."""

    run: RunDir
    state: SearchState
    file_entries: FileEntries
    state_file: Path
    is_continued: bool = False  # this is the continuation of an interrupted experiment
    note: str = ""  # the reason why an earlier, similar experiment is not continued; "" if there is none

    def write(self, **changes: Any) -> None:
        """Change fields of the experiment's state and store the state, with secrets removed."""
        redaction = self.run.redaction
        self.state = replace(self.state, **changes)
        redacted_state = replace(
            self.state, question=redaction.text(self.state.question), command=redaction.command_text(self.state.command)
        )
        self.run.directory.write(self.state_file, json.dumps(asdict(redacted_state), indent=1) + "\n")

    def ignore_program_outputs(self) -> None:
        """Exclude the files that changed during the first test run from the check for changed files."""
        before = self.state.premises
        self.write(premises=mark_outputs(before, {**before, **self.file_entries()}))

    def changed_files(self) -> tuple[str, ...]:
        """Return the names of the program's files that have changed since the experiment started."""
        before = self.state.premises
        return changed_entries(before, {**before, **self.file_entries()})


class Journal:
    """A bisection's stored test runs, whose results can be reused without launching the program again."""

    def __init__(self, run: RunDir) -> None:
        self._path, self._redaction = run.search_probes, run.redaction
        self.stored: list[ProbeReport] = list(_stored_records(run, run.search_probes, ProbeReport))
        self.session_probes: list[ProbeReport] = []  # the results used in this session, both stored and new ones
        self._waiting: dict[tuple[Spans, bool], list[ProbeReport]] = defaultdict(list)
        for probe in self.stored:
            self._waiting[probe.subset, probe.in_full].append(probe)

    def take(self, subset: Subset, *, in_full: bool) -> ProbeReport | None:
        """Return the next unused stored test run of `subset`, or None. `in_full`: under torchrun with full limits."""
        waiting = self._waiting[spans_of(subset), in_full]
        return waiting.pop(0) if waiting else None

    def restart_without_forks(self) -> None:
        """Make the stored test runs available again, except those launched by forking."""
        self.session_probes.clear()
        self._waiting.clear()
        for probe in self.stored:
            if probe.launcher != Launcher.FORK:
                self._waiting[probe.subset, probe.in_full].append(probe)

    def append(self, probe: ProbeReport) -> None:
        """Store a finished test run on disk, with secrets removed."""
        append_line(self._path, self._redaction.value(json.loads(json_text(probe))))
        self.stored.append(probe)


class TrialJournal:
    """The stored runs of a claim, in the order in which they ended. Each run is stored with its result."""

    def __init__(self, run: RunDir) -> None:
        self._path, self._redaction = run.trials, run.redaction
        self.stored: tuple[Trial, ...] = tuple(_stored_records(run, run.trials, Trial))

    def append(self, trial: Trial) -> None:
        """Store a finished run on disk, with secrets removed."""
        append_line(self._path, self._redaction.value(json.loads(json_text(trial))))


def search_state(question: str, command: str, premises: CacheKey, *, order_seed: int = 0) -> SearchState:
    """Return the state of a new experiment. `premises` is its cache key, and `order_seed` belongs to a claim."""
    typed = sealed_digest(*_command_words(command))
    return SearchState(question=question, command=command, typed=typed, premises=dict(premises), order_seed=order_seed)


def _bisection_state_file(run: RunDir) -> Path:
    return run.search_state


@contextmanager
def open_search(
    options: RunOptions,
    state: SearchState,
    file_entries: FileEntries,
    *,
    state_file: Callable[[RunDir], Path] = _bisection_state_file,
    noun: str = "search",
) -> Iterator[SearchDirectory]:
    """Continue the latest interrupted experiment that matches `state`, or start a new one. Yield its run directory.

    Its directory stays locked until the context ends. `file_entries`: returns the cache key's entries for the program's
    files. `state_file`: returns the path of the stored state in a run directory. `noun`: the word for such an
    experiment in messages.
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
                    continued = SearchDirectory(
                        run=run,
                        state=replace(state, premises=earlier_state.premises, order_seed=earlier_state.order_seed),
                        file_entries=file_entries,
                        state_file=state_file(run),
                        is_continued=True,
                    )
                    yield _with_state_written(continued)
                    return
            elif not changes:
                note = note or f"another {noun} like this is still running in {run.path}; this is a separate one"
            elif earlier_state.typed == state.typed and not has_answer:
                note = note or f"{names_with_verb(changes)} changed since the {noun} in {run.path}; a new {noun} starts"
        run = create_run(options.parent, **run_options)
        stack.enter_context(lock_run(run))
        yield _with_state_written(
            SearchDirectory(run=run, state=state, file_entries=file_entries, state_file=state_file(run), note=note)
        )


def _with_state_written(folder: SearchDirectory) -> SearchDirectory:
    folder.write()
    return folder


def _try_to_lock(run: RunDir, stack: ExitStack) -> bool:
    try:
        stack.enter_context(lock_run(run))
    except StoredRunError:
        return False
    return True


def unfinished_search_text(run: RunDir) -> str:
    """Return a message with the command that continues an unfinished bisection, or "" for any other run."""
    state = _read_state(run, _bisection_state_file)
    if state is None or state.ended:
        return ""
    probe_count = len(list(_stored_records(run, run.search_probes, ProbeReport)))
    probes = f"{plural(probe_count, 'probe')} made"
    search_text = f"a bisection that ended before it had an answer ({visible(state.question)}), {probes}"
    return f"{run.path} is {search_text}; to continue it, give its command again: {visible(state.command)}"


def _read_state(run: RunDir, state_file: Callable[[RunDir], Path]) -> SearchState | None:
    try:
        return type_adapter(SearchState).validate_json(run.directory.read_whole_file(state_file(run), _MAX_STATE_BYTES))
    except (OSError, ValueError):
        return None


def _command_words(command: str) -> list[str]:
    """Return the arguments of a shell command, except for options that do not change the results."""
    try:
        words = shlex.split(command)
    except ValueError:  # a quote without an end
        return [command]
    pairs = pairwise(("", *words))
    return [word for before, word in pairs if before != _BUDGET and word.partition("=")[0] not in (_BUDGET, "--json")]


def _stored_records(run: RunDir, path: Path, kind: type[_Record]) -> Iterator[_Record]:
    """Yield the test runs stored in a journal of a run directory. Unreadable lines are skipped."""
    for record in run.directory.read_records(path):
        try:
            yield type_adapter(kind).validate_python(record)
        except ValidationError:
            continue
