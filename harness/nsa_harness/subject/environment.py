"""Translate the documented NSA_* environment variables into scenario overrides."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nsa_harness.core.scenario.layers import parse_layers
from nsa_harness.core.scenario.overrides import Override
from nsa_harness.core.scenario.yaml_tree import Origin, Plain, from_plain, value_text
from nsa_harness.errors import UsageError, did_you_mean

_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _switch(text: str) -> Plain:
    if text.lower() not in _SWITCH:
        raise ValueError(f"expected 0 or 1, got {value_text(text)}")
    return _SWITCH[text.lower()]


def _range(text: str) -> Plain:
    if ":" not in text:
        raise ValueError(f'expected "start:stop" with start < stop, got {value_text(text)}')
    return parse_layers(text)


def _layer_numbers(text: str) -> Plain:
    if not re.fullmatch(r"\d{1,4}(,\d{1,4})*", text):
        raise ValueError(f"expected layer numbers such as 2,6, got {value_text(text)}")
    return [int(layer) for layer in text.split(",")]


def _count(text: str) -> Plain:
    if not re.fullmatch(r"\d{1,9}", text):
        raise ValueError(f"expected a number of steps, got {value_text(text)}")
    return int(text)


def _branch(text: str) -> Plain:
    if text not in ("cmp", "sel", "win"):
        raise ValueError(f"expected cmp, sel or win, got {value_text(text)}{did_you_mean(text, ('cmp', 'sel', 'win'))}")
    return text


def _backend(text: str) -> Plain:
    if text not in ("auto", "gloo", "nccl"):
        raise ValueError(f"expected auto, gloo or nccl, got {value_text(text)}{did_you_mean(text, ('gloo', 'nccl'))}")
    return text


def _flash(text: str) -> Plain:
    return "flash" if _switch(text) else "auto"


# Variable -> (scenario key, parser). nsa.train reads these itself, but its command line, which spells out every option,
# takes precedence over them.
TABLE: dict[str, tuple[str, Callable[[str], Plain]]] = {
    "NSA_GC_RANGE": ("gc.layers", _range),
    "NSA_GC_LAYERS": ("gc.layers", _layer_numbers),
    "NSA_FORCE_BRANCH": ("model.branch", _branch),
    "NSA_DDP_STATIC_GRAPH": ("parallel.static_graph", _switch),
    "NSA_USE_FA2": ("model.impl", _flash),
    "NSA_TRACE_GRADS": ("trace.grads", _switch),
    "NSA_TRACE_MODULE_BWD": ("trace.module_bwd", _switch),
    "NSA_TRACE_DDP_BUCKETS": ("trace.buckets", _switch),
    "NSA_MEM_DUMP_EVERY": ("trace.mem_dump_every", _count),
    "TORCH_BACKEND": ("needs.backend", _backend),
}
OVERRULED = {
    name: f"has no effect, the command line of nsa.train goes before it; set {key}" for name, (key, _) in TABLE.items()
}
# Read by nsa.train itself; the harness sets it for each attempt.
_PASSED_ON = ("NSA_OUT_DIR",)


def is_read_by_program(name: str) -> bool:
    """Return whether nsa.train reads this variable, which then must not leak from the user's shell."""
    return name.startswith("NSA_") or name in ("TORCH_BACKEND", "CONFIG")


@dataclass(frozen=True, kw_only=True)
class EnvironmentOverride:
    """A scenario value set by an environment variable, with a note for the report."""

    override: Override
    note: str


def environment_overrides(environ: Mapping[str, str]) -> tuple[EnvironmentOverride, ...]:
    """Return the scenario values set by NSA_* variables. Raise UsageError if a variable is invalid."""
    mistakes = list(_unknown(environ))
    if "NSA_GC_RANGE" in environ and "NSA_GC_LAYERS" in environ:
        mistakes.append("environment NSA_GC_LAYERS: NSA_GC_RANGE is set too, and both choose gc.layers; unset one")
    overrides = []
    for variable, (key, parse) in TABLE.items():
        if variable not in environ:
            continue
        try:
            value = from_plain(parse(environ[variable]), Origin(source=f"environment {variable}"))
        except ValueError as error:
            mistakes.append(f"environment {variable}: {error}")
        else:
            note = f"{variable}={environ[variable]} in the environment set {key}"
            overrides.append(EnvironmentOverride(override=Override(key=key, value=value), note=note))
    if mistakes:
        raise UsageError("\n".join(mistakes))
    return tuple(overrides)


def _unknown(environ: Mapping[str, str]) -> list[str]:
    ours = sorted(name for name in environ if name.startswith("NSA_") and not name.startswith("NSA_HARNESS_"))
    known_names = (*TABLE, *_PASSED_ON)
    return [
        f"environment {name}: nsa.train does not know this name{did_you_mean(name, known_names) or '; unset it'}"
        for name in ours
        if name not in known_names
    ]
