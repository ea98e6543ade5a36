"""Telemetry files in the output directory of a training run.

The files are written line by line, so they are also available after a run was killed. docs/internals/nsa/telemetry.md
describes each file and column.
"""

from __future__ import annotations

import csv
import io
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .config import NSAConfig
from .cost import SavedTensorCounter, expected_bytes, graph_nodes
from .dtypes import ExpectedDtypes, dtype_report
from .memory import AllocatorHistory, gpu_bytes, memory_dump, peak_rss_bytes, rss_bytes
from .observe import without_ending_training
from .ops.dispatch import UsedImplementation
from .samples import EVERY_STEPS, Observer, mean_gates
from .world import CannotRunError, World


@dataclass(kw_only=True)
class StepParts:
    """The time in seconds that the host spent in each part of a training step.

    The GPU may still be computing a part when its time ends.
    """

    fetch_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Add the duration of the `with` block to the field `part`, such as "forward_s"."""
        started_s = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, part, getattr(self, part) + time.perf_counter() - started_s)


# New columns are added at the end, so that programs which read columns by number keep working.
TABLES = {
    "training.csv": (
        "step", "loss", "grad_norm", "tokens_per_s", "seconds", "forward_s", "backward_s", "optimizer_s",
        "peak_rss_bytes", "peak_gpu_bytes", "cpu_s", "learning_rate", "fetch_s",
    ),
    "k_stats.csv": (
        "step", "layer", "mean", "min", "max", "forced_share", "empty_share", "distance_mean", "distance_max",
        "overlap", "entropy_bits", "blocks",
    ),
    "gate_health.csv": (
        "step", "layer", "branch", "mean", "std", "saturated_share", "shut_share", "open_share", "collapsed",
    ),
    "step_cost.csv": (
        "moment", "batch", "seq_len", "layers", "nodes", "saved_bytes", "square_bytes", "expected_bytes",
        "begin_bytes", "peak_bytes",
    ),
    "fallback_counters.csv": ("part", "implementation", "reason", "count", "until_tokens"),
}  # fmt: skip
# Files whose name differs for a sharded model, such as k_stats_fsdp.csv. (The same applies to memory dumps.)
_SHARDED = frozenset({"k_stats.csv", "fallback_counters.csv", "dtypes_report.txt"})


def file_name(name: str, *, sharded: bool) -> str:
    """Return the name of a telemetry file. For some files of sharded models, it is `name` with the suffix _fsdp."""
    stem, dot, ending = name.rpartition(".")
    return f"{stem}_fsdp{dot}{ending}" if sharded and name in _SHARDED else name


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """The model configuration, batch size and parameter bytes, which determine the cost of a training step."""

    config: NSAConfig
    batch: int
    parameter_bytes: int


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The loss and timing of a finished step.

    `loss` is the loss of this rank, and `mean_loss` the mean over all ranks. A field is None if the step does not
    compute it, for example in phase `forward`.
    """

    step: int
    phase: str
    tokens: int  # sum over all ranks
    seconds: float
    cpu_s: float | None = None  # CPU seconds of all threads of this process
    loss: float | None = None
    mean_loss: float | None = None
    grad_norm: float | None = None
    parts: StepParts | None = None
    learning_rate: float | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    def line(self) -> str:
        """Return the line that the training program prints for this step."""
        parts = [f"step {self.step}"]
        if self.mean_loss is not None:
            parts.append(f"loss {self.mean_loss:.4f}")
        if self.grad_norm is not None:
            parts.append(f"grad_norm {self.grad_norm:.3f}")
        return " ".join([*parts, f"{self.tokens_per_s:.0f} tokens/s", f"{self.seconds:.3f} s"])


class NoTelemetry:
    """The telemetry interface, with methods that do nothing. A run with `--telemetry off` uses this class itself."""

    def enter(self, phase: str) -> None:
        """Record that the run enters `phase`, a part of the startup such as loading the data."""

    def begin(self, step: int) -> None:
        """Record that `step` begins."""

    def end(self, result: StepResult) -> None:
        """Record the result of a step."""

    def count_graph(self, shape: StepShape, loss: Tensor, saved_tensors: SavedTensorCounter | None) -> None:
        """Record the size of the autograd graph of a step, after its forward pass.

        `saved_tensors` has counted the bytes saved for the backward pass; it is None if they are not counted. The
        record is on disk before the backward pass starts, so it is available even if this step never finishes.
        """

    def count_step(self, shape: StepShape) -> None:
        """Record the peak memory after a step."""

    def audit_dtypes(self, optimizer: torch.optim.Optimizer, expected: ExpectedDtypes) -> None:
        """Write a report of the dtypes of parameters, gradients, activations and optimizer state."""

    def close(self) -> None:
        """Write the final records, and close the telemetry files."""


class Telemetry(NoTelemetry):
    """Telemetry that is written to files. Most tables are written only by rank 0."""

    def __init__(
        self,
        directory: Path,
        world: World,
        model: nn.Module | None,
        mem_dump_every: int,
        *,
        steps: int,
        compiled: bool = False,
        sharded: bool = False,
        tensorboard: bool = False,
        mem_snapshot: bool = False,
    ) -> None:
        """Open the telemetry files in `directory`.

        `model` is None in phase `data`. A memory dump is written every `mem_dump_every` steps, or never if it is 0.
        `steps` is the number of steps of the whole run. `compiled` and `sharded` describe the model. Raises
        CannotRunError if TensorBoard or an allocator snapshot is requested but not available.
        """
        event_writer = _event_writer() if tensorboard else None
        self._history = AllocatorHistory(world.device) if mem_snapshot else None
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._world, self._model = directory, world, model
        self._mem_dump_every, self._steps, self._sharded = mem_dump_every, steps, sharded
        self._observer = Observer(model, compiled=compiled) if model is not None and world.is_first else None
        self._sampling = self._sampled = False
        self._mean_gates: dict[str, float] | None = None
        self._last_step = 0
        self._heartbeat = (directory / f"heartbeat_rank{world.rank}.jsonl").open("a", encoding="utf-8")
        self._training = self._table("training.csv")
        self._selection = self._table("k_stats.csv")
        self._gates = self._table("gate_health.csv")
        self._costs = self._table("step_cost.csv")
        # Every rank checks that TensorBoard is installed, so that all ranks stop together if it is not. Only rank 0
        # writes.
        self._events = event_writer(str(directory / "tensorboard")) if event_writer and world.is_first else None
        self._begin_bytes = self._peak_bytes()
        self._write_heartbeat(0, "start")
        if mem_dump_every:
            self._dump_memory(0)

    def enter(self, phase: str) -> None:
        self._write_heartbeat(0, phase)

    def begin(self, step: int) -> None:
        """Record that `step` begins. In the first step and every EVERY_STEPS steps, add hooks that sample attention."""
        self._sampling = self._observer is not None and (not self._sampled or step % EVERY_STEPS == 0)
        if self._observer is not None and self._sampling:
            self._observer.watch(dtypes=not self._sampled)
        self._sampled = True

    @without_ending_training()
    def end(self, result: StepResult) -> None:
        self._last_step = result.step
        if self._observer is not None and self._sampling:
            self._sample(self._observer, result.step)
        self._write_heartbeat(result.step, result.phase, result)
        if self._world.is_first:
            self._write_step(result)
        if self._mem_dump_every and result.step % self._mem_dump_every == 0:
            self._dump_memory(result.step)

    def count_graph(self, shape: StepShape, loss: Tensor, saved_tensors: SavedTensorCounter | None) -> None:
        if not self._world.is_first:
            return
        saved_bytes = (None, None) if saved_tensors is None else (saved_tensors.size_bytes, saved_tensors.square_bytes)
        self._write_cost("forward", shape, graph_nodes(loss), *saved_bytes)

    def count_step(self, shape: StepShape) -> None:
        if self._world.is_first:
            self._write_cost("step", shape, None, None, None)

    def _write_cost(self, moment: str, shape: StepShape, *counts: int | None) -> None:
        config = shape.config
        expected = expected_bytes(config, shape.parameter_bytes, shape.batch)
        memory = (expected, self._begin_bytes, self._peak_bytes())
        self._costs.write(moment, shape.batch, config.seq_len, config.layers, *counts, *memory)

    def _peak_bytes(self) -> int:
        """Return the peak memory in bytes: allocated memory on a GPU, resident memory on a CPU."""
        return (gpu_bytes(self._world.device) or {}).get("peak") or peak_rss_bytes()

    @without_ending_training()
    def audit_dtypes(self, optimizer: torch.optim.Optimizer, expected: ExpectedDtypes) -> None:
        if self._observer is None or self._model is None:
            return
        text = dtype_report(self._model, optimizer, self._observer.activation_dtypes(), expected)
        self._path("dtypes_report.txt").write_text(text, encoding="utf-8")

    def close(self) -> None:
        self._write_implementations()
        if self._history is not None:
            self._snapshot_memory(self._last_step)
            self._history.close()
        for file in (self._heartbeat, self._training, self._selection, self._gates, self._costs):
            with without_ending_training():
                file.close()
        if self._events is not None:
            self._events.close()

    def _write_step(self, result: StepResult) -> None:
        parts = result.parts or StepParts()
        row = (result.step, result.mean_loss, result.grad_norm, result.tokens_per_s, result.seconds)
        host = (parts.forward_s, parts.backward_s, parts.optimizer_s) if result.parts else (None, None, None)
        gpu = gpu_bytes(self._world.device) or {}
        memory = (peak_rss_bytes(), gpu.get("peak"))
        fetch_s = parts.fetch_s if result.parts else None
        self._training.write(*row, *host, *memory, result.cpu_s, result.learning_rate, fetch_s)
        if self._events is not None:
            for name, value in _scalars(result, gpu).items():
                self._events.add_scalar(name, value, result.step)

    def _sample(self, observer: Observer, step: int) -> None:
        observer.release()
        for selection in observer.selections():
            self._selection.write(step, *astuple(selection))
        gates = observer.gates()
        for gate in gates:
            self._gates.write(step, *astuple(gate), int(gate.collapsed))
        self._mean_gates = mean_gates(gates) or None
        if self._events is not None:
            for branch, mean in mean_gates(gates).items():
                self._events.add_scalar(f"gates/{branch}", mean, step)
        self._write_implementations()

    @without_ending_training()
    def _write_implementations(self) -> None:
        if self._model is None or not self._world.is_first:
            return
        self._path("fallback_counters.csv").write_text(implementations_csv(self._model), encoding="utf-8")

    @without_ending_training()
    def _write_heartbeat(self, step: int, phase: str, result: StepResult | None = None) -> None:
        device_bytes = gpu_bytes(self._world.device)
        record = {
            "step": step,
            "of_steps": self._steps,
            "phase": phase,
            "loss": result and result.loss,
            "mean_loss": result and result.mean_loss,
            "grad_norm": result and result.grad_norm,
            "tokens_per_s": result and result.tokens_per_s,
            "fetch_s": result and result.parts and result.parts.fetch_s,
            "gates": self._mean_gates,
            "t": time.time(),
            "monotonic_s": time.monotonic(),
            "rss_bytes": rss_bytes(),
            "allocated_bytes": device_bytes and device_bytes["allocated"],
            "reserved_bytes": device_bytes and device_bytes["reserved"],
            "gpu_bytes": device_bytes,
            "gpu_peak_bytes": device_bytes and device_bytes["peak"],
            "pid": os.getpid(),
            "rank": self._world.rank,
            # Reports show "FSDP" for sharded models; "process_group" is the communication backend.
            "backend": "FSDP" if self._sharded else self._world.backend,
            "process_group": self._world.backend,
        }
        self._heartbeat.write(json.dumps(record) + "\n")
        self._heartbeat.flush()

    @without_ending_training()
    def _dump_memory(self, step: int) -> None:
        dump = memory_dump(self._world.device, step=step, rank=self._world.rank)
        stem = self._dump_name(step)
        (self._directory / f"{stem}.txt").write_text(dump.text(), encoding="utf-8")
        (self._directory / f"{stem}.json").write_text(json.dumps(dump.record()) + "\n", encoding="utf-8")
        self._snapshot_memory(step)

    @without_ending_training()
    def _snapshot_memory(self, step: int) -> None:
        if self._history is not None:
            self._history.dump(self._directory / f"mem_snapshot_rank{self._world.rank}_step{step}.pickle")

    def _dump_name(self, step: int) -> str:
        return f"mem_{'fsdp_' if self._sharded else ''}rank{self._world.rank}_step{step}"

    def _path(self, name: str) -> Path:
        return self._directory / file_name(name, sharded=self._sharded)

    def _table(self, name: str) -> _Table:
        path = self._path(name) if self._world.is_first else Path(os.devnull)
        return _Table(path, ",".join(TABLES[name]))


def _event_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise CannotRunError(
            f"--tensorboard: {error}; install the extra nsa-harness[tensorboard], or omit the option"
        ) from None
    return SummaryWriter


def _scalars(result: StepResult, gpu: dict[str, int]) -> dict[str, float]:
    """Return the TensorBoard scalars of a step, keyed by tag."""
    values: dict[str, float | None] = {
        "train/loss": result.mean_loss,
        "train/grad_norm": result.grad_norm,
        "speed/tokens_per_s": result.tokens_per_s,
        "speed/step_s": result.seconds,
        "speed/fetch_s": None if result.parts is None else result.parts.fetch_s,
        "memory/rss_bytes": rss_bytes(),
        "memory/allocated_bytes": gpu.get("allocated"),
        "memory/reserved_bytes": gpu.get("reserved"),
    }
    return {name: float(value) for name, value in values.items() if value is not None}


class _Table:
    """A CSV file that is flushed after every row."""

    def __init__(self, path: Path, header: str) -> None:
        self._file = path.open("a", encoding="utf-8", newline="")
        self._writer = csv.writer(self._file, lineterminator="\n")
        if self._file.tell() == 0:
            self.write(*header.split(","))

    @without_ending_training()
    def write(self, *values: Any) -> None:
        self._writer.writerow([_short(value) for value in values])
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def implementations_csv(model: nn.Module) -> str:
    """Return the content of fallback_counters.csv, which counts the uses of each implementation."""
    runs: dict[str, Counter[UsedImplementation]] = {}
    for name, module in model.named_modules():
        module_runs = getattr(module, "runs", None)
        if isinstance(module_runs, Counter):
            runs.setdefault(name.rsplit(".", 1)[-1], Counter()).update(module_runs)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(TABLES["fallback_counters.csv"])
    for part, implementations in runs.items():
        for used, count in implementations.items():
            writer.writerow(
                [part, used.name, used.reason, count, "" if used.until_tokens is None else used.until_tokens]
            )
    return text.getvalue()


def _short(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else value
