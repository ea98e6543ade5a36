"""Finds and reads scenario files: the user's ./scenarios first, then those that ship with the harness."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from nsa_harness.core.comparison.plan_file import PlanFile, PlanText, ReadPlan, is_plan, read_plan
from nsa_harness.core.scenario.checks import checked_scenario, file_mistakes
from nsa_harness.core.scenario.overrides import matrix_mistakes, variants
from nsa_harness.core.scenario.selection import Named
from nsa_harness.core.scenario.yaml_tree import (
    Mistake,
    Node,
    Origin,
    Parsed,
    from_plain,
    in_order,
    merge,
    parse_yaml,
    plain,
    shown,
    visible,
    without,
)
from nsa_harness.errors import ScenarioError, did_you_mean
from nsa_harness.subject.program import PROGRAM

SIZE_LIMIT_BYTES = 1_000_000
PARENT_LIMIT = 8
_SUFFIXES = (".yaml", ".yml")
CHECKLISTS = (".readiness.yaml", ".readiness.yml")  # checklists of `ready`, which are no scenarios
_PARENTS = "base"  # files in a directory of this name are parents, not scenarios
PLANS = "plans"  # the directory of plan files
_NOT_INHERITED = ("name", "aliases", "extends", "schema")
_PACKAGE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Declared:
    """One scenario file with its parents merged in, and its matrix not yet expanded."""

    name: str
    file: str  # the path that messages show
    tree: Node
    shipped: bool

    @property
    def aliases(self) -> tuple[str, ...]:
        assert isinstance(self.tree.content, dict)
        value = plain(self.tree.content["aliases"]) if "aliases" in self.tree.content else []
        return tuple(str(item) for item in value) if isinstance(value, list) else ()


@dataclass(frozen=True, kw_only=True)
class Catalog:
    declared: tuple[Declared, ...]
    notes: tuple[str, ...]  # which of the user's scenarios replace shipped ones, and which files could not be read


def shipped_root() -> Path:
    """Return the shipped scenarios: in a wheel they are inside the package, in a checkout next to it."""
    inside = _PACKAGE / "_scenarios"
    return inside if inside.is_dir() else _PACKAGE.parents[1] / "scenarios"


def load_catalog(working_dir: Path, shipped: Path, words: Collection[str] = ()) -> Catalog:
    """Return the user's and the shipped scenarios. Raises ScenarioError with all mistakes of all files.

    `words` are the names of the only scenarios that the caller needs. If these have no mistake, mistakes in other files
    become notes. If each name is a scenario of the user's or the name of a shipped file, other shipped files are not
    read: reading a hundred of them takes longer than a rank takes to start.
    """
    users = working_dir / "scenarios"
    reader, found = ScenarioReader(working_dir), []
    if users.is_dir() and not (shipped.is_dir() and users.samefile(shipped)):
        found = _read_root(reader, users, [users, shipped], shipped=False)
    theirs = {word for declared in found for word in (declared.name, *declared.aliases)}
    wanted = {word for word in words if word not in theirs}
    enough = bool(words) and wanted <= {path.stem for path in yaml_files(shipped)}
    found += _read_root(reader, shipped, [shipped], shipped=True, only=wanted if enough else None)
    known = {word for declared in found for word in (declared.name, *declared.aliases)}
    requested = [declared for declared in found if not words or {declared.name, *declared.aliases} & set(words)]
    clashes = list(_name_clashes(requested))
    reader.mistakes.extend(clashes)
    if clashes or not words or not known.issuperset(words):
        reader.raise_mistakes()
    catalog = _catalog_with_shadowing(found)
    # Mistakes in files that were not requested become notes, and the requested scenarios run.
    return replace(catalog, notes=(*catalog.notes, *(f"not read: {mistake}" for mistake in reader.messages())))


def load_file(path: Path, working_dir: Path, shipped: Path) -> Declared:
    """Read one scenario file named on the command line. Raises ScenarioError."""
    reader, users = ScenarioReader(working_dir), working_dir / "scenarios"
    if path.is_relative_to(users):
        reader.check_inside(path, users)
        reader.raise_mistakes()
    declared = reader.declared(path, (path.parent, users, shipped), shipped=False)
    reader.raise_mistakes()
    assert declared is not None
    return declared


def read_tree(path: Path, working_dir: Path) -> Parsed:
    """Return the tree of a YAML file that is no scenario, with the mistakes of its syntax."""
    reader = ScenarioReader(working_dir)
    text = reader.text(path)
    return Parsed(root=None, mistakes=tuple(reader.mistakes)) if text is None else parse_yaml(text, reader.label(path))


def _read_root(
    reader: ScenarioReader, root: Path, parents: list[Path], *, shipped: bool, only: Collection[str] | None = None
) -> list[Declared]:
    found = []
    for path in yaml_files(root):
        if only is not None and path.stem not in only:
            continue
        if not reader.check_inside(path, root):
            continue
        if _PARENTS in path.relative_to(root).parts[:-1]:
            reader.tree(path)  # also parents that no scenario extends
        elif declared := reader.declared(path, tuple(parents), shipped=shipped):
            found.append(declared)
    return found


def yaml_files(root: Path) -> Iterator[Path]:
    """Yield the YAML files below `root`, except plans."""
    for folder, folders, files in os.walk(root):
        # A directory named like a scenario is a mistake: it is yielded, and reading it reports the mistake.
        slips = [name for name in folders if name.endswith(_SUFFIXES)]
        others = (*slips, PLANS) if Path(folder) == root else slips
        folders[:] = sorted(name for name in folders if name not in others and not name.startswith("."))
        found = (name for name in sorted([*files, *slips]) if name.endswith(_SUFFIXES))
        yield from (Path(folder, name) for name in found if not name.endswith(CHECKLISTS))


class ScenarioReader:
    """Reads each file once and collects all mistakes."""

    def __init__(self, working_dir: Path) -> None:
        self.working_dir = working_dir
        self.mistakes: list[Mistake] = []
        self._trees: dict[Path, Node | None] = {}

    def raise_mistakes(self) -> None:
        if self.mistakes:
            raise ScenarioError(self.messages())

    def messages(self) -> tuple[str, ...]:
        """Return the mistakes by file, each once: every child of a parent reports the parent's mistakes."""
        files = dict.fromkeys(mistake.origin.source for mistake in self.mistakes)
        by_file = ([mistake for mistake in self.mistakes if mistake.origin.source == file] for file in files)
        return tuple(dict.fromkeys(str(mistake) for mistakes in by_file for mistake in in_order(mistakes)))

    def check_inside(self, path: Path, root: Path) -> bool:
        """Check that a file is below `root`: a mistake quotes the file's text, and a link may lead to any file."""
        inside = not path.exists() or path.resolve().is_relative_to(root.resolve())
        if not inside:
            what = f"is a link that leads out of {self.label(root)}, so it is not read; put a copy there"
            self.mistakes.append(Mistake(origin=Origin(source=self.label(path), line=1, column=1), key="", what=what))
        return inside

    def declared(self, path: Path, roots: tuple[Path, ...], *, shipped: bool) -> Declared | None:
        before = len(self.mistakes)
        tree = self._with_parents(path, roots, ())
        if tree is None or len(self.mistakes) > before:
            return None
        name = plain(tree).get("name") or path.stem  # type: ignore[union-attr]
        named = merge(tree, from_plain({"name": str(name)}, Origin(source=self.label(path), line=1, column=1)))
        for variant in variants(without(named, ("extends",))):
            self.mistakes.extend(checked_scenario(variant.tree, PROGRAM).mistakes)
        return Declared(name=str(name), file=self.label(path), tree=named, shipped=shipped)

    def _with_parents(self, path: Path, roots: tuple[Path, ...], children: tuple[Path, ...]) -> Node | None:
        tree = self.tree(path)
        if tree is None or not isinstance(tree.content, dict):
            return None
        if "extends" not in tree.content:
            return tree
        parent = self._parent_path(tree.content["extends"], roots)
        if parent is None:
            return None
        if self._circular(tree.content["extends"], parent, (*children, path)):
            return None
        under = self._with_parents(parent, roots, (*children, path))
        return None if under is None else merge(without(under, _NOT_INHERITED), tree)

    def _parent_path(self, extends: Node, roots: tuple[Path, ...]) -> Path | None:
        name = str(extends.content)
        candidates = [(root, root / f"{name}{suffix}") for root in roots for suffix in _SUFFIXES]
        inside = not name.startswith("/") and ".." not in Path(name).parts and "\0" not in name
        root, found = next(((root, path) for root, path in candidates if inside and path.exists()), (None, None))
        if root is not None and found is not None and not self.check_inside(found, root):
            return None
        if found is None:
            known = sorted({str(p.relative_to(r).with_suffix("")) for r in roots for p in yaml_files(r)})
            bases = [known_name for known_name in known if _PARENTS in Path(known_name).parts[:-1]]
            hint = did_you_mean(name, known) or (f"; known parents: {', '.join(bases)}" if bases else "")
            self.mistakes.append(Mistake(origin=extends.origin, key="extends", what=f"no file {shown(name)}{hint}"))
        return found

    def _circular(self, extends: Node, parent: Path, children: tuple[Path, ...]) -> bool:
        what = ""
        if parent.resolve() in [child.resolve() for child in children]:
            chain = " -> ".join(self.label(path) for path in (*children, parent))
            what = f"goes in a circle: {chain}; take one `extends` out"
        elif len(children) > PARENT_LIMIT:
            what = f"more than {PARENT_LIMIT} parents above each other; merge some"
        if what:
            self.mistakes.append(Mistake(origin=extends.origin, key="extends", what=what))
        return bool(what)

    def tree(self, path: Path) -> Node | None:
        """Return the file's own tree, or None, and note its mistakes."""
        if path not in self._trees:
            self._trees[path] = self._read(path)
        return self._trees[path]

    def _read(self, path: Path) -> Node | None:
        text = self.text(path)
        if text is None:
            return None
        parsed = parse_yaml(text, self.label(path))
        wrong = list(parsed.mistakes)
        if parsed.root is not None:
            wrong += in_order((*file_mistakes(parsed.root), *matrix_mistakes(parsed.root)))
        self.mistakes.extend(wrong)
        return parsed.root  # its mistakes are noted; its parent may have more

    def text(self, path: Path) -> str | None:
        """Return the file's text, or None if it is unreadable, which is noted."""
        try:
            content = _content(path)
            # Some editors write a byte order mark, which is not part of the text.
            return content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            column = error.start - (content.rfind(b"\n", 0, error.start) + 1) + 1
            what = f"is not UTF-8 (byte 0x{content[error.start]:02x}); save it as UTF-8"
        except OSError as error:
            line, column, what = 1, 1, f"cannot be read: {error.strerror}"
        except ValueError as error:
            line, column, what = 1, 1, str(error)
        origin = Origin(source=self.label(path), line=line, column=column)
        self.mistakes.append(Mistake(origin=origin, key="", what=what))
        return None

    def label(self, path: Path) -> str:
        """Return the path relative to the working directory, or absolute outside of it."""
        absolute = Path(os.path.abspath(path))
        inside = absolute.is_relative_to(self.working_dir)
        return visible(str(absolute.relative_to(self.working_dir) if inside else absolute))


def _content(path: Path) -> bytes:
    """Return the bytes of a regular file. Raises OSError, or ValueError if it cannot be a scenario file."""
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise ValueError("is a directory; a scenario is a file")
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("is not a regular file")
    if status.st_size > SIZE_LIMIT_BYTES:
        raise ValueError(f"has {status.st_size} bytes; a scenario file has at most {SIZE_LIMIT_BYTES}")
    with path.open("rb") as file:
        return file.read(SIZE_LIMIT_BYTES)


def _name_clashes(found: list[Declared]) -> Iterator[Mistake]:
    """Yield a mistake for each name that two shipped files, or two files of the user, have in common."""
    claims: dict[tuple[bool, str], Declared] = {}
    for declared in found:
        for word in (declared.name, *declared.aliases):
            first = claims.setdefault((declared.shipped, word), declared)
            if first is not declared:
                what = f"{shown(word)} is already the name or an alias of {first.file}; rename one"
                key = "name" if word == declared.name else "aliases"
                yield Mistake(origin=Origin(source=declared.file, line=1, column=1), key=key, what=what)


def _catalog_with_shadowing(found: list[Declared]) -> Catalog:
    users = {
        word: declared for declared in found if not declared.shipped for word in (declared.name, *declared.aliases)
    }
    kept = [declared for declared in found if not declared.shipped or declared.name not in users]
    notes = [
        f"{users[declared.name].file} shadows the shipped scenario {declared.name}"
        for declared in found
        if declared.shipped and declared.name in users
    ]
    return Catalog(declared=tuple(kept), notes=tuple(notes))


# Plan files: which launches a command makes, and what was agreed to do about the answers.

_SHIPPED = "plan.yaml"


@cache
def shipped_plan() -> PlanText:
    """Return the plan that applies to runs without a plan file."""
    return PlanText(file=f"{PLANS}/{_SHIPPED}", text=(shipped_root() / PLANS / _SHIPPED).read_text(encoding="utf-8"))


def plan_file(path: Path, working_dir: Path) -> PlanText | None:
    """Return a plan file's text, or None if it is no plan: then the scenario reader reports its mistakes."""
    reader = ScenarioReader(working_dir)
    text = reader.text(path) if path.is_file() else None
    if text is None or not is_plan(parse_yaml(text, reader.label(path)).root):
        return None
    return PlanText(file=reader.label(path), text=text)


def checked_plan(stored: PlanText, scenarios: Sequence[Named]) -> PlanFile:
    """Return a stored plan, parsed. Raises ScenarioError with all its mistakes."""
    return _without_mistakes([read_plan(stored, scenarios)])[0]


def plans_of_tags(
    tags: Sequence[str], working_dir: Path, scenarios: Callable[[], Sequence[Named]]
) -> tuple[PlanText, ...]:
    """Return the plans with one of these tags, the user's first. Raises ScenarioError."""
    users, shipped = working_dir / "scenarios", shipped_root()
    own = not (users.is_dir() and shipped.is_dir() and users.samefile(shipped))
    texts = _texts(users, working_dir) if own else ()
    every = scenarios() if texts else ()
    theirs = _without_mistakes([read_plan(text, every) for text in texts])
    known = [*zip(texts, theirs, strict=True), (shipped_plan(), read_plan(shipped_plan(), None).plan)]
    return tuple(text for text, plan in known if {*plan.tags} & {*tags})


def _texts(root: Path, working_dir: Path) -> tuple[PlanText, ...]:
    reader = ScenarioReader(working_dir)
    files = [path for path in yaml_files(root / PLANS) if reader.check_inside(path, root)]
    read = [(path, reader.text(path)) for path in files]
    reader.raise_mistakes()
    return tuple(PlanText(file=reader.label(path), text=text) for path, text in read if text is not None)


def _without_mistakes(read: Sequence[ReadPlan]) -> list[PlanFile]:
    mistakes = [str(mistake) for plan in read for mistake in plan.mistakes]
    if mistakes:
        raise ScenarioError(mistakes)
    return [plan.plan for plan in read]
