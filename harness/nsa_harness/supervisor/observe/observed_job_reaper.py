"""The guardian of a job that is only observed: it starts nothing, and ends nothing unless it is told to.

The controller is the job's parent, so that terminal, signals and exit status are the job's own. When the controller
dies, the job runs on; the guardian stays until it has left by itself, and clears the boards. What it is told besides:

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
    """`launcher` is the command's own process, a child of the controller."""

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
            self._hear_exits(0)
        return super().obey(command)

    def abandoned(self) -> None:
        if self.order.get("over"):
            self.copy_probe_files()
            return
        self.poll.unregister(0)
        self.say("alone")
        while self.members():
            self._hear_exits(_LOOK_MS)
        self._leave()

    def remember(self) -> None:
        """Nothing: it ends the job only where it is told to, and to look at every process each second has its cost."""

    def _hear_exits(self, wait_ms: int) -> None:
        for fd, _ in self.poll.poll(wait_ms):
            if fd in self.watched:
                self.process_left(fd)

    def _say_started(self) -> None:
        self.say("started", pid=self.launcher, guardian=os.getpid())

    def _change_journal(self, keep: str, journal: str) -> None:
        """The job has started its ranks anew: what follows belongs to the next attempt."""
        self.copy_boards()
        self.flush()
        if self.journal is not None:
            os.close(self.journal)
        self.journal, self.unwritten = None, b""
        self.order |= {"keep": keep, "journal": journal}
        self.claim()
        self._say_started()

    def _leave(self) -> None:
        """The job is over, or is left alone. What ends because the job has (a resource tracker) has a moment for it."""
        if not self._launcher_lives():
            self._wait_gone(_LAST_TO_LEAVE_S)
        outlived = [f"{one.pid} {command_of(one.pid)}" for one in self.members()]
        self.look_at_disk()
        self.copy_probe_files()
        self.say("ended", outlived=outlived)


def main() -> None:
    outlive_signals()
    order = json.loads(first_line())
    WatchedCommandReaper(order).serve()
