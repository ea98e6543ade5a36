"""From command-line arguments to launches: scenario files, environment, overrides, selection, machine."""

from __future__ import annotations

import hashlib
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
from nsa_harness.core.report import MachineFacts
from nsa_harness.core.scenario.checks import checked_scenario, key_mistake
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
from nsa_harness.core.scenario.scenario import OUR_PROGRAM, Scenario
from nsa_harness.core.scenario.selection import Selection, selected
from nsa_harness.core.scenario.yaml_tree import Node, Origin, Plain, from_plain, origin_of, plain, shown
from nsa_harness.errors import MissingNeed, MissingTorch, ScenarioError, UsageError, did_you_mean
from nsa_harness.subject.environment import FromEnvironment, environment_overrides
from nsa_harness.subject.files import IN_CHECKOUT
from nsa_harness.subject.program import PROGRAM
from nsa_harness.supervisor.launch.launcher import SUBJECT
from nsa_harness.supervisor.launch.scenario_files import (
    Declared,
    checked_plan,
    load_catalog,
    load_file,
    plan_file,
    plans_of_tags,
    shipped_plan,
    shipped_root,
)
from nsa_harness.supervisor.storage.record import load_spec


@dataclass(frozen=True, kw_only=True)
class Script:
    """A foreign program named on the command line."""

    file: str  # or the module's name
    ranks: int
    args: tuple[str, ...]
    module: bool = False


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """A command line and its surroundings."""

    words: tuple[str, ...]  # patterns and overrides, in their order
    tags: tuple[str, ...] = ()
    expression: str | None = None
    script: Script | None = None
    matrix: tuple[str, ...] = ()  # KEY=A,B
    shard: tuple[int, int] | None = None  # (K, N): every N-th launch, from the K-th
    working_dir: Path
    environ: Mapping[str, str]
    python: str | None = None  # interpreter for foreign programs; None = chosen automatically


@dataclass(frozen=True, kw_only=True)
class SelectedScenario:
    """One scenario with all overrides applied."""

    name: str
    family: str
    aliases: tuple[str, ...]
    tags: tuple[str, ...]
    priority: int
    file: str
    tree: Node
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    specs: tuple[RunSpec | Skip, ...]
    notes: tuple[str, ...]
    agreed: PlanText | None = None  # None: no plan file was read, so the shipped plan applies


def planned(invocation: Invocation, facts: MachineFacts) -> Plan:
    """Return the launches of a command line. Raises HarnessError; writes nothing."""
    patterns = [word for word in invocation.words if not is_override(word)]
    stored = [word for word in patterns if word.endswith(".json")]
    if stored:
        specs = tuple(_stored_specs(invocation, stored))
        _check_names([spec.scenario for spec in specs])
        return Plan(specs=specs, notes=())
    invocation, agreed, plan_notes = _with_plan(invocation)
    asked, notes = selected_scenarios(invocation)
    scenarios = checked(asked)
    launches = [
        _resolve_or_raise(item, scenario, invocation, facts) for item, scenario in zip(asked, scenarios, strict=True)
    ]
    return Plan(specs=part(launches, invocation.shard), notes=(*plan_notes, *notes), agreed=agreed)


def _with_plan(invocation: Invocation) -> tuple[Invocation, PlanText, tuple[str, ...]]:
    """Replace a plan file by its scenarios; also return the plan that applies to this command, and notes."""
    here = invocation.working_dir
    words = [word for word in invocation.words if not is_override(word) and _is_path(word)]
    plans = {word: plan for word in words if (plan := plan_file(here / word, here))}
    if len(plans) > 1:
        raise UsageError(f"one plan a run; {' and '.join(map(shown, plans))} were named")
    for word, plan in plans.items():
        names = _scenarios_of(plan, here)
        instead = (name for given in invocation.words for name in (names if given == word else (given,)))
        return replace(invocation, words=tuple(instead)), plan, ()
    tagged = plans_of_tags(invocation.tags, here, lambda: every_scenario(here)[0]) if invocation.tags else ()
    if not tagged:
        return invocation, shipped_plan(), ()
    note = f"what was agreed is that of {tagged[0].file}, not of {', '.join(plan.file for plan in tagged[1:])}"
    return invocation, tagged[0], (note,) if tagged[1:] else ()


def _scenarios_of(plan: PlanText, working_dir: Path) -> tuple[str, ...]:
    """Return the scenarios of a plan by priority."""
    every = every_scenario(working_dir)[0]
    agreed = checked_plan(plan, every)
    chosen = [item for item in selected(every, Selection()) if agreed.runs(item)]
    # Variants are named only if the plan names them, since their matrix may be overridden.
    return tuple(dict.fromkeys(item.name if item.name in agreed.scenarios else item.family for item in chosen))


def part(launches: Sequence[RunSpec | Skip], shard: tuple[int, int] | None) -> tuple[RunSpec | Skip, ...]:
    """Return the launches of one shard. Raises UsageError if it has none."""
    if shard is None:
        return tuple(launches)
    number, shards = shard
    if number > len(launches):
        raise UsageError(f"--shard: {number}/{shards} of {len(launches)} scenarios is empty; ask for fewer shards")
    return tuple(launches[number - 1 :: shards])


def selected_scenarios(invocation: Invocation) -> tuple[tuple[SelectedScenario, ...], tuple[str, ...]]:
    """Return the selected scenarios with overrides, and notes about the catalog."""
    patterns = tuple(word for word in invocation.words if not is_override(word))
    changes = Changes(
        overrides=tuple(parse_override(word) for word in invocation.words if is_override(word)),
        axes=tuple(parse_axis(word) for word in invocation.matrix),
    )
    selection = Selection(patterns=patterns, tags=invocation.tags, expression=invocation.expression)
    if invocation.script is not None:
        if patterns or invocation.tags or invocation.expression:
            word = (*patterns, *invocation.tags, invocation.expression)[0]
            if patterns and _is_launcher(patterns[0]):
                raise UsageError(_watch_advice((*patterns, invocation.script.file, *invocation.script.args)))
            raise UsageError(
                f"{shown(invocation.script.file)} is a program of its own; {shown(word)} would select scenarios beside"
                " it: give one of the two (words for the program follow `--`)"
            )
        scripted = _script_scenario(invocation.script, invocation.working_dir)
        return _with_changes([scripted], changes, invocation.environ), ()
    if not (patterns or invocation.tags or invocation.expression):
        raise UsageError(
            "nothing to run: name your script (nsa-harness run train.py), a scenario, or a tag (-t plan);"
            " `nsa-harness list` shows all scenarios"
        )
    try:
        asked, notes = _select(invocation, selection, changes)
    except UsageError as error:
        raise UsageError(f"{error}{_selection_advice(patterns, invocation.working_dir)}") from None
    _check_names([item.name for item in asked])
    if any(_is_ours(item.tree) for item in asked):
        environment_overrides(invocation.environ)  # raises for wrong values
    return asked, notes


_LAUNCHERS = frozenset({"python", "python3", "torchrun", "accelerate", "deepspeed", "srun", "mpirun", "bash", "sh"})


def _is_launcher(word: str) -> bool:
    return Path(word).name in _LAUNCHERS


def _watch_advice(command: Sequence[str]) -> str:
    return f"{shown(command[0])} is a command, which watch takes as it is: nsa-harness watch -- {shlex.join(command)}"


def _selection_advice(patterns: Sequence[str], working_dir: Path) -> str:
    """Return advice if a word names a program or a launcher instead of a scenario."""
    if patterns and _is_launcher(patterns[0]):
        return f"\n{_watch_advice(patterns)}"
    for word in patterns:
        if (working_dir / f"{word}.py").is_file():
            return f"\nthere is a script of that name: nsa-harness run {word}.py"
        if (working_dir / word.replace(".", "/")).with_suffix(".py").is_file():
            return f"\nthere is a module of that name: nsa-harness run -m {word}"
    return ""


def _select(
    invocation: Invocation, selection: Selection, changes: Changes
) -> tuple[tuple[SelectedScenario, ...], tuple[str, ...]]:
    """Return files named by path first, then scenarios of the catalog, which is read only if a name needs it."""
    files = [word for word in selection.patterns if _is_path(word)]
    names = tuple(word for word in selection.patterns if not _is_path(word))
    declared = [load_file(invocation.working_dir / word, invocation.working_dir, shipped_root()) for word in files]
    from_files = _with_changes(declared, changes, invocation.environ)
    if files:
        from_files = selected(from_files, replace(selection, patterns=()))
    if files and not names:
        return from_files, ()
    by_name_alone = names if not (selection.tags or selection.expression) else ()
    catalog = load_catalog(invocation.working_dir, shipped_root(), by_name_alone)
    asked = selected(_with_changes(catalog.declared, changes, invocation.environ), replace(selection, patterns=names))
    return (*from_files, *asked), catalog.notes


def every_scenario(working_dir: Path) -> tuple[tuple[SelectedScenario, ...], tuple[str, ...]]:
    """Return all scenarios as declared, for `list`."""
    catalog = load_catalog(working_dir, shipped_root())
    return _with_changes(catalog.declared, Changes(), {}), catalog.notes


def checked(asked: Sequence[SelectedScenario]) -> tuple[Scenario, ...]:
    """Return the scenarios. Raises UsageError with every mistake of an override."""
    results = [checked_scenario(item.tree, PROGRAM) for item in asked]
    mistakes = dict.fromkeys(str(mistake) for result in results for mistake in result.mistakes)
    if mistakes:
        raise UsageError("\n".join(mistakes))
    return tuple(result.scenario for result in results if result.scenario is not None)


def resolved(item: SelectedScenario, scenario: Scenario, invocation: Invocation, facts: MachineFacts) -> RunSpec | Skip:
    """Return the launch of a scenario on this machine. Raises ScenarioError for a missing program or layer."""
    beyond = PROGRAM.beyond_the_model(scenario, facts) if scenario.is_ours else ()
    wrong = [str(key_mistake(item.tree, location, what)) for location, what in beyond]
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
    python, why = interpreter(invocation.python, invocation.environ, has_torch=facts.torch is not None)
    return replace(spec, python=python, notes=(*spec.notes, f"under {python}, {why}")) if python else spec


_HAS_TORCH = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
_IMPORT_S = 30.0


def interpreter(wanted: str | None, environ: Mapping[str, str], *, has_torch: bool) -> tuple[str | None, str]:
    """Return the interpreter for a user's program and the reason; None = the harness's own.

    `has_torch`: the harness's own interpreter has torch. Raises UsageError if `wanted` cannot be run, and MissingTorch
    if no interpreter has torch.
    """
    if wanted is not None:
        found = shutil.which(wanted, path=environ.get("PATH"))
        if found is None:
            raise UsageError(f"--python: no interpreter {shown(wanted)}")
        if not imports_torch(found):
            raise MissingTorch(f"{found} has no torch: {shlex.quote(found)} -m pip install torch")
        return found, "as --python says"
    active = environ.get("VIRTUAL_ENV")
    candidates = [(str(Path(active, "bin", "python")), "the active virtual environment's")] if active else []
    on_path = shutil.which("python", path=environ.get("PATH"))
    candidates += [(on_path, "the python on PATH")] if on_path else []
    for python, why in candidates:
        if Path(python).parent == Path(sys.executable).parent:
            break
        if Path(python).exists() and imports_torch(python):
            return python, why
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
    spec = resolved(item, scenario, invocation, facts)
    named = [word for word in invocation.words if word.startswith("needs.")]
    if isinstance(spec, Skip) and named:
        raise MissingNeed(f"{scenario.name}: {named[0]}: {spec.reason}")
    return spec


def _stored_specs(invocation: Invocation, files: list[str]) -> Iterator[RunSpec]:
    """Read stored specs, which run unchanged."""
    others = [word for word in (*invocation.words, *invocation.matrix) if word not in files]
    if others or invocation.tags or invocation.expression or invocation.script or invocation.shard:
        extra = others[0] if others else "another selection"
        raise UsageError(f"{shown(files[0])} is run as it stands; {shown(extra)} cannot go with it")
    for word in files:
        yield load_spec(Path(word))


def _check_names(names: Sequence[str]) -> None:
    # Each scenario of a run has a directory with its name.
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"two of the selected scenarios are named {shown(twice)}; run them one after the other")


def _is_path(word: str) -> bool:
    return word.endswith((".yaml", ".yml")) or "/" in word


def as_path(name: str, working_dir: Path) -> str:
    """Return `name` as "./name" if it is a file in the working directory, so that it is not taken for a scenario."""
    return f"./{name}" if "/" not in name and (working_dir / name).is_file() else name


def in_checkout(spec: RunSpec, tree: Path) -> RunSpec:
    """Return the spec for the checkout of another commit, with that checkout's shipped program if it has one."""
    shipped_program = next((tree / place for place in IN_CHECKOUT if (tree / place / "train.py").is_file()), SUBJECT)
    program = tuple(str(shipped_program) if word == str(SUBJECT) else word for word in spec.program)
    return replace(spec, cwd=str(tree / (spec.cwd or "")), program=program)


def _script_scenario(script: Script, working_dir: Path) -> Declared:
    """Return the scenario of `FILE.py --ranks N -- ARGS`, or of `-m MODULE`."""
    stem = script.file.rpartition(".")[2] if script.module else _python_file(script.file, working_dir).stem
    if script.module and not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", script.file):
        raise UsageError(f"-m: expected a module (pkg.train), got {shown(script.file)}")
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", stem).lstrip("_.-")[:80] or "script"
    value: Plain = {
        "name": name,
        "about": f"{Path(script.file).name} on {script.ranks} ranks",
        "run": {"program": script.file, "ranks": script.ranks, "args": list(script.args)},
    }
    return Declared(name=name, file=COMMAND_LINE, tree=from_plain(value, Origin(source=COMMAND_LINE)), shipped=False)


def _python_file(file: str, working_dir: Path) -> Path:
    path = working_dir / file
    if path.suffix != ".py":
        raise UsageError(f"--script: expected a Python file (FILE.py), got {shown(file)}")
    if not path.is_file():
        near = did_you_mean(path.name, [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else [])
        raise UsageError(f"no file {shown(file)}{near}")
    return path


def _with_changes(
    declared: Sequence[Declared], changes: Changes, environ: Mapping[str, str]
) -> tuple[SelectedScenario, ...]:
    return tuple(item for scenario in declared for item in _variants(scenario, changes, environ))


def _variants(declared: Declared, changes: Changes, environ: Mapping[str, str]) -> Iterator[SelectedScenario]:
    given = _environment_overrides(environ) if _is_ours(with_overrides(declared.tree, changes.overrides)) else ()
    typed = {override.key for override in changes.overrides} | {axis.key for axis in changes.axes}
    effective = [setting for setting in given if setting.override.key not in typed]
    tree = with_overrides(with_overrides(declared.tree, [setting.override for setting in effective]), changes.overrides)
    tree = with_axes(tree, changes.axes)
    notes = tuple(setting.note for setting in effective)
    for variant in variants(tree):
        yield _selected_scenario(declared, declared.name + variant.suffix, variant.tree, notes)


def _environment_overrides(environ: Mapping[str, str]) -> tuple[FromEnvironment, ...]:
    """Return the overrides from the environment. A wrong value raises only if a shipped scenario is selected."""
    try:
        return environment_overrides(environ)
    except UsageError:
        return ()


def _selected_scenario(declared: Declared, name: str, tree: Node, notes: tuple[str, ...]) -> SelectedScenario:
    named = with_overrides(tree, [Override(key="name", value=from_plain(name, origin_of(tree, ("name",))))])
    value = plain(named)
    assert isinstance(value, dict)
    tags, priority = value.get("tags"), value.get("priority")
    return SelectedScenario(
        name=name,
        family=declared.name,
        aliases=declared.aliases,
        tags=tuple(str(tag) for tag in tags) if isinstance(tags, list) else (),
        priority=priority if isinstance(priority, int) else 0,
        file=declared.file,
        tree=named,
        notes=notes,
    )


def _is_ours(tree: Node) -> bool:
    value = plain(tree)
    run = value.get("run") if isinstance(value, dict) else None
    if not isinstance(run, dict):
        return True
    return run.get("command") is None and run.get("program", OUR_PROGRAM) == OUR_PROGRAM


def _content_hash(item: SelectedScenario, scenario: Scenario, working_dir: Path) -> str:
    """Return a hash of the program's source. Raises ScenarioError if the file is missing."""
    if scenario.is_ours:
        return _hash_files(sorted(SUBJECT.rglob("*.py")))
    if scenario.run.command is not None or not scenario.run.program.endswith(".py"):
        return ""
    path = working_dir / (scenario.run.cwd or "") / scenario.run.program
    if not path.is_file():
        what = f"no file {shown(scenario.run.program)} in {working_dir / (scenario.run.cwd or '')}"
        raise ScenarioError([str(key_mistake(item.tree, ("run", "program"), what))])
    return _hash_files([path])


def _hash_files(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()
