"""`nsa-harness selftest`: run scenarios with planted faults and check the reports."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nsa_harness.commands.run import run_all
from nsa_harness.commands.scheduler import RunRequest
from nsa_harness.core.plan import RunSpec
from nsa_harness.core.report import Outcome, Report
from nsa_harness.core.selftest import (
    LAYERS,
    SELFTEST_FAULTS,
    Planting,
    PlantingResult,
    SelftestFault,
    plant,
    planting_result,
)
from nsa_harness.render.documents.report_json import from_json
from nsa_harness.render.listener import Listener
from nsa_harness.render.text import escape
from nsa_harness.supervisor.launch.machine import machine_facts
from nsa_harness.supervisor.launch.planning import Invocation, plan_launches
from nsa_harness.supervisor.launch.scenario_files import shipped_root
from nsa_harness.supervisor.storage.reports import MAX_REPORT_BYTES
from nsa_harness.supervisor.storage.rundir import RunDir, RunOptions

_RIGHT, _WRONG, _INTERRUPTED = 0, 1, 130  # exit codes
_PARENT = "base/fault.yaml"


@dataclass(frozen=True, kw_only=True)
class SelftestRequest:
    """The options of a self-test."""

    seed: int  # decides where each fault is planted
    out: Path | None
    command: str  # the command line of the user


def selftest(request: SelftestRequest, faults: Sequence[SelftestFault] = SELFTEST_FAULTS) -> int:
    """Check that reports name planted faults. Return 0 if all do, 1 if not, and 130 after an interruption."""
    plantings = draw_plantings(faults, request.seed)
    count = len(faults)
    print(
        f"selftest   {count} planted faults and {len(plantings) - count} healthy twins, seed {request.seed} "
        f"(--seed {request.seed} plants them at the same places)",
        flush=True,
    )
    screen = _Screen(plantings)
    specs = tuple(map(_spec, plantings))
    run = RunRequest(specs=specs, options=RunOptions(command=request.command, out=request.out, strict=True))
    code = run_all(run, screen)
    results = _compare(plantings, screen.run_dir)
    right, missing = sum(not result.wrong for result in results), len(plantings) - len(results)
    print(f"{right} of {len(plantings)} right" + (f", {missing} not run" if missing else ""))
    if screen.run_dir is not None:
        print(f"report     {screen.run_dir / 'SUMMARY.md'}")
    return _INTERRUPTED if code == _INTERRUPTED else _RIGHT if right == len(plantings) else _WRONG


def draw_plantings(faults: Iterable[SelftestFault], seed: int) -> tuple[Planting, ...]:
    """Return the faults to plant, at random ranks, layers and steps, some followed by a healthy twin."""
    return tuple(planting for kind in faults for planting in _at_random_place(kind, seed))


def _at_random_place(kind: SelftestFault, seed: int) -> tuple[Planting, ...]:
    draw = random.Random(f"{seed} {kind.name}")
    rank, layer, step = draw.randrange(kind.ranks), draw.randrange(LAYERS), draw.randrange(1, kind.steps + 1)
    fault, twin = plant(kind, rank=rank, layer=layer, step=step)
    return (fault, twin) if kind.twin else (fault,)


def _spec(planting: Planting) -> RunSpec:
    root = shipped_root()
    words = (str(root / _PARENT), *planting.overrides())
    (spec,) = plan_launches(Invocation(arguments=words, working_dir=root, environ={}), machine_facts()).specs
    assert isinstance(spec, RunSpec)
    return replace(spec, scenario=planting.name, about=f"selftest: {planting.fault.kind} at {planting}")


class _Screen(Listener):
    """A listener that prints one line for each outcome as soon as it is judged."""

    def __init__(self, plantings: Sequence[Planting]) -> None:
        self.run_dir: Path | None = None
        self._plantings = {planting.name: planting for planting in plantings}
        self._width = max(map(len, self._plantings), default=0)

    def on_outcome(self, outcome: Outcome, run_dir: Path) -> None:
        self.run_dir = run_dir
        result = planting_result(self._plantings[outcome.spec.scenario], outcome)
        print(escape(result.line(self._width)), flush=True)

    def on_done(self, report: Report, run_dir: Path) -> None:  # noqa: ARG002
        self.run_dir = run_dir


def _compare(plantings: Sequence[Planting], run_dir: Path | None) -> list[PlantingResult]:
    if run_dir is None:
        return []
    run = RunDir(run_dir)
    text = run.directory.read_whole_file(run.report, MAX_REPORT_BYTES).decode("utf-8")
    outcomes = {
        outcome.spec.scenario: outcome for outcome in from_json(text, str(run.report)).outcomes if outcome.final
    }
    return [planting_result(planting, outcomes[planting.name]) for planting in plantings if planting.name in outcomes]
