"""What a bisection shows: its plan before it starts, its screen and documents while it runs, a stored one again."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from nsa_harness import __version__
from nsa_harness.commands.run import report_of, write_report
from nsa_harness.core.experiment.signature import Signature
from nsa_harness.core.outcome.reproduction import NAME, repro_command, repro_script
from nsa_harness.core.plan import RunSpec
from nsa_harness.core.report import HangKind, MachineFacts, Outcome, Status
from nsa_harness.core.search.effort import Case, cases, worst_case
from nsa_harness.core.search.question import CONTROLS, PROOFS, AnswerKind, CountsAs, SearchAnswer, Subset, spans_of
from nsa_harness.core.search.report import BisectReport, Commands, ProbeReport
from nsa_harness.core.search.subject import Form, Subject
from nsa_harness.errors import HarnessError
from nsa_harness.render.experiments.bisect_json import stored_search
from nsa_harness.render.experiments.screen import STYLES, Control, Expected, plan_lines, stored_lines
from nsa_harness.render.terminal.stream import Paint
from nsa_harness.supervisor.experiments.launches import (
    BAD,
    BisectRequest,
    CannotLaunch,
    Earlier,
    Launches,
    earlier_of,
    question_of,
)
from nsa_harness.supervisor.launch.machine import machine_facts
from nsa_harness.supervisor.launch.plan_files import shipped_plan
from nsa_harness.supervisor.storage.record import Record, write_record
from nsa_harness.supervisor.storage.rundir import RunDir, find_run
from nsa_harness.texts import words
from nsa_harness.texts.words import launch_line

ANSWERED, UNDECIDED, INTERRUPTED = 0, 125, 130  # exit codes
_BY_LIMIT = (HangKind.STARVED, HangKind.LIVELOCK)  # hangs that only a limit proves
NOTHING_YET = SearchAnswer(kind=AnswerKind.UNDECIDED, confidence=0.0)


@dataclass(kw_only=True)
class SearchState:
    """Everything that a bisection has seen so far."""

    request: BisectRequest
    run: RunDir | None = None  # None: a plan, which writes nothing
    launches: Launches
    facts: MachineFacts
    probes: list[ProbeReport] = field(default_factory=list)
    signature: Signature | None = None
    earlier: Earlier = field(default_factory=Earlier)
    notes: list[str] = field(default_factory=list)


def report_so_far(
    state: SearchState, answer: SearchAnswer = NOTHING_YET, *, alone: str | None = None, cut_short: bool = False
) -> BisectReport:
    """What is known, for a screen or a document."""
    spec = _any_spec(state.launches)
    return BisectReport(
        run_id=state.run.run_id if state.run else "",
        harness=__version__,
        machine=state.facts,
        command=state.request.command,
        scenario=spec.scenario if spec else state.request.subject.key,
        what=launch_line(spec.ranks, spec.backend, spec.subject) if spec else "",
        subject=state.request.subject,
        signature=state.signature,
        answer=answer,
        probes=tuple(state.probes),
        commands=_commands(state, answer, alone),
        floor_probes=_floor(answer, len(state.request.subject.items)),
        search_probes=sum(one.purpose not in (*PROOFS, *CONTROLS) for one in state.probes),
        wall_s=sum(one.wall_s for one in state.probes),
        interrupted=cut_short,
        notes=(*(spec.notes if spec else ()), *state.notes),
        not_covered=spec.not_covered if spec else (),
    )


def write_answer(
    state: SearchState,
    answer: SearchAnswer,
    outcomes: Mapping[str, Outcome],
    specs: Sequence[RunSpec],
    *,
    cut_short: bool,
) -> BisectReport:
    """Every document of the bisection. `outcomes`: of this session, by directory; earlier ones are judged again."""
    run = state.run
    assert run is not None
    search = report_so_far(state, answer, alone=_write_repro(state, run, answer), cut_short=cut_short)
    search = run.redaction.value(replace(search, command=run.redaction.typed(search.command)))
    dirs = [one.dir for one in search.probes if one.dir]
    known = {**_judged_again(run, [name for name in dirs if name not in outcomes]), **outcomes}
    record = Record(
        command=state.request.command, harness=__version__, machine=state.facts, controller=os.getpid(),
        plan=tuple(specs), probe=state.request.probe, interrupted=search.interrupted, agreed=shipped_plan(),
    )  # fmt: skip
    write_record(run, record)
    write_report(run, report_of(run, record, [known[name] for name in dirs if name in known]), search)
    return search


def _any_spec(launches: Launches) -> RunSpec | None:
    """The launch at the bad end, or at the good one, for the words that describe all of them."""
    everything = range(len(launches.subject.items))
    for subset in ((), everything) if launches.subject.open_end else (everything, ()):
        try:
            return launches.spec(subset)
        except CannotLaunch:
            continue
    return None


def _commands(state: SearchState, answer: SearchAnswer, alone: str | None) -> Commands:
    def command(subset: Subset | None, counts: CountsAs) -> str | None:
        """By the last launch of this configuration that a fork or other limits had no part in."""
        if subset is None or not shown_in_full(state.probes, subset, counts):
            return None
        last = _last_in_full(state.probes, subset)
        stored = state.run.attempt(last.dir).spec if state.run and last and last.dir else None
        return state.launches.command(subset, stored, starved=last is not None and last.kind in _BY_LIMIT)

    bad, good = command(answer.failing, CountsAs.BAD), command(answer.passing, CountsAs.GOOD)
    return Commands(bad=bad, good=good, alone=alone)


def shown_in_full(probes: Sequence[ProbeReport], subset: Subset, counts: CountsAs) -> bool:
    """Whether the last launch of this configuration as a person would type it counted so."""
    last = _last_in_full(probes, subset)
    return last is not None and last.counts_as is counts


def _last_in_full(probes: Sequence[ProbeReport], subset: Subset) -> ProbeReport | None:
    spans = spans_of(subset)
    return next((one for one in reversed(probes) if one.subset == spans and one.in_full), None)


def _floor(answer: SearchAnswer, items: int) -> int:
    """What no search could do without: the bits in an answer of this kind."""
    sizes = {
        AnswerKind.RANGE: items * (items + 1) // 2,
        AnswerKind.SET: math.comb(items, len(answer.items)),
        AnswerKind.SEVERAL: math.comb(items, len(answer.items)),
        AnswerKind.CHOICE: 1 << items,
    }
    return math.ceil(math.log2(max(1, sizes.get(answer.kind, items))))


def _write_repro(state: SearchState, run: RunDir, answer: SearchAnswer) -> str | None:
    """repro/ of the whole run: the failing configuration as a script of its own. Returns the command."""
    if answer.failing is None or state.request.subject.form is Form.COMMIT:  # a worktree is gone by then
        return None
    try:
        spec = state.launches.spec(answer.failing)
    except CannotLaunch:
        return None
    about = run.redaction.text(f"{state.request.subject.describe(answer.failing)}: {state.signature}")
    script = repro_script(run.redaction.spec(spec), working_dir=os.getcwd(), about=about)
    if script is None:
        return None
    folder = run.repro
    run.door.make_folder(folder)
    run.door.write(folder / NAME, script)
    return f"cd {folder} && {repro_command(spec)}"


def _judged_again(run: RunDir, dirs: Sequence[str]) -> dict[str, Outcome]:
    """Of an earlier session; one that cannot be judged any more has its row among the probes all the same."""
    from nsa_harness.commands.judge import judge_stored

    judged = {}
    for name in dirs:
        with suppress(HarnessError):
            judged[name] = judge_stored(run.attempt(name))
    return judged


def show_plan(request: BisectRequest) -> int:
    """What would be asked, and how many probes and how long each case takes. Launches nothing, writes nothing."""
    facts = machine_facts()
    launches = Launches(request=request, facts=facts)
    earlier = earlier_of(launches, request.out or Path("reports"))
    state = SearchState(request=request, launches=launches, facts=facts, earlier=earlier, notes=[*earlier.notes])
    question = question_of(request, earlier)
    expected = [Expected(case=one, takes_s=_takes_s(one, earlier, request.jobs)) for one in cases(question)]
    controls = [_control(launches, name, subset) for name, subset in _ends(request.subject)]
    known = _known(earlier)
    _print(lambda width: plan_lines(report_so_far(state), worst_case(question), expected, controls, width, known))
    return ANSWERED


def _ends(subject: Subject) -> list[tuple[str, Sequence[int]]]:
    everything = range(len(subject.items))
    if subject.form is Form.CHOICE:
        return [("" if place else "each", (place,)) for place in everything]
    return [("good", ()), ("up to" if subject.open_end else "bad", everything)]


def _takes_s(case: Case, earlier: Earlier, jobs: int) -> float | None:
    """By the mean of the stored runs that ended so, or of all where none did."""
    passing = earlier.run_s((Status.PASS,)) or earlier.run_s()
    failing = earlier.run_s(BAD) or passing
    if passing is None or failing is None:
        return None
    return case.probes * ((1 - case.fails) * passing + case.fails * failing) / jobs


def _known(earlier: Earlier) -> str:
    """Where the time of a run is known from."""
    means = [(word, earlier.run_s(verdicts)) for word, verdicts in (("passes", (Status.PASS,)), ("fails", BAD))]
    took = " and ".join(f"{words.seconds(mean_s)} where it {word}" for word, mean_s in means if mean_s is not None)
    runs = sum(one.verdict in (Status.PASS, *BAD) for one in (*earlier.good, *earlier.bad))
    return f"a run takes {took}, by {words.plural(runs, 'stored run')}" if took else ""


def _control(launches: Launches, name: str, subset: Sequence[int]) -> Control:
    config = launches.subject.describe(subset)
    try:
        launches.spec(subset)
    except CannotLaunch as why:
        return Control(name=name, config=config, command=None, reason=str(why))
    return Control(name=name, config=config, command=launches.command(subset, None) or f"{config}, as stored")


def show_stored(path: Path, out: Path | None) -> int:
    """A bisection again, from its bisect.json. Raises StoredRunError."""
    run = find_run(path, out or Path("reports"))
    search = stored_search(run)
    _print(lambda width: stored_lines(search, run.path, width))
    return UNDECIDED if search.answer.kind is AnswerKind.UNDECIDED else ANSWERED


def _print(lines: Callable[[int], Iterable[str]]) -> None:
    """The lines of this terminal's width."""
    paint = Paint(sys.stdout, os.environ, STYLES, live=False)
    for line in lines(paint.size[0]):
        print(paint.painted(line))
