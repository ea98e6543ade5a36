"""Runs the user's command of --on-hang=exec: the outcome on its input, a limit, and its failure as a sentence."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HOOK_LIMIT_S = 60.0


@dataclass(kw_only=True)
class Hook:
    """One call of the command, beside the watch. `failed` is called from another thread, at most once."""

    command: str
    document: Path  # what it reads
    failed: Callable[[str], None]
    limit_s: float = HOOK_LIMIT_S

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="on-hang", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until it has ended, or met its limit."""
        self._thread.join()

    def _run(self) -> None:
        try:
            why = self._call()
        except OSError as error:
            why = str(error)
        if why:
            self.failed(why)

    def _call(self) -> str | None:
        """Why it failed. Its output goes to our stderr: stdout is the job's."""
        pid = os.posix_spawn(
            "/bin/sh",
            ["sh", "-c", self.command],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, str(self.document), os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, 2, 1),
            ],
            setpgroup=0,
            setsigmask=(),  # ours are blocked, and a child would inherit that
        )
        descriptor = os.pidfd_open(pid)
        ended, _, _ = select.select([descriptor], [], [], self.limit_s)
        os.close(descriptor)
        if not ended:
            os.killpg(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if not ended:
            return f"ended by us after {self.limit_s:g} s"
        return None if status == 0 else f"exit code {status}" if status > 0 else f"ended by signal {-status}"
