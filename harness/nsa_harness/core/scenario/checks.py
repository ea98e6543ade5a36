"""Check a scenario file and report all errors with file, line and column."""

from __future__ import annotations

import json
import typing
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from nsa_harness.core.diagnosis.causes import CAUSES_OF_VERDICTS, Cause
from nsa_harness.core.raw_bytes import readable_json
from nsa_harness.core.scenario.layers import numbered_layers
from nsa_harness.core.scenario.program import Contradictions, Location, OwnProgram
from nsa_harness.core.scenario.scenario import (
    OUR_PROGRAM,
    ExpectedVerdict,
    FaultKind,
    FaultSection,
    FaultWhenSection,
    Scenario,
    ScenarioFile,
    Unit,
)
from nsa_harness.core.scenario.yaml_tree import (
    Mistake,
    Node,
    Plain,
    in_order,
    origin_of,
    plain,
    tree_of_key,
    value_text,
    visible,
    without,
)
from nsa_harness.errors import did_you_mean

_CAUSES_LISTED = "; docs/findings.md lists them"
OURS_ONLY = ("model", "train", "gc", "parallel", "trace")
_LAYERLESS = (FaultKind.SKIP_COLLECTIVE, FaultKind.SET_PARAMETERS, FaultKind.STARVED_LOADER)
_LASTING = (FaultKind.LEAK, FaultKind.SET_PARAMETERS)  # faults that never heal


def contradictions(scenario: Scenario, program: OwnProgram | None) -> Contradictions:
    """Yield a location and a message for each contradiction between keys of a scenario."""
    yield from _program(scenario)
    yield from _expectations(scenario)
    if scenario.is_ours and program is not None:
        yield from program.contradictions(scenario)
    if scenario.fault is not None:
        yield from _fault(scenario, scenario.fault)


def _program(scenario: Scenario) -> Contradictions:
    run = scenario.run
    if run.command is not None and run.program != OUR_PROGRAM:
        yield ("run", "command"), "cannot be combined with run.program; keep one of the two"
    if scenario.is_ours:
        return
    for section in OURS_ONLY:
        if section in scenario.model_fields_set:
            yield (section,), f"only {OUR_PROGRAM} reads this; remove it and pass options in run.args"


def _expectations(scenario: Scenario) -> Contradictions:
    expect = scenario.expect
    if expect.cause and expect.verdict is ExpectedVerdict.PASS:
        yield ("expect", "cause"), "a PASS has no cause; remove it, or expect FAIL or HANG"
    if expect.cause and expect.cause not in CAUSES_OF_VERDICTS:
        suggestion = did_you_mean(expect.cause, CAUSES_OF_VERDICTS)
        yield (("expect", "cause"), f"unknown cause {value_text(expect.cause)}{suggestion or _CAUSES_LISTED}")
    for code in expect.findings:
        if code not in list(Cause):
            suggestion = did_you_mean(code, list(Cause))
            yield (("expect", "findings"), f"unknown finding {value_text(code)}{suggestion or _CAUSES_LISTED}")
    for name, bound in expect.metrics.items():
        if bound.unit is Unit.UNIFORM and not scenario.is_ours:
            message = f"uniform needs the size of the vocabulary, which is known only for {OUR_PROGRAM}; give numbers"
            yield ("expect", "metrics", name, "unit"), message
        if bound.device is not None and not scenario.is_ours:
            message = f"the device is known only for {OUR_PROGRAM}; remove it"
            yield ("expect", "metrics", name, "device"), message


def _fault(scenario: Scenario, fault: FaultSection) -> Contradictions:
    if fault.rank is not None and fault.rank >= scenario.run.ranks:
        yield ("fault", "rank"), f"expected a rank below run.ranks ({scenario.run.ranks}), got {fault.rank}"
    if scenario.is_ours and fault.step > scenario.train.steps:
        yield ("fault", "step"), f"expected at most train.steps ({scenario.train.steps}), got {fault.step}"
    in_recomputation = fault.when is not None and fault.when.in_recomputation
    if fault.layer is None and fault.kind not in _LAYERLESS and not in_recomputation:
        yield ("fault",), f"a {fault.kind} fault needs a layer, such as `layer: 0`"
    if fault.kind is FaultKind.STARVED_LOADER and fault.step == 1:
        yield ("fault", "step"), "expected at least 2, because the first batch is fetched before the model exists"
    if (fault.parameters is None) == (fault.kind is FaultKind.SET_PARAMETERS):
        missing = fault.parameters is None
        message = (
            'expected a pattern such as "*.norm.weight"' if missing else "only set_parameters has this key; remove it"
        )
        yield ("fault", "parameters"), message
    if fault.heals_s is not None and fault.kind in _LASTING:
        yield ("fault", "heals_s"), f"a {fault.kind} fault never heals; for a healthy run, remove the whole fault"
    if fault.when is not None:
        yield from _fault_when(fault.kind, fault.when)


def _fault_when(kind: FaultKind, when: FaultWhenSection) -> Contradictions:
    for key in ("recomputed", "any_recomputed"):
        choice = getattr(when, key)
        if choice is not None and not numbered_layers(choice):
            yield ("fault", "when", key), f'expected layer numbers, such as "4:9" or [3, 8], got {choice}'
    of_a_layer = when.in_recomputation or when.seq_len is not None
    if kind is FaultKind.SKIP_COLLECTIVE or (kind in _LAYERLESS and of_a_layer):
        yield ("fault", "when"), f"a {kind} fault does not happen in a layer, so it cannot depend on layers; remove it"
    if kind is FaultKind.LEAK and when.in_recomputation:
        yield (
            ("fault", "when"),
            f"a {kind} fault happens in every forward pass of its layer; remove the conditions on recomputation",
        )


FILE_ONLY = ("schema", "extends", "matrix")
_REQUIRED = "is required"

ModelT = TypeVar("ModelT", bound=BaseModel)


@dataclass(frozen=True, kw_only=True)
class CheckedScenario:
    """A scenario that passed all checks, or the errors found in it."""

    scenario: Scenario | None
    mistakes: tuple[Mistake, ...]


def check_scenario(tree: Node, program: OwnProgram | None) -> CheckedScenario:
    """Return the scenario that a YAML tree describes, or its errors."""
    tree = without(tree, FILE_ONLY) if isinstance(tree.content, dict) else tree
    scenario, mistakes = parse_model(Scenario, tree)
    if scenario is None:
        return CheckedScenario(scenario=None, mistakes=mistakes)
    mistakes = in_order(key_mistake(tree, location, message) for location, message in contradictions(scenario, program))
    return CheckedScenario(scenario=None if mistakes else scenario, mistakes=mistakes)


def file_mistakes(tree: Node) -> tuple[Mistake, ...]:
    """Return the errors in one scenario file, excluding those in the file that it extends."""
    return parse_model(ScenarioFile, tree)[1]


def axis_mistakes(key: str, value: Node) -> Iterator[Mistake]:
    """Yield the errors in one value of a matrix, for a dotted key such as "gc.mode"."""
    for mistake in file_mistakes(tree_of_key(key, value)):
        if mistake.key.startswith(key) and "." in key and mistake.message != _REQUIRED:
            yield mistake


def key_mistake(tree: Node, location: Location, message: str) -> Mistake:
    """Return an error with the line and column of the key at `location`."""
    key = ".".join(visible(str(step)) for step in _steps_in_file(tree, location))
    return Mistake(origin=origin_of(tree, location), key=key, message=message)


def _steps_in_file(tree: Node, location: Location) -> Iterator[str | int]:
    """Yield the keys and indices of a pydantic location that exist in the file."""
    here: Node | None = tree
    for step in location:
        content = here.content if here else None
        if isinstance(step, str):
            yield step
            here = content.get(step) if isinstance(content, dict) else None
        elif isinstance(content, tuple):
            yield step
            here = next(iter(content[step : step + 1]), None)


def parse_model(model: type[ModelT], tree: Node, context: object = None) -> tuple[ModelT | None, tuple[Mistake, ...]]:
    """Return the model that a YAML tree describes, or None and its errors. Validators receive `context`."""
    value = plain(tree)
    if not isinstance(value, dict):
        message = f"expected keys and values such as `about: ...`, got {_shape(value)}"
        return None, (Mistake(origin=tree.origin, key="", message=message),)
    try:
        # In strict mode, pydantic accepts enumerations and tuples only from JSON.
        return model.model_validate_json(readable_json(json.dumps(value)), context=context), ()
    except ValidationError as error:
        details = error.errors(include_url=False)
    mistakes = [key_mistake(tree, _location(detail), _message(model, detail)) for detail in details]
    return None, in_order(mistakes)


def _location(detail: ErrorDetails) -> Location:
    return tuple(step for step in detail["loc"] if step != "[key]")


_KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a smaller number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "keys and values",
    "model_type": "keys and values",
    "too_short": "at least one item",
    "string_too_short": "some text",
}
_BOUNDS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
    "string_too_long": ("at most", "max_length"),
}


def _message(model: type[BaseModel], detail: ErrorDetails) -> str:
    """Return a message for a pydantic error that says what was expected and what was given."""
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(model, _location(detail))
    if kind == "missing":
        return _REQUIRED
    if kind == "value_error":
        return str(context["error"])
    if kind in ("enum", "literal_error"):
        return _not_a_choice(str(context["expected"]), value)
    if kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        unit = " characters" if kind == "string_too_long" else ""
        got = f"{len(value)}" if unit else value_text(value)
        return f"expected {words} {context[name]:g}{unit}, got {got}"
    hint = _quote_hint(kind, value)
    return f"expected {_KINDS.get(kind, detail['msg'])}, got {_shape(value)}{hint}"


def _shape(value: object) -> str:
    """Describe a value in a message. Containers are described in words, such as "a list"."""
    if isinstance(value, dict):
        return "keys and values" if value else "an empty map"
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    return value_text(value)


def _quote_hint(kind: str, value: object) -> str:
    """Return a hint about missing or superfluous quotes, or "" if the quotes are not the problem."""
    if kind == "string_type" and isinstance(value, int | float):
        return "; quote it"
    if kind in ("int_type", "float_type") and isinstance(value, str) and value.replace(".", "", 1).isdigit():
        return "; remove the quotes"
    if kind == "bool_type" and str(value).lower() in ("yes", "no", "on", "off"):
        return "; YAML 1.2 has only true and false"
    return ""


def _not_a_choice(choices_text: str, value: object) -> str:
    choices = [choice.strip("' ") for choice in choices_text.replace(" or ", ", ").split(",")]
    words = "expected " + (f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0])
    return f"{words}, got {_shape(value)}{did_you_mean(str(value), choices)}"


def _unknown_key(model: type[BaseModel], location: Location) -> str:
    section = _section(model, location[:-1])
    fields = [field.alias or name for name, field in section.model_fields.items()] if section else []
    suggestion = did_you_mean(str(location[-1]), fields)
    return f"unknown key{suggestion or '; keys here: ' + ', '.join(fields)}"


def _section(model: type[BaseModel], location: Location) -> type[BaseModel] | None:
    """Return the pydantic model for the map at `location`, or None if there is none."""
    here: object = model
    for step in location:
        if isinstance(here, type) and issubclass(here, BaseModel):
            here = next((f.annotation for name, f in here.model_fields.items() if (f.alias or name) == step), None)
        elif typing.get_origin(here) is dict:
            here = typing.get_args(here)[1]
        elif typing.get_origin(here) is tuple:
            here = typing.get_args(here)[0]
        options = [option for option in typing.get_args(here) if option is not type(None)]
        here = options[0] if typing.get_origin(here) is not dict and len(options) == 1 else here
    return here if isinstance(here, type) and issubclass(here, BaseModel) else None


def dotted_items(value: Plain, whole: Collection[str] = (), prefix: str = "") -> Iterator[tuple[str, Plain]]:
    """Yield every value in nested maps with its dotted key. Lists, and the keys in `whole`, are one value."""
    assert isinstance(value, dict)
    for key, item in value.items():
        if isinstance(item, dict) and f"{prefix}{key}" not in whole:
            yield from dotted_items(item, whole, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item


def as_plain(scenario: Scenario) -> Plain:
    """Return the scenario as plain maps and lists, including all default values."""
    value: Plain = scenario.model_dump(mode="json")
    return value
