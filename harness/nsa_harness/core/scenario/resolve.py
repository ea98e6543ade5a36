"""Resolve a scenario for a machine: RunSpec or Skip. Every `auto` is decided and reported here."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import PurePath

from nsa_harness.core.plan import Bound, Expect, Fault, FaultWhen, Launcher, Limits, RunSpec, Skip
from nsa_harness.core.report import MachineFacts
from nsa_harness.core.scenario.env_names import name_mistakes
from nsa_harness.core.scenario.layers import named_layers
from nsa_harness.core.scenario.program import OwnProgram, Surroundings
from nsa_harness.core.scenario.scenario import OUR_PROGRAM, Backend, MetricBound, Scenario, Unit

DEADLINE_S = 1800.0
SETTING_SECTIONS = ("needs", "run", "model", "train", "gc", "parallel")


def resolve(
    scenario: Scenario,
    facts: MachineFacts,
    surroundings: Surroundings,
    program: OwnProgram,
    notes: tuple[str, ...] = (),
) -> RunSpec | Skip:
    """Return the RunSpec to launch a scenario on this machine, or a Skip if the machine lacks something.

    For our own program, `program` fills in the command line and decides every `auto`.
    """
    if reason := _missing(scenario, facts, program):
        return Skip(
            scenario=scenario.name,
            about=scenario.about,
            reason=reason,
            tags=scenario.tags,
            settings=settings_of(scenario),
        )
    spec = program.launch(_common(scenario), scenario, facts, surroundings) if scenario.is_ours else _foreign(scenario)
    spec = replace(spec, notes=(*spec.notes, *notes))
    return replace(spec, spec_hash=spec_hash(spec, surroundings))


def spec_hash(spec: RunSpec, surroundings: Surroundings) -> str:
    """Return twelve hex digits that identify what runs. No path of this machine is hashed."""
    names = {surroundings.subject_dir: OUR_PROGRAM, surroundings.python: "python"}
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
    """Return (dotted key, value) for each setting that differs from its default, in sections that a launch reads."""
    chosen: dict[str, str] = {f"run.env.{name}": value for name, value in scenario.run.env.items()}
    for section in SETTING_SECTIONS:
        values = getattr(scenario, section).model_dump(mode="json", exclude_defaults=True, exclude={"env"})
        chosen |= {f"{section}.{key}": shown_setting(value) for key, value in values.items()}
    return tuple(sorted(chosen.items()))


def shown_setting(value: object) -> str:
    """Return a value as an override on the command line would write it."""
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else json.dumps(value)


def _missing(scenario: Scenario, facts: MachineFacts, program: OwnProgram) -> str | None:
    have, needs, ranks = len(facts.gpus), scenario.needs, scenario.run.ranks
    here = f"this machine has {gpus_text(have)}"
    if needs.gpus > have:
        return f"needs {gpus_text(needs.gpus)}; {here}"
    if needs.backend is Backend.NCCL and have < ranks:
        return f"NCCL needs a GPU for each of {ranks} ranks; {here}"
    return program.missing(scenario, facts) if scenario.is_ours else None


def gpus_text(count: int) -> str:
    return {0: "no GPU", 1: "1 GPU"}.get(count, f"{count} GPUs")


def _foreign(scenario: Scenario) -> RunSpec:
    run, needs = scenario.run, scenario.needs
    backend = "any" if needs.backend is Backend.AUTO else needs.backend.value
    # The harness does not correct another program's environment; the program may set other names itself.
    notes = tuple(f"run.env.{name}: {what}" for name, what in name_mistakes(run.env, {}))
    spec = replace(_common(scenario), backend=backend, notes=notes)
    if run.command is not None:
        command = (*run.command, *run.args)
        return replace(spec, launcher=Launcher.PLAIN, program=command, subject=" ".join(command))
    words = (run.program,) if run.program.endswith(".py") else ("-m", run.program)
    return replace(spec, program=(*words, *run.args), subject=" ".join((run.program, *run.args)))


def _common(scenario: Scenario) -> RunSpec:
    """Return the RunSpec with all fields that do not depend on the machine."""
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
        expect=expectation(scenario),
        fault=_fault(scenario),
        notes=(),
        not_covered=(),
        spec_hash="",
        tags=scenario.tags,
        settings=settings_of(scenario),
    )


def expectation(
    scenario: Scenario, uniform: float = 1.0, *, steps: int | None = None, device: str | None = None
) -> Expect:
    """Return the expectation for this launch.

    `uniform` is the loss of guessing, the unit of some bounds. `steps` is the number of steps that must be done.
    `device` is where the program runs, if known; bounds for other devices are skipped.
    """
    expect = scenario.expect
    done = {} if steps is None else {"steps": Bound(eq=steps)}
    counting = {
        name: bound for name, bound in expect.metrics.items() if device is None or bound.device in (None, device)
    }
    bounds = {**done, **{name: _bound(bound, uniform) for name, bound in counting.items()}}
    return Expect(
        verdict=expect.verdict.value,
        cause=expect.cause,
        findings=expect.findings,
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
    when = fault.when
    return Fault(
        kind=fault.kind.value,
        rank=fault.rank,
        layer=fault.layer,
        step=fault.step,
        heals_s=fault.heals_s,
        parameters=fault.parameters,
        value=fault.value,
        when=None
        if when is None
        else FaultWhen(
            recomputed=named_layers(when.recomputed or ""),
            any_recomputed=named_layers(when.any_recomputed or ""),
            recomputed_layers=when.recomputed_layers,
            seq_len=when.seq_len,
            layers=when.layers,
            ranks=when.ranks,
            backend=when.backend,
            module=when.module,
            find_unused_parameters=when.find_unused_parameters,
            static_graph=when.static_graph,
            chance=when.chance,
        ),
    )
