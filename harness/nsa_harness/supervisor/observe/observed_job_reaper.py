"""A process (the "reaper") that cleans up after a job that nsa-harness only observes.

It starts no process, and ends processes only on the command "end".
The controller is the parent of the job, so the job has the terminal, and its signals and exit status are unchanged. If
the controller dies, the job continues. The reaper waits until the job has ended, and then removes the probe files. In
addition to the messages of other reapers, it has these:

    in    {"do": "adopt", "pid": 7}   {"do": "journal", "keep": ..., "journal": ...}   {"do": "leave"}
    out   {"event": "ready"}   {"event": "alone"}
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from nsa_harness.supervisor.launch.reaper import Reaper, command_of, ignore_end_signals, read_order

_POLL_MS = 1000
_LAST_EXITS_S = 1.0


class WatchedCommandReaper(Reaper):
    """The reaper process for a command that nsa-harness only observes, and that is a child of the controller."""

    module = __name__

    def start(self) -> None:
        Path(self.order["boards"]).mkdir(mode=0o700, exist_ok=True)
        self.take_over()
        self.report("ready")

    def execute(self, command: dict[str, Any]) -> bool:
        """Execute a command from the controller. Return False if the reaper must exit."""
        if command["do"] == "adopt":
            self.launcher_pid = self.root_pid = command["pid"]
            self.write_owner()
            self._report_started()
            self.watch(command["pid"], None, command["started"])
        elif command["do"] == "journal":
            self._change_journal(command["keep"], command["journal"])
        elif command["do"] == "leave":
            self._end_observation()
        elif command["do"] == "quit":
            self._receive_exits(0)
        return super().execute(command)

    def end_abandoned(self) -> None:
        """Wait for the end of the job, whose controller is dead, and then store its status files."""
        if self.order.get("over"):
            self.move_probe_files()
            return
        self.poll.unregister(0)
        self.report("alone")
        while self.members():
            self._receive_exits(_POLL_MS)
        self._end_observation()

    def update_known_processes(self) -> None:
        """Do nothing. Reading all of the job's processes takes time and is rarely needed here."""

    def _receive_exits(self, wait_ms: int) -> None:
        """Report the exits of watched processes, after waiting at most `wait_ms` for the first exit."""
        for fd, _ in self.poll.poll(wait_ms):
            if fd in self.watched:
                self.report_exit(fd)

    def _report_started(self) -> None:
        self.report("started", pid=self.launcher_pid, guardian=os.getpid())

    def _change_journal(self, keep: str, journal: str) -> None:
        """Start a new journal at `journal`, because the job has restarted its ranks."""
        self.copy_probe_files()
        self.flush()
        if self.journal is not None:
            os.close(self.journal)
        self.journal, self.unwritten = None, b""
        self.order |= {"keep": keep, "journal": journal}
        del self.order["folder"]
        self.open_attempt()
        self.write_owner()
        self._report_started()

    def _end_observation(self) -> None:
        """End the observation of the job, and report its remaining processes."""
        if not self._is_launcher_alive():
            self._wait_until_gone(_LAST_EXITS_S)
        outlived_job = [f"{process.pid} {command_of(process.pid)}" for process in self.members()]
        self.check_disk()
        self.move_probe_files()
        self.report("ended", outlived=outlived_job)


def main() -> None:
    """Run this reaper as a program."""
    ignore_end_signals()
    order = json.loads(read_order())
    WatchedCommandReaper(order).serve()
