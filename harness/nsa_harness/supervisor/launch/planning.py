"""Turns scenario files, environment variables, overrides and the machine into a list of launches."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from nsa_harness.core.comparison.plan_file import PlanText
from nsa_harness.core.plan import RunSpec, Skip
from nsa_harness.core.raw_bytes import with_raw_bytes
from nsa_harness.core.report import MachineFacts
from nsa_harness.core.scenario.checks import check_scenario, key_mistake
from nsa_harness.core.scenario.overrides import (
    COMMAND_LINE,
    Changes,
    Override,
    is_override,
    parse_axis,
    parse_override,
    variants,
    with_axes,
    with_overrides,
)
from nsa_harness.core.scenario.program import Surroundings
from nsa_harness.core.scenario.resolve import resolve
from nsa_harness.core.scenario.scenario import OUR_PROGRAM, RESERVED_NAMES, Scenario
from nsa_harness.core.scenario.selection import Selection, select_items
from nsa_harness.core.scenario.yaml_tree import Node, Origin, Plain, from_plain, merge, origin_of, plain, value_text
from nsa_harness.errors import MissingNeed, MissingTorch, ScenarioError, UsageError, did_you_mean
from nsa_harness.subject.environment import EnvironmentOverride, environment_overrides
from nsa_harness.subject.files import IN_CHECKOUT
from nsa_harness.subject.program import PROGRAM
from nsa_harness.supervisor.launch.launcher import SUBJECT
from nsa_harness.supervisor.launch.project_file import project_limits
from nsa_harness.supervisor.launch.scenario_files import (
    LoadedScenario,
    load_catalog,
    load_file,
    parse_plan,
    plans_with_tags,
    read_plan_text,
    shipped_plan,
    shipped_root,
)
from nsa_harness.supervisor.storage.record import load_spec


@dataclass(frozen=True, kw_only=True)
class Script:
    """A user's own program, named on the command line, with its ranks and arguments."""

    file: str  # the file of the program, or the name of its module
    ranks: int
    args: tuple[str, ...]
    module: bool = False
    ranks_origin: str = COMMAND_LINE


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """The arguments of a command that selects launches, with its working directory and environment."""

    arguments: tuple[str, ...]  # scenario names, patterns, paths and overrides, in their order
    tags: tuple[str, ...] = ()
    expression: str | None = None
    script: Script | None = None
    matrix: tuple[str, ...] = ()  # such as KEY=A,B
    shard: tuple[int, int] | None = None  # (K, N) selects every N-th launch, starting with the K-th
    working_dir: Path
    environ: Mapping[str, str]
    python: str | None = None  # interpreter for users' programs; None = chosen automatically


@dataclass(frozen=True, kw_only=True)
class SelectedScenario:
    """A scenario that a command selects, as a YAML tree with all overrides applied."""

    name: str
    family: str
    aliases: tuple[str, ...]
    tags: tuple[str, ...]
    priority: int
    file: str
    is_shipped: bool
    tree: Node
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """The launches that a command makes, with notes for the user and the plan file whose rules apply."""

    specs: tuple[RunSpec | Skip, ...]
    notes: tuple[str, ...]
    plan_text: PlanText | None = None  # None if no plan file was read, so the shipped plan applies


def plan_launches(invocation: Invocation, facts: MachineFacts) -> LaunchPlan:
    """Return the launches that a command selects. Raise HarnessError if the command is invalid."""
    patterns = [argument for argument in invocation.arguments if not is_override(argument)]
    spec_files = [argument for argument in patterns if argument.endswith(".json")]
    if spec_files:
        specs = tuple(_stored_specs(invocation, spec_files))
        _check_names([spec.scenario for spec in specs])
        return LaunchPlan(specs=specs, notes=())
    invocation, plan_text, plan_notes = _replace_plan_file(invocation)
    items, notes = select_scenarios(invocation)
    scenarios = check_scenarios(items)
    launches = [
        _resolve_or_raise(item, scenario, invocation, facts) for item, scenario in zip(items, scenarios, strict=True)
    ]
    return LaunchPlan(specs=select_shard(launches, invocation.shard), notes=(*plan_notes, *notes), plan_text=plan_text)


def _replace_plan_file(invocation: Invocation) -> tuple[Invocation, PlanText, tuple[str, ...]]:
    """Replace a plan file in the arguments by its scenarios. Return the new arguments, the plan, and notes."""
    working_dir = invocation.working_dir
    words = [word for word in invocation.arguments if not is_override(word) and _is_path(word)]
    plans = {word: plan for word in words if (plan := read_plan_text(working_dir / word, working_dir))}
    if len(plans) > 1:
        raise UsageError(f"a run has one plan file; {' and '.join(map(value_text, plans))} were named")
    for word, plan in plans.items():
        names = _scenarios_of(plan, working_dir)
        arguments = (name for argument in invocation.arguments for name in (names if argument == word else (argument,)))
        return replace(invocation, arguments=tuple(arguments)), plan, ()
    plans_by_tag = (
        plans_with_tags(invocation.tags, working_dir, lambda: all_scenarios(working_dir)[0]) if invocation.tags else ()
    )
    if not plans_by_tag:
        return invocation, shipped_plan(), ()
    ignored_files = ", ".join(plan.file for plan in plans_by_tag[1:])
    plan_file = plans_by_tag[0].file
    note = f"the plan file of this run is {plan_file}; other plan files with its tags are ignored: {ignored_files}"
    return invocation, plans_by_tag[0], (note,) if plans_by_tag[1:] else ()


def _scenarios_of(plan: PlanText, working_dir: Path) -> tuple[str, ...]:
    """Return the names of the scenarios that a plan file selects, ordered by priority."""
    scenarios = all_scenarios(working_dir)[0]
    parsed_plan = parse_plan(plan, scenarios)
    plan_scenarios = [item for item in select_items(scenarios, Selection()) if parsed_plan.selects(item)]
    # A family is named instead of its variants, unless the plan names a variant: the matrix may be overridden.
    return tuple(
        dict.fromkeys(item.name if item.name in parsed_plan.scenarios else item.family for item in plan_scenarios)
    )


def select_shard(launches: Sequence[RunSpec | Skip], shard: tuple[int, int] | None) -> tuple[RunSpec | Skip, ...]:
    """Return every N-th launch from the K-th on for the shard (K, N). Raise UsageError if none remains."""
    if shard is None:
        return tuple(launches)
    number, shards = shard
    if number > len(launches):
        raise UsageError(f"--shard: {number}/{shards} of {len(launches)} scenarios is empty; ask for fewer shards")
    return tuple(launches[number - 1 :: shards])


def select_scenarios(invocation: Invocation) -> tuple[tuple[SelectedScenario, ...], tuple[str, ...]]:
    """Return the scenarios that a command selects, with overrides applied, and notes. Raise UsageError on mistakes."""
    patterns = tuple(word for word in invocation.arguments if not is_override(word))
    changes = Changes(
        overrides=tuple(parse_override(word) for word in invocation.arguments if is_override(word)),
        axes=tuple(parse_axis(word) for word in invocation.matrix),
        defaults=project_limits(invocation.working_dir),
    )
    selection = Selection(patterns=patterns, tags=invocation.tags, expression=invocation.expression)
    if invocation.script is not None:
        if patterns or invocation.tags or invocation.expression:
            word = (*patterns, *invocation.tags, invocation.expression)[0]
            if patterns and _is_launcher(patterns[0]):
                raise UsageError(_watch_advice((*patterns, invocation.script.file, *invocation.script.args)))
            raise UsageError(
                f"{value_text(invocation.script.file)} is a program, and {value_text(word)} would select scenarios in"
                " addition: give only one of the two (arguments for the program follow `--`)"
            )
        script_scenario = _script_scenario(invocation.script, invocation.working_dir)
        return _with_changes([script_scenario], changes, invocation.environ), ()
    if not (patterns or invocation.tags or invocation.expression):
        raise UsageError(
            "nothing to run: name your script (nsa-harness run train.py), a scenario, or a tag (-t plan);"
            " `nsa-harness list` shows all scenarios"
        )
    try:
        scenarios, notes = _select(invocation, selection, changes)
    except UsageError as error:
        raise UsageError(f"{error}{_selection_advice(patterns, invocation.working_dir)}") from None
    _check_names([item.name for item in scenarios])
    if any(_runs_shipped_program(item.tree) for item in scenarios):
        environment_overrides(invocation.environ)  # raises UsageError for a wrong value
    return scenarios, notes


_LAUNCHERS = frozenset({"python", "python3", "torchrun", "accelerate", "deepspeed", "srun", "mpirun", "bash", "sh"})


def _is_launcher(word: str) -> bool:
    return Path(word).name in _LAUNCHERS


def _watch_advice(command: Sequence[str]) -> str:
    return f"{value_text(command[0])} is a command; to watch it, run nsa-harness watch -- {shlex.join(command)}"


def _selection_advice(patterns: Sequence[str], working_dir: Path) -> str:
    """Return advice for a command that names a program instead of a scenario, or "" for any other command."""
    if patterns and _is_launcher(patterns[0]):
        return f"\n{_watch_advice(patterns)}"
    for word in patterns:
        if (working_dir / f"{word}.py").is_file():
            return f"\nthere is a script with this name: nsa-harness run {word}.py"
        if (working_dir / word.replace(".", "/")).with_suffix(".py").is_file():
            return f"\nthere is a module with this name: nsa-harness run -m {word}"
    return ""


def _select(
    invocation: Invocation, selection: Selection, changes: Changes
) -> tuple[tuple[SelectedScenario, ...], tuple[str, ...]]:
    """Return the selected scenarios in the order of the command line, and notes for the user."""
    files = [word for word in selection.patterns if _is_path(word)]
    names = tuple(word for word in selection.patterns if not _is_path(word))
    scenario_files = [
        load_file(invocation.working_dir / word, invocation.working_dir, shipped_root()) for word in files
    ]
    from_files = _with_changes(scenario_files, changes, invocation.environ)
    if files:
        selected = select_items(from_files, replace(selection, patterns=()))
        from_files = tuple(item for item in from_files if item in selected)
    if files and not names:
        return from_files, ()
    by_name_alone = names if not (selection.tags or selection.expression) else ()
    catalog = load_catalog(invocation.working_dir, shipped_root(), by_name_alone)
    from_catalog = select_items(
        _with_changes(catalog.scenarios, changes, invocation.environ), replace(selection, patterns=names)
    )
    return (*from_files, *from_catalog), catalog.notes


def all_scenarios(working_dir: Path) -> tuple[tuple[SelectedScenario, ...], tuple[str, ...]]:
    """Return all scenarios that can be selected, without overrides, and notes for the user."""
    catalog = load_catalog(working_dir, shipped_root())
    return _with_changes(catalog.scenarios, Changes(), {}), catalog.notes


def check_scenarios(items: Sequence[SelectedScenario]) -> tuple[Scenario, ...]:
    """Validate the selected scenarios. Raise UsageError, which lists all errors, if one is invalid."""
    results = [check_scenario(item.tree, PROGRAM) for item in items]
    mistakes = dict.fromkeys(str(mistake) for result in results for mistake in result.mistakes)
    if mistakes:
        raise UsageError("\n".join(mistakes))
    return tuple(result.scenario for result in results if result.scenario is not None)


def resolve_scenario(
    item: SelectedScenario, scenario: Scenario, invocation: Invocation, facts: MachineFacts
) -> RunSpec | Skip:
    """Return the launch of a scenario, or a Skip. Raise ScenarioError if a program file or layer does not exist."""
    program_mistakes = PROGRAM.beyond_the_model(scenario, facts) if scenario.is_ours else ()
    wrong = [str(key_mistake(item.tree, location, text)) for location, text in program_mistakes]
    if wrong:
        raise ScenarioError(wrong)
    surroundings = Surroundings(
        python=sys.executable,
        subject_dir=str(SUBJECT),
        content_hash=_content_hash(item, scenario, invocation.working_dir),
    )
    spec = resolve(scenario, facts, surroundings, PROGRAM, item.notes)
    if isinstance(spec, Skip) or scenario.is_ours or scenario.run.command is not None:
        return spec
    python, reason = find_interpreter(invocation.python, invocation.environ, has_torch=facts.torch is not None)
    return replace(spec, python=python, notes=(*spec.notes, f"under {python}, {reason}")) if python else spec


_HAS_TORCH = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
_IMPORT_S = 30.0


def find_interpreter(
    requested_python: str | None, environ: Mapping[str, str], *, has_torch: bool
) -> tuple[str | None, str]:
    """Return the Python interpreter for a user's program, and the reason for this choice.

    The interpreter is None for the one that runs nsa-harness. `has_torch`: whether that one has torch. Raises
    UsageError if `requested_python` does not exist, and MissingTorch if no interpreter has torch.
    """
    if requested_python is not None:
        python_path = shutil.which(requested_python, path=environ.get("PATH"))
        if python_path is None:
            raise UsageError(f"--python: no interpreter {value_text(requested_python)}")
        if not imports_torch(python_path):
            raise MissingTorch(f"{python_path} has no torch: {shlex.quote(python_path)} -m pip install torch")
        return python_path, "chosen with --python"
    active = environ.get("VIRTUAL_ENV")
    candidates = (
        [(str(Path(active, "bin", "python")), "the interpreter of the active virtual environment")] if active else []
    )
    on_path = shutil.which("python", path=environ.get("PATH"))
    candidates += [(on_path, "the python on PATH")] if on_path else []
    for python, reason in candidates:
        if Path(python).parent == Path(sys.executable).parent:
            break
        if Path(python).exists() and imports_torch(python):
            return python, reason
    if not has_torch:
        raise MissingTorch(f"no torch here: {shlex.quote(sys.executable)} -m pip install torch, or --python PATH")
    return None, ""


@cache
def imports_torch(python: str) -> bool:
    try:
        return subprocess.run([python, "-c", _HAS_TORCH], timeout=_IMPORT_S, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _resolve_or_raise(
    item: SelectedScenario, scenario: Scenario, invocation: Invocation, facts: MachineFacts
) -> RunSpec | Skip:
    spec = resolve_scenario(item, scenario, invocation, facts)
    needs_overrides = [word for word in invocation.arguments if word.startswith("needs.")]
    if isinstance(spec, Skip) and needs_overrides:
        raise MissingNeed(f"{scenario.name}: {needs_overrides[0]}: {spec.reason}")
    return spec


def _stored_specs(invocation: Invocation, files: list[str]) -> Iterator[RunSpec]:
    """Yield the spec that is stored in each file. Raise UsageError if the command has other arguments."""
    others = [word for word in (*invocation.arguments, *invocation.matrix) if word not in files]
    if others or invocation.tags or invocation.expression or invocation.script or invocation.shard:
        extra = others[0] if others else "another selection"
        raise UsageError(
            f"{value_text(files[0])} is a stored spec, which runs unchanged; {value_text(extra)} cannot be added"
        )
    for word in files:
        yield load_spec(Path(word))


def _check_names(names: Sequence[str]) -> None:
    # Each scenario of a run has a directory with its name.
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise UsageError(f"two of the selected scenarios are named {value_text(duplicate)}; run them separately")


def _is_path(word: str) -> bool:
    return word.endswith((".yaml", ".yml")) or "/" in word


def file_argument(name: str, working_dir: Path) -> str:
    """Return "./NAME" if `name` is a file in the working directory, so that it is not read as a scenario."""
    return f"./{name}" if "/" not in name and (working_dir / name).is_file() else name


def spec_in_checkout(spec: RunSpec, tree: Path) -> RunSpec:
    """Return the spec changed to run in `tree`, a checkout of another commit, with the copy of our program in it."""
    shipped_program = next(
        (tree / directory for directory in IN_CHECKOUT if (tree / directory / "train.py").is_file()), SUBJECT
    )
    program = tuple(str(shipped_program) if word == str(SUBJECT) else word for word in spec.program)
    return replace(spec, cwd=str(tree / (spec.cwd or "")), program=program)


def _script_scenario(script: Script, working_dir: Path) -> LoadedScenario:
    stem = script.file.rpartition(".")[2] if script.module else _python_file(script.file, working_dir).stem
    if script.module and not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", script.file):
        raise UsageError(f"-m: expected a module (pkg.train), got {value_text(script.file)}")
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", stem).lstrip("_.-")[:80] or "script"
    name += "_" if name in RESERVED_NAMES else ""
    value: Plain = {
        "name": name,
        "about": f"{Path(script.file).name} on {script.ranks} ranks",
        "run": {"program": script.file, "args": list(script.args)},
    }
    ranks = Override(key="run.ranks", value=from_plain(script.ranks, Origin(source=script.ranks_origin)))
    tree = with_overrides(from_plain(value, Origin(source=COMMAND_LINE)), [ranks])
    return LoadedScenario(name=name, file=COMMAND_LINE, tree=tree, is_shipped=False)


def _python_file(file: str, working_dir: Path) -> Path:
    path = working_dir / file
    if path.suffix != ".py":
        raise UsageError(f"--script: expected a Python file (FILE.py), got {value_text(file)}")
    if not path.is_file():
        suggestion = did_you_mean(path.name, [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else [])
        raise UsageError(f"no file {value_text(file)}{suggestion}")
    return path


def _with_changes(
    scenario_files: Sequence[LoadedScenario], changes: Changes, environ: Mapping[str, str]
) -> tuple[SelectedScenario, ...]:
    return tuple(item for scenario_file in scenario_files for item in _variants(scenario_file, changes, environ))


def _variants(
    scenario_file: LoadedScenario, changes: Changes, environ: Mapping[str, str]
) -> Iterator[SelectedScenario]:
    own = scenario_file.tree
    if changes.defaults is not None and not scenario_file.is_shipped:
        own = merge(changes.defaults, own)
    environment_settings = (
        _environment_overrides(environ) if _runs_shipped_program(with_overrides(own, changes.overrides)) else ()
    )
    command_line_keys = {override.key for override in changes.overrides} | {axis.key for axis in changes.axes}
    effective = [setting for setting in environment_settings if setting.override.key not in command_line_keys]
    tree = with_overrides(with_overrides(own, [setting.override for setting in effective]), changes.overrides)
    tree = with_axes(tree, changes.axes)
    notes = tuple(setting.note for setting in effective)
    for variant in variants(tree):
        yield _selected_scenario(scenario_file, scenario_file.name + variant.suffix, variant.tree, notes)


def _environment_overrides(environ: Mapping[str, str]) -> tuple[EnvironmentOverride, ...]:
    """Return the overrides that environment variables set, or () if a value is invalid."""
    try:
        return environment_overrides(environ)
    except UsageError:  # `select_scenarios` reports it if the shipped program is selected
        return ()


def _selected_scenario(
    scenario_file: LoadedScenario, name: str, tree: Node, notes: tuple[str, ...]
) -> SelectedScenario:
    named_tree = with_overrides(tree, [Override(key="name", value=from_plain(name, origin_of(tree, ("name",))))])
    value = plain(named_tree)
    assert isinstance(value, dict)
    tags, priority = value.get("tags"), value.get("priority")
    return SelectedScenario(
        name=name,
        family=scenario_file.name,
        aliases=scenario_file.aliases,
        tags=tuple(str(tag) for tag in tags) if isinstance(tags, list) else (),
        priority=priority if isinstance(priority, int) else 0,
        file=scenario_file.file,
        is_shipped=scenario_file.is_shipped,
        tree=named_tree,
        notes=notes,
    )


def _runs_shipped_program(tree: Node) -> bool:
    value = plain(tree)
    run = value.get("run") if isinstance(value, dict) else None
    if not isinstance(run, dict):
        return True
    return run.get("command") is None and run.get("program", OUR_PROGRAM) == OUR_PROGRAM


def _content_hash(item: SelectedScenario, scenario: Scenario, working_dir: Path) -> str:
    """Return a hash of the program's source, or "" if the program is not a Python file."""
    if scenario.is_ours:
        return _hash_files(sorted(SUBJECT.rglob("*.py")))
    if scenario.run.command is not None or not scenario.run.program.endswith(".py"):
        return ""
    path = working_dir / with_raw_bytes(scenario.run.cwd or "") / with_raw_bytes(scenario.run.program)
    if not path.is_file():
        text = f"no file {value_text(scenario.run.program)} in {working_dir / (scenario.run.cwd or '')}"
        raise ScenarioError([str(key_mistake(item.tree, ("run", "program"), text))])
    return _hash_files([path])


def _hash_files(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(os.fsencode(file.name) + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()
