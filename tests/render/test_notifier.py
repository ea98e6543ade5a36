"""--notify: what is sent, to whom, how often, and that nothing of it can delay or change a run."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from render_samples import DEADLOCK, PASSED

from nsa_harness.cli import main as cli
from nsa_harness.cli.options import option_lines, typed_command
from nsa_harness.commands.scheduler import RunRequest
from nsa_harness.commands.session import listeners
from nsa_harness.core.report import Outcome, Status
from nsa_harness.render import notifier as under_test
from nsa_harness.render.listener import Listener
from nsa_harness.render.notifier import Notifier
from nsa_harness.supervisor.storage.redaction import Redaction
from nsa_harness.supervisor.storage.rundir import RunOptions, create_run

TOKEN = "T0PSECRETTOKEN42"


class Receiver(ThreadingHTTPServer):
    """A web hook on this machine, which refuses the first `refuses` messages."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Hook)
        self.got: list[dict[str, Any]] = []
        self.refuses = 0
        self.delay_s = 0.0

    @property
    def url(self) -> str:
        return f"json://127.0.0.1:{self.server_port}/{TOKEN}"


class _Hook(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(self.server.delay_s)
        refused = self.server.refuses > 0
        self.server.refuses -= refused
        if not refused:
            self.server.got.append(body)
        self.send_response(503 if refused else 200)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    pytest.importorskip("apprise")
    with Receiver() as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _without_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "_PAUSES_S", (0.01, 0.01))
    monkeypatch.setattr(under_test, "_LAST_PAUSE_S", 0.01)


def notified(tmp_path: Path, target: str, *events: Any, **options: Any) -> list[str]:
    """Send the events, and return what could not be delivered."""
    failures: list[str] = []
    notifier = Notifier([target], tmp_path / "run", Redaction(), failures.append, **options)
    for event in events:
        event(notifier)
    notifier.close()
    return failures


def ended(outcome: Outcome) -> Any:
    return lambda listener: listener.on_outcome(outcome, Path("reports/run"))


def test_a_hang_is_told_on_one_screen_with_its_cause_line_advice_and_page(tmp_path: Path, receiver: Receiver) -> None:
    assert notified(tmp_path, receiver.url, ended(DEADLOCK)) == []
    (message,) = receiver.got
    assert message["type"] == "failure"
    assert message["title"].startswith(f"HANG  {DEADLOCK.spec.scenario}   deadlock")
    lines = message["message"].split("\n")
    assert lines[0].lower().startswith(DEADLOCK.verdict.summary[:40].lower())
    assert [line.split("  ")[0] for line in lines[1:]] == ["look at", "do", "next", "page"]
    assert lines[-1].endswith(f"{tmp_path}/run/report.html")


def test_a_message_can_be_followed_from_any_directory(tmp_path: Path) -> None:
    outcome = replace(DEADLOCK, findings=(), next_command=None, repeat_command=None)
    assert notified(tmp_path, f"exec cat > {tmp_path}/got", ended(outcome)) == []
    assert f"nsa-harness report -v {Path.cwd()}/reports/run" == json.loads((tmp_path / "got").read_text())["next"]


@pytest.mark.parametrize("option", ["--notify", "--on-hang"])
def test_a_program_that_cannot_be_started_is_told_before_anything_is(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "page.sh"
    command = ["watch", option, f"exec {program} now", "--", "touch", str(tmp_path / "started")]
    assert cli.run_command_line(command) == 2
    assert capsys.readouterr().err == f"{option} exec: there is no file {program}\n"
    program.write_text("#!/bin/sh\n")
    assert cli.run_command_line(command) == 2
    assert capsys.readouterr().err == f"{option} exec: {program} is not executable; chmod +x {program}\n"
    assert not (tmp_path / "started").exists()
    under_test.check_program(option, "cd /nowhere/at/all && ./page.sh")
    under_test.check_program(option, '"$HOME"/page.sh')


def test_a_command_gets_one_json_object_on_stdin(tmp_path: Path) -> None:
    assert notified(tmp_path, f"exec cat > {tmp_path}/got", ended(DEADLOCK)) == []
    message = json.loads((tmp_path / "got").read_text())
    facts = {key: message[key] for key in ("schema", "event", "verdict", "cause", "scenario", "run_id")}
    assert facts == {
        "schema": 1, "event": "outcome", "verdict": "HANG", "cause": DEADLOCK.verdict.cause,
        "scenario": DEADLOCK.spec.scenario, "run_id": "run",
    }  # fmt: skip


def test_a_stall_is_told_once_and_so_is_its_end(tmp_path: Path, receiver: Receiver) -> None:
    stall = lambda listener: listener.on_stall("job", "ranks 0 and 2 wait for rank 1")  # noqa: E731
    moves = lambda listener: listener.on_progress_again("job", "rank 1 moves")  # noqa: E731
    notified(tmp_path, receiver.url, moves, stall, stall, moves)
    assert [(message["type"], message["title"]) for message in receiver.got] == [
        ("warning", "job may hang: no rank makes progress"), ("success", "job makes progress again"),
    ]  # fmt: skip


def test_a_run_as_expected_is_no_news_unless_it_corrects_an_earlier_message(tmp_path: Path, receiver: Receiver) -> None:
    as_expected = replace(DEADLOCK, expected=True, spec=replace(DEADLOCK.spec, scenario="fault"))
    passed = replace(PASSED, spec=replace(PASSED.spec, scenario=DEADLOCK.spec.scenario))
    unexpected = replace(DEADLOCK, expected=False)
    events = map(ended, (PASSED, as_expected, unexpected, unexpected, passed))
    notified(tmp_path, receiver.url, *events)
    assert [message["title"].split()[0] for message in receiver.got] == ["HANG", "PASS"]


def test_many_failures_are_counted_in_one_last_message(tmp_path: Path, receiver: Receiver) -> None:
    spec = DEADLOCK.spec
    bad = [replace(DEADLOCK, expected=False, spec=replace(spec, scenario=f"s{number}")) for number in range(25)]
    notified(tmp_path, receiver.url, *map(ended, bad), lambda listener: listener.on_done(None, tmp_path))
    assert len(receiver.got) == 11
    assert receiver.got[-1]["title"] == "15 further runs did not end as expected"


def test_a_search_tells_its_answer_alone(tmp_path: Path, receiver: Receiver) -> None:
    answer = lambda listener: listener.on_answer("NO-GO", "ready ci", ["row"] * 40 + ["", "the reason"])  # noqa: E731
    notified(tmp_path, receiver.url, ended(replace(DEADLOCK, expected=False)), answer, each_run=False)
    (message,) = receiver.got
    assert (message["title"], message["type"]) == ("NO-GO  ready ci", "failure")
    assert message["message"].split("\n")[-2] == "the reason"
    assert len(message["message"].split("\n")) <= 24


def test_secrets_and_endless_text_are_not_sent(tmp_path: Path, receiver: Receiver) -> None:
    summary = f"rank 1 raised ValueError: password=hunter2hunter2 {'x' * 9000}"
    worst = replace(DEADLOCK, expected=False, verdict=replace(DEADLOCK.verdict, summary=summary))
    notified(tmp_path, receiver.url, ended(worst))
    (message,) = receiver.got
    assert "hunter2" not in message["message"]
    assert len(message["message"]) < 2500


def test_a_message_that_is_refused_is_sent_again(tmp_path: Path, receiver: Receiver) -> None:
    receiver.refuses = 2
    assert notified(tmp_path, receiver.url, ended(DEADLOCK)) == []
    assert len(receiver.got) == 1


@pytest.mark.parametrize("target", ["refused", "json://127.0.0.1:1/" + TOKEN, f"exec false {TOKEN}"])
def test_a_failure_is_one_sentence_without_the_token(
    tmp_path: Path, receiver: Receiver, target: str, capfd: Any
) -> None:
    receiver.refuses = 100
    (failure,) = notified(tmp_path, receiver.url if target == "refused" else target, ended(DEADLOCK))
    assert "1 message not delivered" in failure
    assert TOKEN not in failure + "".join(capfd.readouterr())
    if target == "refused":
        assert failure == "--notify json://...: 1 message not delivered (HTTP 503)"


def test_a_target_that_never_answers_delays_the_end_by_a_few_seconds_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_test, "_PATIENCE_S", 0.3)

    def running(_: Notifier) -> None:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
            time.sleep(0.01)

    (failure,) = notified(tmp_path, f"exec echo $$ >> {tmp_path}/pid; exec sleep 1000", ended(DEADLOCK), running)
    assert failure == "--notify exec ...: 1 message not delivered in time"
    for pid in (tmp_path / "pid").read_text().split():  # each attempt is a process of its own
        while Path(f"/proc/{pid}").exists():  # until the command is killed and reaped
            time.sleep(0.01)


def test_a_run_notes_a_failed_message_in_its_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = create_run(tmp_path)
    options = RunOptions(command="nsa-harness run x", out=tmp_path, notify=(f"exec false {TOKEN}",))
    with listeners(options, run, None) as broadcast:
        broadcast(lambda listener: listener.on_stall("x", "rank 1 is quiet"))
    note = "note: --notify exec ...: 1 message not delivered (exit code 1)\n"
    assert note in run.log.read_text()
    assert note in capsys.readouterr().err
    with listeners(replace(options, notify=()), run, None) as broadcast:
        assert not any(isinstance(listener, Notifier) for listener in broadcast.listeners)
    assert isinstance(Listener().on_answer("GO", "ready ci", []), type(None))


# The option.


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[RunRequest]:
    taken: list[RunRequest] = []
    monkeypatch.setattr("nsa_harness.commands.run.run_all", lambda request: taken.append(request) or 0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".git").mkdir()
    (tmp_path / "train.py").write_text("import torch\n")
    return taken


def test_targets_come_from_the_option_the_variable_or_the_project(
    requests: list[RunRequest], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.nsa-harness]\nnotify = ["exec page me"]\n')
    assert cli.run_command_line(["run", "train.py"]) == 0
    monkeypatch.setenv("NSA_HARNESS_NOTIFY", f"exec mail a b\nexec curl https://x/{TOKEN}")
    assert cli.run_command_line(["run", "train.py"]) == 0
    assert "NSA_HARNESS_NOTIFY" not in os.environ, "the program and its reports would have the tokens"
    assert cli.run_command_line(["run", "train.py", "--notify", "exec a", "--notify", "exec b"]) == 0
    assert [request.options.notify for request in requests] == [
        ("exec page me",), ("exec mail a b", f"exec curl https://x/{TOKEN}"), ("exec a", "exec b"),
    ]  # fmt: skip
    assert TOKEN not in repr(requests)


def test_no_token_is_shown_by_explain_or_stored_as_the_command(
    requests: list[RunRequest], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "pyproject.toml").write_text(f'[tool.nsa-harness]\nnotify = ["slack://{TOKEN}", "exec {TOKEN}"]\n')
    (line,) = option_lines(tmp_path)
    assert line.split("  #")[0].strip() == '# --notify: ["slack://...", "exec ..."]'
    argv = ["x", "run", "--notify", f"slack://{TOKEN}", f"--notify=exec {TOKEN}", "a.py", "--", "--notify", "mine"]
    monkeypatch.setattr(sys, "argv", argv)
    assert typed_command() == "nsa-harness run --notify ... --notify=... a.py -- --notify mine"
    assert requests == []


@pytest.mark.parametrize("target", [TOKEN, "exec ", f"nosuchservice://{TOKEN}", f"json:/{TOKEN}"])
def test_a_wrong_target_is_told_before_anything_starts(
    requests: list[RunRequest], capsys: pytest.CaptureFixture[str], target: str
) -> None:
    pytest.importorskip("apprise")
    assert cli.run_command_line(["run", "train.py", "--notify", target]) == 2
    error = capsys.readouterr().err
    assert "--notify" in error
    assert TOKEN not in error
    assert requests == []


def test_without_apprise_a_url_is_refused_with_the_command_that_installs_it(
    requests: list[RunRequest], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "apprise", None)
    assert cli.run_command_line(["run", "train.py", "--notify", f"slack://{TOKEN}"]) == 2
    assert capsys.readouterr().err == "--notify with a URL needs the package apprise: pip install 'apprise>=1.9'\n"
    assert requests == []
    assert cli.run_command_line(["run", "train.py", "--notify", "exec page"]) == 0


def test_statuses_that_are_told_have_a_kind() -> None:
    assert {status.value for status in Status} - set(under_test._BAD) - set(under_test._KINDS) == {"SKIP"}
