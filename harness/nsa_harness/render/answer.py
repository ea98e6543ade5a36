"""The answer to a run that did not pass, as words: the same in every format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from nsa_harness.core.comparison.severity import silent_faults
from nsa_harness.core.outcome.callstacks import StackNode, stack_trees
from nsa_harness.core.report import (
    INCONCLUSIVE,
    SUSPECTED,
    UNWATCHED,
    CallStack,
    Divergence,
    EnteredCall,
    Finding,
    Outcome,
    Place,
    RankStatus,
    Report,
    Status,
)
from nsa_harness.texts import words

RANKS_APART = 8  # more of them are told in classes, and each by itself behind a fold
_INNER_FRAMES = 3  # of a part of the page's tree, when it has more


class StackRow(NamedTuple):
    """One frame. `who` is said with the innermost one of its stack alone."""

    who: str
    where: str
    function: str
    text: str
    innermost: bool


def title(outcome: Outcome) -> str:
    """ "deadlock · likely cause · 7.0 s after the last progress"."""
    verdict, timing = outcome.verdict, outcome.timing
    if words.verdict(outcome) != verdict.status.value:
        return {SUSPECTED: "not proven", INCONCLUSIVE: "nothing proven"}.get(
            verdict.cause or "", "no hang, and not at its end"
        )
    said = cause_of(outcome)
    sure = f"{words.certainty(said.confidence)} cause" if said else ""
    parts = [words.headline_tag(outcome), sure]
    if outcome.ended == UNWATCHED:
        parts.append("from its files")
    elif verdict.status is not Status.HANG:
        parts.append(words.wall_time(outcome))
    elif timing.detected_s is not None:
        parts.append(f"{words.seconds(timing.detected_s)} after the last progress")
    return " · ".join(part for part in (*parts, *words.remarks(outcome)) if part)


def sentence(text: str) -> str:
    """A claim as a sentence of its own. A name that begins one keeps its letters."""
    first = text.split(" ", 1)[0]
    told = text[:1].upper() + text[1:] if first.isalpha() and first.islower() else text
    return told if told.endswith((".", "!", "?", "…")) or not told else f"{told}."


def with_code(text: str) -> Iterator[tuple[str, bool]]:
    """The text in pieces, and whether each stood between backticks; of an odd number of them all are plain signs."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        yield text, False
        return
    yield from ((part, number % 2 == 1) for number, part in enumerate(parts) if part)


def stack_rows(stacks: Sequence[CallStack], frames: int) -> list[StackRow]:
    """At most so many frames of each stack, innermost first."""
    name = names_of(stacks)
    return [
        StackRow(
            who=whose(stack) if number == 0 else "",
            where=name(frame),
            function=frame.function or "",
            text=words.statement(frame),
            innermost=number == 0,
        )
        for stack in stacks
        for number, frame in enumerate(stack.frames[:frames])
    ]


def parting_stacks(stacks: Sequence[CallStack]) -> Iterator[list[str]]:
    """The stacks as texts; frames from which several were called alike are told once, behind those that were."""
    for tree in stack_trees(stacks):
        yield from (list(stack_lines(stack, len(tree.frames))) for stack in _ends(tree))
        if tree.ends is None:
            inside = f", in {tree.diverges_in.function}" if tree.diverges_in and tree.diverges_in.function else ""
            above = f"; {words.ranks(tree.ranks)} were called alike from" if tree.frames else ""
            shared = (line for frame in reversed(tree.frames) for line in _frame_lines(frame))
            yield [f"here the ranks part{inside}{above}", *shared]


def _ends(node: StackNode) -> Iterator[CallStack]:
    if node.ends is not None:
        yield node.ends
    for subtree in node.subtrees:
        yield from _ends(subtree)


def _frame_lines(frame: Place) -> Iterator[str]:
    yield f"  {words.place_name(frame)}   {words.place_details(frame)}".rstrip()
    if frame.text:
        yield f"    {words.statement(frame)}"


def stack_lines(stack: CallStack, shared: int = 0) -> Iterator[str]:
    """The whole stack but so many outer frames, which are told elsewhere, with the source around its innermost line."""
    yield whose(stack)
    for number, frame in enumerate(stack.frames[: len(stack.frames) - shared]):
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


def folded(stack: CallStack) -> str:
    """What lies below the innermost frame that is told: "calls barrier · 2 library frames folded"."""
    calls = f"calls {stack.innermost}" if stack.innermost else ""
    library = f"{words.plural(stack.library, 'library frame')} folded" if stack.library else ""
    return " · ".join(part for part in (calls, library) if part)


def outer_and_inner(node: StackNode) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
    """Its frames in two parts, the first to be folded: where many lead to a place, the last ones tell it."""
    shown = _INNER_FRAMES if len(node.frames) > _INNER_FRAMES + 1 else len(node.frames)
    return node.frames[: len(node.frames) - shown], node.frames[len(node.frames) - shown :]


def is_blamed(ranks: Collection[int], blamed: Collection[int]) -> bool:
    """All of them are to blame: ranks that part further in are told apart there."""
    return bool(ranks) and set(ranks) <= set(blamed)


def side_by_side(outcome: Outcome) -> Divergence | None:
    """The calls around the divergence. A stored report may hold a table whose rows are not as long as its head."""
    found = outcome.divergence
    whole = found is not None and found.rows and all(len(row) == len(found.ranks) > 0 for row in found.rows)
    return found if whole else None


class ToldOfCalls(NamedTuple):
    """What tells the calls of one row apart, and so is said of each: the line, what it is given, the root."""

    place: bool
    size: bool
    peer: bool
    name: Callable[[Place], str]


def told_of_calls(row: Sequence[EnteredCall | None], divergence: Divergence) -> ToldOfCalls:
    calls = [call for call in row if call]
    places = [call.place for some in divergence.rows for call in some if call and call.place]
    return ToldOfCalls(
        place=any(call.place for call in calls),
        size=len({call.op for call in calls}) == 1 and len({(call.elements, call.dtype) for call in calls}) > 1,
        peer=len({call.peer for call in calls}) > 1,
        name=short_names(places),
    )


def names_of(stacks: Sequence[CallStack]) -> Callable[[Place], str]:
    """Names for the frames of these, as short as they stay apart."""
    return short_names([frame for stack in stacks for frame in stack.frames])


def cause_of(outcome: Outcome) -> Finding | None:
    """The finding that says why it did not pass."""
    return next((one for one in outcome.findings if one.code == outcome.verdict.cause), None)


def others(outcome: Outcome) -> tuple[Finding, ...]:
    """What was found besides."""
    first = cause_of(outcome)
    return tuple(one for one in outcome.findings if one is not first)


def told_at_length(report: Report) -> list[tuple[int, Outcome]]:
    """The outcomes with their numbers from 1, worst first: of several, one that went as it should is but a row."""
    numbered = words.bad_news_first(report)
    if len(numbered) == 1:
        return numbered
    return [(number, one) for number, one in numbered if not went_well(one)]


def went_well(outcome: Outcome) -> bool:
    """Nothing of it needs more than a row: a PASS or SKIP as expected, or a look into another run."""
    if outcome.spec.deepening and outcome.showed:
        return True
    passed = outcome.verdict.status in (Status.PASS, Status.SKIP)
    return passed and outcome.expected and not outcome.flaky and not silent_faults(outcome)


def whose(stack: CallStack) -> str:
    """ "ranks 0, 2, 3", "thread reader of rank 1", "process 4711 of rank 0", "ValueError on rank 1"."""
    who = words.ranks(stack.ranks)
    if not stack.of:
        return who
    return f"{stack.of} of {who}" if stack.of.startswith(("thread ", "process ")) else f"{stack.of} on {who}"


def short_names(places: Iterable[Place]) -> Callable[[Place], str]:
    """Names as short as they stay apart: "train.py:41", and "data/train.py:3" where two files share a name."""
    shared = Counter(_tail(file, 1) for file in {place.file for place in places if place.file})

    def name(place: Place) -> str:
        if place.file is None:
            return ""
        file = _tail(place.file, 1 if shared[_tail(place.file, 1)] <= 1 else 2)
        return file if place.line is None else f"{file}:{place.line}"

    return name


def _tail(file: str, parts: int) -> str:
    return "/".join(file.split("/")[-parts:])


def rank_table(outcome: Outcome) -> tuple[tuple[str, ...], list[tuple[str, ...]], list[bool]]:
    """Head and rows, ranks that stand alike in one row with the longest time, and which rows are the culprits'.

    A colon aligns its column to the right. Columns of which nothing is known are left out.
    """
    alike: dict[tuple[str, str, bool], list[RankStatus]] = {}
    for row in outcome.standings:
        alike.setdefault((row.blocked_in, row.waits_for, row.culprit), []).append(row)
    hangs = outcome.verdict.status is Status.HANG
    head = ("rank:", "blocked in" if hangs else "last seen", "waiting for", "no progress for:")
    rows = [
        (_numbers(same), stands_in, waits_for, words.seconds(_longest(same)))
        for (stands_in, waits_for, _), same in alike.items()
    ]
    known = [at for at in range(len(head)) if any(row[at] not in ("", words.UNKNOWN) for row in rows)]
    return (
        tuple(head[at] for at in known),
        [tuple(row[at] for at in known) for row in rows],
        [culprit for _, _, culprit in alike],
    )


def _numbers(rows: Sequence[RankStatus]) -> str:
    if len(rows) == 1:
        return words.standing_rank(rows[0])
    return words.ranks(row.rank for row in rows).partition(" ")[2]


def _longest(rows: Sequence[RankStatus]) -> float | None:
    return max((row.no_progress_s for row in rows if row.no_progress_s is not None), default=None)
