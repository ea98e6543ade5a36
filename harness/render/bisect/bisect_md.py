"""BISECT.md: a bisection ready for an issue: the answer, what proves it, and how to see it again. A pure function."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from nsa_harness.core.bisect.question import CONTROLS, PROOFS, AnswerKind
from nsa_harness.core.bisect.report import BisectTold, ProbeTold
from nsa_harness.render import words
from nsa_harness.render.bisect import words as bisect_words
from nsa_harness.render.bisect.grid import Grid
from nsa_harness.render.terminal.layout import cropped
from nsa_harness.render.text import escape_block, escaped, markdown, markdown_code, markdown_fence

LIMIT = 65_536  # characters that GitHub takes in one issue
_GRID_COLUMNS = 110
_STACK_LINES = 24  # of each file
_PROBE_ROWS = 120
_CELL = 200  # columns of one cell; bisect.json has the whole
_LEFT_OUT = "\n\nThe rest is left out, because an issue takes 65,536 characters; all of it is in the run directory.\n"


def bisect_md(told: BisectTold, stacks: Mapping[str, str] | None = None) -> str:
    """`stacks`: what stood in the dumps of the failing and of the passing probe, by the name of the file."""
    told = escaped(told)
    sections = (
        _head(told),
        _proof(told),
        _commands(told),
        _picture(told),
        _stacks(told, stacks or {}),
        _searched(told),
        _probes(told),
        _made_with(told),
    )
    return _bounded(["\n".join(lines) for lines in sections if lines])


def _head(told: BisectTold) -> list[str]:
    answer = told.answer
    often = bisect_words.how_often(told)
    sure = bisect_words.sureness(answer)
    facts = [part for part in (answer.kind.value, sure, often, bisect_words.effort(told)) if part]
    lines = [f"# {markdown(bisect_words.sentence(told))}", ""]
    lines += [f"{markdown(told.scenario)}: {markdown(bisect_words.question(told))}", ""]
    lines += [f"**{markdown(' · '.join(facts))}**"]
    if setting := bisect_words.setting_word(told):
        lines += ["", f"That is {markdown_code(setting)}."]
    if place := bisect_words.place_line(told):
        lines += ["", f"Where: {' · '.join(map(markdown, place))}"]
    failed = bisect_words.failing_probe(told)
    if failed is not None and failed.summary:
        lines += ["", markdown(failed.summary)]
    if told.interrupted:
        lines += ["", "**Interrupted.** The same command goes on where it stopped."]
    if answer.kind is AnswerKind.UNDECIDED:
        lines += ["", f"{markdown(bisect_words.open_word(told))}."]
        lines += ["", f"To decide it: {markdown(bisect_words.what_decides(told))}."]
    return lines


def _proof(told: BisectTold) -> list[str]:
    """The controls and what was asked once the answer stood."""
    shown = [probe for probe in told.probes if probe.purpose in PROOFS or probe.purpose in CONTROLS]
    if not shown:
        return []
    rows = [_row(told, probe) for probe in shown[:_PROBE_ROWS]]
    claims = [f"- {markdown(claim)}" for claim in bisect_words.proven(told)]
    where = bisect_words.where_proven(told)
    claims += [f"- {markdown(where)}; nothing else was tried"] if claims and where else []
    lines = ["## What proves it", "", *_table(_HEAD, rows)]
    return [*lines, *([""] if claims else []), *claims]


def _commands(told: BisectTold) -> list[str]:
    fails = bisect_words.fails_word(told.sought).capitalize()
    named = ((fails, told.commands.bad), ("Passes", told.commands.good))
    lines = [line for name, text in named if text for line in ("", f"{name}:", "", *markdown_fence(text, "sh"))]
    if told.commands.alone:
        lines += ["", "Without the harness:", "", *markdown_fence(told.commands.alone, "sh")]
    return ["## See it again", *lines] if lines else []


def _picture(told: BisectTold) -> list[str]:
    if not told.probes:
        return []
    picture = list(Grid(subject=told.subject, width=_GRID_COLUMNS).rows(told))
    kept = picture[:_PROBE_ROWS]
    # Each line has passed the escape; as a block they would be cut to the last 40.
    fence = markdown_fence("\n".join(kept), "text")[0][:-4]
    more = ["", f"{len(picture) - len(kept)} more lines are in report.html."] if len(picture) > len(kept) else []
    return ["## The search", "", f"{fence}text", *kept, fence, *more]


def _stacks(told: BisectTold, stacks: Mapping[str, str]) -> list[str]:
    verdicts = {probe.dir: probe.verdict for probe in told.probes}
    lines: list[str] = []
    for name, text in stacks.items():
        kept = _clean(text).split("\n")
        cut = len(kept) - _STACK_LINES
        shown = kept[:_STACK_LINES] + ([f"… {cut} more lines in the file"] if cut > 0 else [])
        lines += [
            "",
            "<details>",
            f"<summary>{markdown(' · '.join(filter(None, (verdicts.get(name.split('/')[0]), name))))}</summary>",
            "",
        ]
        lines += [*markdown_fence("\n".join(shown), "text"), "", "</details>"]
    return ["## Stacks", *lines] if lines else []


def _searched(told: BisectTold) -> list[str]:
    sought = "no failure was seen" if told.sought is None else f"only {told.sought} counts"
    bullets = [told.subject.question, sought, *told.notes]
    bullets += [f"at least {words.plural(told.floor_probes, 'probe')} for a question of this size"]
    bullets += [f"not tried: {' · '.join(told.not_covered)}"] if told.not_covered else []
    return ["## What was searched", "", *(f"- {markdown(item)}" for item in bullets)]


def _probes(told: BisectTold) -> list[str]:
    if not told.probes:
        return []
    rows = [_row(told, probe) for probe in told.probes[:_PROBE_ROWS]]
    left_out = len(told.probes) - len(rows)
    more = ["", f"{left_out} more stand in bisect.json."] if left_out else []
    return [f"## All {words.plural(len(told.probes), 'probe')}", "", *_table(_HEAD, rows), *more]


def _made_with(told: BisectTold) -> list[str]:
    machine = f"{told.machine.host} · {words.machine_line(told.machine)} · nsa-harness {told.harness}"
    lines = ["## Made with", "", f"Run {markdown_code(told.run_id)} on {markdown(machine)}"]
    if told.what:
        lines += ["", markdown(told.what)]
    return [*lines, "", *markdown_fence(told.command, "sh")]


_HEAD = ("probe:", "why", "configuration", "verdict", "counts as", "took:", "remark", "directory")


def _row(told: BisectTold, probe: ProbeTold) -> tuple[str, ...]:
    return (
        str(probe.n),
        markdown(f"{probe.purpose.value.replace('_', ' ')}, {probe.launcher}"),
        markdown_code(cropped(bisect_words.config_words(told.subject.config(probe.places)), _CELL), in_table=True),
        f"**{markdown(probe.verdict)}**" if probe.verdict else "none",
        probe.counts_as.value,
        words.seconds(probe.wall_s) if probe.verdict else "",
        markdown(cropped(bisect_words.remark(told, probe), _CELL)),
        markdown_code(probe.dir, in_table=True) if probe.dir else "",  # no link: an issue has no run directory
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A head that ends in a colon aligns its column to the right."""
    rules = ["---:" if name.endswith(":") else "---" for name in head]
    cells = ([name.rstrip(":") for name in head], rules, *rows)
    return [f"| {' | '.join(row)} |" for row in cells]


def _clean(text: str) -> str:
    """The first lines of a dump; `escape_block` alone would keep the last ones."""
    lines = text.splitlines()
    return "\n".join(escape_block(line) if line.strip() else "" for line in lines).strip("\n")


def _bounded(sections: Sequence[str]) -> str:
    """Whole sections as long as an issue takes them; the answer and its proof come first."""
    whole = "\n\n".join(sections) + "\n"
    if len(whole) <= LIMIT:
        return whole
    kept: list[str] = []
    for section in sections:
        if sum(map(len, kept)) + 2 * len(kept) + len(section) + len(_LEFT_OUT) > LIMIT:
            continue
        kept.append(section)
    return "\n\n".join(kept) + _LEFT_OUT
