"""Which of the lines that `nsa-harness why` names count as right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evaluation import explanations

STORED = {
    "program": "p1/b/train.py", "ranks": 2, "args": [], "healthy": False, "verdict": "HANG", "family": "calls_differ",
    "also": [], "guilty": [[1]], "lines": [{"file": "p1/b/lib/data.py", "from": 20, "to": 22}],
}  # fmt: skip


def row(*lines: tuple[str, int], certain: bool = False) -> dict[str, Any]:
    candidates = [[file, line, "leak"] for file, line in lines]
    return {"program": "teams/p1/b/train.py", "python": "3.11", "run": ["train.py", 9], "verdict": "HANG",
            "result": "likely", "candidates": candidates, "certain": certain}  # fmt: skip


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "round9" / "teams").mkdir(parents=True)
    (tmp_path / "round9" / "teams" / "truth.json").write_text(json.dumps([STORED]))
    monkeypatch.setattr(explanations, "ROUNDS", tmp_path)
    return tmp_path / "round9"


@pytest.mark.parametrize(
    ("rows", "first", "three", "wrong"),
    [
        (row(("lib/data.py", 24), certain=True), 1, 1, 0),
        (row(("train.py", 20), ("lib/data.py", 18), certain=True), 0, 1, 1),
        (row(("lib/data.py", 25)), 0, 0, 0),
        (row(*[("train.py", 1)] * 3, ("lib/data.py", 21)), 0, 0, 0),
        (row(), 0, 0, 0),
    ],
    ids=["two lines away", "second", "three lines away", "fourth", "none"],
)
def test_a_line_is_right_if_it_is_at_most_two_lines_from_a_line_that_fixes_the_bug(
    home: Path, rows: dict[str, Any], first: int, three: int, wrong: int
) -> None:
    (home / explanations.FILE).write_text(json.dumps(rows) + "\n")
    counts = explanations.figures(home)["3.11"]
    assert (counts["run"], counts["first"], counts["first three"]) == ("0 of 1", f"{first} of 1", f"{three} of 1")
    assert counts["certain and wrong"].startswith(f"{wrong} of {int(rows['certain'])}")
    assert ("missed by 3.11" in explanations.report(home)) == (not three)
    assert any(f"| {first} of 1 |" in line for line in explanations.section())


def first_run(verdict: str, cause: str | None, ranks: list[int]) -> dict[str, Any]:
    return {"verdict": verdict, "cause": cause, "ranks": ranks, "file": None, "line": None, "confidence": 0.9,
            "beside": []}  # fmt: skip


def test_the_first_run_is_scored_and_a_hang_of_a_healthy_program_is_counted(home: Path) -> None:
    healthy = {**STORED, "program": "p1/a/train.py", "healthy": True, "verdict": "PASS", "family": "none",
               "guilty": [], "lines": []}  # fmt: skip
    silent = {**STORED, "program": "p2/b/train.py", "verdict": "PASS", "family": "silent",
              "lines": [{"file": "p2/b/lib/data.py", "from": 20, "to": 22}]}  # fmt: skip
    (home / "teams" / "truth.json").write_text(json.dumps([STORED, healthy, silent]))
    rows = [
        {**row(("lib/data.py", 21)), "answer": first_run("HANG", "rank0_only_collective", [0])},
        {**row(), "program": "teams/p1/a/train.py", "answer": first_run("HANG", None, [])},
        {**row(("lib/data.py", 21)), "program": "teams/p2/b/train.py", "verdict": "PASS",
         "answer": first_run("PASS", None, [])},
    ]  # fmt: skip
    (home / explanations.FILE).write_text("".join(json.dumps(stored) + "\n" for stored in rows))
    counts = explanations.figures(home)["3.11"]
    assert (counts["verdict"], counts["rank"], counts["cause"]) == ("2 of 3", "0 of 1", "1 of 1")
    assert (counts["false HANG"], counts["first"], counts["silent"]) == ("1 of 1", "1 of 1", "1 of 1")
    assert "first run wrong in verdict: teams/p1/a/train.py" in explanations.report(home)
