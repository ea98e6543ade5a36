"""Stores why the ranks of a recorded attempt took different ways, when the attempt is first judged.

The analysis needs the whole source files as they were at the launch. They are not stored, so its result is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from nsa_harness.core.recording.explain import explain
from nsa_harness.core.recording.explanation import Explanation, SilentDifference
from nsa_harness.core.recording.recording import Activation, RankRecording
from nsa_harness.core.report import Place, Trouble
from nsa_harness.supervisor.storage.adapters import type_adapter
from nsa_harness.supervisor.storage.recordings import load_recordings
from nsa_harness.supervisor.storage.rundir import AttemptDir
from nsa_harness.supervisor.storage.sources import text_as_launched

_MAX_BYTES = 16 << 20


def explained(
    attempt: AttemptDir, ranks: int, *, launched_here: bool, silent: SilentDifference | None = None
) -> tuple[Explanation | None, tuple[Trouble, ...]]:
    """Return why the ranks of a recorded attempt took different ways, and what went wrong in finding out.

    A stored result is reused. Otherwise the recordings are analysed and the result is stored, if this process launched
    the attempt (`launched_here`). For any other attempt, the author of the recordings could have chosen the file names.
    `silent`: what differs although the attempt passed.
    """
    try:
        if attempt.directory.exists(attempt.explanation):
            return stored_explanation(attempt), ()
        recordings, trouble = load_recordings(attempt, ranks) if launched_here else ((), ())
        if not recordings:
            return None, trouble
        explanation = with_source_lines(
            explain(recordings, sources := program_texts(attempt, recordings), silent), sources
        )
        explanation = attempt.redaction.value(explanation)
        attempt.directory.write(attempt.explanation, type_adapter(Explanation).dump_json(explanation).decode())
    except Exception as error:  # the verdict does not depend on the explanation
        why = f"{type(error).__name__}: {str(error)[:200]}"
        return None, (Trouble(what=attempt.explanation.name, why=why),)
    return explanation, trouble


def stored_explanation(attempt: AttemptDir) -> Explanation:
    """Return the stored explanation of an attempt. Raise OSError or ValueError if it is missing or invalid."""
    return type_adapter(Explanation).validate_json(attempt.directory.read_whole_file(attempt.explanation, _MAX_BYTES))


def program_texts(attempt: AttemptDir, recordings: Iterable[RankRecording]) -> dict[str, str]:
    """Map each file that the ranks executed to its text. Files that changed since the launch are left out."""
    since_s = attempt.directory.modified_ns(attempt.spec) / 1e9 or None
    names = {file for recording in recordings for file in _files(recording)}
    return {file: text for file in sorted(names) if (text := text_as_launched(file, since_s))}


def _files(recording: RankRecording) -> Iterator[str]:
    threads = (*recording.threads, *recording.children)
    waiting: list[Activation] = [activation for thread in threads for activation in thread.activations]
    while waiting:
        activation = waiting.pop()
        yield activation.file
        waiting += [called for execution in activation.executions for called in execution.calls]


def with_source_lines(explanation: Explanation, sources: dict[str, str]) -> Explanation:
    """Return the explanation with the source line at each of its locations that has none."""
    lines = {file: text.splitlines() for file, text in sources.items()}

    def with_line(place: Place) -> Place:
        numbered = lines.get(place.file or "", [])
        if place.text is not None or place.line is None or not 0 < place.line <= len(numbered):
            return place
        return replace(place, text=numbered[place.line - 1].strip())

    def with_optional_line(place: Place | None) -> Place | None:
        return place and with_line(place)

    division = explanation.division
    if division is not None:
        ways = tuple((ranks, with_optional_line(place)) for ranks, place in division.ways)
        division = replace(division, place=with_line(division.place), ways=ways)
    candidates = tuple(
        replace(
            candidate,
            place=with_line(candidate.place),
            caller=with_optional_line(candidate.caller),
            chain=tuple((with_line(place), name) for place, name in candidate.chain),
        )
        for candidate in explanation.candidates
    )
    ends = tuple((ranks, with_optional_line(place), operation) for ranks, place, operation in explanation.ends)
    return replace(explanation, candidates=candidates, division=division, ends=ends)
