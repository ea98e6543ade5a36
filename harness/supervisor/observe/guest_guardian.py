"""The guardian of a job that is only observed: it starts nothing, and ends nothing unless it is told to.

The controller is the job's parent, so that terminal, signals and exit status are the job's own. When the controller
dies, the job runs on; the guardian stays until it has left by itself, and clears the boards. What it is told besides:

    in    {"do": "adopt", "pid": 7}   {"do": "journal", "keep": ..., "journal": ...}   {"do": "leave"}
    out   {"event": "ready"}   {"event": "alone"}
"""

from __future__ import annotations

import json
import os
import select
from pathlib import Path
from typing import Any

from nsa_harness.supervisor.launch.guardian import Guardian, command_of, first_line, outlive_signals

_LOOK_MS = 1000


class GuestGuardian(Guardian):
    """`launcher` is the command's own process, a child of the controller."""

    def start(self) -> None:
        Path(self.order["boards"]).mkdir(mode=0o700, exist_ok=True)
        self.say("ready")

    def obey(self, command: dict[str, Any], poll: select.poll) -> bool:
        if command["do"] == "adopt":
            self.launcher = command["pid"]
            self._say_started()
            self.watch(command["pid"], None, poll)
        elif command["do"] == "journal":
            self._change_journal(command["keep"], command["journal"])
        elif command["do"] == "leave":
            self._leave()
        elif command["do"] == "quit":
            self._hear_exits(poll, 0)
        return super().obey(command, poll)

    def abandoned(self, poll: select.poll) -> None:
        poll.unregister(0)
        self.say("alone")
        while self.members():
            self._hear_exits(poll, _LOOK_MS)
        self._leave()

    @property
    def root(self) -> int:
        return self.launcher or os.getpid()

    def _hear_exits(self, poll: select.poll, wait_ms: int) -> None:
        for fd, _ in poll.poll(wait_ms):
            if fd in self.watched:
                poll.unregister(fd)
                self.process_left(fd)

    def _say_started(self) -> None:
        self.say("started", pid=self.launcher, guardian=os.getpid())

    def _change_journal(self, keep: str, journal: str) -> None:
        """The job has started its ranks anew: what follows belongs to the next attempt."""
        self.copy_boards()
        os.close(self.journal)
        self.journal = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.order["keep"] = keep
        self._say_started()

    def _leave(self) -> None:
        """The job is over, or is left alone."""
        outlived = [f"{pid} {command_of(pid)}" for pid in self.members()]
        self.bring_home()
        self.say("ended", outlived=outlived, left=[])


def main() -> None:
    outlive_signals()
    order = json.loads(first_line())
    GuestGuardian(order).serve()
