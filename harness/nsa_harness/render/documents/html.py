"""report.html: the sections of a report as one page that needs no network and no script."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import NamedTuple

from jinja2 import Environment, StrictUndefined, Template

from nsa_harness.core.comparison.decisions import Playbook
from nsa_harness.core.outcome.callstacks import StackNode, stack_trees
from nsa_harness.core.report import RUNS_ON, CallStack, Divergence, EnteredCall, Outcome, Place, Report, Status, counts
from nsa_harness.core.search.report import BisectReport
from nsa_harness.render import answer
from nsa_harness.render.documents.report_sections import report_sections
from nsa_harness.render.experiments import picture as bisect_picture
from nsa_harness.render.experiments import words as bisect_words
from nsa_harness.render.sections import Section
from nsa_harness.render.text import escaped, link_target
from nsa_harness.texts import words

MAX_LANES = 16
_MAX_SINGLE_LANES = 8  # more ranks share lanes, grouped by where they are
_MAX_CAPTION = 72  # characters; the table of ranks has the whole text
_INNER_FRAMES = 3  # of a long part of a stack tree; its outer frames are folded


def report_html(report: Report, playbook: Playbook, search: BisectReport | None = None) -> str:
    """Return the page, with pictures of the ranks and of a bisection. The same report gives the same bytes."""
    report, search = escaped((report, search))
    return _TEMPLATE.render(
        title=words.counts_line(report),
        alone=len(report.outcomes) == 1,
        sections=report_sections(report, playbook, search),
    )


def _kind(section: Section) -> str:
    """Return the name of the macro that writes the section."""
    return type(section).__name__


def _tally(report: Report) -> tuple[str, list[tuple[str, int]]]:
    """Return "7 runs", and the number of runs for each verdict that was given, loudest first."""
    given = counts(report.outcomes)
    total = sum(given.values())
    heading = words.plural(total, "run") if total else words.counts_line(report)
    return heading, [(status.value, given[status]) for status in words.LOUDEST_FIRST if given[status]]


def _with_code(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the pieces of the text, and whether each was in backticks. An odd number of backticks marks no code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        yield text, False
        return
    yield from ((part, number % 2 == 1) for number, part in enumerate(parts) if part)


def _below(stack: CallStack) -> str:
    """Return what is below the innermost frame that is shown: "calls barrier · 2 library frames folded"."""
    calls = f"calls {stack.innermost}" if stack.innermost else ""
    library = f"{words.plural(stack.library, 'library frame')} folded" if stack.library else ""
    return " · ".join(part for part in (calls, library) if part)


def _outer_and_inner(node: StackNode) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
    """Return the frames of the node in two parts. The outer ones are folded; of a short node that is none."""
    shown = _INNER_FRAMES if len(node.frames) > _INNER_FRAMES + 1 else len(node.frames)
    return node.frames[: len(node.frames) - shown], node.frames[len(node.frames) - shown :]


def _all_blamed(ranks: Collection[int], culprits: Collection[int]) -> bool:
    """Whether every rank is a culprit. Where only some are, the page marks them further in."""
    return bool(ranks) and set(ranks) <= set(culprits)


class _Differences(NamedTuple):
    """Which details distinguish the calls of one row, so that the page shows them."""

    place: bool
    size: bool
    peer: bool


def _differences(row: Sequence[EnteredCall | None]) -> _Differences:
    calls = [call for call in row if call]
    return _Differences(
        place=any(call.place for call in calls),
        size=len({call.op for call in calls}) == 1 and len({(call.elements, call.dtype) for call in calls}) > 1,
        peer=len({call.peer for call in calls}) > 1,
    )


def _call_names(divergence: Divergence) -> object:
    return answer.short_names([call.place for row in divergence.rows for call in row if call and call.place])


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A part of a bar. The parts follow each other from the left."""

    percent: float
    kind: str  # class of the style sheet: "launch", "moving", "still" or "steps"


@dataclass(frozen=True, kw_only=True)
class Lane:
    """A bar for one rank, or for ranks at the same place."""

    label: str
    stretches: tuple[Stretch, ...]
    caption: str
    role: str  # class of the style sheet: "culprit", "waits" or "ended"


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """The picture of an outcome: its time if it is a HANG, else the steps of its ranks."""

    title: str
    lanes: tuple[Lane, ...]
    ends: tuple[str, str]  # labels of the left and the right end of each bar
    omitted: int  # lanes that are not drawn; a culprit's lane always is


def lanes(outcome: Outcome) -> Lanes | None:
    """Return the picture, or None if neither times nor steps are known."""
    still = {row.rank: row.no_progress_s for row in outcome.standings if row.no_progress_s is not None}
    in_time = outcome.verdict.status is Status.HANG and bool(still)
    if not in_time and not any(outcome.last_step.values()):
        return None
    ranks = sorted({*outcome.last_step, *still, *(row.rank for row in outcome.standings)})
    culprits = set(outcome.culprit.ranks) if outcome.culprit else set()
    groups: dict[object, list[int]] = {}
    for rank in ranks:
        place = (rank in culprits, _caption(outcome, rank, None))
        groups.setdefault(place if len(ranks) > _MAX_SINGLE_LANES else rank, []).append(rank)
    shown = sorted(sorted(groups.values(), key=lambda group: group[0] not in culprits)[:MAX_LANES])
    until_s = max(outcome.timing.wall_s - (outcome.timing.teardown_s or 0.0), *still.values(), 0.1) if in_time else 0.0
    most = max((step for step in outcome.last_step.values() if step), default=0)
    return Lanes(
        title="Ranks over time" if in_time else "Steps of each rank",
        lanes=tuple(
            Lane(
                label=words.ranks(group),
                stretches=_time(outcome, until_s, _longest(still, group))
                if in_time
                else _steps(outcome, group[0], most),
                caption=_caption(outcome, group[0], _longest(still, group)),
                role="culprit" if group[0] in culprits else "waits" if group[0] in outcome.victims else "ended",
            )
            for group in shown
        ),
        ends=_ends(outcome, until_s) if in_time else ("", f"step {most}"),
        omitted=len(groups) - len(shown),
    )


def _longest(still: Mapping[int, float], ranks: Sequence[int]) -> float | None:
    return max((still[rank] for rank in ranks if rank in still), default=None)


def _ends(outcome: Outcome, until_s: float) -> tuple[str, str]:
    begins = "start" if outcome.timing.launch_s is None else "launch"
    return begins, f"{words.seconds(until_s)}: {'last look' if outcome.ended.startswith(RUNS_ON) else 'ended'}"


def _time(outcome: Outcome, until_s: float, still_s: float | None) -> tuple[Stretch, ...]:
    if still_s is None:
        return ()
    launch_s = min(outcome.timing.launch_s or 0.0, until_s - still_s)
    parts = (("launch", launch_s), ("moving", until_s - still_s - launch_s), ("still", still_s))
    return tuple(Stretch(percent=round(100 * part_s / until_s, 1), kind=kind) for kind, part_s in parts if part_s > 0)


def _steps(outcome: Outcome, rank: int, most: int) -> tuple[Stretch, ...]:
    step = outcome.last_step.get(rank)
    return (Stretch(percent=round(100 * step / most, 1), kind="steps"),) if step and step > 0 else ()


def _caption(outcome: Outcome, rank: int, still_s: float | None) -> str:
    step = outcome.last_step.get(rank)
    done = "no step known" if step is None else f"{words.plural(step, 'step')} done"
    row = next((row for row in outcome.standings if row.rank == rank), None)
    if row is None:
        status = outcome.exit_codes.get(rank)
        return f"{done} · {'had not ended' if status is None else f'ended with {words.exit_word(status)}'}"
    still = "" if still_s is None else f"{words.seconds(still_s)} "
    waits = f", waits for {words.middle(row.waits_for, _MAX_CAPTION // 2)}" if row.waits_for else ""
    where = f"in {row.blocked_in}" if outcome.verdict.status is Status.HANG else row.blocked_in
    return f"{done} · {still}{words.middle(where, _MAX_CAPTION)}{waits}"


def _compiled() -> Template:
    source = files("nsa_harness.render.documents").joinpath("report.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.globals.update(
        answer=answer,
        words=words,
        kind=_kind,
        tally=_tally,
        with_code=_with_code,
        below=_below,
        outer_and_inner=_outer_and_inner,
        all_blamed=_all_blamed,
        differences=_differences,
        call_names=_call_names,
        lanes=lanes,
        stack_trees=stack_trees,
        searched=bisect_picture,
        said=bisect_words,
        link_target=link_target,
    )
    return environment.from_string(source)


# Compiled on import, not when the page is written: a long plan may outlast an upgrade of the harness.
_TEMPLATE = _compiled()
