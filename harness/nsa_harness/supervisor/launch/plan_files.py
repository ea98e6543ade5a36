"""Finds and reads plan files: what a command runs by them, and what was agreed to do about the answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from nsa_harness.core.comparison.plan_file import PlanFile, PlanText, ReadPlan, is_plan, read_plan
from nsa_harness.core.scenario.selection import Named
from nsa_harness.core.scenario.yaml_tree import parse_yaml
from nsa_harness.errors import ScenarioError
from nsa_harness.supervisor.launch.scenario_files import PLANS, ScenarioReader, shipped_root, yaml_files

_SHIPPED = "plan.yaml"


@cache
def shipped_plan() -> PlanText:
    """What stands for every run that no other plan was made for."""
    return PlanText(file=f"{PLANS}/{_SHIPPED}", text=(shipped_root() / PLANS / _SHIPPED).read_text(encoding="utf-8"))


def plan_file(path: Path, working_dir: Path) -> PlanText | None:
    """None where it is no plan: whoever reads it as a scenario says what is wrong with it."""
    reader = ScenarioReader(working_dir)
    text = reader.text(path) if path.is_file() else None
    if text is None or not is_plan(parse_yaml(text, reader.label(path)).root):
        return None
    return PlanText(file=reader.label(path), text=text)


def checked_plan(stored: PlanText, scenarios: Sequence[Named]) -> PlanFile:
    """Raises ScenarioError with all its mistakes."""
    return _without_mistakes([read_plan(stored, scenarios)])[0]


def plans_of_tags(
    tags: Sequence[str], working_dir: Path, scenarios: Callable[[], Sequence[Named]]
) -> tuple[PlanText, ...]:
    """The plans that run one of these tags, the user's before the one that ships. Raises ScenarioError."""
    users, shipped = working_dir / "scenarios", shipped_root()
    own = not (users.is_dir() and shipped.is_dir() and users.samefile(shipped))
    texts = _texts(users, working_dir) if own else ()
    every = scenarios() if texts else ()
    theirs = _without_mistakes([read_plan(one, every) for one in texts])
    known = [*zip(texts, theirs, strict=True), (shipped_plan(), read_plan(shipped_plan(), None).plan)]
    return tuple(text for text, plan in known if {*plan.tags} & {*tags})


def _texts(root: Path, working_dir: Path) -> tuple[PlanText, ...]:
    reader = ScenarioReader(working_dir)
    files = [path for path in yaml_files(root / PLANS) if reader.check_inside(path, root)]
    read = [(path, reader.text(path)) for path in files]
    reader.raise_mistakes()
    return tuple(PlanText(file=reader.label(path), text=text) for path, text in read if text is not None)


def _without_mistakes(read: Sequence[ReadPlan]) -> list[PlanFile]:
    wrong = [str(mistake) for one in read for mistake in one.mistakes]
    if wrong:
        raise ScenarioError(wrong)
    return [one.plan for one in read]
