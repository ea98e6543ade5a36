"""Broken inputs: each gets exactly its message, exit code 2, no traceback, and nothing is written.

`messages.txt` holds one section an input: `== FILE` or `== ENV=VALUE... command line`, then the expected lines of
stderr.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsa_harness.cli.main import run_command_line

HERE = Path(__file__).resolve().parent


def sections() -> Iterator[tuple[str, list[str]]]:
    for section in (HERE / "messages.txt").read_text().split("== ")[1:]:
        title, *lines = section.splitlines()
        yield title, [line for line in lines if line]


EXPECTED = dict(sections())


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the broken files in it, and an environment without our names."""
    for kind in ("scenarios", "specs"):
        # Not named scenarios/: there they would be part of every catalog.
        shutil.copytree(HERE / kind, tmp_path / f"broken_{kind}")
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("NSA_", "TORCH_BACKEND"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # a machine without a GPU, whatever this one has
    return tmp_path


def files_below(place: Path) -> list[str]:
    return sorted(str(path.relative_to(place)) for path in place.rglob("*"))


def test_every_broken_file_has_its_expected_message() -> None:
    broken = {f"broken_{kind}/{path.name}" for kind in ("scenarios", "specs") for path in (HERE / kind).iterdir()}
    assert broken == {title for title in EXPECTED if title.startswith("broken_")}
    assert len(EXPECTED) >= 30


@pytest.mark.parametrize("title", EXPECTED)
def test_a_broken_input_gets_its_message_and_leaves_nothing_behind(
    title: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files_below(place)
    words = shlex.split(title) if not title.startswith("broken_") else ["run", title]
    while "=" in words[0]:
        name, value = words.pop(0).split("=", 1)
        monkeypatch.setenv(name, value)
    code = run_command_line(words)
    said = capsys.readouterr()
    expected = [line.replace("{place}", str(place)) for line in EXPECTED[title]]
    # Typer prints its usage lines before the error; the last line is the error.
    lines = said.err.splitlines()
    assert (lines[-1:] if lines[0].startswith("Usage: ") else lines) == expected
    assert code == 2
    assert said.out == ""
    assert files_below(place) == before
