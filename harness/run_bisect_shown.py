"""A bisection that is not carried out: its plan, and a stored one again."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.core.bisect.answer import AnswerKind
from harness.core.bisect.worst_case import worst_case
from harness.render.bisect_json import stored_search
from harness.render.bisect_listener import STYLES
from harness.render.bisect_screen import Control, plan_lines, stored_lines
from harness.render.paint import Paint
from harness.run_bisect import ANSWERED, UNDECIDED
from harness.run_bisect_told import Seen, telling
from harness.supervisor.bisected.launches import CannotLaunch, Launches
from harness.supervisor.bisected.request import BisectRequest, launches_of, question_of
from harness.supervisor.machine import machine_facts
from harness.supervisor.stored.rundir import find_run


def show_plan(request: BisectRequest) -> int:
    """What would be asked, and how many probes that takes at worst. Launches nothing, writes nothing."""
    facts = machine_facts()
    launches = launches_of(request, facts)
    everything = range(len(request.subject.items))
    seen = Seen(request=request, run=None, launches=launches, facts=facts, probes=(), sought=None, notes=())
    far = "up to" if request.subject.open_end else "bad"
    controls = [_control(launches, name, subset) for name, subset in (("good", ()), (far, everything))]
    paint = _paint()
    for line in plan_lines(telling(seen), worst_case(question_of(request)), controls, paint.size[0]):
        print(paint.painted(line))
    return ANSWERED


def _control(launches: Launches, name: str, subset: Sequence[int]) -> Control:
    config = launches.subject.told(subset)
    try:
        launches.spec(subset)
    except CannotLaunch as why:
        return Control(name=name, config=config, command=None, reason=str(why))
    return Control(name=name, config=config, command=launches.command(subset, None) or f"{config}, as stored")


def show_stored(path: Path, out: Path | None) -> int:
    """A bisection again, from its bisect.json. Raises StoredRunError."""
    run = find_run(path, out or Path("reports"))
    told = stored_search(run)
    paint = _paint()
    for line in stored_lines(told, run.path, paint.size[0]):
        print(paint.painted(line))
    return UNDECIDED if told.answer.kind is AnswerKind.UNDECIDED else ANSWERED


def _paint() -> Paint:
    return Paint(sys.stdout, os.environ, STYLES, live=False)
