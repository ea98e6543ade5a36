"""Turn a merged tree into a Scenario, or into a list of all its mistakes with their places.

First each key is checked by itself, then the keys that may contradict each other.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from nsa_harness.core.diagnosis.causes import CAUSES_OF_VERDICTS, Cause
from nsa_harness.core.scenario.layers import named_layers
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
    shown,
    tree_of_key,
    visible,
    without,
)
from nsa_harness.errors import did_you_mean

OURS_ONLY = ("model", "train", "gc", "parallel", "trace")
_LAYERLESS = (FaultKind.SKIP_COLLECTIVE, FaultKind.SET_PARAMETERS, FaultKind.STARVED_LOADER)
_LASTING = (FaultKind.LEAK, FaultKind.SET_PARAMETERS)  # these faults never end on their own


def contradictions(scenario: Scenario, program: OwnProgram | None) -> Contradictions:
    """Yield (location, message) for keys of a valid scenario that contradict each other."""
    yield from _program(scenario)
    yield from _expectations(scenario)
    if scenario.is_ours and program is not None:
        yield from program.contradictions(scenario)
    if scenario.fault is not None:
        yield from _fault(scenario, scenario.fault)


def _program(scenario: Scenario) -> Contradictions:
    run = scenario.run
    if run.command is not None and run.program != OUR_PROGRAM:
        yield ("run", "command"), "given together with program; keep one of the two"
    if scenario.is_ours:
        return
    for section in OURS_ONLY:
        if section in scenario.model_fields_set:
            yield (section,), f"only {OUR_PROGRAM} reads this; remove it and pass options in run.args"


def _expectations(scenario: Scenario) -> Contradictions:
    expect = scenario.expect
    if expect.cause and expect.verdict is ExpectedVerdict.PASS:
        yield ("expect", "cause"), "a PASS has no cause; remove it or expect FAIL or HANG"
    if expect.cause and expect.cause not in CAUSES_OF_VERDICTS:
        suggestion = did_you_mean(expect.cause, CAUSES_OF_VERDICTS)
        yield ("expect", "cause"), f"no such cause{suggestion or '; docs/findings.md lists them'}"
    for code in expect.findings:
        if code not in list(Cause):
            yield ("expect", "findings"), f"no such finding: {code}{did_you_mean(code, list(Cause))}"
    for name, bound in expect.metrics.items():
        if bound.unit is Unit.UNIFORM and not scenario.is_ours:
            what = f"only {OUR_PROGRAM} has a vocabulary that is known; give the bounds as plain numbers"
            yield ("expect", "metrics", name, "unit"), what
        if bound.device is not None and not scenario.is_ours:
            what = f"only of {OUR_PROGRAM} is it known on which device it runs; remove it"
            yield ("expect", "metrics", name, "device"), what


def _fault(scenario: Scenario, fault: FaultSection) -> Contradictions:
    if fault.rank is not None and fault.rank >= scenario.run.ranks:
        yield ("fault", "rank"), f"expected a rank below run.ranks, which is {scenario.run.ranks}, got {fault.rank}"
    if scenario.is_ours and fault.step > scenario.train.steps:
        yield ("fault", "step"), f"expected at most train.steps, which is {scenario.train.steps}, got {fault.step}"
    in_recomputation = fault.when is not None and fault.when.in_recomputation
    if fault.layer is None and fault.kind not in _LAYERLESS and not in_recomputation:
        yield ("fault",), f"{fault.kind} is planted in a layer; add `layer: 0`"
    if fault.kind is FaultKind.STARVED_LOADER and fault.step == 1:
        yield ("fault", "step"), "the first batch is fetched before there is a model to wait for; expected at least 2"
    if (fault.parameters is None) == (fault.kind is FaultKind.SET_PARAMETERS):
        hint = "expected a pattern such as" if fault.parameters is None else "only set_parameters takes"
        yield ("fault", "parameters"), f'{hint} "*.norm.weight"'
    if fault.heals_s is not None and fault.kind in _LASTING:
        yield ("fault", "heals_s"), f"{fault.kind} is never over; leave the whole fault out for a healthy run"
    if fault.when is not None:
        yield from _fault_when(fault.kind, fault.when)


def _fault_when(kind: FaultKind, when: FaultWhenSection) -> Contradictions:
    for key in ("recomputed", "any_recomputed"):
        choice = getattr(when, key)
        if choice is not None and not named_layers(choice):
            yield ("fault", "when", key), f'expected layers by their numbers, "4:9" or [3, 8], got {choice}'
    of_a_layer = when.in_recomputation or when.seq_len is not None
    if kind is FaultKind.SKIP_COLLECTIVE or (kind in _LAYERLESS and of_a_layer):
        yield ("fault", "when"), f"{kind} happens in no layer, so it cannot depend on one; remove it"
    if kind is FaultKind.LEAK and when.in_recomputation:
        yield ("fault", "when"), f"{kind} happens in every forward of its layer; remove what is asked of recomputation"


FILE_ONLY = ("schema", "extends", "matrix")
_REQUIRED = "is required"

Checked = TypeVar("Checked", bound=BaseModel)


@dataclass(frozen=True, kw_only=True)
class CheckedScenario:
    """A scenario or its mistakes; exactly one of them is present."""

    scenario: Scenario | None
    mistakes: tuple[Mistake, ...]


def checked_scenario(tree: Node, program: OwnProgram | None) -> CheckedScenario:
    """Return the scenario of a tree with resolved `extends` and `matrix`, or its mistakes and contradictions.

    `program` is None if the scenario can only belong to another program.
    """
    tree = without(tree, FILE_ONLY) if isinstance(tree.content, dict) else tree
    scenario, mistakes = checked_model(Scenario, tree)
    if scenario is None:
        return CheckedScenario(scenario=None, mistakes=mistakes)
    mistakes = in_order(key_mistake(tree, location, what) for location, what in contradictions(scenario, program))
    return CheckedScenario(scenario=None if mistakes else scenario, mistakes=mistakes)


def file_mistakes(tree: Node) -> tuple[Mistake, ...]:
    """Return the mistakes of one file, before its parent is known."""
    return checked_model(ScenarioFile, tree)[1]


def axis_mistakes(key: str, value: Node) -> Iterator[Mistake]:
    """Yield the mistakes of one value that a matrix gives to a dotted key, such as gc.mode.

    A missing key is no mistake here, because the scenario or another axis may set it. The value of a whole section
    (no dot) is only checked in the merged scenario.
    """
    for mistake in file_mistakes(tree_of_key(key, value)):
        if mistake.key.startswith(key) and "." in key and mistake.what != _REQUIRED:
            yield mistake


def key_mistake(tree: Node, location: Location, what: str) -> Mistake:
    """Return a mistake at the place where the key was given."""
    key = ".".join(visible(str(step)) for step in _steps_in_file(tree, location))
    return Mistake(origin=origin_of(tree, location), key=key, what=what)


def _steps_in_file(tree: Node, location: Location) -> Iterator[str | int]:
    """Yield the steps of a pydantic location that the file has; a single item may be written without its list."""
    here: Node | None = tree
    for step in location:
        content = here.content if here else None
        if isinstance(step, str):
            yield step
            here = content.get(step) if isinstance(content, dict) else None
        elif isinstance(content, tuple):
            yield step
            here = next(iter(content[step : step + 1]), None)


def checked_model(
    model: type[Checked], tree: Node, context: object = None
) -> tuple[Checked | None, tuple[Mistake, ...]]:
    """Return the model that a tree describes, or a mistake for every invalid key. Validators receive `context`."""
    value = plain(tree)
    if not isinstance(value, dict):
        what = f"expected keys and values such as `about: ...`, got {_shape(value)}"
        return None, (Mistake(origin=tree.origin, key="", what=what),)
    try:
        # Strict mode takes enumerations and tuples only from JSON.
        return model.model_validate_json(json.dumps(value), context=context), ()
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
    kind, given, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(model, _location(detail))
    if kind == "missing":
        return _REQUIRED
    if kind == "value_error":
        return str(context["error"])
    if kind in ("enum", "literal_error"):
        return _not_a_choice(str(context["expected"]), given)
    if kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        unit = " characters" if kind == "string_too_long" else ""
        got = f"{len(given)}" if unit else shown(given)
        return f"expected {words} {context[name]:g}{unit}, got {got}"
    hint = _quote_hint(kind, given)
    return f"expected {_KINDS.get(kind, detail['msg'])}, got {_shape(given)}{hint}"


def _shape(given: object) -> str:
    if isinstance(given, dict):
        return "keys and values" if given else "an empty map"
    if isinstance(given, list | tuple):
        return "a list" if given else "an empty list"
    return shown(given)


def _quote_hint(kind: str, given: object) -> str:
    if kind == "string_type" and isinstance(given, int | float):
        return "; quote it"
    if kind in ("int_type", "float_type") and isinstance(given, str) and given.replace(".", "", 1).isdigit():
        return "; remove the quotes"
    if kind == "bool_type" and str(given).lower() in ("yes", "no", "on", "off"):
        return "; YAML 1.2 knows only true and false"
    return ""


def _not_a_choice(expected: str, given: object) -> str:
    choices = [choice.strip("' ") for choice in expected.replace(" or ", ", ").split(",")]
    words = "expected " + (f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0])
    return f"{words}, got {_shape(given)}{did_you_mean(str(given), choices)}"


def _unknown_key(model: type[BaseModel], location: Location) -> str:
    section = _section(model, location[:-1])
    fields = [field.alias or name for name, field in section.model_fields.items()] if section else []
    suggestion = did_you_mean(str(location[-1]), fields)
    return f"unknown key{suggestion or '; known here: ' + ', '.join(fields)}"


def _section(model: type[BaseModel], location: Location) -> type[BaseModel] | None:
    """Return the model that reads the map at `location`."""
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


def dotted(value: Plain, whole: Collection[str] = (), prefix: str = "") -> Iterator[tuple[str, Plain]]:
    """Yield every dotted key with its value. A list is one value, and so is every key named in `whole`."""
    assert isinstance(value, dict)
    for key, item in value.items():
        if isinstance(item, dict) and f"{prefix}{key}" not in whole:
            yield from dotted(item, whole, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item


def as_plain(scenario: Scenario) -> Plain:
    """Return every key with its value, defaults included, in the order of the models."""
    value: Plain = scenario.model_dump(mode="json")
    return value
