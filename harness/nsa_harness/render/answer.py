"""The answer about one run in words that every format shares: its title, sentence, ranks and stacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from nsa_harness.core.comparison.severity import silent_faults
from nsa_harness.core.report import (
    INCONCLUSIVE,
    SUSPECTED,
    UNWATCHED,
    CallStack,
    Divergence,
    Finding,
    Outcome,
    Place,
    RankStatus,
    Report,
    Status,
)
from nsa_harness.texts import words


def title(outcome: Outcome) -> str:
    """Return "deadlock · likely cause · 7.0 s after the last progress"."""
    verdict, timing = outcome.verdict, outcome.timing
    if words.verdict(outcome) != verdict.status.value:
        return {SUSPECTED: "not proven", INCONCLUSIVE: "nothing proven"}.get(
            verdict.cause or "", "no hang, and not at its end"
        )
    cause = cause_of(outcome)
    sure = f"{words.certainty(cause.confidence)} cause" if cause else ""
    parts = [words.headline_tag(outcome), sure]
    if outcome.ended == UNWATCHED:
        parts.append("from its files")
    elif verdict.status is not Status.HANG:
        parts.append(words.wall_time(outcome))
    elif timing.detected_s is not None:
        parts.append(f"{words.seconds(timing.detected_s)} after the last progress")
    return " · ".join(part for part in (*parts, *words.remarks(outcome)) if part)


def sentence(text: str) -> str:
    """Return a claim as a sentence of its own. If a name begins it, the name keeps its letters."""
    first = text.split(" ", 1)[0]
    started = text[:1].upper() + text[1:] if first.isalpha() and first.islower() else text
    return started if started.endswith((".", "!", "?", "…")) or not started else f"{started}."


def stack_lines(stack: CallStack, skipped: int = 0) -> Iterator[str]:
    """Yield the stack with the source around its innermost line, but without its `skipped` outermost frames."""
    yield stack_owner(stack)
    for number, frame in enumerate(stack.frames[: len(stack.frames) - skipped]):
        name, details = words.place_name(frame), words.place_details(frame)
        calls = f" · calls {stack.innermost}" if number == 0 and stack.innermost else ""
        yield f"  {name}   {details}{calls}".rstrip()
        if number == 0 and stack.around is not None:
            yield from (f"    {line}" for line in words.numbered_lines(stack.around, frame.line))
        elif frame.text:
            yield f"    {words.statement(frame)}"
    if stack.library:
        where = f"; {stack.proof} has all" if stack.proof else ""
        yield f"  {words.plural(stack.library, 'frame')} of libraries not shown{where}"


def stack_owner(stack: CallStack) -> str:
    """Return "ranks 0, 2, 3", "thread reader of rank 1", "process 4711 of rank 0", or "ValueError on rank 1"."""
    ranks = words.ranks(stack.ranks)
    if not stack.of:
        return ranks
    return f"{stack.of} of {ranks}" if stack.of.startswith(("thread ", "process ")) else f"{stack.of} on {ranks}"


def side_by_side(outcome: Outcome) -> Divergence | None:
    """Return the calls around the divergence, or None if a stored report has rows of another length than its head."""
    calls = outcome.divergence
    complete = calls is not None and calls.rows and all(len(row) == len(calls.ranks) > 0 for row in calls.rows)
    return calls if complete else None


def cause_of(outcome: Outcome) -> Finding | None:
    """Return the finding that explains why the run did not pass."""
    return next((finding for finding in outcome.findings if finding.code == outcome.verdict.cause), None)


def others(outcome: Outcome) -> tuple[Finding, ...]:
    """Return the findings that are not the cause."""
    cause = cause_of(outcome)
    return tuple(finding for finding in outcome.findings if finding is not cause)


def outcomes_in_full(report: Report) -> list[tuple[int, Outcome]]:
    """Return the outcomes that need more than a row, with their numbers from 1, worst first; a single one always."""
    numbered = words.bad_news_first(report)
    if len(numbered) == 1:
        return numbered
    return [(number, outcome) for number, outcome in numbered if not went_well(outcome)]


def went_well(outcome: Outcome) -> bool:
    """Whether a row says enough: a PASS or SKIP as expected, or a diagnostic rerun that showed something."""
    if outcome.spec.deepening and outcome.showed:
        return True
    passed = outcome.verdict.status in (Status.PASS, Status.SKIP)
    return passed and outcome.expected and not outcome.flaky and not silent_faults(outcome)


def names_of(stacks: Sequence[CallStack]) -> Callable[[Place], str]:
    """Return a function that names the frames of these stacks by the shortest distinct file names."""
    return short_names([frame for stack in stacks for frame in stack.frames])


def short_names(places: Iterable[Place]) -> Callable[[Place], str]:
    """Return a function that names a place "train.py:41", or "data/train.py:3" if two files share a name."""
    shared = Counter(_tail(file, 1) for file in {place.file for place in places if place.file})

    def name(place: Place) -> str:
        if place.file is None:
            return ""
        file = _tail(place.file, 1 if shared[_tail(place.file, 1)] <= 1 else 2)
        return file if place.line is None else f"{file}:{place.line}"

    return name


def _tail(file: str, parts: int) -> str:
    return "/".join(file.split("/")[-parts:])


def position_head(outcome: Outcome) -> str:
    """Return the head of the column that says where a rank is."""
    return "blocked in" if outcome.verdict.status is Status.HANG else "last seen"


def rank_table(outcome: Outcome) -> tuple[tuple[str, ...], list[tuple[str, ...]], list[bool]]:
    """Return head, rows, and for each row whether it is a culprit's.

    Ranks at the same place that wait for the same share a row, which has their longest time. A colon aligns a column to
    the right. A column of which nothing is known is skipped.
    """
    groups: dict[tuple[str, str, bool], list[RankStatus]] = {}
    for row in outcome.standings:
        groups.setdefault((row.blocked_in, row.waits_for, row.culprit), []).append(row)
    head = ("rank:", position_head(outcome), "waiting for", "no progress for:")
    rows = [
        (_numbers(group), blocked_in, waits_for, words.seconds(_longest(group)))
        for (blocked_in, waits_for, _), group in groups.items()
    ]
    known = [at for at in range(len(head)) if any(row[at] not in ("", words.UNKNOWN) for row in rows)]
    return (
        tuple(head[at] for at in known),
        [tuple(row[at] for at in known) for row in rows],
        [culprit for _, _, culprit in groups],
    )


def _numbers(rows: Sequence[RankStatus]) -> str:
    if len(rows) == 1:
        return words.standing_rank(rows[0])
    return words.rank_numbers(row.rank for row in rows)


def _longest(rows: Sequence[RankStatus]) -> float | None:
    return max((row.no_progress_s for row in rows if row.no_progress_s is not None), default=None)
