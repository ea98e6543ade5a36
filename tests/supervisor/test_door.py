"""The one door to the files of a run: nothing outside is read or written, nothing blocks, and what was cut is said."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attack
import pytest
from attack import SECRET, plant
from attempts import clean, journal, said, spec, unpack

from nsa_harness.commands.judge import judge_attempt, judge_stored
from nsa_harness.commands.run import failed_specs, rejudge
from nsa_harness.core.plan import MAX_RANKS
from nsa_harness.core.report import Status
from nsa_harness.errors import ScenarioError, StillRunning
from nsa_harness.supervisor.storage.expressions import EndlessExpression, last_matches
from nsa_harness.supervisor.storage.record import load_judged_spec, write_spec
from nsa_harness.supervisor.storage.rundir import RunDir, create_run, lock_run
from nsa_harness.supervisor.storage.safe_directory import Budget, SafeDirectory, safe_file

# A run that somebody made to harm.

MEASURED = """
import json, resource, subprocess, sys
code = subprocess.call(sys.argv[1:], stdin=subprocess.DEVNULL)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([code, used.ru_maxrss >> 10, used.ru_utime + used.ru_stime]))
"""
MOST_MIB, MOST_S = 500, 20.0  # the time is the processor's: nothing of it is waited for


def contents(folder: Path) -> dict[str, bytes | str]:
    """Every file below by its name, and every link by where it leads."""
    found: dict[str, bytes | str] = {}
    for path in folder.rglob("*"):
        if path.is_symlink():
            found[str(path.relative_to(folder))] = str(path.readlink())
        elif path.is_file():
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found


def holding_the_secret(place: Path) -> list[Path]:
    files = (path for path in place.rglob("*") if path.is_file() and not path.is_symlink())
    return [path for path in files if path.stat().st_size < 1 << 28 and SECRET.encode() in path.read_bytes()]


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_the_report_of_a_run_made_to_harm_ends_soon_and_small_and_touches_nothing_outside(tmp_path: Path) -> None:
    outside, place = tmp_path / "outside", tmp_path / "reports"
    place.mkdir()
    run = plant(place, outside, attack.TRICKS)
    before = contents(outside)
    report = [sys.executable, "-m", "nsa_harness", "report", str(run)]
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *report], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=240
    )
    *shown, measured = done.stdout.splitlines()
    code, mib, seconds = json.loads(measured)
    assert code in (1, 124, 125), done.stderr
    assert mib < MOST_MIB
    assert seconds < MOST_S
    told = {one["dir"] for one in json.loads((run / "report.json").read_text())["outcomes"]}
    assert told == {trick.__name__ for trick in attack.TRICKS}
    assert SECRET not in "\n".join([*shown, done.stderr])
    assert holding_the_secret(place) == []
    assert contents(outside) == before


def test_what_links_and_frames_of_a_run_name_outside_of_it_is_in_no_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outside, place = tmp_path / "outside", tmp_path / "reports"
    place.mkdir()
    run = plant(place, outside, (attack.links, attack.names_a_file, attack.pipes))
    before = contents(outside)
    assert rejudge(run) in (1, 124, 125)
    assert SECRET not in capsys.readouterr().out
    assert holding_the_secret(place) == []
    assert contents(outside) == before


def test_seventy_thousand_ends_of_ranks_that_the_run_never_had_are_passed_over(tmp_path: Path) -> None:
    attack.records(tmp_path / "run", tmp_path)
    outcome = judge_stored(RunDir(tmp_path).attempt("run"))
    assert outcome.verdict.status is Status.FAIL
    assert any(one.why == f"{attack.RECORDS - MAX_RANKS - 16} more records are invalid" for one in outcome.trouble)


def test_no_planted_name_leads_what_is_written_to_another_file(tmp_path: Path) -> None:
    """Names that our own process was to write to, in each folder of the run."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    run = tmp_path / "run"
    attempt = unpack("rank_raises", run / "ddp")
    (run / "run.json").write_text("{}")
    names = ("report.json", "SUMMARY.md", "junit.xml", "report.html", "verdict.json", "result.txt", "traces.log")
    names += ("unknown.json", "repro.py", "command.txt", "stderr.log", "stdout.log", "board", "sources.json")
    for folder in (run, attempt.path, attempt.rank(0), attempt.rank(1), attempt.evidence, attempt.repro):
        folder.mkdir(exist_ok=True)
        for name in names:
            (folder / f".{name}.{os.getpid()}").symlink_to(victim)
    (run / "test_execution.log").hardlink_to(victim)
    rejudge(run)
    assert victim.read_text() == "mine"
    assert json.loads((run / "report.json").read_text())["outcomes"]


def test_what_is_taken_away_before_a_new_judgement_is_no_file_behind_a_link(tmp_path: Path) -> None:
    attempt = unpack("rank_raises", tmp_path / "run")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "command.txt").write_text("mine")
    attempt.repro.symlink_to(elsewhere)
    judge_stored(attempt)
    assert (elsewhere / "command.txt").read_text() == "mine"


# The door itself.


@pytest.fixture
def door(tmp_path: Path) -> SafeDirectory:
    (tmp_path / "run" / "a").mkdir(parents=True)
    (tmp_path / "run" / "a" / "log").write_text("one\ntwo\n")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "log").write_text(SECRET)
    return SafeDirectory(tmp_path / "run")


@pytest.mark.parametrize("name", ["link", "folder/log", "a/up/outside/log", "../outside/log", "a/../../outside/log"])
def test_no_name_of_a_run_leads_out_of_it(name: str, door: SafeDirectory) -> None:
    outside = door.root.parent / "outside"
    (door.root / "link").symlink_to(outside / "log")
    (door.root / "folder").symlink_to(outside)
    (door.root / "a" / "up").symlink_to(door.root.parent)
    path = door.root / name
    for attempted in (
        door.open_file,
        lambda one: door.read_whole_file(one, 99),
        lambda one: door.write(one, "x"),
        door.open_for_append,
    ):
        if attempted.__name__ == "<lambda>" and name == "link":
            continue  # a document takes the place of a link
        with pytest.raises(OSError, match=r"a link, which is not followed|a path that leads out of the run"):
            attempted(path)
    assert (door.read_tail(path), list(door.read_lines(path, 9)), list(door.read_records(path))) == ("", [], [])
    assert door.size_bytes(path) == 0
    assert not door.is_file(path)
    assert (outside / "log").read_text() == SECRET


def test_a_document_takes_the_place_of_a_link(door: SafeDirectory) -> None:
    (door.root / "link").symlink_to(door.root.parent / "outside" / "log")
    door.write(door.root / "link", "new")
    assert (door.root / "link").read_text() == "new"
    assert (door.root.parent / "outside" / "log").read_text() == SECRET


def test_the_root_itself_and_a_file_that_a_user_names_may_be_links(door: SafeDirectory) -> None:
    link = door.root.parent / "link"
    link.symlink_to(door.root)
    assert SafeDirectory(link).read_tail(link / "a" / "log") == "one\ntwo\n"
    theirs, path = safe_file(link / "a" / "log")
    assert theirs.read_whole_file(path, 8) == b"one\ntwo\n"


def test_a_pattern_finds_files_by_name_and_goes_through_no_link(door: SafeDirectory) -> None:
    (door.root / "b").symlink_to(door.root / "a")
    (door.root / "a" / "low.log").mkdir()
    (door.root / "a" / "high.log").symlink_to("log")
    assert door.list_files(door.root, "*/*log") == [door.root / "a" / "high.log", door.root / "a" / "log"]
    assert door.subdirectories(door.root) == [door.root / "a"]


def test_neither_a_pipe_nor_a_device_nor_a_folder_is_waited_for(door: SafeDirectory) -> None:
    os.mkfifo(door.root / "pipe")
    for name in ("pipe", "a"):
        with pytest.raises(OSError, match=r"not a regular file|directory"):
            door.open_file(door.root / name)
    with pytest.raises(OSError, match=r"No such device|not a regular file"):
        door.open_for_append(door.root / "pipe")


def test_nothing_is_appended_to_a_file_that_has_another_name_as_well(door: SafeDirectory) -> None:
    (door.root / "log").hardlink_to(door.root.parent / "outside" / "log")
    with pytest.raises(OSError, match="not a regular file, or a file with a second name"):
        door.append(door.root / "log", "more")
    assert (door.root / "log").read_text() == SECRET


def test_what_a_reading_may_cost_ends_every_file_and_is_said(door: SafeDirectory) -> None:
    log = door.root / "a" / "log"
    log.write_bytes(b"x" * (1 << 20))
    door.budget = Budget(left_bytes=1 << 19)
    assert [len(door.read_tail(log)) for _ in range(3)] == [1 << 20, 0, 0]
    told = [(one.what, one.why) for one in door.take_notes()]
    assert told == [("a/log", "not read to its end: the bytes that reading a run may take are spent")] * 2
    door.budget = Budget(seconds=-1.0)
    assert list(door.read_lines(log, 9)) == []
    assert [one.why for one in door.take_notes()] == [
        "not read to its end: the time that reading a run may take are spent"
    ]
    assert door.take_notes() == ()


def test_what_was_cut_is_told_in_few_words_however_often(door: SafeDirectory) -> None:
    for number in range(100):
        door.note_incomplete(door.root / f"{number}", "cut")
    told = door.take_notes()
    assert len(told) == 33
    assert told[-1].why == "68 more were not read completely"


def test_of_a_journal_beyond_all_measure_both_ends_are_read_and_that_is_said(door: SafeDirectory) -> None:
    path = door.root / "journal"
    path.write_text("".join(f'{{"n":{n}}}\n' for n in range(100_010)))
    read = [record["n"] for record in door.read_records(path)]
    assert read == [*range(50_000), *range(50_010, 100_010)]
    assert [one.what for one in door.take_notes()] == ["journal"]


# What is judged, and when.


@pytest.fixture
def live(tmp_path: Path) -> Iterator[RunDir]:
    """A run that a controller has: one attempt has ended, the other runs."""
    run = create_run(tmp_path / "reports")
    (run.path / "run.json").write_text("{}")
    unpack("onestep_passes", run.path / "one").result.write_text("PASS\n")
    unpack("rank_raises", run.path / "two")
    with lock_run(run):
        yield run


def test_a_run_that_has_not_ended_is_told_as_running_and_left_as_it_is(live: RunDir) -> None:
    before = contents(live.path.parent)
    with pytest.raises(StillRunning) as told:
        rejudge(live.path)
    so_far = str(told.value).partition("; so far: ")[2]
    assert str(told.value).startswith(f"{live.path}: still running; nothing was judged or written")
    assert sorted(so_far.split(", ")) == ["one PASS", "two running"]
    assert told.value.exit_code == 125
    with pytest.raises(StillRunning):
        failed_specs(live.path, None)
    assert contents(live.path.parent) == before


def test_a_run_is_not_begun_again_while_it_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = create_run(tmp_path)
    run.record.write_text("{}")
    run.lock.write_text("")
    held = []

    def looks(_: RunDir) -> list[object]:
        with run.lock.open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held.append(run)
        return []

    monkeypatch.setattr("nsa_harness.commands.run.judge_attempts", looks)
    failed_specs(run.path, None)
    assert held == [run]


def test_an_expectation_that_was_edited_after_the_launch_is_no_verdict(tmp_path: Path) -> None:
    attempt = clean(tmp_path / "ddp_onestep")
    write_spec(attempt, spec())
    assert load_judged_spec(attempt) == spec()
    text = attempt.spec.read_text()
    attempt.spec.write_text(text.replace('"verdict": "PASS"', '"verdict": "ERROR"'))
    assert attempt.spec.read_text() != text
    with pytest.raises(ScenarioError, match="it was edited after its launch"):
        load_judged_spec(attempt)
    write_spec(attempt, spec(ranks=3))  # as it is written again, once the ranks of an observed job are known
    assert load_judged_spec(attempt).ranks == 3
    (tmp_path / "run.json").write_text("{}")
    attempt.spec.write_text(text.replace('"verdict": "PASS"', '"verdict": "ERROR"'))
    assert rejudge(tmp_path) == 125


def test_an_expression_that_does_not_end_is_no_verdict() -> None:
    with pytest.raises(EndlessExpression, match="slow"):
        last_matches({"fast": "(a)", "slow": attack.CATASTROPHE, "late": "(a)"}, "a" * 64, limit_s=0.2)


def test_of_an_expression_the_last_match_counts_and_one_that_cannot_be_used_has_none() -> None:
    expressions = {"loss": "loss=(.)", "none": "gain=(.)", "broken": "(", "groupless": "loss"}
    assert last_matches(expressions, "loss=1\nloss=2\n") == {"loss": "2"}


def test_the_program_is_read_when_its_run_has_just_ended_and_never_again(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.py").write_text("def f():\n    raise ValueError\n")
    os.utime(outside / "secret.py", (1, 1))
    attack.names_a_file(tmp_path / "run", outside)
    attempt = RunDir(tmp_path).attempt("run")
    judge_stored(attempt)
    assert not (attempt.path / "sources.json").exists()
    judge_attempt(attempt, load_judged_spec(attempt), "node", 1)
    assert "raise ValueError" in (attempt.path / "sources.json").read_text()


def test_an_observed_ending_stays_what_the_journal_said(tmp_path: Path) -> None:
    """The hash of the spec is a record among the others, and none of them is taken for it."""
    attempt = clean(tmp_path / "run")
    write_spec(attempt, spec())
    journal(attempt.watch, said("origin", origin_ns=7), {"event": "spec"})
    with pytest.raises(ScenarioError, match="it was edited"):
        load_judged_spec(attempt)
