"""Settings of a training run from command line, environment and file: the one place that reads NSA_* names."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from nsa.config import ALL_BRANCHES, Attention, Implementation, NSAConfig
from nsa.options import CONFIG_ENV, OPTIONS, Option, parser
from nsa.values import SHARDED, Data, Layers, Phase, Wrapper

# Names of other programs that share our prefix: the harness's own options.
_FOREIGN_PREFIX = "NSA_HARNESS_"


class SettingsError(Exception):
    """All mistakes of the command line, the environment and the file together, one line each."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One training run, fully decided except for what only the machine knows (`auto`)."""

    model: NSAConfig
    impl: Implementation
    dtype: str
    steps: int
    batch: int
    accumulate: int
    data: Data | Path
    seed: int
    phase: Phase
    gc: Layers
    gc_mode: str
    wrapper: Wrapper
    static_graph: bool
    find_unused_parameters: bool
    bucket_cap_mb: float
    broadcast_buffers: bool
    gradient_as_bucket_view: bool
    comm_hook: str
    barrier_after_backward: bool
    compile: bool
    backend: str
    device: str
    trace_grads: bool
    trace_module_bwd: bool
    trace_buckets: bool
    mem_dump_every: int
    profile_memory: bool
    detect_anomaly: bool
    learning_rate: float
    clip: float
    freeze: str | None  # None: nothing is frozen
    checkpoint_every: int
    resume: Path | None  # None: start from step 1
    out_dir: Path


@dataclass(frozen=True, kw_only=True)
class _Given:
    """One text and where it stood, for the message."""

    text: str
    place: str
    parse: Any


def read_settings(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Command line before environment before file before the shape's own defaults.

    Raises SettingsError with every mistake of all three. Usage and help are argparse's.
    """
    command = vars(parser().parse_args(arguments))
    mistakes = _unknown_names(environment)
    path = command.pop("config") or environment.get(CONFIG_ENV)
    file, shape_fields = _read_file(Path(path), mistakes) if path else ({}, {})
    sources = (_from_command(command), _from_environment(environment, mistakes), file)
    values = {option.name: _value(option, sources, mistakes) for option in OPTIONS}
    settings = None if mistakes else _settled(values, shape_fields, mistakes)
    if settings is None or mistakes:
        raise SettingsError("\n".join(mistakes))
    return settings


def _from_command(command: Mapping[str, Any]) -> dict[str, _Given]:
    return {
        option.name: _Given(text=_text(command[option.name]), place=option.flag, parse=option.parse)
        for option in OPTIONS
        if command[option.name] is not None
    }


def _from_environment(environment: Mapping[str, str], mistakes: list[str]) -> dict[str, _Given]:
    found: dict[str, _Given] = {}
    for option in OPTIONS:
        for name, parse in option.env:
            if not environment.get(name):
                continue
            if option.name in found:
                mistakes.append(f"{name}: {found[option.name].place} is set too; keep one of them")
                _parsed(found[option.name], mistakes)
            found[option.name] = _Given(text=environment[name], place=name, parse=parse)
    return found


def _read_file(path: Path, mistakes: list[str]) -> tuple[dict[str, _Given], dict[str, int]]:
    """Options and model dimensions of a YAML file with one flat mapping."""
    from ruamel.yaml import YAML  # only who uses a file pays for the import
    from ruamel.yaml.error import YAMLError

    try:
        content = YAML(typ="safe").load(path)
    except (OSError, YAMLError) as error:
        mistakes.append(f"{path}: cannot be read as YAML: {' '.join(str(error).split())}")
        return {}, {}
    if not isinstance(content, dict):
        mistakes.append(f'{path}: expected "name: value" lines, got {type(content).__name__}')
        return {}, {}
    options = {option.name: option for option in OPTIONS}
    dimensions = {field.name for field in fields(NSAConfig) if field.type == "int"} - set(options)
    found, shape_fields = {}, {}
    for key, value in content.items():
        if key in options:
            found[key] = _Given(text=_text(value), place=f"{path}: {key}", parse=options[key].parse)
        elif key in dimensions and isinstance(value, int) and not isinstance(value, bool):
            shape_fields[key] = value
        elif key in dimensions:
            mistakes.append(f'{path}: {key}: expected a whole number, got "{value}"')
        else:
            mistakes.append(f"{path}: {key}: no such option{_did_you_mean(str(key), [*options, *dimensions])}")
    return found, shape_fields


def _value(option: Option, sources: Sequence[Mapping[str, _Given]], mistakes: list[str]) -> Any:
    """The first source that has the option wins; the others are checked all the same."""
    values = [_parsed(source[option.name], mistakes) for source in sources if option.name in source]
    return values[0] if values else option.default


def _parsed(given: _Given, mistakes: list[str]) -> Any:
    try:
        return given.parse(given.text)
    except ValueError as error:
        mistakes.append(f"{given.place}: {error}")
        return None


def _settled(values: dict[str, Any], shape_fields: dict[str, int], mistakes: list[str]) -> Settings | None:
    """Values that depend on each other: the model from shape and options, the wrapper from its two spellings."""
    wrapper, ddp = values.pop("wrapper"), values.pop("ddp")
    if wrapper and ddp and wrapper is not ddp:
        mistakes.append(f"--ddp: means --wrapper {ddp}, but --wrapper {wrapper} is given; keep one of them")
    model = _model(values, shape_fields, mistakes)
    if model is None:
        return None
    checkpointed = values.pop("gc") or Layers(every=model.checkpointed)
    if checkpointed.highest() >= model.layers:
        mistakes.append(
            f"--gc: layer {checkpointed.highest()} does not exist; the model has layers 0 to {model.layers - 1}"
        )
    settings = Settings(
        model=model, batch=model.batch, gc=checkpointed, wrapper=wrapper or ddp or Wrapper.NONE, **values
    )
    mistakes.extend(_contradictions(settings))
    return settings


def _contradictions(settings: Settings) -> Iterator[str]:
    """Options that are right each for itself and make no sense together."""
    model, wrapper = settings.model, settings.wrapper
    if model.attention is not Attention.NSA:
        if model.branches != ALL_BRANCHES:
            yield f"--branch: attention {model.attention} has no branches; use --branch all or --attention nsa"
        if settings.impl is not Implementation.AUTO:
            yield f"--impl: attention {model.attention} has one implementation; use --impl auto"
        if model.stop_gradient_gates:
            yield f"--stop-gradient-gates: attention {model.attention} has no gates; use --attention nsa"
    if settings.comm_hook != "none" and wrapper is not Wrapper.DDP:
        yield f"--comm-hook: {settings.comm_hook} is a hook of DDP and --wrapper is {wrapper}; use --wrapper ddp"
    if settings.dtype == "float16" and wrapper in SHARDED:
        yield f"--dtype: float16 needs loss scaling, which --wrapper {wrapper} does not share; use --dtype bfloat16"


def _model(values: dict[str, Any], shape_fields: dict[str, int], mistakes: list[str]) -> NSAConfig | None:
    shape: NSAConfig = values.pop("shape")
    changes: dict[str, Any] = dict(shape_fields)
    for name, field in _MODEL_FIELDS.items():
        value = values.pop(name)
        if value is not None:
            changes[field] = value
    try:
        return replace(shape, **changes)
    except ValueError as error:
        mistakes.extend(str(error).splitlines())
        return None


_MODEL_FIELDS = {
    "layers": "layers",
    "seq_len": "seq_len",
    "attention": "attention",
    "branch": "branches",
    "compression": "compression",
    "batch": "batch",
    "stop_gradient_gates": "stop_gradient_gates",
}


def _unknown_names(environment: Mapping[str, str]) -> list[str]:
    known = [name for option in OPTIONS for name, _ in option.env]
    return [
        f"{name}: no such setting{_did_you_mean(name, known)}"
        for name in sorted(environment)
        if name.startswith("NSA_") and not name.startswith(_FOREIGN_PREFIX) and name not in known
    ]


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(sorted(known))}"


def _text(value: Any) -> str:
    """A YAML or argparse value as its text, so that one parser serves every source."""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value)
