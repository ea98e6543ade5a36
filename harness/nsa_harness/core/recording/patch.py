"""Write the change of an experiment as a patch of the program's source code, for a person to read and adapt."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from difflib import unified_diff
from textwrap import dedent, indent

from nsa_harness.core.recording.explanation import Candidate, ExperimentKind, OriginKind
from nsa_harness.core.recording.source_statements import Statement, called_names, path_of, statement_at
from nsa_harness.core.report import Place
from nsa_harness.core.source_code.excerpt import parse_python

# How to read and to set the state of a generator.
_GENERATORS = {
    "torch": ("torch.get_rng_state()", "torch.set_rng_state({})"),
    "random": ("random.getstate()", "random.setstate({})"),
    "numpy": ("np.random.get_state()", "np.random.set_state({})"),
}
_IMPORTS_TORCH = re.compile(r"^import torch(?:\.distributed)?\s*(?:#.*)?$", re.MULTILINE)


def place_to_change(kind: ExperimentKind, place: Place, candidate: Candidate | None) -> Place:
    """Return the statement that a patch changes. For the effect of an extra call, it is the statement that calls."""
    is_call = kind is ExperimentKind.UNDO_LEAK and candidate is not None and candidate.caller is not None
    return candidate.caller if is_call and candidate and candidate.caller else place


def patch(
    kind: ExperimentKind, place: Place, name: str, candidate: Candidate | None, text: str, base: str = ""
) -> str | None:
    """Return the change of an experiment as a unified diff, or None if it cannot be written as one.

    `place` is the statement from `place_to_change`, `name` the variable or generator that the experiment changes, and
    `text` the source file of `place`. `base` is the directory to which the file name in the diff is relative.
    """
    statement = statement_at(place, {place.file or "": text})
    lines = text.splitlines(keepends=True)
    if statement is None or lines[statement.node.lineno - 1][: statement.node.col_offset].strip():
        return None  # unknown, or several statements in one line
    changed = _Writer(text, lines, statement).changed(kind, name, place, candidate)
    if changed is None:
        return None
    if "torch.distributed." in "".join(changed) and not _IMPORTS_TORCH.search(text):
        changed.insert(_first_import(text), "import torch.distributed\n")
    file = (place.file or "").removeprefix(base.rstrip("/") + "/") if base else place.file or ""
    return "".join(unified_diff(lines, changed, f"a/{file.lstrip('/')}", f"b/{file.lstrip('/')}"))


class _Writer:
    """A writer of the changed lines of one source file."""

    def __init__(self, text: str, lines: list[str], statement: Statement) -> None:
        self.text, self.lines, self.node, self.statement = text, lines, statement.node, statement
        self.first, self.last = statement.node.lineno - 1, statement.node.end_lineno or statement.node.lineno
        self.new = self._free_name("shared")

    def _free_name(self, name: str) -> str:
        """Return a name that the program does not use."""
        while re.search(rf"\b{name}\b", self.text):
            name += "_value"
        return name

    def changed(self, kind: ExperimentKind, name: str, place: Place, candidate: Candidate | None) -> list[str] | None:
        """Return the lines of the changed file, or None if the change cannot be written."""
        match kind:
            case ExperimentKind.SET_VALUE if path_of(name):
                return self._with_equal_value(name, candidate)
            case ExperimentKind.EQUAL_LENGTH if path_of(name):
                return self._around(self._combine(f"len({name})", f"{name} = {name}[: min({self.new})]"), name)
            case ExperimentKind.SHARE_GENERATOR:
                get, put = _GENERATORS.get(name, _GENERATORS["torch"])
                source = self._share(get, put.format(f"{self.new}[0]"))
                seeds = any("seed" in called for called in called_names(self.statement))
                return self._insert_after(source) if seeds else self._insert_before(source)
            case ExperimentKind.UNDO_LEAK if not isinstance(self.node, (*_COMPOUND, ast.Return, ast.Raise)):
                return self._without_effect(name, place, candidate)
            case ExperimentKind.FORCE_BRANCH if isinstance(self.node, ast.If):
                return self._with_equal_decision(self.node)
            case ExperimentKind.FIX_HASH_SEED if isinstance(self.node, ast.For):
                return self._replaced(self.node.iter, f"sorted({ast.get_source_segment(self.text, self.node.iter)})")
        return None

    def _share(self, get: str, put: str) -> str:
        """Return lines that give all ranks the value of rank 0."""
        return f"{self.new} = [{get}]\n{self._dist}.broadcast_object_list({self.new}, src=0)\n{put}"

    def _combine(self, get: str, put: str) -> str:
        """Return lines that compute a value from the values of all ranks."""
        sizes = f"{self.new} = [None] * {self._dist}.get_world_size()"
        return f"{sizes}\n{self._dist}.all_gather_object({self.new}, {get})\n{put}"

    def _with_equal_value(self, name: str, candidate: Candidate | None) -> list[str] | None:
        values = candidate.values if candidate else ()
        texts = [text for value in values if value.name == name for _, text in value.values]
        kind = candidate.kind if candidate else OriginKind.UNKNOWN
        source = self._share(name, f"{name} = {self.new}[0]")
        if kind is OriginKind.LENGTH:
            source = self._combine(name, f"{name} = min({self.new})")
        elif kind is OriginKind.MISSING_REDUCTION and texts and all(text in ("True", "False") for text in texts):
            source = self._combine(name, f"{name} = any({self.new})")
        elif kind is OriginKind.MISSING_REDUCTION and texts and all(map(_is_float, texts)):
            source = self._combine(name, f"{name} = sum({self.new}) / len({self.new})")
        return self._around(source, name)

    def _around(self, source: str, name: str) -> list[str] | None:
        """Return the file with lines after the statement if it assigns this name, and otherwise before it."""
        body = getattr(self.node, "body", None)
        if body and body[0].lineno == self.node.lineno:
            return None  # the value may be set or used by the body, in the same line
        if not self.statement.assigns(name):
            return self._insert_before(source)
        if body:
            return self._insert(body[0].lineno - 1, source, body[0].col_offset)
        return self._insert_after(source)

    def _without_effect(self, name: str, place: Place, candidate: Candidate | None) -> list[str] | None:
        get, kept = _name_at_caller(name, self.statement, place, candidate), self._free_name("kept")
        if name in _GENERATORS:
            get, put = _GENERATORS[name]
            put = put.format(kept)
        elif path_of(get):
            put = f"{get} = {kept}"
        else:
            return None
        after = self._insert_after(put)
        return [*after[: self.first], *self._block(f"{kept} = {get}"), *after[self.first :]]

    def _with_equal_decision(self, node: ast.If) -> list[str] | None:
        if self.lines[self.first].lstrip().startswith("elif"):
            return None
        test = " ".join((ast.get_source_segment(self.text, node.test) or "").split())
        source = self._share(f"bool({test})", "")
        replaced = self._replaced(node.test, f"{self.new}[0]")
        return [*replaced[: self.first], *self._block(source), *replaced[self.first :]]

    def _replaced(self, node: ast.expr, source: str) -> list[str]:
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        before = self.lines[first].encode()[: node.col_offset].decode()
        after = self.lines[last].encode()[node.end_col_offset :].decode()
        return [*self.lines[:first], before + source + after, *self.lines[last + 1 :]]

    def _insert_before(self, source: str) -> list[str] | None:
        if self.lines[self.first].lstrip().startswith(("elif", "@")) or isinstance(self.node, ast.While):
            return None  # before a loop, the change would be made only once
        return self._insert(self.first, source, self.node.col_offset)

    def _insert_after(self, source: str) -> list[str]:
        return self._insert(self.last, source, self.node.col_offset)

    def _insert(self, at: int, source: str, column: int) -> list[str]:
        before = self.lines[:at]
        if before and not before[-1].endswith("\n"):
            before[-1] += "\n"
        return [*before, *self._block(source, column), *self.lines[at:]]

    def _block(self, source: str, column: int | None = None) -> list[str]:
        space = " " * (self.node.col_offset if column is None else column)
        return [line + "\n" for line in indent(dedent(source).strip("\n"), space).splitlines()]

    @property
    def _dist(self) -> str:
        """The name under which the file knows torch.distributed."""
        names = dict(_imports(parse_python(self.text)))
        return next((alias for alias, name in names.items() if name == "torch.distributed"), "torch.distributed")


_COMPOUND = (
    ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.FunctionDef, ast.AsyncFunctionDef,
    ast.ClassDef,
)  # fmt: skip


def _name_at_caller(name: str, caller: Statement, place: Place, candidate: Candidate | None) -> str:
    """Return the name of the changed value in the statement that makes the extra call, or "" if it has none there."""
    if candidate is None:
        return name
    defined = candidate.chain[0][0] if candidate.chain else candidate.place
    if candidate.caller is None or candidate.caller == defined:
        return name
    root, _, rest = name.partition(".")
    if root == "self":
        receivers = set(_receivers(caller.node, (defined.function or "").rpartition(".")[2]))
        receiver = receivers.pop() if len(receivers) == 1 else ""
        return f"{receiver}.{rest}" if rest and path_of(receiver) else ""
    is_in_function = any(isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)) for parent in caller.parents)
    is_visible = defined.file == place.file and (bool(rest) or not is_in_function)
    return name if is_visible else ""


def _receivers(node: ast.stmt, method: str) -> Iterator[str]:
    """Yield the objects on which a statement calls this method."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and method in ("forward", "__call__"):
            yield ast.unparse(call.func)
        elif isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == method:
            yield ast.unparse(call.func.value)


def _first_import(text: str) -> int:
    """Return the index of the line before which an import may be added."""
    body = parse_python(text).body
    for statement in body:
        is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        is_future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        if not is_docstring and not is_future:
            return statement.lineno - 1
    return 0


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.asname, alias.name) for alias in node.names if alias.asname)
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            yield from ((alias.asname or alias.name, f"torch.{alias.name}") for alias in node.names)


def _is_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return not text.lstrip("-").isdigit()
