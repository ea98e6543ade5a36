"""The training program. `python -m nsa_attention.train --help` lists its options."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .checkpoints.choose import Start, choose_start
from .checkpoints.rows import forget_rows_after
from .checkpoints.save import Saver, open_saver
from .cost import SavedTensorCounter
from .data import IGNORED, Batch, Batches
from .dtypes import HALF, ExpectedDtypes, expected_dtypes
from .evaluation import Evaluation
from .memory import memory_profile
from .model import TinyLM, count_parameters
from .observe import GradientTrace, ModuleBackwardTrace, ViewGradientTrace, say, traced_modules, without_ending_training
from .ops.dispatch import MissingImplementationError, example_tensors, implementation_for_sliding
from .options import SettingsError
from .parallelize import (
    BucketTrace,
    average_gradients,
    clip_gradients,
    compute_dtype,
    freeze,
    parallelize,
    without_reduction,
)
from .schedule import learning_rate
from .settings import Settings, read_settings
from .telemetry import NoTelemetry, StepParts, StepResult, StepShape, Telemetry
from .values import MEAN, SHARDED, BadShards, Phase, Wrapper
from .warmup import uses_fused_kernels, warm_up
from .world import CannotRunError, RanksDifferError, World, join_ranks

# A step is reported if it waits for data for more than this many seconds and for more than half of its duration.
STARVED_S = 1.0


@dataclass(kw_only=True)
class Traces:
    """The enabled traces of the backward pass."""

    gradients: GradientTrace | None = None
    modules: ModuleBackwardTrace | None = None
    buckets: BucketTrace | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """The settings, model, optimizer and helper objects of a training run."""

    settings: Settings
    world: World
    batches: Batches
    bare: TinyLM
    model: nn.Module  # `bare` after wrapping, for example with DDP
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    traces: Traces
    telemetry: NoTelemetry
    expected: ExpectedDtypes
    shape: StepShape
    evaluation: Evaluation | None  # None without --eval-every


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the training program, and return its exit code.

    The code is 0 after success, and 2 if the settings are wrong or the run is not possible on this machine.
    """
    try:
        settings = read_settings(sys.argv[1:] if arguments is None else arguments, os.environ)
        with join_ranks(settings.device, settings.backend, needs_group=settings.wrapper is not Wrapper.NONE) as world:
            train(settings, world)
    except (SettingsError, CannotRunError, MissingImplementationError) as error:
        for line in str(error).splitlines():
            sys.stderr.write(f"nsa.train: error: {line}\n")
        return 2
    return 0


def train(settings: Settings, world: World) -> None:
    """Run all training steps. With `--phase data`, only read the training data of these steps."""
    torch.manual_seed(settings.seed)
    with closing(Batches(settings, world)) as batches:
        if settings.phase is Phase.DATA:
            _read_data_only(settings, world, batches)
        else:
            _train_steps(settings, world, batches)


def _train_steps(settings: Settings, world: World, batches: Batches) -> None:
    start = choose_start(settings, world)
    if settings.resume is not None and world.is_first:
        forget_rows_after(settings.out_dir, start.step)
    run = _prepare(settings, world, batches)
    try:
        _resume(run, start)
        _wait_for_data(settings, world, batches, run.telemetry)
        first, last = start.step + 1, settings.steps
        with _checkpoints(run, start) as saver:
            for step in range(first, last + 1):
                if run.traces.buckets is not None:
                    run.traces.buckets.is_printing = step < first + BucketTrace.STEPS
                with _debug_modes(run, step, is_profiled=step == min(first + 1, last)):
                    _one_step(run, step, is_first=step == first)
                if saver is not None:
                    saver.check()
                if saver is not None and step % settings.checkpoint_every == 0:
                    saver.save(step, run.model, run.optimizer, run.scaler, run.batches)
    finally:
        run.telemetry.close()
        _report_data_problems(settings, world, batches)


def _resume(run: Run, start: Start) -> None:
    lines = [*start.notes]
    if start.checkpoint is not None:
        # Imported late, because the modules it needs from torch take nearly a second to load.
        from .checkpoints.load import load_checkpoint

        lines += load_checkpoint(start, run.model, run.optimizer, run.scaler, run.batches, run.world)
    if start.step >= run.settings.steps:
        lines.append(f"step {start.step} is finished and --steps is {run.settings.steps}; nothing to do")
    if run.world.is_first:
        for line in lines:
            say(f"nsa.train {line}")


def _checkpoints(run: Run, start: Start) -> AbstractContextManager[Saver | None]:
    return open_saver(run.settings, run.world, start.step) if run.settings.checkpoint_every else nullcontext()


def _prepare(settings: Settings, world: World, batches: Batches) -> Run:
    dtype = compute_dtype(settings, world)
    bare = TinyLM.from_config(settings.model, settings.impl).to(world.device)
    if dtype is torch.float64:
        bare = bare.double()
    implementation_for_sliding(
        settings.impl, *example_tensors(settings.model, world.device, dtype)
    )  # raises here, before anything runs
    if settings.freeze:
        freeze(bare, settings.freeze)
    parameters = count_parameters(bare)
    parameter_bytes = sum(parameter.numel() * parameter.element_size() for parameter in bare.parameters())
    traces = Traces(buckets=BucketTrace(rank=world.rank) if settings.trace_buckets else None)
    order_file = settings.out_dir / f"grad_order_rank{world.rank}.jsonl"
    if settings.trace_grads and settings.wrapper is Wrapper.FSDP1:
        traces.gradients = ViewGradientTrace(bare, order_file)
    telemetry = _telemetry(settings, world, bare)
    if uses_fused_kernels(bare, world.device, dtype):
        _warm_up(settings, world, bare, telemetry)
    model = parallelize(bare, settings, world, traces.buckets)
    if settings.trace_grads and traces.gradients is None:
        take_parameters = traces.buckets.take_parameters if traces.buckets is not None else dict
        traces.gradients = GradientTrace(bare.named_parameters(), order_file, take_parameters)
    if settings.trace_module_bwd:
        traces.modules = ModuleBackwardTrace(traced_modules(bare, compiled=settings.compile))
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if world.is_first:
        say(_description(settings, world, parameters, dtype))
    return Run(
        settings=settings,
        world=world,
        batches=batches,
        bare=bare,
        model=model,
        optimizer=torch.optim.AdamW(trainable, lr=settings.learning_rate, **_adamw(settings)),
        scaler=torch.amp.GradScaler(world.device.type, enabled=dtype is torch.float16),
        traces=traces,
        telemetry=telemetry,
        expected=expected_dtypes(dtype, autocast=dtype in HALF and settings.wrapper not in SHARDED),
        shape=StepShape(config=settings.model, batch=settings.batch, parameter_bytes=parameter_bytes),
        evaluation=_evaluation(settings, world, model),
    )


def _adamw(settings: Settings) -> dict[str, Any]:
    return {"betas": (settings.beta1, settings.beta2), "weight_decay": settings.weight_decay}


def _evaluation(settings: Settings, world: World, model: nn.Module) -> Evaluation | None:
    def loss(batch: Batch) -> Tensor:
        with _autocast(settings, world):
            logits = _logits(model, batch)
            if settings.loss == MEAN:
                return loss_of(logits, batch.targets, MEAN) * batch.counted
            return summed_loss(logits, batch.targets)

    return Evaluation(settings, world, model, loss) if settings.eval_every else None


def _telemetry(settings: Settings, world: World, model: TinyLM | None) -> NoTelemetry:
    """Create the output directory, and return the telemetry of the run, or NoTelemetry if no file can be opened."""
    settings.out_dir.mkdir(parents=True, exist_ok=True)
    if not settings.telemetry:
        return NoTelemetry()
    with without_ending_training():
        return Telemetry(
            settings.out_dir,
            world,
            model,
            settings.mem_dump_every,
            steps=settings.steps,
            compiled=settings.compile,
            sharded=settings.wrapper in SHARDED,
            tensorboard=settings.tensorboard,
            mem_snapshot=settings.mem_snapshot,
        )
    return NoTelemetry()


def _warm_up(settings: Settings, world: World, bare: TinyLM, telemetry: NoTelemetry) -> None:
    telemetry.enter("warmup")
    summary = warm_up(
        bare,
        world,
        batch=settings.batch,
        tokens=settings.model.seq_len,
        autocast=lambda: _autocast(settings, world, sharded_too=True),
    )
    if world.is_first:
        say(f"nsa.train {summary}")


def _one_step(run: Run, step: int, *, is_first: bool) -> None:
    settings, started_s, cpu_s = run.settings, time.perf_counter(), time.process_time()
    parts = StepParts()
    run.telemetry.begin(step)
    if run.traces.modules is not None:
        run.traces.modules.step = step
    batches = _fetch_batches(run.batches, settings.accumulate, parts)
    if is_first:
        say(_shape_line(run.world, batches[0]))
    target_count = None if settings.loss == MEAN else _mean_target_count(run.world, batches)
    losses = [
        _micro_batch(run, batch, micro, parts, target_count, is_first=is_first) for micro, batch in enumerate(batches)
    ]
    loss = torch.stack(losses).mean() if target_count is None else torch.stack(losses).sum()
    grad_norm = _finish_gradients(run, step) if settings.phase is not Phase.FORWARD else None
    if settings.phase is Phase.STEP:
        with parts.measure("optimizer_s"):
            # A loaded checkpoint has restored the previous run's learning rate and betas, so set them again.
            for group in run.optimizer.param_groups:
                group.update(lr=learning_rate(settings, step), **_adamw(settings))
            run.scaler.step(run.optimizer)
            run.scaler.update()
    mean_loss = _mean_over_ranks(run, loss)
    result = StepResult(
        step=step,
        phase=settings.phase,
        tokens=run.world.size * settings.accumulate * settings.batch * settings.model.seq_len,
        loss=float(loss),
        mean_loss=float(mean_loss),
        grad_norm=None if grad_norm is None else float(grad_norm),
        seconds=time.perf_counter() - started_s,
        cpu_s=time.process_time() - cpu_s,
        parts=parts,
        learning_rate=learning_rate(settings, step) if settings.phase is Phase.STEP else None,
    )
    run.telemetry.end(result)
    if is_first:
        run.telemetry.audit_dtypes(run.optimizer, run.expected)
        run.telemetry.count_step(run.shape)
    run.optimizer.zero_grad()
    if run.world.is_first and (is_first or step % settings.log_every == 0):
        say(result.line())
    if parts.fetch_s > max(STARVED_S, result.seconds / 2):
        waited = f"waited {parts.fetch_s:.1f} s of {result.seconds:.1f} s for its batch"
        say(f"[DATA] rank={run.world.rank} step {step} {waited}")
    if run.evaluation is not None and step % settings.eval_every == 0:
        run.evaluation.evaluate(step)


def _mean_over_ranks(run: Run, loss: Tensor) -> Tensor:
    """Return the mean loss over all ranks.

    With `--bad-shards skip`, also check that all ranks are at the same data position. If they are not, every rank
    raises CannotRunError.
    """
    position_digest = run.batches.position_digest() if run.settings.bad_shards is BadShards.SKIP else None
    try:
        return run.world.average_over_ranks(loss, expected_equal=position_digest)
    except RanksDifferError:
        position = f"rank {run.world.rank} is at {run.batches.position_text()}"
        skipped = run.batches.problems.sentence() or "nothing skipped"
        message = f"--bad-shards skip: the ranks no longer read the same data: {position}; {skipped}"
        raise CannotRunError(message) from None


@contextmanager
def _debug_modes(run: Run, step: int, *, is_profiled: bool) -> Iterator[None]:
    """Run the `with` block with a memory profiler and autograd's anomaly detection, if the settings enable them."""
    settings = run.settings
    path = settings.out_dir / f"mem_profile_rank{run.world.rank}_step{step}.txt"
    profiler = memory_profile(path, run.world.device) if settings.profile_memory and is_profiled else nullcontext()
    with profiler, torch.autograd.set_detect_anomaly(settings.detect_anomaly):
        yield


def _fetch_batches(batches: Batches, count: int, parts: StepParts) -> list[Batch]:
    with parts.measure("fetch_s"):
        return [batches.fetch() for _ in range(count)]


def _shape_line(world: World, batch: Batch) -> str:
    tokens, targets, lengths, _ = batch
    documents = "" if lengths is None else f" documents={len(lengths)}"
    return (
        f"batch rank={world.rank} input={tuple(tokens.shape)} target={tuple(targets.shape)} {tokens.dtype}{documents}"
    )


def _mean_target_count(world: World, batches: Sequence[Batch]) -> float | None:
    """Return the number of targets that count in the loss, averaged over the ranks, or None if all targets count."""
    # With packed documents, the target after a document does not count, so ranks and micro-batches have different
    # numbers of targets. Dividing by the mean number gives the loss that one process would compute for the batches of
    # all ranks together.
    if all(batch.lengths is None for batch in batches):
        return None
    count = torch.tensor(float(sum(batch.counted for batch in batches)), dtype=torch.float64, device=world.device)
    return max(1.0, float(world.average_over_ranks(count)))


def _micro_batch(
    run: Run, batch: Batch, micro: int, parts: StepParts, target_count: float | None, *, is_first: bool
) -> Tensor:
    """Run the forward and backward pass of one micro-batch, and return its loss.

    Gradients accumulate over the micro-batches of a step, and the last micro-batch reduces them across ranks. The loss
    is the mean over the targets, or with `target_count` the sum over the targets divided by `target_count`.
    """
    last, is_counted = micro == run.settings.accumulate - 1, is_first and micro == 0
    saved_tensors = (
        SavedTensorCounter(run.bare, run.settings.model.seq_len) if is_counted and run.settings.step_cost else None
    )
    with nullcontext() if last else without_reduction(run.model, run.settings.wrapper):
        with parts.measure("forward_s"), _autocast(run.settings, run.world), saved_tensors or nullcontext():
            logits = _logits(run.model, batch)
            if target_count is None and batch.counted:
                loss = loss_of(logits, batch.targets, run.settings.loss)
                step_loss = loss / run.settings.accumulate
            else:  # without any target, the loss is 0, and the mean over its targets would be NaN
                step_loss = loss = summed_loss(logits, batch.targets) / (target_count or 1.0)
        if is_counted:
            run.telemetry.count_graph(run.shape, loss, saved_tensors)
        if run.settings.phase is not Phase.FORWARD:
            with parts.measure("backward_s"):
                run.scaler.scale(step_loss).backward()
    return loss.detach()


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch.tokens) if batch.lengths is None else model(batch.tokens, batch.lengths)


def loss_of(logits_BTV: Tensor, targets_BT: Tensor, kind: str = "cross_entropy") -> Tensor:
    """Return the mean next-token cross entropy for logits [B, T, V] and targets [B, T].

    With `kind` "mean", the result is the mean of all logits instead.
    """
    logits = _wide(logits_BTV)
    if kind == MEAN:
        return logits.mean()
    return functional.cross_entropy(logits.flatten(0, 1), targets_BT.flatten())


def summed_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Return the sum of the cross entropy over all targets that are not IGNORED."""
    logits, targets = _wide(logits_BTV).flatten(0, 1), targets_BT.flatten()
    return functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype is torch.float64 else logits.float()


def _finish_gradients(run: Run, step: int) -> Tensor:
    """Average, trace, unscale and clip the gradients of a step, and return their norm before clipping."""
    if run.settings.barrier_after_backward:
        run.world.wait_for_all()
    if run.settings.wrapper is Wrapper.MANUAL:
        average_gradients(run.bare, run.world)
    if run.traces.gradients is not None:
        run.traces.gradients.after_backward(step)
    run.scaler.unscale_(run.optimizer)
    return clip_gradients(run.model, run.settings.wrapper, run.settings.clip or math.inf)


def _autocast(settings: Settings, world: World, *, sharded_too: bool = False) -> AbstractContextManager[object]:
    dtype = compute_dtype(settings, world)
    # Sharded models convert weights to bfloat16 themselves. The warm-up runs before sharding and needs autocast.
    if dtype in (torch.float32, torch.float64) or (settings.wrapper in SHARDED and not sharded_too):
        return nullcontext()
    return torch.autocast(world.device.type, dtype)


def _read_data_only(settings: Settings, world: World, batches: Batches) -> None:
    telemetry = _telemetry(settings, world, None)
    try:
        _wait_for_data(settings, world, batches, telemetry)
        for step in range(1, settings.steps + 1):
            parts = StepParts()
            micro_batches = _fetch_batches(batches, settings.accumulate, parts)
            count = world.size * sum(batch.tokens.numel() for batch in micro_batches)
            result = StepResult(step=step, phase=settings.phase, tokens=count, seconds=parts.fetch_s, parts=parts)
            telemetry.end(result)
            if world.is_first:
                say(result.line())
    finally:
        telemetry.close()
        _report_data_problems(settings, world, batches)


def _wait_for_data(settings: Settings, world: World, batches: Batches, telemetry: NoTelemetry) -> None:
    if batches.workers:
        telemetry.enter("loader")
    ready_s = batches.wait_for_first()
    _write_report(settings, world, batches)
    if world.is_first:
        say(f"nsa.train loader ready in {ready_s:.2f} s: {batches.description()}")


def _report_data_problems(settings: Settings, world: World, batches: Batches) -> None:
    _write_report(settings, world, batches)
    problems = batches.problems.sentence()
    if problems is not None and world.is_first:
        say(f"nsa.train data: {problems}")


def _write_report(settings: Settings, world: World, batches: Batches) -> None:
    path = settings.out_dir / f"loader_rank{world.rank}.json"
    if not settings.telemetry:
        return
    with without_ending_training():
        path.write_text(json.dumps(batches.summary(), indent=1) + "\n", encoding="utf-8")


def _description(settings: Settings, world: World, parameters: int, dtype: torch.dtype) -> str:
    model = settings.model
    layers = sorted(settings.gc.of(model.layers))
    checkpointed = f"{settings.gc_mode} checkpointing in layers {layers}" if layers else "no checkpointing"
    return (
        f"nsa.train shape {model.name}: {model.attention} {'+'.join(model.branches)}, {model.layers} layers, "
        f"dim {model.dim}, T {model.seq_len}, {parameters} parameters, {str(dtype).removeprefix('torch.')}\n"
        f"nsa.train {world.size} ranks, wrapper {settings.wrapper}, backend {world.backend}, "
        f"device {world.device.type}, {checkpointed}, data {settings.data}, seed {settings.seed}"
    )


if __name__ == "__main__":
    sys.exit(main())
