"""The parts of a run's explanation that all formats share: title, sentence, call stacks and rank table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from nsa_harness.core.comparison.severity import silent_faults
from nsa_harness.core.diagnosis.causes import Cause
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
from nsa_harness.texts.causes import remedy, text_of


def title(outcome: Outcome) -> str:
    """Return a title for a run, such as "deadlock · likely cause · 7.0 s after the last progress"."""
    verdict, timing = outcome.verdict, outcome.timing
    if words.verdict(outcome) != verdict.status.value:
        return {SUSPECTED: "not proven", INCONCLUSIVE: "nothing proven"}.get(
            verdict.cause or "", "no hang, still running"
        )
    cause = cause_of(outcome)
    certainty = f"{words.certainty(cause.confidence)} cause" if cause else ""
    parts = [words.headline_tag(outcome), certainty]
    if outcome.ending_text == UNWATCHED:
        parts.append("judged from its files")
    elif verdict.status is not Status.HANG:
        parts.append(words.wall_time(outcome))
    elif timing.detected_s is not None:
        parts.append(f"{words.seconds(timing.detected_s)} after the last progress")
    return " · ".join(part for part in (*parts, *words.remarks(outcome)) if part)


def sentence(text: str) -> str:
    """Return `text` with a full stop and, unless it starts with a name such as `all_reduce`, a capital letter."""
    first = text.split(" ", 1)[0]
    result = text[:1].upper() + text[1:] if first.isalpha() and first.islower() else text
    return result if result.endswith((".", "!", "?", "…")) or not result else f"{result}."


def stack_lines(stack: CallStack, omit_outermost: int = 0, total_ranks: int = 0) -> Iterator[str]:
    """Yield the lines of a call stack, innermost frame first, without the `omit_outermost` outermost frames."""
    yield stack_owner(stack, total_ranks)
    for number, frame in enumerate(stack.frames[: len(stack.frames) - omit_outermost]):
        name, details = words.place_name(frame), words.place_details(frame)
        calls = f" · calls {stack.innermost}" if number == 0 and stack.innermost else ""
        yield f"  {name}   {details}{calls}".rstrip()
        if number == 0 and stack.around is not None:
            yield from (f"    {line}" for line in words.numbered_lines(stack.around, frame.line))
        elif frame.text:
            yield f"    {words.statement(frame)}"
    if stack.library:
        where = f"; the whole stack is in {stack.proof}" if stack.proof else ""
        yield f"  {words.plural(stack.library, 'library frame')} not shown{where}"


def stack_owner(stack: CallStack, total_ranks: int = 0) -> str:
    """Return the owner of a call stack, such as "ranks 0, 2, 3" or "thread reader of rank 1".

    With the number of all ranks, most of many ranks are counted: "1,016 of 1,024 ranks".
    """
    ranks = words.part_of_ranks(stack.ranks, total_ranks)
    if not stack.of:
        return ranks
    return f"{stack.of} of {ranks}" if stack.of.startswith(("thread ", "process ")) else f"{stack.of} on {ranks}"


def raised(outcome: Outcome) -> str:
    """Return the first exception, such as "rank 1: ValueError: bad batch", or "" if it is quoted already."""
    exception = outcome.raised.partition(": ")[2]
    message = exception.partition(": ")[2] or exception
    return "" if message[:_QUOTED] in " ".join(outcome.verdict.summary.split()) else outcome.raised


_QUOTED = 40  # a sentence that contains so many characters of a message quotes it


def side_by_side(outcome: Outcome) -> Divergence | None:
    """Return the collectives around the first call at which the ranks diverge, or None if that call is unknown."""
    calls = outcome.divergence
    is_complete = calls is not None and calls.rows and all(len(row) == len(calls.ranks) > 0 for row in calls.rows)
    return calls if is_complete else None


def cause_of(outcome: Outcome) -> Finding | None:
    """Return the finding that explains why the run did not pass, or None if there is none."""
    return next((finding for finding in outcome.findings if finding.code == outcome.verdict.cause), None)


def advice(outcome: Outcome) -> str:
    """Return what to do about a run that did not pass, or "" for a run that passed or a job that was only inspected."""
    if outcome.verdict.status in (Status.PASS, Status.SKIP) or words.verdict(outcome) != outcome.verdict.status.value:
        return ""
    cause = cause_of(outcome)
    return cause.advice if cause and cause.advice else remedy(outcome.verdict.cause)


def communication_table(outcome: Outcome) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the column names and rows of the table with each call that differs from a comm.lock file.

    There are no rows if the run was not compared with such a file, or does not differ from it.
    """
    findings = outcome.findings if outcome.verdict.cause == Cause.EXPECTATION_MISSED else ()
    changes: list[Any] = [finding.facts.get("changes", ()) for finding in findings]
    return COMMUNICATION_HEAD, communication_rows(change for group in changes for change in group)


COMMUNICATION_HEAD = ("", "times:", "group", "operation", "dtype", "elements:", "called by")


def communication_rows(changes: Iterable[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return a row for each change of a schedule, given as facts, with the columns `COMMUNICATION_HEAD`."""
    rows = []
    for change in changes:
        before, after = change.get("before", {}), change.get("after", {})
        cells = (
            " → ".join(dict.fromkeys(_cell(side[key]) for side in (before, after) if side))
            for key in ("group", "op", "dtype", "elements", "site")
        )
        rows.append((change["kind"], f"{change['count']} x", *cells))
    return rows


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value) or "below Python"


def why_look_at(outcome: Outcome) -> str:
    """Return why the line is shown, such as "rank 0: this condition decides what it does", or "" without a line."""
    culprit = outcome.culprit
    if culprit is None or culprit.place is None:
        return ""
    is_condition = words.statement(culprit.place).startswith(("if ", "elif "))
    reason = CONDITION if is_condition else text_of(outcome.verdict.cause, "look_at") or LINE_OF_THE_CAUSE
    return f"{words.ranks(culprit.ranks)}: {reason}" if culprit.ranks else reason


CONDITION = "this condition decides what it does"
LINE_OF_THE_CAUSE = "the line that the cause is about"


def other_findings(outcome: Outcome) -> tuple[Finding, ...]:
    """Return all findings except the one that explains the verdict."""
    cause = cause_of(outcome)
    return tuple(finding for finding in outcome.findings if finding is not cause)


def outcomes_in_full(report: Report) -> list[tuple[int, Outcome]]:
    """Return the outcomes to explain in full, worst first, with their numbers: failures, or a single outcome."""
    worst_first = words.bad_news_first(report)
    if len(worst_first) == 1:
        return worst_first
    return [(number, outcome) for number, outcome in worst_first if not went_well(outcome)]


def went_well(outcome: Outcome) -> bool:
    """Return whether an outcome needs no explanation beyond its row in a table."""
    if outcome.spec.deepening and outcome.rerun_answer:
        return True
    has_good_status = outcome.verdict.status in (Status.PASS, Status.SKIP)
    return has_good_status and outcome.expected and not outcome.flaky and not silent_faults(outcome)


def frame_namer(stacks: Sequence[CallStack]) -> Callable[[Place], str]:
    """Return a function that shortens a frame of `stacks` to a name such as "train.py:41"."""
    return short_names([frame for stack in stacks for frame in stack.frames])


def short_names(places: Iterable[Place]) -> Callable[[Place], str]:
    """Return a function that shortens places to "train.py:41", or "data/train.py:3" if file names are not unique."""
    files_per_name = Counter(_path_end(file, 1) for file in {place.file for place in places if place.file})

    def name(place: Place) -> str:
        if place.file is None:
            return ""
        is_unique = files_per_name[_path_end(place.file, 1)] <= 1
        file = _path_end(place.file, 1 if is_unique else 2)
        return file if place.line is None else f"{file}:{place.line}"

    return name


def _path_end(file: str, parts: int) -> str:
    return "/".join(file.split("/")[-parts:])


def position_head(outcome: Outcome) -> str:
    """Return the heading for the column with each rank's position."""
    return "blocked in" if outcome.verdict.status is Status.HANG else "last seen"


def rank_table(outcome: Outcome) -> tuple[tuple[str, ...], list[tuple[str, ...]], list[bool]]:
    """Return the column names and rows of the rank table, and whether each row shows a culprit.

    Ranks in the same call that wait for the same ranks share a row. A column name that ends in a colon aligns the
    column to the right. Columns without any known value are left out.
    """
    marked = words.marked_culprits(outcome)
    groups: dict[tuple[str, str, bool], list[RankStatus]] = {}
    for row in outcome.rank_statuses:
        groups.setdefault((row.blocked_in, row.waits_for, row.rank in marked), []).append(row)
    head = ("rank:", position_head(outcome), "waiting for", "no progress for:")
    rows = [
        (_rank_cell(group, len(outcome.rank_statuses)), blocked_in, waits_for, words.seconds(_longest(group)))
        for (blocked_in, waits_for, _), group in groups.items()
    ]
    columns = [column for column in range(len(head)) if any(row[column] not in ("", words.UNKNOWN) for row in rows)]
    return (
        tuple(head[column] for column in columns),
        [tuple(row[column] for column in columns) for row in rows],
        [culprit for _, _, culprit in groups],
    )


def _rank_cell(rows: Sequence[RankStatus], total: int) -> str:
    """Return the ranks of a table row as text, with mesh coordinates if there is only one rank."""
    if len(rows) == 1:
        return words.rank_with_coordinates(rows[0])
    return words.part_of_ranks([row.rank for row in rows], total).removeprefix("ranks ")


def _longest(rows: Sequence[RankStatus]) -> float | None:
    return max((row.no_progress_s for row in rows if row.no_progress_s is not None), default=None)
