"""Write the change of an experiment as a patch of the program's source code, for a person to read and adapt."""

from __future__ import annotations

import ast
import re
from ast import walk
from collections.abc import Iterator
from difflib import unified_diff
from textwrap import dedent, indent

from nsa_harness.core.recording.explanation import ExperimentKind
from nsa_harness.core.report import Place

_SHARE_VALUE = """
shared = [{name}]
torch.distributed.broadcast_object_list(shared, src=0)
{name} = shared[0]
"""
_SHARE_TORCH = """
state = [torch.get_rng_state()]
torch.distributed.broadcast_object_list(state, src=0)
torch.set_rng_state(state[0])
"""
_SHARE_RANDOM = """
state = [random.getstate()]
torch.distributed.broadcast_object_list(state, src=0)
random.setstate(state[0])
"""
_SHARE_NUMPY = """
state = [np.random.get_state()]
torch.distributed.broadcast_object_list(state, src=0)
np.random.set_state(state[0])
"""
_SHARE_TEST = """
taken = [bool({test})]
torch.distributed.broadcast_object_list(taken, src=0)
"""
_KEEP = """
kept = [(changed, dict(vars(changed))) for changed in [{objects}] if hasattr(changed, "__dict__")]
"""
_RESTORE = """
for changed, state in kept:
    vars(changed).update(state)
"""
_GENERATORS = {"torch": _SHARE_TORCH, "random": _SHARE_RANDOM, "numpy": _SHARE_NUMPY}
_IMPORTS_TORCH = re.compile(r"^\s*import torch(?:\.\w+)*\s*(?:#.*)?$", re.MULTILINE)


def patch(kind: ExperimentKind, place: Place, name: str, text: str, base: str = "") -> str | None:
    """Return the change of an experiment as a unified diff, or None if it cannot be written as one.

    `name`: the variable or generator that the experiment sets. `text`: the source file of `place`. `base`: the
    directory to which the file name in the diff is relative.
    """
    try:
        statement = _statement_at(ast.parse(text), place.line or 0)
    except (SyntaxError, ValueError):
        return None
    lines = text.splitlines(keepends=True)
    changed = None if statement is None else _changed(kind, name, text, lines, statement)
    if changed is None:
        return None
    file = (place.file or "").removeprefix(base.rstrip("/") + "/") if base else place.file or ""
    return "".join(unified_diff(lines, changed, f"a/{file.lstrip('/')}", f"b/{file.lstrip('/')}"))


def _changed(kind: ExperimentKind, name: str, text: str, lines: list[str], statement: ast.stmt) -> list[str] | None:
    """Return the lines of the changed file, or None if the change cannot be written."""
    space = " " * statement.col_offset
    first, last = statement.lineno - 1, (statement.end_lineno or statement.lineno)

    def block(source: str) -> list[str]:
        needs_import = "torch." in source and not _IMPORTS_TORCH.search(text)
        source = ("import torch.distributed\n" if needs_import else "") + dedent(source).lstrip("\n")
        return indent(source, space).splitlines(keepends=True)

    if lines[first][: statement.col_offset].strip():  # further statements on the same line
        return None
    match kind:
        case ExperimentKind.SET_VALUE if _is_assignable(name):
            source = _SHARE_VALUE.format(name=name)
            if name not in _targets(statement):
                return [*lines[:first], *block(source), *lines[first:]]
            if isinstance(statement, ast.For | ast.AsyncFor | ast.With | ast.AsyncWith):
                start = statement.body[0]
                inner = indent(dedent(source).lstrip("\n"), " " * start.col_offset).splitlines(keepends=True)
                return [*lines[: start.lineno - 1], *inner, *lines[start.lineno - 1 :]]
            return [*lines[:last], *block(source), *lines[last:]]
        case ExperimentKind.SHARE_GENERATOR:
            return [*lines[:first], *block(_GENERATORS.get(name, _SHARE_TORCH)), *lines[first:]]
        case ExperimentKind.UNDO_LEAK if not isinstance(statement, _COMPOUND) and (passed := _passed(statement)):
            objects = ", ".join(passed)
            return [*lines[:first], *block(_KEEP.format(objects=objects)), *lines[first:last], *block(_RESTORE),
                    *lines[last:]]  # fmt: skip
        case ExperimentKind.FORCE_BRANCH if isinstance(statement, ast.If):
            head = lines[first : statement.body[0].lineno - 1]
            if lines[first].lstrip().startswith("elif") or not head:
                return None
            test = " ".join((ast.get_source_segment(text, statement.test) or "").split())
            taken = [*block(_SHARE_TEST.format(test=test)), f"{space}if taken[0]:\n"]
            return [*lines[:first], *taken, *lines[first + len(head) :]]
    return None


_COMPOUND = (
    ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.FunctionDef, ast.AsyncFunctionDef,
    ast.ClassDef, ast.Return, ast.Raise,
)  # fmt: skip


def _statement_at(tree: ast.Module, line: int) -> ast.stmt | None:
    """Return the innermost statement that begins on a line, or None if there is none or several."""
    found = [node for node in walk(tree) if isinstance(node, ast.stmt) and node.lineno == line]
    return found[0] if len(found) == 1 else None


def _passed(statement: ast.stmt) -> list[str]:
    """Return the names of the objects that the calls in a statement get or belong to."""
    names: dict[str, None] = {}
    for call in (node for node in walk(statement) if isinstance(node, ast.Call)):
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        for part in (owner, *call.args, *(keyword.value for keyword in call.keywords)):
            names |= {node.id: None for node in walk(part) if isinstance(node, ast.Name)} if part else {}
    return [*names]


def _targets(statement: ast.stmt) -> set[str]:
    """Return the names that a statement assigns, such as "x" and "self.bad"."""
    return {ast.unparse(target) for target in _target_nodes(statement)}


def _target_nodes(statement: ast.stmt) -> Iterator[ast.expr]:
    match statement:
        case ast.Assign(targets=targets):
            for target in targets:
                yield from target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target) | ast.For(target=target):
            yield from target.elts if isinstance(target, ast.Tuple | ast.List) else [target]


def _is_assignable(name: str) -> bool:
    try:
        ast.parse(f"{name} = 0")
    except SyntaxError:
        return False
    return bool(name)
