"""The statement at a place is quoted from the file that ran, and from no later one."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from nsa_harness.core.outcome import skipped
from nsa_harness.core.plan import Skip
from nsa_harness.core.report import Culprit, Place
from nsa_harness.supervisor.store.reading import quoted


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("import torch\n    loss.backward()\n")
    os.utime(path, (1000.0, 1000.0))
    return path


def text_of(program: Path, launched: Path, line: int = 2) -> str | None:
    place = Place(file=str(program), line=line)
    culprit = Culprit(ranks=(1,), step=3, collective=None, place=place)
    outcome = replace(skipped(Skip(scenario="one", about="", reason="")), culprit=culprit)
    told = quoted(outcome, launched).culprit
    assert told is not None
    assert told.place is not None
    return told.place.text


def launch(tmp_path: Path, at_s: float) -> Path:
    path = tmp_path / "spec.json"
    path.write_text("{}")
    os.utime(path, (at_s, at_s))
    return path


def test_the_statement_is_quoted_from_a_file_older_than_the_launch(program: Path, tmp_path: Path) -> None:
    assert text_of(program, launch(tmp_path, 2000.0)) == "loss.backward()"


def test_a_file_that_was_edited_since_is_not_quoted(program: Path, tmp_path: Path) -> None:
    assert text_of(program, launch(tmp_path, 500.0)) is None


def test_no_line_that_is_not_there_no_directory_and_no_large_file_is_quoted(program: Path, tmp_path: Path) -> None:
    launched = launch(tmp_path, 2000.0)
    assert text_of(program, launched, line=9) is None
    assert text_of(tmp_path, launched) is None
    program.write_text("x = 1\n" * 200_000)
    os.utime(program, (1000.0, 1000.0))
    assert text_of(program, launched) is None
