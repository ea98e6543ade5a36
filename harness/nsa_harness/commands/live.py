"""`nsa-harness top` and `serve`: show a run that another process is running, from its files, without changing them."""

from __future__ import annotations

import hmac
import json
import os
import secrets
import select
import shutil
import statistics
import sys
import tempfile
import termios
import time
import tty
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import unquote, urlsplit

from nsa_harness import protocol
from nsa_harness.commands.attempt import phase_name
from nsa_harness.commands.engine_job import open_job_lines
from nsa_harness.core.evidence.evidence import StatusFile
from nsa_harness.core.evidence.live import Progress
from nsa_harness.core.evidence.status_file import parse
from nsa_harness.core.report import Status
from nsa_harness.core.verdict.group_waits import TRANSFERS, operation
from nsa_harness.errors import StillRunning, UsageError
from nsa_harness.render.documents.html import live_page
from nsa_harness.render.terminal.layout import NO_WIDTH, cropped
from nsa_harness.render.terminal.live_view import EndedAttempt, RunningAttempt, View, view_lines
from nsa_harness.render.terminal.stream import Paint, Writer, output_size
from nsa_harness.render.terminal.terminal import STYLES
from nsa_harness.render.text import escape
from nsa_harness.supervisor.capture import procfs
from nsa_harness.supervisor.launch.launcher import probe_directories
from nsa_harness.supervisor.launch.watchdog import read_owner
from nsa_harness.supervisor.storage.redacted_files import learn_launches, shareable_files, write_redacted
from nsa_harness.supervisor.storage.rundir import RunDir, find_run, refuse_if_running
from nsa_harness.supervisor.watch.ranks import rank_progress
from nsa_harness.texts import words

_LATEST_CALLS = 8
_REFRESH_S = 0.5
_JOBS_S = 5.0  # how often an engine is asked about jobs
_WAITS_FROM_S = 1.0  # a shorter wait is part of every step
_MAX_ENDED = 8  # ended runs that are shown
_PAGE_COLUMNS, _PAGE_ROWS = 100, 60
_MAX_PAGE_BYTES = 64 << 20
_TYPES = {".json": "application/json", ".svg": "text/plain; charset=utf-8"}


# The state of a run.


@dataclass(kw_only=True)
class LiveRun:
    """A run in progress, as its files show it. Only new events are read again."""

    path: Path
    planned: int = 0
    deadlines_s: dict[str, float | None] = field(default_factory=dict)  # by attempt
    stalls: dict[str, str] = field(default_factory=dict)  # attempt -> who waits for whom
    ended: dict[str, tuple[EndedAttempt, str]] = field(default_factory=dict)  # by attempt, with a line about it
    _read_bytes: int = 0
    _jobs: list[str] = field(default_factory=list)
    _jobs_asked_s: float = float("-inf")

    @property
    def is_active(self) -> bool:
        """Return whether a process is running or watching the run."""
        try:
            with refuse_if_running(RunDir(self.path)):
                return False
        except StillRunning:
            return True

    def read_events(self) -> None:
        """Read the events that were added to events.jsonl since the last call."""
        run = RunDir(self.path)
        with suppress(OSError), run.directory.open_file(run.events) as file:
            file.seek(self._read_bytes)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._read_bytes += len(line)
                if b'"event": "phase"' not in line[:60]:  # almost all events, and the status files are newer
                    with suppress(ValueError, TypeError, KeyError, AttributeError):
                        self._add(json.loads(line))

    def _add(self, event: Mapping[str, Any]) -> None:
        match event["event"]:
            case "plan":
                self.planned = sum(scenario["skip"] is None for scenario in event["scenarios"])
            case "launch":
                self.deadlines_s[str(event["name"])] = event["deadline_s"]
            case "suspect":
                self.stalls[str(event["scenario"])] = str(event["text"])
            case "released":
                self.stalls.pop(str(event["scenario"]), None)
            case "outcome":
                self._add_outcome(event["outcome"])

    def _add_outcome(self, outcome: Mapping[str, Any]) -> None:
        name, took_s = str(outcome["dir"]), float(outcome["timing"]["wall_s"])
        status, is_final = Status(outcome["verdict"]), bool(outcome["final"])
        attempt = EndedAttempt(status=status, expected=bool(outcome["expected"]), counts=is_final, took_s=took_s)
        self.ended[name] = (attempt, escape(f"{status}  {name}   {outcome['summary']}"))
        self.stalls.pop(name, None)

    def lines(self, width: int, height: int) -> list[str]:
        """Return the current state of the run as lines."""
        self.read_events()
        running = list(self._running())
        view = View(
            running=tuple(attempt for attempt, _ in running), run_count=self.planned, left_s=None, interrupts=0,
            ended=tuple(attempt for attempt, _ in self.ended.values()), by_class=True,
        )  # fmt: skip
        is_active = self.is_active
        state = "running" if is_active else "ended"
        head = [f"{state} · {words.middle(escape(str(self.path)), max(width - len(state) - 3, 10))}"]
        notes = [cropped(f"    {line}", width) for _, lines in running for line in lines]
        jobs = self._job_lines()
        notes += [cropped(f"  {line}", width) for line in jobs]
        if is_active and not running and not jobs:
            notes.append(cropped("  no rank is running now: a run is being launched or judged", width))
        tail = [cropped(f"  {line}", width) for _, line in list(self.ended.values())[-_MAX_ENDED:]]
        return [*head, *view_lines(view, width, max(height - len(head) - len(notes) - len(tail), 3)), *notes, *tail]

    def _job_lines(self) -> list[str]:
        """Return a line about each open job. The engine is not asked each time."""
        if time.monotonic() - self._jobs_asked_s > _JOBS_S:
            self._jobs = list(open_job_lines(RunDir(self.path)))
            self._jobs_asked_s = time.monotonic()
        return self._jobs

    def _running(self) -> Iterator[tuple[RunningAttempt, list[str]]]:
        """Yield each running attempt, with lines about its rate and its waits."""
        run, now_ns = RunDir(self.path), time.monotonic_ns()
        for probe_dir in probe_directories(run.run_id):
            owner = read_owner(probe_dir)
            if owner is None or owner.controller is None or not owner.controller.is_alive():
                continue
            name = Path(str(owner.order.get("journal", ""))).parent.name
            statuses = dict(sorted(_status_files(probe_dir)))
            started_ns = run.directory.modified_ns(run.path / name / "spec.json")
            rows = tuple(
                rank_progress(rank, status, now_ns / 1e9, procfs.peak_rss_bytes(status.pid))
                for rank, status in statuses.items()
            )
            elapsed_s = max((time.time_ns() - started_ns) / 1e9, 0.0)
            progress = Progress(elapsed_s=elapsed_s, deadline_s=self.deadlines_s.get(name), ranks=rows)
            stall = self.stalls.get(name)
            attempt = RunningAttempt(name=name, phase=phase_name(progress), progress=progress, stall=stall)
            lines = [*_rate(statuses), *([] if stall else waits(statuses, now_ns / 1e9))]
            yield attempt, lines


def _status_files(probe_dir: Path) -> Iterator[tuple[int, StatusFile]]:
    """Yield each rank with the status file of its latest process. Times are those of the monotonic clock."""
    latest: dict[int, StatusFile] = {}
    for path in probe_dir.glob("*.board"):
        with suppress(OSError, ValueError):
            status = parse(path.read_bytes(), 0, _LATEST_CALLS)
            if status.rank is not None and (
                status.rank not in latest or latest[status.rank].created_s < status.created_s
            ):
                latest[status.rank] = status
    yield from latest.items()


def _rate(statuses: Mapping[int, StatusFile]) -> Iterator[str]:
    """Yield a line with the median time of the latest steps of the slowest rank."""
    medians = [
        statistics.median(end - begin for begin, end in pairwise(times))
        for status in statuses.values()
        if len(times := [done_s for _, done_s in status.steps_s]) > 1
    ]
    if medians and (step_s := max(medians)) > 0:
        text = words.seconds(step_s) if step_s >= 0.1 else f"{step_s * 1000:.3g} ms"
        yield f"rate    {text} per step · {1 / step_s:.3g} steps/s"


def waits(statuses: Mapping[int, StatusFile], now_s: float) -> Iterator[str]:
    """Yield a line for each collective in which ranks wait for ranks that have not entered it.

    This is only what the ranks record about their calls. It proves nothing.
    """
    entered = {(group, rank): count.calls for rank, file in statuses.items() for group, count in file.counts.items()}
    inside: dict[tuple[str, str, int], list[int]] = {}
    latest = {rank: file.calls[-1] for rank, file in statuses.items() if file.calls}
    for rank, call in latest.items():
        if call.left_s is None and now_s - call.entered_s >= _WAITS_FROM_S:
            is_counted = not call.key and call.op not in TRANSFERS and not call.op.startswith(protocol.WAIT)
            number = entered.get((call.group, rank), 0) if is_counted else -1 - rank
            inside.setdefault((operation(call), call.group, number), []).append(rank)
    for (op, group, number), ranks in inside.items():
        call, members = latest[ranks[0]], statuses[ranks[0]].groups.get(group) or tuple(statuses)
        behind = [rank for rank in members if rank in statuses and entered.get((group, rank), 0) < number]
        if op in TRANSFERS and call.peer is not None:
            behind = [call.peer]
        verb = ("waits" if len(ranks) == 1 else "wait") if behind else ("is" if len(ranks) == 1 else "are")
        peers = f" for {words.ranks(behind)}" if behind else ""
        place = f" ({words.place_name(call.place)})" if call.place else ""
        longest_s = max(now_s - latest[rank].entered_s for rank in ranks)
        yield escape(f"{words.ranks(ranks)} {verb}{peers} in {op}{place} · {words.seconds(longest_s)}")


# `nsa-harness top`.


def top(path: Path | None, out: Path) -> None:
    """Show a run until it ends or the user presses q. Without a terminal, print its state once."""
    state = LiveRun(path=find_run(path, out).path)
    paint = Paint(sys.stdout, os.environ, STYLES)
    if not (paint.supports_live_view and sys.stdin.isatty()):
        width = output_size(sys.stdout, os.environ)[0]
        print("\n".join(state.lines(width, NO_WIDTH)))
        return

    def frame() -> list[str]:
        columns, rows = paint.size
        foot = "  q leaves; the run goes on"
        return [paint.colour(line) for line in [*state.lines(columns - 1, rows - 2), foot]][: rows - 1]

    writer = Writer(sys.stdout, frame)
    with _keys(sys.stdin.fileno()) as pressed, suppress(KeyboardInterrupt):
        writer.start()
        while state.is_active and not pressed(_REFRESH_S) & {"q", "Q", ""}:
            pass
    writer.close()
    print("\n".join(paint.colour(line) for line in state.lines(paint.size[0], NO_WIDTH)))


@contextmanager
def _keys(terminal: int) -> Iterator[Any]:
    """Yield a function that waits for keys and returns those that were pressed; "" stands for a closed terminal."""

    def pressed(wait_s: float) -> set[str]:
        ready = select.select([terminal], [], [], wait_s)[0]
        return set(os.read(terminal, 64).decode(errors="replace") or [""]) if ready else set()

    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    try:
        yield pressed
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


# `nsa-harness serve`.


class PageServer(ThreadingHTTPServer):
    """A server on this machine that shows the page and the files of one run to whoever knows the token."""

    daemon_threads = True

    def __init__(self, run: RunDir, port: int) -> None:
        self.run = run
        self.state = LiveRun(path=run.path)
        self.lock = Lock()  # a thread for each request reads the state
        self.token = secrets.token_urlsafe(24)
        super().__init__(("127.0.0.1", port), _Request)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/{self.token}/"


class _Request(BaseHTTPRequestHandler):
    """One request. Only GET and HEAD exist, so nothing can be changed."""

    server: PageServer
    timeout = 30

    def do_GET(self) -> None:
        port = self.server.server_port
        token, _, name = unquote(urlsplit(self.path).path).removeprefix("/").partition("/")
        # The header Host is checked because a name of another host may resolve to this address.
        if self.headers.get("Host") not in (f"127.0.0.1:{port}", f"localhost:{port}") or not hmac.compare_digest(
            token.encode("utf-8", "replace"), self.server.token.encode()
        ):
            self._answer(HTTPStatus.FORBIDDEN, b"403: open the URL that nsa-harness serve has printed\n")
        elif name in ("", "report.html"):
            self._answer(HTTPStatus.OK, self._page().encode("utf-8", "replace"), "text/html; charset=utf-8")
        else:
            self._file(name)

    do_HEAD = do_GET  # noqa: N815

    def _page(self) -> str:
        run, state = self.server.run, self.server.state
        is_active, page = state.is_active, None
        with suppress(OSError, ValueError):
            page = RunDir(run.path).directory.read_whole_file(run.html, _MAX_PAGE_BYTES).decode("utf-8", "replace")
        if not is_active and page is not None:
            return page
        with self.server.lock:
            lines = state.lines(_PAGE_COLUMNS, _PAGE_ROWS)
        redacted = [run.redaction.text(line) for line in lines]
        names = [f"{name}/output.log" for name in state.ended]
        return live_page(page, redacted, names, is_active=is_active)

    def _file(self, name: str) -> None:
        # A name is compared with the files of the run, so no path can lead out of it.
        run = self.server.run
        path = next((path for path in shareable_files(run) if path.relative_to(run.path).as_posix() == name), None)
        if path is None:
            self._answer(HTTPStatus.NOT_FOUND, b"404: the run has no such file\n")
            return
        with tempfile.TemporaryFile() as file:
            try:
                write_redacted(file, path, run)
            except OSError:
                self._answer(HTTPStatus.NOT_FOUND, b"404: the file cannot be read\n")
                return
            size = file.tell()
            file.seek(0)
            self._head(HTTPStatus.OK, size, _TYPES.get(path.suffix, "text/plain; charset=utf-8"))
            if self.command == "GET":
                shutil.copyfileobj(file, self.wfile)

    def _answer(self, status: HTTPStatus, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self._head(status, len(body), kind)
        if self.command == "GET":
            self.wfile.write(body)

    def _head(self, status: HTTPStatus, size: int, kind: str) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind, "Content-Length": str(size), "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY",
        }  # fmt: skip
        for header, value in headers.items():
            self.send_header(header, value)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing: the URL contains the token."""


def serve(path: Path | None, out: Path, port: int) -> None:
    """Show a run in a browser until Ctrl-C. Raise UsageError if the port cannot be used."""
    run = find_run(path, out)
    learn_launches(run)
    try:
        server = PageServer(run, port)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"--port {port}: {reason}; without --port a free one is used") from None
    with server, suppress(KeyboardInterrupt):
        print(f"{server.url}\nonly this machine can open it, and only with this URL; Ctrl-C ends it", flush=True)
        server.serve_forever()
