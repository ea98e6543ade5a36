"""`top` and `serve`: a run of another process is shown from its files, and nobody else gets to see it."""

from __future__ import annotations

import http.client
import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread

import pytest
from builders import board, call

from nsa_harness.cli import main as cli
from nsa_harness.commands.live import LiveRun, PageServer, waits
from nsa_harness.core.evidence.evidence import CallCount
from nsa_harness.core.evidence.live import Progress, RankProgress
from nsa_harness.render.terminal.live_view import RunningAttempt, View, view_lines
from nsa_harness.supervisor.storage.rundir import RunDir, create_run, lock_run

SECRET = "password=hunter2hunter2"
TIMING = {"wall_s": 2.0}


def event(**values: object) -> str:
    return json.dumps({"schema": 1, "event": values.pop("event"), **values}) + "\n"


def outcome(name: str, verdict: str) -> str:
    facts = {"dir": name, "verdict": verdict, "expected": verdict == "PASS", "final": True, "timing": TIMING}
    return event(event="outcome", scenario=name, outcome={**facts, "summary": f"what happened to {name}"})


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = create_run(tmp_path / "reports")
    (run.path / "first").mkdir()
    (run.path / "first" / "spec.json").write_text("{}")
    (run.path / "first" / "output.log").write_text(f"hello {SECRET}\n")
    run.record.write_text(json.dumps({"schema": 1, "plan": []}))
    run.events.write_text(event(event="plan", scenarios=[{"skip": None}] * 3) + outcome("first", "PASS"))
    return run


# The state.


def test_events_that_are_added_are_read_once_and_half_a_line_waits(run: RunDir) -> None:
    state = LiveRun(path=run.path)
    assert state.lines(100, 30)[1:] == ["  PASS  first   what happened to first"]
    whole = outcome("second", "HANG")
    with run.events.open("a") as file:
        file.write(event(event="phase", scenario="x") + 'not json\n{"event": "outcome"}\n' + whole[:40])
    assert len(state.lines(100, 30)) == 2
    with run.events.open("a") as file:
        file.write(whole[40:])
    assert state.lines(100, 30)[2:] == ["  HANG  second   what happened to second"]


def test_a_run_is_active_as_long_as_a_process_has_its_lock(run: RunDir) -> None:
    state = LiveRun(path=run.path)
    with lock_run(run):
        assert state.is_active
        assert state.lines(100, 30)[0].startswith("running · ")
    assert not state.is_active
    assert state.lines(100, 30)[0].startswith("ended · ")


def test_who_waits_for_whom_follows_from_the_calls_of_the_ranks() -> None:
    inside = call(op="all_reduce", left_s=None, entered_s=2.0)
    statuses = {
        0: board(calls=(inside,), counts={"0": CallCount(calls=6, hash=1)}, groups={"0": (0, 1, 2)}),
        1: board(calls=(call(),), counts={"0": CallCount(calls=5, hash=1)}),
        2: board(calls=(inside,), counts={"0": CallCount(calls=6, hash=1)}, groups={"0": (0, 1, 2)}),
    }
    assert list(waits(statuses, 7.0)) == ["ranks 0, 2 wait for rank 1 in all_reduce (ada/train.py:37) · 5.0 s"]
    assert list(waits(statuses, 2.5)) == [], "this is part of every step"
    both = {0: statuses[0], 2: statuses[2]}
    assert list(waits(both, 7.0)) == ["ranks 0, 2 are in all_reduce (ada/train.py:37) · 5.0 s"]
    receives = {0: board(calls=(call(op="recv", peer=3, left_s=None),), counts={"0": CallCount(calls=6, hash=1)})}
    assert list(waits(receives | {1: statuses[1]}, 7.0)) == [
        "rank 0 waits for rank 3 in recv (ada/train.py:37) · 5.0 s"
    ]
    handle = {0: board(calls=(call(op="wait all_reduce", left_s=None),), counts={"0": CallCount(calls=6, hash=1)})}
    assert list(waits(handle | {1: statuses[1]}, 7.0)) == ["rank 0 is in all_reduce (ada/train.py:37) · 5.0 s"]


def test_many_ranks_share_a_row_with_those_in_the_same_place() -> None:
    ranks = tuple(
        RankProgress(
            rank=rank, phase="backward" if rank != 7 else "data", step=12, no_progress_s=float(rank), rss_bytes=None,
            module="blocks.3",
        )
        for rank in range(64)
    )  # fmt: skip
    progress = Progress(elapsed_s=9.0, deadline_s=None, ranks=ranks)
    running = (RunningAttempt(name="job", phase="step 12", progress=progress),)
    view = View(running=running, ended=(), run_count=1, left_s=None, interrupts=0, by_class=True)
    _, first, second = view_lines(view, 100, 30)
    assert first.strip().startswith("rank 7 ")
    assert second.strip().startswith("ranks 0-6, 8-63   backward   no progress 63.0 s   step 12")


def test_without_a_terminal_top_prints_the_state_once(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_command_line(["top", str(run.path)]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "  PASS  first   what happened to first"
    assert cli.run_command_line(["top", str(run.path / "nothing")]) == 2


def test_q_leaves_and_the_run_goes_on(run: RunDir) -> None:
    with lock_run(run):
        pid, terminal = pty.fork()
        if pid == 0:
            environ = {**os.environ, "TERM": "xterm", "CI": "", "NO_COLOR": ""}
            os.execve(sys.executable, [sys.executable, "-m", "nsa_harness", "top", str(run.path)], environ)
        shown = b""
        while b"q leaves" not in shown:
            shown += os.read(terminal, 4096)
        os.write(terminal, b"q")
        with suppress(OSError):  # the terminal is closed by the end of the process
            while part := os.read(terminal, 4096):
                shown += part
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        os.close(terminal)
        assert b"\x1b[?25h" in shown, "the cursor is visible again"
        assert LiveRun(path=run.path).is_active


# The server.


@pytest.fixture
def server(run: RunDir) -> Iterator[PageServer]:
    with PageServer(run, 0) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server: PageServer, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    """Send a request whose path is not changed, and return the status and the text."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_an_active_run_has_a_page_that_reloads_itself_and_an_ended_one_its_report(
    run: RunDir, server: PageServer
) -> None:
    page = f"/{server.token}/"
    with lock_run(run):
        status, text = ask(server, page)
        assert status == 200
        assert 'http-equiv="refresh"' in text
        assert "PASS  first   what happened to first" in text
        assert '<a href="first/output.log">' in text
        run.html.write_text("<html><head></head><body><main>the report so far</main></body></html>")
        so_far = ask(server, page)[1]
        assert 'http-equiv="refresh"' in so_far
        assert "the report so far" in so_far
        assert "what happened to first" in so_far
    assert ask(server, page) == ask(server, f"{page}report.html") == (200, run.html.read_text())


@pytest.mark.parametrize("path", ["/", "/report.html", "/x/", "//", "/{}x/", "/%00/", "/%FC/"])
def test_without_the_token_nothing_is_shown(server: PageServer, path: str) -> None:
    status, text = ask(server, path.format(server.token))
    assert (status, "first" in text) == (403, False)


def test_another_host_gets_nothing(server: PageServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert ask(server, f"/{server.token}/", Host="evil.example")[0] == 403
    assert ask(server, f"/{server.token}/", Host=f"localhost:{server.server_port}")[0] == 200


@pytest.fixture
def served(run: RunDir) -> Iterator[tuple[int, str]]:
    """The process of `nsa-harness serve`, and the URL that it prints."""
    command = [sys.executable, "-m", "nsa_harness", "serve", str(run.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.pid, process.stdout.readline().strip()
        process.terminate()


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user or host")


@needs_root
def test_another_user_can_neither_guess_nor_read_the_token(run: RunDir, served: tuple[int, str]) -> None:
    pid, url = served
    token = url.split("/")[3]
    assert token.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert [path for path in run.path.rglob("*") if path.is_file() and token.encode() in path.read_bytes()] == []

    def as_nobody(*words: str) -> subprocess.CompletedProcess[str]:
        nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--", *words]
        return subprocess.run(nobody, cwd="/", capture_output=True, text=True, check=False)

    status = "import http.client, sys; c = http.client.HTTPConnection('127.0.0.1', int(sys.argv[1])); "
    status += "c.request('GET', '/'); print(c.getresponse().status)"
    assert as_nobody("/usr/bin/env", "python3", "-c", status, url.split(":")[2].split("/")[0]).stdout == "403\n"
    for file in (f"/proc/{pid}/environ", f"/proc/{pid}/mem", f"/proc/{pid}/fd", str(run.path)):
        assert (
            "Permission denied"
            in as_nobody("ls" if file.endswith("fd") or file == str(run.path) else "cat", file).stderr
        )


@needs_root
def test_a_host_in_the_same_network_cannot_even_connect(served: tuple[int, str]) -> None:
    """The other host is a network namespace, connected with this machine by a pair of virtual interfaces."""
    port, name = served[1].split(":")[2].split("/")[0], f"nsah{os.getpid()}"
    ours, theirs = f"a{name}"[:15], f"b{name}"[:15]
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"no network namespace: {made.stderr.decode().strip()}")
    try:
        for words in (
            f"link add {ours} type veth peer name {theirs} netns {name}", f"addr add 10.231.7.1/30 dev {ours}",
            f"link set {ours} up", f"-n {name} addr add 10.231.7.2/30 dev {theirs}", f"-n {name} link set {theirs} up",
        ):  # fmt: skip
            subprocess.run(["ip", *words.split()], check=True)
        connect = f"import socket; socket.create_connection(('10.231.7.1', {port}), 30)"
        there = ["ip", "netns", "exec", name, sys.executable, "-c", connect]
        assert "ConnectionRefusedError" in subprocess.run(there, capture_output=True, text=True, check=False).stderr
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


@pytest.mark.parametrize(
    "name",
    [
        "first/spec.json",
        "secrets.json",
        ".lock",
        "../other",
        "first/../../other",
        "%2e%2e/other",
        "//etc/passwd",
        "first",
        "first/",
        "link",
        "first/link/passwd",
        "first/output.log/",
        "%00",
    ],
)
def test_only_files_of_the_run_are_shown(run: RunDir, server: PageServer, name: str) -> None:
    (run.path.parent / "other").write_text("not yours")
    run.secrets.write_text("{}")
    (run.path / "link").symlink_to("/etc/passwd")
    (run.path / "first" / "link").symlink_to("/etc")
    status, text = ask(server, f"/{server.token}/{name}")
    assert (status, "root:" in text, "not yours" in text) == (404, False, False)


def test_a_file_is_shown_without_secrets_and_cannot_be_changed(run: RunDir, server: PageServer) -> None:
    path = f"/{server.token}/first/output.log"
    before = {file: file.stat().st_mtime_ns for file in run.path.rglob("*")}
    status, text = ask(server, path)
    assert (status, text.startswith("hello password=")) == (200, True)
    assert "hunter2" not in text
    assert ask(server, path, "HEAD") == (200, "")
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert ask(server, path, method)[0] == 501
    assert {file: file.stat().st_mtime_ns for file in run.path.rglob("*")} == before


def test_a_port_that_is_taken_is_a_usage_error(
    run: RunDir, server: PageServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run_command_line(["serve", str(run.path), "--port", str(server.server_port)]) == 2
    assert f"--port {server.server_port}: address already in use" in capsys.readouterr().err
