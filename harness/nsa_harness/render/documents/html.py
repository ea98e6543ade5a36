"""report.html: a report as one HTML page without external references. Its only script copies commands."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from html import escape as escape_html
from importlib.resources import files
from itertools import pairwise
from typing import NamedTuple

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from nsa_harness.core.comparison.decisions import Playbook
from nsa_harness.core.experiment.why import WhyReport
from nsa_harness.core.outcome.callstacks import StackNode, stack_trees
from nsa_harness.core.outcome.wording import location
from nsa_harness.core.report import RUNS_ON, CallStack, EnteredCall, Outcome, Place, RankStatus, Report, Status
from nsa_harness.core.search.report import BisectReport
from nsa_harness.render import answer
from nsa_harness.render.documents.report_sections import report_sections
from nsa_harness.render.experiments import picture as bisect_picture
from nsa_harness.render.experiments import words as bisect_words
from nsa_harness.render.sections import Section
from nsa_harness.render.text import escaped, link_target, with_code
from nsa_harness.supervisor.storage.ledger import LedgerLine
from nsa_harness.texts import words

MAX_LANES = 16  # maximum number of bars in the picture of the ranks
_MAX_SINGLE_LANES = 8  # if there are more ranks, those that are in the same call share a bar
_RELOAD_S = 3
_MAX_CAPTION = 72  # characters; the table of ranks contains the whole text
_MAX_LAUNCH_PERCENT = 15.0  # of a bar of the picture of the ranks
_INNER_FRAMES = 3  # frames of a node of the stack tree that are shown; further frames are folded


def report_html(
    report: Report,
    playbook: Playbook,
    search: BisectReport | None = None,
    claim: LedgerLine | None = None,
    why: WhyReport | None = None,
) -> str:
    """Return report.html as text. Equal reports give equal pages."""
    report, search, claim, why = escaped((report, search, claim, why))
    return page_html(
        words.counts_line(report),
        report_sections(report, playbook, search, claim, why),
        alone=len(report.outcomes) == 1 and search is None and claim is None and why is None,
    )


def page_html(title: str, sections: Iterable[Section], *, alone: bool = False) -> str:
    """Return a page with these sections, whose texts are escaped. `alone`: it has one run and no other heading."""
    return _TEMPLATE.render(title=title, alone=alone, sections=sections)


def live_page(page: str | None, lines: Sequence[str], names: Sequence[str], *, is_active: bool) -> str:
    """Return the page of a run that has not ended, which reloads itself while `is_active`.

    `page`: the report so far, or None. `lines`: the state of the run. `names`: files to link to if there is no report.
    """
    state = (
        f'<pre style="margin:1rem;white-space:pre-wrap;overflow-wrap:anywhere">{escape_html(chr(10).join(lines))}</pre>'
    )
    reload = f'<meta http-equiv="refresh" content="{_RELOAD_S}">' if is_active else ""
    if page is not None:
        return page.replace("</head>", f"{reload}</head>", 1).replace("<body>", f"<body>{state}", 1)
    links = [(address, name) for name in names if (address := link_target(name))]
    items = "".join(f'<li><a href="{escape_html(address)}">{escape_html(name)}</a></li>' for address, name in links)
    files = f"<ul>{items}</ul>" if items else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{reload}'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        "<title>nsa-harness: a run in progress</title>"
        "<style>:root{color-scheme:light dark}body{font-family:sans-serif;background:Canvas;color:CanvasText}</style>"
        f"</head><body><main><h1>A run in progress</h1>{state}{files}</main></body></html>\n"
    )


def _kind(section: Section) -> str:
    """Return the name of the template macro that renders this section."""
    return type(section).__name__


def _below(stack: CallStack) -> str:
    """Return the text to show below a call stack, such as "calls barrier · 2 library frames not shown"."""
    calls = f"calls {stack.innermost}" if stack.innermost else ""
    library = f"{words.plural(stack.library, 'library frame')} not shown" if stack.library else ""
    return " · ".join(part for part in (calls, library) if part)


def _outer_and_inner(node: StackNode) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
    """Split the frames into outer frames, which the page hides at first, and inner frames."""
    inner_count = _INNER_FRAMES if len(node.frames) > _INNER_FRAMES + 1 else len(node.frames)
    split = len(node.frames) - inner_count
    return node.frames[:split], node.frames[split:]


def _all_culprits(ranks: Collection[int], culprits: Collection[int]) -> bool:
    return bool(ranks) and set(ranks) <= set(culprits)


class _Differences(NamedTuple):
    """Flags that say which details to show for the calls in one row of a table of collectives."""

    place: bool
    size: bool
    peer: bool


def _differences(row: Sequence[EnteredCall | None]) -> _Differences:
    """Return flags that say which details to show for the calls in `row`, such as those that differ between ranks."""
    calls = [call for call in row if call]
    return _Differences(
        place=any(call.place for call in calls),
        size=len({call.op for call in calls}) == 1 and len({(call.elements, call.dtype) for call in calls}) > 1,
        peer=len({call.peer for call in calls}) > 1,
    )


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A section of the horizontal bar that shows how far a rank got."""

    percent: float
    kind: str  # CSS class: "launch", "moving", "still" or "steps"


@dataclass(frozen=True, kw_only=True)
class Lane:
    """A horizontal bar for one rank, or for several ranks in the same call."""

    label: str
    stretches: tuple[Stretch, ...]
    caption: str
    role: str  # CSS class: "culprit", "waits" or "ended"


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """A bar chart that shows how far each rank got, in time for a HANG and in finished steps otherwise."""

    title: str
    lanes: tuple[Lane, ...]
    ends: tuple[str, str]  # labels of the left and the right end of the bars
    omitted: int  # bars that are not drawn; the culprits' bars are always drawn
    launch: str = ""  # what the key calls the launch; "" if the bars show no launch


def lanes(outcome: Outcome) -> Lanes | None:
    """Return a bar chart that shows how far each rank of a run got, or None if there is nothing to show."""
    still_s = {row.rank: row.no_progress_s for row in outcome.rank_statuses if row.no_progress_s is not None}
    shows_time = outcome.verdict.status is Status.HANG and bool(still_s)
    if not shows_time and not any(outcome.last_step.values()):
        return None
    ranks = sorted({*outcome.last_step, *still_s, *(row.rank for row in outcome.rank_statuses)})
    culprits = words.marked_culprits(outcome)
    row_of = {row.rank: row for row in outcome.rank_statuses}
    groups: dict[object, list[int]] = {}
    for rank in ranks:
        place = (rank in culprits, _caption(outcome, rank, row_of.get(rank), None))
        groups.setdefault(place if len(ranks) > _MAX_SINGLE_LANES else rank, []).append(rank)
    visible = sorted(sorted(groups.values(), key=lambda group: group[0] not in culprits)[:MAX_LANES])
    end_s = 0.0
    if shows_time:
        end_s = max(outcome.timing.wall_s - (outcome.timing.teardown_s or 0.0), *still_s.values(), 0.1)
    last_step = max((step for step in outcome.last_step.values() if step), default=0)
    return Lanes(
        title="Ranks over time" if shows_time else "Finished steps per rank",
        lanes=tuple(
            Lane(
                label=words.part_of_ranks(group, len(ranks)),
                stretches=_time(outcome, end_s, _longest(still_s, group))
                if shows_time
                else _steps(outcome, group[0], last_step),
                caption=_caption(outcome, group[0], row_of.get(group[0]), _longest(still_s, group)),
                role="culprit" if group[0] in culprits else "waits" if group[0] in outcome.victims else "ended",
            )
            for group in visible
        ),
        ends=_end_labels(outcome, end_s) if shows_time else ("", f"step {last_step}"),
        omitted=len(groups) - len(visible),
        launch=_launch_label(outcome, end_s) if shows_time else "",
    )


def _longest(still_s: Mapping[int, float], ranks: Sequence[int]) -> float | None:
    return max((still_s[rank] for rank in ranks if rank in still_s), default=None)


def _end_labels(outcome: Outcome, end_s: float) -> tuple[str, str]:
    start = "start" if outcome.timing.launch_s is None else "launch"
    return start, f"{words.seconds(end_s)}: {'last snapshot' if outcome.ending_text.startswith(RUNS_ON) else 'ended'}"


def _time(outcome: Outcome, end_s: float, still_s: float | None) -> tuple[Stretch, ...]:
    """Return a bar of `end_s` seconds, the last `still_s` of which (None: unknown) had no progress."""
    if still_s is None:
        return ()
    launch_s = min(outcome.timing.launch_s or 0.0, end_s - still_s)
    ends = {"launch": launch_s, "moving": end_s - still_s, "still": end_s}
    percents = [0.0, *(_percent(outcome, end_s, at_s) for at_s in ends.values())]
    return tuple(
        Stretch(percent=round(end - start, 1), kind=kind)
        for kind, (start, end) in zip(ends, pairwise(percents), strict=True)
        if end > start
    )


def _percent(outcome: Outcome, end_s: float, at_s: float) -> float:
    """Return where a time is on the bar, in percent. A long launch is drawn shorter, so the rest stays visible."""
    launch_s = outcome.timing.launch_s or 0.0
    if not _is_launch_shortened(outcome, end_s):
        return 100 * at_s / end_s
    if at_s <= launch_s:
        return _MAX_LAUNCH_PERCENT * at_s / launch_s
    return _MAX_LAUNCH_PERCENT + (100 - _MAX_LAUNCH_PERCENT) * (at_s - launch_s) / (end_s - launch_s)


def _is_launch_shortened(outcome: Outcome, end_s: float) -> bool:
    launch_s = outcome.timing.launch_s or 0.0
    return launch_s < end_s and 100 * launch_s / end_s > _MAX_LAUNCH_PERCENT


def _launch_label(outcome: Outcome, end_s: float) -> str:
    launch_s = outcome.timing.launch_s
    if launch_s is None:
        return ""
    scale = ", not to scale" if _is_launch_shortened(outcome, end_s) else ""
    return f"launch ({words.seconds(launch_s)}{scale})"


def _steps(outcome: Outcome, rank: int, last_step: int) -> tuple[Stretch, ...]:
    """Return a bar of the steps that a rank finished, relative to `last_step`, the highest number of any rank."""
    step = outcome.last_step.get(rank)
    return (Stretch(percent=round(100 * step / last_step, 1), kind="steps"),) if step and step > 0 else ()


def _caption(outcome: Outcome, rank: int, row: RankStatus | None, still_s: float | None) -> str:
    """Return the text next to a bar, such as "11 steps done · 7.0 s in all_reduce #13, waits for rank 0"."""
    step = outcome.last_step.get(rank)
    steps_done = "steps not known" if step is None else f"{words.plural(step, 'step')} done"
    if row is None:
        status = outcome.exit_codes.get(rank)
        return f"{steps_done} · {'still running' if status is None else f'ended with {words.exit_word(status)}'}"
    time_text = "" if still_s is None else f"{words.seconds(still_s)} "
    waits = f", waits for {words.middle(row.waits_for, _MAX_CAPTION // 2)}" if row.waits_for else ""
    call = f"in {row.blocked_in}" if outcome.verdict.status is Status.HANG else row.blocked_in
    return f"{steps_done} · {time_text}{words.middle(call, _MAX_CAPTION)}{waits}"


# Adds a copy button to each command. A page from a file may lack the clipboard, so the selection is copied instead.
COPY_SCRIPT = """
for (const command of document.querySelectorAll("pre.command, code.then")) {
  const box = document.createElement("div"), button = document.createElement("button");
  box.className = "copyable";
  button.className = "copy";
  button.type = "button";
  button.textContent = "copy";
  button.onclick = async () => {
    try {
      await navigator.clipboard.writeText(command.textContent);
    } catch {
      getSelection().selectAllChildren(command);
      document.execCommand("copy");
    }
    button.textContent = "copied";
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  };
  command.replaceWith(box);
  box.append(command, button);
}
"""


def _compile_template() -> Template:
    source = files("nsa_harness.render.documents").joinpath("report.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.globals.update(
        answer=answer,
        words=words,
        kind=_kind,
        with_code=with_code,
        below=_below,
        outer_and_inner=_outer_and_inner,
        all_culprits=_all_culprits,
        differences=_differences,
        location=location,
        copy_script=Markup(COPY_SCRIPT),
        copy_script_hash=f"sha256-{b64encode(sha256(COPY_SCRIPT.encode()).digest()).decode()}",
        lanes=lanes,
        stack_trees=stack_trees,
        searched=bisect_picture,
        said=bisect_words,
        link_target=link_target,
    )
    return environment.from_string(source)


# Compiled on import: during a long plan, an upgrade of nsa-harness could replace the template file.
_TEMPLATE = _compile_template()
