"""The faults that `selftest` plants, each with its healthy twin, compared with what a report says of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.plan import Fault
from nsa_harness.core.report import Outcome, Status


@dataclass(frozen=True, kw_only=True)
class ComparedVerdict:
    """What a report says of a run, in the parts that are compared."""

    verdict: str
    cause: str | None
    rank: tuple[int, ...]
    layer: int | None
    step: int | None

    def __str__(self) -> str:
        what = self.verdict if self.cause is None else f"{self.verdict} {self.cause}"
        ranks = [f"rank {'+'.join(map(str, self.rank))}"] if self.rank else []
        places = [
            f"{name} {value}" for name, value in (("layer", self.layer), ("step", self.step)) if value is not None
        ]
        return " ".join([what, *ranks, *places])


@dataclass(frozen=True, kw_only=True)
class Planting:
    """A fault at its place, or its healthy twin."""

    name: str
    fault: Fault
    settings: tuple[str, ...]
    must_say: ComparedVerdict
    quick: bool

    def __str__(self) -> str:
        place = [f"rank {self.fault.rank}", *([] if self.fault.layer is None else [f"layer {self.fault.layer}"])]
        healed = [f"heals after {self.fault.heals_s:g} s"] if self.must_say.verdict == Status.PASS else []
        return " ".join([*place, f"step {self.fault.step}", *healed])


@dataclass(frozen=True, kw_only=True)
class PlantingResult:
    """One planting against one report. `wrong` names the parts that differ."""

    planting: Planting
    said: ComparedVerdict
    wrong: tuple[str, ...]
    wall_s: float


@dataclass(frozen=True, kw_only=True)
class Score:
    """How often a word was due, how often it was said, and how often both."""

    planted: int
    said: int
    right: int

    @property
    def precision(self) -> float | None:
        return self.right / self.said if self.said else None

    @property
    def recall(self) -> float | None:
        return self.right / self.planted if self.planted else None

    def values(self) -> dict[str, object]:
        """For JSON."""
        return {**vars(self), "precision": self.precision, "recall": self.recall}


def compared_verdict(outcome: Outcome) -> ComparedVerdict:
    culprit = outcome.culprit
    return ComparedVerdict(
        verdict=outcome.verdict.status,
        cause=outcome.verdict.cause,
        rank=culprit.ranks if culprit else (),
        layer=culprit.place.layer if culprit and culprit.place else None,
        step=culprit.step if culprit else None,
    )


def planting_result(planting: Planting, outcome: Outcome) -> PlantingResult:
    """Compares every part; all of them must be as planted."""
    due, said = planting.must_say, compared_verdict(outcome)
    parts = ("verdict", "cause", "rank", "layer", "step")
    wrong = tuple(part for part in parts if getattr(due, part) != getattr(said, part))
    return PlantingResult(planting=planting, said=said, wrong=wrong, wall_s=outcome.timing.wall_s)


def planting_line(mark: PlantingResult, width: int) -> str:
    """One line: what was planted, what was said, and what of it is wrong."""
    word = "WRONG" if mark.wrong else "right"
    line = f"{word}  {mark.planting.name:<{width}}  planted at {mark.planting}   said {mark.said}   {mark.wall_s:.1f} s"
    if not mark.wrong:
        return line
    return f"{line}   expected {mark.planting.must_say}; differs in {', '.join(mark.wrong)}"


def scores(pairs: Sequence[tuple[str | None, str | None]]) -> dict[str, Score]:
    """Of each word that was due or said, from pairs of both; no word is due of a twin, so one said costs precision."""
    words = sorted({word for pair in pairs for word in pair if word is not None})
    return {
        word: Score(
            planted=sum(due == word for due, _ in pairs),
            said=sum(said == word for _, said in pairs),
            right=sum(due == said == word for due, said in pairs),
        )
        for word in words
    }


def planting_scores(marks: Sequence[PlantingResult]) -> dict[str, dict[str, Score]]:
    """Of the causes, and of the verdicts."""
    return {
        part: scores([(getattr(mark.planting.must_say, part), getattr(mark.said, part)) for mark in marks])
        for part in ("cause", "verdict")
    }


def score_values(marks: Sequence[PlantingResult], *, seed: int) -> dict[str, object]:
    """The score as JSON."""
    found = planting_scores(marks)
    return {
        "schema": 1,
        "seed": seed,
        "right": sum(not mark.wrong for mark in marks),
        "of": len(marks),
        "causes": {name: one.values() for name, one in found["cause"].items()},
        "verdicts": {name: one.values() for name, one in found["verdict"].items()},
        "plantings": [_values(mark) for mark in marks],
    }


def score_lines(marks: Sequence[PlantingResult]) -> Iterator[str]:
    for title, table in planting_scores(marks).items():
        width = max(map(len, (title, *table)))
        yield f"{title:<{width}}  planted  said  right  precision  recall"
        for name, score in table.items():
            shares = f"{_share(score.precision):>9}  {_share(score.recall):>6}"
            yield f"{name:<{width}}  {score.planted:>7}  {score.said:>4}  {score.right:>5}  {shares}"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.2f}"


def _values(mark: PlantingResult) -> dict[str, object]:
    due, said = (
        {"verdict": one.verdict, "cause": one.cause, "ranks": list(one.rank), "layer": one.layer, "step": one.step}
        for one in (mark.planting.must_say, mark.said)
    )
    return {
        "name": mark.planting.name,
        "fault": _place(mark.planting.fault),
        "due": due,
        "said": said,
        "wrong": list(mark.wrong),
        "wall_s": mark.wall_s,
    }


def _place(fault: Fault) -> dict[str, object]:
    return {"kind": fault.kind, "rank": fault.rank, "layer": fault.layer, "step": fault.step, "heals_s": fault.heals_s}


LAYERS, STEPS = 4, 3  # of the model that faults are planted in


@dataclass(frozen=True, kw_only=True)
class SelftestFault:
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

_DEADLOCK = SelftestFault(
    name="deadlock", fault="deadlock", verdict=Status.HANG, cause=Cause.BACKWARD_FUNCTION_BLOCKED, heals_s=_HEALS_S
)
# Not in the last step: the rank would be done and leave, so its peers fail rather than wait.
_SKIP = SelftestFault(
    name="skip_collective",
    fault="skip_collective",
    verdict=Status.HANG,
    cause=Cause.RANK_CONDITIONAL_COLLECTIVE,
    heals_s=_HEALS_S,
    layered=False,
    steps=STEPS - 1,
)
_RAISE = SelftestFault(name="raise", fault="raise", verdict=Status.FAIL, cause=Cause.EXCEPTION, heals_s=_AT_ONCE_S)
_KILL = SelftestFault(name="sigkill", fault="sigkill", verdict=Status.FAIL, cause=Cause.KILLED, heals_s=_AT_ONCE_S)
# Nobody can tell who will resume a stopped rank, so this twin goes on before the stall limit.
_STOP = SelftestFault(
    name="sigstop", fault="sigstop", verdict=Status.HANG, cause=Cause.STOPPED_PROCESS, heals_s=_STOPPED_S
)
_EXIT = SelftestFault(name="exit0", fault="exit0", verdict=Status.FAIL, cause=Cause.EARLY_EXIT, heals_s=_AT_ONCE_S)
_LOOP = SelftestFault(
    name="endless_loop", fault="endless_loop", verdict=Status.HANG, cause=Cause.INFINITE_LOOP, heals_s=_HEALS_S
)
_SLOW = SelftestFault(name="slow_step", fault="slow_step", verdict=Status.FAIL, cause=Cause.SLOW, heals_s=_CRAWL_S)

SELFTEST_FAULTS = (
    *(replace(kind, quick=True) for kind in (_DEADLOCK, _SKIP, _RAISE, _KILL, _STOP, _EXIT, _LOOP)),
    _SLOW,
    *(replace(kind, name=f"{kind.name}_checkpointed", settings=_CHECKPOINTED) for kind in (_DEADLOCK, _RAISE, _STOP)),
    *(replace(kind, name=f"{kind.name}_manual", settings=_MANUAL) for kind in (_DEADLOCK, _EXIT, _LOOP)),
    *(replace(kind, name=f"{kind.name}_of_3", ranks=3) for kind in (_SKIP, _KILL)),
)


def planted(kind: SelftestFault, *, rank: int, layer: int, step: int) -> tuple[Planting, Planting]:
    """The fault at this place, and its twin: the same path, over after a while. Ranks and layers count from 0."""
    fault = Fault(
        kind=kind.fault,
        rank=rank,
        layer=layer if kind.layered else None,
        step=step,
        heals_s=_SLOW_S if kind.fault == "slow_step" else None,
    )
    limits = {"endless_loop": _BUSY, "slow_step": _LATE}.get(kind.fault, ())
    settings = (*kind.settings, f"run.ranks={kind.ranks}", f"train.steps={STEPS}")
    wrong = ComparedVerdict(verdict=kind.verdict, cause=kind.cause, rank=(rank,), layer=fault.layer, step=step)
    healthy = ComparedVerdict(verdict=Status.PASS, cause=None, rank=(), layer=None, step=None)
    return (
        Planting(name=kind.name, fault=fault, settings=(*settings, *limits), must_say=wrong, quick=kind.quick),
        Planting(
            name=f"{kind.name}_twin",
            fault=replace(fault, heals_s=kind.heals_s),
            settings=settings,
            must_say=healthy,
            # Of the quick set, one twin that is suspected and one that is not.
            quick=kind.quick and kind.fault in ("deadlock", "raise"),
        ),
    )


def words_of(planting: Planting) -> tuple[str, ...]:
    """The planting as overrides of a command line."""
    fault, due = planting.fault, planting.must_say
    given = ", ".join(f"{key}: {value}" for key, value in _place(fault).items() if value is not None)
    expected = [f"expect.verdict={due.verdict}", *([f"expect.cause={due.cause}"] if due.cause else [])]
    return (*planting.settings, f"fault={{{given}}}", *expected)
