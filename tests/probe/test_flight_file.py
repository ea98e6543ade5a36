"""The file of the flight recorder, which two threads of a rank may write at once."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

from nsa_harness import protocol
from nsa_harness.probe.heartbeat import FlightRecorder


class Recorder(FlightRecorder):
    """A recorder with one value, in whose place `meanwhile` is called while the file is being written."""

    meanwhile: Any = staticmethod(lambda: None)

    def _record(self) -> dict[str, Any] | None:
        return {"entries": [], "version": self}

    def __str__(self) -> str:
        self.meanwhile()
        return "2.10"


def test_a_thread_that_writes_the_recorder_at_exit_takes_no_file_from_the_heartbeat(tmp_path: Path) -> None:
    heartbeat = Recorder(str(tmp_path))

    def exits() -> None:
        thread = threading.Thread(target=Recorder(str(tmp_path)).write)
        thread.start()
        thread.join()

    heartbeat.meanwhile = exits
    heartbeat.write()
    (path,) = tmp_path.iterdir()
    assert path.name == protocol.FLIGHT.format(pid=os.getpid())
    assert json.loads(path.read_text()) == {"entries": [], "version": "2.10"}
