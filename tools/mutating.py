"""A mutation of the code: where it stands, what it does there, and the file with it done.

    python tools/mutating.py    sorts the entries

    {"file": ".../core/x.py", "function": "Class.method", "changes": ["2nd comparison: with <="], "test": "..."}

Nothing of the code is copied, so that an entry outlives other names and another layout. `function` is the qualified
name of a function or class, or the name that a module or a class gives a value; `<module>` is what else a module does.
A node is counted among those of its kind in source order, an outer one before those within it: `2nd name`, or in a long
function `2nd name in 3rd return`. Nested functions count for themselves; docstrings, annotations and what lies within
an f-string do not count.

    drop              a statement, an operand, an element, an argument, a condition of a comprehension
    negate            `not` before it, or the one before it taken away
    with OPERATOR     another operator for a comparison, an arithmetic operation, an `and` or `or`
    keep 2nd          the node gives way to the second of the expressions it is made of
    empty             a function gives None and does nothing else
    keep body         a compound statement gives way to its body; `keep else`: to its else
    swap              the first two operands, arguments or elements change places
    name WORD         another attribute, function, keyword or variable in its place
    become SOURCE     anything else
"""

from __future__ import annotations

import ast
import functools
import io
import json
import keyword
import re
import textwrap
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENTRIES = ROOT / "tests" / "mutations.json"

MODULE = "<module>"
_KINDS: dict[type[ast.AST], str] = {
    ast.Compare: "comparison",
    ast.IfExp: "conditional",
    ast.JoinedStr: "string",
    ast.ListComp: "comprehension",
    ast.SetComp: "comprehension",
    ast.DictComp: "comprehension",
    ast.GeneratorExp: "comprehension",
    ast.comprehension: "generator",
    ast.BinOp: "operation",
    ast.Assign: "assignment",
    ast.AnnAssign: "assignment",
    ast.AugAssign: "assignment",
    ast.Expr: "expression",
    ast.ExceptHandler: "handler",
    ast.FunctionDef: "function",
    ast.AsyncFunctionDef: "function",
    ast.ClassDef: "class",
    ast.arg: "parameter",
    ast.ImportFrom: "import",
}
_OPERATORS: dict[str, ast.cmpop | ast.boolop | ast.operator] = {
    "==": ast.Eq(),
    "!=": ast.NotEq(),
    "<": ast.Lt(),
    "<=": ast.LtE(),
    ">": ast.Gt(),
    ">=": ast.GtE(),
    "is": ast.Is(),
    "is not": ast.IsNot(),
    "in": ast.In(),
    "not in": ast.NotIn(),
    "and": ast.And(),
    "or": ast.Or(),
    "+": ast.Add(),
    "-": ast.Sub(),
    "*": ast.Mult(),
    "/": ast.Div(),
    "//": ast.FloorDiv(),
    "%": ast.Mod(),
    "&": ast.BitAnd(),
    "|": ast.BitOr(),
    "<<": ast.LShift(),
    ">>": ast.RShift(),
}
# What a node may do without, besides what it holds several of.
_OPTIONAL = {
    (ast.Return, "value"),
    (ast.Raise, "cause"),
    (ast.Slice, "lower"),
    (ast.Slice, "upper"),
    (ast.Slice, "step"),
}
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Unclear(Exception):
    """The entry names no node, or asks for what cannot be done to it."""


@dataclass(frozen=True, kw_only=True)
class Mutation:
    file: str
    function: str
    changes: tuple[str, ...]
    test: str

    @property
    def name(self) -> str:
        return f"{self.file}:{self.function}: {'; '.join(self.changes)}"

    def text(self) -> str:
        return (ROOT / self.file).read_text(encoding="utf-8")


def read(path: Path = ENTRIES) -> list[Mutation]:
    return [Mutation(**{**one, "changes": tuple(one["changes"])}) for one in json.loads(path.read_text())]


def written(mutations: Sequence[Mutation]) -> str:
    """One entry a line, by place: two people who add some rarely meet in one line."""
    ordered = sorted(mutations, key=lambda one: (one.file, one.function, one.changes, one.test))
    lines = [json.dumps(vars(one), ensure_ascii=False) for one in ordered]
    return "[\n" + ",\n".join(lines) + "\n]\n"


def kind_of(node: ast.AST) -> str:
    match node:
        case ast.BoolOp():
            return "and" if isinstance(node.op, ast.And) else "or"
        case ast.UnaryOp():
            return "not" if isinstance(node.op, ast.Not) else "sign"
        case ast.Constant(value=bool() | None):
            return "constant"
        case ast.Constant(value=str() | bytes()):
            return "string"
        case ast.Constant():
            return "number"
    return _KINDS.get(type(node), type(node).__name__.lower())


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a node hangs: the field of its parent, and which of several."""

    parent: ast.AST
    field: str
    index: int | None


class Anchors:
    """The nodes of one file, by the function they stand in; and of each the place where it hangs."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.places: dict[ast.AST, Place] = {}
        self.functions: dict[str, list[ast.AST]] = {}
        for parent in ast.walk(tree):
            for field, value in ast.iter_fields(parent):
                for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
                    if isinstance(child, ast.AST):
                        self.places[child] = Place(parent=parent, field=field, index=index)
        for statement in tree.body:
            self._collect(statement, "", MODULE)
        for nodes in self.functions.values():
            nodes.sort(key=lambda node: _position(node) or ())

    def find(self, function: str, where: str) -> ast.AST:
        """The node that words such as `2nd name in 3rd return` mean. Raises Unclear."""
        if function not in self.functions:
            raise Unclear(f"no function {function}; there are {', '.join(self.functions)}")
        nodes = self.functions[function]
        for words in reversed(where.split(" in ")):
            number = re.fullmatch(r"(\d+)(?:st|nd|rd|th) (\w+)", words)
            alike = [node for node in nodes if number and kind_of(node) == number[2]]
            if number is None or not 0 < int(number[1]) <= len(alike):
                raise Unclear(f"{function} has no {words!r}, but {len(alike)} of the kind")
            found = alike[int(number[1]) - 1]
            within = set(ast.walk(found)) - {found}
            nodes = [node for node in nodes if node in within]
        return found

    def _collect(self, node: ast.AST, scope: str, function: str) -> None:
        if isinstance(node, _DEFINITIONS):
            scope = function = f"{scope}.{node.name}" if scope else node.name
        elif isinstance(self.places[node].parent, (ast.Module, ast.ClassDef)) and (given := _given(node)):
            function = f"{scope}.{given}" if scope else given
        if _position(node) is not None:
            self.functions.setdefault(function, []).append(node)
        for child in ast.iter_child_nodes(node):
            if not isinstance(node, ast.JoinedStr) and not self._silent(child):
                self._collect(child, scope, function)

    def _silent(self, node: ast.AST) -> bool:
        place = self.places[node]
        if place.field in ("annotation", "returns"):
            return True
        owner = isinstance(place.parent, (*_DEFINITIONS, ast.Module)) and place.field == "body" and place.index == 0
        return owner and isinstance(node, ast.Expr) and kind_of(node.value) == "string"


def _given(node: ast.AST) -> str | None:
    """The name that a statement of a module or a class gives a value."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return targets[0].id if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(targets[0], ast.Name) else None


def _position(node: ast.AST) -> tuple[int, int, int, int] | None:
    node = node.target if isinstance(node, ast.comprehension) else node
    if not isinstance(node, (ast.expr, ast.stmt, ast.keyword, ast.arg, ast.ExceptHandler, ast.alias, ast.pattern)):
        return None
    return node.lineno, node.col_offset, -(node.end_lineno or 0), -(node.end_col_offset or 0)


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def mutated(text: str, function: str, changes: Sequence[str]) -> str:
    """The file with the changes done, and otherwise as it is written. Raises Unclear."""
    start, end = _statements(text).get(function.partition(".")[0], (0, len(text)))
    return text[:start] + _mutated(text[start:end], function, changes) + text[end:]


@functools.lru_cache(maxsize=8)
def _statements(text: str) -> dict[str, tuple[int, int]]:
    """Where the lines of each statement of the module are that alone gives its name: all that an entry can touch."""
    begins = [0, *accumulate(map(len, text.splitlines(keepends=True)))]
    found: dict[str, list[tuple[int, int]]] = {}
    for statement in ast.parse(text).body:
        defined = isinstance(statement, _DEFINITIONS)
        if name := statement.name if defined else _given(statement):
            first = min([statement, *(statement.decorator_list if defined else [])], key=lambda node: node.lineno)
            found.setdefault(name, []).append((begins[first.lineno - 1], begins[statement.end_lineno or 0]))
    return {name: spans[0] for name, spans in found.items() if len(spans) == 1}


def _mutated(text: str, function: str, changes: Sequence[str]) -> str:
    old = _anchors(text)
    found = [_read_change(old, function, change) for change in changes]
    work = _Work(old, ast.parse(text))
    for node, operator, argument in [(work.twin(node), operator, argument) for node, operator, argument in found]:
        work.do(node, operator, argument)
    if work.dumped(work.tree) == work.dumped(old.tree):
        raise Unclear(f"{function}: {'; '.join(changes)}: the code is the same")
    for unit in (_expression, _statement):
        spliced = _spliced(text, old, work, [unit(old, node) for node, _, _ in found])
        if work.is_told_by(spliced):
            return spliced
    return ast.unparse(ast.fix_missing_locations(work.tree)) + "\n"


@functools.lru_cache(maxsize=8)
def _anchors(text: str) -> Anchors:
    return Anchors(ast.parse(text))


def _read_change(anchors: Anchors, function: str, change: str) -> tuple[ast.AST, str, str]:
    where, _, what = change.partition(": ")
    operator, _, argument = what.partition(" ")
    return anchors.find(function, where), operator, argument


class _Work:
    """The operators, on the nodes of a second tree of the same text."""

    def __init__(self, old: Anchors, tree: ast.Module) -> None:
        self.old, self.tree = old, tree
        self.twins: dict[ast.AST, ast.AST] = {old.tree: tree}
        self.places: dict[ast.AST, Place] = {}
        self.replaced: dict[ast.AST, list[ast.AST]] = {}
        self._touched: set[int] = set()  # statements of the module

    def twin(self, node: ast.AST) -> ast.AST:
        """The same node of the second tree; to be asked for before anything is done."""
        if node not in self.twins:
            place = self.old.places[node]
            parent = self.twin(place.parent)
            held = getattr(parent, place.field)
            self.twins[node] = held if place.index is None else held[place.index]
            self.places[self.twins[node]] = Place(parent=parent, field=place.field, index=place.index)
            if parent is self.tree and place.index is not None:
                self._touched.add(place.index)
        return self.twins[node]

    def dumped(self, tree: ast.Module) -> list[str]:
        """What may differ of two such trees. A module loses no more than statements of its own."""
        few = [tree.body[index] for index in sorted(self._touched) if index < len(tree.body)]
        return [str(len(tree.body)), *map(ast.dump, few)]

    def is_told_by(self, text: str) -> bool:
        try:
            return self.dumped(ast.parse(text)) == self.dumped(self.tree)
        except SyntaxError:
            return False

    def do(self, node: ast.AST, operator: str, argument: str) -> None:
        match operator, argument:
            case "drop", "":
                self.put(node, [])
            case "empty", "" if isinstance(node, ast.FunctionDef):
                node.body = [ast.Return(value=ast.Constant(value=None))]
            case "negate", "" if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
                self.put(node, [node.operand])
            case "negate", "" if isinstance(node, ast.expr):
                self.put(node, [ast.UnaryOp(op=ast.Not(), operand=node)])
            case "with", _ if argument in _OPERATORS:
                _set_operator(node, _OPERATORS[argument])
            case "keep", ("body" | "else"):
                self.put(node, getattr(node, "orelse" if argument == "else" else "body"))
            case "keep", _:
                self.put(node, [parts_of(node)[int(argument[:-2]) - 1]])
            case "swap", "":
                _swap(node)
            case "name", _ if type(node) in _NAMES:
                setattr(node, _NAMES[type(node)], argument)
            case "become", _:
                self.put(node, parsed_like(node, argument))
            case _:
                raise Unclear(f"a {kind_of(node)} cannot: {operator} {argument}")

    def put(self, node: ast.AST, new: list[ast.AST]) -> None:
        """Others in the place of a node; what is left of a condition, a table or a block stays whole."""
        place = self.places[node]
        held = getattr(place.parent, place.field)
        self.replaced[node] = new
        if not isinstance(held, list):
            if not new and (type(place.parent), place.field) not in _OPTIONAL:
                raise Unclear(f"a {kind_of(place.parent)} cannot do without its {place.field}")
            setattr(place.parent, place.field, new[0] if new else None)
            return
        index = next(index for index, one in enumerate(held) if one is node)
        held[index : index + 1] = new
        if isinstance(place.parent, ast.Dict) and not new:
            del (place.parent.keys if place.field == "values" else place.parent.values)[index]
        if isinstance(place.parent, ast.BoolOp) and len(held) == 1:
            self.put(place.parent, held)
        if not held and isinstance(place.parent, (ast.stmt, ast.ExceptHandler)) and place.field == "body":
            held.append(ast.Pass())


def _set_operator(node: ast.AST, operator: ast.cmpop | ast.boolop | ast.operator) -> None:
    match node, operator:
        case ast.Compare(ops=[_]), ast.cmpop():
            node.ops = [operator]
        case ast.BoolOp(), ast.boolop():
            node.op = operator
        case ast.BinOp() | ast.AugAssign(), ast.operator():
            node.op = operator
        case _:
            raise Unclear(f"a {kind_of(node)} has no place for this operator")


_NAMES: dict[type[ast.AST], str] = {
    ast.Attribute: "attr",
    ast.Name: "id",
    ast.keyword: "arg",
    ast.arg: "arg",
    ast.FunctionDef: "name",
    ast.alias: "name",
}


def words_of(changes: Sequence[str]) -> set[str]:
    """Every name that changes bring along; not the words of a text."""
    found: set[str] = set()
    for change in changes:
        operator, _, argument = change.partition(": ")[2].partition(" ")
        if operator in ("become", "name"):
            tokens = list(tokenize.generate_tokens(io.StringIO(argument).readline))
            found |= {token.string for token in tokens if token.type == tokenize.NAME}
    return found - set(keyword.kwlist)


def parts_of(node: ast.AST) -> list[ast.AST]:
    """The expressions that a node is made of, in source order."""
    found = [one for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr)]
    return sorted(found, key=lambda one: _position(one) or ())


def _swap(node: ast.AST) -> None:
    match node:
        case ast.Compare():
            node.left, node.comparators[0] = node.comparators[0], node.left
        case ast.BinOp():
            node.left, node.right = node.right, node.left
        case ast.IfExp():
            node.body, node.orelse = node.orelse, node.body
        case ast.Call(args=[_, _, *_] as several) | ast.Tuple(elts=[_, _, *_] as several):
            several[:2] = [several[1], several[0]]
        case ast.List(elts=[_, _, *_] as several) | ast.BoolOp(values=several):
            several[:2] = [several[1], several[0]]
        case _:
            raise Unclear(f"a {kind_of(node)} has no two to swap")


def parsed_like(node: ast.AST, source: str) -> list[ast.AST]:
    """The source as what can stand where the node does."""
    match node:
        case ast.stmt():
            return list(ast.parse(source).body)
        case ast.keyword() | ast.Starred():
            call = ast.parse(f"f({source})", mode="eval").body
            assert isinstance(call, ast.Call)
            return [*call.args, *call.keywords]
        case ast.comprehension():
            comprehension = ast.parse(f"[x {source}]", mode="eval").body
            assert isinstance(comprehension, ast.ListComp)
            return list(comprehension.generators)
        case ast.Slice():
            subscript = ast.parse(f"x[{source}]", mode="eval").body
            assert isinstance(subscript, ast.Subscript)
            return [subscript.slice]
        case ast.expr() if isinstance(getattr(node, "ctx", None), ast.Store):
            assignment = ast.parse(f"{source} = 0").body[0]
            assert isinstance(assignment, ast.Assign)
            return list(assignment.targets)
        case ast.expr():
            return [ast.parse(source, mode="eval").body]
    raise Unclear(f"nothing is written in the place of a {kind_of(node)}")


def _expression(anchors: Anchors, node: ast.AST) -> ast.AST:
    """The smallest expression that is written anew: the node itself, or what has lost it."""
    while not isinstance(node, (ast.expr, ast.stmt)) or isinstance(node, (ast.Slice, ast.Starred)):
        node = anchors.places[node].parent
    return node


def _statement(anchors: Anchors, node: ast.AST) -> ast.AST:
    while not isinstance(node, ast.stmt):
        node = anchors.places[node].parent
    return node


def _spliced(text: str, old: Anchors, work: _Work, units: list[ast.AST]) -> str:
    """The text with the units written anew."""
    spans = []
    for unit in units:
        # Where nothing took the place of an expression, that which held it is written anew.
        while not work.replaced.get(work.twin(unit), [unit]) and not isinstance(unit, ast.stmt):
            unit = _expression(old, old.places[unit].parent)
        new = work.replaced.get(work.twin(unit), [work.twin(unit)])
        if not new and len(getattr(old.places[unit].parent, old.places[unit].field)) > 1:
            spans.append(_whole_lines(text, *_span(text, unit)))
        else:
            spans.append((*_span(text, unit), _written(unit, new)))
    for start, end, new_text in sorted(set(spans), reverse=True):
        text = text[:start] + new_text + text[end:]
    return text


def _whole_lines(text: str, start: int, end: int) -> tuple[int, int, str]:
    return text.rfind("\n", 0, start) + 1, text.find("\n", end) + 1, ""


def _written(unit: ast.AST, new: list[ast.AST]) -> str:
    lines = "\n".join(ast.unparse(ast.fix_missing_locations(one)) for one in new)
    if not isinstance(unit, ast.stmt):
        return f"({lines})"
    return textwrap.indent(lines or "pass", " " * unit.col_offset).lstrip()


def _span(text: str, node: ast.AST) -> tuple[int, int]:
    assert isinstance(node, (ast.expr, ast.stmt))
    lines = text.splitlines(keepends=True)

    def at(line: int | None, column_bytes: int | None) -> int:
        assert line is not None
        return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column_bytes].decode())

    return at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)


if __name__ == "__main__":
    ENTRIES.write_text(written(read()), encoding="utf-8")
