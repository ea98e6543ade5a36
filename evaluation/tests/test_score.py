"""Answers are held against truths part by part, runs go on where they ended, and scores are as committed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from evaluation import __main__ as command
from evaluation import blind, experiments, rescore, scoring, strangers
from evaluation.experiments import Experiment
from evaluation.launching import scratch
from evaluation.scoring import Truth

COMMITTED = json.loads(rescore.COMMITTED.read_text())
HANG = Truth(
    verdict="HANG", causes=frozenset({"lock_cycle"}), ranks=frozenset({(0, 1)}), places=(("train.py", 10, 12),)
)
SILENT = Truth(verdict="PASS", causes=frozenset({"nan"}))


def answer(verdict: str = "HANG", **changes: Any) -> dict[str, Any]:
    said = {"cause": "lock_cycle", "ranks": [1, 0], "file": "train.py", "line": 14, "confidence": 0.95, "beside": []}
    return {"verdict": verdict, **said, **changes}


@pytest.mark.parametrize(
    ("truth", "said", "wrong"),
    [
        (HANG, answer(), []),
        (HANG, answer("FAIL"), ["verdict"]),
        (HANG, answer(ranks=[1]), ["rank"]),
        (HANG, answer(cause="pipe_full"), ["cause"]),
        (HANG, answer(line=15), ["line"]),
        (HANG, answer(line=8), []),
        (HANG, answer(line=None), ["line"]),
        (HANG, answer(file="other.py"), ["line"]),
        (Truth(verdict="HANG"), answer(cause=None, ranks=[], line=None), []),
        (Truth(verdict="PASS", faulty=False), answer("PASS", cause=None, ranks=[]), []),
        (Truth(verdict="PASS", faulty=False), answer("HANG"), ["verdict"]),
        (SILENT, answer("PASS", cause=None, beside=["nan"]), []),
        (SILENT, answer("PASS", cause=None, beside=["memory_growth"]), ["silent"]),
    ],
)
def test_an_answer_is_wrong_in_the_parts_that_differ_from_the_truth(
    truth: Truth, said: Mapping[str, Any], wrong: list[str]
) -> None:
    assert scoring.mistakes(scoring.compare(truth, said)) == wrong


def test_what_a_truth_does_not_ask_for_counts_for_nothing() -> None:
    parts = scoring.compare(Truth(verdict="HANG"), answer())
    assert {part for part, right in parts.items() if right is None} == {"rank", "cause", "line", "silent"}
    assert scoring.share([True, None, False, True]) == "2 of 3"


@pytest.mark.parametrize(
    ("wrong", "of", "interval"), [(3, 8, "8.5 to 75.5 %"), (0, 6, "0.0 to 45.9 %"), (5, 5, "47.8 to 100.0 %")]
)
def test_the_interval_is_that_of_clopper_and_pearson(wrong: int, of: int, interval: str) -> None:
    assert scoring.interval(wrong, of) == interval


def test_a_table_has_a_row_a_line_and_no_column_that_nothing_is_in() -> None:
    told = list(scoring.table({"round1": {"cases": "56", "rank": "1 of 2"}, "corpus": {"cases": "301"}}))
    cells = [["cases", "rank"], ["round1", "56", "1", "of", "2"], ["corpus", "301", "-"]]
    assert [line.split() for line in told] == cells
    assert len({len(line) for line in told}) == 1


def counting(launched: list[str], tmp_path: Path, *, version: int = 1) -> tuple[Experiment, Path]:
    def launch(case: str) -> dict[str, Any]:
        launched.append(case)
        return {"program": version}

    experiment = Experiment(
        name="counting",
        cases=("a", "b", "c"),
        launch=launch,
        describe=lambda _, cell: str(cell),
        rows=lambda _: {},
        fingerprint=lambda _: {"program": version},
    )
    return experiment, tmp_path / "results.json"


def test_a_run_goes_on_where_it_ended_and_runs_again_what_has_changed_since(tmp_path: Path) -> None:
    launched: list[str] = []
    experiment, file = counting(launched, tmp_path)
    limits: dict[str, Any] = {"jobs": 1, "file": file}
    assert list(experiment.run(only="b", minutes=1, **limits)) == [f"{'b':30} {{'program': 1}}"]
    assert len(list(experiment.run(only="", minutes=1, **limits))) == 2
    assert list(experiment.run(only="", minutes=1, **limits)) == []
    assert launched == ["b", "a", "c"]
    assert list(experiment.cells(file)) == ["a", "b", "c"]
    assert experiment.load(file)["command"] == "python -m evaluation run counting"
    changed, _ = counting(launched, tmp_path, version=2)
    assert changed.due(changed.cells(file)) == ["a", "b", "c"]


def test_no_case_begins_after_the_time_is_over(tmp_path: Path) -> None:
    launched: list[str] = []
    experiment, file = counting(launched, tmp_path)
    assert list(experiment.run(only="", minutes=0, jobs=2, file=file)) == []
    assert len(list(experiment.run(only="", minutes=1e-9, jobs=2, file=file))) == 2
    assert len(launched) == 2


def test_the_environment_of_a_stranger_has_nothing_of_the_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_HARNESS_OUT", "elsewhere")
    with scratch() as place:
        assert "NSA_HARNESS_OUT" not in place.environment()
        said = place.ran("echo $TMPDIR $OMP_NUM_THREADS; exit 3", 10, OMP_NUM_THREADS="1")
        assert (said.code, said.output) == (3, f"{place.folder.parent / 'tmp'} 1\n")
        assert place.stored("report.json") is None


def test_every_sealed_file_is_as_it_was_sealed() -> None:
    sealed = json.loads((strangers.ROUNDS / "sealed.json").read_text())
    files = {f"{name}/{path}": digest for name, paths in sealed.items() for path, digest in paths.items()}
    now = {name: hashlib.sha256((strangers.ROUNDS / name).read_bytes()).hexdigest() for name in files}
    assert now == files


@pytest.mark.parametrize("home", strangers.rounds(), ids=lambda home: home.name)
def test_the_score_at_first_sight_is_that_of_the_answers(home: Path) -> None:
    rows = strangers.rows_of(home, strangers.answers_in(home))
    assert json.loads((home / "score.json").read_text()) == {"figures": strangers.figures(rows), "rows": rows}


def test_a_round_that_is_judged_again_is_answered_as_committed() -> None:
    now = strangers.answers_of_today(strangers.ROUNDS / "round1")
    committed = {name: said for name, said in COMMITTED["answers"].items() if name.startswith("round1/")}
    assert {f"round1/{program}": strangers.short(one) for program, one in now.items()} == committed


@pytest.mark.slow
def test_everything_that_is_rescored_is_as_committed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["score"]) == 0, capsys.readouterr().out
    assert "as committed" in capsys.readouterr().out


def test_what_is_not_as_committed_is_told() -> None:
    assert list(rescore.differences({"a": {"rank": "1 of 2"}}, {"a": {"rank": "2 of 2"}})) == [
        "a: rank is 1 of 2, committed is 2 of 2"
    ]
    assert list(rescore.changed({"r/p": "PASS"}, {"r/p": "HANG", "r/q": "PASS"})) == [
        "r/p: says PASS, committed is HANG",
        "r/q: says -, committed is PASS",
    ]


def test_the_page_of_accuracy_is_that_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rescore.calibration, "page", lambda _: [])  # which searches for seconds; its own test has it
    pages = {path: text for path, text in rescore.documents().items() if path.name != "calibration.md"}
    assert {path.name for path in pages} == {"accuracy.md", "case-study.md", "calibration.svg"}
    assert rescore.stale(pages) == []


def test_every_experiment_has_its_results_and_no_results_are_without_an_experiment() -> None:
    files = {path.stem for path in (experiments.HOME / "results").glob("*.json")}
    assert files == {*rescore.EXPERIMENTS, "corpus", "scores"}
    assert {name for name in rescore.EXPERIMENTS if not rescore.EXPERIMENTS[name].cells()} == set()


def test_a_round_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="no-round is neither a round nor one of corpus, twelve"):
        command.main(["run", "no-round"])
    told: list[Path] = []
    monkeypatch.setattr(blind, "report", lambda home: told.append(home) or "3 recordings")
    assert command.main(["blind", "round1"]) == 0
    assert told == [strangers.ROUNDS / "round1"]
