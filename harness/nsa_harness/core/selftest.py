"""Plant known faults for `nsa-harness selftest`, and check whether the reports identify them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.plan import Fault
from nsa_harness.core.report import Outcome, Status

LAYERS, STEPS = 4, 3  # layers of the model and steps of the run in which a fault is planted


@dataclass(frozen=True, kw_only=True)
class ComparedVerdict:
    """The parts of a report that are compared with the planted fault."""

    verdict: str
    cause: str | None = None
    rank: tuple[int, ...] = ()
    layer: int | None = None
    step: int | None = None

    def __str__(self) -> str:
        verdict = self.verdict if self.cause is None else f"{self.verdict} {self.cause}"
        ranks = [f"rank {'+'.join(map(str, self.rank))}"] if self.rank else []
        places = (("layer", self.layer), ("step", self.step))
        return " ".join([verdict, *ranks, *(f"{name} {value}" for name, value in places if value is not None)])


@dataclass(frozen=True, kw_only=True)
class SelftestFault:
    """A kind of fault to plant in a short run, with the verdict and cause expected in the report."""

    name: str
    fault: str  # kind of the fault
    verdict: Status
    cause: str
    heals_s: float  # when the fault of the healthy twin heals
    lasts_s: float | None = None  # when the fault itself heals; None: never
    settings: tuple[str, ...] = ()  # overrides for the run and for the run of the twin
    limits: tuple[str, ...] = ()  # overrides only for the run with the fault
    ranks: int = 2
    has_layer: bool = True
    steps: int = STEPS  # the fault happens in one of the first `steps` steps
    twin: bool = False  # whether the healthy twin is planted, too


@dataclass(frozen=True, kw_only=True)
class Planting:
    """One selftest run, with a fault planted at one rank, layer and step."""

    name: str
    fault: Fault
    settings: tuple[str, ...]
    expected: ComparedVerdict

    def __str__(self) -> str:
        layer = [] if self.fault.layer is None else [f"layer {self.fault.layer}"]
        healing = [f"heals after {self.fault.heals_s:g} s"] if self.expected.verdict == Status.PASS else []
        return " ".join([f"rank {self.fault.rank}", *layer, f"step {self.fault.step}", *healing])

    def overrides(self) -> tuple[str, ...]:
        """Return the KEY=VALUE arguments that plant the fault."""
        set_keys = {key: value for key, value in vars(self.fault).items() if value is not None}
        fault = ", ".join(f"{key}: {set_keys[key]}" for key in _FAULT_KEYS if key in set_keys)
        cause = [f"expect.cause={self.expected.cause}"] if self.expected.cause else []
        return (*self.settings, f"fault={{{fault}}}", f"expect.verdict={self.expected.verdict}", *cause)


_FAULT_KEYS = ("kind", "rank", "layer", "step", "heals_s")


@dataclass(frozen=True, kw_only=True)
class PlantingResult:
    """The statements of a report about a planted fault, with the wrong ones."""

    planting: Planting
    reported: ComparedVerdict
    wrong: tuple[str, ...]
    wall_s: float

    def line(self, width: int) -> str:
        """Return the result as one line of text, in which the fault's name is padded to `width` characters."""
        planting, word = self.planting, "WRONG" if self.wrong else "right"
        line = (
            f"{word}  {planting.name:<{width}}  planted at {planting}   reported {self.reported}   {self.wall_s:.1f} s"
        )
        return f"{line}   expected {planting.expected}; wrong: {', '.join(self.wrong)}" if self.wrong else line


def planting_result(planting: Planting, outcome: Outcome) -> PlantingResult:
    """Return the result of comparing a planted fault with the report of its run."""
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
    """Return two planned runs, each with the fault planted at the given rank, layer and step."""
    fault = Fault(kind=kind.fault, rank=rank, layer=layer if kind.has_layer else None, step=step, heals_s=kind.lasts_s)
    settings = (*kind.settings, f"run.ranks={kind.ranks}", f"train.steps={STEPS}")
    expected = ComparedVerdict(verdict=kind.verdict, cause=kind.cause, rank=(rank,), layer=fault.layer, step=step)
    healing_fault = replace(fault, heals_s=kind.heals_s)
    expected_pass = ComparedVerdict(verdict=Status.PASS)
    return (
        Planting(name=kind.name, fault=fault, settings=(*settings, *kind.limits), expected=expected),
        Planting(name=f"{kind.name}_twin", fault=healing_fault, settings=settings, expected=expected_pass),
    )


_HEALS_S = 9.0  # longer than the stall limit: the twin is suspected to hang, and must then recover
_AT_ONCE_S = 1.0
_STOPPED_S = 3.0  # shorter than the stall limit, after which a stopped rank is a proven HANG

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
        steps=STEPS - 1,  # in the last step the rank would exit afterwards, and the others would fail instead of wait
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
        limits=("limits.busy_s=8",),  # the default is a minute
    ),
)
