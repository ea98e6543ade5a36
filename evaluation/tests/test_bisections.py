"""The table of bisections is of the programs that lie here; nothing in it is wrong and said for certain."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from evaluation import bisections
from evaluation.bisections import EXPERIMENT, Program, Search
from evaluation.experiments import PAGES
from evaluation.launching import Place, Ran, tagged

KNOWN = EXPERIMENT.load()
CELLS = KNOWN["cells"]


def test_every_stored_cell_is_of_a_program_as_it_is_now() -> None:
    assert set(CELLS) <= set(EXPERIMENT.cases)
    assert [name for name, cell in CELLS.items() if not EXPERIMENT.is_current(name, cell)] == []


def test_every_program_has_a_row_and_the_page_says_what_the_cells_say() -> None:
    document = (PAGES / "accuracy.md").read_text()
    told = "\n".join(bisections.section(KNOWN))
    assert told in document
    assert [name for name in bisections.PROGRAMS if told.count(f"| {name} |") != 1] == []


def test_no_wrong_answer_is_said_for_certain() -> None:
    wrong = [name for name, cell in CELLS.items() if bisections.judged(name, cell) == "wrong"]
    assert [name for name in wrong if CELLS[name]["confidence"] == 1] == []


def test_every_file_of_the_programs_is_searched() -> None:
    files = {path.stem for path in bisections.HOME.iterdir() if path.is_file()}
    searched = {Path(search.words[0]).stem for program in bisections.PROGRAMS.values() for search in program.searches}
    assert files == searched - {"train"}  # which is made, commit by commit


def _cell(kind: str | None, items: list[Any] = [], **more: Any) -> dict[str, Any]:  # noqa: B006
    return {"kind": kind, "items": items, "open": [], "zones": [], "code": 0, "commands": {}, **more}


@pytest.mark.parametrize(
    ("name", "cell", "verdict"),
    [
        ("pair_of_layers/search", _cell("set", [2, 6]), "right"),
        ("pair_of_layers/search", _cell("set", [2, 5]), "wrong"),
        ("pair_of_layers/search", _cell("single", [2]), "wrong"),
        ("pair_of_layers/search", _cell("undecided"), "undecided"),
        ("pair_of_layers/search", _cell(None), "none"),
        ("pair_of_layers/search", _cell("set", [2, 6], code=None), "none"),
        ("range_of_layers/3:4", _cell("single", [3]), "right"),
        ("range_of_layers/2:5", _cell("range", [2, 5]), "right"),
        ("range_of_layers/2:5", _cell("range", [2, 6]), "wrong"),
        ("commits/search", _cell("threshold", ["version 5"]), "right"),
        ("commits/search", _cell("undecided", open=["version 4", "version 5"]), "right"),
        ("commits/search", _cell("undecided", open=["version 5"]), "undecided"),
        ("masked/search", _cell("threshold", [401]), "right"),
        ("masked/search", _cell("threshold", [401], zones=[["good", 8], ["different", 250], ["bad", 401]]), "right"),
        ("masked/search", _cell("threshold", [401], zones=[["good", 8], ["different", 251], ["bad", 401]]), "wrong"),
    ],
)
def test_an_answer_is_held_against_the_truth(name: str, cell: dict[str, Any], verdict: str) -> None:
    assert bisections.judged(name, cell) == verdict


class Shell(Place):
    """Commands that end as they are told to, one after the other."""

    def __init__(self, folder: Path, *verdicts: str | None, codes: tuple[int | None, ...] = ()) -> None:
        super().__init__(folder=folder)
        self.verdicts, self.codes, self.runs = list(verdicts), list(codes), 0
        self.verdict: str | None = None

    def ran(self, command: str | Sequence[str], limit_s: float, **environment: str) -> Ran:  # noqa: ARG002
        self.verdict = self.verdicts.pop(0) if self.verdicts else None
        self.runs += self.verdict is not None
        return Ran(code=self.codes.pop(0) if self.codes else 0, output="", seconds=1.0)

    def newest(self) -> str:
        return str(self.runs)

    def stored(self, name: str) -> dict[str, Any]:  # noqa: ARG002
        commands = {"bad": "b", "good": "g", "alone": "a"}
        outcome = {"verdict": self.verdict, "timing": {"wall_s": 1.0}}
        return {"commands": commands, "outcome_sought": {"verdict": "HANG"}, "outcomes": [outcome]}


SURE = Program(name="p", what="", true="", searches=(Search(name="s", words=("p.py",), right=()),))
FLAKY = Program(name="p", what="", true="", searches=SURE.searches, flaky=True)


@pytest.mark.parametrize(
    ("program", "verdicts", "codes", "true"),
    [
        (SURE, ("HANG", "PASS"), (0, 0, 1), {"bad": True, "good": True, "alone": True}),
        (SURE, ("HANG", "PASS"), (0, 0, None), {"bad": True, "good": True, "alone": True}),
        (SURE, ("FAIL", "HANG"), (0, 0, 0), {"bad": False, "good": False, "alone": False}),
        (SURE, (), (2, 2, 1), {"bad": False, "good": False, "alone": True}),
        (FLAKY, ("PASS", "PASS", "HANG", *["PASS"] * 5), (), {"bad": True, "good": True, "alone": False}),
        (FLAKY, ("HANG", "PASS", "PASS", "HANG"), (), {"bad": True, "good": False, "alone": False}),
    ],
)
def test_a_printed_command_is_true_where_it_does_what_it_was_printed_for(
    program: Program, verdicts: tuple[str, ...], codes: tuple[int | None, ...], true: dict[str, bool], tmp_path: Path
) -> None:
    found = bisections.commands_of(Shell(tmp_path, *verdicts, codes=codes), program)
    assert {which: one["true"] for which, one in found.items()} == true


def test_a_row_tells_what_was_said_and_what_is_not_right_is_listed() -> None:
    command = {"command": "nsa-harness run x", "wanted": "FAIL", "verdicts": ["PASS"], "true": False}
    wrong = _cell("set", [2, 5], probes=18, floor=5, seconds=52.4, confidence=0.97, commands={"bad": command})
    right = _cell("none", probes=5, floor=3, seconds=12, confidence=1.0)
    told = bisections.section({"cells": {"pair_of_layers/search": wrong, "healthy/search": right}})
    assert "2 of " in told[7]
    assert "1 right, 0 undecided, 1 wrong, 0 none." in told[7]
    rows = {line.split(" | ")[0]: line for line in told if line.startswith("| ")}
    assert rows["| pair_of_layers"].endswith("| set 2, 5 | 0 of 1 | 18 (5) | 52 | 0 of 1 |")
    assert rows["| healthy"].endswith("| none | 1 of 1 | 5 (3) | 12 | 0 of 0 |")
    assert "not run" in rows["| count"]
    assert [line for line in told if line.startswith("- ")] == [
        "- `pair_of_layers/search` is wrong: answer set 2, 5, 97% sure, exit code 0.",
        "- `pair_of_layers/search`, command `bad`: expected FAIL, got 1 x PASS: `nsa-harness run x`.",
    ]


def test_a_command_that_has_no_end_is_ended_with_all_it_began(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "project").mkdir()
    place = Place(folder=tmp_path / "project")
    ran = place.ran("setsid sleep 600 & echo begun; wait", 0.5)
    assert (ran.code, ran.output) == (None, "begun\n")
    assert tagged(place.tag) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_of_them_is_searched_anew_and_its_commands_are_given() -> None:
    cell = bisections.launch("threshold/search")
    assert bisections.judged("threshold/search", cell) == "right", cell
    assert {which: one["true"] for which, one in cell["commands"].items()} == {"bad": True, "good": True, "alone": True}
