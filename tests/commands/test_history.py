"""`history`, `compare` and `prune` over made-up stored runs."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from nsa_harness.cli import main as cli
from nsa_harness.core.comparison.communication import Group, Operation
from nsa_harness.core.comparison.history import RANK_STEP, Change, Entry, compare, flake_rate, verdict_changes
from nsa_harness.render.history import sparkline
from nsa_harness.supervisor.storage.comm_lock import Recorded
from nsa_harness.supervisor.storage.history import INDEX, History
from nsa_harness.supervisor.storage.rundir import AttemptDir, RunDir, lock_run

SAMPLE = Path(__file__).resolve().parents[2] / "reports" / "sample"
REPORT = json.loads((SAMPLE / "report.json").read_text())


def store(
    parent: Path, number: int, *, verdict: str = "PASS", step_s: float = 0.1, commit: str = "aaaa", name: str = "train",
    spec_hash: str = "1",
) -> Path:  # fmt: skip
    """Store one run with one attempt. `number` orders the runs."""
    path = parent / f"20261128T{number:06d}-{number:04x}"
    attempt = path / name
    attempt.mkdir(parents=True)
    (outcome,) = json.loads(json.dumps(REPORT["outcomes"]))
    outcome |= {
        "scenario": name, "spec_hash": spec_hash, "verdict": verdict, "expected": verdict == "PASS", "dir": name,
        "cause": None if verdict == "PASS" else "lock_cycle", "summary": "rank 1 waits for a lock",
    }  # fmt: skip
    outcome["detail"]["metrics"]["step_s_median"] = step_s
    (path / "report.json").write_text(json.dumps({**REPORT, "run_id": path.name, "outcomes": [outcome]}))
    shutil.copy(SAMPLE / "run.json", path / "run.json")
    facts = {
        "python": {"version": "3.11.7"},
        "packages": {"torch": "2.13.0"},
        "git": {"commit": commit, "dirty": False},
    }
    (attempt / "env.json").write_text(json.dumps(facts))
    return path


def entries(parent: Path) -> tuple[Entry, ...]:
    index = History(parent)
    found = index.entries()
    index.close()
    return found


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = cli.run_command_line(words)
    captured = capsys.readouterr()
    return code, captured.out + captured.err


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "reports"


def test_the_index_follows_the_directories(parent: Path) -> None:
    paths = [store(parent, number) for number in range(3)]
    assert [entry.run_id for entry in entries(parent)] == [path.name for path in paths]
    shutil.rmtree(paths[0])
    store(parent, 7, verdict="HANG")
    (report,) = [paths[1] / "report.json"]
    report.write_text(report.read_text().replace('"PASS"', '"FAIL"'))
    assert [(entry.run_id, entry.verdict) for entry in entries(parent)] == [
        (paths[1].name, "FAIL"), (paths[2].name, "PASS"), ("20261128T000007-0007", "HANG"),
    ]  # fmt: skip


def test_a_rebuilt_index_gives_the_same_answers_for_300_runs(parent: Path) -> None:
    for number in range(300):
        store(parent, number, step_s=0.1 + number / 1e5, verdict="HANG" if number % 50 == 49 else "PASS")
    before = entries(parent)
    (parent / INDEX).unlink()
    assert entries(parent) == before
    assert len(before) == 300


@pytest.mark.parametrize("damage", [b"", b"not a database", b"SQLite format 3\x00" + b"\xff" * 5000])
def test_a_damaged_index_is_built_again(parent: Path, damage: bytes) -> None:
    store(parent, 1)
    before = entries(parent)
    (parent / INDEX).write_bytes(damage)
    assert entries(parent) == before


def test_an_index_in_use_is_not_removed(parent: Path) -> None:
    store(parent, 1)
    before = entries(parent)
    other = sqlite3.connect(parent / INDEX)
    other.execute("BEGIN IMMEDIATE")  # another nsa-harness updates it; reading is still possible
    assert entries(parent) == before
    other.rollback()
    other.close()


@pytest.mark.parametrize("number", ["1" + "0" * 400, "Infinity", "NaN", "-1e308"])
def test_a_number_that_no_run_can_have_is_not_one(
    parent: Path, number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for run_number in range(3):
        store(parent, run_number, step_s=0.1 + run_number)
    report = store(parent, 3, step_s=0.123) / "report.json"
    report.write_text(report.read_text().replace('"step_s_median": 0.123', f'"step_s_median": {number}'))
    code, out = run(capsys, "history", "train")
    assert (code, "  step                ▁▅█  0.1 s to 2.1 s" in out) == (0, True)


@pytest.mark.parametrize("text", ["", "{", '{"outcomes": [{}]}', '{"outcomes": 3}', "[" * 100_000])
def test_a_damaged_run_costs_only_itself(parent: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    store(parent, 1)
    store(parent, 2)
    (store(parent, 3) / "report.json").write_text(text)
    code, out = run(capsys, "history", "train")
    assert code == 0
    assert "train: 2 runs, 0 not as expected" in out
    assert "note: 20261128T000003-0003: " in out


def test_history_names_what_changed_with_the_verdict(parent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(4):
        store(parent, number, commit="aaaa", step_s=0.1 + number)
    store(parent, 4, step_s=0.1, commit="bbbb", verdict="HANG")
    code, out = run(capsys, "history", "train.py")
    assert code == 0
    assert "train: 5 runs, 1 not as expected" in out
    assert "20261128T000004-0004: PASS became HANG lock_cycle\n    commit: aaaa -> bbbb" in out
    assert "  step                ▁▃▆█▁  0.1 s to 0.1 s" in out
    code, out = run(capsys, "history")
    assert "train" in out
    assert "HANG lock_cycle" in out
    code, out = run(capsys, "history", "trian")
    assert (code, 'did you mean "train"?' in out) == (2, True)


def test_compare_tells_a_regression_from_noise(parent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, step_s in enumerate([0.100, 0.104, 0.096, 0.102, 0.098]):
        store(parent, number, step_s=step_s)
    noisy, slow = store(parent, 10, step_s=0.108), store(parent, 11, step_s=0.150, commit="bbbb")
    first = "20261128T000000-0000"
    code, out = run(capsys, "compare", first, noisy.name)
    assert (code, "within the noise" in out, "no regression" in out) == (0, True, True)
    code, out = run(capsys, "compare", first, slow.name)
    assert code == 1
    assert "+50.0 %" in out
    assert "worse (repeats vary by" in out
    assert "commit: aaaa -> bbbb" in out
    assert run(capsys, "compare", slow.name, first)[0] == 0  # faster is no regression
    code, out = run(capsys, "compare", first, "--json", str(slow))
    assert (code, json.loads(out)["comparisons"][0]["regression"]) == (1, True)


def test_compare_reports_a_verdict_that_became_worse(parent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = store(parent, 1), store(parent, 2, verdict="HANG")
    code, out = run(capsys, "compare", good.name, bad.name)
    assert code == 1
    assert "rank 1 waits for a lock" in out
    store(parent, 3, name="other")
    code, out = run(capsys, "compare", good.name, "nothing")
    assert (code, "not a stored run" in out) == (2, True)


def test_history_and_compare_write_a_page(parent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = store(parent, 1), store(parent, 2, verdict="HANG", commit="bbbb")
    page = parent.parent / "page.html"
    code, out = run(capsys, "history", "train", "--html", "page.html")
    assert (code, "train: 2 runs" in out, "wrote page.html" in out) == (0, True, True)
    assert f'href="reports/{bad.name}/report.html"' in page.read_text()
    assert "commit: aaaa → bbbb" in page.read_text()
    code = cli.run_command_line(["compare", good.name, bad.name, "--json", "--html", "page.html"])
    captured = capsys.readouterr()
    assert (code, captured.err) == (1, "wrote page.html\n")
    assert json.loads(captured.out)["comparisons"][0]["regression"]
    assert "the ranks diverge here" in page.read_text()
    assert f'href="reports/{bad.name}/' in page.read_text()
    for words in (["history"], ["compare", good.name, bad.name]):
        code = cli.run_command_line([*words, "--html", "missing/page.html"])
        captured = capsys.readouterr()
        assert (code, captured.out) == (2, "")
        assert captured.err.count("--html missing/page.html: No such file or directory") == 1
    assert sorted(path.name for path in parent.parent.iterdir()) == ["page.html", "reports"]


def test_without_a_run_there_is_no_page(parent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "history", "--html", "page.html")
    assert (code, "reports has no run to show" in out) == (2, True)
    assert not (parent.parent / "page.html").exists()


def test_compare_shows_what_a_step_communicates(
    parent: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = store(parent, 1), store(parent, 2)
    small, large = (Operation(
        group=Group(names=("world",), size=2), op="all_reduce", dtype="float32", elements=elements, site="a.py f",
        line=None,
    ) for elements in (8, 16))  # fmt: skip
    steps = {good.name: (small,), bad.name: (large, small)}

    def recorded(attempt: AttemptDir, ranks: int) -> Recorded:
        operations = steps[attempt.path.parent.name]
        return Recorded(step=3, is_steady=is_steady, ranks=({3: operations},) * ranks, meshes={})

    monkeypatch.setattr("nsa_harness.commands.history.recorded", recorded)
    is_steady = True
    code, out = run(capsys, "compare", good.name, bad.name)
    assert code == 0
    assert re.search(r"calls per step +1 +2 +\+100.0 % +different", out)
    assert re.search(r"sent per step +32 B +96 B +\+200.0 % +different", out)
    assert re.search(r"added +1 x +world +all_reduce +float32 +16 +a.py f", out)
    _, out = run(capsys, "compare", good.name, bad.name, "--json")
    (call,) = json.loads(out)["comparisons"][0]["calls"]
    assert (call["kind"], call["after"]["elements"]) == ("added", 16)
    is_steady = False
    assert "calls" not in run(capsys, "compare", good.name, bad.name)[1]


def test_a_program_that_reports_no_step_has_that_of_its_slowest_rank(parent: Path) -> None:
    report = store(parent, 1) / "report.json"
    values = json.loads(report.read_text())
    detail = values["outcomes"][0]["detail"]
    detail["metrics"] = {}
    detail["vitals"] = [{**detail["vitals"][0], "step_s": step_s} for step_s in (0.1, 0.3, None)]
    report.write_text(json.dumps(values))
    (entry,) = entries(parent)
    assert (entry.numbers.get("step"), entry.numbers[RANK_STEP]) == (None, 0.3)


def test_flaky_is_a_difference_without_a_difference(parent: Path) -> None:
    for number in range(6):
        store(parent, number, verdict="HANG" if number == 2 else "PASS")
    found = entries(parent)
    rate = flake_rate(found)
    assert rate is not None
    assert (rate.bad, rate.runs) == (1, 6)
    assert rate.interval[0] < 1 / 6 < rate.interval[1]
    changes = list(verdict_changes(found))
    assert [(change.before.verdict, change.after.verdict) for change in changes] == [("PASS", "HANG"), ("HANG", "PASS")]
    assert not any(change.surroundings or change.settings_changed for change in changes)
    assert flake_rate(found[:2]) is None


def test_more_is_better_only_where_it_is(parent: Path) -> None:
    store(parent, 1)
    (entry,) = entries(parent)

    def with_numbers(**numbers: float) -> Entry:
        return Entry(**{**vars(entry), "numbers": {name.replace("_", " "): value for name, value in numbers.items()}})

    rows: Any = compare(
        with_numbers(tokens_per_second=100.0, last_loss=2.0, first_loss=3.0, step=0.0),
        with_numbers(tokens_per_second=50.0, last_loss=1.0, first_loss=3.1, step=0.0),
    ).rows
    assert {row.quantity.name: row.meaning for row in rows} == {
        "tokens per second": Change.WORSE, "last loss": Change.BETTER, "first loss": Change.DIFFERENT,
        "step": Change.SAME,
    }  # fmt: skip


def test_prune_keeps_what_is_named_pinned_or_running(parent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [store(parent, number) for number in range(6)]
    assert run(capsys, "prune", "--pin", paths[1].name)[0] == 0
    with lock_run(RunDir(paths[2])):
        code, out = run(capsys, "prune", paths[0].name, "--keep", "2")
        assert (code, [path.exists() for path in paths]) == (0, [True] * 6)
        assert "--yes removes" in out
        code, out = run(capsys, "prune", paths[0].name, "--keep", "2", "--yes")
    assert [path.exists() for path in paths] == [True, True, True, False, True, True]
    for reason in (f"{paths[0].name}: named", f"{paths[1].name}: pinned", f"{paths[2].name}: still running"):
        assert reason in out
    assert run(capsys, "prune", "--unpin", paths[1].name)[0] == 0
    run(capsys, "prune", "--keep", "0", "--yes")
    assert not any(path.exists() for path in paths)


def test_an_export_that_is_unpacked_elsewhere_keeps_its_answer(
    parent: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = store(parent, 1, verdict="HANG")
    (path / "train" / "processes.jsonl").write_text("{}\n")  # without spec.json, as in an export
    before = (path / "report.json").read_text()
    code, out = run(capsys, "report", str(path))
    assert (code, "an export has no launch settings" in out) == (2, True)
    assert (path / "report.json").read_text() == before
    assert "HANG lock_cycle" in run(capsys, "history", "train")[1]


def test_a_sparkline_spans_the_values() -> None:
    assert sparkline([1.0, 2.0, 8.0]) == "▁▂█"
    assert sparkline([3.0, 3.0]) == "▁▁"
