"""No secret passes on from what a run was given, and what it printed, to what is written about it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import time
from contextlib import chdir
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from attempts import CLEAN, ORIGIN, RANKS, at, journal, said, spec
from builders import in_all_reduce, stalled
from planted_secrets import command_words, environment, planted, program, shown, values

from nsa_harness.commands.attempt import prepare
from nsa_harness.commands.judge import judge_attempt
from nsa_harness.commands.run import ReportFormat, rejudge
from nsa_harness.commands.session import report_of, write_report
from nsa_harness.core.evidence.evidence import Frame, RankSnapshot, Stack
from nsa_harness.core.evidence.host import Process
from nsa_harness.core.plan import RunSpec
from nsa_harness.core.report import MachineFacts
from nsa_harness.errors import UsageError
from nsa_harness.render.events import Events
from nsa_harness.supervisor.capture.snapshot import StackSampler
from nsa_harness.supervisor.storage import redacted_files
from nsa_harness.supervisor.storage.adapters import read_snapshot, stored_snapshot
from nsa_harness.supervisor.storage.record import RunRecord, load_spec, plan_to_resume, write_record
from nsa_harness.supervisor.storage.redacted_files import redact_files, redact_run, write_bundle
from nsa_harness.supervisor.storage.redaction import Redaction
from nsa_harness.supervisor.storage.rundir import AttemptDir, RunDir, create_run
from nsa_harness.supervisor.storage.safe_directory import SafeDirectory

# A Python 3.11 before 3.11.4 has no filters.
SAFELY: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
FACTS = MachineFacts(host="node7", cpus=2, gpus=(), torch="2.13.0")


def leaking_spec(**changes: object) -> RunSpec:
    words = command_words()
    return spec(
        program=("train.py", *words), env=tuple(environment().items()), subject=f"train.py {' '.join(words)}",
        settings=(("run.args", json.dumps(words)),), **changes,
    )  # fmt: skip


def printed() -> str:
    """As a program prints it that says all it knows, and dies of an exception that says it again."""
    everything = planted()
    told = [f"log: {line}" for line in everything["log"]]
    told += [f"started as {command_words()} with {environment()}", "Traceback (most recent call last):"]
    told += ['  File "train.py", line 3, in <module>', f"RuntimeError: refused {' '.join(everything['exception'])}"]
    return "\n".join(told) + "\n"


def failed(attempt: AttemptDir) -> None:
    """What a launch, its guardian and its probe leave of a rank that raised."""
    for rank in (0, 1):
        home = attempt.logs / "x" / "attempt_0" / str(rank)
        home.mkdir(parents=True)
        (home / "stderr.log").write_text(printed())
        (home / "stdout.log").write_text(printed())
    attempt.output.write_text(printed())
    attempt.probe_files.mkdir()
    message = printed().rpartition("RuntimeError: ")[2]
    record = {"at_ns": at(4.0), "type": "RuntimeError", "message": message,
              "frames": [{"file": "train.py", "line": 3, "function": "<module>"}]}  # fmt: skip
    (attempt.probe_files / "101.raised.json").write_text(json.dumps(record))
    left = {"event": "ended", "t_ns": at(6.2), "outlived": [f"77 python {' '.join(command_words())}"], "left": []}
    exits = [replace_status(one) for one in CLEAN]
    journal(attempt.processes, *exits, left)
    journal(attempt.watch, ORIGIN, *RANKS, said("ending", 6.1, ending="exited", last_progress_s=4.9, error=None))


def replace_status(record: dict[str, object]) -> dict[str, object]:
    return {**record, "status": 1} if record.get("rank") == 1 or record.get("pid") == 10 else record


def dump(attempt: AttemptDir) -> None:
    command = f"python train.py {' '.join(command_words())}"
    process = Process(pid=101, parent=10, command=command, state="S", cpu_s=1.0, io_bytes=None, rss_bytes=1 << 20)
    frame = Frame(file="train.py", line=3, function="wait")
    stack = Stack(
        thread=f"worker {planted()['log'].popitem()[0]}", tid=101, active=False, frames=(frame,), source="py-spy"
    )
    snapshot = RankSnapshot(rank=1, pid=101, process=process, stacks=(stack,))
    sampler = StackSampler(origin_ns=0, probe_dir=attempt.probe_files, dumps=attempt.dumps, redaction=attempt.redaction)
    sampler._write(snapshot, json.dumps([{"thread_name": stack.thread, "args": command}]), 1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run of one attempt, from its launch to its documents. Judging it again changes nothing."""
    home = tmp_path_factory.mktemp("home")
    with chdir(home):
        return judged(create_run(home / "reports"))


def judged(run: RunDir) -> RunDir:
    launched = leaking_spec()
    command = f"nsa-harness run --script train.py -- {' '.join(command_words())}"
    record = RunRecord(command=command, harness="0.1.0", machine=FACTS, controller=1, plan=(launched,))
    write_record(run, record)
    attempt = run.attempt(launched.scenario)
    prepare(attempt, launched, FACTS)
    failed(attempt)
    dump(attempt)
    outcome = judge_attempt(attempt, launched, "node7", 1)
    with run.events.open("w") as stream:
        events = Events(stream, run.run_id, lambda: 0.0)
        events.on_plan(FACTS, [run.redaction.spec(launched)])
        events.on_outcome(outcome, run.path)
    write_report(run, report_of(run, record, [outcome]))
    redact_run(run)
    return run


def test_forty_secrets_of_ten_kinds_are_in_nothing_that_is_written(run: RunDir) -> None:
    written = {path.relative_to(run.path).as_posix() for path in run.path.rglob("*") if path.is_file()}
    assert {"SUMMARY.md", "report.html", "report.json", "junit.xml", "events.jsonl"} <= written
    name = "ddp_onestep"
    assert {f"{name}/dumps/rank1.1.txt", f"{name}/repro/command.txt", f"{name}/rank1/raised.json"} <= written
    assert shown(run.path) == {}


def test_a_process_that_outlives_a_dead_controllers_run_is_named_without_the_secrets_of_its_command(
    tmp_path: Path,
) -> None:
    attempt = AttemptDir(tmp_path)
    attempt.redaction.learn_launch(leaking_spec())
    left = f"101 python train.py {' '.join(command_words())} (of root; ignores SIGKILL)"
    attempt.interruption_note.write_text(
        f"nsa-harness was killed; its reaper process could not end all of its processes: {left}\n"
    )
    assert shown(tmp_path) != {}
    assert redact_files(attempt) == ()
    assert shown(tmp_path) == {}
    assert attempt.interruption_note.read_text().startswith(
        "nsa-harness was killed; its reaper process could not end all of its processes: 101 "
    )


def test_a_large_snapshot_is_redacted_rank_by_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snapshot of 4,096 ranks has 74 MB, more than any other file that is read at once."""
    monkeypatch.setattr(redacted_files, "_MAX_BYTES", 0)
    monkeypatch.setattr(redacted_files, "_MAX_JSON_BYTES", 0)
    attempt = AttemptDir(tmp_path)
    attempt.redaction.learn_launch(leaking_spec())
    path = attempt.dumps / "snapshot1.json"
    path.parent.mkdir()
    snapshot = stalled(in_all_reduce(0), in_all_reduce(1)).snapshots[-1]
    command = f"python train.py {' '.join(command_words())}"
    process = Process(pid=7, parent=1, command=command, state="S", cpu_s=1.0, io_bytes=None, rss_bytes=1)
    leaking = replace(snapshot, ranks=tuple(replace(rank, process=process) for rank in snapshot.ranks))
    path.write_text(stored_snapshot(leaking))
    assert shown(tmp_path) != {}
    assert redact_files(attempt) == ()
    assert shown(tmp_path) == {}
    redacted = read_snapshot(path.read_bytes())
    assert [rank.process and rank.process.pid for rank in redacted.ranks] == [7, 7]


def test_what_was_not_redacted_shows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above could not fail."""
    monkeypatch.chdir(tmp_path)
    shown_in = shown(judged(create_run(tmp_path / "reports", redact=False)).path)
    assert {"SUMMARY.md", "report.html", "report.json", "junit.xml", "events.jsonl", "run.json"} <= set(shown_in)
    name = "ddp_onestep"
    assert {f"{name}/dumps/rank1.1.txt", f"{name}/repro/command.txt", f"{name}/command.txt"} <= set(shown_in)


def test_a_run_that_is_judged_again_where_the_environment_is_another_one_shows_none(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rejudge(run.path, report_format=ReportFormat.JSON) == 1
    assert shown(run.path) == {}
    assert not any(value in capsys.readouterr().out for value in values())


def test_a_value_of_the_inherited_environment_is_remembered_if_it_was_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OF_THE_SHELL_PASSWORD", "correct-horse")
    monkeypatch.setenv("NEVER_PRINTED_PASSWORD", "battery-staple")
    run = create_run(tmp_path / "reports")
    attempt = run.attempt("ddp_onestep")
    prepare(attempt, spec(), FACTS)
    failed(attempt)
    for path in attempt.logs.rglob("stderr.log"):
        path.write_text("RuntimeError: correct-horse is refused\n")
    (attempt.probe_files / "101.raised.json").unlink()
    write_record(run, RunRecord(command="x", harness="0.1.0", machine=FACTS, controller=1, plan=(spec(),)))
    rejudge(run.path)
    assert "correct-horse" not in run.secrets.read_text()
    monkeypatch.delenv("OF_THE_SHELL_PASSWORD")
    rejudge(run.path)
    assert "correct-horse" not in run.summary.read_text()
    assert "$SECRET_1 is refused" in run.report.read_text()


def test_a_run_is_repeated_and_gone_on_with_by_the_command_as_it_was_given(run: RunDir) -> None:
    assert load_spec(run.attempt("ddp_onestep").spec) == leaking_spec()
    assert plan_to_resume(run).plan == (leaking_spec(),)
    command = (run.attempt("ddp_onestep").repro / "command.txt").read_text()
    assert '"$SECRET_1"' in command
    assert "# export SECRET_1=...: the value is in spec.json" in command


def test_what_is_written_is_for_its_owner_alone(run: RunDir) -> None:
    assert run.path.stat().st_mode & 0o077 == 0
    ours = [run.attempt("ddp_onestep").spec, run.plan, run.record, run.summary, run.attempt("ddp_onestep").verdict]
    assert [path.name for path in ours if path.stat().st_mode & 0o077] == []


def test_the_umask_is_ours_and_that_of_a_program_is_known_however_often_it_is_set() -> None:
    told = "import os; os.umask(0o022); from nsa_harness.supervisor.launch.umask import keep_private, program_umask;"
    told += "print(program_umask()); keep_private(); keep_private(); print(oct(program_umask()), oct(os.umask(0)))"
    said = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["-1", "0o22", "0o77"]


def repository(path: Path, text: str) -> None:
    """A checkout with one file, and a change in it that nobody has committed."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run([*git, "init", "-q"], cwd=path, check=True)
    (path / "train.py").write_text("pass\n")
    subprocess.run([*git, "add", "."], cwd=path, check=True)
    subprocess.run([*git, "commit", "-qm", "one"], cwd=path, check=True)
    (path / "train.py").write_text(text)


@pytest.mark.parametrize("asked", [False, True])
def test_what_is_not_committed_is_kept_if_that_is_asked_for_and_without_secrets(tmp_path: Path, asked: bool) -> None:
    repository(tmp_path, "\n".join(f"# {line}" for line in planted()["diff"]) + "\n")
    run = create_run(tmp_path / "reports", git_diff=asked)
    attempt = run.attempt("one")
    prepare(attempt, replace(spec(), scenario="one", cwd=str(tmp_path)), FACTS)
    git = json.loads(attempt.env.read_text())["git"]
    assert git["dirty"] is True
    assert len(git["commit"]) == 40
    assert ("SECRET_" in git["diff"]) if asked else (git["diff"] is None)
    assert shown(run.path) == {}


def test_the_event_stream_has_none(run: RunDir) -> None:
    stream = StringIO()
    Events(stream, "r", lambda: 0.0).on_launch(run.redaction.spec(leaking_spec()))
    assert not any(value in stream.getvalue() for value in values())


def test_the_program_that_is_run_for_real_says_all_of_them() -> None:
    told = program()
    assert all(value in told for place in ("log", "exception") for value in planted()[place].values())
    assert os.environ.keys() & environment().keys() == set()


# The bundle.


def unpacked(bundle: Path, into: Path) -> Path:
    with tarfile.open(bundle) as packed:
        packed.extractall(into, **SAFELY)
    (run,) = into.iterdir()
    return run


def test_a_bundle_has_the_logs_too_and_no_secret_and_nothing_that_repeats_the_run(run: RunDir, tmp_path: Path) -> None:
    board = run.attempt("ddp_onestep").probe_files / "101.board"
    board.write_bytes(b"NSABOARD\0\0" + values()[0].encode() + b"\0end")
    (run.path / "link.txt").symlink_to("/etc/hostname")
    write_bundle(RunDir(run.path), tmp_path / "one.tar.gz")
    packed = unpacked(tmp_path / "one.tar.gz", tmp_path / "there")
    names = {path.relative_to(packed).as_posix() for path in packed.rglob("*") if path.is_file()}
    assert {"SUMMARY.md", "ddp_onestep/output.log", "ddp_onestep/logs/x/attempt_0/1/stderr.log"} <= names
    assert not {"plan.json", "secrets.json", ".reserve", "ddp_onestep/spec.json", "link.txt"} & names
    everything = {path: path.read_bytes() for path in packed.rglob("*") if path.is_file()}
    assert [path for path, data in everything.items() for value in values() if value.encode() in data] == []
    kept = packed / board.relative_to(run.path)
    assert kept.read_bytes() == b"NSABOARD\0\0" + b"*" * len(values()[0]) + b"\0end"
    for path in packed.rglob("*.json"):
        json.loads(path.read_text())


def test_a_bundle_takes_the_place_of_no_file(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(UsageError, match="name another file with --to FILE"):
        write_bundle(run, tmp_path / "mine")
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_key_of_many_lines_and_a_line_without_end_are_known_across_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redacted_files, "_CHUNK_BYTES", 64)
    monkeypatch.setattr(redacted_files, "_OVERLAP_BYTES", 512)
    key = ["-----BEGIN " + "PRIVATE KEY-----", *(("aB3d" * 15 + str(n)) for n in range(4)), "-----END PRIVATE KEY-----"]
    log = "\n".join(["before " * 20, *key, "after"]) + "x" * 100 + f" {values()[0]} " + "y" * 1000
    (tmp_path / "one.log").write_text(log)
    pieces = list(redacted_files._texts(SafeDirectory(tmp_path), tmp_path / "one.log"))
    assert "".join(pieces) == log
    redaction = Redaction()
    clean = "".join(map(redaction.text, pieces))
    assert not any(line in clean for line in [*key[1:-1], values()[0]])


@pytest.mark.parametrize("on", [True, False])
def test_a_command_sends_nothing_to_a_terminal_redacted_or_not(on: bool) -> None:
    assert Redaction(is_on=on).command(["say", "\x1b[2J"], [("TITLE", "\x07")]) == "TITLE=$'\\007' say $'\\e[2J'"


@pytest.mark.slow
def test_a_log_of_64_mb_is_redacted_in_seconds() -> None:
    line = f"step 100 tokens/s 12345.6 loss 2.34 key=foo https://example.com/x {values()[0]} lr=0.001 --flag\n"
    log = line * ((64 << 20) // len(line))
    redaction, began = Redaction(), time.process_time()
    for start in range(0, len(log), 8 << 20):
        redaction.text(log[start : start + (8 << 20)])
    assert time.process_time() - began < 60


# A real run.


@pytest.mark.slow
def test_a_real_run_of_a_program_that_says_all_it_knows(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(program())
    repository(tmp_path, program() + "".join(f"\n# {line}" for line in planted()["diff"]) + "\n")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("NSA_", "_NSA_"))}
    for words in (
        ["run", "--script", "train.py", "--git-diff", "limits.stall_s=3", "--", *command_words()],
        ["report"],
        ["export", "--to", "one.tar.gz"],
    ):
        told = subprocess.run(
            [Path(sys.executable).parent / "nsa-harness", *words],
            cwd=tmp_path, env={**inherited, **environment()}, capture_output=True, text=True, timeout=280, check=False,
        )  # fmt: skip
        assert not [value for value in values() if value in told.stdout + told.stderr], words[0]
    run = (tmp_path / "reports" / "latest").resolve()
    written = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    assert {"SUMMARY.md", "report.html", "report.json", "junit.xml", "events.jsonl"} <= written
    for kind in ("dumps/rank1.*.txt", "dumps/snapshot*.json", "repro/command.txt", "rank1/raised.json", "env.json"):
        assert list(run.glob(f"*/{kind}")), kind
    assert shown(run) == {}
    assert shown(unpacked(tmp_path / "one.tar.gz", tmp_path / "there")) == {}
    assert "$SECRET_" in (run / "SUMMARY.md").read_text()
    (env,) = run.glob("*/env.json")
    assert "SECRET_" in json.loads(env.read_text())["git"]["diff"]
