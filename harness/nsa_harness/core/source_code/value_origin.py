"""Find where a value of the program was made: follow its use back through assignments, returns and arguments."""

from __future__ import annotations

import ast
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from nsa_harness.core.evidence.evidence import Frame
from nsa_harness.core.report import Place
from nsa_harness.core.source_code.excerpt import Excerpt, Function, is_setting, names_rank
from nsa_harness.core.source_code.program_source import ProgramSource

_CHANCE = re.compile(r"\brandom\b|\bsecrets\b|\buuid\d?\b|environ\b|getenv\b")
_COLLECTIVES = re.compile(r"\b(?:all_reduce|all_gather|broadcast|reduce_scatter|all_to_all)\w*\(")
_WORLD = re.compile(r"\bget_world_size\(")  # the same on every rank
_OPTIONS = re.compile(r"\.parse_(?:known_)?args\(")  # the same on every rank, whatever it is made from
_MAX_STEPS = 12  # assignments between a use and the origin
_FURTHER = 3  # steps by which an origin that differs by rank may be further away than one that does not
_MAX_USES = 200  # uses that one search inspects

_WITHIN = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")  # frames of their own before Python 3.12

Chain = Sequence[Frame | Place]


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The line that made a value."""

    place: Place
    of_rank: bool  # the value depends there on the rank, on chance, or on whether an exception came


@dataclass(frozen=True, kw_only=True)
class _Use:
    """An expression at a line of the file, and the callers of its function as far as they are known."""

    excerpt: Excerpt
    line: int
    value: ast.expr
    callers: tuple[_Use, ...] = ()  # calls of this function, whose arguments are its parameters
    outer: Chain = ()  # frames around the function, innermost first
    below: bool = False  # it lies in a function that was called for the value
    handed: bool = False  # it is an argument: conditions around the call do not decide its value


def origin_of_loop(program: ProgramSource, line: Place | Frame, outer: Chain) -> Origin | None:
    """Return what decides the number of iterations: the origin of the items or the condition of the loop at `line`."""
    excerpt = program.excerpt(line)
    if excerpt is None or line.line is None:
        return None
    loops = (node for node in excerpt.nodes if isinstance(node, ast.For | ast.While))
    loop = next((one for one in loops if excerpt.line_of(one) == line.line), None)
    if loop is None:
        return None
    value = loop.iter if isinstance(loop, ast.For) else loop.test
    return _Search(program=program).origin(_Use(excerpt=excerpt, line=line.line, value=value, outer=outer))


def origin_of_arguments(program: ProgramSource, chain: Chain, *, own_rank: bool = True) -> Origin | None:
    """Return the origin of the arguments of the call at the chain's innermost line.

    `own_rank`: the arguments should not depend on the rank, so an origin that names the rank is wanted.
    """
    excerpt = program.excerpt(chain[0]) if chain else None
    if excerpt is None or chain[0].line is None:
        return None
    at = chain[0].line - excerpt.first + 1
    calls = [
        node for node in excerpt.nodes if isinstance(node, ast.Call) and node.lineno <= at <= (node.end_lineno or at)
    ]
    given = [argument for call in calls[:1] for argument in (*call.args, *(word.value for word in call.keywords))]
    if not given:
        return None
    use = _Use(excerpt=excerpt, line=chain[0].line, value=ast.Tuple(elts=given, ctx=ast.Load()), outer=chain[1:])
    return _Search(program=program, own_rank=own_rank).origin(use)


@dataclass(kw_only=True)
class _Search:
    """A breadth-first search from one use back to the places that made its value."""

    program: ProgramSource
    own_rank: bool = True
    uses: deque[tuple[int, _Use]] = field(default_factory=deque)
    seen: set[tuple[int, int, str]] = field(default_factory=set)
    places: list[tuple[int, bool, Place]] = field(default_factory=list)
    # Calls among `places` that only receive the rank, with the functions that they reach.
    handed: dict[Place, frozenset[tuple[str, str]]] = field(default_factory=dict)

    def origin(self, use: _Use) -> Origin | None:
        """Return the nearest place; one that differs by rank comes first unless it is `_FURTHER` steps further away."""
        outer = tuple(one for one in use.outer if one.function not in _WITHIN)
        self.uses.append((0, replace(use, outer=outer)))
        while self.uses and len(self.seen) < _MAX_USES:
            depth, each = self.uses.popleft()
            if depth < _MAX_STEPS:
                self._follow(depth, each)
        best = min(self.places, key=lambda one: one[0], default=None)
        if best is not None and best[2] in self.handed:
            reached = self.handed[best[2]]
            made = [one for one in self.places if one[1] and one[2] not in self.handed]
            inside = [one for one in made if (one[2].file, one[2].function) in reached]
            best = min(inside, key=lambda one: one[0], default=best)
        return None if best is None else Origin(place=best[2], of_rank=best[1])

    def _follow(self, depth: int, use: _Use) -> None:
        """Follow every name of the expression to its assignments, and every call into the program's function."""
        called, inputs = self._inputs(use)
        for function, call in called:
            if not _is_agreed(function):
                for line, value in _results(function):
                    made = _Use(excerpt=function, line=line, value=value, callers=(call,), below=True)
                    self._add(depth, made, line)
        for name in inputs:
            key = (use.excerpt.first, hash((use.excerpt.file, use.line)), name)
            if key in self.seen:
                continue
            self.seen.add(key)
            for one in self._definitions(use, name):
                self._add(depth, one, one.line)

    def _add(self, depth: int, use: _Use, line: int) -> None:
        """Note a line that makes the value, and queue the line's own inputs."""
        text = ast.unparse(use.value)
        if _OPTIONS.search(text):
            return
        self.uses.append((depth + 1, use))
        called, inputs = self._inputs(use)
        of_rank = self._is_of_rank(use)
        calls = (node for node in ast.walk(use.value) if isinstance(node, ast.Call))
        nothing = not inputs and all(call.args or call.keywords for call in calls)
        plain = isinstance(use.value, ast.Name | ast.Attribute | ast.Constant) or bool(called) or nothing
        plain = plain or _WORLD.search(text) is not None
        handed_on = not use.below and any(self._is_given(use, name) for name in inputs)
        if of_rank or not (plain or handed_on):
            place = Place(file=use.excerpt.file, line=line, function=use.excerpt.name)
            self.places.append((depth + (0 if of_rank else _FURTHER), of_rank, place))
            if called and not self._is_of_rank(replace(use, value=_outside_calls(use.value, called))):
                self.handed[place] = frozenset(self._reached([function for function, _ in called]))

    def _reached(self, functions: Sequence[Excerpt]) -> set[tuple[str, str]]:
        """Return file and name of these functions and of all functions that they call."""
        seen: set[tuple[str, str]] = set()
        waiting = list(functions)
        while waiting:
            one = waiting.pop()
            key = (one.file, one.name)
            if key not in seen:
                seen.add(key)
                calls = [node for node in one.nodes if isinstance(node, ast.Call)]
                waiting += [function for call in calls if (function := self._function_called(call))]
        return seen

    def _inputs(self, use: _Use) -> tuple[list[tuple[Excerpt, _Use]], list[str]]:
        """Return the program's functions that the expression calls, and the other names that it reads."""
        called: list[tuple[Excerpt, _Use]] = []
        names: dict[str, None] = {}

        def visit(one: ast.AST) -> None:
            if isinstance(one, ast.Call):
                function = self._function_called(one)
                if function is not None:
                    called.append((function, replace(_at(use, one), callers=use.callers)))
                    return
                if isinstance(one.func, ast.Attribute):
                    visit(one.func.value)
                for given in (*one.args, *(word.value for word in one.keywords)):
                    visit(given)
            elif isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name):
                text = ast.unparse(one)
                if not is_setting(text):
                    names[text if one.value.id in ("self", "cls") else one.value.id] = None
            elif isinstance(one, ast.Name):
                if not one.id.isupper() and one.id not in ("self", "cls"):
                    names[one.id] = None
            elif not (isinstance(one, ast.Attribute) and is_setting(ast.unparse(one))):
                for node in ast.iter_child_nodes(one):
                    visit(node)

        visit(use.value)
        known = {name for name, _, _ in _assignments(use.excerpt)}
        return called, [one for one in names if "." in one or one in known or _parameter(use.excerpt, one) is not None]

    def _function_called(self, call: ast.Call) -> Excerpt | None:
        """Return the called function if it is the only stored function of that name."""
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
        return self.program.only_function(name)

    def _definitions(self, use: _Use, name: str) -> Iterator[_Use]:
        """Yield what gave the name its value: assignments above, a caller's argument, or other methods for `self`."""
        own = [one for one in _assignments(use.excerpt) if one[0] == name and one[1] <= use.line]
        if own:
            yield from (replace(use, line=line, value=value, handed=False) for line, value in _latest(use, own))
        elif "." in name:
            yield from self._attributes(use, name)
        elif (at := _parameter(use.excerpt, name)) is not None:
            yield from self._arguments(use, name, at)

    def _attributes(self, use: _Use, name: str) -> Iterator[_Use]:
        assigned = [
            _Use(excerpt=excerpt, line=line, value=value, below=True)
            for excerpt in self.program.same_file(use.excerpt)
            for other, line, value in _assignments(excerpt)
            if other == name
        ]
        yield from (node for node in assigned if not isinstance(node.value, ast.Constant) or _is_conditional(node))

    def _arguments(self, use: _Use, name: str, at: int) -> Iterator[_Use]:
        """Yield what the known callers pass for the parameter, else what the only caller passes."""
        for call in use.callers or tuple(self._callers(use)):
            if not isinstance(call.value, ast.Call):
                continue
            words = [keyword.value for keyword in call.value.keywords if keyword.arg == name]
            given = words or (call.value.args if at < 0 else call.value.args[at : at + 1])
            for value in given:
                yield replace(_at(call, value), callers=call.callers, below=use.below, handed=True)

    def _is_given(self, use: _Use, name: str) -> bool:
        position = _parameter(use.excerpt, name)
        return position is not None and next(self._arguments(use, name, position), None) is not None

    def _callers(self, use: _Use) -> Iterator[_Use]:
        if use.outer:
            excerpt, line = self.program.excerpt(use.outer[0]), use.outer[0].line
            calls = _calls(excerpt, use.excerpt.name, use.outer[1:]) if excerpt and excerpt.first else ()
            yield from (call for call in calls if _holds(call, line))
            return
        found = [one for excerpt in self.program.excerpts for one in _calls(excerpt, use.excerpt.name, ())]
        yield from found if len(found) == 1 else ()

    def _is_of_rank(self, use: _Use) -> bool:
        """Whether the value depends on the rank or on chance, by its text or by a condition around it."""
        text = ast.unparse(use.value)
        by_text = _CHANCE.search(text) is not None or (self.own_rank and names_rank(text))
        return by_text or (not use.handed and _is_conditional(use))


def _at(use: _Use, value: ast.expr) -> _Use:
    """Return `value` as a use in the same function."""
    return _Use(excerpt=use.excerpt, line=use.excerpt.line_of(value), value=value, outer=use.outer)


def _outside_calls(value: ast.expr, called: Sequence[tuple[Excerpt, _Use]]) -> ast.expr:
    """Return the names of an expression that lie outside these calls."""
    calls = [call.value for _, call in called]
    inside = {id(node) for one in calls for node in ast.walk(one)}
    names = [node for node in ast.walk(value) if isinstance(node, ast.Name | ast.Attribute) and id(node) not in inside]
    return ast.Tuple(elts=list(names), ctx=ast.Load())


def _is_agreed(function: Excerpt) -> bool:
    """Whether the function calls a collective, so that its result is the same on every rank."""
    return _COLLECTIVES.search(function.text) is not None


def _results(function: Excerpt) -> Iterator[tuple[int, ast.expr]]:
    for node in _own_nodes(function.tree):
        if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom) and node.value is not None:
            yield function.line_of(node), node.value


def _own_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of the function in source order, without those of functions inside it."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if not isinstance(tree, Function) or not isinstance(node, Function | ast.Lambda):
            yield from _own_nodes(node)


def _latest(use: _Use, own: Sequence[tuple[str, int, ast.expr]]) -> Iterator[tuple[int, ast.expr]]:
    """Yield assignments backwards up to the first unconditional one; counters only if there is nothing else."""
    around = {id(block) for block in use.excerpt.blocks_around(use.line)}
    counters = [one for one in own if isinstance(one[2], ast.Constant) and isinstance(one[2].value, int)]
    for _, line, value in reversed(own if len(counters) == len(own) else [one for one in own if one not in counters]):
        yield line, value
        if all(id(block) in around for block in use.excerpt.blocks_around(line)) and line < use.line:
            return


@lru_cache(maxsize=1024)
def _assignments(excerpt: Excerpt) -> tuple[tuple[str, int, ast.expr], ...]:
    """Return name, line and value of all that the function assigns, in the order of the lines."""
    assigned: list[tuple[str, int, ast.expr]] = []
    for one in excerpt.nodes:
        pairs: list[tuple[ast.expr, ast.expr]] = []
        if isinstance(one, ast.Assign):
            pairs = [(target, one.value) for target in one.targets]
        elif isinstance(one, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and one.value is not None:
            pairs = [(one.target, one.value)]
        elif isinstance(one, ast.For | ast.AsyncFor | ast.comprehension):
            pairs = [] if ast.unparse(one.iter).startswith("range(") else [(one.target, one.iter)]
        elif isinstance(one, ast.Expr) and isinstance(one.value, ast.Call) and _CHANCE.search(ast.unparse(one.value)):
            pairs = [(argument, one.value) for argument in one.value.args]  # random.shuffle(order)
        elif isinstance(one, ast.With):
            pairs = [(item.optional_vars, item.context_expr) for item in one.items if item.optional_vars]
        for target, value in pairs:
            line = excerpt.line_of(value if isinstance(one, ast.comprehension) else target)
            assigned += [(name, line, each) for name, each in _bound(target, value)]
    return tuple(sorted(assigned, key=lambda one: one[1]))


def _bound(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Tuple | ast.List):
        parts = value.elts if isinstance(value, ast.Tuple | ast.List) else ()
        paired = len(parts) == len(target.elts)
        for at, each in enumerate(target.elts):
            yield from _bound(each, parts[at] if paired else value)
    elif isinstance(target, ast.Name | ast.Attribute):
        yield ast.unparse(target), value


def _parameter(excerpt: Excerpt, name: str) -> int | None:
    """Return the parameter's position without `self`; -1 for a variadic one; None if there is no such parameter."""
    function = excerpt.function
    if function is None:
        return None
    plain = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    plain = plain[1:] if plain[:1] in (["self"], ["cls"]) else plain
    rest = function.args.vararg
    if rest is not None and rest.arg == name:
        return -1
    words = [argument.arg for argument in function.args.kwonlyargs]
    return plain.index(name) if name in plain else len(plain) if name in words else None


def _calls(excerpt: Excerpt, name: str, outer: Chain) -> Iterator[_Use]:
    for node in excerpt.nodes:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute | ast.Name):
            continue
        if name == (node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id):
            yield _Use(excerpt=excerpt, line=excerpt.line_of(node), value=node, outer=outer)


def _holds(call: _Use, line: int | None) -> bool:
    last = (call.value.end_lineno or call.value.lineno) + call.excerpt.first - 1
    return line is not None and call.line <= line <= last


def _is_conditional(use: _Use) -> bool:
    """Whether the use is under a condition on the rank, or in an `except`."""
    around = use.excerpt.blocks_around(use.line)
    tests = [block.test for block in around if isinstance(block, ast.If)]
    handled = any(isinstance(block, ast.ExceptHandler) for block in around)
    return handled or any(use.excerpt.asks_rank(test) for test in tests)
