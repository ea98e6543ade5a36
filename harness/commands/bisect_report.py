"""What a bisection shows: its plan before it starts, its screen and documents while it runs, a stored one again."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nsa_harness import __version__
from nsa_harness.commands.run import report_of, write_report
from nsa_harness.core.bisect.plan import worst_case
from nsa_harness.core.bisect.question import CONTROLS, PROOFS, Answer, AnswerKind, Subset
from nsa_harness.core.bisect.report import BisectTold, Commands, ProbeTold
from nsa_harness.core.bisect.repro import NAME, repro_command, repro_script
from nsa_harness.core.bisect.signature import Signature
from nsa_harness.core.bisect.spans import spans_of
from nsa_harness.core.bisect.subject import Form
from nsa_harness.core.plan import RunSpec
from nsa_harness.core.report import MachineFacts, Outcome
from nsa_harness.errors import HarnessError
from nsa_harness.render.bisect.bisect_json import stored_search
from nsa_harness.render.bisect.screen import STYLES, Control, plan_lines, stored_lines
from nsa_harness.render.terminal.stream import Paint
from nsa_harness.render.words import launch_line
from nsa_harness.supervisor.bisect.launches import CannotLaunch, Launches
from nsa_harness.supervisor.bisect.request import BisectRequest, launches_of, question_of
from nsa_harness.supervisor.launch.machine import machine_facts
from nsa_harness.supervisor.store.record import Record, write_record
from nsa_harness.supervisor.store.rundir import RunDir, find_run, write_document

ANSWERED, UNDECIDED, INTERRUPTED = 0, 125, 130  # exit codes
NOTHING_YET = Answer(kind=AnswerKind.UNDECIDED, confidence=0.0)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Everything that a bisection has seen so far."""

    request: BisectRequest
    run: RunDir | None  # None: a plan, which writes nothing
    launches: Launches
    facts: MachineFacts
    probes: Sequence[ProbeTold]
    sought: Signature | None
    notes: Sequence[str]


def telling(
    seen: Seen, answer: Answer = NOTHING_YET, *, alone: str | None = None, cut_short: bool = False
) -> BisectTold:
    """What is known, for a screen or a document."""
    spec = _any_spec(seen.launches)
    search = [one for one in seen.probes if one.purpose not in PROOFS and one.purpose not in CONTROLS]
    return BisectTold(
        run_id=seen.run.run_id if seen.run else "",
        harness=__version__,
        machine=seen.facts,
        command=seen.request.command,
        scenario=spec.scenario if spec else seen.request.subject.key,
        what=launch_line(spec.ranks, spec.backend, spec.subject) if spec else "",
        subject=seen.request.subject,
        sought=seen.sought,
        answer=answer,
        probes=tuple(seen.probes),
        commands=_commands(seen, answer, alone),
        floor_probes=_floor(answer, len(seen.request.subject.items)),
        search_probes=len(search),
        wall_s=sum(one.wall_s for one in seen.probes),
        interrupted=cut_short,
        notes=(*(spec.notes if spec else ()), *seen.notes),
        not_covered=spec.not_covered if spec else (),
    )


def write_answer(
    seen: Seen, answer: Answer, outcomes: Mapping[str, Outcome], specs: Sequence[RunSpec], *, cut_short: bool
) -> BisectTold:
    """Every document of the bisection. `outcomes`: of this session, by directory; earlier ones are judged again."""
    assert seen.run is not None
    told = telling(seen, answer, alone=_write_repro(seen, seen.run, answer), cut_short=cut_short)
    _write_documents(seen, seen.run, told, outcomes, specs)
    return told


def _any_spec(launches: Launches) -> RunSpec | None:
    """The launch at the bad end, or at the good one, for the words that describe all of them."""
    everything = range(len(launches.subject.items))
    for subset in ((), everything) if launches.subject.open_end else (everything, ()):
        try:
            return launches.spec(subset)
        except CannotLaunch:
            continue
    return None


def _commands(seen: Seen, answer: Answer, alone: str | None) -> Commands:
    def command(subset: Subset | None) -> str | None:
        return None if subset is None else seen.launches.command(subset, _stored(seen, subset))

    return Commands(bad=command(answer.failing), good=command(answer.passing), alone=alone)


def _stored(seen: Seen, subset: Collection[int]) -> Path | None:
    """The spec of the newest probe of this configuration."""
    spans = spans_of(subset)
    dirs = [one.dir for one in reversed(seen.probes) if one.subset == spans and one.dir]
    return seen.run.attempt(dirs[0]).spec if seen.run and dirs else None


def _floor(answer: Answer, items: int) -> int:
    """What no search could do without: the bits in an answer of this kind."""
    sizes = {
        AnswerKind.RANGE: items * (items + 1) // 2,
        AnswerKind.SET: math.comb(items, len(answer.items)),
        AnswerKind.SEVERAL: math.comb(items, len(answer.items)),
    }
    return math.ceil(math.log2(max(1, sizes.get(answer.kind, items))))


def _write_repro(seen: Seen, run: RunDir, answer: Answer) -> str | None:
    """repro/ of the whole run: the failing configuration as a script of its own. Returns the command."""
    if answer.failing is None or seen.request.subject.form is Form.COMMIT:  # a worktree is gone by then
        return None
    try:
        spec = seen.launches.spec(answer.failing)
    except CannotLaunch:
        return None
    told = f"{seen.request.subject.told(answer.failing)}: {seen.sought}"
    script = repro_script(spec, working_dir=os.getcwd(), told=told)
    if script is None:
        return None
    folder = run.repro
    folder.mkdir(exist_ok=True)
    write_document(folder / NAME, script)
    return f"cd {folder} && {repro_command(spec)}"


def _write_documents(
    seen: Seen, run: RunDir, told: BisectTold, outcomes: Mapping[str, Outcome], specs: Sequence[RunSpec]
) -> None:
    dirs = [one.dir for one in told.probes if one.dir]
    known = {**_judged_again(run, [name for name in dirs if name not in outcomes]), **outcomes}
    record = Record(
        command=seen.request.command, harness=__version__, machine=seen.facts, controller=os.getpid(),
        plan=tuple(specs), probe=seen.request.probe, interrupted=told.interrupted,
    )  # fmt: skip
    write_record(run, record)
    report = report_of(run, record, [known[name] for name in dirs if name in known])
    write_report(run, report, told)


def _judged_again(run: RunDir, dirs: Sequence[str]) -> dict[str, Outcome]:
    """Of an earlier session; one that cannot be judged any more has its row among the probes all the same."""
    from nsa_harness.commands.judge import judge_stored

    judged = {}
    for name in dirs:
        with suppress(HarnessError):
            judged[name] = judge_stored(run.attempt(name))
    return judged


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
