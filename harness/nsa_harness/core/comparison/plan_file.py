"""Agreed: a plan file, which says what it runs and what was agreed to do about the answers.

Everything is checked here once: keys, values, scenarios and causes by name, and the commands to go on with.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

from nsa_harness.core.comparison.gates import (
    EVERY_RUN,
    FAILS,
    PASSES,
    PLACEHOLDER,
    Condition,
    Form,
    Gate,
    RunFilter,
    Test,
    Wanted,
)
from nsa_harness.core.diagnosis.causes import CAUSES_OF_VERDICTS
from nsa_harness.core.scenario.checks import axis_mistakes
from nsa_harness.core.scenario.overrides import is_override, parse_axis, parse_override
from nsa_harness.core.scenario.resolve import SETTING_SECTIONS, shown_setting
from nsa_harness.core.scenario.scenario import Scenario
from nsa_harness.core.scenario.selection import Named
from nsa_harness.core.scenario.yaml_tree import Mistake, Node, in_order, parse_yaml, plain, shown, visible
from nsa_harness.errors import UsageError, did_you_mean

_TOP = ("schema", "about", "tags", "scenarios", "gates", "tree")
_GATE = ("if", "then", "because", "try")
_QUESTION = ("gate", "asks", "yes", "yes_if", "no_if", "of", "try")
_FORMS: Mapping[frozenset[str], Form] = {
    frozenset({"flaky"}): Form.FLAKY,
    frozenset({"missing_gradients"}): Form.MISSING,
    frozenset(): Form.FAILS,
    frozenset({"fails"}): Form.FAILS,
    frozenset({"passes"}): Form.PASSES,
    frozenset({"fails", "passes"}): Form.CONTRAST,
    frozenset({"fails", "each_passes"}): Form.EACH,
    frozenset({"fails", "fails_alike"}): Form.ALIKE,
}
_ENDS = ("flaky", "missing_gradients", "fails", "passes", "each_passes", "fails_alike")
_CONDITION = (*_ENDS, "cause", "differ_in", "where")
_CONTRASTS = (Form.CONTRAST, Form.EACH, Form.ALIKE)
_ANY, _SAME, _UNCERTAIN, _NOT = "any", "same", "uncertain", "not"
COMMANDS = ("run", "bisect", "claim")
_KEYS = tuple(
    f"{section}.{name}"
    for section in SETTING_SECTIONS
    for name in type(getattr(Scenario(name="x"), section)).model_fields
)
_OPEN = "run.env."


@dataclass(frozen=True, kw_only=True)
class PlanText:
    """A plan file as it was when a run was started."""

    file: str
    text: str


@dataclass(frozen=True, kw_only=True)
class TreeQuestion:
    gate: str  # whose condition answers it
    asks: str
    yes: str  # where a yes leads
    yes_if: tuple[tuple[str, str], ...] = ()  # where it leads instead if that gate fired
    no_if: tuple[tuple[str, str], ...] = ()  # where a no leads if that gate fired; else to the next question
    of: RunFilter = EVERY_RUN  # a failed run that can be asked again
    command: tuple[str, ...] = ()  # what makes the missing runs out of it


@dataclass(frozen=True, kw_only=True)
class PlanFile:
    tags: tuple[str, ...] = ()  # it runs every scenario with one of these
    scenarios: tuple[str, ...] = ()  # and these
    gates: tuple[Gate, ...] = ()
    questions: tuple[TreeQuestion, ...] = ()

    def runs(self, one: Named) -> bool:
        return bool({*self.tags} & {*one.tags}) or bool({*self.scenarios} & {one.name, one.family})


@dataclass(frozen=True, kw_only=True)
class ReadPlan:
    plan: PlanFile  # as far as it could be read
    mistakes: tuple[Mistake, ...]


@lru_cache(maxsize=8)  # a run that is told while it goes on is judged by the same text again and again
def agreed_plan(stored: PlanText) -> ReadPlan:
    """The plan of a text whose scenarios were looked up when it was read first. Never raises."""
    return read_plan(stored, None)


def is_plan(root: Node | None) -> bool:
    """A scenario has no such key."""
    return root is not None and isinstance(root.content, dict) and "gates" in root.content


def read_plan(stored: PlanText, scenarios: Sequence[Named] | None) -> ReadPlan:
    """`scenarios`: all that there are; None where nobody knows, and names are taken as they stand. Never raises."""
    parsed = parse_yaml(stored.text, stored.file)
    if parsed.root is None:
        return ReadPlan(plan=PlanFile(), mistakes=parsed.mistakes)
    reader = _Reader(scenarios=scenarios, mistakes=list(parsed.mistakes))
    plan = reader.plan(parsed.root)
    return ReadPlan(plan=plan, mistakes=in_order(dict.fromkeys(reader.mistakes)))


def plan_schema() -> dict[str, Any]:
    """The JSON schema of a plan file, for editors. Of names, and of what goes together, `read_plan` alone can tell."""
    text: dict[str, Any] = {"type": "string", "minLength": 1}
    leads, causes = {"type": "object", "additionalProperties": text}, [*CAUSES_OF_VERDICTS, _UNCERTAIN]
    value = {"type": ["string", "number", "boolean", "null"]}
    wanted = {"anyOf": [*_one_or_more(value), _object({_NOT: {"anyOf": _one_or_more(value)}}, required=(_NOT,))]}
    by_key = {
        "type": "object",
        "properties": {key: {"$ref": "#/$defs/wanted"} for key in _KEYS},
        "patternProperties": {f"^{re.escape(_OPEN)}.": {"$ref": "#/$defs/wanted"}},
        "additionalProperties": False,
    }
    sought = {"anyOf": [{"const": _ANY}, *_one_or_more(text), by_key]}
    ends = {end: {"$ref": "#/$defs/sought"} for end in _ENDS} | {"missing_gradients": {"const": _SAME}}
    condition = ends | {
        "cause": {"anyOf": _one_or_more({"enum": causes})},
        "differ_in": {"anyOf": _one_or_more({"anyOf": [{"enum": [*_KEYS]}, {"pattern": f"^{re.escape(_OPEN)}."}]})},
        "where": {"$ref": "#/$defs/sought"},
    }
    commands = {"anyOf": _one_or_more({"type": "string", "pattern": f"^({'|'.join(COMMANDS)})\\b"})}
    gate = {"if": _object(condition), "then": text, "because": text, "try": commands}
    question = {"gate": text, "asks": text, "yes": text, "yes_if": leads, "no_if": leads}
    question |= {"of": {"$ref": "#/$defs/sought"}, "try": commands}
    gates = {"type": "object", "minProperties": 1, "additionalProperties": _object(gate, required=_GATE[:3])}
    tree = {"type": "array", "minItems": 1, "items": _object(question, required=_QUESTION[:3])}
    names = {"anyOf": _one_or_more(text)}
    top = {"schema": {"const": 1}, "about": text, "tags": names, "scenarios": names, "gates": gates, "tree": tree}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "nsa-harness plan",
        "$defs": {"sought": sought, "wanted": wanted},
        **_object(top, required=("gates",)),
        "anyOf": [{"required": ["tags"]}, {"required": ["scenarios"]}],
    }


def _one_or_more(kind: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [kind, {"type": "array", "items": kind, "minItems": 1}]


def _object(properties: Mapping[str, Any], required: Sequence[str] = ()) -> dict[str, Any]:
    closed = {"type": "object", "properties": properties, "additionalProperties": False}
    return closed | ({"required": [*required]} if required else {})


@dataclass(kw_only=True)
class _Reader:
    """Reads on after a mistake, so that all of them are told at once."""

    scenarios: Sequence[Named] | None
    mistakes: list[Mistake] = field(default_factory=list)
    runs: Sequence[Named] = ()

    def plan(self, root: Node) -> PlanFile:
        content = self._map(root, "", _TOP, required=("gates",))
        if "schema" in content and plain(content["schema"]) != 1:
            self._wrong(content["schema"], "schema", f"expected 1, got {shown(plain(content['schema']))}")
        if "about" in content:
            self._text(content["about"], "about")
        plan = PlanFile(
            tags=tuple(self._tags(content.get("tags"))),
            scenarios=tuple(self._names(content["scenarios"], "scenarios")) if "scenarios" in content else (),
        )
        if not {"tags", "scenarios"} & content.keys():
            self._wrong(root, "", "name what the plan runs: `tags` or `scenarios`")
        self.runs = [one for one in self.scenarios or () if plan.runs(one)]
        return replace(plan, gates=self._gates(content.get("gates")), questions=self._tree(content))

    def _tags(self, node: Node | None) -> Iterator[str]:
        known = {tag for one in self.scenarios or () for tag in one.tags}
        for item in self._items(node, "tags") if node else ():
            tag = self._text(item, "tags")
            if self.scenarios is not None and tag and tag not in known:
                self._wrong(item, "tags", f"no scenario has the tag {shown(tag)}{did_you_mean(tag, known)}")
            yield tag

    def _gates(self, node: Node | None) -> tuple[Gate, ...]:
        content = self._map(node, "gates") if node else {}
        if node and not content:
            self._wrong(node, "gates", "expected at least one gate")
        return tuple(self._gate(name, one, f"gates.{visible(name)}") for name, one in content.items())

    def _gate(self, name: str, node: Node, at: str) -> Gate:
        content = self._map(node, at, _GATE, required=("if", "then", "because"))
        condition = self._condition(content["if"], f"{at}.if") if "if" in content else Condition(form=Form.FLAKY)
        return Gate(
            name=name,
            condition=condition,
            then=self._text(content.get("then"), f"{at}.then"),
            because=self._text(content.get("because"), f"{at}.because"),
            commands=tuple(self._commands(content.get("try"), f"{at}.try", _sides(condition.form))),
        )

    def _tree(self, content: Mapping[str, Node]) -> tuple[TreeQuestion, ...]:
        gates = content["gates"].content if "gates" in content else {}
        names = tuple(gates) if isinstance(gates, dict) else ()
        items = self._items(content["tree"], "tree") if "tree" in content else ()
        return tuple(self._question(item, f"tree.{number}", names) for number, item in enumerate(items))

    def _question(self, node: Node, at: str, gates: Collection[str]) -> TreeQuestion:
        content = self._map(node, at, _QUESTION, required=("gate", "asks", "yes"))
        gate = self._text(content.get("gate"), f"{at}.gate")
        if gate:
            self._one_of(content["gate"], f"{at}.gate", gate, gates, "gate")
        commands = list(self._commands(content.get("try"), f"{at}.try", (FAILS,)))
        return TreeQuestion(
            gate=gate,
            asks=self._text(content.get("asks"), f"{at}.asks"),
            yes=self._text(content.get("yes"), f"{at}.yes"),
            yes_if=self._leads(content.get("yes_if"), f"{at}.yes_if", gates),
            no_if=self._leads(content.get("no_if"), f"{at}.no_if", gates),
            of=self._sought(content["of"], f"{at}.of") if "of" in content else EVERY_RUN,
            command=commands[0] if commands else (),
        )

    def _leads(self, node: Node | None, at: str, gates: Collection[str]) -> tuple[tuple[str, str], ...]:
        content = self._map(node, at) if node else {}
        for name, one in content.items():
            self._one_of(one, f"{at}.{visible(name)}", name, gates, "gate")
        return tuple((name, self._text(one, f"{at}.{visible(name)}")) for name, one in content.items())

    def _condition(self, node: Node, at: str) -> Condition:
        content = self._map(node, at, _CONDITION)
        given = content.keys() & {*_ENDS}
        form = _FORMS.get(frozenset(given))
        if form is None or not content.keys() - {"where", "differ_in"}:
            forms = ", ".join(" with ".join(sorted(one)) for one in _FORMS if one)
            self._wrong(node, at, f"expected one of: {forms}, cause; got {', '.join(sorted(content)) or 'nothing'}")
            form = Form.FLAKY
        of, other = ("flaky", "") if form is Form.FLAKY else ("passes", "") if form is Form.PASSES else ("fails", "")
        other = next((end for end in ("passes", "each_passes", "fails_alike") if end != of and end in content), other)
        causes = tuple(self._causes(content["cause"], f"{at}.cause")) if "cause" in content else ()
        condition = Condition(
            form=form,
            of=self._sought(content[of], f"{at}.{of}") if of in content else EVERY_RUN,
            other=self._sought(content[other], f"{at}.{other}") if other else EVERY_RUN,
            differ_in=tuple(self._differ_in(content.get("differ_in"), f"{at}.differ_in")),
            causes=tuple(one for one in causes if one != _UNCERTAIN),
            uncertain=_UNCERTAIN in causes,
            where=self._sought(content["where"], f"{at}.where") if "where" in content else EVERY_RUN,
        )
        for key, what in _contradictions(condition, content):
            self._wrong(content.get(key, node), f"{at}.{key}", what)
        return condition

    def _causes(self, node: Node, at: str) -> Iterator[str]:
        for item in self._items(node, at):
            cause = self._text(item, at)
            if cause:
                self._one_of(item, at, cause, (*CAUSES_OF_VERDICTS, _UNCERTAIN), "cause")
            if cause in (*CAUSES_OF_VERDICTS, _UNCERTAIN):
                yield cause

    def _differ_in(self, node: Node | None, at: str) -> Iterator[str]:
        for item in self._items(node, at) if node else ():
            if key := self._text(item, at):
                self._key(item, at, key)
                yield key

    def _sought(self, node: Node, at: str) -> RunFilter:
        if node.content == _ANY:
            return EVERY_RUN
        if isinstance(node.content, dict):
            values = (self._wanted(key, one, f"{at}.{visible(key)}") for key, one in node.content.items())
            return RunFilter(values=tuple(one for one in values if one))
        return RunFilter(scenarios=tuple(self._names(node, at)))

    def _wanted(self, key: str, node: Node, at: str) -> Wanted | None:
        if not self._key(node, at, key):
            return None
        if node.content in (Test.MORE, Test.LESS):
            return Wanted(key=key, test=Test(str(node.content)))
        test = Test.ONE_OF
        if isinstance(node.content, dict):
            test, inside = Test.OTHER_THAN, self._map(node, at, (_NOT,), required=(_NOT,))
            if _NOT not in inside:
                return None
            node = inside[_NOT]
        items = self._items(node, at)
        for item in items:
            wrong = axis_mistakes(key, item)
            self.mistakes.extend(replace(one, origin=item.origin, key=at) for one in wrong)
        return Wanted(key=key, test=test, values=tuple(shown_setting(plain(item)) for item in items))

    def _names(self, node: Node, at: str) -> Iterator[str]:
        """Of scenarios: those that there are, and within a gate those that the plan runs."""
        for item in self._items(node, at):
            if name := self._text(item, at):
                self._check_name(item, at, name)
                yield name

    def _check_name(self, node: Node, at: str, name: str) -> None:
        if self.scenarios is None:
            return
        known = {word for one in self.scenarios for word in (one.name, one.family)}
        if name not in known:
            meant = next((one.name for one in self.scenarios if name in one.aliases), None)
            hint = f"; it is another name of {meant}: write that" if meant else did_you_mean(name, known)
            self._wrong(node, at, f"no scenario named {shown(name)}{hint}")
        elif at != "scenarios" and not any(name in (one.name, one.family) for one in self.runs):
            self._wrong(node, at, f"{shown(name)} is not among what this plan runs; add it to `scenarios`")

    def _commands(self, node: Node | None, at: str, sides: Collection[str]) -> Iterator[tuple[str, ...]]:
        for item in self._items(node, at) if node else ():
            text = self._text(item, at)
            try:
                words = tuple(shlex.split(text))
            except ValueError as error:
                self._wrong(item, at, f"{error} in {shown(text)}")
                continue
            if words:
                self._one_of(item, at, words[0], COMMANDS, "command")
                for what in (*_placeholders(words, sides), *_changes(words)):
                    self._wrong(item, at, what)
                yield words

    def _key(self, node: Node, at: str, key: str) -> bool:
        if key in _KEYS or (key.startswith(_OPEN) and len(key) > len(_OPEN)):
            return True
        hint = did_you_mean(key, _KEYS) or f"; known are the keys of {', '.join(SETTING_SECTIONS)}"
        self._wrong(node, at, f"no key {shown(key)} by which runs differ{hint}")
        return False

    def _map(
        self, node: Node, at: str, known: Sequence[str] | None = None, required: Sequence[str] = ()
    ) -> Mapping[str, Node]:
        if not isinstance(node.content, dict):
            self._wrong(node, at, f"expected keys and values, got {_shape(node)}")
            return {}
        for key, child in node.content.items() if known else ():
            if key not in (known or ()):
                hint = did_you_mean(key, known or ()) or f"; known here: {', '.join(known or ())}"
                self._wrong(child, _dotted(at, visible(key)), f"unknown key{hint}")
        for key in required:
            if key not in node.content:
                self._wrong(node, _dotted(at, key), "is required")
        return {key: child for key, child in node.content.items() if not known or key in known}

    def _items(self, node: Node, at: str) -> tuple[Node, ...]:
        """Those of a list, or the value itself."""
        if not isinstance(node.content, tuple):
            return (node,)
        if not node.content:
            self._wrong(node, at, "expected at least one item, got an empty list")
        return node.content

    def _text(self, node: Node | None, at: str) -> str:
        """Empty where there is none, or a mistake."""
        if node is None:
            return ""
        if isinstance(node.content, str) and node.content:
            return node.content
        self._wrong(node, at, f"expected some text, got {_shape(node)}")
        return ""

    def _one_of(self, node: Node, at: str, word: str, known: Collection[str], noun: str) -> None:
        if word not in known:
            hint = did_you_mean(word, known) or (f"; known: {', '.join(known)}" if len(known) < 12 else "")
            self._wrong(node, at, f"no {noun} {shown(word)}{hint}")

    def _wrong(self, node: Node, at: str, what: str) -> None:
        self.mistakes.append(Mistake(origin=node.origin, key=at, what=what))


def _dotted(at: str, key: str) -> str:
    return f"{at}.{key}" if at else key


def _shape(node: Node) -> str:
    if isinstance(node.content, dict):
        return "keys and values"
    return "a list" if isinstance(node.content, tuple) else shown(node.content)


def _sides(form: Form) -> tuple[str, ...]:
    """Which runs a command may be made of."""
    if form is Form.PASSES:
        return (PASSES,)
    return (FAILS, PASSES) if form in (Form.CONTRAST, Form.EACH) else (FAILS,)


def _contradictions(condition: Condition, content: Mapping[str, Node]) -> Iterator[tuple[str, str]]:
    """What makes no sense together: (the key, what is wrong)."""
    contrast = condition.form in _CONTRASTS
    if contrast and "differ_in" not in content:
        what = "is required: two runs tell something where they differ in what it names and in nothing else"
        yield "differ_in", what
    if not contrast and "differ_in" in content:
        yield "differ_in", "belongs to two ends, such as `fails` and `passes`; remove it"
    if "cause" in content and not (condition.form is Form.FAILS or contrast):
        yield "cause", "is that of a failure; remove it, or ask what `fails`"
    if condition.causes and condition.uncertain:
        yield "cause", f"{_UNCERTAIN} cannot stand beside a cause"
    if "missing_gradients" in content and content["missing_gradients"].content != _SAME:
        yield "missing_gradients", f"expected {_SAME}, got {_shape(content['missing_gradients'])}"
    yield from _of_numbers(condition)
    key = condition.differ_in[0] if condition.differ_in else ""
    each = [one for one in condition.other.values if one.key == key and one.test is Test.ONE_OF]
    if condition.form is Form.EACH and condition.differ_in and not any(len(one.values) > 1 for one in each):
        yield "each_passes", f"expected two values of {key} or more, as in {{{key}: [A, B]}}"


def _of_numbers(condition: Condition) -> Iterator[tuple[str, str]]:
    """`more` on one side is `less` on the other, of the first key in which they differ."""
    sides = {
        test: {one.key for sought in (condition.of, condition.other) for one in sought.values if one.test is test}
        for test in (Test.MORE, Test.LESS)
    }
    if not any(sides.values()):
        return
    first = {condition.differ_in[0]} if condition.differ_in else set()
    if condition.form not in _CONTRASTS or sides[Test.MORE] != first or sides[Test.LESS] != first:
        yield "fails", "`more` at one end and `less` at the other, both of the first key of `differ_in`"


def _placeholders(words: Iterable[str], sides: Collection[str]) -> Iterator[str]:
    for word in words:
        for found in PLACEHOLDER.finditer(word):
            name = found[1]
            if "." not in name and name not in sides:
                yield f"nothing stands for {{{name}}} here; known: {', '.join(f'{{{one}}}' for one in sides)}"


def _changes(words: Sequence[str]) -> Iterator[str]:
    """What is wrong with the keys that a command changes."""
    for before, word in pairwise(words):
        if not is_override(word):
            continue
        try:
            if before == "--matrix" or words[0] == "claim":
                parse_axis(word, "")
                continue
            override = parse_override(PLACEHOLDER.sub("1", word), "")
        except UsageError as error:
            yield str(error).removeprefix(": ")
            continue
        yield from (f"{one.key}: {one.what}" for one in axis_mistakes(override.key, override.value))
