"""`nsa-harness wrong`: a recording with the truth, read back and scored by the tool that scores strangers."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from evaluation.strangers import replay, score
from nsa_harness.cli.main import run_command_line

sys.path.insert(0, str(Path(__file__).parents[1] / "supervisor"))
from attempts import unpack

# A Python 3.11 before 3.11.4 has no filters.
SAFELY: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
RUN = "20261121T101500-3f2a"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two attempts, judged once."""
    run = tmp_path_factory.mktemp("stored") / RUN
    for name, case in (("train", "store_key_when_better"), ("train~2", "thread_producer_died")):
        unpack(case, run / name)
    assert run_command_line(["report", str(run)]) == 124
    return run


@pytest.fixture
def run(stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With the first of its attempts."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(stored, tmp_path / "reports" / RUN, ignore=shutil.ignore_patterns("train~2"))
    return tmp_path / "reports" / RUN


def outcome(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "report.json").read_text())["outcomes"][0])


def wrong(*words: str) -> int:
    return run_command_line(["export", "--as", "misdiagnosis", *words])


def documents(file: Path) -> dict[str, str]:
    """What lies in a recording, by name, unpacked."""
    with tarfile.open(file) as packed:
        assert all(member.mode == 0o600 for member in packed)
        found = {member.name.partition("/")[2]: packed.extractfile(member) for member in packed}
        data = {name: file.read() for name, file in found.items() if file is not None}
    return {name: (gzip.decompress(one) if name.endswith(".gz") else one).decode() for name, one in data.items()}


def test_a_recording_is_judged_again_as_it_was_and_scored_against_the_truth(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = outcome(run)
    place = said["culprit"]["place"]
    words = ("--line", f"{Path(place['file']).name}:{place['line']}", "--cause", "p2p_unmatched", "--rank", "0")
    assert wrong(str(run), *words, "--note", "I read it") == 0
    told = capsys.readouterr().out.splitlines()
    file = run.parent / f"{run.name}.train.wrong.tar.gz"
    assert next(line for line in told if "bytes" in line).startswith(str(file))
    lines = list(replay(file))
    assert lines[0] == "recorded/train.py: I read it"
    then, today = (line.split(None, 1)[1] for line in lines[1:3])
    assert then == today
    assert then.startswith(f"{said['verdict']} · {said['cause']} · ")
    guilty = said["culprit"]["ranks"] == [0]
    assert lines[3] == f"  right verdict, {'rank, ' if guilty else ''}line; wrong {'' if guilty else 'rank, '}cause"


def test_the_same_is_read_from_a_folder_and_scored_as_a_round_of_strangers_is(run: Path, tmp_path: Path) -> None:
    assert wrong(str(run), "--cause", "p2p_unmatched", "--to", "one.tar.gz") == 0
    with tarfile.open("one.tar.gz") as packed:
        packed.extractall("there", **SAFELY)
    (home,) = (tmp_path / "there").iterdir()
    assert list(replay(home)) == list(replay(Path("one.tar.gz")))
    assert "verdict            1 of 1" in score(home)
    assert "cause              0 of 1" in score(home)


def test_a_hang_that_was_none_is_told_as_one(run: Path) -> None:
    assert wrong(str(run), "--verdict", "pass", "--note", "it was loading", "--to", "one.tar.gz") == 0
    (truth,) = json.loads(documents(Path("one.tar.gz"))["recorded/truth.json"])
    assert (truth["healthy"], truth["verdict"], truth["family"], truth["guilty"]) == (True, "PASS", "none", [])
    assert list(replay(Path("one.tar.gz")))[-1] == "  right nothing; wrong verdict"


def test_it_holds_evidence_and_source_and_neither_logs_nor_folders_nor_secrets(run: Path) -> None:
    folder = str(Path(outcome(run)["culprit"]["place"]["file"]).parent)
    token = "ghp_" + "a1B2" * 9
    (run / "train" / "env.json").write_text(
        json.dumps({"environment": {"declared": {"API_TOKEN": token}}, "git": {"commit": "c0ffee", "dirty": True}})
    )
    sources = json.loads((run / "train" / "sources.json").read_text())
    sources[0]["text"] += f"\n    # {token}"
    (run / "train" / "sources.json").write_text(json.dumps(sources))
    assert wrong(str(run), "--cause", "p2p_unmatched", "--note", f"the token {token}", "--to", "one.tar.gz") == 0
    kept = documents(Path("one.tar.gz"))
    assert set(kept) == {"wrong.json", "recorded/truth.json", "answers.jsonl", "evidence.jsonl.gz"}
    assert [
        name for name, text in kept.items() if token in text or f'"{folder}/' in text or os.uname().nodename in text
    ] == []
    facts = json.loads(kept["wrong.json"])
    assert (facts["harness"], facts["commit"], facts["dirty"]) == ("unknown", "c0ffee", True) or facts["harness"]
    assert facts["said"]["cause"] == outcome(run)["cause"]
    assert facts["true"] == {
        "verdict": outcome(run)["verdict"], "cause": "p2p_unmatched", "ranks": [], "file": None, "line": None,
    }  # fmt: skip
    assert len(facts["date"]) == len("2026-11-23")
    assert '"/home/ada/project/' in kept["evidence.jsonl.gz"]


def test_the_function_around_a_line_that_was_not_recorded_is_taken_from_the_file_itself(run: Path) -> None:
    text = "import os\n\n\ndef left_out(api_key='sk-1234567890abcdefghij'):\n    return os.sep\n"
    Path("loader.py").write_text(text)
    os.utime("loader.py", (1, 1))  # as it was launched
    assert wrong(str(run), "--line", "loader.py:5", "--to", "one.tar.gz") == 0
    kept = documents(Path("one.tar.gz"))["evidence.jsonl.gz"]
    assert "def left_out" in kept
    assert "sk-1234567890abcdefghij" not in kept
    assert json.loads(documents(Path("one.tar.gz"))["wrong.json"])["true"]["line"] == 5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cause", "p2p_unmached"], 'did you mean "p2p_unmatched"?'),
        (["--verdict", "HUNG"], 'did you mean "HANG"?'),
        (["--verdict", "SLOW"], "known: PASS, FAIL, HANG, SKIP, ERROR"),
        (["--rank", "99"], "the run has ranks 0 to"),
        (["--line", "train.py"], "expected FILE:LINE, such as train.py:41"),
        (["--line", "train.py:0"], "expected FILE:LINE"),
        (["--line", "nowhere.py:3"], "the evidence has no such file"),
        ([], "this is the answer that was reported"),
    ],
)
def test_what_cannot_be_true_is_refused_with_what_can(
    run: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert wrong(str(run), *words, "--to", "one.tar.gz") == 2
    assert said in capsys.readouterr().err
    assert not Path("one.tar.gz").exists()


def test_a_line_beyond_what_was_recorded_is_refused_with_the_lines_that_were(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = Path(outcome(run)["culprit"]["place"]["file"]).name
    assert wrong(str(run), "--line", f"{name}:99999") == 2
    assert "has only these lines: " in capsys.readouterr().err


def test_what_was_said_is_no_news(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = outcome(run)
    place = said["culprit"]["place"]
    words = ["--cause", said["cause"], "--line", f"{Path(place['file']).name}:{place['line']}"]
    words += [word for rank in said["culprit"]["ranks"] for word in ("--rank", str(rank))]
    assert wrong(str(run), *words) == 2
    assert "this is the answer that was reported" in capsys.readouterr().err


def test_of_several_attempts_one_is_named(
    stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = shutil.copytree(stored, tmp_path / RUN)
    assert wrong(str(run), "--cause", "p2p_unmatched") == 2
    said = capsys.readouterr().err
    assert "has 2 attempts; name the attempt with the wrong answer: " in said
    assert {f"{run}/train", f"{run}/train~2"} <= set(said.replace(",", "").split())
    assert wrong(str(run / "train~2"), "--cause", "p2p_unmatched") == 0
    (kept,) = tmp_path.glob("*.gz")
    assert kept.name == f"{RUN}.train~2.wrong.tar.gz"
    assert json.loads(documents(kept)["wrong.json"])["said"]["cause"] == "thread_died"


def test_a_recording_takes_the_place_of_no_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine").write_text("mine")
    assert wrong(str(run), "--cause", "p2p_unmatched", "--to", "mine") == 2
    assert "name another file with --to FILE" in capsys.readouterr().err
    assert Path("mine").read_text() == "mine"


def test_a_run_that_was_never_judged_says_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "report.json").unlink()
    assert wrong(str(run), "--cause", "p2p_unmatched") == 2
    assert f"`nsa-harness report {run}` writes it" in capsys.readouterr().err


# The other forms of export, and the earlier names.


def test_the_earlier_names_of_export_do_the_same(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["export", "--as", "misdiagnosis"], ["wrong"]):
        assert run_command_line([*words, str(run), "--cause", "p2p_unmatched", "--to", f"{words[0]}.tar.gz"]) == 0
    assert documents(Path("export.tar.gz")) == documents(Path("wrong.tar.gz"))
    for words in (["export"], ["bundle"]):
        assert run_command_line([*words, str(run), "--to", f"{words[0]}-all.tar.gz"]) == 0
        assert capsys.readouterr().out.endswith(" files; check them before you share them\n")
    with tarfile.open("export-all.tar.gz") as new, tarfile.open("bundle-all.tar.gz") as earlier:
        assert new.getnames() == earlier.getnames() != []
    prompts = []
    for words in (["export", str(run), "--as", "prompt"], ["report", str(run), "--prompt"]):
        assert run_command_line(words) == 124
        prompts.append(capsys.readouterr().out)
    assert prompts[0] == prompts[1] != ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--line", "train.py:1"], "--line states the correct answer; it needs --as misdiagnosis"),
        (["--as", "prompt", "--rank", "0"], "--rank states the correct answer; it needs --as misdiagnosis"),
        (
            ["--as", "prompt", "--to", "x"],
            "--to has no effect with --as prompt, which prints to stdout; redirect it with > FILE",
        ),
    ],
)
def test_an_option_of_another_form_is_refused(
    run: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(["export", str(run), *words]) == 2
    assert capsys.readouterr().err == f"{message}\n"
