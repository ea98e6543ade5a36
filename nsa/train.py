"""The training program: a plain torchrun program. `python -m nsa.train --help` names every option."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .checkpoints import load_checkpoint, save_checkpoint
from .cost import KeptTensors
from .data import Batches
from .evaluation import Evaluation
from .model import TinyLM, count_parameters
from .observe import GradientTrace, ModuleBackwardTrace, ViewGradientTrace, say, traced_modules
from .ops.dispatch import MissingImplementationError, implementation_of_sliding, like_a_layer
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
from .settings import SHARDED, Phase, Settings, SettingsError, Wrapper, read_settings
from .telemetry import StepParts, StepResult, StepShape, Telemetry, memory_profile
from .warmup import uses_fused_kernels, warm_up
from .world import CannotRunError, World, joined


@dataclass(kw_only=True)
class Traces:
    """The traces that are switched on; None where one is off."""

    gradients: GradientTrace | None = None
    modules: ModuleBackwardTrace | None = None
    buckets: BucketTrace | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything a step needs."""

    settings: Settings
    world: World
    batches: Batches
    bare: TinyLM
    model: nn.Module  # the bare one as its wrapper presents it
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    traces: Traces
    telemetry: Telemetry
    shape: StepShape
    evaluation: Evaluation | None  # None: nothing is held out


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 when the settings or this machine do not allow the run."""
    try:
        settings = read_settings(sys.argv[1:] if arguments is None else arguments, os.environ)
        with joined(settings.device, settings.backend, needs_group=settings.wrapper is not Wrapper.NONE) as world:
            train(settings, world)
    except (SettingsError, CannotRunError, MissingImplementationError) as error:
        for line in str(error).splitlines():
            sys.stderr.write(f"nsa.train: error: {line}\n")
        return 2
    return 0


def train(settings: Settings, world: World) -> None:
    """All steps of a run."""
    torch.manual_seed(settings.seed)
    batches = Batches(settings.data, settings.model, settings.batch, settings.seed, world.device)
    if settings.phase is Phase.DATA:
        _only_data(settings, world, batches)
        return
    run = _prepare(settings, world, batches)
    try:
        first = _first_step(run)
        last = first + settings.steps - 1
        for step in range(first, last + 1):
            if run.traces.buckets is not None:
                run.traces.buckets.speaking = step < first + BucketTrace.STEPS
            with _looked_into(run, step, is_profiled=step == min(first + 1, last)):
                _one_step(run, step, is_first=step == first)
    finally:
        run.telemetry.close()


def _first_step(run: Run) -> int:
    if run.settings.resume is None:
        return 1
    return load_checkpoint(run.settings.resume, run.model, run.settings.model, run.optimizer) + 1


def _prepare(settings: Settings, world: World, batches: Batches) -> Run:
    dtype = compute_dtype(settings, world)
    bare = TinyLM.from_config(settings.model, settings.impl).to(world.device)
    if dtype is torch.float64:
        bare = bare.double()
    implementation_of_sliding(
        settings.impl, *like_a_layer(settings.model, world.device, dtype)
    )  # missing: before anything runs
    if settings.freeze:
        freeze(bare, settings.freeze)
    parameters = count_parameters(bare)
    parameter_bytes = sum(one.numel() * one.element_size() for one in bare.parameters())
    traces = Traces(buckets=BucketTrace(rank=world.rank) if settings.trace_buckets else None)
    order_file = settings.out_dir / f"grad_order_rank{world.rank}.jsonl"
    if settings.trace_grads and settings.wrapper is Wrapper.FSDP1:
        traces.gradients = ViewGradientTrace(bare, order_file)
    telemetry = Telemetry(
        settings.out_dir, world, bare, settings.mem_dump_every, steps=settings.steps, compiled=settings.compile
    )
    if uses_fused_kernels(bare, world.device, dtype):
        _warm_up(settings, world, bare, telemetry)
    model = parallelize(bare, settings, world, traces.buckets)
    if settings.trace_grads and traces.gradients is None:
        held = traces.buckets.taken if traces.buckets is not None else dict
        traces.gradients = GradientTrace(bare.named_parameters(), order_file, held)
    if settings.trace_module_bwd:
        traces.modules = ModuleBackwardTrace(traced_modules(bare, compiled=settings.compile))
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if world.is_first:
        say(_introduction(settings, world, parameters, dtype))
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
        shape=StepShape(config=settings.model, batch=settings.batch, parameter_bytes=parameter_bytes),
        evaluation=_evaluation(settings, world, model),
    )


def _adamw(settings: Settings) -> dict[str, Any]:
    return {"betas": (settings.beta1, settings.beta2), "weight_decay": settings.weight_decay}


def _evaluation(settings: Settings, world: World, model: nn.Module) -> Evaluation | None:
    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        with _autocast(settings, world):
            return loss_of(model(tokens), targets, settings.loss)

    return Evaluation(settings, world, model, loss) if settings.eval_every else None


def _warm_up(settings: Settings, world: World, bare: TinyLM, telemetry: Telemetry) -> None:
    telemetry.enter("warmup")
    done = warm_up(
        bare,
        world,
        batch=settings.batch,
        tokens=settings.model.seq_len,
        autocast=lambda: _autocast(settings, world, sharded_too=True),
    )
    if world.is_first:
        say(f"nsa.train {done}")


def _one_step(run: Run, step: int, *, is_first: bool) -> None:
    settings, started_s, cpu_s = run.settings, time.perf_counter(), time.process_time()
    parts = StepParts()
    run.telemetry.begin(step)
    if run.traces.modules is not None:
        run.traces.modules.step = step
    losses = [_micro_batch(run, step, micro, parts, is_first=is_first) for micro in range(settings.accumulate)]
    loss = torch.stack(losses).mean()
    grad_norm = _finish_gradients(run, step) if settings.phase is not Phase.FORWARD else None
    if settings.phase is Phase.STEP:
        with parts.of("optimizer_s"):
            # Those of a checkpoint are of the run before.
            for group in run.optimizer.param_groups:
                group.update(lr=learning_rate(settings, step), **_adamw(settings))
            run.scaler.step(run.optimizer)
            run.scaler.update()
    mean_loss = run.world.average_over_ranks(loss)
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
        run.telemetry.audit_dtypes(run.optimizer)
        run.telemetry.count_step(run.shape)
    run.optimizer.zero_grad()
    if run.world.is_first and (is_first or step % settings.log_every == 0):
        say(result.line())
    if run.evaluation is not None and step % settings.eval_every == 0:
        run.evaluation.after(step)
    if settings.checkpoint_every and step % settings.checkpoint_every == 0:
        save_checkpoint(settings.out_dir, step, run.model, settings.model, run.optimizer, run.world)


@contextmanager
def _looked_into(run: Run, step: int, *, is_profiled: bool) -> Iterator[None]:
    """A step under autograd's anomaly detection, and under the profiler in one step: the first one is not typical."""
    settings = run.settings
    path = settings.out_dir / f"mem_profile_rank{run.world.rank}_step{step}.txt"
    profiled = memory_profile(path, run.world.device) if settings.profile_memory and is_profiled else nullcontext()
    with profiled, torch.autograd.set_detect_anomaly(settings.detect_anomaly):
        yield


def _micro_batch(run: Run, step: int, micro: int, parts: StepParts, *, is_first: bool) -> Tensor:
    """Forward and backward of one micro-batch; gradients add up over those of a step and are reduced in the last."""
    tokens, targets = run.batches.fetch(step, micro, run.world.rank)
    if is_first and micro == 0:
        say(f"batch rank={run.world.rank} input={tuple(tokens.shape)} target={tuple(targets.shape)} {tokens.dtype}")
    last, counts = micro == run.settings.accumulate - 1, is_first and micro == 0
    kept = KeptTensors(run.bare, run.settings.model.seq_len) if counts and run.settings.step_cost else None
    with nullcontext() if last else without_reduction(run.model, run.settings.wrapper):
        with parts.of("forward_s"), _autocast(run.settings, run.world), kept or nullcontext():
            loss = loss_of(run.model(tokens), targets, run.settings.loss)
        if counts:
            run.telemetry.count_graph(run.shape, loss, kept)
        if run.settings.phase is not Phase.FORWARD:
            with parts.of("backward_s"):
                run.scaler.scale(loss / run.settings.accumulate).backward()
    return loss.detach()


def loss_of(logits_BTV: Tensor, targets_BT: Tensor, kind: str = "cross_entropy") -> Tensor:
    """Mean cross entropy of the next token, or the mean of all logits, in float32 at least."""
    logits = logits_BTV if logits_BTV.dtype is torch.float64 else logits_BTV.float()
    if kind == "mean":
        return logits.mean()
    return functional.cross_entropy(logits.flatten(0, 1), targets_BT.flatten())


def _finish_gradients(run: Run, step: int) -> Tensor:
    """Average where the wrapper did not, report, clip. Returns the norm before clipping."""
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
    # Sharded models hold and use bfloat16 weights themselves, once they are sharded.
    if dtype in (torch.float32, torch.float64) or (settings.wrapper in SHARDED and not sharded_too):
        return nullcontext()
    return torch.autocast(world.device.type, dtype)


def _only_data(settings: Settings, world: World, batches: Batches) -> None:
    """The data pipeline alone: no model is built."""
    telemetry = Telemetry(settings.out_dir, world, None, settings.mem_dump_every, steps=settings.steps)
    try:
        for step in range(1, settings.steps + 1):
            started_s = time.perf_counter()
            tokens = [batches.fetch(step, micro, world.rank)[0] for micro in range(settings.accumulate)]
            count = world.size * sum(part.numel() for part in tokens)
            seconds = time.perf_counter() - started_s
            result = StepResult(step=step, phase=settings.phase, tokens=count, seconds=seconds)
            telemetry.end(result)
            if world.is_first:
                say(result.line())
    finally:
        telemetry.close()


def _introduction(settings: Settings, world: World, parameters: int, dtype: torch.dtype) -> str:
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
