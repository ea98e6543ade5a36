"""Plans the two launches that a claim compares, and checks that they differ in one setting."""

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
from nsa_harness.core.scenario.checks import as_plain, dotted_items
from nsa_harness.core.scenario.overrides import COMMAND_LINE, is_override, parse_axis
from nsa_harness.core.scenario.resolve import shown_setting
from nsa_harness.core.scenario.scenario import Scenario
from nsa_harness.core.scenario.yaml_tree import Plain, value_text, visible
from nsa_harness.errors import MissingNeed, UsageError
from nsa_harness.subject.program import reason_without_effect
from nsa_harness.supervisor.launch.planning import (
    Invocation,
    check_scenarios,
    file_argument,
    resolve_scenario,
    select_scenarios,
    spec_in_checkout,
)

COMMIT = "commit"
_ARGS = "run.args"
# Keys that change neither a launch nor its verdict, so they do not count as a difference.
_NO_DIFFERENCE = ("name", "about", "tags", "aliases", "priority", "expect.verdict", "expect.cause")
_RESOLVED_SETTINGS = ("backend", "device")  # settings that may follow from other keys
_LABEL_LIMIT = 60
_EXAMPLE = "nsa-harness claim ddp_onestep parallel.find_unused_parameters=false,true"


@dataclass(frozen=True, kw_only=True)
class LaunchSide:
    """One of the two launches that a claim compares, with a label for messages."""

    label: str  # "gc.layers=none", "commit 1a2b3c4", "--fp16"
    spec: RunSpec


@dataclass(frozen=True, kw_only=True)
class LaunchSides:
    """The two launches that a claim compares: one without and one with the claimed improvement."""

    key: str  # the setting in which the sides differ: a dotted key, `commit`, or `run.args`
    scenario: str
    first: LaunchSide
    second: LaunchSide
    notes: tuple[str, ...] = ()


TreeOf = Callable[[str], Path]  # returns the working directory in a checkout of a commit


def plan_sides(
    invocation: Invocation,
    facts: MachineFacts,
    *,
    commits: tuple[str, str] | None = None,
    arg: tuple[str, str] | None = None,
    tree_of: TreeOf | None = None,
) -> LaunchSides:
    """Return the two launches to compare. Raise UsageError unless they differ in exactly one setting.

    `commits` are the two commits to compare, if any. Each is launched in the directory that `tree_of` returns for it.
    Without `tree_of`, both use the working directory, which is enough if nothing is launched. `arg` has the additional
    program arguments of each launch, if they differ.
    """
    axes = [argument for argument in invocation.arguments if _is_axis(argument)]
    arguments = tuple(argument for argument in invocation.arguments if argument not in axes)
    patterns = [argument for argument in arguments if not is_override(argument)]
    differences = [argument.partition("=")[0] for argument in axes]
    differences += ["--commits"] * (commits is not None) + ["--arg"] * (arg is not None)
    differences += [f"{patterns[0]} and {patterns[1]}"] if len(patterns) == 2 else []
    if len(differences) > 1:
        raise _differ_in(differences)
    invocation = replace(invocation, arguments=arguments)
    if commits is not None:
        return _sides_of_commits(invocation, facts, commits, tree_of)
    if arg is not None:
        return _sides_of_arguments(invocation, facts, arg)
    if axes:
        return _sides_of_key(invocation, facts, axes[0])
    if len(patterns) == 2:
        return _sides_of_scenarios(invocation, facts, patterns)
    raise UsageError(
        f"the two sides of the claim do not differ; give one key two values, the value that helps last: {_EXAMPLE}"
    )


def _is_axis(argument: str) -> bool:
    """Return whether an argument gives two values to a key, such as "gc.layers=none,all". Raise UsageError for more."""
    if not is_override(argument) or argument.endswith("="):
        return False
    values = parse_axis(argument, COMMAND_LINE).values
    if len(values) > 2:
        raise UsageError(f"{argument.partition('=')[0]}: a claim compares two values, and {len(values)} are given")
    return len(values) == 2


_KEYS_LIMIT = 6  # differing keys that a message names


def _differ_in(keys: Sequence[str]) -> UsageError:
    more = f"{len(keys) - _KEYS_LIMIT} more" if len(keys) > _KEYS_LIMIT else keys[-1]
    key_list = f"{', '.join(keys[: min(_KEYS_LIMIT, len(keys) - 1)])} and {more}"
    return UsageError(
        f"not comparable: the sides differ in {len(keys)} settings: {key_list}; it would remain open which of them"
        " helps, so let them differ in only one"
    )


# The kinds of claims.


def _sides_of_key(invocation: Invocation, facts: MachineFacts, axis: str) -> LaunchSides:
    launches = list(_launches(replace(invocation, matrix=(axis,)), facts))
    if len(launches) != 2:
        raise UsageError(f"a claim needs one scenario without a matrix; {len(launches)} launches are selected")
    sides = _sides(launches, {})
    unchanged = _declared_settings(check_scenarios(select_scenarios(invocation)[0])[0])
    values = [_declared_settings(scenario).get(sides.key) for scenario, _ in launches]
    is_swapped = unchanged.get(sides.key) == values[1]
    return replace(sides, notes=(_swapped_note(sides, "is what the scenario has"),)) if is_swapped else sides


def _swapped_note(sides: LaunchSides, why: str) -> str:
    return (
        f'{sides.second.label} {why}, so "with it" is the program unchanged; if {sides.first.label} is the change, give'
        " both in the other order"
    )


def _sides_of_scenarios(invocation: Invocation, facts: MachineFacts, patterns: Sequence[str]) -> LaunchSides:
    overrides = tuple(word for word in invocation.arguments if is_override(word))
    launches = [
        _single_launch(replace(invocation, arguments=(file_argument(name, invocation.working_dir), *overrides)), facts)
        for name in patterns
    ]
    return _sides(launches, {})


def _sides_of_arguments(invocation: Invocation, facts: MachineFacts, arg: tuple[str, str]) -> LaunchSides:
    launches = []
    for text in arg:
        arguments = _split_arguments(text)
        if invocation.script is not None:
            script = replace(invocation.script, args=(*invocation.script.args, *arguments))
            launches.append(_single_launch(replace(invocation, script=script), facts))
        else:
            own = _single_launch(invocation, facts)[0].run.args
            override = f"{_ARGS}={json.dumps([*own, *arguments])}"
            launches.append(_single_launch(replace(invocation, arguments=(*invocation.arguments, override)), facts))
    sides = _sides(launches, {index: text.strip() or "no added arguments" for index, text in enumerate(arg)})
    return sides if arg[1].strip() else replace(sides, notes=(_swapped_note(sides, "is the second side"),))


def _split_arguments(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--arg: {value_text(text)}: {error}") from None


def _sides_of_commits(
    invocation: Invocation, facts: MachineFacts, commits: tuple[str, str], tree_of: TreeOf | None
) -> LaunchSides:
    if commits[0] == commits[1]:
        raise UsageError(f"--commits: {commits[0]} is given twice; the sides do not differ")
    launches = []
    for sha in commits:
        tree = invocation.working_dir if tree_of is None else tree_of(sha)
        scenario, spec = _single_launch(replace(invocation, working_dir=tree), facts)
        spec = spec if tree_of is None else spec_in_checkout(spec, tree)
        text = hashlib.sha256(f"{spec.spec_hash} {sha}".encode()).hexdigest()[:12]
        launches.append((scenario, replace(spec, spec_hash=text)))
    others = _differences(*launches)
    notes = (f"the scenario also differs between the commits: {', '.join(others)}",) if others else ()
    first, second = (
        LaunchSide(label=f"{COMMIT} {sha}", spec=replace(spec, scenario=_side_name(spec.scenario, f"{COMMIT}={sha}")))
        for sha, (_, spec) in zip(commits, launches, strict=True)
    )
    return LaunchSides(key=COMMIT, scenario=_family(launches[0][0]), first=first, second=second, notes=notes)


# One launch.

_Launch = tuple[Scenario, RunSpec]


def _single_launch(invocation: Invocation, facts: MachineFacts) -> _Launch:
    launches = list(_launches(invocation, facts))
    if len(launches) != 1:
        names = ", ".join(scenario.name for scenario, _ in launches[:3])
        raise UsageError(f"a claim needs one scenario; {len(launches)} are selected: {names}")
    return launches[0]


def _launches(invocation: Invocation, facts: MachineFacts) -> Iterator[_Launch]:
    items, _ = select_scenarios(invocation)
    for item, scenario in zip(items, check_scenarios(items), strict=True):
        spec = resolve_scenario(item, scenario, invocation, facts)
        if isinstance(spec, Skip):
            raise MissingNeed(f"not comparable: {item.name} cannot be launched here: {spec.reason}")
        yield scenario, spec


def _sides(launches: Sequence[_Launch], labels: dict[int, str]) -> LaunchSides:
    """Return the two labelled launches. Raise UsageError unless they differ in exactly one setting."""
    keys, scenario = _differences(*launches), launches[0][0]
    if not keys:
        same = " and ".join(dict.fromkeys(spec.scenario for _, spec in launches))
        raise UsageError(f"not comparable: the sides do not differ; both launch {same}")
    if len(keys) > 1:
        raise _differ_in(keys)
    key = keys[0]
    if scenario.is_ours and (why := reason_without_effect(scenario, key)):
        raise UsageError(f"not comparable: both sides do the same, because {key} has no effect: {why}")
    texts = [
        labels.get(index) or _label(key, _declared_settings(scenario)) for index, (scenario, _) in enumerate(launches)
    ]
    names: list[str] = [spec.scenario for _, spec in launches]
    if names[0] == names[1]:
        names = [_side_name(name, text) for name, text in zip(names, texts, strict=True)]
        names = names if names[0] != names[1] else [_side_name(names[0], suffix) for suffix in ("first", "second")]
    first, second = (
        LaunchSide(label=label, spec=replace(spec, scenario=name))
        for label, name, (_, spec) in zip(texts, names, launches, strict=True)
    )
    return LaunchSides(key=key, scenario=_family(launches[0][0]), first=first, second=second)


def _family(scenario: Scenario) -> str:
    """Return the name of a scenario without the values of its matrix."""
    return scenario.name.partition("@")[0]


def _differences(first: _Launch, second: _Launch) -> list[str]:
    """Return the names of the settings in which two launches differ."""
    first_settings, second_settings = (_declared_settings(scenario) for scenario, _ in (first, second))
    keys = [key for key in {**first_settings, **second_settings} if first_settings.get(key) != second_settings.get(key)]
    keys = list(dict.fromkeys(_parent_key(key, {*first_settings, *second_settings}) for key in keys))
    if not any(key.startswith("needs.") for key in keys):
        keys += [name for name in _RESOLVED_SETTINGS if getattr(first[1], name) != getattr(second[1], name)]
    return keys


def _declared_settings(scenario: Scenario) -> dict[str, Plain]:
    return {key: value for key, value in dotted_items(as_plain(scenario)) if key not in _NO_DIFFERENCE}


def _parent_key(key: str, keys: Collection[str]) -> str:
    """Return the outermost parent of `key` that is itself one of `keys`, or `key` if there is none."""
    # If only one side has a fault, the other side has the plain key "fault". All keys of the fault then count as one.
    parts = key.split(".")
    above = (".".join(parts[:length]) for length in range(1, len(parts)))
    return next((parent for parent in above if parent in keys), key)


def _label(key: str, settings: dict[str, Plain]) -> str:
    if key == "fault" and key not in settings:
        return f"fault={settings.get('fault.kind')}"
    value = settings.get(key)
    return visible(f"{key}={'null' if value is None else shown_setting(value)}", _LABEL_LIMIT)


def _side_name(scenario: str, text: str) -> str:
    """Return the name of the directory that contains the attempts of one of the two launches."""
    return f"{scenario}@{re.sub(r'[^A-Za-z0-9_.:=+-]', '_', text).strip('_-')}"[:_NAME_LIMIT]


_NAME_LIMIT = 100  # characters; a scenario's name may have at most 120
