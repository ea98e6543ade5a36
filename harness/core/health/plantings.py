"""The faults that `selftest` plants, each with its healthy twin: where, in what kind of run, and what is due."""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.core.diagnosed.causes import Cause
from harness.core.health.selftest import Planting, Said
from harness.core.plan import Fault
from harness.core.report import Status

LAYERS, STEPS = 4, 3  # of the model that faults are planted in


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A fault to plant somewhere in a run of three steps, and what the harness must call it."""

    name: str
    fault: str
    verdict: Status
    cause: str
    heals_s: float  # of its twin
    settings: tuple[str, ...] = ()  # overrides on the run it is planted in
    ranks: int = 2
    layered: bool = True  # it has a layer
    steps: int = STEPS  # it happens in one of the first so many
    quick: bool = False  # in the set that runs unless --full is given


_CHECKPOINTED = ("gc.layers=all",)
_MANUAL = ("parallel.wrapper=manual",)
_BUSY = ("limits.busy_s=8",)  # in place of a minute
# A slow step of 90 s under a deadline of 30 s; its twin is over in time.
_LATE = ("limits.deadline_s=30",)
_HEALS_S = 9.0  # longer than the stall limit: the twin is suspected, and must be released
_AT_ONCE_S = 1.0
_STOPPED_S = 3.0
_CRAWL_S = 6.0
_SLOW_S = 90.0

_DEADLOCK = Kind(
    name="deadlock", fault="deadlock", verdict=Status.HANG, cause=Cause.BACKWARD_FUNCTION_BLOCKED, heals_s=_HEALS_S
)
# Not in the last step: the rank would be done and leave, so its peers fail rather than wait.
_SKIP = Kind(
    name="skip_collective",
    fault="skip_collective",
    verdict=Status.HANG,
    cause=Cause.RANK_CONDITIONAL_COLLECTIVE,
    heals_s=_HEALS_S,
    layered=False,
    steps=STEPS - 1,
)
_RAISE = Kind(name="raise", fault="raise", verdict=Status.FAIL, cause=Cause.EXCEPTION, heals_s=_AT_ONCE_S)
_KILL = Kind(name="sigkill", fault="sigkill", verdict=Status.FAIL, cause=Cause.KILLED, heals_s=_AT_ONCE_S)
# Nobody can tell who will resume a stopped rank, so this twin goes on before the stall limit.
_STOP = Kind(name="sigstop", fault="sigstop", verdict=Status.HANG, cause=Cause.STOPPED_PROCESS, heals_s=_STOPPED_S)
_EXIT = Kind(name="exit0", fault="exit0", verdict=Status.FAIL, cause=Cause.EARLY_EXIT, heals_s=_AT_ONCE_S)
_LOOP = Kind(
    name="endless_loop", fault="endless_loop", verdict=Status.HANG, cause=Cause.INFINITE_LOOP, heals_s=_HEALS_S
)
_SLOW = Kind(name="slow_step", fault="slow_step", verdict=Status.FAIL, cause=Cause.SLOW, heals_s=_CRAWL_S)

KINDS = (
    *(replace(kind, quick=True) for kind in (_DEADLOCK, _SKIP, _RAISE, _KILL, _STOP, _EXIT, _LOOP)),
    _SLOW,
    *(replace(kind, name=f"{kind.name}_checkpointed", settings=_CHECKPOINTED) for kind in (_DEADLOCK, _RAISE, _STOP)),
    *(replace(kind, name=f"{kind.name}_manual", settings=_MANUAL) for kind in (_DEADLOCK, _EXIT, _LOOP)),
    *(replace(kind, name=f"{kind.name}_of_3", ranks=3) for kind in (_SKIP, _KILL)),
)


def planted(kind: Kind, *, rank: int, layer: int, step: int) -> Planting:
    """The fault at this place. Ranks and layers count from 0, steps from 1."""
    fault = Fault(
        kind=kind.fault,
        rank=rank,
        layer=layer if kind.layered else None,
        step=step,
        heals_s=_SLOW_S if kind.fault == "slow_step" else None,
    )
    limits = {"endless_loop": _BUSY, "slow_step": _LATE}.get(kind.fault, ())
    must_say = Said(verdict=kind.verdict, cause=kind.cause, rank=(rank,), layer=fault.layer, step=step)
    settings = (*kind.settings, f"run.ranks={kind.ranks}", f"train.steps={STEPS}", *limits)
    return Planting(name=kind.name, fault=fault, settings=settings, must_say=must_say, quick=kind.quick)


def twin(kind: Kind, *, rank: int, layer: int, step: int) -> Planting:
    """The same path, over after a while: it must PASS."""
    place = Fault(kind=kind.fault, rank=rank, layer=layer if kind.layered else None, step=step, heals_s=kind.heals_s)
    settings = (*kind.settings, f"run.ranks={kind.ranks}", f"train.steps={STEPS}")
    healthy = Said(verdict=Status.PASS, cause=None, rank=(), layer=None, step=None)
    # Of the quick set, one twin that is suspected and one that is not.
    quick = kind.quick and kind.fault in ("deadlock", "raise")
    return Planting(name=f"{kind.name}_twin", fault=place, settings=settings, must_say=healthy, quick=quick)


def words_of(planting: Planting) -> tuple[str, ...]:
    """The planting as overrides of a command line."""
    fault, due = planting.fault, planting.must_say
    parts = {"kind": fault.kind, "rank": fault.rank, "layer": fault.layer, "step": fault.step, "heals_s": fault.heals_s}
    given = ", ".join(f"{key}: {value}" for key, value in parts.items() if value is not None)
    expected = [f"expect.verdict={due.verdict}", *([f"expect.cause={due.cause}"] if due.cause else [])]
    return (*planting.settings, f"fault={{{given}}}", *expected)
