"""Settings of a training run, read from the command line, the environment and a YAML file."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from .config import ALL_BRANCHES, SHAPES, Attention, Compression, Implementation, NSAConfig, implementation_mistake
from .foreign_options import replacement_for
from .values import (
    DTYPES,
    MEAN,
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
    branches,
    checkpoint_source,
    checkpointed_layers,
    data_source,
    ddp_switch,
    flash_switch,
    fraction,
    layer_range,
    layer_set,
    named_shape,
    not_negative,
    on_or_off,
    one_branch,
    one_of,
    positive,
    switch,
    tokenizer_source,
    whole,
    word,
)


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of the training program.

    `parse` converts text from the command line or the file, and raises ValueError for a wrong value. `env` lists the
    environment variables that set the option, each with its own parser. `spellings` are other names of the flag.
    """

    name: str
    parse: Callable[[str], Any]
    default: Any
    about: str
    env: tuple[tuple[str, Callable[[str], Any]], ...] = ()
    spellings: tuple[str, ...] = field(default=())

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def is_switch(self) -> bool:
        return self.parse is switch


# For options of the model, the default None means that the named shape determines the value.
OPTIONS = (
    Option(name="shape", parse=named_shape, default=SHAPES["ci"], about="named shape: " + ", ".join(SHAPES)),
    Option(name="layers", parse=whole(1), default=None, about="number of layers"),
    Option(name="seq_len", parse=whole(2), default=None, about="tokens of a sequence"),
    Option(name="attention", parse=one_of(Attention), default=None, about="nsa, or a control: vanilla, stock"),
    Option(
        name="branch",
        parse=branches,
        default=None,
        about="all, one branch, or a sum such as cmp+sel",
        env=(("NSA_FORCE_BRANCH", one_branch),),
    ),
    Option(
        name="compression",
        parse=one_of(Compression),
        default=None,
        about="how a block becomes one key: mlp, mean, mean_mlp",
    ),
    Option(
        name="stop_gradient_gates",
        parse=switch,
        default=None,
        about="no gradient through the gates; their parameters are frozen",
    ),
    Option(
        name="impl",
        parse=one_of(Implementation),
        default=Implementation.AUTO,
        about="auto, eager, triton (our fused kernels), torch or flash for the sliding branch, per_token for the"
        " selected one as a slow loop, dense with all scores in memory",
        env=(("NSA_USE_FA2", flash_switch),),
    ),
    Option(name="dtype", parse=word(*DTYPES), default="auto", about="auto: the shape's on a GPU, float32 on a CPU"),
    Option(name="steps", parse=whole(1), default=1, about="optimizer steps, those before a resume included"),
    Option(name="batch", parse=whole(1), default=None, about="sequences per rank and micro-batch"),
    Option(name="accumulate", parse=whole(1), default=1, about="micro-batches per optimizer step"),
    Option(
        name="data",
        parse=data_source,
        default=Data.SYNTHETIC,
        about="synthetic, text, stories, fineweb_edu, hf:PATH[:CONFIG[:SPLIT]], or files: one, a folder, a pattern",
        spellings=("--dataset",),
    ),
    Option(
        name="tokenizer",
        parse=tokenizer_source,
        default="bytes",
        about="of texts: bytes, a tokenizer.json, or a file of ranks such as r50k_base.tiktoken",
    ),
    Option(name="text_field", parse=str, default="text", about="the field or column of a record that is its text"),
    Option(
        name="packing",
        parse=one_of(Packing),
        default=Packing.AUTO,
        about="auto, documents (none sees another one) or stream (a row is one sequence)",
    ),
    Option(
        name="workers",
        parse=whole(0),
        default=None,
        about="threads that read ahead; 0: none. Without it 2, or none for what is in memory",
    ),
    Option(
        name="bad_shards",
        parse=one_of(BadShards),
        default=BadShards.STOP,
        about="data that cannot be read: stop, or skip and count it",
    ),
    Option(
        name="loss",
        parse=word("cross_entropy", MEAN),
        default="cross_entropy",
        about="cross_entropy of the next token, or the mean of all logits",
    ),
    Option(name="seed", parse=whole(0), default=0, about="seed of weights and data; the data differs per rank"),
    Option(name="phase", parse=one_of(Phase), default=Phase.STEP, about="how far a step goes"),
    Option(
        name="gc",
        parse=checkpointed_layers,
        default=None,
        about="checkpointed layers: none, all, 0:6 or 2,6",
        env=(("NSA_GC_RANGE", layer_range), ("NSA_GC_LAYERS", layer_set)),
    ),
    Option(
        name="gc_mode",
        parse=word("reentrant", "non_reentrant"),
        default="non_reentrant",
        about="how a checkpointed layer runs again",
    ),
    Option(name="wrapper", parse=one_of(Wrapper), default=None, about="none, ddp, fsdp, fsdp1 or manual averaging"),
    Option(name="ddp", parse=ddp_switch, default=None, about="1 and 0 for --wrapper ddp and none"),
    Option(
        name="static_graph",
        parse=switch,
        default=False,
        about="DDP: the graph is the same in every step",
        env=(("NSA_DDP_STATIC_GRAPH", switch),),
    ),
    Option(name="find_unused_parameters", parse=switch, default=False, about="DDP: look for unused parameters"),
    Option(name="bucket_cap_mb", parse=positive, default=25.0, about="DDP: size of a gradient bucket"),
    Option(name="broadcast_buffers", parse=switch, default=True, about="DDP: send buffers from rank 0 each step"),
    Option(name="gradient_as_bucket_view", parse=switch, default=False, about="DDP: gradients live in the buckets"),
    Option(
        name="comm_hook", parse=word("none", "bf16"), default="none", about="DDP: bf16: gradients travel as bfloat16"
    ),
    Option(
        name="barrier_after_backward",
        parse=switch,
        default=False,
        about="all ranks wait for each other after the backward pass",
    ),
    Option(name="compile", parse=switch, default=False, about="torch.compile for the layers"),
    Option(
        name="backend",
        parse=word("auto", "gloo", "nccl"),
        default="auto",
        about="process group backend",
        env=(("TORCH_BACKEND", word("auto", "gloo", "nccl")),),
    ),
    Option(name="device", parse=word("auto", "cpu", "cuda"), default="auto", about="where tensors live"),
    Option(
        name="trace_grads",
        parse=switch,
        default=False,
        about="say which gradients arrived and which are missing",
        env=(("NSA_TRACE_GRADS", switch),),
    ),
    Option(
        name="trace_module_bwd",
        parse=switch,
        default=False,
        about="say which modules the backward pass reaches",
        env=(("NSA_TRACE_MODULE_BWD", switch),),
    ),
    Option(
        name="trace_buckets",
        parse=switch,
        default=False,
        about="say which DDP buckets are reduced in the first two steps",
        env=(("NSA_TRACE_DDP_BUCKETS", switch),),
    ),
    Option(
        name="mem_dump_every",
        parse=whole(0),
        default=0,
        about="write a memory dump every so many steps; 0: never",
        env=(("NSA_MEM_DUMP_EVERY", whole(0)),),
    ),
    Option(
        name="profile_memory",
        parse=switch,
        default=False,
        about="write which operators took most memory in the second step",
    ),
    Option(
        name="mem_snapshot",
        parse=switch,
        default=False,
        about="CUDA: record every allocation with its lines; written with each memory dump and at the end",
    ),
    Option(
        name="detect_anomaly",
        parse=switch,
        default=False,
        about="autograd's anomaly detection: a NaN in backward is an error that names the forward call",
    ),
    Option(
        name="step_cost",
        parse=switch,
        default=False,
        about="count the bytes that the first forward pass keeps for its backward pass",
    ),
    Option(name="telemetry", parse=on_or_off, default=True, about="on, or off: no heartbeat, no table, no look inside"),
    Option(name="tensorboard", parse=switch, default=False, about="event files for TensorBoard, where it is installed"),
    Option(name="learning_rate", parse=positive, default=1e-3, about="of AdamW, the highest of its schedule"),
    Option(name="warmup_steps", parse=whole(0), default=0, about="the rate rises from 0 over so many steps"),
    Option(
        name="lr_decay",
        parse=one_of(Decay),
        default=Decay.NONE,
        about="how the rate falls from the warm-up to --decay-steps: none, cosine or linear",
    ),
    Option(name="decay_steps", parse=whole(0), default=0, about="the step from which on the rate is --min-lr"),
    Option(name="min_lr", parse=not_negative, default=0.0, about="where the decay ends"),
    Option(name="weight_decay", parse=not_negative, default=0.01, about="of AdamW, on every parameter"),
    Option(name="beta1", parse=fraction, default=0.9, about="of AdamW"),
    Option(name="beta2", parse=fraction, default=0.999, about="of AdamW"),
    Option(name="clip", parse=not_negative, default=1.0, about="largest norm of all gradients together; 0: any"),
    Option(name="eval_every", parse=whole(0), default=0, about="evaluate every so many steps; 0: never"),
    Option(name="eval_data", parse=data_source, default=None, about="what is held out, as --data takes it"),
    Option(name="eval_batches", parse=whole(1), default=8, about="batches per rank of one evaluation"),
    Option(name="log_every", parse=whole(1), default=1, about="print every so many steps; files have each"),
    Option(name="freeze", parse=str, default=None, about="parameters to freeze, a pattern such as *.gate_mlp.*"),
    Option(
        name="checkpoint_every", parse=whole(0), default=0, about="write a checkpoint every so many steps; 0: never"
    ),
    Option(name="keep_last", parse=whole(0), default=0, about="keep so many of the newest checkpoints; 0: all"),
    Option(name="async_checkpoint", parse=switch, default=False, about="write checkpoints while training goes on"),
    Option(
        name="resume",
        parse=checkpoint_source,
        default=None,
        about="go on from a checkpoint, or from the newest whole one of a folder; auto: of the output directory, "
        "if it has one",
    ),
    Option(
        name="out_dir",
        parse=Path,
        default=Path("out"),
        about="where telemetry goes",
        env=(("NSA_OUT_DIR", Path),),
    ),
)

CONFIG_ENV = "CONFIG"


def parser() -> argparse.ArgumentParser:
    """Return the argument parser. It returns options as text, and None for options that are not given.

    The text is converted later, together with the values from the environment and the file.
    """
    result = argparse.ArgumentParser(
        prog=f"python -m {__package__}.train", description="Train a small NSA language model."
    )
    result.add_argument("--config", default=None, help="YAML file of options; the command line wins over it")
    for option in OPTIONS:
        about = option.about + "".join(f"; environment: {name}" for name, _ in option.env)
        if option.is_switch:
            result.add_argument(option.flag, default=None, action=argparse.BooleanOptionalAction, help=about)
        else:
            result.add_argument(option.flag, *option.spellings, dest=option.name, default=None, help=about)
    return result


# Prefix of the environment variables of nsa-harness, which this program ignores.
_FOREIGN_PREFIX = "NSA_HARNESS_"


class SettingsError(Exception):
    """The settings are wrong. The message has one line per mistake, from all sources."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of one training run. Values of `auto` are resolved later, because they depend on the machine."""

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
class _Given:
    """Unparsed value of an option, where it was given (for error messages), and the parser for it."""

    text: str
    place: str
    parse: Any


def read_settings(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Return the settings from command-line arguments, environment variables and the YAML file they name.

    The command line takes precedence over the environment, then come the file and the defaults of the named shape.
    Raises SettingsError with all mistakes from all sources. For --help and usage errors, argparse exits.
    """
    known, unknown = parser().parse_known_args(list(map(_with_dashes, arguments)))
    command = vars(known)
    mistakes = [*_unknown_words(unknown), *_unknown_names(environment)]
    path = command.pop("config") or environment.get(CONFIG_ENV)
    file, shape_fields = _read_file(Path(path), mistakes) if path else ({}, {})
    sources = (_from_command(command), _from_environment(environment, mistakes), file)
    values = {option.name: _value(option, sources, mistakes) for option in OPTIONS}
    settings = None if mistakes else _settled(values, shape_fields, mistakes)
    if settings is None or mistakes:
        raise SettingsError("\n".join(mistakes))
    return settings


def _with_dashes(word: str) -> str:
    """Return `word` with underscores in an option name replaced by dashes, so that both spellings are accepted."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def _unknown_words(words: Sequence[str]) -> Iterator[str]:
    """Yield an error message for each argument that is not an option of this program.

    An option of nanoGPT or torchtitan gets a message with its replacement. Values that follow an unknown option are
    ignored.
    """
    flags = [option.flag for option in OPTIONS]
    for typed in words:
        name = typed.partition("=")[0]
        there = replacement_for("config/FILE.py" if name.startswith("config/") else name.removeprefix("--"))
        if there is not None:
            yield f"{name}: another program's; here: {there}"
        elif name.startswith("--"):
            yield f"{name}: no such option{_did_you_mean(name, flags)}"
        elif typed == words[0]:
            yield f"{typed}: expected an option"


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
    """Return the options and the model dimensions in a YAML file with one flat mapping.

    Problems are added to `mistakes`.
    """
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
    found, shape_fields = {}, {}
    for key, value in content.items():
        if key in options:
            found[key] = _Given(text=_text(value), place=f"{path}: {key}", parse=options[key].parse)
        elif key in dimensions and isinstance(value, int) and not isinstance(value, bool):
            shape_fields[key] = value
        elif key in dimensions:
            mistakes.append(f'{path}: {key}: expected a whole number, got "{value}"')
        else:
            there = replacement_for(str(key))
            known = f"; here: {there}" if there else _did_you_mean(str(key), [*options, *dimensions])
            mistakes.append(f"{path}: {key}: no such option{known}")
    return found, shape_fields


def _value(option: Option, sources: Sequence[Mapping[str, _Given]], mistakes: list[str]) -> Any:
    """Return the parsed value of an option from the first of `sources` that has it, or its default.

    The values in all other sources are parsed too, and errors are added to `mistakes`.
    """
    values = [_parsed(source[option.name], mistakes) for source in sources if option.name in source]
    return values[0] if values else option.default


def _parsed(given: _Given, mistakes: list[str]) -> Any:
    try:
        return given.parse(given.text)
    except ValueError as error:
        mistakes.append(f"{given.place}: {error}")
        return None


def _settled(values: dict[str, Any], shape_fields: dict[str, int], mistakes: list[str]) -> Settings | None:
    """Combine values that depend on each other, check them, and return the settings.

    The model is built from the shape and the options that change it. --wrapper and --ddp are merged. Problems are added
    to `mistakes`; the result is None if the model cannot be built.
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
    mistakes.extend(_contradictions(settings))
    return settings


def _contradictions(settings: Settings) -> Iterator[str]:
    """Yield an error message for each combination of options that is not possible."""
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
            yield "--packing: documents need an attention that keeps them apart, and stock is torch's own; use stream"
        if settings.compile:
            yield "--packing: documents have other lengths in each step, which --compile would compile anew; use stream"
    if settings.data is Data.SYNTHETIC and settings.tokenizer != "bytes":
        yield "--tokenizer: --data synthetic is tokens already; use --data text"
    if not settings.telemetry:
        needed = ("mem_dump_every", "mem_snapshot", "tensorboard", "step_cost")
        yield from (
            f"--{name.replace('_', '-')}: it is part of what --telemetry off leaves out; keep one of them"
            for name in needed
            if getattr(settings, name)
        )
    if settings.comm_hook != "none" and wrapper is not Wrapper.DDP:
        yield f"--comm-hook: {settings.comm_hook} is a hook of DDP and --wrapper is {wrapper}; use --wrapper ddp"
    if settings.dtype == "float16" and wrapper in SHARDED:
        yield f"--dtype: float16 needs loss scaling, which --wrapper {wrapper} does not share; use --dtype bfloat16"
    yield from _of_the_rate(settings)
    yield from _of_evaluation(settings)


def _of_the_rate(settings: Settings) -> Iterator[str]:
    """Yield an error message for each wrong combination of learning-rate options.

    The decay needs an explicit last step, so that a resumed run has the same rates as an uninterrupted run.
    """
    decay, end, warmup = settings.lr_decay, settings.decay_steps, settings.warmup_steps
    if decay is Decay.NONE:
        if end:
            yield f"--decay-steps: {end}, and nothing decays; add --lr-decay cosine"
        if settings.min_lr:
            yield f"--min-lr: {settings.min_lr:g}, and nothing decays; add --lr-decay cosine"
        return
    if end <= warmup:
        yield f"--lr-decay: {decay} needs --decay-steps above the {warmup} of --warmup-steps, got {end}"
    if settings.min_lr > settings.learning_rate:
        highest = f"{settings.learning_rate:g}"
        yield f"--min-lr: expected at most --learning-rate, which is {highest}, got {settings.min_lr:g}"


def _of_evaluation(settings: Settings) -> Iterator[str]:
    if settings.eval_data is not None and not settings.eval_every:
        yield f"--eval-data: {settings.eval_data} is read by evaluations alone; add --eval-every"
    if settings.eval_every and settings.phase is Phase.DATA:
        yield "--eval-every: --phase data has no model; use --phase step"
    if settings.eval_every and settings.eval_data is None and settings.data is not Data.SYNTHETIC:
        yield f"--eval-every: nothing of --data {settings.data} is held out; name it with --eval-data"


def _model(values: dict[str, Any], shape_fields: dict[str, int], mistakes: list[str]) -> NSAConfig | None:
    shape: NSAConfig = values.pop("shape")
    changes: dict[str, Any] = dict(shape_fields)
    for name, of_shape in _MODEL_FIELDS.items():
        value = values.pop(name)
        if value is not None:
            changes[of_shape] = value
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
    """Return a value from YAML or argparse as text, so that the same parser can be used for every source."""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value)
