"""Find the statement changed by each mutation, and produce the changed source code.

    python tools/mutating.py          sort the entries, and list those whose statement is not found
    python tools/mutating.py --fix    first correct entries whose statement moved to another file or function, or in
                                      which names changed; `--since REVISION` names the tree that the entries fit

    {"file": ".../core/x.py", "statement": "if ranks and not late:", "expression": "not late", "do": "drop",
     "test": "tests/core/test_x.py::test_some_fact"}

`statement` is the text that `ast.unparse` gives for the statement; the text of a compound statement is its header, and
that of a function or class its name: `def judge(...)`, `class Case`. `expression` is the text of the part that changes
(default: the statement itself). `function` is the qualified name of the function or class around the statement, or the
name that a module or class assigns; an entry needs it only if the same statement occurs elsewhere. `nth` counts the
nodes that still fit, in source order; an entry needs it only if several do. A long text is cut: `...` at its end stands
for the rest. `also` lists further changes of the same mutation. Docstrings, annotations and the inside of f-strings
cannot be changed.

`do` is one of:

    drop              remove a statement, an operand, an element, an argument or a condition of a comprehension
    negate            put `not` before the expression, or remove the `not`
    with OPERATOR     use another operator in a comparison, an arithmetic operation, an `and` or `or`
    keep 2nd          replace the node by the second of its direct subexpressions
    empty             replace the body of a function by `return None`
    keep body         replace a compound statement by its body; `keep else`: by its else branch
    swap              exchange the first two operands, arguments or elements
    name WORD         use another attribute, function, keyword or variable name
    become SOURCE     replace the node by other source text
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import io
import json
import keyword
import sys
import textwrap
import tokenize
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

ROOT: Path = Path(__file__).resolve().parent.parent
ENTRIES = ROOT / "tests" / "mutations.json"
SOURCES = ("harness", "nsa")  # the folders whose files can be mutated

MODULE = "<module>"
_LONG = 120  # characters of a statement or an expression that an entry quotes
CUT = " ..."
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
# Fields of a node that may be removed, in addition to items of a list.
_OPTIONAL = {
    (ast.Return, "value"),
    (ast.Raise, "cause"),
    (ast.Slice, "lower"),
    (ast.Slice, "upper"),
    (ast.Slice, "step"),
}
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_STATEMENTS = (ast.stmt, ast.ExceptHandler, ast.match_case)
_BODIES = ("body", "orelse", "finalbody", "handlers", "cases")


class Unclear(Exception):
    """Raised if a mutation does not match exactly one statement or cannot be applied to it."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One of the changes that make up a mutation, such as removing an operand from an expression.

    The docstring of the module explains the fields.
    """

    function: str = ""
    statement: str
    expression: str = ""
    nth: int = 0
    do: str

    @property
    def name(self) -> str:
        nth = _ordinal(self.nth) if self.nth else ""
        return " | ".join(part for part in (self.function, self.statement, self.expression, nth, self.do) if part)

    def values(self) -> dict[str, str | int]:
        """Return the fields that differ from their defaults."""
        return {key: value for key, value in asdict(self).items() if value}


@dataclass(frozen=True, kw_only=True)
class Mutation:
    file: str
    changes: tuple[Change, ...]
    test: str

    @property
    def name(self) -> str:
        return f"{self.file}: {'; '.join(change.name for change in self.changes)}"

    def text(self) -> str:
        return (ROOT / self.file).read_text(encoding="utf-8")


def read(path: Path = ENTRIES) -> list[Mutation]:
    return [_read_entry(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]


def _read_entry(*, file: str, test: str, also: Sequence[dict[str, Any]] = (), **first: Any) -> Mutation:
    return Mutation(file=file, changes=tuple(Change(**values) for values in (first, *also)), test=test)


def written(mutations: Sequence[Mutation]) -> str:
    """Return the text of mutations.json, with one entry per line, in sorted order.

    This avoids merge conflicts when two people add entries.
    """
    ordered = sorted(mutations, key=lambda one: (one.file, *(tuple(vars(change).values()) for change in one.changes)))
    return "[\n" + ",\n".join(json.dumps(_entry(one), ensure_ascii=False) for one in ordered) + "\n]\n"


def _entry(mutation: Mutation) -> dict[str, object]:
    first, *rest = (change.values() for change in mutation.changes)
    return {"file": mutation.file, **first, **({"also": rest} if rest else {}), "test": mutation.test}


@dataclass(frozen=True, kw_only=True)
class Place:
    """The position of a syntax node within its parent node."""

    parent: ast.AST
    field: str
    index: int | None


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A statement in the code with its expressions, but without nested statements."""

    node: ast.AST
    function: str
    text: str
    parts: list[ast.AST]

    @functools.cached_property
    def whole(self) -> str:
        return unparsed(self.node)

    def nodes(self, expression: str) -> list[ast.AST]:
        """Return the parts of the statement whose source text is `expression`.

        For an empty text, return the statement itself.
        """
        if not expression:
            return [self.node]
        wanted = _normal_expression(expression)
        return [node for node in self.parts if _matches(unparsed(node), wanted)]


class Anchors:
    """The statements in one file, and the position of each syntax node."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.places: dict[ast.AST, Place] = {}
        self.statements: list[Statement] = []
        for parent in ast.walk(tree):
            for field, value in ast.iter_fields(parent):
                for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
                    if isinstance(child, ast.AST):
                        self.places[child] = Place(parent=parent, field=field, index=index)
        for statement in tree.body:
            self._collect(statement, "", MODULE, [])
        self._by_text: dict[str, list[Statement]] = {}
        for found in self.statements:
            found.parts.sort(key=lambda node: _position(node) or ())
            self._by_text.setdefault(unquoted(found.text), []).append(found)

    def find(self, change: Change) -> ast.AST:
        """Return the syntax node to change. Raise Unclear unless exactly one node matches."""
        statements = self.matching(change)
        nodes = [node for statement in statements for node in statement.nodes(change.expression)]
        if change.nth:
            nodes = nodes[change.nth - 1 : change.nth]
        if len(nodes) != 1:
            functions = ", ".join(dict.fromkeys(statement.function for statement in statements)) or "no function"
            raise Unclear(f"{len(nodes)} nodes fit {change.name!r}; the statement is in {functions}")
        return nodes[0]

    def path(self, node: ast.AST) -> list[tuple[str, int | None]]:
        """Return the (field, index) pairs that lead from the module to the node."""
        steps: list[tuple[str, int | None]] = []
        while node is not self.tree:
            place = self.places[node]
            steps.append((place.field, place.index))
            node = place.parent
        return steps[::-1]

    def at(self, path: Sequence[tuple[str, int | None]]) -> ast.AST:
        node: ast.AST = self.tree
        for field, index in path:
            value = getattr(node, field)
            node = value if index is None else value[index]
        return node

    def matching(self, change: Change) -> list[Statement]:
        wanted = _normal(change.statement)
        found = self.statements if wanted.endswith(CUT) else self._by_text.get(unquoted(wanted), [])
        return [one for one in found if _matches(one.text, wanted) and change.function in ("", one.function)]

    def _collect(self, node: ast.AST, scope: str, function: str, parts: list[ast.AST]) -> None:
        if isinstance(node, DEFINITIONS):
            scope = function = f"{scope}.{node.name}" if scope else node.name
        elif isinstance(self.places[node].parent, (ast.Module, ast.ClassDef)) and (given := _given(node)):
            function = f"{scope}.{given}" if scope else given
        if isinstance(node, _STATEMENTS):
            parts = []
            self.statements.append(Statement(node=node, function=function, text=_header(node), parts=parts))
        elif _position(node) is not None:
            parts.append(node)
        for child in ast.iter_child_nodes(node):
            if not isinstance(node, ast.JoinedStr) and not self._silent(child):
                self._collect(child, scope, function, parts)

    def _silent(self, node: ast.AST) -> bool:
        place = self.places[node]
        if place.field in ("annotation", "returns"):
            return True
        owner = isinstance(place.parent, (*DEFINITIONS, ast.Module)) and place.field == "body" and place.index == 0
        return owner and isinstance(node, ast.Expr) and _is_text(node.value)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)))


def _header(node: ast.AST) -> str:
    """Return the source text of a statement without its nested statements.

    For a definition, return only its keyword and name.
    """
    match node:
        case ast.FunctionDef():
            return f"def {node.name}(...)"
        case ast.AsyncFunctionDef():
            return f"async def {node.name}(...)"
        case ast.ClassDef():
            return f"class {node.name}"
    hollow = copy.copy(node)
    for field in _BODIES:
        if isinstance(getattr(hollow, field, None), list):
            setattr(hollow, field, [])
    return unparsed(hollow)


def unparsed(node: ast.AST) -> str:
    return ast.unparse(node).strip()


def cut(text: str) -> str:
    return text if len(text) <= _LONG + len(CUT) else text[:_LONG] + CUT


def _matches(text: str, wanted: str) -> bool:
    text, wanted = unquoted(text), unquoted(wanted)
    return text == wanted or (wanted.endswith(CUT) and text.startswith(wanted.removesuffix(CUT)))


def unquoted(text: str) -> str:
    """Return the text without quotation marks, which differ between Python versions inside f-strings."""
    return text.replace("'", "").replace('"', "")


@functools.lru_cache(maxsize=8192)
def _normal(statement: str) -> str:
    """Return the statement in the format of `ast.unparse`, or unchanged if it is incomplete."""
    with contextlib.suppress(SyntaxError):
        body = ast.parse(f"{statement}\n    pass" if statement.endswith(":") else statement).body
        return _header(body[0]) if len(body) == 1 else statement
    return statement


@functools.lru_cache(maxsize=8192)
def _normal_expression(expression: str) -> str:
    """Return the expression in the format of `ast.unparse`."""
    with contextlib.suppress(SyntaxError):
        return unparsed(ast.parse(expression, mode="eval"))
    with contextlib.suppress(SyntaxError):
        return unparsed(ast.parse(f"f({expression})", mode="eval"))[2:-1]
    return expression


def _given(node: ast.AST) -> str | None:
    """Return the name of the variable that the statement assigns, or None if it assigns none."""
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


def mutated(text: str, changes: Sequence[Change]) -> str:
    """Return the source code with `changes` applied. Raise Unclear if a change does not match."""
    anchors = parsed(text)
    nodes = [anchors.find(change) for change in changes]
    paths = [anchors.path(node) for node in nodes]
    tops = {path[0] for path in paths}
    if len(tops) == 1:
        # Parsing one statement of the module takes a tenth of the time for the file.
        start, end = _lines_of(text, anchors.tree.body[tops.pop()[1] or 0])
        part = parsed(text[start:end])
        if len(part.tree.body) == 1:
            nodes = [part.at([("body", 0), *path[1:]]) for path in paths]
            return text[:start] + _mutated(text[start:end], part, nodes, changes) + text[end:]
    return _mutated(text, anchors, nodes, changes)


def _lines_of(text: str, statement: ast.stmt) -> tuple[int, int]:
    begins = [0, *accumulate(map(len, text.splitlines(keepends=True)))]
    first = min([statement, *getattr(statement, "decorator_list", [])], key=lambda node: node.lineno)
    return begins[first.lineno - 1], begins[statement.end_lineno or 0]


def _mutated(text: str, old: Anchors, nodes: Sequence[ast.AST], changes: Sequence[Change]) -> str:
    work = _Work(old, ast.parse(text))
    twins = [work.twin(node) for node in nodes]
    for twin, change in zip(twins, changes, strict=True):
        operator, _, argument = change.do.partition(" ")
        work.do(twin, operator, argument)
    if work.dumped(work.tree) == work.dumped(old.tree):
        raise Unclear(f"{'; '.join(change.name for change in changes)}: the code is the same")
    for unit in (_expression, _statement):
        spliced = _spliced(text, old, work, [unit(old, node) for node in nodes])
        if work.is_told_by(spliced):
            return spliced
    return ast.unparse(ast.fix_missing_locations(work.tree)) + "\n"


@functools.lru_cache(maxsize=8)
def parsed(text: str) -> Anchors:
    return Anchors(ast.parse(text))


class _Work:
    """A second syntax tree of the same source code, to which changes are applied."""

    def __init__(self, old: Anchors, tree: ast.Module) -> None:
        self.old, self.tree = old, tree
        self.twins: dict[ast.AST, ast.AST] = {old.tree: tree}
        self.places: dict[ast.AST, Place] = {}
        self.replaced: dict[ast.AST, list[ast.AST]] = {}
        self._touched: set[int] = set()  # statements of the module

    def twin(self, node: ast.AST) -> ast.AST:
        """Return the node of the second tree that corresponds to `node`. Call this before any change is applied."""
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
        """Return the parts of the tree that could have changed, as text for comparison."""
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
                raise Unclear(f"a {type(node).__name__} cannot: {operator} {argument}".rstrip())

    def put(self, node: ast.AST, new: list[ast.AST]) -> None:
        """Replace a node with other nodes, and keep its parent node valid."""
        place = self.places[node]
        held = getattr(place.parent, place.field)
        self.replaced[node] = new
        if not isinstance(held, list):
            if not new and (type(place.parent), place.field) not in _OPTIONAL:
                raise Unclear(f"a {type(place.parent).__name__} cannot do without its {place.field}")
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
            raise Unclear(f"a {type(node).__name__} has no place for this operator")


_NAMES: dict[type[ast.AST], str] = {
    ast.Attribute: "attr",
    ast.Name: "id",
    ast.keyword: "arg",
    ast.arg: "arg",
    ast.FunctionDef: "name",
    ast.alias: "name",
}


def words_of(changes: Sequence[Change]) -> set[str]:
    """Return the names that the changes add to the code."""
    found: set[str] = set()
    for change in changes:
        operator, _, argument = change.do.partition(" ")
        if operator in ("become", "name"):
            tokens = list(tokenize.generate_tokens(io.StringIO(argument).readline))
            found |= {token.string for token in tokens if token.type == tokenize.NAME}
    return found - set(keyword.kwlist)


def parts_of(node: ast.AST) -> list[ast.AST]:
    """Return the direct subexpressions of a node in source order."""
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
            raise Unclear(f"a {type(node).__name__} has no two to swap")


def parsed_like(node: ast.AST, source: str) -> list[ast.AST]:
    """Parse `source` into nodes that can replace `node`."""
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
    raise Unclear(f"nothing is written in the place of a {type(node).__name__}")


def _expression(anchors: Anchors, node: ast.AST) -> ast.AST:
    """Return the smallest enclosing expression or statement that can be converted to source code on its own."""
    while not isinstance(node, (ast.expr, ast.stmt)) or isinstance(node, (ast.Slice, ast.Starred)):
        node = anchors.places[node].parent
    return node


def _statement(anchors: Anchors, node: ast.AST) -> ast.AST:
    while not isinstance(node, ast.stmt):
        node = anchors.places[node].parent
    return node


def _spliced(text: str, old: Anchors, work: _Work, units: list[ast.AST]) -> str:
    """Return the source text with only the changed parts regenerated."""
    spans = []
    for unit in units:
        # If an expression was removed, the expression around it is written again.
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
    from mutation_moves import main

    raise SystemExit(main(sys.argv[1:]))
