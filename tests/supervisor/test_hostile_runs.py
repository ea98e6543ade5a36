"""Stored runs that somebody cut, edited or made to harm: judged, or refused in one line, and nothing waits or leaks.

A drawn part of all damages is tried each time; the slow tests try every damage on every file.
"""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path

import damage
import pytest
from attempts import STORED, STORED_CASES, unpack
from damage import CONTENTS, PLACES, Damage

from nsa_harness.commands import judge as run_judge
from nsa_harness.commands.judge import judge_stored
from nsa_harness.commands.run import rejudge
from nsa_harness.core.report import Outcome, Status
from nsa_harness.errors import HarnessError, StoredRunError
from nsa_harness.supervisor.storage.rundir import AttemptDir
from nsa_harness.supervisor.storage.safe_directory import Budget

pytestmark = pytest.mark.timeout(120)

EVERY = (*dict.fromkeys(CONTENTS), damage.sparse, *PLACES)


def answer(attempt: AttemptDir) -> str:
    """The status, or the file that one clear error names. Any other exception is the test's."""
    try:
        return judge_stored(attempt).verdict.status
    except HarnessError as error:
        return f"{Path(str(error).partition(':')[0]).name}: refused"


def damaged(attempt: AttemptDir, path: Path, act: Damage, source: random.Random) -> str:
    """The answer about an attempt with that file damaged; the file is whole again afterwards."""
    whole = path.read_bytes()
    act(path, source)
    try:
        return answer(attempt)
    finally:
        damage.remove(path)
        path.write_bytes(whole)


# One attempt.


def kinds(case: str) -> frozenset[str]:
    files = (str(path.relative_to(STORED / case)) for path in (STORED / case).rglob("*") if path.is_file())
    return frozenset(re.sub(r"[0-9]+", "N", file.removesuffix(".gz")) for file in files)


# Where two have files of the same kinds, a quick run damages those of one.
FIRST_OF_ITS_KIND = {kinds(case): case for case in reversed(STORED_CASES)}
LIKE_ANOTHER = [case for case in STORED_CASES if FIRST_OF_ITS_KIND[kinds(case)] != case]
BULKY_BYTES = 200_000  # a minute of damages, ten times what another case takes


def bytes_of(case: str) -> int:
    return sum(path.stat().st_size for path in (STORED / case).rglob("*") if path.is_file())


SLOW = {*LIKE_ANOTHER, *(case for case in STORED_CASES if bytes_of(case) > BULKY_BYTES)}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow) if case in SLOW else case for case in STORED_CASES],
)
def test_a_damaged_run_is_still_judged_or_refused_with_one_clear_error(case: str, tmp_path: Path) -> None:
    attempt = unpack(case, tmp_path / case)
    source = random.Random(case)
    every = damage.files(attempt.path)
    for path in source.sample(every, len(every) // 2):
        act = source.choice((*CONTENTS, *PLACES))
        assert damaged(attempt, path, act, source) in (*Status, "spec.json: refused"), (path, act)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", STORED_CASES)
def test_every_damage_to_every_file_is_still_judged_or_refused(case: str, tmp_path: Path) -> None:
    attempt = unpack(case, tmp_path / case)
    source = random.Random(case)
    for path in damage.files(attempt.path):
        for act in EVERY:
            assert damaged(attempt, path, act, source) in (*Status, "spec.json: refused"), (path, act)


@pytest.mark.parametrize("act", PLACES)
def test_where_a_journal_was_there_is_none_and_nothing_passes(act: Damage, tmp_path: Path) -> None:
    attempt = unpack("onestep_passes", tmp_path / "run")
    for path in (attempt.watch, attempt.processes):
        act(path, random.Random(1))
    assert answer(attempt) in (Status.ERROR, Status.FAIL)


@pytest.mark.parametrize("act", PLACES)
def test_of_a_folder_full_of_what_is_no_file_there_is_an_answer(act: Damage, tmp_path: Path) -> None:
    attempt = unpack("collective_skipped", tmp_path / "run")
    for path in damage.files(attempt.path):
        if path != attempt.spec:
            act(path, random.Random(1))
    assert answer(attempt) in (Status.ERROR, Status.FAIL)


WRITTEN = (
    *("rank0", "rank1", "evidence", "repro", "traces.log", "verdict.json", "result.txt", "profile.txt"),
    *("step_ledger.txt", "rank0/stderr.log", "rank0/board", "rank0/calls.txt", "evidence/unknown.json"),
)


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_never_goes_through_a_link(name: str, tmp_path: Path) -> None:
    attempt = unpack("collective_skipped", tmp_path / "run")
    elsewhere = tmp_path / "elsewhere"
    whole = name in ("rank0", "rank1", "evidence", "repro")
    elsewhere.mkdir() if whole else elsewhere.write_text("mine")
    place = attempt.path / name
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(elsewhere)
    assert answer(attempt) == Status.HANG
    assert (list(elsewhere.iterdir()) == []) if whole else (elsewhere.read_text() == "mine")


@pytest.mark.parametrize("name", WRITTEN)
def test_a_verdict_is_given_though_a_folder_lies_where_something_is_to_be_written(name: str, tmp_path: Path) -> None:
    attempt = unpack("collective_skipped", tmp_path / "run")
    (attempt.path / name / "full").mkdir(parents=True)
    assert answer(attempt) == Status.HANG


@pytest.mark.parametrize("name", WRITTEN)
def test_a_verdict_is_given_though_a_pipe_lies_where_something_is_to_be_written(name: str, tmp_path: Path) -> None:
    attempt = unpack("collective_skipped", tmp_path / "run")
    place = attempt.path / name
    place.parent.mkdir(exist_ok=True)
    os.mkfifo(place)
    assert answer(attempt) == Status.HANG


def test_of_a_log_beyond_all_measure_both_ends_are_brought_home(tmp_path: Path) -> None:
    attempt = unpack("rank_raises", tmp_path / "run")
    log = next(attempt.logs.glob("*/attempt_*/1/stderr.log"))
    end = log.read_bytes()
    with log.open("r+b") as file:
        file.write(b"begins\n")
        file.seek(1 << 40)
        file.write(end)
    assert answer(attempt) == Status.FAIL
    brought = attempt.rank(1) / "stderr.log"
    with brought.open("rb") as file:
        assert file.readline() == b"begins\n"
        file.seek(-len(end), os.SEEK_END)
        assert file.read() == end
    assert brought.stat().st_size < 1 << 28


# A run of several.

WHOLE = {"collective_skipped": "HANG", "onestep_passes": "PASS", "rank_raises": "FAIL"}


def run_of(place: Path) -> Path:
    for case in WHOLE:
        attempt = unpack(case, place / case)
        told = json.loads(attempt.spec.read_text())
        attempt.spec.write_text(json.dumps({**told, "scenario": case}))
    (place / "run.json").write_text("{}")
    return place


def told(run: Path) -> dict[str, str]:
    """By folder, the verdict that report.json tells."""
    report = json.loads((run / "report.json").read_text())
    return {one["dir"]: one["verdict"] for one in report["outcomes"]}


def summary_of(run: Path, folder: str) -> str:
    report = json.loads((run / "report.json").read_text())
    return next(str(one["summary"]) for one in report["outcomes"] if one["dir"] == folder)


@pytest.mark.parametrize("act", [one for one in EVERY if one is not damage.gone])
def test_an_attempt_whose_spec_is_damaged_does_not_cost_the_others_their_verdicts(act: Damage, tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    act(run / "onestep_passes" / "spec.json", random.Random(3))
    code = rejudge(run)
    found = told(run)
    assert found.keys() == WHOLE.keys()
    assert {**found, "onestep_passes": "PASS"} == WHOLE
    assert (found["onestep_passes"], code) in (("PASS", 0), ("PASS", 1), ("ERROR", 125))


def test_an_attempt_without_a_spec_is_no_less_told(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    spec = run / "onestep_passes" / "spec.json"
    spec.unlink()
    assert rejudge(run) == 125
    assert told(run) == {**WHOLE, "onestep_passes": "ERROR"}
    assert summary_of(run, "onestep_passes") == f"{spec}:1:1: cannot be read: No such file or directory"


def test_a_fault_of_ours_in_one_attempt_costs_no_other_and_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(attempt: AttemptDir, budget: Budget) -> Outcome:
        return judge_stored(attempt, budget) if attempt.path.name != "rank_raises" else _planted()

    monkeypatch.setattr(run_judge, "judge_stored", fails)
    run = run_of(tmp_path / "run")
    assert rejudge(run) == 125
    assert told(run) == {**WHOLE, "rank_raises": "ERROR"}
    assert summary_of(run, "rank_raises") == "nsa-harness itself failed: KeyError: 'planted'"
    assert "in _planted\n" in (run / "test_execution.log").read_text()


def _planted() -> Outcome:
    raise KeyError("planted")


@pytest.mark.parametrize("act", EVERY)
def test_without_a_sound_run_json_the_attempts_are_judged_all_the_same(act: Damage, tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    (run / "run.json").write_text(json.dumps({"schema": 1, "command": "run", "plan": [], "controller": 7}))
    act(run / "run.json", random.Random(5))
    rejudge(run)
    assert told(run) == WHOLE


@pytest.mark.parametrize("name", ["report.json", "SUMMARY.md", "junit.xml", "report.html", "test_execution.log"])
@pytest.mark.parametrize("act", [one for one in PLACES if one is not damage.gone])
def test_a_document_that_cannot_be_written_costs_no_other(
    name: str, act: Damage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path / "run")
    (run / name).write_text("old")
    act(run / name, random.Random(5))
    assert rejudge(run) == 0  # each attempt came out as it was to
    screen = capsys.readouterr().out
    assert all(case in screen for case in WHOLE)
    written = {"report.json", "SUMMARY.md", "junit.xml", "report.html"} - {name}
    assert all((run / one).stat().st_size for one in written)


# Of other versions.


@pytest.mark.parametrize("case", [case for case in STORED_CASES if case.startswith("ancient_")])
def test_a_run_of_an_earlier_version_says_what_of_it_is_no_longer_read(case: str, tmp_path: Path) -> None:
    outcome = judge_stored(unpack(case, tmp_path / case))
    assert outcome.verdict.status in (Status.PASS, Status.FAIL, Status.HANG)
    unread = [one.why for one in outcome.trouble if "layout" in one.why]
    assert all(why == "this harness reads status file layouts 2 and 3; the file has 1" for why in unread)
    assert bool(unread) == (case != "ancient_passes")


def test_a_run_of_a_later_version_is_refused_in_one_line(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    (run / "run.json").write_text(json.dumps({"schema": 2, "command": "run"}))
    with pytest.raises(StoredRunError) as refused:
        rejudge(run)
    assert str(refused.value) == (
        f"{run.resolve()}/run.json: schema: expected 1, got 2; use the newer nsa-harness that wrote this run"
    )


def test_an_attempt_of_a_later_version_is_an_error_that_says_so(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    spec = run / "rank_raises" / "spec.json"
    spec.write_text(json.dumps({**json.loads(spec.read_text()), "schema": 2}))
    assert rejudge(run) == 125
    why = "schema: expected 1, got 2; use the newer nsa-harness that wrote it"
    assert summary_of(run, "rank_raises").endswith(why)


def test_an_earlier_spec_lacks_keys_that_have_a_default(tmp_path: Path) -> None:
    """Keys that came later are taken away one by one."""
    attempt = unpack("onestep_passes", tmp_path / "run")
    whole = json.loads(attempt.spec.read_text())
    for key in ("tags", "settings", "deepening"):
        attempt.spec.write_text(json.dumps({name: value for name, value in whole.items() if name != key}))
        assert answer(attempt) == Status.PASS, key
