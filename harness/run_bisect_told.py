"""What a bisection tells: the values that its screen and documents show, its files, and a stored one again."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness import __version__
from harness.core.bisect.answer import Answer, AnswerKind
from harness.core.bisect.asking import CONTROLS, PROOFS, Subset
from harness.core.bisect.repro import NAME, repro_command, repro_script
from harness.core.bisect.sought import Signature
from harness.core.bisect.spans import spans_of
from harness.core.bisect.subject import Form
from harness.core.bisect.told import BisectTold, Commands, ProbeTold
from harness.core.plan import RunSpec
from harness.core.report import MachineFacts, Outcome
from harness.errors import HarnessError
from harness.render.words import launch_line
from harness.run import report_of, write_report
from harness.supervisor.bisected.launches import CannotLaunch, Launches
from harness.supervisor.bisected.request import BisectRequest
from harness.supervisor.stored.record import Record, write_record
from harness.supervisor.stored.rundir import RunDir, write_document

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    from harness.run_judge import judge_stored

    judged = {}
    for name in dirs:
        with suppress(HarnessError):
            judged[name] = judge_stored(run.attempt(name))
    return judged
