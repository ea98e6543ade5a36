"""The case study's page is made of what was run, and each of its commands ended as it says."""

from __future__ import annotations

import re

import pytest

from evaluation.case_study import CHAPTERS, EXPERIMENT, NOT_COMPARABLE, Chapter, page
from evaluation.experiments import PAGES

KNOWN = EXPERIMENT.load()
SEEN = KNOWN["chapters"]
CLAIMS = [chapter for chapter in CHAPTERS.values() if chapter.words[0] == "claim"]
PAGE = PAGES / "case-study.md"


def test_the_page_says_what_was_recorded() -> None:
    assert PAGE.read_text() == "\n".join(page(KNOWN))


def test_every_chapter_was_run_in_the_form_in_which_it_stands() -> None:
    assert EXPERIMENT.due(SEEN) == []


@pytest.mark.parametrize("chapter", CHAPTERS.values(), ids=lambda chapter: chapter.name)
def test_each_command_ended_as_the_truth_wants(chapter: Chapter) -> None:
    assert SEEN[chapter.name]["result"] == chapter.right
    assert SEEN[chapter.name]["command"] == chapter.command


@pytest.mark.parametrize("chapter", CLAIMS, ids=lambda chapter: chapter.name)
def test_the_numbers_of_a_row_are_those_of_its_line_in_the_ledger(chapter: Chapter) -> None:
    seen = SEEN[chapter.name]
    (row,) = [line for line in page(KNOWN) if line.startswith(f"| [{chapter.title}]")]
    if chapter.right == NOT_COMPARABLE:
        assert seen["ledger"] is None
        assert "not tested here" in row
        return
    said = "\n".join(seen["said"])
    for side in seen["ledger"]["sides"]:
        assert f"{side['failed']} of {side['of']}" in row
        assert re.search(rf"failed {side['failed']} of {side['of']}\b", said)
    assert f"| {seen['ledger']['attempts']} |" in row


def test_a_machine_of_ours_is_not_on_the_page() -> None:
    assert not re.search(r"/(?:tmp|work|root)/", PAGE.read_text())
