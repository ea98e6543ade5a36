"""Find the line that produced a value by following assignments, returns and arguments backwards."""

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
_OPTIONS = re.compile(r"\.parse_(?:known_)?args\(")  # its result is the same on every rank
_DOTTED_NAME = re.compile(r"[\w.]+")
_MAX_STEPS = 12  # assignments between a use and the origin
_FURTHER = 3  # an origin that differs by rank is preferred if it is at most this many steps further away
_MAX_USES = 200  # uses that one search inspects

_WITHIN = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")  # frames of their own before Python 3.12

Chain = Sequence[Frame | Place]


@dataclass(frozen=True, kw_only=True)
class ValueOrigin:
    """The source line that produced a value."""

    place: Place
    differs_by_rank: (
        bool  # the value depends at this line on the rank, on chance, or on whether an exception was caught
    )


@dataclass(frozen=True, kw_only=True)
class _Use:
    """An expression on a line of the program, with the known callers of its function."""

    excerpt: Excerpt
    line: int
    value: ast.expr
    callers: tuple[_Use, ...] = ()  # calls of this function, whose arguments are its parameters
    outer: Chain = ()  # frames around the function, innermost first
    in_callee: bool = False  # the expression is in a function that was called to make the value
    is_argument: bool = False  # the expression is an argument: conditions around the call do not decide its value
    used_at: Place | None = None  # the nearest expression on the way here that does more than hand on a value


def origin_of_loop(program: ProgramSource, line: Place | Frame, outer: Chain) -> ValueOrigin | None:
    """Return the line that determines the number of iterations of the loop, or None if it is unknown."""
    excerpt = program.excerpt(line)
    if excerpt is None or line.line is None:
        return None
    loops = (node for node in excerpt.nodes if isinstance(node, ast.For | ast.While))
    loop = next((loop_node for loop_node in loops if excerpt.line_of(loop_node) == line.line), None)
    if loop is None:
        return None
    value = loop.iter if isinstance(loop, ast.For) else loop.test
    return _Search(program=program).origin(_Use(excerpt=excerpt, line=line.line, value=value, outer=outer))


def origin_of_arguments(program: ProgramSource, chain: Chain, *, own_rank: bool = True) -> ValueOrigin | None:
    """Return the line that produced the arguments of the innermost call, or None if it is unknown.

    With `own_rank`, a line that reads the rank is preferred, because it explains arguments that differ between ranks.
    """
    excerpt = program.excerpt(chain[0]) if chain else None
    if excerpt is None or chain[0].line is None:
        return None
    at = chain[0].line - excerpt.first + 1
    calls = [
        node for node in excerpt.nodes if isinstance(node, ast.Call) and node.lineno <= at <= (node.end_lineno or at)
    ]
    arguments = [argument for call in calls[:1] for argument in (*call.args, *(word.value for word in call.keywords))]
    if not arguments:
        return None
    use = _Use(excerpt=excerpt, line=chain[0].line, value=ast.Tuple(elts=arguments, ctx=ast.Load()), outer=chain[1:])
    return _Search(program=program, own_rank=own_rank).origin(use)


@dataclass(kw_only=True)
class _Search:
    """A breadth-first search from an expression back to the lines that produced its value."""

    program: ProgramSource
    own_rank: bool = True
    uses: deque[tuple[int, _Use]] = field(default_factory=deque)
    seen: set[tuple[int, int, str]] = field(default_factory=set)
    origins: list[tuple[int, ValueOrigin]] = field(default_factory=list)  # (distance from the use in steps, origin)
    # Places whose only part that differs by rank is an argument of a call -> the functions that the call reaches.
    rank_passed_to: dict[Place, frozenset[tuple[str, str]]] = field(default_factory=dict)

    def origin(self, use: _Use) -> ValueOrigin | None:
        """Return the source line that produced the value of the expression `use`, or None if it is unknown."""
        outer = tuple(frame for frame in use.outer if frame.function not in _WITHIN)
        self.uses.append((0, replace(use, outer=outer)))
        while self.uses and len(self.seen) < _MAX_USES:
            depth, each = self.uses.popleft()
            if depth < _MAX_STEPS:
                self._follow(depth, each)
        # Of equally distant origins the first is best, so only the distance is compared.
        nearest_first = [origin for _, origin in sorted(self.origins, key=lambda pair: pair[0])]
        nearest = next(iter(nearest_first), None)
        reached_functions = self.rank_passed_to.get(nearest.place, frozenset()) if nearest is not None else frozenset()
        # If the nearest line only passes the rank to a function, a line in that function explains the difference.
        inside = (
            origin
            for origin in nearest_first
            if origin.differs_by_rank and origin.place not in self.rank_passed_to
            if (origin.place.file, origin.place.function) in reached_functions
        )
        return next(inside, nearest)

    def _follow(self, depth: int, use: _Use) -> None:
        """Add the assignments and called functions that the expression depends on to the search."""
        calls, inputs = self._inputs(use)
        place = Place(file=use.excerpt.file, line=use.line, function=use.excerpt.name)
        used_at = use.used_at if _is_handed_on(use.value) else place
        for function, call in calls:
            if not _is_equal_on_ranks(function):
                for line, value in _results(function):
                    result = _Use(excerpt=function, line=line, value=value, callers=(call,), in_callee=True)
                    self._add(depth, replace(result, used_at=used_at), line)
        for name in inputs:
            key = (use.excerpt.first, hash((use.excerpt.file, use.line)), name)
            if key in self.seen:
                continue
            self.seen.add(key)
            for definition in self._definitions(use, name):
                self._add(depth, replace(definition, used_at=used_at), definition.line)

    def _add(self, depth: int, use: _Use, line: int) -> None:
        """Add an expression to the search, and record its line if it produces the value."""
        text = ast.unparse(use.value)
        if _OPTIONS.search(text):
            return
        self.uses.append((depth + 1, use))
        called, inputs = self._inputs(use)
        of_rank = self._depends_on_rank(use)
        calls = (node for node in ast.walk(use.value) if isinstance(node, ast.Call))
        nothing = not inputs and all(call.args or call.keywords for call in calls)
        plain = isinstance(use.value, ast.Name | ast.Attribute | ast.Constant) or bool(called) or nothing
        plain = plain or _WORLD.search(text) is not None
        handed_on = not use.in_callee and any(self._has_argument(use, name) for name in inputs)
        if of_rank or not (plain or handed_on):
            place = Place(file=use.excerpt.file, line=line, function=use.excerpt.name)
            reads_rank = self.own_rank and names_rank(text) and not called and _is_handed_on(use.value)
            if reads_rank and use.used_at is not None and not use.is_argument and not _is_conditional(use):
                place = use.used_at  # every rank has its own rank: what is made of it makes the difference
            self.origins.append(
                (depth + (0 if of_rank else _FURTHER), ValueOrigin(place=place, differs_by_rank=of_rank))
            )
            if called and not self._depends_on_rank(replace(use, value=_outside_calls(use.value, called))):
                self.rank_passed_to[place] = frozenset(self._reachable_functions([function for function, _ in called]))

    def _reachable_functions(self, functions: Sequence[Excerpt]) -> set[tuple[str, str]]:
        visited: set[tuple[str, str]] = set()
        waiting = list(functions)
        while waiting:
            excerpt = waiting.pop()
            key = (excerpt.file, excerpt.name)
            if key not in visited:
                visited.add(key)
                calls = [node for node in excerpt.nodes if isinstance(node, ast.Call)]
                waiting += [function for call in calls if (function := self._function_called(call))]
        return visited

    def _inputs(self, use: _Use) -> tuple[list[tuple[Excerpt, _Use]], list[str]]:
        """Return the stored functions that the expression calls, and the other names that it reads."""
        calls: list[tuple[Excerpt, _Use]] = []
        names: dict[str, None] = {}

        def visit(expression: ast.AST) -> None:
            if isinstance(expression, ast.Call):
                function = self._function_called(expression)
                if function is not None:
                    calls.append((function, replace(_use_at(use, expression), callers=use.callers)))
                    return
                if isinstance(expression.func, ast.Attribute):
                    visit(expression.func.value)
                for argument in (*expression.args, *(word.value for word in expression.keywords)):
                    visit(argument)
            elif isinstance(expression, ast.Attribute) and isinstance(expression.value, ast.Name):
                text = ast.unparse(expression)
                if not is_setting(text):
                    names[text if expression.value.id in ("self", "cls") else expression.value.id] = None
            elif isinstance(expression, ast.Name):
                if not expression.id.isupper() and expression.id not in ("self", "cls"):
                    names[expression.id] = None
            elif not (isinstance(expression, ast.Attribute) and is_setting(ast.unparse(expression))):
                for node in ast.iter_child_nodes(expression):
                    visit(node)

        visit(use.value)
        assigned_names = {name for name, _, _ in assignments(use.excerpt)}
        return calls, [
            name for name in names if "." in name or name in assigned_names or _parameter(use.excerpt, name) is not None
        ]

    def _function_called(self, call: ast.Call) -> Excerpt | None:
        """Return the stored function that `call` calls, or None unless exactly one stored function has this name."""
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
        return self.program.only_function(name)

    def _definitions(self, use: _Use, name: str) -> Iterator[_Use]:
        """Yield the expressions that gave the name its value.

        These are assignments in the function, else assignments to the attribute in the file, else arguments of callers.
        """
        own = [
            assignment for assignment in assignments(use.excerpt) if assignment[0] == name and assignment[1] <= use.line
        ]
        if own:
            yield from (replace(use, line=line, value=value, is_argument=False) for line, value in _latest(use, own))
        elif "." in name:
            yield from self._attributes(use, name)
        elif (at := _parameter(use.excerpt, name)) is not None:
            yield from self._arguments(use, name, at)

    def _attributes(self, use: _Use, name: str) -> Iterator[_Use]:
        uses = [
            _Use(excerpt=excerpt, line=line, value=value, in_callee=True)
            for excerpt in self.program.same_file(use.excerpt)
            for other, line, value in assignments(excerpt)
            if other == name
        ]
        yield from (node for node in uses if not isinstance(node.value, ast.Constant) or _is_conditional(node))

    def _arguments(self, use: _Use, name: str, at: int) -> Iterator[_Use]:
        """Yield the arguments that callers pass for the parameter `name`."""
        for call in use.callers or tuple(self._callers(use)):
            if not isinstance(call.value, ast.Call):
                continue
            words = [keyword.value for keyword in call.value.keywords if keyword.arg == name]
            values = words or (call.value.args if at < 0 else call.value.args[at : at + 1])
            for value in values:
                yield replace(_use_at(call, value), callers=call.callers, in_callee=use.in_callee, is_argument=True)

    def _has_argument(self, use: _Use, name: str) -> bool:
        position = _parameter(use.excerpt, name)
        return position is not None and next(self._arguments(use, name, position), None) is not None

    def _callers(self, use: _Use) -> Iterator[_Use]:
        if use.outer:
            excerpt, line = self.program.excerpt(use.outer[0]), use.outer[0].line
            calls = _calls(excerpt, use.excerpt.name, use.outer[1:]) if excerpt and excerpt.first else ()
            yield from (call for call in calls if _contains_line(call, line))
            return
        callers = [call for excerpt in self.program.excerpts for call in _calls(excerpt, use.excerpt.name, ())]
        yield from callers if len(callers) == 1 else ()

    def _depends_on_rank(self, use: _Use) -> bool:
        """Return whether the value of an expression depends on the rank or on randomness."""
        text = ast.unparse(use.value)
        by_text = _CHANCE.search(text) is not None or (self.own_rank and names_rank(text))
        return by_text or (not use.is_argument and _is_conditional(use))


def _is_handed_on(value: ast.expr) -> bool:
    """Return whether an expression only reads a value, such as `args.rank`, `get_rank()` or
    `int(os.environ["RANK"])`.
    """
    if isinstance(value, ast.Call):
        converts = isinstance(value.func, ast.Name) and value.func.id in ("int", "str")
        is_read = not value.args and not value.keywords and _DOTTED_NAME.fullmatch(ast.unparse(value.func)) is not None
        return is_read or (converts and len(value.args) == 1 and _is_handed_on(value.args[0]))
    if isinstance(value, ast.Subscript):
        return ast.unparse(value.value).endswith("environ")
    return isinstance(value, ast.Name | ast.Attribute | ast.Constant)


def _use_at(use: _Use, value: ast.expr) -> _Use:
    return _Use(excerpt=use.excerpt, line=use.excerpt.line_of(value), value=value, outer=use.outer)


def _outside_calls(value: ast.expr, calls_with_uses: Sequence[tuple[Excerpt, _Use]]) -> ast.expr:
    """Return a tuple node of the names in `value` that are not part of the given calls."""
    calls = [call.value for _, call in calls_with_uses]
    inside = {id(node) for call in calls for node in ast.walk(call)}
    names = [node for node in ast.walk(value) if isinstance(node, ast.Name | ast.Attribute) and id(node) not in inside]
    return ast.Tuple(elts=list(names), ctx=ast.Load())


def _is_equal_on_ranks(function: Excerpt) -> bool:
    return _COLLECTIVES.search(function.text) is not None


def _results(function: Excerpt) -> Iterator[tuple[int, ast.expr]]:
    for node in _own_nodes(function.tree):
        if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom) and node.value is not None:
            yield function.line_of(node), node.value


def _own_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the syntax nodes of a function in source order, except those of nested functions."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if not isinstance(tree, Function) or not isinstance(node, Function | ast.Lambda):
            yield from _own_nodes(node)


def _latest(use: _Use, own: Sequence[tuple[str, int, ast.expr]]) -> Iterator[tuple[int, ast.expr]]:
    """Yield the line and value of each assignment, latest first, up to one that is always executed."""
    around = {id(block) for block in use.excerpt.blocks_around(use.line)}
    counters = [
        assignment
        for assignment in own
        if isinstance(assignment[2], ast.Constant) and isinstance(assignment[2].value, int)
    ]
    for _, line, value in reversed(
        own if len(counters) == len(own) else [assignment for assignment in own if assignment not in counters]
    ):
        yield line, value
        if all(id(block) in around for block in use.excerpt.blocks_around(line)) and line < use.line:
            return


@lru_cache(maxsize=1024)
def assignments(excerpt: Excerpt) -> tuple[tuple[str, int, ast.expr], ...]:
    """Return (name, line, value) for each assignment in the function, sorted by line."""
    result: list[tuple[str, int, ast.expr]] = []
    for node in excerpt.nodes:
        pairs: list[tuple[ast.expr, ast.expr]] = []
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
            pairs = [(node.target, node.value)]
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            pairs = [] if ast.unparse(node.iter).startswith("range(") else [(node.target, node.iter)]
        elif (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _CHANCE.search(ast.unparse(node.value))
        ):
            pairs = [(argument, node.value) for argument in node.value.args]  # random.shuffle(order)
        elif isinstance(node, ast.With):
            pairs = [(item.optional_vars, item.context_expr) for item in node.items if item.optional_vars]
        for target, value in pairs:
            line = excerpt.line_of(value if isinstance(node, ast.comprehension) else target)
            result += [(name, line, each) for name, each in _bindings(target, value)]
    return tuple(sorted(result, key=lambda assignment: assignment[1]))


def _bindings(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Tuple | ast.List):
        parts = value.elts if isinstance(value, ast.Tuple | ast.List) else ()
        has_pairs = len(parts) == len(target.elts)
        for at, each in enumerate(target.elts):
            yield from _bindings(each, parts[at] if has_pairs else value)
    elif isinstance(target, ast.Name | ast.Attribute):
        yield ast.unparse(target), value


def _parameter(excerpt: Excerpt, name: str) -> int | None:
    """Return the position of the parameter, not counting `self`, or -1 for *args, or None if there is none."""
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


def _contains_line(call: _Use, line: int | None) -> bool:
    last = (call.value.end_lineno or call.value.lineno) + call.excerpt.first - 1
    return line is not None and call.line <= line <= last


def _is_conditional(use: _Use) -> bool:
    around = use.excerpt.blocks_around(use.line)
    tests = [block.test for block in around if isinstance(block, ast.If)]
    in_handler = any(isinstance(block, ast.ExceptHandler) for block in around)
    return in_handler or any(use.excerpt.reads_rank(test) for test in tests)
