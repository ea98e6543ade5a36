"""The pages of `history` and `compare`: what they show, that nothing in a report can break them, and their size."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest
from history_samples import EVAL, PAGES, TRAIN, entry
from test_render_documents import Page

from nsa_harness.render.documents.html import COPY_SCRIPT
from nsa_harness.render.history import history_page


def text_of(page: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", page.split("<body>")[1]).split())


@pytest.mark.parametrize("name", ["history", "compare_hang", "compare_slow"])
def test_the_whole_page_is_as_recorded(golden: Callable[[str, str], None], name: str) -> None:
    golden(f"{name}.html", PAGES[name])


def test_a_history_shows_each_change_of_the_verdict_with_what_changed() -> None:
    text = text_of(PAGES["history"])
    assert "2. 20261128T000015-000f HANG lock_cycle became PASS" in text
    assert "commit: bbbb → cccc variable OMP: 4 → none" in text
    assert "4. 20261128T000018-0012 FAIL lock_cycle became PASS (nothing that is recorded changed" in text
    assert "Flaky: 1 of 4 runs" in text
    assert "0.1 s (0.1 s to 0.13 s)" in text
    assert "The same in all of these runs: wall time 11.0 s" in text


def test_a_chart_marks_the_bad_runs_and_leaves_a_gap_where_a_number_is_missing() -> None:
    strip, step = re.findall(r"<svg.*?</svg>", PAGES["history"], re.DOTALL)[:2]
    assert [path.count("M") for path in re.findall(r'class="mark \w+" d="(.*?)"', strip)] == [1, 1, 3]
    (line,) = re.findall(r'<path d="(.*?)"', step)
    assert (line.count("M"), line.count("L")) == (2, 16)
    assert re.findall(r'class="mark (\w+)"', step) == ["FAIL"]  # the hanging run has no step
    assert step.count('class="tick"') == 4


def test_runs_are_links_only_where_the_page_can_reach_them() -> None:
    assert 'href="reports/20261128T000018-0012/report.html"' in PAGES["history"]
    assert "href=" not in PAGES["histories"]


def test_a_comparison_marks_the_regression_and_shows_where_the_ranks_diverge() -> None:
    hang, slow = text_of(PAGES["compare_hang"]), text_of(PAGES["compare_slow"])
    assert "Regression: the run does not end as expected any more" in hang
    assert "the ranks diverge here" in hang
    assert "After: HANG" in hang
    assert "Regression: step (+30.0 %)" in slow
    assert "worse (repeats vary by 2.9 %) regression" in slow
    assert "added 2 x dp all_reduce float32 1 train.py log" in slow
    assert "commit aaaa bbbb" in slow
    assert PAGES["compare_slow"].count('<tr class="culprit">') == 1
    assert "Among 19 runs of this scenario" in slow


@pytest.mark.parametrize("name", PAGES)
def test_no_page_needs_the_network_or_lets_a_report_add_a_script(name: str) -> None:
    page, text = Page(), PAGES[name]
    page.feed(text.replace(f"<script>{COPY_SCRIPT}</script>", ""))
    assert page.tags.isdisjoint({"script", "link", "img", "iframe", "object", "base", "form"})
    assert "default-src 'none'" in text
    assert page.open == []
    assert [address for address in page.addresses if not address.startswith("reports/") or ".." in address] == []
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_a_page_of_many_runs_and_scenarios_has_a_limit() -> None:
    started = time.thread_time()
    runs = [entry(number, "HANG" if number % 2 else "PASS", step_s=number + 0.1) for number in range(5000)]
    page = history_page([runs], "reports", 20)
    assert "The charts show the latest 400 of 5000 runs." in page
    assert len(page) < 200_000
    assert page.count(" became ") == 10
    many = history_page([[entry(number, scenario=f"s{number}")] for number in range(5000)], "reports", 20)
    assert len(many) < 500_000
    assert "4988 more scenarios" in many
    assert len(PAGES["history_hostile"]) < 3_000_000
    assert time.thread_time() - started < 5


def test_one_run_has_no_line() -> None:
    assert re.findall(r'class="label">(.*?)<', PAGES["history_of_one"]) == ["verdict"]
    assert "All runs" in text_of(history_page([EVAL], "reports", 2))
    assert "The latest 2 runs" in text_of(history_page([TRAIN], "reports", 2))
