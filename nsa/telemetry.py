"""The files a run leaves in its output directory, and how much memory it uses.

They are written line by line, so that a killed run has them too.
"""

from __future__ import annotations

import csv
import gc
import io
import json
import os
import resource
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.profiler import ProfilerActivity, profile

from .config import NSAConfig
from .cost import KeptTensors, expected_bytes, graph_nodes
from .observe import EVERY_STEPS, Observer
from .ops.dispatch import UsedImplementation
from .world import World

_LARGEST = 20
_OPERATORS = 10


def rss_bytes() -> int:
    """Resident memory of this process; 0 where the system does not say."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * resource.getpagesize()


def peak_rss_bytes() -> int:
    """Highest resident memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def gpu_bytes(device: torch.device) -> dict[str, int] | None:
    """Allocated, reserved and peak memory on the GPU; None on a CPU. Asks the allocator, not the device."""
    if device.type != "cuda":
        return None
    return {
        "allocated": torch.cuda.memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "peak": torch.cuda.max_memory_allocated(device),
    }


def memory_text(device: torch.device) -> str:
    """Totals, then the largest groups of live tensors of equal shape. Walks all objects: for dumps, not for steps."""
    lines = [f"rss_bytes {rss_bytes()}", f"peak_rss_bytes {peak_rss_bytes()}"]
    lines += [f"gpu_{name}_bytes {size}" for name, size in (gpu_bytes(device) or {}).items()]
    lines += ["", "bytes count tensor"]
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for shape, size in _live_tensors():
        sizes[shape] += size
        counts[shape] += 1
    lines += [f"{size} {counts[shape]} {shape}" for shape, size in sizes.most_common(_LARGEST)]
    if device.type == "cuda":
        lines += ["", torch.cuda.memory_summary(device)]
    return "\n".join(lines) + "\n"


@contextmanager
def memory_profile(path: Path, device: torch.device) -> Iterator[None]:
    """Writes the operators that took most memory in here, each shape of its inputs a row, by torch's profiler."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities, profile_memory=True, record_shapes=True) as profiler:
        yield
    order = "self_cuda_memory_usage" if device.type == "cuda" else "self_cpu_memory_usage"
    rows = profiler.key_averages(group_by_input_shape=True)
    path.write_text(rows.table(sort_by=order, row_limit=_OPERATORS) + "\n", encoding="utf-8")


def _live_tensors() -> list[tuple[str, int]]:
    seen, found = set(), []
    for thing in gc.get_objects():
        # type() and not isinstance(): some objects run code when asked for their class.
        if not issubclass(type(thing), torch.Tensor) or issubclass(type(thing), FakeTensor):
            continue
        if thing.layout is not torch.strided:
            continue
        storage = thing.untyped_storage()
        try:
            address = storage.data_ptr()
        except RuntimeError:
            continue  # a sharded tensor: its part is in the list by itself
        if address in seen:
            continue
        seen.add(address)
        found.append((f"{tuple(thing.shape)} {thing.dtype} {thing.device}", storage.nbytes()))
    return found


@dataclass(kw_only=True)
class StepParts:
    """Seconds of the host in the parts of a step; a GPU may still be at work when a part ends."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        """What runs in here belongs to `forward_s`, `backward_s` or `optimizer_s`."""
        started_s = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, part, getattr(self, part) + time.perf_counter() - started_s)


TRAINING_COLUMNS = (
    "step", "loss", "grad_norm", "tokens_per_s", "seconds", "forward_s", "backward_s", "optimizer_s",
    "peak_rss_bytes", "peak_gpu_bytes", "cpu_s", "learning_rate",
)  # fmt: skip


COST_COLUMNS = (
    "moment", "batch", "seq_len", "layers", "nodes", "saved_bytes", "square_bytes", "expected_bytes", "begin_bytes",
    "peak_bytes",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """Of what a step's cost depends on, besides the program."""

    config: NSAConfig
    batch: int
    parameter_bytes: int


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One finished step. `loss` is this rank's, `mean_loss` that of all ranks; None where the phase has none."""

    step: int
    phase: str
    tokens: int  # of all ranks together
    seconds: float
    cpu_s: float | None = None  # of all threads of this process
    loss: float | None = None
    mean_loss: float | None = None
    grad_norm: float | None = None
    parts: StepParts | None = None
    learning_rate: float | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    def line(self) -> str:
        """The line people read."""
        parts = [f"step {self.step}"]
        if self.mean_loss is not None:
            parts.append(f"loss {self.mean_loss:.4f}")
        if self.grad_norm is not None:
            parts.append(f"grad_norm {self.grad_norm:.3f}")
        return " ".join([*parts, f"{self.tokens_per_s:.0f} tokens/s", f"{self.seconds:.3f} s"])


class Telemetry:
    """Every rank writes its heartbeat and memory; rank 0 writes the tables that are the same everywhere."""

    def __init__(
        self,
        directory: Path,
        world: World,
        model: nn.Module | None,
        mem_dump_every: int,
        *,
        steps: int,
        compiled: bool = False,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._world, self._model = directory, world, model
        self._mem_dump_every, self._steps = mem_dump_every, steps
        self._observer = Observer(model, compiled=compiled) if model is not None and world.is_first else None
        self._sampling = self._sampled = False
        self._heartbeat = (directory / f"heartbeat_rank{world.rank}.jsonl").open("a", encoding="utf-8")
        self._training = self._table("training.csv", ",".join(TRAINING_COLUMNS))
        self._selection = self._table("k_stats.csv", "step,layer,mean,min,max,forced_share,empty_share")
        self._gates = self._table("gate_health.csv", "step,layer,branch,mean,std,saturated_share")
        self._costs = self._table("step_cost.csv", ",".join(COST_COLUMNS))
        self._begin_bytes = self._peak_bytes()
        self._beat(0, "start")
        if mem_dump_every:
            self._dump_memory(0)

    def enter(self, phase: str) -> None:
        """A phase before the first step."""
        self._beat(0, phase)

    def begin(self, step: int) -> None:
        """The first step and every tenth are looked into."""
        self._sampling = self._observer is not None and (not self._sampled or step % EVERY_STEPS == 0)
        self._sampled = True
        if self._observer is not None and self._sampling:
            self._observer.watch()

    def end(self, result: StepResult) -> None:
        self._beat(result.step, result.phase, result)
        if self._world.is_first:
            row = (result.step, result.mean_loss, result.grad_norm, result.tokens_per_s, result.seconds)
            parts = astuple(result.parts) if result.parts else (None, None, None)
            peak_gpu_bytes = (gpu_bytes(self._world.device) or {}).get("peak")
            self._training.write(*row, *parts, peak_rss_bytes(), peak_gpu_bytes, result.cpu_s, result.learning_rate)
        if self._observer is not None and self._sampling:
            self._sample(self._observer, result.step)
        if self._mem_dump_every and result.step % self._mem_dump_every == 0:
            self._dump_memory(result.step)

    def count_graph(self, shape: StepShape, loss: Tensor, kept: KeptTensors | None) -> None:
        """What the forward pass of a step has made, before the backward pass takes it apart. `kept`: if it was asked.

        It is on disk when the backward pass begins: of a step that takes too long, this is known.
        """
        if not self._world.is_first:
            return
        counted = (graph_nodes(loss), kept and kept.size_bytes, kept and kept.square_bytes)
        self._write_cost("forward", shape, *counted)

    def count_step(self, shape: StepShape) -> None:
        """How much memory the whole step took at most."""
        if self._world.is_first:
            self._write_cost("step", shape, None, None, None)

    def _write_cost(self, moment: str, shape: StepShape, *counted: int | None) -> None:
        config = shape.config
        expected = expected_bytes(config, shape.parameter_bytes, shape.batch)
        memory = (expected, self._begin_bytes, self._peak_bytes())
        self._costs.write(moment, shape.batch, config.seq_len, config.layers, *counted, *memory)

    def _peak_bytes(self) -> int:
        """On a GPU what torch has given out at most, on a CPU the highest resident memory of the process."""
        return (gpu_bytes(self._world.device) or {}).get("peak") or peak_rss_bytes()

    def audit_dtypes(self, optimizer: torch.optim.Optimizer) -> None:
        """Which dtypes parameters, gradients, activations and optimizer state really have."""
        if self._observer is None or self._model is None:
            return
        text = dtypes_text(self._model, optimizer, self._observer.activation_dtypes())
        (self._directory / "dtypes_report.txt").write_text(text, encoding="utf-8")

    def close(self) -> None:
        self._count_implementations()
        for file in (self._heartbeat, self._training, self._selection, self._gates, self._costs):
            file.close()

    def _sample(self, observer: Observer, step: int) -> None:
        observer.release()
        for selection in observer.selections():
            self._selection.write(step, *astuple(selection))
        for gate in observer.gates():
            self._gates.write(step, *astuple(gate))
        self._count_implementations()

    def _count_implementations(self) -> None:
        if self._model is None or not self._world.is_first:
            return
        path = self._directory / "fallback_counters.csv"
        path.write_text(implementations_csv(self._model), encoding="utf-8")

    def _beat(self, step: int, phase: str, result: StepResult | None = None) -> None:
        device_bytes = gpu_bytes(self._world.device)
        record = {
            "step": step,
            "of_steps": self._steps,
            "phase": phase,
            "loss": result and result.loss,
            "mean_loss": result and result.mean_loss,
            "tokens_per_s": result and result.tokens_per_s,
            "t": time.time(),
            "monotonic_s": time.monotonic(),
            "rss_bytes": rss_bytes(),
            "gpu_bytes": device_bytes,
            "gpu_peak_bytes": device_bytes and device_bytes["peak"],
            "pid": os.getpid(),
            "rank": self._world.rank,
            "backend": self._world.backend,
        }
        self._heartbeat.write(json.dumps(record) + "\n")
        self._heartbeat.flush()

    def _dump_memory(self, step: int) -> None:
        path = self._directory / f"mem_rank{self._world.rank}_step{step}.txt"
        path.write_text(memory_text(self._world.device), encoding="utf-8")

    def _table(self, name: str, header: str) -> _Table:
        return _Table(self._directory / name, header) if self._world.is_first else _Table(Path(os.devnull), header)


class _Table:
    """A CSV file whose rows are on disk as soon as they are written. A resumed run goes on below the old rows."""

    def __init__(self, path: Path, header: str) -> None:
        self._file = path.open("a", encoding="utf-8", newline="")
        self._writer = csv.writer(self._file, lineterminator="\n")
        if self._file.tell() == 0:
            self.write(*header.split(","))

    def write(self, *values: Any) -> None:
        self._writer.writerow([_short(value) for value in values])
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def implementations_csv(model: nn.Module) -> str:
    """How often which implementation ran, over all layers, and why that one.

    A row for each branch, for the selection of blocks and for the mixing by the gates.
    """
    runs: dict[str, Counter[UsedImplementation]] = {}
    for name, module in model.named_modules():
        counted = getattr(module, "runs", None)
        if isinstance(counted, Counter):
            runs.setdefault(name.rsplit(".", 1)[-1], Counter()).update(counted)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["part", "implementation", "reason", "count", "until_tokens"])
    for part, implementations in runs.items():
        for used, count in implementations.items():
            writer.writerow([part, used.name, used.reason, count, "" if used.until is None else used.until])
    return text.getvalue()


def dtypes_text(model: nn.Module, optimizer: torch.optim.Optimizer, activations: dict[str, str]) -> str:
    """One line per kind of tensor and dtype with the number of tensors, then the activations by module."""
    parameters = list(model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    kinds: dict[str, list[Tensor]] = {
        "parameters": [*parameters],
        "buffers": list(model.buffers()),
        "gradients": [parameter.grad for parameter in parameters if parameter.grad is not None],
        "optimizer": states,
    }
    lines = []
    for kind, tensors in kinds.items():
        counts = Counter(str(tensor.dtype) for tensor in tensors)
        lines += [f"{kind} {dtype} {count}" for dtype, count in sorted(counts.items())]
    lines += [f"activation {dtype} {name}" for name, dtype in activations.items()]
    return "\n".join(lines) + "\n"


def _short(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else value
