"""The faults that `selftest` plants, each with its healthy twin, and the comparison of a report with them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.plan import Fault
from nsa_harness.core.report import Outcome, Status

LAYERS, STEPS = 4, 3  # of the model that faults are planted in


@dataclass(frozen=True, kw_only=True)
class ComparedVerdict:
    """The parts of a report that are compared."""

    verdict: str
    cause: str | None = None
    rank: tuple[int, ...] = ()
    layer: int | None = None
    step: int | None = None

    def __str__(self) -> str:
        what = self.verdict if self.cause is None else f"{self.verdict} {self.cause}"
        ranks = [f"rank {'+'.join(map(str, self.rank))}"] if self.rank else []
        places = (("layer", self.layer), ("step", self.step))
        return " ".join([what, *ranks, *(f"{name} {value}" for name, value in places if value is not None)])


@dataclass(frozen=True, kw_only=True)
class SelftestFault:
    """A fault to plant somewhere in a run of three steps, and the verdict and cause that a report must name."""

    name: str
    fault: str
    verdict: Status
    cause: str
    heals_s: float  # of its twin
    lasts_s: float | None = None  # of the fault itself; None: it lasts
    settings: tuple[str, ...] = ()  # overrides of the run, and of the twin's run
    limits: tuple[str, ...] = ()  # further overrides of the run
    ranks: int = 2
    has_layer: bool = True
    steps: int = STEPS  # it happens in one of the first `steps` steps
    twin: bool = False  # the twin is planted too


@dataclass(frozen=True, kw_only=True)
class Planting:
    """A fault at its place, or its healthy twin."""

    name: str
    fault: Fault
    settings: tuple[str, ...]
    expected: ComparedVerdict

    def __str__(self) -> str:
        layer = [] if self.fault.layer is None else [f"layer {self.fault.layer}"]
        healed = [f"heals after {self.fault.heals_s:g} s"] if self.expected.verdict == Status.PASS else []
        return " ".join([f"rank {self.fault.rank}", *layer, f"step {self.fault.step}", *healed])

    def overrides(self) -> tuple[str, ...]:
        """Return the planting as overrides of a command line."""
        set_keys = {key: value for key, value in vars(self.fault).items() if value is not None}
        fault = ", ".join(f"{key}: {set_keys[key]}" for key in _FAULT_KEYS if key in set_keys)
        cause = [f"expect.cause={self.expected.cause}"] if self.expected.cause else []
        return (*self.settings, f"fault={{{fault}}}", f"expect.verdict={self.expected.verdict}", *cause)


_FAULT_KEYS = ("kind", "rank", "layer", "step", "heals_s")


@dataclass(frozen=True, kw_only=True)
class PlantingResult:
    """One planting compared with one report. `wrong` names the parts that differ."""

    planting: Planting
    reported: ComparedVerdict
    wrong: tuple[str, ...]
    wall_s: float

    def line(self, width: int) -> str:
        """Return one line: what was planted, what was reported, and what of it is wrong."""
        planting, word = self.planting, "WRONG" if self.wrong else "right"
        line = f"{word}  {planting.name:<{width}}  planted at {planting}   said {self.reported}   {self.wall_s:.1f} s"
        return f"{line}   expected {planting.expected}; differs in {', '.join(self.wrong)}" if self.wrong else line


def planting_result(planting: Planting, outcome: Outcome) -> PlantingResult:
    """Compare every part of the report with the planting."""
    culprit, expected = outcome.culprit, planting.expected
    reported = ComparedVerdict(
        verdict=outcome.verdict.status,
        cause=outcome.verdict.cause,
        rank=culprit.ranks if culprit else (),
        layer=culprit.place.layer if culprit and culprit.place else None,
        step=culprit.step if culprit else None,
    )
    wrong = tuple(part for part, value in vars(expected).items() if value != getattr(reported, part))
    return PlantingResult(planting=planting, reported=reported, wrong=wrong, wall_s=outcome.timing.wall_s)


def plant(kind: SelftestFault, *, rank: int, layer: int, step: int) -> tuple[Planting, Planting]:
    """Return the fault at this place, and its twin: the same path, which heals. Ranks and layers count from 0."""
    fault = Fault(
        kind=kind.fault,
        rank=rank,
        layer=layer if kind.has_layer else None,
        step=step,
        heals_s=kind.lasts_s,
    )
    settings = (*kind.settings, f"run.ranks={kind.ranks}", f"train.steps={STEPS}")
    wrong = ComparedVerdict(verdict=kind.verdict, cause=kind.cause, rank=(rank,), layer=fault.layer, step=step)
    healed = replace(fault, heals_s=kind.heals_s)
    passed = ComparedVerdict(verdict=Status.PASS)
    return (
        Planting(name=kind.name, fault=fault, settings=(*settings, *kind.limits), expected=wrong),
        Planting(name=f"{kind.name}_twin", fault=healed, settings=settings, expected=passed),
    )


_HEALS_S = 9.0  # longer than the stall limit: the twin is suspected, and must be released
_AT_ONCE_S = 1.0
_STOPPED_S = 3.0  # a stopped rank is never released, so its twin continues before the stall limit

SELFTEST_FAULTS = (
    SelftestFault(
        name="deadlock",
        fault="deadlock",
        verdict=Status.HANG,
        cause=Cause.BACKWARD_FUNCTION_BLOCKED,
        heals_s=_HEALS_S,
        twin=True,
    ),
    SelftestFault(
        name="skip_collective",
        fault="skip_collective",
        verdict=Status.HANG,
        cause=Cause.RANK_CONDITIONAL_COLLECTIVE,
        heals_s=_HEALS_S,
        has_layer=False,
        steps=STEPS - 1,  # after the last step the rank would exit, and its peers fail rather than wait
    ),
    SelftestFault(
        name="raise", fault="raise", verdict=Status.FAIL, cause=Cause.EXCEPTION, heals_s=_AT_ONCE_S, twin=True
    ),
    SelftestFault(name="sigkill", fault="sigkill", verdict=Status.FAIL, cause=Cause.KILLED, heals_s=_AT_ONCE_S),
    SelftestFault(
        name="sigstop", fault="sigstop", verdict=Status.HANG, cause=Cause.STOPPED_PROCESS, heals_s=_STOPPED_S
    ),
    SelftestFault(name="exit0", fault="exit0", verdict=Status.FAIL, cause=Cause.EARLY_EXIT, heals_s=_AT_ONCE_S),
    SelftestFault(
        name="endless_loop",
        fault="endless_loop",
        verdict=Status.HANG,
        cause=Cause.INFINITE_LOOP,
        heals_s=_HEALS_S,
        limits=("limits.busy_s=8",),  # instead of a minute
    ),
)
