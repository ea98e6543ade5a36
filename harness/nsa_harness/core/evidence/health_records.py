"""Read the probe's health samples; every record must have its exact form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import isfinite
from typing import Any, TypeVar

from nsa_harness.core.evidence.health_samples import (
    DataWait,
    DroppedBatches,
    GradientArrivals,
    HealthSamples,
    MemoryGrowth,
    MemorySample,
    NonFiniteValue,
    OverwrittenFile,
    ParameterBlock,
    Replica,
    ReplicaSample,
    UnawaitedCall,
)
from nsa_harness.core.evidence.status_file import read_place, read_ranks
from nsa_harness.core.report import Place

KEPT_POINTS = 96
KEPT_SAMPLES = 96  # latest samples per replica
_MAX_NAMES = 8
_MAX_PARTS = 64
_MAX_TEXT = 200
_MAX_PATH, _MAX_FILES = 1024, 64
_MAX_LINES, _MAX_MODELS = 64, 8  # lines and models of the program per kind of record

Point = TypeVar("Point")


def read_health_samples(records: Iterable[dict[str, Any]]) -> HealthSamples | None:
    """Return the samples, or None if there are none.

    Raises KeyError, TypeError or ValueError for a malformed record.
    """
    reader = _Reader()
    for record in records:
        reader.take(record)
    return reader.samples() if reader.seen else None


class _Reader:
    def __init__(self) -> None:
        self.seen = False
        self._state = HealthSamples()
        self._memory: list[MemorySample] = []
        self._fetched: list[DataWait] = []
        self._replicas: dict[int, Replica] = {}
        # Each by optimizer, from its last sample.
        self._never: dict[int, tuple[int, tuple[str, ...], Place | None]] = {}  # parameters without any gradient so far
        self._still: dict[int, int] = {}  # parameters whose gradients were always zero
        self._samples: Counter[int] = Counter()
        self._broken: dict[int, NonFiniteValue | None] = {}

    def take(self, record: dict[str, Any]) -> None:
        kind = record.get("at")
        if kind == "step":
            self._take_step(record)
        elif kind == "loss":
            self._take_loss(record)
        elif kind == "made":
            self._replicas[int(record["ddp"])] = _replica(record)
            self._take_replica(record)
        elif kind in ("begun", "stepped", "over"):
            self._take_replica(record)
        elif kind == "wrote":
            place = read_place(str(record["place"]))
            written = OverwrittenFile(path=str(record["path"])[:_MAX_PATH], place=place, step=int(record["step"]))
            self._change(overwritten_files=(*self._state.overwritten_files, written)[:_MAX_FILES])
        elif kind == "unwaited":
            self._change(unawaited_calls=(*self._state.unawaited_calls, _read_unwaited(record))[:_MAX_LINES])
        elif kind == "given up":
            self._change(dropped_batches=(*self._state.dropped_batches, _read_given_up(record))[:_MAX_LINES])
        elif kind == "gradients":
            self._change(gradient_arrivals=(*self._state.gradient_arrivals, _read_arrived(record))[:_MAX_MODELS])
        elif kind == "grown":
            self._change(memory_growth=tuple(_read_grown(record))[:_MAX_LINES])
        elif kind == "exit":
            self._change(open_group=bool(record["open_group"]), steps=max(self._state.steps, int(record["step"])))
            self._count_losses(record)
        self.seen = True

    def samples(self) -> HealthSamples:
        never = [last for last in self._never.values() if last[0]]
        broken = [broken_value for broken_value in self._broken.values() if broken_value is not None]
        still = max(
            ((self._samples[optimizer], count) for optimizer, count in self._still.items() if count), default=(0, 0)
        )
        return replace(
            self._state,
            memory=tuple(_thin_out(self._memory)),
            data_waits=tuple(_thin_out(self._fetched)),
            replicas=tuple(self._replicas.values()),
            without_gradient=tuple(name for _, names, _ in never for name in names)[:_MAX_NAMES],
            without_gradient_count=sum(count for count, _, _ in never),
            without_gradient_place=never[0][2] if never else None,
            zero_gradient_count=still[1],
            zero_gradient_samples=still[0],
            sample_count=max(self._samples.values(), default=0),
            non_finite_parameters=min(broken, key=lambda value: value.step, default=None),
        )

    def _change(self, **changes: Any) -> None:
        self._state = replace(self._state, **changes)

    def _count_losses(self, record: dict[str, Any]) -> None:
        self._change(**{name: int(record[name]) for name in ("losses", "bad_losses", "bad_in_a_row")})

    def _take_loss(self, record: dict[str, Any]) -> None:
        """Store a loss that is not finite. If the parameters were not finite before it, store only those."""
        step, place = int(record["step"]), read_place(str(record["place"]))
        if names := _names(record["held"]):
            self._broken[0] = self._broken.get(0) or NonFiniteValue(step=step - 1, value=_value(record), names=names)
        else:
            self._change(non_finite_loss=NonFiniteValue(step=step, value=_value(record), place=place))

    def _take_step(self, record: dict[str, Any]) -> None:
        """Store what the probe sampled after one step of one optimizer: memory, waits for data, and gradients.

        Only the first optimizer's records count for memory and waits. A value that is not finite is stored with the
        first step that had it, and forgotten once a sample is finite again.
        """
        step, optimizer = int(record["step"]), int(record["optimizer"])
        self._change(steps=max(self._state.steps, step))
        self._count_losses(record)
        if optimizer == 0 and record["anon"] is not None:
            gpu = None if record["gpu"] is None else int(record["gpu"])
            self._memory.append(MemorySample(step=step, anonymous_bytes=int(record["anon"]), gpu_bytes=gpu))
        if optimizer == 0 and "waited_s" in record:
            self._fetched.append(_read_fetched(record))
        self._samples[optimizer] += 1
        place = read_place(str(record.get("never_place", "")))
        self._never[optimizer] = int(record["never"]), _names(record["never_names"]), place
        self._still[optimizer] = int(record.get("still", 0))
        before = self._broken.get(optimizer)
        now = (
            NonFiniteValue(step=step, value=_value(record), names=_names(record["names"])) if record["broken"] else None
        )
        self._broken[optimizer] = before or now if now else None

    def _take_replica(self, record: dict[str, Any]) -> None:
        replica = self._replicas[int(record["ddp"])]
        sample = ReplicaSample(
            at=str(record["at"]),
            round=int(record.get("round", 0)),
            steps=int(record.get("steps", 0)),
            checksum=str(record["sum"])[:16],
        )
        self._replicas[replica.number] = replace(
            replica,
            samples=(*replica.samples, sample)[-KEPT_SAMPLES:],
            blocks=tuple(_part(part) for part in record["seen"][:_MAX_PARTS]),
            hook=str(record["hook"])[:_MAX_TEXT],
        )


def _read_fetched(record: dict[str, Any]) -> DataWait:
    waited_s, passed_s = float(record["waited_s"]), float(record["passed_s"])
    if not (isfinite(waited_s) and isfinite(passed_s)):
        raise ValueError(f"waited {waited_s} of {passed_s} s")
    return DataWait(
        step=int(record["step"]),
        waited_s=waited_s,
        elapsed_s=passed_s,
        place=read_place(str(record["waited_at"])),
    )


def _read_unwaited(record: dict[str, Any]) -> UnawaitedCall:
    place = read_place(str(record["place"]))
    return UnawaitedCall(op=str(record["op"])[:_MAX_TEXT], place=place, calls=int(record["calls"]))


def _read_given_up(record: dict[str, Any]) -> DroppedBatches:
    return DroppedBatches(
        type=str(record["type"])[:_MAX_TEXT],
        place=read_place(str(record["place"])),
        batches=int(record["batches"]),
        step=int(record["step"]),
    )


def _read_arrived(record: dict[str, Any]) -> GradientArrivals:
    return GradientArrivals(
        model=str(record["model"])[:_MAX_TEXT],
        sample_count=int(record["looks"]),
        zero_gradient_count=int(record["still"]),
        without_gradient=_names(record["never_names"]),
        without_gradient_count=int(record["never"]),
        unset=_names(record["unset"]),
        unset_value=str(record["unset_value"])[:_MAX_TEXT],
    )


def _read_grown(record: dict[str, Any]) -> Iterator[MemoryGrowth]:
    for line in record["lines"][:_MAX_LINES]:
        place = read_place(str(line["place"]))
        if place is not None:
            yield MemoryGrowth(
                place=place,
                first_step=int(record["first"]),
                last_step=int(record["last"]),
                size_bytes=int(line["bytes"]),
            )


def _replica(record: dict[str, Any]) -> Replica:
    names = ((str(first)[:_MAX_TEXT], str(last)[:_MAX_TEXT]) for first, last in record["parts"][:_MAX_PARTS])
    ranks = read_ranks(str(record["ranks"]))
    return Replica(
        number=int(record["ddp"]),
        ranks=ranks,
        names=tuple(names),
        samples=(),
        blocks=(),
        in_ddp=bool(record.get("wrapped", True)),
        was_broadcast=bool(record.get("broadcast", False)),
        reduces_gradients=bool(record.get("reduced", False)),
    )


def _part(record: Any) -> ParameterBlock:
    checksum, size, total = record
    return ParameterBlock(checksum=str(checksum)[:16], size=float(size), total=float(total))


def _names(texts: Any) -> tuple[str, ...]:
    return tuple(str(text)[:_MAX_TEXT] for text in texts[:_MAX_NAMES])


def _value(record: dict[str, Any]) -> str:
    return "inf" if record["value"] == "inf" else "nan"


def _thin_out(points: list[Point]) -> list[Point]:
    """Return at most KEPT_POINTS points: all of the latest half, and every second of the older ones."""
    while len(points) > KEPT_POINTS:
        half = len(points) // 2
        points = points[:half:2] + points[half:]
    return points
