"""What a bisection keeps: each probe once, found again by its question, whatever the kill left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsa_harness.core.report import HangKind, Place
from nsa_harness.core.search.question import ProbeResult, Purpose, spans_of
from nsa_harness.core.search.report import ProbeReport
from nsa_harness.supervisor.experiments import cache_key as premises
from nsa_harness.supervisor.experiments.journal import (
    Journal,
    SearchDirectory,
    SearchState,
    open_search,
    search_state,
)
from nsa_harness.supervisor.storage.rundir import RunDir, RunOptions, create_run


def _kept(n: int, subset: tuple[int, ...], *, in_full: bool = False) -> ProbeReport:
    return ProbeReport(
        n=n, subset=spans_of(subset), purpose=Purpose.RIGHT_EDGE, open=(0, 12), left=3, in_full=in_full,
        launcher="fork", verdict="HANG", kind=HangKind.DEADLOCK, cause="lock_cycle", summary="rank 1 waits",
        place=Place(file="m.py", line=4), culprits=(1,), phase="backward", counts_as=ProbeResult.BAD, wall_s=4.2,
        longest_quiet_s=0.1, dir=f"p{n:02d}", spec_hash="abc",
    )  # fmt: skip


def _journal(run: RunDir, *kept: ProbeReport) -> Journal:
    journal = Journal(run)
    for one in kept:
        journal.append(one)
    return Journal(run)


def test_what_was_kept_answers_once_each_in_the_order_it_was_made(tmp_path: Path) -> None:
    first, second = _kept(3, (1, 2)), _kept(5, (1, 2))
    journal = _journal(create_run(tmp_path), first, _kept(4, (7,)), second)
    asked = frozenset({1, 2})
    assert journal.take(asked, in_full=False) == first
    assert journal.take(asked, in_full=False) == second
    assert journal.take(asked, in_full=False) is None


def test_a_proof_is_never_answered_by_a_probe_that_torchrun_did_not_launch(tmp_path: Path) -> None:
    proof = _kept(9, (7,), in_full=True)
    journal = _journal(create_run(tmp_path), _kept(3, (7,)), proof)
    assert journal.take(frozenset({7}), in_full=True) == proof
    assert journal.take(frozenset({7}), in_full=True) is None


def test_a_torn_or_foreign_line_is_a_probe_that_has_not_ended(tmp_path: Path) -> None:
    run = create_run(tmp_path)
    _journal(run, _kept(1, ()))
    with run.search_probes.open("a") as probes:
        probes.write('{"n": "two"}\n[]\n{"n": 3, "subset": [1')
    assert [one.n for one in Journal(run).stored] == [1]


@pytest.fixture(autouse=True)
def _quick_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(premises, "_DIGEST_ROUNDS", 1)


RESTS_ON = {"train.py": "a1", "helper.py": "b2", "package torch": "2.13 c3"}


def _mark(command: str = "nsa-harness bisect x --gc-range", **premises: str) -> SearchState:
    return search_state("q", command, {**RESTS_ON, **premises})


def _left(tmp_path: Path, state: SearchState, *, ended: bool = False) -> RunDir:
    """What a search that is over has left."""
    run = create_run(tmp_path)
    SearchDirectory(run=run, state=state, file_entries=dict, state_file=run.search_state).write(ended=ended)
    return run


def _begin(tmp_path: Path, state: SearchState) -> tuple[Path | None, str]:
    """The folder that it goes on with, and what it says."""
    with open_search(RunOptions(out=tmp_path, command=""), state, dict) as folder:
        assert folder.run.search_state.exists()
        return folder.run.path if folder.is_continued else None, folder.note


def test_the_newest_unfinished_bisection_of_the_same_question_is_gone_on_with(tmp_path: Path) -> None:
    same = {_left(tmp_path, _mark()).path, _left(tmp_path, _mark()).path}
    _left(tmp_path, _mark("nsa-harness bisect y --gc-range", **{"train.py": "other"}))
    _left(tmp_path, _mark(), ended=True)
    assert _begin(tmp_path, _mark()) == (max(same), "")


def test_a_search_that_has_ended_does_not_go_on(tmp_path: Path) -> None:
    _left(tmp_path, _mark(), ended=True)
    assert _begin(tmp_path, _mark()) == (None, "")


def test_what_has_changed_begins_a_new_search_and_is_named(tmp_path: Path) -> None:
    run = _left(tmp_path, _mark())
    said = f"helper.py and package torch have changed since the search in {run.path}; a new search starts"
    assert _begin(tmp_path, _mark(**{"helper.py": "b3", "package torch": "2.14 d4"})) == (None, said)


def test_nothing_is_said_of_a_search_that_another_one_has_answered_since(tmp_path: Path) -> None:
    runs = sorted((create_run(tmp_path) for _ in range(2)), key=lambda run: run.path)
    for run, helper, ended in zip(runs, ("b1", "b2"), (False, True), strict=True):
        SearchDirectory(
            run=run, state=_mark(**{"helper.py": helper}), file_entries=dict, state_file=run.search_state
        ).write(ended=ended)
    assert _begin(tmp_path, _mark(**{"helper.py": "b2"})) == (None, "")


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("nsa-harness bisect x --gc-range --budget 20m", True),
        ("nsa-harness bisect x --gc-range --json --budget=2h", True),
        ("nsa-harness bisect x --gc-range=0:4", False),
        ("nsa-harness bisect 'x", False),
    ],
)
def test_of_another_command_nothing_is_expected_to_go_on(tmp_path: Path, typed: str, said: bool) -> None:
    _left(tmp_path, _mark())
    assert bool(_begin(tmp_path, _mark(typed, **{"helper.py": "b3"}))[1]) is said


def test_it_goes_on_whichever_way_the_same_question_is_typed(tmp_path: Path) -> None:
    run = _left(tmp_path, _mark())
    assert _begin(tmp_path, _mark("nsa-harness bisect x --gc-range --budget 20m")) == (run.path, "")


def test_a_bisection_that_somebody_runs_is_left_to_him(tmp_path: Path) -> None:
    run = _left(tmp_path, _mark())
    with open_search(RunOptions(out=tmp_path, command=""), _mark(), dict) as first:
        assert first.run.path == run.path
        goes_on, note = _begin(tmp_path, _mark())
    assert goes_on is None
    assert note == f"another search like this is still running in {run.path}; this is a separate one"


def test_a_bookmark_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    _left(tmp_path, _mark()).search_state.write_text("{")
    assert _begin(tmp_path, _mark()) == (None, "")


def test_what_the_first_probe_has_changed_is_the_programs_own_and_what_follows_an_edit(tmp_path: Path) -> None:
    files = {"train.py": "a1", "loss.csv": "e5"}
    with open_search(RunOptions(out=tmp_path, command=""), _mark(**{"loss.csv": "e4"}), lambda: files) as folder:
        folder.ignore_program_outputs()
        files["loss.csv"] = "e6"
        assert folder.changed_files() == ()
        files["train.py"] = "a2"
        assert folder.changed_files() == ("train.py",)
    assert _begin(tmp_path, _mark(**{"loss.csv": "e7"}))[0] == folder.run.path


def test_no_secret_of_the_command_is_kept(tmp_path: Path) -> None:
    run = _left(tmp_path, _mark("nsa-harness bisect train.py -- --api-key=hunter2hunter2"))
    assert "hunter2" not in run.search_state.read_text()
