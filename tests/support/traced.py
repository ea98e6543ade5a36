"""Run the ranks of a program one after the other, each with an experiment and a small tracer instead of the recorder.

Arguments: the settings of the experiment as JSON, the probe directory, and the program. The ranks 0 and 1 run in the
Python that runs this file; a line of dashes separates what they print.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

SETTINGS, DIRECTORY, PROGRAM = sys.argv[1:4]
PACKAGE = ModuleType("_nsa_harness")
PACKAGE.__path__ = [str(Path(__file__).resolve().parents[2] / "harness" / "nsa_harness")]
sys.modules["_nsa_harness"] = PACKAGE

from _nsa_harness.probe.experiment import Experiment  # type: ignore[import-not-found]  # noqa: E402


class Tracer:
    """Calls the experiment of one rank before each line of the program, in place of the recorder."""

    def __init__(self, rank: int) -> None:
        self.experiment = Experiment(json.loads(SETTINGS), DIRECTORY, rank)
        self.times: Counter[int] = Counter()

    def before(self, frame: FrameType, line: int) -> None:
        self.times[line] += 1
        if new_line := self.experiment.before(frame, line, self.times[line]):
            self.times[new_line] += 1

    def trace(self, frame: FrameType, event: str, _argument: object) -> Any:
        if frame.f_code.co_filename != PROGRAM:
            return None
        if event == "line":
            self.before(frame, frame.f_lineno)
        elif event == "return":
            self.experiment.ended(frame)
        return self.trace

    def start(self) -> None:
        monitoring = getattr(sys, "monitoring", None)
        if monitoring is None:
            sys.settrace(self.trace)
            return

        def on_line(code: Any, line: int) -> Any:
            if code.co_filename != PROGRAM:
                return monitoring.DISABLE
            self.before(sys._getframe(1), line)
            if (error := self.experiment.take_error()) is not None:
                raise error
            return None

        def on_end(code: Any, *_event: object) -> None:
            if code.co_filename == PROGRAM:
                self.experiment.ended(sys._getframe(1))

        events = monitoring.events
        if not monitoring.get_tool(4):
            monitoring.use_tool_id(4, "traced")
        monitoring.register_callback(4, events.LINE, on_line)
        monitoring.register_callback(4, events.PY_RETURN, on_end)
        monitoring.register_callback(4, events.PY_UNWIND, on_end)
        monitoring.set_events(4, events.LINE | events.PY_RETURN | events.PY_UNWIND)

    def stop(self) -> None:
        monitoring = getattr(sys, "monitoring", None)
        if monitoring is None:
            sys.settrace(None)
        else:
            monitoring.set_events(4, 0)


for number in (0, 1):
    os.environ["RANK"] = str(number)
    code = compile(Path(PROGRAM).read_text(encoding="utf-8"), PROGRAM, "exec")
    module = ModuleType("__main__")
    tracer = Tracer(number)
    tracer.start()
    exec(code, module.__dict__)
    tracer.stop()
    print("-----", flush=True)
