"""The settings of a training run, read from the command line, the environment and a YAML file."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from .config import ALL_BRANCHES, Attention, Implementation, NSAConfig, implementation_mistake
from .foreign_options import replacement_for
from .options import Option, SettingsError
from .train_options import OPTIONS
from .values import (
    SHARDED,
    BadShards,
    Data,
    Decay,
    HubData,
    Layers,
    Packing,
    Phase,
    Resume,
    Wrapper,
)

CONFIG_ENV = "CONFIG"


def parser() -> argparse.ArgumentParser:
    """Return an argument parser for all options. It leaves their values as strings."""
    # The text is converted later, together with the values from the environment and the file.
    result = argparse.ArgumentParser(
        prog=f"python -m {__package__}.train", description="Train a small NSA language model."
    )
    result.add_argument("--config", default=None, help="YAML file with options; the command line takes precedence")
    for option in OPTIONS:
        about = option.about + "".join(f"; environment: {name}" for name, _ in option.env)
        if option.is_switch:
            result.add_argument(option.flag, default=None, action=argparse.BooleanOptionalAction, help=about)
        else:
            result.add_argument(option.flag, *option.spellings, dest=option.name, default=None, help=about)
    return result


# Prefix of the environment variables of nsa-harness, which this program ignores.
_FOREIGN_PREFIX = "NSA_HARNESS_"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of one training run."""

    model: NSAConfig
    impl: Implementation
    dtype: str
    steps: int
    batch: int
    accumulate: int
    data: Data | Path | HubData
    tokenizer: str
    text_field: str
    packing: Packing
    workers: int | None  # None: chosen by the data source
    bad_shards: BadShards
    loss: str
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
    step_cost: bool
    mem_snapshot: bool
    telemetry: bool
    tensorboard: bool
    learning_rate: float
    warmup_steps: int
    lr_decay: Decay
    decay_steps: int
    min_lr: float
    weight_decay: float
    beta1: float
    beta2: float
    clip: float  # 0: no limit
    eval_every: int  # 0: never
    eval_data: Data | Path | HubData | None  # None: the source of the training data, with another seed
    eval_batches: int
    log_every: int
    freeze: str | None  # None: nothing is frozen
    checkpoint_every: int
    keep_last: int
    async_checkpoint: bool
    resume: Path | Resume | None  # None: start from step 1
    out_dir: Path


@dataclass(frozen=True, kw_only=True)
class _RawValue:
    """The unparsed value of an option, with its source and parser."""

    text: str
    place: str
    parse: Any


def read_settings(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Return the settings from command-line arguments, environment variables and an optional YAML file.

    The file is named by --config or the variable CONFIG. The command line takes precedence over the environment, the
    environment over the file, and the file over the defaults of the named shape.

    Raises SettingsError with all mistakes from all sources. For --help and usage errors, argparse exits.
    """
    options, unknown_arguments = parser().parse_known_args(list(map(_with_dashes, arguments)))
    command = vars(options)
    mistakes = [*_unknown_arguments(unknown_arguments), *_unknown_variables(environment)]
    path = command.pop("config") or environment.get(CONFIG_ENV)
    file, shape_fields = _read_file(Path(path), mistakes) if path else ({}, {})
    sources = (_from_command(command), _from_environment(environment, mistakes), file)
    values = {option.name: _value(option, sources, mistakes) for option in OPTIONS}
    settings = None if mistakes else _resolve(values, shape_fields, mistakes)
    if settings is None or mistakes:
        raise SettingsError("\n".join(mistakes))
    return settings


def _with_dashes(word: str) -> str:
    """Replace underscores in an option name with dashes, so that both spellings are accepted."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def _unknown_arguments(arguments: Sequence[str]) -> Iterator[str]:
    """Yield an error message for each argument that is not an option of this program."""
    flags = [option.flag for option in OPTIONS]
    for argument in arguments:
        name = argument.partition("=")[0]
        replacement = replacement_for("config/FILE.py" if name.startswith("config/") else name.removeprefix("--"))
        if replacement is not None:
            yield f"{name}: an option of another program; in nsa.train: {replacement}"
        elif name.startswith("--"):
            yield f"{name}: no such option{_did_you_mean(name, flags)}"
        elif argument == arguments[0]:
            yield f"{argument}: expected an option"


def _from_command(command: Mapping[str, Any]) -> dict[str, _RawValue]:
    return {
        option.name: _RawValue(text=_text(command[option.name]), place=option.flag, parse=option.parse)
        for option in OPTIONS
        if command[option.name] is not None
    }


def _from_environment(environment: Mapping[str, str], mistakes: list[str]) -> dict[str, _RawValue]:
    values: dict[str, _RawValue] = {}
    for option in OPTIONS:
        for name, parse in option.env:
            if not environment.get(name):
                continue
            if option.name in values:
                mistakes.append(f"{name}: {values[option.name].place} is set too; keep one of them")
                _parse(values[option.name], mistakes)
            values[option.name] = _RawValue(text=environment[name], place=name, parse=parse)
    return values


def _read_file(path: Path, mistakes: list[str]) -> tuple[dict[str, _RawValue], dict[str, int]]:
    """Return the options and model dimensions in a YAML file. The file's errors are appended to `mistakes`."""
    from ruamel.yaml import YAML  # imported only if there is a file, to save time
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
    dimensions = {shape_field.name for shape_field in fields(NSAConfig) if shape_field.type == "int"} - set(options)
    values, shape_fields = {}, {}
    for key, value in content.items():
        if key in options:
            values[key] = _RawValue(text=_text(value), place=f"{path}: {key}", parse=options[key].parse)
        elif key in dimensions and isinstance(value, int) and not isinstance(value, bool):
            shape_fields[key] = value
        elif key in dimensions:
            mistakes.append(f'{path}: {key}: expected a whole number, got "{value}"')
        else:
            replacement = replacement_for(str(key))
            hint = f"; in nsa.train: {replacement}" if replacement else _did_you_mean(str(key), [*options, *dimensions])
            mistakes.append(f"{path}: {key}: no such option{hint}")
    return values, shape_fields


def _value(option: Option, sources: Sequence[Mapping[str, _RawValue]], mistakes: list[str]) -> Any:
    """Return the parsed value of an option from the first of `sources` that has it, or its default."""
    values = [_parse(source[option.name], mistakes) for source in sources if option.name in source]
    return values[0] if values else option.default


def _parse(raw: _RawValue, mistakes: list[str]) -> Any:
    try:
        return raw.parse(raw.text)
    except ValueError as error:
        mistakes.append(f"{raw.place}: {error}")
        return None


def _resolve(values: dict[str, Any], shape_fields: dict[str, int], mistakes: list[str]) -> Settings | None:
    """Combine option values that depend on each other, and return the settings, or None if the model is invalid.

    Problems are added to `mistakes`.
    """
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
    mistakes.extend(_find_conflicts(settings))
    return settings


def _find_conflicts(settings: Settings) -> Iterator[str]:
    model, wrapper = settings.model, settings.wrapper
    if model.attention is not Attention.NSA:
        if model.branches != ALL_BRANCHES:
            yield f"--branch: attention {model.attention} has no branches; use --branch all or --attention nsa"
        if model.stop_gradient_gates:
            yield f"--stop-gradient-gates: attention {model.attention} has no gates; use --attention nsa"
    if mistake := implementation_mistake(model, settings.impl):
        yield mistake
    if settings.packing is Packing.DOCUMENTS:
        if model.attention is Attention.STOCK:
            yield "--packing: --attention stock cannot separate documents; use --packing stream"
        if settings.compile:
            yield "--packing: document lengths differ in each step, and --compile would recompile; use --packing stream"
    if settings.data is Data.SYNTHETIC and settings.tokenizer != "bytes":
        yield "--tokenizer: --data synthetic consists of tokens; use --data text"
    if not settings.telemetry:
        names = ("mem_dump_every", "mem_snapshot", "tensorboard", "step_cost")
        yield from (
            f"--{name.replace('_', '-')}: has no effect with --telemetry off; remove one of the two options"
            for name in names
            if getattr(settings, name)
        )
    if settings.comm_hook != "none" and wrapper is not Wrapper.DDP:
        yield f"--comm-hook: {settings.comm_hook} is a DDP hook, but --wrapper is {wrapper}; use --wrapper ddp"
    if settings.dtype == "float16" and wrapper in SHARDED:
        yield f"--dtype: float16 needs loss scaling, which --wrapper {wrapper} does not support; use --dtype bfloat16"
    yield from _schedule_conflicts(settings)
    yield from _evaluation_conflicts(settings)


def _schedule_conflicts(settings: Settings) -> Iterator[str]:
    """Yield an error message for each invalid combination of learning-rate options."""
    # The decay needs an explicit last step, so that a resumed run has the same rates as an uninterrupted run.
    decay, end, warmup = settings.lr_decay, settings.decay_steps, settings.warmup_steps
    if decay is Decay.NONE:
        if end:
            yield f"--decay-steps: {end} has no effect without a decay; add --lr-decay cosine"
        if settings.min_lr:
            yield f"--min-lr: {settings.min_lr:g} has no effect without a decay; add --lr-decay cosine"
        return
    if end <= warmup:
        yield f"--lr-decay: {decay} needs --decay-steps greater than --warmup-steps ({warmup}), got {end}"
    if settings.min_lr > settings.learning_rate:
        highest = f"{settings.learning_rate:g}"
        yield f"--min-lr: expected at most --learning-rate ({highest}), got {settings.min_lr:g}"


def _evaluation_conflicts(settings: Settings) -> Iterator[str]:
    if settings.eval_data is not None and not settings.eval_every:
        yield f"--eval-data: {settings.eval_data} has no effect without evaluations; add --eval-every"
    if settings.eval_every and settings.phase is Phase.DATA:
        yield "--eval-every: --phase data has no model; use --phase step"
    if settings.eval_every and settings.eval_data is None and settings.data is not Data.SYNTHETIC:
        yield f"--eval-every: --data {settings.data} has no held-out part; add --eval-data"


def _model(values: dict[str, Any], shape_fields: dict[str, int], mistakes: list[str]) -> NSAConfig | None:
    shape: NSAConfig = values.pop("shape")
    changes: dict[str, Any] = dict(shape_fields)
    for name, field_name in _MODEL_FIELDS.items():
        value = values.pop(name)
        if value is not None:
            changes[field_name] = value
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


def _unknown_variables(environment: Mapping[str, str]) -> list[str]:
    names = [name for option in OPTIONS for name, _ in option.env]
    return [
        f"{name}: no such setting{_did_you_mean(name, names)}"
        for name in sorted(environment)
        if name.startswith("NSA_") and not name.startswith(_FOREIGN_PREFIX) and name not in names
    ]


def _did_you_mean(name: str, candidates: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, candidates, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known names: {', '.join(sorted(candidates))}"


def _text(value: Any) -> str:
    """Return a value from YAML or argparse as a string that the parsers accept."""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value)
