"""The two sides of a claim, and the one declared setting in which they differ."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nsa_harness.core.plan import RunSpec, Skip
from nsa_harness.core.report import MachineFacts
from nsa_harness.core.scenario.checks import as_plain, dotted
from nsa_harness.core.scenario.overrides import COMMAND_LINE, is_override, parse_axis
from nsa_harness.core.scenario.resolve import shown_setting
from nsa_harness.core.scenario.scenario import Scenario
from nsa_harness.core.scenario.yaml_tree import Plain, shown, visible
from nsa_harness.errors import MissingNeed, UsageError
from nsa_harness.supervisor.launch.planning import (
    Invocation,
    as_path,
    checked,
    in_checkout,
    resolved,
    selected_scenarios,
)

COMMIT = "commit"
_ARGS = "run.args"
# Keys that change neither the launch nor its verdict.
_NO_DIFFERENCE = ("name", "about", "tags", "aliases", "priority", "expect.verdict", "expect.cause")
_RESOLVED = ("backend", "device")  # settings that other keys may decide
_LABEL = 60
_EXAMPLE = "nsa-harness claim ddp_onestep parallel.find_unused_parameters=false,true"


@dataclass(frozen=True, kw_only=True)
class Side:
    label: str  # "gc.layers=none", "commit 1a2b3c4", "--fp16"
    spec: RunSpec


@dataclass(frozen=True, kw_only=True)
class Sides:
    """The program without the claimed improvement, and the program with it."""

    key: str  # the difference: a dotted key, `commit`, or `run.args`
    scenario: str
    first: Side
    second: Side
    notes: tuple[str, ...] = ()


TreeOf = Callable[[str], Path]  # commit -> the working directory in a checkout of it


def sides_of(
    question: Invocation,
    facts: MachineFacts,
    *,
    commits: tuple[str, str] | None = None,
    arg: tuple[str, str] | None = None,
    tree_of: TreeOf | None = None,
) -> Sides:
    """Return the two sides of a claim. Raises UsageError unless they differ in exactly one setting.

    `commits`: both commits, each launched in the directory from `tree_of`; without `tree_of`, nothing is launched and
    both use the working directory. `arg`: each side's additional program arguments.
    """
    axes = [word for word in question.words if _is_axis(word)]
    words = tuple(word for word in question.words if word not in axes)
    patterns = [word for word in words if not is_override(word)]
    given = [word.partition("=")[0] for word in axes]
    given += ["--commits"] * (commits is not None) + ["--arg"] * (arg is not None)
    given += [f"{patterns[0]} and {patterns[1]}"] if len(patterns) == 2 else []
    if len(given) > 1:
        raise _differ_in(given)
    question = replace(question, words=words)
    if commits is not None:
        return _of_commits(question, facts, commits, tree_of)
    if arg is not None:
        return _of_arguments(question, facts, arg)
    if axes:
        return _of_key(question, facts, axes[0])
    if len(patterns) == 2:
        return _of_two(question, facts, patterns)
    raise UsageError(f"in what do the two sides differ? Give one key two values, the one that helps last: {_EXAMPLE}")


def _is_axis(word: str) -> bool:
    """Whether a word gives a key two values, as "gc.layers=none,all"; a list in brackets is one value."""
    if not is_override(word) or word.endswith("="):
        return False
    values = parse_axis(word, COMMAND_LINE).values
    if len(values) > 2:
        raise UsageError(f"{word.partition('=')[0]}: a claim compares two values, and {len(values)} are given")
    return len(values) == 2


_NAMED = 6  # differing keys that a message names


def _differ_in(keys: Sequence[str]) -> UsageError:
    more = f"{len(keys) - _NAMED} more" if len(keys) > _NAMED else keys[-1]
    listed = f"{', '.join(keys[: min(_NAMED, len(keys) - 1)])} and {more}"
    return UsageError(
        f"not comparable: the sides differ in {len(keys)} things, {listed}; nobody could tell which of them it was:"
        " make them equal but for one"
    )


# The forms of a claim.


def _of_key(question: Invocation, facts: MachineFacts, axis: str) -> Sides:
    both = list(_launches(replace(question, matrix=(axis,)), facts))
    if len(both) != 2:
        raise UsageError(f"a claim takes one scenario without a matrix of its own; {len(both)} launches are selected")
    return _sides(both, {})


def _of_two(question: Invocation, facts: MachineFacts, patterns: Sequence[str]) -> Sides:
    overrides = tuple(word for word in question.words if is_override(word))
    both = [
        _one(replace(question, words=(as_path(name, question.working_dir), *overrides)), facts) for name in patterns
    ]
    return _sides(both, {})


def _of_arguments(question: Invocation, facts: MachineFacts, arg: tuple[str, str]) -> Sides:
    both = []
    for text in arg:
        more = _words(text)
        if question.script is not None:
            script = replace(question.script, args=(*question.script.args, *more))
            both.append(_one(replace(question, script=script), facts))
        else:
            own = _one(question, facts)[0].run.args
            override = f"{_ARGS}={json.dumps([*own, *more])}"
            both.append(_one(replace(question, words=(*question.words, override)), facts))
    return _sides(both, {place: text.strip() or "no words of its own" for place, text in enumerate(arg)})


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--arg: {shown(text)}: {error}") from None


def _of_commits(question: Invocation, facts: MachineFacts, commits: tuple[str, str], tree_of: TreeOf | None) -> Sides:
    if commits[0] == commits[1]:
        raise UsageError(f"--commits: {commits[0]} is named twice; the sides do not differ")
    both = []
    for sha in commits:
        tree = question.working_dir if tree_of is None else tree_of(sha)
        scenario, spec = _one(replace(question, working_dir=tree), facts)
        spec = spec if tree_of is None else in_checkout(spec, tree)
        text = hashlib.sha256(f"{spec.spec_hash} {sha}".encode()).hexdigest()[:12]
        both.append((scenario, replace(spec, spec_hash=text)))
    others = _differences(*both)
    notes = (f"the scenario is another one in each commit, too: {', '.join(others)}",) if others else ()
    first, second = (
        Side(label=f"{COMMIT} {sha}", spec=replace(spec, scenario=_name(spec.scenario, f"{COMMIT}={sha}")))
        for sha, (_, spec) in zip(commits, both, strict=True)
    )
    return Sides(key=COMMIT, scenario=_family(both[0][0]), first=first, second=second, notes=notes)


# One launch.

_Launch = tuple[Scenario, RunSpec]


def _one(question: Invocation, facts: MachineFacts) -> _Launch:
    found = list(_launches(question, facts))
    if len(found) != 1:
        names = ", ".join(scenario.name for scenario, _ in found[:3])
        raise UsageError(f"a claim takes one scenario, and {len(found)} are selected: {names}")
    return found[0]


def _launches(question: Invocation, facts: MachineFacts) -> Iterator[_Launch]:
    asked, _ = selected_scenarios(question)
    for item, scenario in zip(asked, checked(asked), strict=True):
        spec = resolved(item, scenario, question, facts)
        if isinstance(spec, Skip):
            raise MissingNeed(f"not comparable: {item.name} cannot be launched here: {spec.reason}")
        yield scenario, spec


def _sides(both: Sequence[_Launch], labels: dict[int, str]) -> Sides:
    """Return both sides. Raises UsageError unless exactly one setting differs. `labels` replaces labels by side."""
    keys = _differences(*both)
    if not keys:
        same = " and ".join(dict.fromkeys(spec.scenario for _, spec in both))
        raise UsageError(f"not comparable: the sides do not differ: {same} launch the same")
    if len(keys) > 1:
        raise _differ_in(keys)
    key = keys[0]
    texts = [labels.get(place) or _label(key, _declared(scenario)) for place, (scenario, _) in enumerate(both)]
    names: list[str] = [spec.scenario for _, spec in both]
    if names[0] == names[1]:
        names = [_name(name, text) for name, text in zip(names, texts, strict=True)]
        names = names if names[0] != names[1] else [_name(names[0], which) for which in ("first", "second")]
    first, second = (
        Side(label=label, spec=replace(spec, scenario=name))
        for label, name, (_, spec) in zip(texts, names, both, strict=True)
    )
    return Sides(key=key, scenario=_family(both[0][0]), first=first, second=second)


def _family(scenario: Scenario) -> str:
    """Return the scenario's name without its matrix values, which the sides' labels show."""
    return scenario.name.partition("@")[0]


def _differences(first: _Launch, second: _Launch) -> list[str]:
    """Return the keys with different declared values, and settings that resolve differently on this machine."""
    one, other = (_declared(scenario) for scenario, _ in (first, second))
    keys = [key for key in {**one, **other} if one.get(key) != other.get(key)]
    keys = list(dict.fromkeys(_whole(key, {*one, *other}) for key in keys))
    if not any(key.startswith("needs.") for key in keys):
        keys += [name for name in _RESOLVED if getattr(first[1], name) != getattr(second[1], name)]
    return keys


def _declared(scenario: Scenario) -> dict[str, Plain]:
    return {key: value for key, value in dotted(as_plain(scenario)) if key not in _NO_DIFFERENCE}


def _whole(key: str, known: Collection[str]) -> str:
    """Return the key that counts as one difference: a whole fault or condition, if only one side has it."""
    parts = key.split(".")
    above = (".".join(parts[:length]) for length in range(1, len(parts)))
    return next((parent for parent in above if parent in known), key)


def _label(key: str, declared: dict[str, Plain]) -> str:
    if key == "fault" and key not in declared:
        return f"fault={declared.get('fault.kind')}"
    value = declared.get(key)
    return visible(f"{key}={'null' if value is None else shown_setting(value)}", _LABEL)


def _name(scenario: str, text: str) -> str:
    """Return the name of the directory with a side's attempts."""
    return f"{scenario}@{re.sub(r'[^A-Za-z0-9_.:=+-]', '_', text).strip('_-')}"[:_LONGEST]


_LONGEST = 100  # the name of a scenario has at most 120 characters
