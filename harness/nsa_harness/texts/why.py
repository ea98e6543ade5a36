"""Describe in sentences why the ranks of a run took different ways, from the origin to the effect."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.explanation import json_facts, make_finding
from nsa_harness.core.outcome.wording import shorten
from nsa_harness.core.recording.explanation import (
    RETURNED,
    Candidate,
    Division,
    Explanation,
    OriginKind,
    PlannedExperiment,
    RankValues,
)
from nsa_harness.core.recording.side_effects import SideEffect
from nsa_harness.core.report import Facts, Finding, Place
from nsa_harness.texts.templates import environment
from nsa_harness.texts.words import listing, ranks, statement, verb_for

Namer = Callable[[Place], str]

_MAX_VALUE = 40  # characters of a value in a sentence or table
_MAX_VALUES = 4  # different values of one name in a sentence
_MAX_EFFECTS = 4  # side effects that a note names
_MAX_COLUMNS = 6  # groups of ranks in the table of values


@cache
def _sections() -> Mapping[str, Mapping[str, str]]:
    tables = tomllib.loads(files(__package__).joinpath("origins.toml").read_text(encoding="utf-8"))
    return {section: {key: " ".join(text.split()) for key, text in texts.items()} for section, texts in tables.items()}


def text_of_note(code: str) -> str:
    """Return the sentence for a limit of an answer, or the code itself if there is none."""
    return _sections()["note"].get(code, code)


def effects_note(effects: Sequence[SideEffect], *, experiments: bool, is_asked: bool) -> str:
    """Return what a further run may change outside its directory, and why no experiment is made.

    `is_asked`: the command line has --experiment or --no-experiment.
    """
    templates = _sections()["effect"]
    names = [environment().from_string(templates[effect.kind.value]).render(name=effect.name) for effect in effects]
    shown = [*names[:_MAX_EFFECTS], *([f"{len(names) - _MAX_EFFECTS} more"] if len(names) > _MAX_EFFECTS else [])]
    reason = "" if experiments or is_asked else "; no experiment is made without --experiment"
    return f"each run may change data outside its directory, because the program uses {listing(shown)}{reason}"


def change_text(planned: PlannedExperiment) -> str:
    """Return what an experiment changes, such as "all ranks got the value of rank 0 (`bad` at train.py:52)"."""
    at = namer_of([planned.place])(planned.place)
    what = f"`{planned.name}` at {at}" if planned.name else at
    return f"{text_of_change(planned)} ({what})"


def text_of_change(planned: PlannedExperiment) -> str:
    """Return what an experiment changes, such as "all ranks got the value of rank 0"."""
    source = _sections()["change"][planned.kind.value]
    return environment().from_string(source).render(reference=planned.instruction.get("reference", 0))


def title(kind: OriginKind) -> str:
    """Return the kind of an origin in a few words, such as "clock of the rank"."""
    return _sections()[kind.value]["title"]


def remedy(candidate: Candidate, namer: Namer) -> str:
    """Return what to change about a candidate, as a sentence."""
    return _render(candidate, "remedy", namer)


def makes(candidate: Candidate, namer: Namer) -> str:
    """Return what the line of a candidate does, such as "takes `bad` from this rank's own data"."""
    if not candidate.name and candidate.values and candidate.values[0].name == RETURNED:
        return f"returns different values on the ranks ({title(candidate.kind)})"
    if not candidate.name and candidate.kind not in _WITHOUT_NAME:
        return f"decides differently on the ranks ({title(candidate.kind)})"
    return _render(candidate, "makes", namer)


# Kinds whose sentence needs no name. Any other candidate without a name is the statement at which the ranks diverge.
_WITHOUT_NAME = (
    OriginKind.LEFT_OUT,
    OriginKind.EARLY_COPY,
    OriginKind.STALE_PARAMETERS,
    OriginKind.UNSYNCHRONIZED,
    OriginKind.DISCARDED_RESULT,
    OriginKind.SKIPPED_COLLECTIVE,
    OriginKind.CALL,
    OriginKind.EXCEPTION,
    OriginKind.OTHER_RANKS_FILE,
    OriginKind.UNKNOWN,
)


def _render(candidate: Candidate, key: str, namer: Namer) -> str:
    name, caller = candidate.name, candidate.caller
    generator = name.removeprefix("generator:")
    facts = {
        "name": f"the state of the generator `{generator}`" if generator != name else f"`{name}`" if name else "",
        "of_name": f": `{name}`" if name else "",
        "at_caller": f" ({namer(caller)})" if caller and caller.line != candidate.place.line else "",
        "is_handler": (candidate.place.text or "").startswith("except"),
    }
    return environment().from_string(_sections()[candidate.kind.value][key]).render(facts)


def namer_of(places: Iterable[Place | None]) -> Namer:
    """Return a function that shortens each location to a name such as "train.py:41".

    The directory is added if several files have the same name.
    """
    names = Counter(file.rpartition("/")[2] for file in {place.file for place in places if place and place.file})

    def name(place: Place) -> str:
        parts = (place.file or "").split("/")
        file = parts[-1] if names[parts[-1]] <= 1 else "/".join(parts[-2:])
        return file if place.line is None else f"{file}:{place.line}"

    return name


def places_of(explanation: Explanation) -> Iterator[Place | None]:
    """Yield all locations that the sentences about an explanation may name."""
    for candidate in explanation.candidates:
        yield from (candidate.place, candidate.caller, *(place for place, _ in candidate.chain))
    if explanation.division:
        yield from (explanation.division.place, *(place for _, place in explanation.division.ways))
    yield from (place for _, place, _ in explanation.ends)


def sentences(explanation: Explanation, origin: Candidate, namer: Namer) -> Iterator[str]:
    """Yield the sentences that lead from the origin of a difference to its effects."""
    yield f"{namer(origin.place)} {makes(origin, namer)}."
    division = explanation.division
    if text := _first_difference(origin, division):
        yield text
    if division is not None and not _is_same_line(division.place, origin.place):
        yield _division_text(division, origin, namer)
    if text := ends_text(explanation, namer):
        yield text


def _first_difference(origin: Candidate, division: Division | None) -> str:
    """Return which values the ranks have at the origin, or "" if none is known."""
    values = next((one for one in origin.values if one.name == origin.name), next(iter(origin.values), None))
    if values is None or len({text for _, text in values.values}) < 2:
        return ""
    at = f"At its execution {origin.occurrence}, " if origin.occurrence > 1 else "There, "
    if division is not None and division.step is not None:
        at = f"{at.removesuffix(', ')} (step {division.step}), "
    subject = "the function returns" if values.name == RETURNED else f"`{values.name}` is"
    return f"{at}{subject} {values_text(values)}."


def values_text(values: RankValues) -> str:
    """Return the values of a name by rank, such as "3 on rank 2 and 1 on ranks 0, 1"."""
    groups = groups_of([(rank, shorten(text, _MAX_VALUE) or "unknown") for rank, text in values.values])
    texts = [f"{text} on {ranks(members)}" for members, text in groups[:_MAX_VALUES]]
    more = len(groups) - _MAX_VALUES
    return listing([*texts, f"{more} other values on further ranks"] if more > 0 else texts)


def groups_of(pairs: Sequence[tuple[int, str]]) -> list[tuple[tuple[int, ...], str]]:
    """Group the ranks by text. The smallest group, which is the one that differs, comes first."""
    members: dict[str, list[int]] = {}
    for rank, text in pairs:
        members.setdefault(text, []).append(rank)
    return sorted(((tuple(group), text) for text, group in members.items()), key=lambda one: (len(one[0]), one[0]))


def _division_text(division: Division, origin: Candidate, namer: Namer) -> str:
    is_same_file = division.place.file == origin.place.file
    where = f"Line {division.place.line}" if is_same_file else namer(division.place)
    if not has_ways(division):
        code = f", `{shorten(division.condition, 80)}`" if division.condition else ""
        return f"The ranks part at {where[0].lower() + where[1:] if is_same_file else where}{code}."
    condition = f", `{shorten(division.condition, 80)}`," if division.condition else ""
    deciding = [one for one in division.values if one.name != origin.name and len({text for _, text in one.values}) > 1]
    because = f", because `{deciding[0].name}` is {values_text(deciding[0])}" if deciding else ""
    return f"{where}{condition} then sends {ways_text(division, namer)}{because}."


def has_ways(division: Division) -> bool:
    """Return whether the ranks go to different lines after a division. After a call that differs, they may not."""
    return len({place for _, place in division.ways}) > 1


def ways_text(division: Division, namer: Namer) -> str:
    """Return which ranks go where after a division: "rank 2 to line 70 and ranks 0, 1 to line 62"."""
    ways = sorted(division.ways, key=lambda way: len(way[0]))
    return listing([f"{ranks(members)} {_target(place, division.place, namer)}" for members, place in ways])


def _target(place: Place | None, start: Place, namer: Namer) -> str:
    if place is None:
        return "out of the function"
    return f"to line {place.line}" if place.file == start.file else f"to {namer(place)}"


def ends_text(explanation: Explanation, namer: Namer) -> str:
    """Return where the ranks stopped, such as "Ranks 0, 1 stop in backward (train.py:87)."."""
    texts = [end_text(members, place, operation, namer) for members, place, operation in explanation.ends]
    text = "; ".join(texts)
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def end_text(members: Sequence[int], place: Place | None, operation: str, namer: Namer) -> str:
    """Return where some ranks stopped, such as "ranks 0, 1 wait in backward (train.py:87)"."""
    at = f" ({namer(place)})" if place else ""
    if operation:
        preposition = "for" if operation.startswith("its ") else "in"
        return f"{ranks(members)} {verb_for('waits', members)} {preposition} {operation}{at}"
    if place is None:
        return f"{ranks(members)} {verb_for('has', members)} ended"
    return f"{ranks(members)} {verb_for('stops', members)} at {namer(place)}"


def _is_same_line(first: Place, second: Place) -> bool:
    return (first.file, first.line) == (second.file, second.line)


def value_table(explanation: Explanation, origin: Candidate) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the column names and rows of a table with the values that differ and those that decide.

    Ranks with the same values share a column. The table has no rows if no value is known.
    """
    shown: dict[str, dict[int, str]] = {}
    for one in (*origin.values, *(explanation.division.values if explanation.division else ())):
        shown.setdefault(one.name, dict(one.values))
    members = sorted({rank for values in shown.values() for rank in values})
    texts = {rank: tuple(shorten(values.get(rank, ""), _MAX_VALUE) for values in shown.values()) for rank in members}
    columns: dict[tuple[str, ...], list[int]] = {}
    for rank in members:
        columns.setdefault(texts[rank], []).append(rank)
    visible = list(columns.items())[:_MAX_COLUMNS]
    head = ("value", *(ranks(group) for _, group in visible))
    rows = [(name, *(column[row] for column, _ in visible)) for row, name in enumerate(shown)]
    return head, rows


def path_rows(explanation: Explanation, origin: Candidate, namer: Namer) -> Iterator[tuple[str, str, str]]:
    """Yield the lines from the origin to the effect: location, source text, and what happens there."""
    yield namer(origin.place), statement(origin.place), title(origin.kind)
    for place, name in origin.chain:
        if not _is_same_line(place, origin.place):
            yield namer(place), statement(place), f"sets {name}" if name else ""
    division = explanation.division
    if division is not None and not _is_same_line(division.place, origin.place):
        ways = f"sends {ways_text(division, namer)}" if has_ways(division) else "the ranks part here"
        yield namer(division.place), statement(division.place), ways
    for members, end, operation in explanation.ends:
        if end is not None:
            waits = f"{ranks(members)} {verb_for('waits' if operation else 'stops', members)} here"
            yield namer(end), statement(end), f"{waits} in {operation}" if operation else waits


def finding_of(explanation: Explanation, proof: Sequence[str]) -> Finding | None:
    """Return a finding that names the most likely origin, or None if there is no candidate.

    `proof`: the files of the recordings, relative to the attempt's directory.
    """
    origin = next(iter(explanation.candidates), None)
    if origin is None:
        return None
    namer = namer_of(places_of(explanation))
    facts: Facts = {
        "variant": "origin",
        "kind": origin.kind.value,
        "name": origin.name,
        "values": {one.name: {str(rank): text for rank, text in one.values} for one in origin.values},
        "candidates": [candidate.place for candidate in explanation.candidates],
        "division": explanation.division.place if explanation.division else None,
    }
    finding = make_finding(
        Cause.DEEPENED, facts, evidence=EvidenceKind.OPEN, ranks=origin.ranks, place=origin.place,
        proof=tuple(proof),
    )  # fmt: skip
    claim = " ".join(sentences(explanation, origin, namer)).removesuffix(".")
    return replace(finding, facts=json_facts(facts), claim=claim, advice=remedy(origin, namer))
