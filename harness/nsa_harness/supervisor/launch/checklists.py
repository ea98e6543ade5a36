"""Reads checklist files of `ready`, and plans the launches of their phases on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nsa_harness.core.experiment.readiness import (
    Checklist,
    Phase,
    contradictions,
    folders_in,
    run_contradictions,
    with_folders,
)
from nsa_harness.core.plan import RunSpec, Skip
from nsa_harness.core.report import MachineFacts
from nsa_harness.core.scenario.checks import checked_model, key_mistake
from nsa_harness.core.scenario.overrides import Override, with_overrides
from nsa_harness.core.scenario.yaml_tree import Mistake, Node, from_plain, in_order, origin_of
from nsa_harness.errors import ScenarioError, UsageError
from nsa_harness.supervisor.launch.planning import (
    Invocation,
    SelectedScenario,
    checked,
    resolved,
    selected_scenarios,
)
from nsa_harness.supervisor.launch.scenario_files import read_tree, shipped_root

SHIPPED = "ready/default.readiness.yaml"


@dataclass(frozen=True, kw_only=True)
class ReadChecklist:
    """A checklist with the positions in its file, for mistakes that show only with the named scenarios."""

    checklist: Checklist
    tree: Node


def load_checklist(file: Path | None, working_dir: Path) -> ReadChecklist:
    """Read a checklist, by default the shipped one. Raises ScenarioError with every mistake."""
    parsed = read_tree(shipped_root() / SHIPPED if file is None else working_dir / file, working_dir)
    mistakes = list(parsed.mistakes)
    checklist = None
    if parsed.root is not None:
        checklist, wrong = checked_model(Checklist, parsed.root)
        mistakes += wrong
    if checklist is not None and parsed.root is not None:
        mistakes += in_order(key_mistake(parsed.root, *found) for found in contradictions(checklist))
    if mistakes or checklist is None or parsed.root is None:
        raise ScenarioError([str(mistake) for mistake in mistakes])
    return ReadChecklist(checklist=checklist, tree=parsed.root)


@dataclass(frozen=True, kw_only=True)
class PhasePlan:
    """The launches of one phase, with the settings of its scenarios, the command line and the phase, in this order."""

    phase: Phase
    asked: tuple[SelectedScenario, ...]
    question: Invocation
    tree: Node  # the YAML node of the phase's `set`
    specs: tuple[RunSpec | Skip, ...] = ()  # the directory of an earlier run is still a placeholder

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(item.name for item in self.asked)

    def launches(self, facts: MachineFacts, folders: Mapping[str, str]) -> tuple[RunSpec | Skip, ...]:
        """Return the launches, with the directories of earlier runs filled in. Raises HarnessError."""
        if self.specs and not any(map(folders_in, self.phase.set.values())):
            return self.specs
        overrides = [
            Override(key=key, value=from_plain(with_folders(value, folders), origin_of(self.tree, (key,))))
            for key, value in self.phase.set.items()
        ]
        items = [replace(item, tree=with_overrides(item.tree, overrides)) for item in self.asked]
        pairs = zip(items, checked(items), strict=True)
        return tuple(resolved(item, scenario, self.question, facts) for item, scenario in pairs)


def planned_phases(read: ReadChecklist, question: Invocation, facts: MachineFacts) -> tuple[PhasePlan, ...]:
    """Plan all phases, with the arguments of `question`. Raises ScenarioError or UsageError with every mistake."""
    mistakes: list[Mistake] = []
    plans = []
    for number, phase in enumerate(read.checklist.phases):
        at = ("phases", number)
        asked: list[SelectedScenario] = []
        for place, run in enumerate(phase.runs):
            try:
                asked += selected_scenarios(replace(question, words=(run, *question.words)))[0]
            except ScenarioError:
                raise
            except UsageError as error:
                mistakes.append(key_mistake(read.tree, (*at, "runs", place), str(error)))
        tree = _at(read.tree, (*at, "set"))
        plans.append(PhasePlan(phase=phase, asked=tuple(asked), question=question, tree=tree))
    names = [plan.names for plan in plans]
    if not mistakes:
        mistakes += [key_mistake(read.tree, *found) for found in run_contradictions(read.checklist, names)]
    if mistakes:
        raise ScenarioError(list(dict.fromkeys(map(str, in_order(mistakes)))))
    return _launchable(plans, facts)


def _launchable(plans: Sequence[PhasePlan], facts: MachineFacts) -> tuple[PhasePlan, ...]:
    """Resolve the launches of all phases before the first one starts."""
    found, wrong = [], []
    for plan in plans:
        try:
            found.append(replace(plan, specs=plan.launches(facts, {})))
        except (UsageError, ScenarioError) as error:
            wrong += str(error).splitlines()
    if wrong:
        raise ScenarioError(list(dict.fromkeys(wrong)))
    return tuple(found)


def _at(node: Node, location: Sequence[str | int]) -> Node:
    """Return the node at a location, or its deepest ancestor that exists."""
    for step in location:
        content = node.content
        if isinstance(content, dict) and step in content:
            node = content[str(step)]
        elif isinstance(content, tuple) and isinstance(step, int):
            node = content[step]
    return node
