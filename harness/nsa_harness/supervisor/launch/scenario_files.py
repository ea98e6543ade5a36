"""Finds and reads scenario files, both those of the user and those of nsa-harness."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from nsa_harness.core.comparison.plan_file import PlanFile, PlanText, ReadPlan, is_plan, read_plan
from nsa_harness.core.scenario.checks import check_scenario, file_mistakes
from nsa_harness.core.scenario.overrides import matrix_mistakes, matrix_size_mistake, variants
from nsa_harness.core.scenario.selection import Selectable
from nsa_harness.core.scenario.yaml_tree import (
    Mistake,
    Node,
    Origin,
    ParsedYaml,
    from_plain,
    in_order,
    merge,
    parse_yaml,
    plain,
    value_text,
    visible,
    without,
)
from nsa_harness.errors import ScenarioError, did_you_mean
from nsa_harness.subject.program import PROGRAM

SIZE_LIMIT_BYTES = 1_000_000
PARENT_LIMIT = 8  # levels of `extends`
_SUFFIXES = (".yaml", ".yml")
CHECKLISTS = (".readiness.yaml", ".readiness.yml")  # suffixes of checklists for `ready`, which are not scenarios
_PARENTS = "base"  # files in a directory of this name are parents, not scenarios
PLANS = "plans"  # the directory of plan files
_NOT_INHERITED = ("name", "aliases", "extends", "schema")
_PACKAGE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class LoadedScenario:
    """A scenario file with the trees of its parents merged into its tree. Its matrix is not expanded yet."""

    name: str
    file: str  # the path that messages show
    tree: Node
    is_shipped: bool

    @property
    def aliases(self) -> tuple[str, ...]:
        assert isinstance(self.tree.content, dict)
        value = plain(self.tree.content["aliases"]) if "aliases" in self.tree.content else []
        return tuple(str(item) for item in value) if isinstance(value, list) else ()


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """All scenarios that a user can select by name, with notes for the user."""

    scenarios: tuple[LoadedScenario, ...]
    notes: tuple[str, ...]  # which of the user's scenarios replace shipped scenarios, and which files are unreadable


def shipped_root() -> Path:
    """Return the directory of the shipped scenarios, inside an installed package or next to it in a checkout."""
    inside = _PACKAGE / "_scenarios"
    return inside if inside.is_dir() else _PACKAGE.parents[1] / "scenarios"


def load_catalog(working_dir: Path, shipped_dir: Path, names: Collection[str] = ()) -> Catalog:
    """Return all scenarios that a user can select by name.

    If the caller needs only some scenarios, `names` are their names, and errors in other files become notes. If each
    name is a scenario of the user or the name of a shipped file, the other shipped files are not read: reading a
    hundred files takes longer than starting a rank. Raise ScenarioError, which lists all errors, if a file is invalid.
    """
    users = working_dir / "scenarios"
    reader, scenarios = ScenarioReader(working_dir), []
    if users.is_dir() and not (shipped_dir.is_dir() and users.samefile(shipped_dir)):
        scenarios = _read_root(reader, users, [users, shipped_dir], is_shipped=False)
    user_names = {name for scenario in scenarios for name in (scenario.name, *scenario.aliases)}
    shipped_names = {name for name in names if name not in user_names}
    reads_only_named = bool(names) and shipped_names <= {path.stem for path in yaml_files(shipped_dir)}
    scenarios += _read_root(
        reader, shipped_dir, [shipped_dir], is_shipped=True, only=shipped_names if reads_only_named else None
    )
    all_names = {name for scenario in scenarios for name in (scenario.name, *scenario.aliases)}
    requested_scenarios = [
        scenario for scenario in scenarios if not names or {scenario.name, *scenario.aliases} & set(names)
    ]
    clashes = list(_name_clashes(requested_scenarios))
    reader.mistakes.extend(clashes)
    if clashes or not names or not all_names.issuperset(names):
        reader.raise_mistakes()
    catalog = _catalog_with_shadowing(scenarios)
    # Mistakes in files that were not requested become notes, so the requested scenarios can still run.
    return replace(catalog, notes=(*catalog.notes, *(f"not read: {mistake}" for mistake in reader.messages())))


def load_file(path: Path, working_dir: Path, shipped_dir: Path) -> LoadedScenario:
    """Read a scenario file that is named on the command line. Raise ScenarioError if the file is invalid."""
    reader, users = ScenarioReader(working_dir), working_dir / "scenarios"
    if path.is_relative_to(users):
        reader.check_inside(path, users)
        reader.raise_mistakes()
    scenario = reader.read_scenario(path, (path.parent, users, shipped_dir), is_shipped=False)
    reader.raise_mistakes()
    assert scenario is not None
    return scenario


def read_tree(path: Path, working_dir: Path) -> ParsedYaml:
    """Return the tree of a YAML file that is not a scenario, and its syntax errors."""
    reader = ScenarioReader(working_dir)
    text = reader.text(path)
    return (
        ParsedYaml(root=None, mistakes=tuple(reader.mistakes)) if text is None else parse_yaml(text, reader.label(path))
    )


def _read_root(
    reader: ScenarioReader, root: Path, parents: list[Path], *, is_shipped: bool, only: Collection[str] | None = None
) -> list[LoadedScenario]:
    scenarios = []
    for path in yaml_files(root):
        if only is not None and path.stem not in only:
            continue
        if not reader.check_inside(path, root):
            continue
        if _PARENTS in path.relative_to(root).parts[:-1]:
            reader.tree(path)  # finds mistakes in parents that no scenario extends
        elif scenario := reader.read_scenario(path, tuple(parents), is_shipped=is_shipped):
            scenarios.append(scenario)
    return scenarios


def yaml_files(root: Path) -> Iterator[Path]:
    """Yield the YAML files below `root`, except plan files and checklists."""
    for folder, folders, files in os.walk(root):
        # A directory that is named like a scenario file is yielded as well: reading it reports the mistake.
        misnamed_dirs = [name for name in folders if name.endswith(_SUFFIXES)]
        skipped_dirs = (*misnamed_dirs, PLANS) if Path(folder) == root else misnamed_dirs
        folders[:] = sorted(name for name in folders if name not in skipped_dirs and not name.startswith("."))
        names = (name for name in sorted([*files, *misnamed_dirs]) if name.endswith(_SUFFIXES))
        yield from (Path(folder, name) for name in names if not name.endswith(CHECKLISTS))


class ScenarioReader:
    """A reader of scenario files, which reads each file only once and collects the errors in all of them."""

    def __init__(self, working_dir: Path) -> None:
        self.working_dir = working_dir
        self.mistakes: list[Mistake] = []
        self._trees: dict[Path, Node | None] = {}

    def raise_mistakes(self) -> None:
        if self.mistakes:
            raise ScenarioError(self.messages())

    def messages(self) -> tuple[str, ...]:
        """Return the messages about all errors found so far, grouped by file and without duplicates."""
        files = dict.fromkeys(mistake.origin.source for mistake in self.mistakes)
        by_file = ([mistake for mistake in self.mistakes if mistake.origin.source == file] for file in files)
        return tuple(dict.fromkeys(str(mistake) for mistakes in by_file for mistake in in_order(mistakes)))

    def check_inside(self, path: Path, root: Path) -> bool:
        """Return whether `path` is really below `root`. If it leads outside through a link, record an error.

        Error messages quote a file's text, so a link must not lead to an arbitrary file.
        """
        inside = not path.exists() or path.resolve().is_relative_to(root.resolve())
        if not inside:
            text = f"is a link that leads out of {self.label(root)} and is not read; put a copy there instead"
            self.mistakes.append(
                Mistake(origin=Origin(source=self.label(path), line=1, column=1), key="", message=text)
            )
        return inside

    def read_scenario(self, path: Path, roots: tuple[Path, ...], *, is_shipped: bool) -> LoadedScenario | None:
        """Return the scenario in a file, with parents from `roots` merged in, or None if the file is invalid."""
        mistakes_before = len(self.mistakes)
        tree = self._with_parents(path, roots, ())
        if tree is None or len(self.mistakes) > mistakes_before:
            return None
        name = plain(tree).get("name") or path.stem  # type: ignore[union-attr]
        named_tree = merge(tree, from_plain({"name": str(name)}, Origin(source=self.label(path), line=1, column=1)))
        if size_mistake := matrix_size_mistake(tree):
            self.mistakes.append(size_mistake)
            return None
        for variant in variants(without(named_tree, ("extends",))):
            self.mistakes.extend(check_scenario(variant.tree, PROGRAM).mistakes)
        return LoadedScenario(name=str(name), file=self.label(path), tree=named_tree, is_shipped=is_shipped)

    def _with_parents(self, path: Path, roots: tuple[Path, ...], children: tuple[Path, ...]) -> Node | None:
        tree = self.tree(path)
        if tree is None or not isinstance(tree.content, dict):
            return None
        if "extends" not in tree.content:
            return tree
        parent = self._parent_path(tree.content["extends"], roots)
        if parent is None:
            return None
        if self._is_circular(tree.content["extends"], parent, (*children, path)):
            return None
        parent_tree = self._with_parents(parent, roots, (*children, path))
        return None if parent_tree is None else merge(without(parent_tree, _NOT_INHERITED), tree)

    def _parent_path(self, extends: Node, roots: tuple[Path, ...]) -> Path | None:
        name = str(extends.content)
        candidates = [(root, root / f"{name}{suffix}") for root in roots for suffix in _SUFFIXES]
        inside = not name.startswith("/") and ".." not in Path(name).parts and "\0" not in name
        root, file = next(((root, path) for root, path in candidates if inside and path.exists()), (None, None))
        if root is not None and file is not None and not self.check_inside(file, root):
            return None
        if file is None:
            names = sorted({str(p.relative_to(r).with_suffix("")) for r in roots for p in yaml_files(r)})
            bases = [candidate for candidate in names if _PARENTS in Path(candidate).parts[:-1]]
            hint = did_you_mean(name, names) or (f"; known parents: {', '.join(bases)}" if bases else "")
            self.mistakes.append(
                Mistake(origin=extends.origin, key="extends", message=f"no file {value_text(name)}{hint}")
            )
        return file

    def _is_circular(self, extends: Node, parent: Path, children: tuple[Path, ...]) -> bool:
        text = ""
        if parent.resolve() in [child.resolve() for child in children]:
            chain = " -> ".join(self.label(path) for path in (*children, parent))
            text = f"is circular: {chain}; remove one `extends`"
        elif len(children) > PARENT_LIMIT:
            text = f"more than {PARENT_LIMIT} levels of parents; merge some of them"
        if text:
            self.mistakes.append(Mistake(origin=extends.origin, key="extends", message=text))
        return bool(text)

    def tree(self, path: Path) -> Node | None:
        """Return the YAML tree of a file without its parents. If it is unreadable, record an error and return None."""
        if path not in self._trees:
            self._trees[path] = self._read(path)
        return self._trees[path]

    def _read(self, path: Path) -> Node | None:
        text = self.text(path)
        if text is None:
            return None
        document = parse_yaml(text, self.label(path))
        wrong = list(document.mistakes)
        if document.root is not None:
            wrong += in_order((*file_mistakes(document.root), *matrix_mistakes(document.root)))
        self.mistakes.extend(wrong)
        return document.root  # also with mistakes, because its parent may have further mistakes

    def text(self, path: Path) -> str | None:
        """Return the text of a file, or None if it cannot be read."""
        try:
            content = _read_bytes(path)
            # Some editors write a byte order mark at the start, which is not part of the text.
            return content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            column = error.start - (content.rfind(b"\n", 0, error.start) + 1) + 1
            reason = f"is not UTF-8 (byte 0x{content[error.start]:02x}); save it as UTF-8"
        except OSError as error:
            line, column, reason = 1, 1, f"cannot be read: {error.strerror}"
        except ValueError as error:
            line, column, reason = 1, 1, str(error)
        origin = Origin(source=self.label(path), line=line, column=column)
        self.mistakes.append(Mistake(origin=origin, key="", message=reason))
        return None

    def label(self, path: Path) -> str:
        """Return a path as it is shown in messages, relative to the working directory if possible."""
        absolute = Path(os.path.abspath(path))
        inside = absolute.is_relative_to(self.working_dir)
        return visible(str(absolute.relative_to(self.working_dir) if inside else absolute))


def _read_bytes(path: Path) -> bytes:
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise ValueError("is a directory; a scenario is a file")
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("is not a regular file")
    if status.st_size > SIZE_LIMIT_BYTES:
        raise ValueError(f"has {status.st_size} bytes; a scenario file has at most {SIZE_LIMIT_BYTES}")
    with path.open("rb") as file:
        return file.read(SIZE_LIMIT_BYTES)


def _name_clashes(scenarios: list[LoadedScenario]) -> Iterator[Mistake]:
    """Yield an error for each scenario whose name is already taken."""
    owners: dict[tuple[bool, str], LoadedScenario] = {}
    for scenario in scenarios:
        for name in (scenario.name, *scenario.aliases):
            first = owners.setdefault((scenario.is_shipped, name), scenario)
            if first is not scenario:
                text = f"{value_text(name)} is already the name or an alias of {first.file}; rename one"
                key = "name" if name == scenario.name else "aliases"
                yield Mistake(origin=Origin(source=scenario.file, line=1, column=1), key=key, message=text)


def _catalog_with_shadowing(scenarios: list[LoadedScenario]) -> Catalog:
    users = {
        name: scenario
        for scenario in scenarios
        if not scenario.is_shipped
        for name in (scenario.name, *scenario.aliases)
    }
    effective = [scenario for scenario in scenarios if not scenario.is_shipped or scenario.name not in users]
    notes = [
        f"{users[scenario.name].file} shadows the shipped scenario {scenario.name}"
        for scenario in scenarios
        if scenario.is_shipped and scenario.name in users
    ]
    return Catalog(scenarios=tuple(effective), notes=tuple(notes))


# Plan files. They declare which scenarios a command launches, and the decision rules for the results.

_SHIPPED = "plan.yaml"


@cache
def shipped_plan() -> PlanText:
    """Return nsa-harness's own plan file, which is used if a run has no other."""
    return PlanText(file=f"{PLANS}/{_SHIPPED}", text=(shipped_root() / PLANS / _SHIPPED).read_text(encoding="utf-8"))


def read_plan_text(path: Path, working_dir: Path) -> PlanText | None:
    """Return the text of a plan file, or None if it is no readable plan and must be read as a scenario."""
    reader = ScenarioReader(working_dir)
    text = reader.text(path) if path.is_file() else None
    if text is None or not is_plan(parse_yaml(text, reader.label(path)).root):
        return None
    return PlanText(file=reader.label(path), text=text)


def parse_plan(plan_text: PlanText, scenarios: Sequence[Selectable]) -> PlanFile:
    """Parse a plan file that applies to the existing `scenarios`. Raise ScenarioError, which lists all errors."""
    return _without_mistakes([read_plan(plan_text, scenarios)])[0]


def plans_with_tags(
    tags: Sequence[str], working_dir: Path, scenarios: Callable[[], Sequence[Selectable]]
) -> tuple[PlanText, ...]:
    """Return the plan files that have at least one of these tags. The user's files come first.

    `scenarios` returns all scenarios; it is called only if the user has plan files. Raise ScenarioError if a plan file
    is invalid.
    """
    users, shipped_dir = working_dir / "scenarios", shipped_root()
    has_user_plans = not (users.is_dir() and shipped_dir.is_dir() and users.samefile(shipped_dir))
    texts = _user_plans(users, working_dir) if has_user_plans else ()
    all_scenarios = scenarios() if texts else ()
    user_plans = _without_mistakes([read_plan(text, all_scenarios) for text in texts])
    plans = [*zip(texts, user_plans, strict=True), (shipped_plan(), read_plan(shipped_plan(), None).plan)]
    return tuple(text for text, plan in plans if {*plan.tags} & {*tags})


def _user_plans(root: Path, working_dir: Path) -> tuple[PlanText, ...]:
    reader = ScenarioReader(working_dir)
    files = [path for path in yaml_files(root / PLANS) if reader.check_inside(path, root)]
    read = [(path, reader.text(path)) for path in files]
    reader.raise_mistakes()
    return tuple(PlanText(file=reader.label(path), text=text) for path, text in read if text is not None)


def _without_mistakes(plans: Sequence[ReadPlan]) -> list[PlanFile]:
    mistakes = [str(mistake) for plan in plans for mistake in plan.mistakes]
    if mistakes:
        raise ScenarioError(mistakes)
    return [plan.plan for plan in plans]
