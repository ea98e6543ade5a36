"""Turn a scenario for nsa.train into the launch of a process on this machine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from nsa_harness.core.plan import Launcher, RunSpec
from nsa_harness.core.report import MachineFacts
from nsa_harness.core.scenario.env_names import effect_notes, name_mistakes, sound_environment
from nsa_harness.core.scenario.layers import layers_of
from nsa_harness.core.scenario.program import Contradictions, OwnProgram, Surroundings
from nsa_harness.core.scenario.resolve import expectation, gpus_text
from nsa_harness.core.scenario.scenario import (
    Attention,
    Backend,
    Checkpointing,
    CommHook,
    Dtype,
    Implementation,
    Phase,
    Scenario,
    ShapeName,
    Wrapper,
)
from nsa_harness.subject.environment import OVERRULED
from nsa_harness.subject.options import SHAPES, MachineChoice, nsa_options, subject_line

_DDP_ONLY = ("static_graph", "find_unused_parameters", "broadcast_buffers", "gradient_as_bucket_view", "bucket_cap_mb")
# Implementations that run only on a GPU, each with a phrase that a number of GPUs may follow.
_ON_A_GPU = {
    Implementation.TRITON: "the fused kernels need",
    Implementation.TORCH: "torch's flash attention with a window needs",
    Implementation.FLASH: "flash-attn needs",
}


def machine_choice(scenario: Scenario, facts: MachineFacts) -> MachineChoice:
    """Return the values that replace the `auto` settings of a scenario on this machine."""
    model, train, ranks = scenario.model, scenario.train, scenario.run.ranks
    on_gpu = len(facts.gpus) >= ranks
    shape = model.shape if model.shape is not ShapeName.AUTO else (ShapeName.PRODUCTION if on_gpu else ShapeName.CI)
    backend = scenario.needs.backend
    if backend is Backend.AUTO:
        backend = Backend.NCCL if on_gpu else Backend.GLOO
    default_dtype = SHAPES[shape].dtype if on_gpu else Dtype.FLOAT32.value
    return MachineChoice(
        shape=shape.value,
        layers=model.layers or SHAPES[shape].layers,
        seq_len=model.seq_len or SHAPES[shape].seq_len,
        steps=train.steps if on_gpu else min(train.steps, train.cpu_steps or train.steps),
        batch=train.batch or SHAPES[shape].batch,
        dtype=default_dtype if model.dtype is Dtype.AUTO else model.dtype.value,
        backend=backend.value,
        device="cuda" if on_gpu else "cpu",
    )


def contradictions(scenario: Scenario) -> Contradictions:
    yield from _model_contradictions(scenario)
    yield from _training(scenario)
    yield from _telemetry(scenario)
    yield from ((("run", "env", name), message) for name, message in name_mistakes(scenario.run.env, OVERRULED))


# Implementations that compute only one branch; the others use auto.
_ONE_BRANCH = {Implementation.TORCH: "win", Implementation.FLASH: "win", Implementation.PER_TOKEN: "sel"}


def _model_contradictions(scenario: Scenario) -> Contradictions:
    model = scenario.model
    if model.attention is Attention.NSA:
        alone = _ONE_BRANCH.get(model.impl)
        if alone is not None and model.branch != "all" and alone not in model.branch.split("+"):
            yield (("model", "impl"), f"computes {alone} alone, and branch is {model.branch}; remove one of them")
        return
    words = f"attention is {model.attention}"
    if model.branch != "all":
        yield ("model", "branch"), f"{words}, which has no branches; remove it or set model.attention: nsa"
    if model.impl is not Implementation.AUTO:
        yield ("model", "impl"), f"{words}, which has one implementation; remove it"
    if model.stop_gradient_gates:
        yield ("model", "stop_gradient_gates"), f"{words}, which has no gates; remove it or set model.attention: nsa"


def _training(scenario: Scenario) -> Contradictions:
    wrapper, train = scenario.parallel.wrapper, scenario.train
    if scenario.parallel.comm_hook is not CommHook.NONE and wrapper is not Wrapper.DDP:
        yield ("parallel", "comm_hook"), f"a hook of DDP, and the wrapper is {wrapper}; set parallel.wrapper: ddp"
    if scenario.model.dtype is Dtype.FLOAT16 and wrapper in (Wrapper.FSDP, Wrapper.FSDP1):
        yield ("model", "dtype"), f"float16 needs loss scaling, which {wrapper} does not share; use bfloat16"
    if train.phase is Phase.DATA and (train.resume or train.checkpoint_every):
        key = "resume" if train.resume else "checkpoint_every"
        yield ("train", key), "the phase is data, which has no model; set train.phase: step"


_PARTS_OF_TELEMETRY = ("mem_dump_every", "step_cost", "mem_snapshot", "tensorboard")


def _telemetry(scenario: Scenario) -> Contradictions:
    if not scenario.trace.telemetry:
        for name in _PARTS_OF_TELEMETRY:
            if getattr(scenario.trace, name):
                yield ("trace", name), "trace.telemetry is false, and this is part of it; keep one"


def fault_outside_model(scenario: Scenario, facts: MachineFacts) -> Contradictions:
    """Yield (key, error message) for each setting, such as that of a fault, that names a missing layer or step."""
    choice, fault = machine_choice(scenario, facts), scenario.fault
    model = f"the model has layers 0-{choice.layers - 1} (shape {choice.shape}); set model.layers"
    highest = max(layers_of(scenario.gc.layers, choice.layers), default=0)
    if highest >= choice.layers:
        yield ("gc", "layers"), f"{scenario.gc.layers} names layer {highest}; {model}"
    if fault is not None and fault.layer is not None and fault.layer >= choice.layers:
        yield ("fault", "layer"), f"got {fault.layer}; {model}"
    if fault is not None and fault.step > choice.steps:
        yield ("fault", "step"), f"got {fault.step}; on a CPU there are {choice.steps} steps (train.cpu_steps)"


def missing_need(scenario: Scenario, facts: MachineFacts) -> str | None:
    have, ranks = len(facts.gpus), scenario.run.ranks
    if scenario.trace.mem_snapshot and have < ranks:
        return f"trace.mem_snapshot needs a GPU for each of {ranks} ranks; this machine has {gpus_text(have)}"
    if scenario.model.impl in _ON_A_GPU and have < ranks:
        return f"{_ON_A_GPU[scenario.model.impl]} a GPU for each of {ranks} ranks; this machine has {gpus_text(have)}"
    return None


def launch(spec: RunSpec, scenario: Scenario, facts: MachineFacts, surroundings: Surroundings) -> RunSpec:
    """Return the complete spec for a run of nsa.train. `spec` has what does not depend on the machine."""
    choice = machine_choice(scenario, facts)
    words = (surroundings.subject_dir, *nsa_options(scenario, choice), *scenario.run.args)
    alone = scenario.run.ranks == 1 and scenario.parallel.wrapper is Wrapper.NONE
    ddp = scenario.parallel.wrapper is Wrapper.DDP
    env, env_notes = sound_environment(scenario.run.env, torch=facts.torch, backend=choice.backend, ddp=ddp)
    return replace(
        spec,
        env=tuple(sorted(env.items())),
        expect=expectation(scenario, math.log(SHAPES[choice.shape].vocab), steps=choice.steps, device=choice.device),
        launcher=Launcher.PLAIN if alone else Launcher.TORCHRUN,
        program=(surroundings.python, *words) if alone else words,
        backend=choice.backend,
        device=choice.device,
        subject=subject_line(scenario, choice),
        settings=_as_launched(spec.settings, choice),
        chosen=_chosen_values(choice),
        notes=(*_notes(scenario, facts, choice), *env_notes),
        not_covered=_not_covered(scenario, choice),
    )


def _as_launched(settings: tuple[tuple[str, str], ...], choice: MachineChoice) -> tuple[tuple[str, str], ...]:
    """Return the scenario's settings with the number of training steps replaced with the number actually run."""
    return tuple((key, str(choice.steps) if key == "train.steps" else value) for key, value in settings)


def _chosen_values(choice: MachineChoice) -> tuple[tuple[str, str], ...]:
    model = {"shape": choice.shape, "layers": choice.layers, "seq_len": choice.seq_len, "dtype": choice.dtype}
    values = {**{f"model.{key}": str(value) for key, value in model.items()}, "train.batch": str(choice.batch)}
    return tuple(sorted(values.items()))


def _notes(scenario: Scenario, facts: MachineFacts, choice: MachineChoice) -> tuple[str, ...]:
    why = gpus_text(len(facts.gpus)) + (f" for {scenario.run.ranks} ranks" if facts.gpus else "")
    form = [f"CPU form, chosen because this machine has {why}"] if choice.device == "cpu" else []
    if choice.steps < scenario.train.steps:
        form.append(
            f"{choice.steps} optimizer steps in place of {scenario.train.steps}: train.cpu_steps; null does them all"
        )
    form += [
        f"expect.metrics.{name} does not count: it is for {bound.device}"
        for name, bound in scenario.expect.metrics.items()
        if bound.device not in (None, choice.device)
    ]
    effects = effect_notes(scenario.run.env, device=choice.device, backend=choice.backend)
    return (*form, *_without_effect(scenario), *effects)


def _without_effect(scenario: Scenario) -> Iterator[str]:
    """Yield a note for each key that is set although it has no effect in this scenario."""
    set_values = scenario.parallel.model_dump(exclude_defaults=True, include=set(_DDP_ONLY))
    keys = [f"parallel.{key}" for key in _DDP_ONLY if key in set_values]
    keys += ["trace.buckets"] if scenario.trace.buckets else []
    keys += ["gc.mode"] if scenario.gc.mode is not Checkpointing().mode else []
    yield from (f"{key} has no effect: {why}" for key in keys if (why := reason_without_effect(scenario, key)))


def reason_without_effect(scenario: Scenario, key: str) -> str:
    """Return why every value of the key does the same in this scenario, or "" if the values may differ."""
    section, _, name = key.partition(".")
    is_ddp_only = key == "trace.buckets" or (section == "parallel" and name in _DDP_ONLY)
    if is_ddp_only and scenario.parallel.wrapper is not Wrapper.DDP:
        return f"the wrapper is {scenario.parallel.wrapper}"
    if key == "gc.mode" and scenario.gc.layers == "none":
        return "no layer is checkpointed (gc.layers: none)"
    return ""


def _not_covered(scenario: Scenario, choice: MachineChoice) -> tuple[str, ...]:
    """Return the features that a run with these choices cannot test, such as "nccl" on the CPU."""
    if choice.device != "cpu":
        return ()
    missing = []
    if scenario.needs.backend is Backend.AUTO and scenario.run.ranks > 1:
        missing.append("nccl")
    if choice.dtype != Dtype.BFLOAT16.value:
        missing.append("bf16")
    return (*missing, "flash-attn")


PROGRAM = OwnProgram(
    contradictions=contradictions, beyond_the_model=fault_outside_model, missing=missing_need, launch=launch
)
