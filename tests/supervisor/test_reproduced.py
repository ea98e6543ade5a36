"""The folder repro/ of an attempt: written, replaced and removed with what the evidence says."""

from __future__ import annotations

from pathlib import Path

from nsa_harness.core.outcome.reproduction import Reproduction
from nsa_harness.supervisor.storage.inventory import write_reproduction
from nsa_harness.supervisor.storage.rundir import AttemptDir

WHOLE = Reproduction(command="a\nb\n", script="import torch\n", no_script_reason="")
LINE_ALONE = Reproduction(command="a\n", script=None, no_script_reason="the cause lies in no call")


def files(path: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in sorted((path / "repro").glob("*"))}


def test_both_files_are_written_and_listed_with_their_lines(tmp_path: Path) -> None:
    told = write_reproduction(AttemptDir(tmp_path), WHOLE)
    assert files(tmp_path) == {"command.txt": "a\nb\n", "repro.py": "import torch\n"}
    assert [(one.path, one.count, one.absent) for one in told] == [
        ("repro/repro.py", 1, None),
        ("repro/command.txt", 2, None),
    ]


def test_a_script_of_an_earlier_judgement_does_not_stay(tmp_path: Path) -> None:
    write_reproduction(AttemptDir(tmp_path), WHOLE)
    told = write_reproduction(AttemptDir(tmp_path), LINE_ALONE)
    assert files(tmp_path) == {"command.txt": "a\n"}
    assert told[0].absent == "the cause lies in no call"


def test_a_run_that_passed_leaves_no_file_and_says_why(tmp_path: Path) -> None:
    write_reproduction(AttemptDir(tmp_path), WHOLE)
    told = write_reproduction(AttemptDir(tmp_path), None)
    assert files(tmp_path) == {}
    assert {one.absent for one in told} == {"the run neither failed nor hung"}


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    attempt, elsewhere = tmp_path / "attempt", tmp_path / "elsewhere"
    attempt.mkdir()
    elsewhere.mkdir()
    (attempt / "repro").symlink_to(elsewhere)
    told = write_reproduction(AttemptDir(attempt), WHOLE)
    assert list(elsewhere.iterdir()) == []
    assert told[0].absent == "repro is a link, which is not followed"
