"""The reaper of an observed job: it starts no process, and ends none unless it is asked to.

The controller is the job's parent, so that terminal, signals and exit status are the job's own. When the controller
dies, the job runs on. The reaper stays until the job has ended, and removes the probe files. Its further messages:

    in    {"do": "adopt", "pid": 7}   {"do": "journal", "keep": ..., "journal": ...}   {"do": "leave"}
    out   {"event": "ready"}   {"event": "alone"}
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from nsa_harness.supervisor.launch.reaper import Reaper, command_of, first_line, outlive_signals

_LOOK_MS = 1000
_LAST_TO_LEAVE_S = 1.0


class WatchedCommandReaper(Reaper):
    """A reaper whose `launcher` is the observed command, a child of the controller."""

    module = __name__

    def start(self) -> None:
        Path(self.order["boards"]).mkdir(mode=0o700, exist_ok=True)
        self.take_over()
        self.say("ready")

    def obey(self, command: dict[str, Any]) -> bool:
        if command["do"] == "adopt":
            self.launcher = self.root = command["pid"]
            self.claim()
            self._say_started()
            self.watch(command["pid"], None, command["started"])
        elif command["do"] == "journal":
            self._change_journal(command["keep"], command["journal"])
        elif command["do"] == "leave":
            self._leave()
        elif command["do"] == "quit":
            self._receive_exits(0)
        return super().obey(command)

    def abandoned(self) -> None:
        if self.order.get("over"):
            self.move_probe_files()
            return
        self.poll.unregister(0)
        self.say("alone")
        while self.members():
            self._receive_exits(_LOOK_MS)
        self._leave()

    def remember(self) -> None:
        """Do nothing: reading every process each second costs time, and this reaper ends the job only if asked to."""

    def _receive_exits(self, wait_ms: int) -> None:
        for fd, _ in self.poll.poll(wait_ms):
            if fd in self.watched:
                self.process_left(fd)

    def _say_started(self) -> None:
        self.say("started", pid=self.launcher, guardian=os.getpid())

    def _change_journal(self, keep: str, journal: str) -> None:
        """Begin a new journal: the job has started its ranks again, which is the next attempt."""
        self.copy_probe_files()
        self.flush()
        if self.journal is not None:
            os.close(self.journal)
        self.journal, self.unwritten = None, b""
        self.order |= {"keep": keep, "journal": journal}
        self.claim()
        self._say_started()

    def _leave(self) -> None:
        """End the observation. Processes that end after the job (a resource tracker) get a moment for it."""
        if not self._launcher_lives():
            self._wait_gone(_LAST_TO_LEAVE_S)
        outlived = [f"{one.pid} {command_of(one.pid)}" for one in self.members()]
        self.look_at_disk()
        self.move_probe_files()
        self.say("ended", outlived=outlived)


def main() -> None:
    outlive_signals()
    order = json.loads(first_line())
    WatchedCommandReaper(order).serve()
