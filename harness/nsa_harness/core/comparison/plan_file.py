"""Read plan files, which name the scenarios to run and the decisions made in advance about their results.

The models below define every key. Names of scenarios, causes, keys and commands are checked while they are read.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import chain, pairwise
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    PlainValidator,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, InitErrorDetails, core_schema
from typing_extensions import TypeAliasType

from nsa_harness.core.comparison.contrasts import EVERY_RUN, RELATIONS, Comparison, KeyFilter, RunFilter
from nsa_harness.core.diagnosis.causes import CAUSES_OF_VERDICTS
from nsa_harness.core.scenario.checks import OURS_ONLY, axis_mistakes, parse_model
from nsa_harness.core.scenario.overrides import is_override, parse_axis, parse_override
from nsa_harness.core.scenario.program import Location
from nsa_harness.core.scenario.resolve import SETTING_SECTIONS, shown_setting
from nsa_harness.core.scenario.scenario import Scenario
from nsa_harness.core.scenario.selection import Selectable
from nsa_harness.core.scenario.yaml_tree import (
    Mistake,
    Node,
    Origin,
    from_plain,
    in_order,
    parse_yaml,
    plain,
    value_text,
)
from nsa_harness.errors import UsageError, did_you_mean

COMMANDS = ("run", "bisect", "claim")
FAILS, PASSES = "fails", "passes"
PLACEHOLDER = re.compile(r"\{([a-z_]+(?:\.[A-Za-z0-9_]+)*)(?:\*([0-9]{1,3}))?\}")
_RELATIVE = tuple(RELATIONS)
_ANY, _UNCERTAIN, _NOT = "any", "uncertain", "not"
_KEYS = tuple(
    f"{section}.{name}"
    for section in SETTING_SECTIONS
    for name in type(getattr(Scenario(name="x"), section)).model_fields
)
_ENV_PREFIX = "run.env."
_KNOWN_CAUSES = (*CAUSES_OF_VERDICTS, _UNCERTAIN)


class ConditionForm(StrEnum):
    """The kind of a decision rule's condition, which follows from the keys that the condition contains."""

    FLAKY = "flaky"  # the attempts of one launch end differently
    FAILS = "fails"  # at least one of the runs fails
    PASSES = "passes"  # each of the runs passes
    CONTRAST = "fails and passes"
    EACH = "fails and each_passes"
    ALIKE = "fails and fails_alike"
    MISSING = "missing_gradients"


CONTRASTS = (ConditionForm.CONTRAST, ConditionForm.EACH, ConditionForm.ALIKE)
_FORMS: Mapping[frozenset[str], ConditionForm] = {
    frozenset({"flaky"}): ConditionForm.FLAKY,
    frozenset({"missing_gradients"}): ConditionForm.MISSING,
    frozenset(): ConditionForm.FAILS,
    frozenset({"fails"}): ConditionForm.FAILS,
    frozenset({"passes"}): ConditionForm.PASSES,
    frozenset({"fails", "passes"}): ConditionForm.CONTRAST,
    frozenset({"fails", "each_passes"}): ConditionForm.EACH,
    frozenset({"fails", "fails_alike"}): ConditionForm.ALIKE,
}
_FORM_KEYS = frozenset({"flaky", "missing_gradients", "fails", "passes", "each_passes", "fails_alike"})


@dataclass(frozen=True, kw_only=True)
class _KnownNames:
    """The names of scenarios and decision rules to which a plan can refer."""

    scenarios: Sequence[Selectable]
    runs: Sequence[Selectable]  # the scenarios that the plan runs
    gates: Collection[str]


Mistakes = Iterator[tuple[Location, str]]  # pairs of (location inside a value, message)


def _raise_if_any(value: object, mistakes: Mistakes) -> None:
    """Raise ValidationError if `mistakes` contains any errors in `value`."""
    if lines := _error_lines(value, mistakes):
        raise ValidationError.from_exception_data("plan", lines)


def _error_lines(value: object, mistakes: Mistakes) -> list[InitErrorDetails]:
    return [
        InitErrorDetails(type="value_error", loc=location, input=value, ctx={"error": ValueError(message)})
        for location, message in mistakes
    ]


def _unknown_name(noun: str, word: str, known_names: Collection[str]) -> Mistakes:
    if word not in known_names:
        hint = did_you_mean(word, known_names) or (
            f"; known: {', '.join(known_names)}" if len(known_names) < 12 else ""
        )
        yield (), f"no {noun} {value_text(word)}{hint}"


class _OneOrManyMarker:
    """A marker for a tuple field whose only item can be written without a list."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(_as_items, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        array = handler(schema)
        return {"anyOf": [array["items"], {**array, "minItems": 1}]}


def _as_items(value: Any) -> tuple[Any, ...]:
    if value == []:
        raise ValueError("expected at least one item, got an empty list")
    return _as_tuple(value)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


Item = TypeVar("Item")
OneOrMany = Annotated[tuple[Item, ...], _OneOrManyMarker()]
Text = Annotated[str, StringConstraints(min_length=1)]


def _check_scenario(name: str, info: ValidationInfo) -> str:
    names: _KnownNames | None = info.context
    if names is None:
        return name
    words = {word for scenario in names.scenarios for word in (scenario.name, scenario.family)}
    if name not in words:
        canonical = next((scenario.name for scenario in names.scenarios if name in scenario.aliases), None)
        hint = f"; it is another name of {canonical}: write that" if canonical else did_you_mean(name, words)
        raise ValueError(f"no scenario named {value_text(name)}{hint}")
    return name


def _check_tag(tag: str, info: ValidationInfo) -> str:
    known_tags = {tag for scenario in info.context.scenarios for tag in scenario.tags} if info.context else {tag}
    if tag not in known_tags:
        raise ValueError(f"no scenario has the tag {value_text(tag)}{did_you_mean(tag, known_tags)}")
    return tag


def _check_rule(name: str, info: ValidationInfo) -> str:
    _raise_if_any(name, _unknown_name("gate", name, info.context.gates) if info.context else iter(()))
    return name


def _check_cause(cause: str) -> str:
    _raise_if_any(cause, _unknown_name("cause", cause, _KNOWN_CAUSES))
    return cause


def _check_key(key: str) -> str:
    if key not in _KEYS and not (key.startswith(_ENV_PREFIX) and len(key) > len(_ENV_PREFIX)):
        hint = did_you_mean(key, _KEYS) or f"; known are the keys of {', '.join(SETTING_SECTIONS)}"
        raise ValueError(f"{value_text(key)} is no key in which runs can differ{hint}")
    return key


def _read_command(text: object, info: ValidationInfo) -> tuple[str, ...]:
    """Split a command into the arguments that follow `nsa-harness`, and check them."""
    if not isinstance(text, str) or not text:
        raise ValueError(f"expected text, got {value_text(text)}")
    try:
        words = tuple(shlex.split(text)) or ("",)
    except ValueError as error:
        raise ValueError(f"{error} in {value_text(text)}") from None
    condition = info.data.get("condition")  # None in a tree question, and if the condition itself is invalid
    sides = condition.placeholders if condition else (FAILS,) if "asks" in info.data else (FAILS, PASSES)
    unknown_command = _unknown_name("command", words[0], COMMANDS)
    _raise_if_any(text, chain(unknown_command, _placeholder_mistakes(words, sides), _override_mistakes(words)))
    return words


def _placeholder_mistakes(words: Iterable[str], permitted_names: Collection[str]) -> Mistakes:
    for word in words:
        for name in (match[1] for match in PLACEHOLDER.finditer(word)):
            if "." not in name and name not in permitted_names:
                known = ", ".join(f"{{{side}}}" for side in permitted_names)
                yield (), f"{{{name}}} has no value here; known: {known}"


def _override_mistakes(words: Sequence[str]) -> Mistakes:
    """Yield the errors in the KEY=VALUE arguments of a command."""
    for before, word in pairwise(words):
        if not is_override(word):
            continue
        try:
            if before == "--matrix" or words[0] == "claim":
                parse_axis(word, "")
                continue
            override = parse_override(PLACEHOLDER.sub("1", word), "")
        except UsageError as error:
            yield (), str(error).removeprefix(": ")
            continue
        yield from (
            ((), f"{mistake.key}: {mistake.message}") for mistake in axis_mistakes(override.key, override.value)
        )


def _check_is_run(name: str, info: ValidationInfo) -> str:
    if info.context and not any(name in (run.name, run.family) for run in info.context.runs):
        raise ValueError(f"this plan does not run {value_text(name)}; add it to `scenarios`")
    return name


_NAMES: TypeAdapter[tuple[str, ...]] = TypeAdapter(
    OneOrMany[Annotated[Text, AfterValidator(_check_scenario), AfterValidator(_check_is_run)]],
    config=ConfigDict(defer_build=True),
)


def _read_runs(value: object, info: ValidationInfo) -> RunFilter:
    """Return a filter for runs described by `any`, by scenario names, or by settings."""
    if value == _ANY:
        return EVERY_RUN
    if not isinstance(value, dict):
        return RunFilter(scenarios=_NAMES.validate_python(value, context=info.context))
    _raise_if_any(value, (mistake for key, spec in value.items() for mistake in _key_mistakes(key, spec)))
    return RunFilter(values=tuple(_key_filter(key, spec) for key, spec in value.items()))


def _key_mistakes(key: str, spec: Any) -> Mistakes:
    try:
        _check_key(key)
    except ValueError as error:
        yield (key,), str(error)
        return
    location = (_NOT,) if isinstance(spec, dict) else ()
    if location and spec.keys() != {_NOT}:
        yield (key,), f"expected a value, a list of values, or {{{_NOT}: VALUE}}, got the keys {', '.join(spec)}"
        return
    items = _as_tuple(spec[_NOT] if location else spec)
    if not items:
        yield (key,), "expected at least one item, got an empty list"
    for number, item in enumerate(items) if spec not in _RELATIVE else ():
        mistakes = axis_mistakes(key, from_plain(item, Origin(source="")))
        yield from (((key, *location, number), mistake.message) for mistake in mistakes)


def _key_filter(key: str, spec: Any) -> KeyFilter:
    if spec in _RELATIVE:
        return KeyFilter(key=key, comparison=Comparison(spec))
    test = Comparison.OTHER_THAN if isinstance(spec, dict) else Comparison.ONE_OF
    items = _as_tuple(spec[_NOT] if isinstance(spec, dict) else spec)
    return KeyFilter(key=key, comparison=test, values=tuple(shown_setting(item) for item in items))


_ENV_KEY_SCHEMA = {"type": "string", "pattern": f"^{re.escape(_ENV_PREFIX)}."}


def _runs_schema() -> dict[str, Any]:
    scalar = {"type": ["string", "number", "boolean", "null"]}
    values = [scalar, {"type": "array", "items": scalar, "minItems": 1}]
    different = {"type": "object", "properties": {_NOT: {"anyOf": values}}, "required": [_NOT]}
    by_key = {
        "type": "object",
        "propertyNames": {"anyOf": [{"enum": [*_KEYS]}, _ENV_KEY_SCHEMA]},
        "additionalProperties": {"anyOf": [*values, {**different, "additionalProperties": False}]},
    }
    name = {"type": "string", "minLength": 1}
    return {"anyOf": [name, {"type": "array", "items": name, "minItems": 1}, by_key]}


Key = Annotated[Text, AfterValidator(_check_key), WithJsonSchema({"anyOf": [{"enum": [*_KEYS]}, _ENV_KEY_SCHEMA]})]
CauseName = Annotated[Text, AfterValidator(_check_cause), WithJsonSchema({"enum": [*_KNOWN_CAUSES]})]
RuleName = Annotated[Text, AfterValidator(_check_rule)]
Command = Annotated[
    tuple[str, ...],
    PlainValidator(_read_command),
    WithJsonSchema({"type": "string", "pattern": f"^({'|'.join(COMMANDS)})\\b"}),
]
Runs = TypeAliasType("Runs", Annotated[RunFilter, PlainValidator(_read_runs), WithJsonSchema(_runs_schema())])
# The value is None only if the key is not written. A written null is rejected, as in `Runs`.
OptionalRuns = TypeAliasType(
    "OptionalRuns", Annotated[RunFilter | None, PlainValidator(_read_runs), WithJsonSchema(_runs_schema())]
)


class _StrictModel(BaseModel):
    """The base class of the models in a plan file. Unknown keys are rejected."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)

    @classmethod
    def contradictions(cls, content: Mapping[str, Any]) -> Mistakes:  # noqa: ARG003
        """Yield the contradictions between keys in `content`, whose values can be invalid."""
        return iter(())

    @model_validator(mode="wrap")
    @classmethod
    def _check_between_keys(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        between = _error_lines(value, cls.contradictions(value)) if isinstance(value, dict) else []
        try:
            model = handler(value)
        except ValidationError as error:
            of_keys: Any = error.errors(include_url=False)
            raise ValidationError.from_exception_data("plan", [*of_keys, *between]) from None
        if between:
            raise ValidationError.from_exception_data("plan", between)
        return model


class Condition(_StrictModel):
    """The condition of a decision rule, such as "a gloo run fails"."""

    flaky: OptionalRuns = None
    missing_gradients: Literal["same"] | None = None
    fails: OptionalRuns = None
    passes: OptionalRuns = None
    each_passes: OptionalRuns = None
    fails_alike: OptionalRuns = None
    cause: OneOrMany[CauseName] = ()
    differ_in: OneOrMany[Key] = ()  # the keys in which the two runs of a contrast must differ, and in no other key
    where: Runs = EVERY_RUN  # only these runs count; runs whose value of such a key is unknown count too

    @property
    def form(self) -> ConditionForm:
        """The kind of the condition, which follows from the keys that the condition contains."""
        return _FORMS[_FORM_KEYS & self.model_fields_set]

    @property
    def runs(self) -> RunFilter:
        """The runs to which the condition refers. If runs are compared, these are the runs that must fail."""
        return self.flaky or (self.passes if self.form is ConditionForm.PASSES else self.fails) or EVERY_RUN

    @property
    def other_runs(self) -> RunFilter:
        """The runs that are compared with the failing runs."""
        passes = self.passes if self.form is ConditionForm.CONTRAST else None
        return passes or self.each_passes or self.fails_alike or EVERY_RUN

    @property
    def causes(self) -> tuple[str, ...]:
        """The causes of failure that count. If there are none, every cause inside the program counts."""
        return tuple(cause for cause in self.cause if cause != _UNCERTAIN)

    @property
    def uncertain(self) -> bool:
        """Whether only failures without a certain cause count."""
        return _UNCERTAIN in self.cause

    @property
    def placeholders(self) -> tuple[str, ...]:
        """The placeholders that a command in this rule can use, such as "fails"."""
        if self.form is ConditionForm.PASSES:
            return (PASSES,)
        return (FAILS, PASSES) if self.form in (ConditionForm.CONTRAST, ConditionForm.EACH) else (FAILS,)

    @property
    def needs_our_program(self) -> bool:
        """Whether only runs of our own training program can decide the condition."""
        keys = [key_filter.key for runs in (self.runs, self.other_runs) for key_filter in runs.values]
        return self.form is ConditionForm.MISSING or any(map(is_our_key, (*keys, *self.differ_in)))

    @property
    def takes_precedence(self) -> bool:
        """Whether the rule applies even to failures whose cause is certain."""
        return self.form is ConditionForm.FLAKY or bool(self.causes or self.runs.scenarios)

    @classmethod
    def contradictions(cls, content: Mapping[str, Any]) -> Mistakes:
        form = _FORMS.get(_FORM_KEYS.intersection(content))
        if form is None or not content.keys() - {"where", "differ_in"}:
            forms = ", ".join(" with ".join(sorted(form_keys)) for form_keys in _FORMS if form_keys)
            yield (), f"expected one of: {forms}, cause; got {', '.join(sorted(content)) or 'nothing'}"
        contrast = form in CONTRASTS
        differ_in, causes = _texts(content.get("differ_in", ())), _texts(content.get("cause", ()))
        if contrast and "differ_in" not in content:
            message = "is required: two runs can only be compared if they differ in these keys and in no other key"
            yield ("differ_in",), message
        if not contrast and "differ_in" in content:
            yield ("differ_in",), "needs two sides, such as `fails` and `passes`; remove it, or add the other side"
        if "cause" in content and not (form is ConditionForm.FAILS or contrast):
            yield ("cause",), "is the cause of a failure; remove it, or use `fails`"
        if _UNCERTAIN in causes and len({*causes}) > 1:
            yield ("cause",), f"{_UNCERTAIN} cannot be combined with a cause"
        # `more` on one side is `less` on the other, of the first key in which the two runs differ.
        ends = [end for name in _FORM_KEYS if isinstance(end := content.get(name), dict)]
        more, less = ({key for end in ends for key, value in end.items() if value == test} for test in _RELATIVE)
        if (more or less) and not (contrast and more == less == {*differ_in[:1]}):
            yield ("fails",), "write `more` on one side and `less` on the other, for the first key of `differ_in`"
        each = content.get("each_passes")
        values = each.get(differ_in[0]) if isinstance(each, dict) and differ_in else None
        if form is ConditionForm.EACH and differ_in and not (isinstance(values, list) and len(values) > 1):
            message = f"expected at least two values of {differ_in[0]}, such as {{{differ_in[0]}: [A, B]}}"
            yield ("each_passes",), message


class DecisionRule(_StrictModel):
    """A rule made before the run: if `condition` holds, `then` says what to do and `because` gives the reason.

    Plan files list decision rules under the key `gates`.
    """

    condition: Condition = Field(alias="if")
    then: Text
    because: Text
    commands: OneOrMany[Command] = Field((), alias="try")  # arguments after `nsa-harness`, with placeholders


class TreeQuestion(_StrictModel):
    """A question in the decision tree of a plan. The answer is yes if the question's decision rule matched."""

    gate: RuleName  # the decision rule that answers the question
    asks: Text
    yes: Text  # the conclusion if the answer is yes
    yes_if: dict[RuleName, Text] = {}  # another conclusion of a yes, if this other decision rule matched
    no_if: dict[RuleName, Text] = {}  # the conclusion of a no, if this other rule matched; otherwise the next question
    of: Runs = EVERY_RUN  # the failed runs from which the missing runs can be launched
    commands: OneOrMany[Command] = Field((), alias="try")  # the first one launches the missing runs


class PlanFile(_StrictModel):
    """The content of a plan file: the scenarios to run and the decisions about their results."""

    schema_: Literal[1] = Field(1, alias="schema")
    about: Text = ""
    tags: OneOrMany[Annotated[Text, AfterValidator(_check_tag)]] = ()  # the plan runs scenarios with one of these tags
    scenarios: OneOrMany[Annotated[Text, AfterValidator(_check_scenario)]] = ()  # the plan also runs these scenarios
    gates: dict[str, DecisionRule] = Field(min_length=1)
    questions: OneOrMany[TreeQuestion] = Field((), alias="tree")

    @classmethod
    def contradictions(cls, content: Mapping[str, Any]) -> Mistakes:
        if not {"tags", "scenarios"} & content.keys():
            yield (), "the plan runs nothing: add `tags` or `scenarios`"

    def selects(self, scenario: Selectable) -> bool:
        """Return whether the plan runs this scenario."""
        return bool({*self.tags} & {*scenario.tags}) or bool({*self.scenarios} & {scenario.name, scenario.family})


@dataclass(frozen=True, kw_only=True)
class PlanText:
    """The name and the text that a plan file had at the start of a run."""

    file: str
    text: str


EMPTY_PLAN = PlanFile.model_construct(gates={})


@dataclass(frozen=True, kw_only=True)
class ReadPlan:
    """A plan that was read from a file. The plan is empty if the file contains errors."""

    plan: PlanFile
    mistakes: tuple[Mistake, ...]


def is_our_key(key: str) -> bool:
    """Return whether only our own training program has this setting."""
    return key.partition(".")[0] in OURS_ONLY


def is_plan(root: Node | None) -> bool:
    """Return whether a YAML file is a plan, which is recognized by the key `gates`."""
    return root is not None and isinstance(root.content, dict) and "gates" in root.content


@lru_cache(maxsize=8)  # while a run continues, its report is made again and again from the same plan
def read_stored_plan(plan_text: PlanText) -> ReadPlan:
    """Return the plan of a stored run, without checking the names in it. This never raises an exception."""
    return read_plan(plan_text, None)


def read_plan(plan_text: PlanText, scenarios: Sequence[Selectable] | None) -> ReadPlan:
    """Return the plan in a file, with all errors found in it. This never raises an exception.

    `scenarios` are all known scenarios, to check the names in the plan. If it is None, names are not checked.
    """
    tree = parse_yaml(plan_text.text, plan_text.file)
    if tree.root is None:
        return ReadPlan(plan=EMPTY_PLAN, mistakes=tree.mistakes)
    known_names = None if scenarios is None else _known_names(tree.root, scenarios)
    plan, mistakes = parse_model(PlanFile, tree.root, known_names)
    mistakes = in_order(dict.fromkeys((*tree.mistakes, *mistakes)))
    return ReadPlan(plan=EMPTY_PLAN if plan is None or mistakes else plan, mistakes=mistakes)


def _known_names(root: Node, scenarios: Sequence[Selectable]) -> _KnownNames:
    content = plain(root)
    mapping = content if isinstance(content, dict) else {}
    tags, names, gates = (mapping.get(key, ()) for key in ("tags", "scenarios", "gates"))
    runs = EMPTY_PLAN.model_copy(update={"tags": _texts(tags), "scenarios": _texts(names)}).selects
    gate_names = tuple(gates) if isinstance(gates, dict) else ()
    return _KnownNames(
        scenarios=scenarios, runs=[scenario for scenario in scenarios if runs(scenario)], gates=gate_names
    )


def _texts(value: object) -> tuple[str, ...]:
    return tuple(text for text in _as_tuple(value) if isinstance(text, str))


def plan_schema() -> dict[str, Any]:
    """Return the JSON Schema of a plan file, for editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **PlanFile.model_json_schema(),
        "title": "nsa-harness plan",
        "anyOf": [{"required": ["tags"]}, {"required": ["scenarios"]}],
    }
