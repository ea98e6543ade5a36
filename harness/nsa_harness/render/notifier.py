"""Notifications about a run, sent by apprise (Slack, Teams, mail and others) or given to a command of the user."""

from __future__ import annotations

import importlib
import json
import logging
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from nsa_harness.core.report import Outcome, Report, Status
from nsa_harness.core.schedule import is_as_expected, is_interrupted
from nsa_harness.errors import UsageError
from nsa_harness.render import answer
from nsa_harness.render.listener import Listener
from nsa_harness.render.terminal.screen import explaining_command
from nsa_harness.render.text import escape_block, escaped
from nsa_harness.supervisor.storage.redaction import Redaction
from nsa_harness.texts import words

_COMMAND = "exec "
_PAUSES_S = (1.0, 10.0)  # before a message that could not be delivered is sent again
_LAST_PAUSE_S = 0.5  # the same while nsa-harness ends
_PATIENCE_S, _KILLED_PATIENCE_S = 4.0, 0.5  # how long nsa-harness waits for its messages before it ends
_KILL_S = 1.0  # time to kill a command that is still running then
_COMMAND_LIMIT_S = 30.0
_MAX_STALLS, _MAX_OUTCOMES = 5, 10  # messages per run; a last message counts the other outcomes
_MAX_LINES, _MAX_CHARS = 20, 400  # of a message, and of each of its lines
_NO_APPRISE = "--notify with a URL needs the package apprise: pip install 'apprise>=1.9'"
_KINDS = {"GO": "success", "PASS": "success", "MOVES": "success", "STALL": "warning"}
_BAD = ("HANG", "FAIL", "ERROR", "NO-GO")


@dataclass(frozen=True, kw_only=True)
class Message:
    """One notification. A command of the user gets these fields as one JSON object."""

    event: str  # "stall", "moves", "outcome" or "answer"
    verdict: str  # PASS, FAIL, HANG, ERROR, STALL, MOVES, GO, NO-GO, or the result of a claim or bisection
    scenario: str | None
    cause: str | None = None
    sentence: str = ""
    place: str = ""  # file and line to look at
    advice: str = ""
    next: str = ""  # the command to run next
    text: str = ""  # the whole message as it is sent to a service
    title: str
    run_id: str = ""
    host: str = ""
    report: str = ""  # the path of the HTML page


def name_of(target: str) -> str:
    """Return a name for a target of --notify without its tokens, such as "slack://..."."""
    scheme, has_scheme, _ = target.partition("://")
    if target.startswith(_COMMAND):
        return "exec ..."
    return f"{scheme}://..." if has_scheme and re.fullmatch(r"[A-Za-z0-9+.-]{1,30}", scheme) else "..."


def check_targets(targets: Sequence[str]) -> None:
    """Raise UsageError if a target of --notify cannot be used, before anything is launched."""
    for target in targets:
        if target.startswith(_COMMAND) and (command := target.removeprefix(_COMMAND).strip()):
            check_program("--notify", command)
            continue
        if "://" not in target:
            raise UsageError("--notify: expected a URL such as slack://..., or 'exec CMD'")
        if not _apprise().Apprise().add(target):
            raise UsageError(f"--notify {name_of(target)}: apprise cannot use this URL; see docs/notify.md")


def check_program(option: str, command: str) -> None:
    """Raise UsageError if a command of the user starts with a path that is no executable file.

    Only a plain path is checked. A name may be a builtin of the shell, and the shell may replace quotes and variables.
    """
    program = command.split()[0]
    if not re.fullmatch(r"[\w./+-]*/[\w./+-]+", program):
        return
    if not Path(program).is_file():
        raise UsageError(f"{option} exec: there is no file {program}")
    if not os.access(program, os.X_OK):
        raise UsageError(f"{option} exec: {program} is not executable; chmod +x {program}")


def _apprise() -> Any:
    try:
        apprise = importlib.import_module("apprise")
    except ImportError:
        raise UsageError(_NO_APPRISE) from None
    logging.getLogger("apprise").propagate = False  # its messages may contain the URL
    return apprise


class Notifier(Listener):
    """A listener that sends notifications. Each target has a thread, so that none delays the run or another target."""

    def __init__(
        self,
        targets: Sequence[str],
        run_dir: Path,
        redaction: Redaction,
        on_failure: Callable[[str], None],
        *,
        each_run: bool = True,
        is_observed: bool = False,
    ) -> None:
        """Start nothing until there is a message.

        `on_failure`: called with a sentence about each target that missed a message. `each_run`: whether stalls and
        outcomes are sent; otherwise only the answer is. `is_observed`: the user's command is watched, and cannot be
        launched again.
        """
        self._channels = [_Channel(target) for target in targets]
        self._run_dir, self._redaction, self._on_failure = run_dir.resolve(), redaction, on_failure
        self._each_run, self._is_observed = each_run, is_observed
        self._stalled: set[str] = set()
        self._stalls = 0
        self._sent: dict[str, tuple[Status, str | None]] = {}  # scenario -> its latest outcome that was sent
        self._outcomes = self._unsent = 0
        self._patience_s = _PATIENCE_S

    def on_stall(self, attempt: str, text: str) -> None:
        if self._each_run and attempt not in self._stalled and self._stalls < _MAX_STALLS:
            self._stalled.add(attempt)
            self._stalls += 1
            title = f"{attempt} may hang: no rank makes progress"
            self._send(Message(event="stall", verdict="STALL", scenario=attempt, sentence=text, title=title))

    def on_progress_again(self, attempt: str, text: str) -> None:
        if attempt in self._stalled:
            self._stalled.discard(attempt)
            title = f"{attempt} makes progress again"
            self._send(Message(event="moves", verdict="MOVES", scenario=attempt, sentence=text, title=title))

    def on_outcome(self, outcome: Outcome, run_dir: Path) -> None:
        """Send an outcome that was not expected, and the one that corrects it."""
        name, verdict = outcome.spec.scenario, outcome.verdict
        self._stalled.discard(outcome.dir)
        now = (verdict.status, verdict.cause)
        is_news = not is_as_expected(outcome) and verdict.status is not Status.SKIP and not is_interrupted(outcome)
        if not self._each_run or self._sent.get(name) == now or not (is_news or name in self._sent):
            return
        if self._outcomes >= _MAX_OUTCOMES:
            self._unsent += is_news
            return
        self._outcomes += 1
        self._sent[name] = now
        self._send(_outcome_message(outcome, run_dir.resolve(), is_observed=self._is_observed))

    def on_done(self, report: Report, run_dir: Path) -> None:  # noqa: ARG002
        if self._unsent:
            more = f"{words.plural(self._unsent, 'further run')} did not end as expected"
            self._send(Message(event="outcome", verdict="FAIL", scenario=None, title=more))

    def on_answer(self, verdict: str, subject: str, lines: Sequence[str]) -> None:
        text = "\n".join(line.strip() for line in lines if line.strip())
        self._send(
            Message(event="answer", verdict=verdict, scenario=None, sentence=text, title=f"{verdict}  {subject}")
        )

    def on_interrupt(self, count: int) -> None:
        if count > 1:
            self._patience_s = _KILLED_PATIENCE_S

    def close(self) -> None:
        """Wait a few seconds until all messages are delivered, and report those that are not."""
        end_s = time.monotonic() + self._patience_s
        for channel in self._channels:
            channel.finish()
        channels, self._channels = self._channels, []
        for channel in channels:
            if failure := channel.wait(end_s):
                self._on_failure(f"--notify {name_of(channel.target)}: {failure}")

    def _send(self, message: Message) -> None:
        report = f"{self._run_dir}/report.html"
        message = self._redaction.value(message)
        message = replace(escaped(replace(message, sentence="")), sentence=_cut(escape_block(message.sentence)))
        parts = (
            message.sentence if message.event == "answer" else answer.sentence(message.sentence),
            message.place and f"look at  {message.place}",
            message.advice and f"do  {message.advice}",
            message.next and f"next  {message.next}",
            f"page  {platform.node()}:{report}",
        )
        lines = [line for part in parts for line in part.split("\n") if line]
        message = replace(
            message,
            title=words.middle(message.title, _MAX_CHARS),
            text="\n".join(words.middle(line, _MAX_CHARS) for line in lines),
            run_id=self._run_dir.name,
            host=platform.node(),
            report=report,
        )
        for channel in self._channels:
            channel.send(message)


def _cut(text: str) -> str:
    """Return the last lines of a text, which have the conclusion, each of limited length."""
    return "\n".join(words.middle(line, 2 * _MAX_CHARS) for line in text.split("\n")[-_MAX_LINES:])


def _outcome_message(outcome: Outcome, run_dir: Path, *, is_observed: bool) -> Message:
    verdict, place = outcome.verdict, outcome.culprit.place if outcome.culprit else None
    path = None if is_observed else run_dir / outcome.dir
    line = ""
    if place is not None:
        statement = f": {words.statement(place)}" if place.text else ""
        line = f"{words.whole_place_name(place) or words.place_details(place)}{statement}"
    return Message(
        event="outcome",
        verdict=verdict.status.value,
        scenario=outcome.spec.scenario,
        cause=verdict.cause,
        sentence=verdict.summary,
        place=line,
        advice=answer.advice(outcome),
        next=outcome.next_command or explaining_command(outcome, run_dir, path) or "",
        title=f"{words.verdict(outcome)}  {outcome.spec.scenario}   {answer.title(outcome)}",
    )


class _Channel:
    """One target of --notify, with a thread that delivers its messages in order."""

    def __init__(self, target: str) -> None:
        self.target = target
        self._queue: SimpleQueue[Message | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_ending = threading.Event()
        self._stop = os.eventfd(0)  # becomes readable when a running command has to be killed
        self._missed, self._reason = 0, ""
        self._waiting = 0

    def send(self, message: Message) -> None:
        self._queue.put(message)
        self._waiting += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="notify", daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Make the thread end after its messages."""
        self._is_ending.set()
        self._queue.put(None)

    def wait(self, end_s: float) -> str:
        """Wait for the thread until `end_s`, and return what was not delivered, or "" if everything was."""
        if self._thread is not None:
            self._thread.join(max(end_s - time.monotonic(), 0.0))
            if self._thread.is_alive():
                os.eventfd_write(self._stop, 1)
                self._thread.join(_KILL_S if self.target.startswith(_COMMAND) else 0.0)
                return f"{words.plural(self._missed + self._waiting, 'message')} not delivered in time"
        os.close(self._stop)
        return f"{words.plural(self._missed, 'message')} not delivered ({self._reason})" if self._missed else ""

    def _work(self) -> None:
        while (message := self._queue.get()) is not None:
            failure = self._deliver(message)
            for pause_s in _PAUSES_S:
                if not failure:
                    break
                if self._is_ending.wait(pause_s):
                    time.sleep(_LAST_PAUSE_S)
                failure = self._deliver(message)
            self._waiting -= 1
            if failure:
                self._missed, self._reason = self._missed + 1, failure

    def _deliver(self, message: Message) -> str:
        """Deliver a message. Return the reason if that failed, or "". The reason contains no part of the URL."""
        try:
            if self.target.startswith(_COMMAND):
                return self._run_command(message)
            return _send_by_apprise(self.target, message)
        except Exception as error:
            return type(error).__name__

    def _run_command(self, message: Message) -> str:
        from nsa_harness.supervisor.observe.observed_job import Hook

        document = os.memfd_create("notification")
        try:
            os.write(document, json.dumps({"schema": 1, **asdict(message)}).encode() + b"\n")
            hook = Hook(
                command=self.target.removeprefix(_COMMAND), document=Path(f"/proc/self/fd/{document}"),
                on_failure=lambda _: None, limit_s=_COMMAND_LIMIT_S, stop=self._stop,
            )  # fmt: skip
            return hook.call() or ""
        finally:
            os.close(document)


def _send_by_apprise(url: str, message: Message) -> str:
    apprise = _apprise()
    service = apprise.Apprise()
    service.add(url)
    kind = "failure" if message.verdict in _BAD else _KINDS.get(message.verdict, "info")
    with apprise.LogCapture(level=logging.WARNING) as log:
        was_sent = service.notify(body=message.text, title=message.title, notify_type=kind, body_format="text")
        code = re.search(r"error=([0-9]{3})\b", log.getvalue())
    return "" if was_sent else f"HTTP {code[1]}" if code else "no connection, or refused"
