"""Scenario + machine -> RunSpec or Skip: every `auto` is decided here, and said."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import PurePath

from nsa_harness.core.plan import Bound, Expect, Fault, FaultWhen, Launcher, Limits, RunSpec, Skip
from nsa_harness.core.report import MachineFacts
from nsa_harness.core.scenario.env_names import effect_notes, name_mistakes, sound_environment
from nsa_harness.core.scenario.layers import layers_of, named_layers
from nsa_harness.core.scenario.nsa_options import Choice, nsa_options, subject_line
from nsa_harness.core.scenario.scenario import (
    NSA_TRAIN,
    Backend,
    Dtype,
    FaultWhenSection,
    Implementation,
    MetricBound,
    Scenario,
    ShapeName,
    Unit,
    Wrapper,
)
from nsa_harness.core.scenario.shapes import SHAPES

DEADLINE_S = 1800.0
_SETTING_SECTIONS = ("needs", "run", "model", "train", "gc", "parallel")
_DDP_ONLY = (
    "static_graph",
    "find_unused_parameters",
    "broadcast_buffers",
    "gradient_as_bucket_view",
    "bucket_cap_mb",
)


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What the caller knows of the place: paths and contents. Paths never reach the spec hash."""

    python: str
    nsa_dir: str  # the directory of the nsa package, launched by path
    content_hash: str  # of the program's source; empty for a command or an installed module


def resolve(
    scenario: Scenario, facts: MachineFacts, surroundings: Surroundings, notes: tuple[str, ...] = ()
) -> RunSpec | Skip:
    """The launch of a scenario on this machine."""
    if reason := _missing(scenario, facts):
        return Skip(
            scenario=scenario.name,
            about=scenario.about,
            reason=reason,
            tags=scenario.tags,
            settings=settings_of(scenario),
        )
    spec = _ours(scenario, facts, surroundings) if scenario.is_ours else _foreign(scenario)
    spec = replace(spec, notes=(*spec.notes, *notes))
    return replace(spec, spec_hash=spec_hash(spec, surroundings))


def spec_hash(spec: RunSpec, surroundings: Surroundings) -> str:
    """Twelve hex digits over everything that decides what runs; no path of this machine goes in."""
    names = {surroundings.nsa_dir: NSA_TRAIN, surroundings.python: "python"}
    head = tuple(names.get(word, word) for word in spec.program)
    head = (PurePath(head[0]).name, *head[1:])
    facts = {
        "program": head,
        "content": surroundings.content_hash,
        "ranks": spec.ranks,
        "env": spec.env,
        "cwd": None if spec.cwd and PurePath(spec.cwd).is_absolute() else spec.cwd,
        "backend": spec.backend,
        "device": spec.device,
        "limits": asdict(spec.limits),
        "fault": asdict(spec.fault) if spec.fault else None,
    }
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def settings_of(scenario: Scenario) -> tuple[tuple[str, str], ...]:
    """What a scenario sets other than the defaults, of the sections that decide what runs: (dotted key, value)."""
    chosen: dict[str, str] = {f"run.env.{name}": value for name, value in scenario.run.env.items()}
    for section in _SETTING_SECTIONS:
        values = getattr(scenario, section).model_dump(mode="json", exclude_defaults=True, exclude={"env"})
        chosen |= {f"{section}.{key}": shown_setting(value) for key, value in values.items()}
    return tuple(sorted(chosen.items()))


def shown_setting(value: object) -> str:
    """A value as an override on the command line would write it."""
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else json.dumps(value)


def machine_choice(scenario: Scenario, facts: MachineFacts) -> Choice:
    """What `auto` comes to here."""
    model, ranks = scenario.model, scenario.run.ranks
    on_gpu = len(facts.gpus) >= ranks
    shape = model.shape if model.shape is not ShapeName.AUTO else (ShapeName.PRODUCTION if on_gpu else ShapeName.CI)
    backend = scenario.needs.backend
    if backend is Backend.AUTO:
        backend = Backend.NCCL if on_gpu else Backend.GLOO
    default_dtype = SHAPES[shape].dtype if on_gpu else Dtype.FLOAT32.value
    return Choice(
        shape=shape.value,
        layers=model.layers or SHAPES[shape].layers,
        seq_len=model.seq_len or SHAPES[shape].seq_len,
        batch=scenario.train.batch or SHAPES[shape].batch,
        dtype=default_dtype if model.dtype is Dtype.AUTO else model.dtype.value,
        backend=backend.value,
        device="cuda" if on_gpu else "cpu",
    )


def beyond_the_model(scenario: Scenario, facts: MachineFacts) -> Iterator[tuple[tuple[str, str], str]]:
    """Keys that name a layer the model of this machine does not have, each with what is wrong."""
    if not scenario.is_ours:
        return
    choice, fault = machine_choice(scenario, facts), scenario.fault
    model = f"the model has layers 0-{choice.layers - 1} (shape {choice.shape}); set model.layers"
    highest = max(layers_of(scenario.gc.layers, choice.layers), default=0)
    if highest >= choice.layers:
        yield ("gc", "layers"), f"{scenario.gc.layers} names layer {highest}; {model}"
    if fault is not None and fault.layer is not None and fault.layer >= choice.layers:
        yield ("fault", "layer"), f"got {fault.layer}; {model}"


# Implementations that run on a GPU only, in words that a number of GPUs may follow.
_ON_A_GPU = {
    Implementation.TRITON: "the fused kernels need",
    Implementation.TORCH: "torch's flash attention with a window needs",
    Implementation.FLASH: "flash-attn needs",
}


def _missing(scenario: Scenario, facts: MachineFacts) -> str | None:
    have, needs, ranks = len(facts.gpus), scenario.needs, scenario.run.ranks
    here = f"this machine has {_gpus(have)}"
    if needs.gpus > have:
        return f"needs {_gpus(needs.gpus)}; {here}"
    if needs.backend is Backend.NCCL and have < ranks:
        return f"nccl needs a GPU for each of {ranks} ranks; {here}"
    if scenario.is_ours and scenario.model.impl in _ON_A_GPU and have < ranks:
        return f"{_ON_A_GPU[scenario.model.impl]} a GPU for each of {ranks} ranks; {here}"
    return None


def _gpus(count: int) -> str:
    return {0: "no GPU", 1: "1 GPU"}.get(count, f"{count} GPUs")


def _ours(scenario: Scenario, facts: MachineFacts, surroundings: Surroundings) -> RunSpec:
    choice = machine_choice(scenario, facts)
    words = (surroundings.nsa_dir, *nsa_options(scenario, choice), *scenario.run.args)
    alone = scenario.run.ranks == 1 and scenario.parallel.wrapper is Wrapper.NONE
    ddp = scenario.parallel.wrapper is Wrapper.DDP
    env, changed = sound_environment(scenario.run.env, torch=facts.torch, backend=choice.backend, ddp=ddp)
    return replace(
        _common(scenario),
        env=tuple(sorted(env.items())),
        expect=_expect(scenario, uniform=math.log(SHAPES[choice.shape].vocab)),
        launcher=Launcher.PLAIN if alone else Launcher.TORCHRUN,
        program=(surroundings.python, *words) if alone else words,
        backend=choice.backend,
        device=choice.device,
        subject=subject_line(scenario, choice),
        notes=(*_notes(scenario, facts, choice), *changed),
        not_covered=_not_covered(scenario, choice),
    )


def _foreign(scenario: Scenario) -> RunSpec:
    run, needs = scenario.run, scenario.needs
    backend = "any" if needs.backend is Backend.AUTO else needs.backend.value
    # The program is not ours to correct, and it may set other names itself.
    notes = tuple(f"run.env.{name}: {what}" for name, what in name_mistakes(run.env, ours=False))
    spec = replace(_common(scenario), backend=backend, notes=notes)
    if run.command is not None:
        command = (*run.command, *run.args)
        return replace(spec, launcher=Launcher.PLAIN, program=command, subject=" ".join(command))
    words = (run.program,) if run.program.endswith(".py") else ("-m", run.program)
    return replace(spec, program=(*words, *run.args), subject=" ".join((run.program, *run.args)))


def _common(scenario: Scenario) -> RunSpec:
    """The parts that do not depend on the machine; the rest is filled in."""
    limits = scenario.limits
    return RunSpec(
        scenario=scenario.name,
        about=scenario.about,
        ranks=scenario.run.ranks,
        launcher=Launcher.TORCHRUN,
        program=(),
        env=tuple(sorted(scenario.run.env.items())),
        cwd=scenario.run.cwd,
        backend="any",
        device="any",
        subject="",
        limits=Limits(
            stall_s=limits.stall_s,
            busy_s=limits.busy_s,
            open_wait_s=limits.open_wait_s,
            start_s=limits.start_s,
            deadline_s=DEADLINE_S if limits.deadline_s is None else limits.deadline_s,
        ),
        expect=_expect(scenario),
        fault=_fault(scenario),
        notes=(),
        not_covered=(),
        spec_hash="",
        tags=scenario.tags,
        settings=settings_of(scenario),
    )


def _expect(scenario: Scenario, uniform: float = 1.0) -> Expect:
    """`uniform`: the loss of guessing, in which some bounds are given. Our own program must do the steps asked for."""
    expect = scenario.expect
    done = {"steps": Bound(eq=scenario.train.steps)} if scenario.is_ours else {}
    bounds = {**done, **{name: _bound(bound, uniform) for name, bound in expect.metrics.items()}}
    return Expect(
        verdict=expect.verdict.value,
        cause=expect.cause,
        missing_grads=expect.missing_grads,
        metrics=tuple(sorted(bounds.items())),
    )


def _bound(bound: MetricBound, uniform: float) -> Bound:
    factor = uniform if bound.unit is Unit.UNIFORM else 1.0
    numbers = {key: None if value is None else value * factor for key, value in bound.numbers().items()}
    return Bound(**numbers, regex=bound.regex)


def _fault(scenario: Scenario) -> Fault | None:
    fault = scenario.fault
    if fault is None:
        return None
    return Fault(
        kind=fault.kind.value,
        rank=fault.rank,
        layer=fault.layer,
        step=fault.step,
        heals_s=fault.heals_s,
        when=None if fault.when is None else _fault_when(fault.when),
    )


def _fault_when(when: FaultWhenSection) -> FaultWhen:
    return FaultWhen(
        recomputed=named_layers(when.recomputed or ""),
        any_recomputed=named_layers(when.any_recomputed or ""),
        recomputed_layers=when.recomputed_layers,
        seq_len=when.seq_len,
        chance=when.chance,
    )


def _notes(scenario: Scenario, facts: MachineFacts, choice: Choice) -> tuple[str, ...]:
    notes = []
    if choice.device == "cpu":
        why = _gpus(len(facts.gpus)) + (f" for {scenario.run.ranks} ranks" if facts.gpus else "")
        notes.append(f"CPU form, chosen because this machine has {why}")
    notes += _without_effect(scenario)
    return (*notes, *effect_notes(scenario.run.env, device=choice.device, backend=choice.backend))


def _without_effect(scenario: Scenario) -> Iterator[str]:
    """Switches of DDP on another wrapper."""
    if scenario.parallel.wrapper is Wrapper.DDP:
        return
    chosen = scenario.parallel.model_dump(exclude_defaults=True, include=set(_DDP_ONLY))
    idle = [f"parallel.{key}" for key in _DDP_ONLY if key in chosen]
    idle += ["trace.buckets"] if scenario.trace.buckets else []
    yield from (f"{key} has no effect: the wrapper is {scenario.parallel.wrapper}" for key in idle)


def _not_covered(scenario: Scenario, choice: Choice) -> tuple[str, ...]:
    """What the CPU form cannot show, unless the scenario asks for just that."""
    if choice.device != "cpu":
        return ()
    missing = []
    if scenario.needs.backend is Backend.AUTO and scenario.run.ranks > 1:
        missing.append("nccl")
    if choice.dtype != Dtype.BFLOAT16.value:
        missing.append("bf16")
    return (*missing, "flash-attn")
