"""Turn a scenario into a launch for one machine, choosing a value for every `auto`."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import PurePath

from nsa_harness.core.plan import Bound, Expect, Fault, FaultWhen, Launcher, Limits, RunSpec, Skip
from nsa_harness.core.report import MachineFacts
from nsa_harness.core.scenario.env_names import name_mistakes
from nsa_harness.core.scenario.layers import numbered_layers
from nsa_harness.core.scenario.program import OwnProgram, Surroundings
from nsa_harness.core.scenario.scenario import OUR_PROGRAM, Backend, MetricBound, Scenario, Unit

DEADLINE_S = 1800.0  # deadline of a run if the scenario sets none
SETTING_SECTIONS = ("needs", "run", "model", "train", "gc", "parallel")


def resolve(
    scenario: Scenario,
    facts: MachineFacts,
    surroundings: Surroundings,
    program: OwnProgram,
    notes: tuple[str, ...] = (),
) -> RunSpec | Skip:
    """Return the launch of a scenario on this machine, or a Skip if the machine lacks something."""
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
    """Return twelve hex digits that identify the launch, independent of the paths on this machine."""
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
    """Return the dotted key and value of every setting that differs from its default."""
    settings: dict[str, str] = {f"run.env.{name}": value for name, value in scenario.run.env.items()}
    for section in SETTING_SECTIONS:
        values = getattr(scenario, section).model_dump(mode="json", exclude_defaults=True, exclude={"env"})
        settings |= {f"{section}.{key}": shown_setting(value) for key, value in values.items()}
    return tuple(sorted(settings.items()))


def shown_setting(value: object) -> str:
    """Return a value as a string, in the form that an override on the command line uses."""
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else json.dumps(value)


def _missing(scenario: Scenario, facts: MachineFacts, program: OwnProgram) -> str | None:
    """Return the reason why this machine cannot run the scenario, or None if it can."""
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
    """Return the launch of a scenario that runs the user's own program."""
    run, needs = scenario.run, scenario.needs
    backend = "any" if needs.backend is Backend.AUTO else needs.backend.value
    # The environment of another program is not corrected, because the program may read names that torch does not.
    notes = tuple(f"run.env.{name}: {message}" for name, message in name_mistakes(run.env, {}))
    spec = replace(_common(scenario), backend=backend, notes=notes)
    if run.command is not None:
        command = (*run.command, *run.args)
        return replace(spec, launcher=Launcher.PLAIN, program=command, subject=" ".join(command))
    words = (run.program,) if run.program.endswith(".py") else ("-m", run.program)
    return replace(spec, program=(*words, *run.args), subject=" ".join((run.program, *run.args)))


def _common(scenario: Scenario) -> RunSpec:
    """Return the launch with every machine-independent field filled in."""
    limits = Limits(**dict(scenario.limits))
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
        limits=limits if limits.deadline_s is not None else replace(limits, deadline_s=DEADLINE_S),
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
    """Return the verdict, findings and metrics that the scenario expects.

    `uniform` is the loss of a model that guesses, which is the unit of some bounds. `steps` is the number of steps that
    the program must complete. Bounds for devices other than `device` are left out.
    """
    expect = scenario.expect
    step_bound = {} if steps is None else {"steps": Bound(eq=steps)}
    applicable = {
        name: bound for name, bound in expect.metrics.items() if device is None or bound.device in (None, device)
    }
    bounds = {**step_bound, **{name: _to_bound(bound, uniform) for name, bound in applicable.items()}}
    return Expect(
        verdict=expect.verdict.value,
        cause=expect.cause,
        findings=expect.findings,
        missing_grads=expect.missing_grads,
        metrics=tuple(sorted(bounds.items())),
    )


def _to_bound(bound: MetricBound, uniform: float) -> Bound:
    """Return the bound on a metric, with values in the unit `uniform` converted to plain numbers."""
    factor = uniform if bound.unit is Unit.UNIFORM else 1.0
    numbers = {key: None if value is None else value * factor for key, value in bound.numbers().items()}
    return Bound(**numbers, regex=bound.regex)


def _fault(scenario: Scenario) -> Fault | None:
    fault = scenario.fault
    if fault is None:
        return None
    when = None
    if fault.when is not None:
        layers = {key: numbered_layers(getattr(fault.when, key) or "") for key in ("recomputed", "any_recomputed")}
        when = FaultWhen(**dict(fault.when) | layers)
    return Fault(**dict(fault) | {"kind": fault.kind.value, "when": when})
