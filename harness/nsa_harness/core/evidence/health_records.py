"""Read the health samples that a rank's instrumentation wrote as lines of JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import isfinite
from typing import Any, TypeVar

from nsa_harness.core.evidence.health_samples import (
    DataWait,
    DroppedBatches,
    Exchange,
    GradientArrivals,
    HealthSamples,
    LineShare,
    MemoryGrowth,
    MemorySample,
    NonFiniteValue,
    OverwrittenFile,
    ParameterBlock,
    Replica,
    ReplicaSample,
    StepTimes,
    UnawaitedCall,
)
from nsa_harness.core.evidence.rank_ranges import read_ranks
from nsa_harness.core.evidence.status_file import read_place
from nsa_harness.core.report import Place

MAX_POINTS = 96  # stored samples of memory, of waits for data, and of step times
MAX_REPLICA_SAMPLES = 96  # latest samples that are stored per replica
_MAX_NAMES = 8
_MAX_PARTS = 64
_MAX_TEXT = 200
_MAX_PATH, _MAX_FILES = 1024, 64
_MAX_LINES, _MAX_MODELS = 64, 8  # stored lines and models of the program per kind of record

Point = TypeVar("Point")


def read_health_samples(records: Iterable[dict[str, Any]]) -> HealthSamples | None:
    """Return the health samples of one rank, or None if there are no records. Malformed ones raise an error."""
    reader = _Reader()
    for record in records:
        reader.add(record)
    return reader.samples() if reader.has_records else None


class _Reader:
    """A reader that combines one rank's records into HealthSamples."""

    def __init__(self) -> None:
        self.has_records = False
        self._state = HealthSamples()
        self._memory: list[MemorySample] = []
        self._data_waits: list[DataWait] = []
        self._step_times: list[StepTimes] = []
        self._replicas: dict[int, Replica] = {}
        # The number of each optimizer -> the values in its last sample.
        self._without_gradient: dict[int, tuple[int, tuple[str, ...], Place | None]] = {}  # count, names, place
        self._zero_gradients: dict[int, int] = {}  # number of parameters whose gradients were always zero
        self._samples: Counter[int] = Counter()  # number of samples
        self._non_finite: dict[int, NonFiniteValue | None] = {}

    def add(self, record: dict[str, Any]) -> None:
        kind = record.get("at")
        if kind == "step":
            self._add_step(record)
        elif kind == "loss":
            self._add_loss(record)
        elif kind == "made":
            self._replicas[int(record["ddp"])] = _replica(record)
            self._add_replica_sample(record)
        elif kind in ("begun", "stepped", "over"):
            self._add_replica_sample(record)
        elif kind == "exchanged":
            self._add_exchange(record)
        elif kind == "wrote":
            place = read_place(str(record["place"]))
            file = OverwrittenFile(path=str(record["path"])[:_MAX_PATH], place=place, step=int(record["step"]))
            self._change(overwritten_files=(*self._state.overwritten_files, file)[:_MAX_FILES])
        elif kind == "unwaited":
            self._change(unawaited_calls=(*self._state.unawaited_calls, _read_unawaited_call(record))[:_MAX_LINES])
        elif kind == "given up":
            self._change(dropped_batches=(*self._state.dropped_batches, _read_dropped_batches(record))[:_MAX_LINES])
        elif kind == "gradients":
            self._change(
                gradient_arrivals=(*self._state.gradient_arrivals, _read_gradient_arrivals(record))[:_MAX_MODELS]
            )
        elif kind == "grown":
            self._change(memory_growth=tuple(_read_memory_growth(record))[:_MAX_LINES])
        elif kind == "lines":
            lines = [(read_place(str(text)), int(count)) for text, count in record["lines"][:_MAX_LINES]]
            self._change(
                lines=tuple(LineShare(place=place, count=count) for place, count in lines if place),
                line_samples=int(record["samples"]),
            )
        elif kind == "exit":
            self._change(open_group=bool(record["open_group"]), steps=max(self._state.steps, int(record["step"])))
            self._count_losses(record)
        self.has_records = True

    def samples(self) -> HealthSamples:
        without_gradient = [sample for sample in self._without_gradient.values() if sample[0]]
        non_finite = [value for value in self._non_finite.values() if value is not None]
        zero_gradient_samples, zero_gradient_count = max(
            ((self._samples[optimizer], count) for optimizer, count in self._zero_gradients.items() if count),
            default=(0, 0),
        )
        return replace(
            self._state,
            memory=tuple(_thin_out(self._memory)),
            data_waits=tuple(_thin_out(self._data_waits)),
            step_times=tuple(_thin_out(self._step_times)),
            replicas=tuple(self._replicas.values()),
            without_gradient=tuple(name for _, names, _ in without_gradient for name in names)[:_MAX_NAMES],
            without_gradient_count=sum(count for count, _, _ in without_gradient),
            without_gradient_place=without_gradient[0][2] if without_gradient else None,
            zero_gradient_count=zero_gradient_count,
            zero_gradient_samples=zero_gradient_samples,
            sample_count=max(self._samples.values(), default=0),
            non_finite_parameters=min(non_finite, key=lambda value: value.step, default=None),
        )

    def _change(self, **changes: Any) -> None:
        self._state = replace(self._state, **changes)

    def _count_losses(self, record: dict[str, Any]) -> None:
        self._change(**{name: int(record[name]) for name in ("losses", "bad_losses", "bad_in_a_row")})

    def _add_loss(self, record: dict[str, Any]) -> None:
        """Store a loss that is NaN or infinite, or the parameters that were so before it."""
        step, place = int(record["step"]), read_place(str(record["place"]))
        if names := _names(record["held"]):
            self._non_finite[0] = self._non_finite.get(0) or NonFiniteValue(
                step=step - 1, value=_value(record), names=names
            )
        else:
            self._change(non_finite_loss=NonFiniteValue(step=step, value=_value(record), place=place))

    def _add_step(self, record: dict[str, Any]) -> None:
        """Store the values that were sampled after one optimizer step."""
        step, optimizer = int(record["step"]), int(record["optimizer"])
        self._change(steps=max(self._state.steps, step))
        self._count_losses(record)
        if optimizer == 0 and record["anon"] is not None:
            gpu = None if record["gpu"] is None else int(record["gpu"])
            self._memory.append(MemorySample(step=step, anonymous_bytes=int(record["anon"]), gpu_bytes=gpu))
        if optimizer == 0 and "waited_s" in record:
            self._data_waits.append(_read_data_wait(record))
        if "times_us" in record:
            self._step_times.append(_read_step_times(step, record["times_us"]))
        self._samples[optimizer] += 1
        place = read_place(str(record.get("never_place", "")))
        op, _, cut = str(record.get("cut", "")).partition(" ")
        self._change(gradient_cut_op=op[:_MAX_TEXT], gradient_cut_place=read_place(cut))
        self._without_gradient[optimizer] = int(record["never"]), _names(record["never_names"]), place
        self._zero_gradients[optimizer] = int(record.get("still", 0))
        earlier = self._non_finite.get(optimizer)
        current = (
            NonFiniteValue(step=step, value=_value(record), names=_names(record["names"])) if record["broken"] else None
        )
        self._non_finite[optimizer] = earlier or current if current else None

    def _add_replica_sample(self, record: dict[str, Any]) -> None:
        replica = self._replicas[int(record["ddp"])]
        sample = ReplicaSample(
            at=str(record["at"]),
            round=int(record.get("round", 0)),
            steps=int(record.get("steps", 0)),
            checksum=str(record["sum"])[:16],
            block_checksums="".join(f"{str(part[0])[-4:]:>4}" for part in record["seen"][:_MAX_PARTS]),
            learning_rates=tuple(float(rate) for rate in record.get("rates", ())[:_MAX_NAMES]),
            optimizer_state=str(record.get("state", ""))[:16],
            bypass_place=read_place(str(record.get("bypass", ""))),
            elements=int(record.get("elements", 0)),
        )
        self._replicas[replica.number] = replace(
            replica,
            samples=(*replica.samples, sample)[-MAX_REPLICA_SAMPLES:],
            blocks=tuple(_parameter_block(part) for part in record["seen"][:_MAX_PARTS]),
            hook=str(record["hook"])[:_MAX_TEXT],
        )

    def _add_exchange(self, record: dict[str, Any]) -> None:
        replica = self._replicas[int(record["ddp"])]
        exchange = Exchange(
            number=int(record["round"]),
            calls=int(record["calls"]),
            elements=int(record["elements"]),
            checksum=str(record["sum"])[:16],
            blocks=tuple(_parameter_block(part) for part in record["seen"][:_MAX_PARTS]),
        )
        self._replicas[replica.number] = replace(
            replica, exchanges=(*replica.exchanges, exchange)[-MAX_REPLICA_SAMPLES:]
        )


def _read_step_times(step: int, times_us: list[int]) -> StepTimes:
    count, *microseconds = map(int, times_us)
    passed_s, min_own_s, max_own_s, backward_s, fetching_s = (time_us / 1e6 for time_us in microseconds)
    return StepTimes(
        step=step,
        count=count,
        passed_s=passed_s,
        min_own_s=min_own_s,
        max_own_s=max_own_s,
        backward_s=backward_s,
        fetching_s=fetching_s,
    )


def _read_data_wait(record: dict[str, Any]) -> DataWait:
    waited_s, passed_s = float(record["waited_s"]), float(record["passed_s"])
    if not (isfinite(waited_s) and isfinite(passed_s)):
        raise ValueError(f"waited {waited_s} of {passed_s} s")
    return DataWait(
        step=int(record["step"]), waited_s=waited_s, elapsed_s=passed_s, place=read_place(str(record["waited_at"]))
    )


def _read_unawaited_call(record: dict[str, Any]) -> UnawaitedCall:
    place = read_place(str(record["place"]))
    return UnawaitedCall(op=str(record["op"])[:_MAX_TEXT], place=place, calls=int(record["calls"]))


def _read_dropped_batches(record: dict[str, Any]) -> DroppedBatches:
    return DroppedBatches(
        type=str(record["type"])[:_MAX_TEXT],
        place=read_place(str(record["place"])),
        batches=int(record["batches"]),
        step=int(record["step"]),
    )


def _read_gradient_arrivals(record: dict[str, Any]) -> GradientArrivals:
    return GradientArrivals(
        model=str(record["model"])[:_MAX_TEXT],
        sample_count=int(record["looks"]),
        zero_gradient_count=int(record["still"]),
        without_gradient=_names(record["never_names"]),
        without_gradient_count=int(record["never"]),
        unset=_names(record["unset"]),
        unset_value=str(record["unset_value"])[:_MAX_TEXT],
    )


def _read_memory_growth(record: dict[str, Any]) -> Iterator[MemoryGrowth]:
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
        order=tuple(str(text)[:16] for text in record.get("order", ())[:_MAX_PARTS]),
        name_set=str(record.get("names", ""))[:16],
        in_ddp=bool(record.get("wrapped", True)),
        was_broadcast=bool(record.get("broadcast", False)),
        reduces_gradients=bool(record.get("reduced", False)),
        kind=str(record.get("kind", ""))[:16],
        type=str(record.get("of", ""))[:_MAX_TEXT],
        wrap_place=read_place(str(record.get("wrap", ""))),
        numel=int(record.get("numel", 0)),
        first_checksum=str(record["sum"])[:16],
    )


def _parameter_block(record: Any) -> ParameterBlock:
    checksum, size, total = record
    return ParameterBlock(checksum=str(checksum)[:16], size=float(size), total=float(total))


def _names(texts: Any) -> tuple[str, ...]:
    return tuple(str(text)[:_MAX_TEXT] for text in texts[:_MAX_NAMES])


def _value(record: dict[str, Any]) -> str:
    return "inf" if record["value"] == "inf" else "nan"


def _thin_out(points: list[Point]) -> list[Point]:
    """Return at most MAX_POINTS of `points`, omitting some of the older ones."""
    while len(points) > MAX_POINTS:
        half = len(points) // 2
        points = points[:half:2] + points[half:]
    return points
