"""The page as a person sees it: no text is cut and nothing keeps anybody from reading it, at three widths, light, dark
and printed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import history_samples
import pytest
from bisect_samples import SAMPLES, SINGLE, THRESHOLD
from browser import NAMES, Browser, browser, chromium
from render_samples import DEADLOCK, DIVERGENCE, HEALTHY_PLAN, MIXED, QUIET, SICK_PLAN, hostile

from nsa_harness.core.report import CallStack, Place, Report
from nsa_harness.core.search.report import BisectReport
from nsa_harness.render.documents.html import live_page, report_html
from nsa_harness.subject.playbook import PLAYBOOK

WIDTHS = (400, 800, 1280)
PRINTED = 720  # A4, without its margins

# Text that nobody can read: an element that is wider inside than outside, one that sticks out of the page, and text of
# a picture outside of what it is drawn on. What scrolls on its own account, can be reached by the keyboard and has a
# name is no such thing; printed nothing scrolls.
CUT = """(printed => {
  const found = [];
  const say = (one, why) =>
    found.push(`${one.tagName}.${one.getAttribute('class') || ''}: ${why}: ${one.textContent.trim().slice(0, 60)}`);
  const reached = one => one.tabIndex >= 0 && one.getAttribute('role') === 'region' && one.getAttribute('aria-label');
  for (const one of document.body.querySelectorAll('*')) {
    if (one.closest('svg') && one.tagName !== 'svg' || one.classList.contains('hidden')) continue;
    const style = getComputedStyle(one);
    if (!one.clientWidth || style.display.startsWith('inline') && style.display !== 'inline-block') continue;
    if (one.scrollWidth > one.clientWidth && (printed || !(style.overflowX === 'auto' && reached(one))))
      say(one, `${one.scrollWidth} > ${one.clientWidth}`);
    if (one.scrollHeight > one.clientHeight + 1 && style.overflowY !== 'visible' && one.clientHeight)
      say(one, `${one.scrollHeight} > ${one.clientHeight} high`);
  }
  for (const text of document.querySelectorAll('svg text')) {
    const box = text.getBBox(), canvas = text.ownerSVGElement.viewBox.baseVal;
    if (box.x < canvas.x || box.x + box.width > canvas.x + canvas.width) say(text, 'beyond its picture');
  }
  if (document.documentElement.scrollWidth > innerWidth) say(document.body, 'wider than the screen');
  return found;
})"""
AXE = """axe.run(document, {resultTypes: ['violations']}).then(told => told.violations
  .filter(one => ['serious', 'critical'].includes(one.impact))
  .map(one => [one.id, one.nodes.length, one.nodes[0].html.slice(0, 120), one.nodes[0].failureSummary].join(': ')))"""

LONG = "a_package_with_a_long_name/" * 5 + "the_module_where_it_happens.py"
_FRAMES = tuple(
    Place(file=LONG, line=4000 + at, function=f"call_the_next_one_{at}", text="x = " + "y" * 200) for at in range(4)
)


def crowded() -> Report:
    """Names that are too long for any screen, ranks of which many stand apart, and calls of six columns."""
    stacks = tuple(
        CallStack(
            ranks=(rank, rank + 50),
            of="",
            frames=(replace(_FRAMES[0], line=rank), *_FRAMES[1:]),
            innermost="a_function_of_a_library_with_a_long_name" * 2,
            library=40,
            around=Place(file=LONG, line=rank, text="def f():\n" + "    z = " + "w" * 300),
            proof=f"{'folder/' * 20}rank{rank}.txt",
        )
        for rank in range(1, 5)
    )
    standings = tuple(
        replace(DEADLOCK.rank_statuses[rank % 2], rank=rank, blocked_in=f"all_reduce {LONG}", waits_for=f"ranks {LONG}")
        for rank in range(20)
    )
    assert DIVERGENCE.rows[0][0] is not None
    row = (replace(DIVERGENCE.rows[0][0], op="all_to_all_single_with_a_long_name", place=_FRAMES[0]),) * 6
    apart = replace(DIVERGENCE, ranks=tuple((rank,) for rank in range(6)), rows=(row, row), shared=1)
    outcome = replace(
        DEADLOCK,
        spec=replace(DEADLOCK.spec, scenario="s" * 90),
        stacks=stacks,
        rank_statuses=standings,
        divergence=apart,
    )
    return replace(QUIET, outcomes=(outcome,), command="nsa-harness run " + "x" * 300)


PAGES: dict[str, tuple[Report, BisectReport | None]] = {
    "hang": (replace(QUIET, outcomes=(DEADLOCK,)), None),
    "quiet": (QUIET, None),
    "mixed": (MIXED, None),
    "sick_plan": (SICK_PLAN, None),
    "healthy_plan": (HEALTHY_PLAN, None),
    "hostile": (hostile(), None),
    "crowded": (crowded(), None),
    **{f"bisect_{name}": (QUIET, told) for name, told in SAMPLES.items()},
}


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = chromium()
    if program is None:
        pytest.skip(f"needs Chromium to look at the page: none of {', '.join(NAMES)} is on PATH")
    with browser(program, tmp_path_factory.mktemp("profile")) as one:
        yield one


def shown(folder: Path, report: Report, search: BisectReport | None) -> Path:
    path = folder / "report.html"
    path.write_text(report_html(report, PLAYBOOK, search), encoding="utf-8")
    return path


def complaints(tab: Browser, path: Path, looks: Sequence[tuple[int, bool]]) -> list[str]:
    """All that is found at each width and on paper; what axe finds, in these: a width, and whether it is dark."""
    tab.show(path, WIDTHS[0])
    tab.run(files("axe_core_python").joinpath("axe.min.js").read_text(encoding="utf-8") + ";0")
    # What is folded must fit as well.
    tab.run("document.querySelectorAll('details').forEach(one => one.open = true)")
    found = []
    for width in WIDTHS:
        tab.look(width)
        found += [f"{width}: {one}" for one in tab.run(f"{CUT}(false)")]
    for width, dark in looks:
        tab.look(width, dark=dark)
        found += [f"{width} {'dark' if dark else 'light'}: {one}" for one in tab.run(AXE)]
    tab.look(PRINTED, printed=True)
    return [*found, *(f"printed: {one}" for one in tab.run(f"{CUT}(true)"))]


def test_no_text_of_a_hang_with_its_bisection_is_cut_and_everybody_can_read_it(tab: Browser, tmp_path: Path) -> None:
    report = replace(QUIET, outcomes=(DEADLOCK,))
    assert complaints(tab, shown(tmp_path, report, SINGLE), [(400, True), (1280, False)]) == []


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_no_text_of_any_page_is_cut_and_everybody_can_read_it(tab: Browser, tmp_path: Path, page: str) -> None:
    looks = [(width, dark) for width in WIDTHS for dark in (False, True)]
    assert complaints(tab, shown(tmp_path, *PAGES[page]), looks) == []


@pytest.mark.parametrize("has_report", [False, True])
def test_no_line_of_a_run_in_progress_is_cut(tab: Browser, tmp_path: Path, has_report: bool) -> None:
    lines = [f"running · {LONG}", *(f"    rank {rank}   " + "collective   " * 7 for rank in range(3))]
    report = report_html(replace(QUIET, outcomes=(DEADLOCK,)), PLAYBOOK) if has_report else None
    (tmp_path / "live.html").write_text(live_page(report, lines, ["train/output.log"], is_active=False))
    looks = [(400, True), (800, False), (1280, False)]
    assert complaints(tab, tmp_path / "live.html", looks) == []


@pytest.mark.slow
@pytest.mark.parametrize("page", history_samples.PAGES)
def test_no_text_of_a_history_or_comparison_is_cut_and_everybody_can_read_it(
    tab: Browser, tmp_path: Path, page: str
) -> None:
    path = tmp_path / "page.html"
    path.write_text(history_samples.PAGES[page], encoding="utf-8")
    assert complaints(tab, path, [(width, dark) for width in WIDTHS for dark in (False, True)]) == []


def test_what_is_cut_or_hard_to_read_is_found(tab: Browser, tmp_path: Path) -> None:
    path = tmp_path / "bad.html"
    path.write_text(
        "<!DOCTYPE html><html lang=en><title>x</title><body><main><h1>x</h1>"
        "<p style='width:80px;overflow:hidden;white-space:nowrap'>a text that is cut at its end</p>"
        "<svg viewBox='0 0 40 20'><text x=20 y=10>out of the picture</text></svg>"
        "<p style='color:#ccc;background:#fff'>too pale to be read</p></main>"
    )
    tab.show(path, 800)
    tab.run(files("axe_core_python").joinpath("axe.min.js").read_text(encoding="utf-8") + ";0")
    assert [one.split(":")[0] for one in tab.run(f"{CUT}(false)")] == ["P.", "text."]
    assert [one.split(":")[0] for one in tab.run(AXE)] == ["color-contrast"]


def test_a_page_needs_no_network_in_a_browser_either(tab: Browser, tmp_path: Path) -> None:
    tab.show(shown(tmp_path, hostile(), THRESHOLD), 800)
    assert tab.run("performance.getEntriesByType('resource').map(one => one.name)") == []


def test_no_table_of_a_plan_is_wider_than_a_narrow_screen(tab: Browser, tmp_path: Path) -> None:
    tab.show(shown(tmp_path, MIXED, None), 500)
    too_wide = "[...document.querySelectorAll('.scroll')].filter(one => one.scrollWidth > one.clientWidth)"
    assert tab.run(f"{too_wide}.map(one => one.getAttribute('aria-label'))") == []


def test_each_command_has_a_button_that_copies_it(tab: Browser, tmp_path: Path) -> None:
    tab.show(shown(tmp_path, MIXED, None), 800)
    assert tab.run("document.querySelectorAll('pre.command, code.then').length") > 10
    assert tab.run("[...document.querySelectorAll('pre.command, code.then')].every(one => one.nextSibling.onclick)")
    copy = "Object.defineProperty(navigator, 'clipboard', {value: {writeText: text => { window.copied = text; }}});"
    tab.run(f"{copy} document.querySelector('button.copy').click()")
    assert tab.run("window.copied === document.querySelector('pre.command, code.then').textContent")


def first_screen(tab: Browser) -> dict[str, float]:
    """How far down each part of the answer ends."""
    script = (
        "Object.fromEntries(['.title', '.summary', '.place', '.stacks', 'table.ranks', '.do']"
        ".map(one => [one, document.querySelector(one).getBoundingClientRect().bottom]))"
    )
    told: dict[str, float] = tab.run(script)
    return told


@pytest.mark.parametrize(("width", "height"), [(400, 900), (800, 800), (1280, 720)])
def test_the_first_screen_is_the_answer(tab: Browser, tmp_path: Path, width: int, height: int) -> None:
    tab.show(shown(tmp_path, replace(QUIET, outcomes=(DEADLOCK,)), None), width)
    ends = first_screen(tab)
    assert list(ends.values()) == sorted(ends.values()), json.dumps(ends)
    assert max(ends.values()) <= height, json.dumps(ends)
