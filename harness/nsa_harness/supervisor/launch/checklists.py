"""Reads the checklist files of `nsa-harness ready`, and plans what their phases launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nsa_harness.core.experiment.checklist import (
    Checklist,
    ChecklistPhase,
    checklist_mistakes,
    fill_run_directories,
    run_name_mistakes,
    runs_named_in,
)
from nsa_harness.core.plan import RunSpec, Skip
from nsa_harness.core.report import MachineFacts
from nsa_harness.core.scenario.checks import key_mistake, parse_model
from nsa_harness.core.scenario.overrides import Override, with_overrides
from nsa_harness.core.scenario.yaml_tree import Mistake, Node, from_plain, in_order, origin_of
from nsa_harness.errors import ScenarioError, UsageError
from nsa_harness.supervisor.launch.planning import (
    Invocation,
    SelectedScenario,
    check_scenarios,
    resolve_scenario,
    select_scenarios,
)
from nsa_harness.supervisor.launch.scenario_files import read_tree, shipped_root

SHIPPED = "ready/default.readiness.yaml"


@dataclass(frozen=True, kw_only=True)
class ChecklistFile:
    """A parsed checklist file, with its YAML tree for the positions in later error messages."""

    checklist: Checklist
    tree: Node


def load_checklist(file: Path | None, working_dir: Path) -> ChecklistFile:
    """Read a checklist file, or the default one if `file` is None. Raise ScenarioError, which lists all errors."""
    document = read_tree(shipped_root() / SHIPPED if file is None else working_dir / file, working_dir)
    mistakes = list(document.mistakes)
    checklist = None
    if document.root is not None:
        checklist, wrong = parse_model(Checklist, document.root)
        mistakes += wrong
    if checklist is not None and document.root is not None:
        mistakes += in_order(
            key_mistake(document.root, *contradiction) for contradiction in checklist_mistakes(checklist)
        )
    if mistakes or checklist is None or document.root is None:
        raise ScenarioError([str(mistake) for mistake in mistakes])
    return ChecklistFile(checklist=checklist, tree=document.root)


@dataclass(frozen=True, kw_only=True)
class PhasePlan:
    """One phase of a checklist. Its settings override the command line, which overrides the scenarios."""

    phase: ChecklistPhase
    scenarios: tuple[SelectedScenario, ...]
    invocation: Invocation
    tree: Node  # the YAML node of the phase's `set`
    specs: tuple[RunSpec | Skip, ...] = ()  # with placeholders for the directories of earlier runs

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(item.name for item in self.scenarios)

    def launches(self, facts: MachineFacts, folders: Mapping[str, str]) -> tuple[RunSpec | Skip, ...]:
        """Return the launches of this phase. `folders` has the directories of earlier runs. Raise HarnessError."""
        if self.specs and not any(map(runs_named_in, self.phase.set.values())):
            return self.specs
        overrides = [
            Override(key=key, value=from_plain(fill_run_directories(value, folders), origin_of(self.tree, (key,))))
            for key, value in self.phase.set.items()
        ]
        items = [replace(item, tree=with_overrides(item.tree, overrides)) for item in self.scenarios]
        pairs = zip(items, check_scenarios(items), strict=True)
        return tuple(resolve_scenario(item, scenario, self.invocation, facts) for item, scenario in pairs)


def plan_phases(checklist_file: ChecklistFile, invocation: Invocation, facts: MachineFacts) -> tuple[PhasePlan, ...]:
    """Return the plans of all phases, with the arguments of `invocation` added, or raise all mistakes at once."""
    mistakes: list[Mistake] = []
    plans = []
    for number, phase in enumerate(checklist_file.checklist.phases):
        at = ("phases", number)
        scenarios: list[SelectedScenario] = []
        for index, run in enumerate(phase.runs):
            try:
                scenarios += select_scenarios(replace(invocation, arguments=(run, *invocation.arguments)))[0]
            except ScenarioError:
                raise
            except UsageError as error:
                mistakes.append(key_mistake(checklist_file.tree, (*at, "runs", index), str(error)))
        tree = _node_at(checklist_file.tree, (*at, "set"))
        plans.append(PhasePlan(phase=phase, scenarios=tuple(scenarios), invocation=invocation, tree=tree))
    names = [plan.names for plan in plans]
    if not mistakes:
        mistakes += [
            key_mistake(checklist_file.tree, *contradiction)
            for contradiction in run_name_mistakes(checklist_file.checklist, names)
        ]
    if mistakes:
        raise ScenarioError(list(dict.fromkeys(map(str, in_order(mistakes)))))
    return _resolve_plans(plans, facts)


def _resolve_plans(plans: Sequence[PhasePlan], facts: MachineFacts) -> tuple[PhasePlan, ...]:
    """Return the plans with their launches. Raise ScenarioError, which lists all errors, if a plan is invalid."""
    resolved_plans, mistakes = [], []
    for plan in plans:
        try:
            resolved_plans.append(replace(plan, specs=plan.launches(facts, {})))
        except (UsageError, ScenarioError) as error:
            mistakes += str(error).splitlines()
    if mistakes:
        raise ScenarioError(list(dict.fromkeys(mistakes)))
    return tuple(resolved_plans)


def _node_at(node: Node, location: Sequence[str | int]) -> Node:
    """Return the YAML node at `location` in the tree below `node`, or its deepest existing ancestor."""
    for step in location:
        content = node.content
        if isinstance(content, dict) and step in content:
            node = content[str(step)]
        elif isinstance(content, tuple) and isinstance(step, int):
            node = content[step]
    return node
