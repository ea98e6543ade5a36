"""A headless Chromium, driven over its own pipe: pages as a person would see them, by width and colour scheme."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions",
    "--no-first-run", "--no-default-browser-check", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
_ABOVE = 20  # the pipe's own descriptors are 3 and 4, and ours must be neither
_PATIENCE_S = 60.0  # for one answer, on a loaded machine


def chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One tab. Raises RuntimeError for what Chromium refuses, with its words."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._held, self._number = write, read, b"", 0
        tab = self._ask("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._session = self._ask("Target.attachToTarget", {"targetId": tab, "flatten": True})["sessionId"]

    def show(self, path: Path, width: int, *, dark: bool = False, printed: bool = False) -> None:
        self.look(width, dark=dark, printed=printed)
        self._tab("Page.enable")
        self._tab("Page.navigate", {"url": path.as_uri()})
        while self._message().get("method") != "Page.loadEventFired":
            pass

    def look(self, width: int, *, dark: bool = False, printed: bool = False) -> None:
        """The page that is shown, on another screen."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._tab("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._tab("Emulation.setEmulatedMedia", {"media": "print" if printed else "screen", "features": [scheme]})

    def run(self, script: str) -> Any:
        """The value of an expression, which may be a promise."""
        asked = {"expression": script, "returnByValue": True, "awaitPromise": True}
        answer = self._tab("Runtime.evaluate", asked)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:2000])
        return answer["result"].get("value")

    def _tab(self, method: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._ask(method, parameters or {}, sessionId=self._session)

    def _ask(self, method: str, parameters: dict[str, Any], **to: str) -> dict[str, Any]:
        self._number += 1
        asked = json.dumps({"id": self._number, "method": method, "params": parameters, **to}).encode() + b"\0"
        while asked:
            asked = asked[os.write(self._write, asked) :]
        while (answer := self._message()).get("id") != self._number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            if not select.select([self._read], [], [], _PATIENCE_S)[0]:
                raise RuntimeError("Chromium does not answer")
            piece = os.read(self._read, 1 << 20)
            if not piece:
                raise RuntimeError("Chromium has ended")
            self._held += piece
        one, _, self._held = self._held.partition(b"\0")
        message: dict[str, Any] = json.loads(one)
        return message


@contextmanager
def browser(program: str, profile: Path) -> Iterator[Browser]:
    """`profile`: an empty folder, which it may fill."""
    to_us, from_it = _high(os.pipe())
    to_it, from_us = _high(os.pipe())
    quiet = os.open(os.devnull, os.O_RDWR)
    pid = os.posix_spawn(
        program,
        [program, *_OPTIONS, f"--user-data-dir={profile}"],
        {**os.environ, "HOME": str(profile)},
        file_actions=[
            (os.POSIX_SPAWN_DUP2, to_it, 3),
            (os.POSIX_SPAWN_DUP2, from_it, 4),
            *((os.POSIX_SPAWN_DUP2, quiet, stream) for stream in (0, 1, 2)),
        ],
        setpgroup=0,
    )
    for descriptor in (to_it, from_it, quiet):
        os.close(descriptor)
    try:
        yield Browser(from_us, to_us)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for descriptor in (from_us, to_us):
            os.close(descriptor)


def _high(pair: tuple[int, int]) -> tuple[int, int]:
    high = tuple(fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, _ABOVE) for one in pair)
    for one in pair:
        os.close(one)
    return high[0], high[1]
