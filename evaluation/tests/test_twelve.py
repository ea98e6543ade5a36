"""The table of the twelve programs is of the programs that lie here, and says what its cells say."""

from __future__ import annotations

import sys

import pytest

from evaluation import twelve
from evaluation.experiments import PAGES
from evaluation.scoring import LINES_OFF

KNOWN = twelve.EXPERIMENT.load()
CELLS = KNOWN["cells"]
KEYS = {"code", "verdict", "cause", "summary", "ranks", "file", "line", "first_s", "verdict_s", "answer"}


def test_every_stored_cell_is_of_a_program_as_it_is_now_and_has_its_answer() -> None:
    assert KNOWN["programs"] == twelve.digests()
    assert len(twelve.PROGRAMS) == 12
    assert set(CELLS) <= set(twelve.EXPERIMENT.cases)
    for name, cell in CELLS.items():
        assert set(cell) >= KEYS, name
        assert 0 < len(cell["answer"]) <= 5, name


def test_the_page_says_what_the_cells_say() -> None:
    document = (PAGES / "accuracy.md").read_text()
    assert "\n".join(twelve.section(KNOWN)) in document


@pytest.mark.parametrize("program", twelve.PROGRAMS.values(), ids=lambda one: one.name)
def test_every_line_that_a_truth_names_stands_in_its_program(program: twelve.Program) -> None:
    for text in (*program.hang["lines"], *program.fail["lines"]):
        assert program.places(text), text


def test_what_is_wrong_of_a_cell_is_told_part_by_part() -> None:
    name = "one_process/hang/run"
    program, _, _ = twelve.parts_of(name)
    right = {"verdict": "HANG", "cause": "thread_died", "ranks": [0], "file": "one_process.py"}
    ((_, line, _),) = program.places("while (tokens := ready.get())")
    assert twelve.wrong(name, {**right, "line": line}) == []
    assert twelve.wrong(name, {**right, "line": line + LINES_OFF + 1, "ranks": [1]}) == ["rank", "line"]
    assert twelve.wrong(name, {**right, "line": line, "verdict": "PASS"}) == ["verdict"]
    assert twelve.wrong("one_process/none/run", {"verdict": "PASS", "cause": None}) == []
    assert twelve.wrong("one_process/none/attach", {"verdict": "PASS", "cause": None}) == ["verdict"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["plain_ddp/hang/run", "spawned_workers/fail/watch", "checkpoints/hang/attach"])
def test_three_of_them_are_judged_anew(name: str) -> None:
    assert twelve.wrong(name, twelve.launch(name, sys.executable)) == []
