"""`watch -- COMMAND`: a user's own command runs as if we were not there, and what becomes of it is reported."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsa_harness.supervisor.observe.observed_job import FORWARDED

from .conftest import PROGRAMS, Workspace
from .jobs import GATE, TORCHRUN, Reader, gate, nsa_harness, opened, said, tagged, until

PYTHON = [sys.executable, "-c"]
QUICK = ("limits.stall_s=3", "limits.open_wait_s=4")
TALKS = """
import sys
sys.stdout.buffer.write(b"out \\x00\\xff" + sys.stdin.buffer.read()); sys.stdout.flush()
sys.stderr.buffer.write(b"err \\x00\\xfe"); sys.exit(7)
"""
COUNTS_SIGNALS = """
import os, signal, sys
names = sys.argv[1].split(",")
taken = signal.pthread_sigmask(signal.SIG_BLOCK, {getattr(signal, name) for name in names})
os.write(1, b"ready\\n")
for name in names:
    got = signal.sigwaitinfo({getattr(signal, name)})
    os.write(1, f"{name} ".encode())
sys.exit(5)
"""
ON_A_TERMINAL = """
import os, signal, sys, termios
count = 0
# A terminal throws away what was written around a Ctrl-C, unless told not to.
modes = termios.tcgetattr(0)
modes[3] |= termios.NOFLSH
termios.tcsetattr(0, termios.TCSANOW, modes)
def interrupted(*_):
    global count
    count += 1
    os.write(1, f"[got {count}]".encode())
signal.signal(signal.SIGINT, interrupted)
os.write(1, f"[terminals {[os.isatty(n) for n in range(3)]}]".encode())
for line in sys.stdin:
    if line == "end\\n": sys.exit(3)
    os.write(1, f"[total {count}]".encode())
"""


@pytest.fixture(autouse=True)
def no_job_is_left(workspace: Workspace) -> Iterator[None]:
    yield
    left = tagged(workspace)
    for process in left:
        process.kill()
    assert left == []


def watched(workspace: Workspace, *words: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NSA_")}
    return subprocess.run(
        nsa_harness("watch", *words),
        cwd=workspace.directory,
        env=environment,
        capture_output=True,
        check=False,
        **options,  # type: ignore[call-overload]
    )


def outcomes(workspace: Workspace) -> list[dict[str, object]]:
    report = (workspace.directory / "reports" / "latest" / "report.json").read_text()
    return list(json.loads(report)["outcomes"])


def test_output_input_and_exit_status_pass_through_bit_for_bit(workspace):
    bare = subprocess.run([*PYTHON, TALKS], input=b"in \x00\xfd", capture_output=True, check=False)
    done = watched(workspace, "--quiet", "--", *PYTHON, TALKS, input=b"in \x00\xfd")

    assert (done.returncode, done.stdout, done.stderr) == (7, bare.stdout, bare.stderr)


def test_one_line_at_the_start_and_one_at_a_good_end_name_the_report(workspace):
    done = watched(workspace, "--", "true")

    name = (workspace.directory / "reports" / "latest").resolve().name
    page = f"page: reports/{name}/report.html"
    assert done.stderr.decode() == f"nsa-harness: observing; {page}\nnsa-harness: PASS; the job has ended; {page}\n"


def test_a_command_that_a_signal_ends_gives_the_status_of_a_shell(workspace):
    assert watched(workspace, "--", "sh", "-c", "kill -KILL $$").returncode == 128 + signal.SIGKILL


def test_each_signal_that_is_sent_to_us_reaches_the_command(workspace):
    names = [number.name for number in sorted(FORWARDED)]
    process = subprocess.Popen(
        nsa_harness("watch", "--quiet", "--", *PYTHON, COUNTS_SIGNALS, ",".join(names)),
        cwd=workspace.directory,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    reader = Reader(process.stdout.fileno())
    reader.wait_for("ready\n")
    for name in names:
        process.send_signal(getattr(signal, name))
        reader.wait_for(f"{name} ")
    assert process.wait(timeout=60) == 5


def test_a_terminal_stays_one_and_each_ctrl_c_arrives_once(workspace):
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(workspace.directory)
        command = nsa_harness("watch", "--quiet", "--", *PYTHON, ON_A_TERMINAL)
        os.execv(command[0], command)
    reader = Reader(terminal)
    reader.wait_for("[terminals [True, True, True]]")
    for count in (1, 2):
        os.write(terminal, b"\x03")
        reader.wait_for(f"[got {count}]")
        os.write(terminal, b"?\n")
        reader.wait_for(f"[total {count}]")
    # Not before: the end of a session throws away what its terminal has not handed on.
    os.write(terminal, b"end\n")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    os.close(terminal)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["watch"], 2, "no command to watch; it must follow `--`: nsa-harness watch -- torchrun train.py\n"),
        (["watch", "train.ranks=2", "--", "true"], 2, "train.ranks=2: only limits can be set here"),
        (["watch", "limits.stall_s=soon", "--", "true"], 2, "limits.stall_s: "),
        (["watch", "limits.stal_s=4", "--", "true"], 2, "limits.stal_s: "),
        (["watch", "--on-hang", "exec", "--", "true"], 2, "--on-hang: expected report, kill or 'exec CMD', got 'exec'"),
        (["watch", "--on-hang=stop", "--", "true"], 2, "--on-hang: expected report, kill or 'exec CMD', got 'stop'"),
        (["watch", "--loud", "--", "true"], 2, "--loud"),
        (["watch", "--", "no-such-command"], 127, "no-such-command: command not found"),
        (["watch", "--", "./plain.txt"], 126, "./plain.txt: it is not executable"),
    ],
)
def test_wrong_use_is_said_and_starts_nothing(workspace, words, code, message):
    (workspace.directory / "plain.txt").write_text("x")
    ran = workspace.harness(*words)

    assert ran.code == code
    assert message in ran.err
    assert not (workspace.directory / "reports").exists()


def test_a_program_whose_interpreter_is_missing_is_127_and_its_report_directory_says_nothing_ran(workspace):
    script = workspace.directory / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)

    ran = workspace.harness("watch", "--", "./script")
    assert (ran.code, "its interpreter is missing" in ran.err) == (127, True)


def test_a_job_that_deletes_its_working_directory_is_judged_and_without_a_report_it_is_left_alone(workspace):
    home = workspace.directory / "home"
    delete = ["sh", "-c", f"until rm -rf {home} 2>/dev/null; do :; done; exit 3"]  # `watch` may just be writing
    told = []
    for out in (["--out", str(workspace.directory / "kept")], []):
        home.mkdir()
        done = subprocess.run(nsa_harness("watch", *out, "--", *delete), cwd=home, capture_output=True, check=False)
        told.append((done.returncode, done.stderr.decode().splitlines()[-1]))

    assert told[0] == (3, "nsa-harness:   ended     not by us")
    assert told[1][0] == 3
    assert re.fullmatch(r"nsa-harness: no report: reports/\S+ was deleted while the job ran", told[1][1])


def test_a_hang_is_reported_while_the_job_runs_on_and_taken_back_when_it_moves(workspace):
    pipe = gate(workspace.directory)
    heard = workspace.directory / "heard.json"
    process = workspace.start("watch", f"--on-hang=exec cat > {heard}", *QUICK, "--", *TORCHRUN, GATE, str(pipe))
    until(said(workspace, "the job is still running"), "a HANG is told")
    until(lambda: heard.exists() and heard.read_text().endswith("}\n"), "the command of --on-hang has read the outcome")
    (while_it_hung,) = outcomes(workspace)
    assert len(tagged(workspace)) == 3
    opened(pipe)
    ran = workspace.finished(process)

    assert (while_it_hung["verdict"], while_it_hung["culprit"]["ranks"], while_it_hung["victims"]) == ("HANG", [1], [0])
    assert while_it_hung["culprit"]["place"]["function"] == "wait_at_the_gate"
    assert json.loads(heard.read_text())["summary"] == while_it_hung["summary"]
    assert (ran.code, ran.out, ran.outcome["verdict"]) == (0, "sum 16.0\n" * 2, "PASS")
    (retracted,) = ran.outcome["findings"]
    assert retracted["code"] == "retracted_hang"
    proven = re.search(r"proven to hang (\d+) s after the start", retracted["claim"])
    assert proven is not None
    assert 0 < int(proven[1]) <= round(while_it_hung["timing"]["wall_s"])  # values were read after the proof
    told = re.findall(r"^nsa-harness: (observing|stall: no rank|HANG;|HANG  |recovered)", ran.err, re.MULTILINE)
    assert told == ["observing", "stall: no rank", "HANG  ", "HANG;", "recovered"]
    again = workspace.harness("report")
    assert (again.code, again.outcome["verdict"], again.outcome["findings"]) == (0, "PASS", [retracted])


@pytest.mark.slow
def test_a_proof_stands_where_the_job_is_ended_without_moving_again(workspace):
    process = workspace.start("watch", *QUICK, "--", *TORCHRUN, GATE, str(gate(workspace.directory)))
    until(said(workspace, "the job is still running"), "a HANG is told")
    process.send_signal(signal.SIGTERM)
    ran = workspace.finished(process)

    assert ran.code == 1  # torchrun's own
    assert (ran.outcome["verdict"], ran.outcome["culprit"]["ranks"]) == ("HANG", [1])
    assert set(ran.outcome["exit_codes"].values()) == {None}


@pytest.mark.slow
def test_a_job_that_somebody_ends_is_interrupted_and_no_failure(workspace):
    process = workspace.start("watch", "--", *TORCHRUN, GATE, str(gate(workspace.directory)))
    until(lambda: bool(list((workspace.directory / "reports").glob("latest/gate/watch.jsonl"))), "it is watched")
    journal = workspace.directory / "reports" / "latest" / "gate" / "watch.jsonl"
    until(lambda: '"started"' in journal.read_text(), "both ranks are there")
    process.send_signal(signal.SIGTERM)
    ran = workspace.finished(process)

    assert (ran.code, ran.outcome["verdict"], ran.outcome["cause"]) == (1, "ERROR", "interrupted")


@pytest.mark.slow
def test_past_its_deadline_a_job_runs_on_and_a_command_that_fails_is_noted(workspace):
    pipe = gate(workspace.directory)
    script = workspace.directory / "job.sh"
    script.write_text(f"#!/bin/sh\nexec 3<>{pipe}\nhead -c 1 <&3\n")
    script.chmod(0o755)
    process = workspace.start("watch", "--deadline=1", "--on-hang=exec exit 3", "--", "./job.sh")
    until(said(workspace, "--on-hang=exec exit 3: exit code 3"), "the command has failed")
    (overdue,) = outcomes(workspace)
    opened(pipe)
    ran = workspace.finished(process)

    assert (overdue["verdict"], overdue["cause"]) == ("FAIL", "slow")
    assert (ran.code, ran.out, ran.outcome["verdict"]) == (0, "x", "PASS")
    assert {"what": "--on-hang=exec exit 3", "why": "exit code 3", "rank": None} in ran.outcome["trouble"]
    assert ran.outcome["detail"]["notes"] == [
        "no rank was seen: the command did not import torch, or it exited too early"
    ]


def test_told_to_kill_it_ends_the_whole_job(workspace):
    script = workspace.directory / "job.sh"
    script.write_text(f"#!/bin/sh\n{' '.join(TORCHRUN)} {GATE} {gate(workspace.directory)}\n")
    script.chmod(0o755)
    ran = workspace.harness("watch", "--on-hang=kill", "--deadline=60", *QUICK, "--", "./job.sh")

    assert (ran.code, ran.outcome["verdict"], ran.outcome["culprit"]["ranks"]) == (124, "HANG", [1])
    assert "; nsa-harness ended the job; " in ran.err
    assert tagged(workspace) == []


@pytest.mark.slow
def test_ranks_of_a_spawning_program_are_found_and_its_parent_is_none(workspace, free_port):
    command = [sys.executable, GATE, str(gate(workspace.directory)), str(free_port)]
    ran = workspace.harness("watch", "--on-hang=kill", "--deadline=60", *QUICK, "--", *command)

    assert (ran.code, ran.outcome["verdict"]) == (124, "HANG")
    assert (ran.outcome["culprit"]["ranks"], ran.outcome["victims"]) == ([1], [0])


@pytest.fixture
def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize(("end", "cause", "status"), [("raises", "exception", 1), ("killed", "killed", -9)])
def test_a_rank_that_ended_badly_is_told_though_its_parent_caught_that(workspace, end, cause, status):
    ran = workspace.harness("watch", "--", sys.executable, str(PROGRAMS / "spawned.py"), str(workspace.directory), end)

    (told,) = ran.report["outcomes"]
    assert (ran.code, told["verdict"], told["cause"], told["culprit"]["ranks"]) == (0, "FAIL", cause, [1])
    assert told["exit_codes"]["1"] in (status, None)


@pytest.mark.slow
def test_ranks_that_a_program_started_twice_count_both_times(workspace):
    command = [sys.executable, str(PROGRAMS / "spawned.py"), str(workspace.directory), "killed", "well"]
    ran = workspace.harness("watch", "--", *command)

    told = [(one["scenario"], one["verdict"], one["final"]) for one in ran.report["outcomes"]]
    assert told == [("spawned", "FAIL", True), ("spawned-2", "PASS", True)]


@pytest.mark.slow
def test_ranks_that_are_started_anew_are_another_attempt(workspace):
    ran = workspace.harness("watch", "--", *TORCHRUN, "--max-restarts=1", str(PROGRAMS / "restarted.py"))
    first, second = ran.report["outcomes"]

    assert ran.code == 0
    assert (first["verdict"], first["cause"], first["final"], first["culprit"]["ranks"]) == (
        "FAIL",
        "exception",
        False,
        [1],
    )
    assert (second["verdict"], second["attempt"], second["final"]) == ("PASS", 2, True)


def test_when_the_harness_is_killed_the_job_ends_by_itself_and_nothing_is_left(workspace):
    pipe = gate(workspace.directory)
    process = workspace.start("watch", "--", *TORCHRUN, GATE, str(pipe))
    until(lambda: bool(list((workspace.directory / "reports").glob("latest/gate/watch.jsonl"))), "it is watched")
    attempt = workspace.directory / "reports" / "latest" / "gate"
    until(lambda: '"started"' in (attempt / "watch.jsonl").read_text(), "both ranks are there")
    boards = list(Path("/dev/shm").glob(f"nsa-harness-{attempt.resolve().parent.name}-*"))
    process.kill()
    process.wait()
    until(lambda: '"alone"' in (attempt / "processes.jsonl").read_text(), "the guardian knows")
    assert len(tagged(workspace)) == 3
    opened(pipe)
    until(lambda: not tagged(workspace), "the job has left")
    until(lambda: not any(path.exists() for path in boards), "its boards are cleared")

    assert (len(boards), (workspace.directory / "out.txt").read_text()) == (1, "sum 16.0\n" * 2)
    ran = workspace.harness("report")
    assert (ran.outcome["verdict"], ran.outcome["cause"]) == ("ERROR", "interrupted")
    assert ran.outcome["findings"][0]["claim"] == "the harness died before the run ended; the job was left alone"
    # null: torchrun took the status of its rank before the guardian saw it.
    assert set(ran.outcome["exit_codes"].values()) <= {0, None}
