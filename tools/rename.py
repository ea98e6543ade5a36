"""Moves modules and rewrites every place that names them: imports, dotted names in strings, paths, documents.

    python tools/rename.py MAPPING             move with git, rewrite, and print what only a person can decide
    python tools/rename.py MAPPING --dry-run   only print

MAPPING is a text file with one line for each move; `#` begins a comment:

    harness.run_judge -> harness.commands.judge      a module, or a package with all that is in it
    tests/core/test_a.py -> tests/core/test_b.py     a file that nothing imports
    import harness -> nsa_harness                    the name to import a folder by; the folder stays where it is
    statements nsa -> nsa_attention                the same, in import statements alone: not where the name is a text
    alias _nsa_harness -> harness                    one more name that the folder is imported by
    relative nsa                                     imports within the folder become relative ones

Modules of a mapping are written as folders with dots, whatever they are imported by. A second run with the same
mapping moves nothing, and rewrites what came in since, for instance with a merge. Afterwards run
`ruff check --select I --fix .`, `ruff format .` and `python tools/mutating.py --fix`. A function moves by hand.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

# What was written by a run, or long ago, keeps the names it was written with. Python files are no records.
RECORDS = (
    "CHANGELOG.md", "benchmarks/results/", "evaluation/programs/", "evaluation/results/", "evaluation/rounds/",
    "reports/", "tests/evidence/", "tests/frozen/", "tests/golden/",
)  # fmt: skip
NOT_A_MODULE = {"py", "pyc", "yaml", "yml", "json", "jsonl", "toml", "log", "txt", "md", "html"}


class BadMapping(Exception):
    """The mapping cannot be read, or cannot be done in one step."""


@dataclass(kw_only=True)
class Moves:
    """What the mapping file says."""

    modules: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    imports: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    statements_only: set[str] = field(default_factory=set)
    relative: set[str] = field(default_factory=set)


def read_moves(text: str) -> Moves:
    moves = Moves()
    for number, line in enumerate(text.splitlines(), 1):
        said = line.partition("#")[0].strip()
        word, _, rest = said.partition(" ")
        old, arrow, new = (part.strip() for part in said.partition("->"))
        if ":" in said:
            raise BadMapping(f"line {number}: {said!r} is no module, and what a module defines is moved by hand")
        if word == "relative":
            moves.relative.add(rest.strip())
        elif said and not (old and arrow and new):
            raise BadMapping(f"line {number}: expected OLD -> NEW, got {said!r}")
        elif word in ("import", "statements"):
            moves.imports[old.split()[1]] = new
            moves.statements_only |= {old.split()[1]} if word == "statements" else set()
        elif word == "alias":
            moves.aliases[old.split()[1]] = new
        elif said:
            (moves.files if "/" in old else moves.modules)[old] = new
    return moves


class Tree:
    """The files that git knows, as modules and packages; where they go; and how a name is spelled afterwards.

    A dotted name here is a folder with dots, never an import name.
    """

    def __init__(self, root: Path, moves: Moves) -> None:
        self.root, self.moves = root, moves
        listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout
        self.files = [one for one in listed.splitlines() if (root / one).is_file() and not (root / one).is_symlink()]
        self.known = set(self.files) | {str(parent) for one in self.files for parent in PurePosixPath(one).parents}
        self.new = set(moves.modules.values())
        self.roots = {name.split(".")[0] for name in [*moves.modules, *self.new, *moves.imports, *moves.relative]}
        # By import name, the longest first: the folder it means.
        names = {one: one for one in self.roots} | moves.aliases | {new: old for old, new in moves.imports.items()}
        self.names = dict(sorted(names.items(), key=lambda one: -len(one[0])))
        if chained := [one for one in self.new & set(moves.modules) if self.is_file(one)]:
            raise BadMapping(f"another module takes the place of {', '.join(sorted(chained))}: do it in two steps")

    def is_file(self, dotted: str) -> bool:
        return f"{_path(dotted)}.py" in self.known

    def is_module(self, dotted: str) -> bool:
        return self.is_file(dotted) or _path(dotted) in self.known

    def moves_alone(self, old: str) -> bool:
        """A package takes along what lies in it; a module leaves a package of its own name where it is."""
        return self.is_file(old) or self.is_file(self.moves.modules[old])

    def target(self, dotted: str) -> str:
        """Where a name leads: the longest part of it that moves, and the rest as it is."""
        for start, rest in _splits(dotted, "."):
            # Where the old module is gone, its name may be that of a package: harness.cli -> harness.cli.main.
            if start in self.new and not self.is_file(start.rpartition(".")[0]):
                return dotted
            if start in self.moves.modules:
                return ".".join([self.moves.modules[start], *rest])
        return dotted

    def leads_to_module(self, dotted: str) -> bool:
        """Whether the name is that of a module, before or after the moves, and not of something within one."""
        outer = dotted.rpartition(".")[0]
        if outer in self.moves.modules and self.moves_alone(outer):
            return self.is_module(dotted)
        return self.is_module(dotted) or dotted in self.moves.modules or self.is_module(self.target(dotted))

    def file_target(self, file: str) -> str:
        """Where a file goes: a module by its name, any other file with its package."""
        path = PurePosixPath(file)
        if file in self.moves.files or path.parts[0] not in self.roots:
            return self.moves.files.get(file, file)
        if path.suffix == ".py" and path.name != "__init__.py":
            return f"{_path(self.target(_dotted(file.removesuffix('.py'))))}.py"
        return str(PurePosixPath(self.folder_target(str(path.parent))) / path.name)

    def folder_target(self, folder: str) -> str:
        for start, rest in _splits(folder, "/"):
            if _dotted(start) in self.moves.modules and not self.moves_alone(_dotted(start)):
                return "/".join([_path(self.moves.modules[_dotted(start)]), *rest])
        return folder

    def folder_of(self, name: str) -> tuple[str, str] | None:
        """The import name that a name begins with, and the whole as a folder; None for what is not ours."""
        for known, folder in self.names.items():
            if name == known or name.startswith(f"{known}."):
                return known, folder + name[len(known) :]
        return None

    def spelled(self, dotted: str, known: str, *, text: bool = False) -> str:
        """What a folder is imported by, where it was imported by `known`."""
        renamed = {
            old: new for old, new in self.moves.imports.items() if not (text and old in self.moves.statements_only)
        }
        folder = self.names[known]
        if dotted == folder or dotted.startswith(f"{folder}."):
            return renamed.get(known, known) + dotted[len(folder) :]
        top, dot, rest = dotted.partition(".")
        return renamed.get(top, top) + dot + rest


def _splits(name: str, sign: str) -> Iterator[tuple[str, list[str]]]:
    """The name cut in two at each sign, the longest beginning first."""
    parts = name.split(sign)
    yield from ((sign.join(parts[:count]), parts[count:]) for count in range(len(parts), 0, -1))


def _last(dotted: str) -> str:
    return dotted.rpartition(".")[2]


def _path(dotted: str) -> str:
    return dotted.replace(".", "/")


def _dotted(path: str) -> str:
    return path.replace("/", ".")


@dataclass(frozen=True, kw_only=True)
class Edit:
    start: int
    end: int
    new: str


class Text:
    """One file as text: dotted names and paths are rewritten wherever they stand, unless an edit covers the place."""

    def __init__(self, tree: Tree, file: str, text: str) -> None:
        self.tree, self.file, self.text = tree, file, text
        self.undecided: list[str] = []

    def rewritten(self) -> str:
        names = "|".join(re.escape(name) for name in self.tree.names)
        roots = "|".join(re.escape(root) for root in sorted(self.tree.roots))
        dotted = rf"(?<![\w./-])(?:{names})(?:\.\w+)+"
        edits = self.edits()
        for pattern, new in (
            (rf"from ({dotted}) import (\w+)(?! as)(?!\w)", self._inner_import),
            (dotted, self._dotted_name),
            (rf"(?<![\w-])(?:{roots})/[\w./-]*[\w/]", self._module_path),
            (r"(?<![\w/-])[\w-]+(?:/[\w.-]+)+", lambda match: self.tree.moves.files.get(match.group(), match.group())),
        ):
            for match in re.finditer(pattern, self.text):
                if all(match.end() <= edit.start or edit.end <= match.start() for edit in edits):
                    said = new(match)
                    # A longer form that changes nothing leaves its parts to the shorter ones.
                    edits += [Edit(start=match.start(), end=match.end(), new=said)] if said != match.group() else []
        text = self.text
        for edit in sorted(edits, key=lambda one: one.start, reverse=True):
            text = text[: edit.start] + edit.new + text[edit.end :]
        return text

    def edits(self) -> list[Edit]:
        if self.file.endswith(".md"):
            self._stems_in_prose()
        return []

    def _inner_import(self, match: re.Match[str]) -> str:
        """An import in a string, or in a document, of a module out of its package."""
        found = self.tree.folder_of(match[1])
        assert found is not None
        known, base = found
        if not self.tree.leads_to_module(f"{base}.{match[2]}"):
            return match.group()
        package, _, name = self.tree.target(f"{base}.{match[2]}").rpartition(".")
        bound = name if name == match[2] else f"{name} as {match[2]}"
        return f"from {self.tree.spelled(package, known, text=True)} import {bound}"

    def _dotted_name(self, match: re.Match[str]) -> str:
        found = self.tree.folder_of(match.group())
        assert found is not None
        known, dotted = found
        inner = dotted[len(self.tree.names[known]) + 1 :].split(".")[0]
        first = f"{self.tree.names[known]}.{inner}"
        if self.tree.leads_to_module(first) or inner.startswith("__"):
            return self.tree.spelled(self.tree.target(dotted), known, text=True)
        if inner not in NOT_A_MODULE and known in set(self.tree.moves.imports) - self.tree.moves.statements_only:
            self.say(self._line(match.start()), f"{match.group()}: an import name?")
        return match.group()

    def _module_path(self, match: re.Match[str]) -> str:
        said = match.group().rstrip("./")
        before = re.search(r"[\w./-]*$", self.text[: match.start()])
        assert before is not None
        # tests/nsa/ is no place in nsa/.
        outer = [part for part in before.group().split("/") if part]
        if any("/".join([*outer[index:], said]) in self.tree.known for index in range(len(outer))):
            return match.group()
        alone = _dotted(said) in self.tree.moves.modules and said not in self.tree.known
        new = _path(self.tree.target(_dotted(said))) if alone else self._path_target(said)
        return new + match.group()[len(said) :]

    def _path_target(self, path: str) -> str:
        return self.tree.file_target(path) if "." in path.rpartition("/")[2] else self.tree.folder_target(path)

    def _stems_in_prose(self) -> None:
        changed = [(_last(old), _last(new)) for old, new in self.tree.moves.modules.items()]
        for old, new in changed:
            for match in re.finditer(rf"`{re.escape(old)}`", self.text) if old != new else ():
                self.say(self._line(match.start()), f"`{old}`: the module, which is `{new}` from now on?")

    def _line(self, place: int) -> int:
        return self.text.count("\n", 0, place) + 1

    def say(self, line: int, what: str) -> None:
        self.undecided.append(f"{self.file}:{line}: {what}")


class Source(Text):
    """One Python file: imports are rewritten by what they mean."""

    def __init__(self, tree: Tree, file: str, text: str) -> None:
        super().__init__(tree, file, text)
        self.parsed = ast.parse(text, filename=file)
        self.names = [node for node in ast.walk(self.parsed) if isinstance(node, ast.Name)]
        self.bound = list(_bound_names(self.parsed))
        self.package = _dotted(str(PurePosixPath(file).parent))
        self.new_package = _dotted(str(PurePosixPath(tree.file_target(file)).parent))
        self._lines = text.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def edits(self) -> list[Edit]:
        self._paths_by_hand()
        edits: list[Edit] = []
        for node in ast.walk(self.parsed):
            if isinstance(node, ast.ImportFrom):
                edits += self._from_import(node)
            elif isinstance(node, ast.Import):
                edits += self._bare_import(node)
        return edits

    def _bare_import(self, node: ast.Import) -> list[Edit]:
        """`import harness`; what has dots is rewritten as text."""
        edits: list[Edit] = []
        for alias in node.names:
            new = self.tree.moves.imports.get(alias.name)
            if new is None:
                continue
            uses = None if alias.asname or len(node.names) > 1 else self._renamed_uses(alias.name, new)
            if uses is None:
                self.say(node.lineno, f"{ast.unparse(node)}: to be rewritten by hand")
            else:
                start, end = self._span(node)
                edits += [Edit(start=start, end=end, new=f"import {new}"), *uses]
        return edits

    def _from_import(self, node: ast.ImportFrom) -> list[Edit]:
        """The whole statement is an edit, changed or not: nothing else may look for names in it."""
        found = self._base(node)
        if found is None:
            return []
        known, base = found
        start, end = self._span(node)
        said, uses = self.text[start:end], []
        by_package: dict[str, list[str]] = {}
        for alias in node.names:
            package, name = self._place(node, base, alias.name, known)
            bound = alias.asname or name
            if bound != (alias.asname or alias.name):
                renamed = self._renamed_uses(alias.name, name)
                uses += renamed or []
                bound = alias.name if renamed is None else name
            by_package.setdefault(package, []).append(name if bound == name else f"{name} as {bound}")
        written = [alias.name if not alias.asname else f"{alias.name} as {alias.asname}" for alias in node.names]
        if list(by_package.values()) == [written]:
            new = re.sub(r"^from\s+[\w.]+", f"from {next(iter(by_package))}", said)
            return [Edit(start=start, end=end, new=new)]
        if "#" in said:
            self.say(node.lineno, "a comment within this import is gone")
        remark = re.match(r"[ \t]*(#[^\n]*)?", self.text[end:])
        between = f"{remark.group() if remark else ''}\n{' ' * node.col_offset}"
        lines = [f"from {package} import {', '.join(names)}" for package, names in by_package.items()]
        return [Edit(start=start, end=end, new=between.join(lines)), *uses]

    def _base(self, node: ast.ImportFrom) -> tuple[str, str] | None:
        """The import name and the folder that the statement imports from, if it is one of ours."""
        if not node.level:
            return self.tree.folder_of(node.module or "")
        parts = self.package.split(".")
        outer = parts[: len(parts) - node.level + 1]
        if not outer or outer[0] not in self.tree.roots:
            return None
        return outer[0], ".".join([*outer, *([node.module] if node.module else [])])

    def _place(self, node: ast.ImportFrom, base: str, name: str, known: str) -> tuple[str, str]:
        """What stands behind `from` and behind `import`, for one name."""
        package = self.tree.target(base)
        if self.tree.leads_to_module(f"{base}.{name}"):
            package, _, name = self.tree.target(f"{base}.{name}").rpartition(".")
        top = self.new_package.split(".")[0]
        if package.split(".")[0] == top and (node.level or top in self.tree.moves.relative):
            return _relative(package, self.new_package), name
        return self.tree.spelled(package, known), name

    def _renamed_uses(self, old: str, new: str) -> list[Edit] | None:
        """The uses of a name that an import binds; None where one may mean another thing, or `new` does already."""
        if self.bound.count(old) > 1 or new in self.bound or new in {node.id for node in self.names}:
            return None
        spans = [self._span(node) for node in self.names if node.id == old]
        # Before Python 3.12 the positions within an f-string are not those of the file.
        if any(self.text[start:end] != old for start, end in spans):
            return None
        return [Edit(start=start, end=end, new=new) for start, end in spans]

    def _paths_by_hand(self) -> None:
        """What finds a file by where this one lies, or puts a path together, and so has no name to be rewritten."""
        moves = self.tree.moves
        parts = {f"{_last(old)}.py" if self.tree.moves_alone(old) else _last(old) for old in moves.modules}
        for node in ast.walk(self.parsed):
            if isinstance(node, ast.Name) and node.id == "__file__":
                if self.package.count(".") != self.new_package.count("."):
                    self.say(node.lineno, "__file__, in a file that moves to another depth")
            elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and isinstance(node.right, ast.Constant):
                if node.right.value in parts:
                    self.say(node.lineno, f"/ {node.right.value!r}: a part of a path?")
            elif isinstance(node, (ast.Call, ast.Compare, ast.Set, ast.Tuple)):
                for said in [one.value for one in ast.iter_child_nodes(node) if isinstance(one, ast.Constant)]:
                    if said in set(moves.imports) - moves.statements_only:
                        self.say(node.lineno, f"{said!r}: the import name, or the folder?")

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._place_of(node.lineno, node.col_offset), self._place_of(node.end_lineno, node.end_col_offset)

    def _place_of(self, line: int, column_bytes: int) -> int:
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column_bytes].decode())


def _relative(package: str, here: str) -> str:
    ours, theirs = here.split("."), package.split(".")
    shared = 0
    while shared < min(len(ours), len(theirs)) and ours[shared] == theirs[shared]:
        shared += 1
    return "." * (len(ours) - shared + 1) + ".".join(theirs[shared:])


def _bound_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            yield node.id


def rename(root: Path, moves: Moves, *, dry: bool = False) -> list[str]:
    """Rewrites, moves, and returns what is left to a person, one line each. Nothing is touched where it raises."""
    tree = Tree(root, moves)
    targets = {file: tree.file_target(file) for file in tree.files}
    _refuse_collisions(targets)
    undecided = [f"{old}: no such module" for old, new in moves.modules.items() if not _exists(tree, old, new)]
    for file in tree.files:
        if file.startswith(RECORDS) and not file.endswith(".py"):
            continue
        try:
            text = (root / file).read_text(encoding="utf-8")
            one = Source(tree, file, text) if file.endswith(".py") else Text(tree, file, text)
        except (UnicodeDecodeError, SyntaxError):
            continue
        new = one.rewritten()
        undecided += one.undecided
        if new != text and not dry:
            (root / file).write_text(new, encoding="utf-8")
    if not dry:
        undecided += _move(root, {old: new for old, new in targets.items() if old != new}, tree)
    return undecided


def _exists(tree: Tree, old: str, new: str) -> bool:
    return tree.is_module(old) or tree.is_module(new)


def _refuse_collisions(targets: dict[str, str]) -> None:
    taken: dict[str, str] = {}
    for old, new in targets.items():
        if new in taken:
            raise BadMapping(f"{taken[new]} and {old} would both be {new}")
        taken[new] = old


def _move(root: Path, targets: dict[str, str], tree: Tree) -> list[str]:
    for old, new in targets.items():
        (root / new).parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "mv", old, new], cwd=root, check=True)
    said = []
    modules = [
        PurePosixPath(new) for new in targets.values() if new.endswith(".py") and new.split("/")[0] in tree.roots
    ]
    for folder in sorted({str(parent) for module in modules for parent in module.parents if parent.parts}):
        if not (init := root / folder / "__init__.py").exists():
            init.touch()
            subprocess.run(["git", "add", init], cwd=root, check=True)
            said.append(f"{folder}/__init__.py: new, and says nothing yet")
    for folder in sorted({str(PurePosixPath(old).parent) for old in targets}):
        if {path.name for path in (root / folder).glob("*")} - {"__pycache__"} == {"__init__.py"}:
            said.append(f"{folder}/__init__.py: alone in its package")
    return said


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Move modules and rewrite every place that names them.")
    parser.add_argument("mapping", type=Path)
    parser.add_argument("--dry-run", action="store_true", help="change nothing, print what only a person can decide")
    options = parser.parse_args(arguments)
    root = Path(subprocess.check_output(["git", "rev-parse", "--show-toplevel"], text=True).strip())
    try:
        undecided = rename(root, read_moves(options.mapping.read_text()), dry=options.dry_run)
    except BadMapping as problem:
        print(f"{options.mapping}: {problem}", file=sys.stderr)
        return 2
    print("\n".join(undecided))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
