"""Where a value of the program was made: from a use of it back through assignments, returns and arguments, by the
source that was kept."""

from __future__ import annotations

import ast
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from nsa_harness.core.evidence.evidence import Frame, Source
from nsa_harness.core.report import Place
from nsa_harness.core.source_code.program_source import (
    Function,
    asks_rank,
    excerpt,
    function_name,
    holders,
    is_setting,
    names_rank,
    parsed,
)

_CHANCE = re.compile(r"\brandom\b|\bsecrets\b|\buuid\d?\b|environ\b|getenv\b")
_COLLECTIVES = re.compile(r"\b(?:all_reduce|all_gather|broadcast|reduce_scatter|all_to_all)\w*\(")
_WORLD = re.compile(r"\bget_world_size\(")  # the same on every rank
_OPTIONS = re.compile(r"\.parse_(?:known_)?args\(")  # so too, whatever it was made of
_STEPS = 12  # assignments on the way
_FURTHER = 3  # by so many steps what differs by the rank may lie behind what does not
_SEEN = 200  # uses that are looked at in all

_WITHIN = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")  # frames of their own until Python 3.12

Chain = Sequence[Frame | Place]


@dataclass(frozen=True, kw_only=True)
class Origin:
    place: Place
    of_rank: bool  # who the rank is decides there, or chance, or whether an exception came


@dataclass(frozen=True, kw_only=True)
class _Use:
    """An expression at a line of the file, and who called the function that it stands in, as far as that is known."""

    kept: Source
    line: int
    value: ast.expr
    callers: tuple[_Use, ...] = ()  # calls of this function, whose arguments are its parameters
    outer: Chain = ()  # frames around the function, innermost first
    below: bool = False  # it lies in a function that was called for the value
    handed: bool = False  # an argument: who calls is decided elsewhere


@dataclass(kw_only=True)
class _Search:
    sources: Sequence[Source]
    own_rank: bool  # a value made of the rank is unlike what it should be; of a partner it is not
    uses: deque[tuple[int, _Use]] = field(default_factory=deque)
    seen: set[tuple[int, int, str]] = field(default_factory=set)
    found: list[tuple[int, bool, Place]] = field(default_factory=list)
    # Of these, calls to which the rank is only handed, and the functions that are reached by them.
    handed: dict[Place, frozenset[tuple[str, str]]] = field(default_factory=dict)


def origin_of_loop(sources: Sequence[Source], line: Place | Frame, outer: Chain) -> Origin | None:
    """Of the items or the condition of the loop that begins in this line: what decides how many rounds it goes."""
    kept = excerpt(sources, line.file, line.line)
    loops = [one for one in ast.walk(parsed(kept.text)) if isinstance(one, ast.For | ast.While)] if kept else []
    loop = next((one for one in loops if kept and one.lineno + kept.first - 1 == line.line), None)
    if kept is None or loop is None or line.line is None:
        return None
    value = loop.iter if isinstance(loop, ast.For) else loop.test
    return _origin(sources, _Use(kept=kept, line=line.line, value=value, outer=outer))


def origin_of_arguments(sources: Sequence[Source], chain: Chain, *, own_rank: bool = True) -> Origin | None:
    """Of what is given to the call in the innermost line of the chain. `own_rank`: it should not hang on the rank."""
    kept = excerpt(sources, chain[0].file, chain[0].line) if chain else None
    if kept is None or chain[0].line is None:
        return None
    at = chain[0].line - kept.first + 1
    calls = [one for one in ast.walk(parsed(kept.text)) if isinstance(one, ast.Call)]
    calls = [one for one in calls if one.lineno <= at <= (one.end_lineno or at)]
    given = [each for one in calls[:1] for each in (*one.args, *(word.value for word in one.keywords))]
    if not given:
        return None
    value = ast.Tuple(elts=given, ctx=ast.Load())
    return _origin(sources, _Use(kept=kept, line=chain[0].line, value=value, outer=chain[1:]), own_rank=own_rank)


def _origin(sources: Sequence[Source], use: _Use, *, own_rank: bool = True) -> Origin | None:
    """What lies nearest; what differs by the rank before what does not, unless it lies much further."""
    use = replace(use, outer=tuple(one for one in use.outer if one.function not in _WITHIN))
    search = _Search(sources=sources, own_rank=own_rank)
    search.uses.append((0, use))
    while search.uses and len(search.seen) < _SEEN:
        depth, one = search.uses.popleft()
        if depth < _STEPS:
            _follow(search, depth, one)
    best = min(search.found, key=lambda one: one[0], default=None)
    if best is not None and best[2] in search.handed:
        reached = search.handed[best[2]]
        made = [one for one in search.found if one[1] and one[2] not in search.handed]
        inside = [one for one in made if (one[2].file, one[2].function) in reached]
        best = min(inside, key=lambda one: one[0], default=best)
    return None if best is None else Origin(place=best[2], of_rank=best[1])


def _follow(search: _Search, depth: int, use: _Use) -> None:
    """Every name of the expression to where it got its value, every call of a function of the program into it."""
    called, inputs = _inputs(search.sources, use)
    for function, call in called:
        if not _agreed(function):
            for line, value in _results(function):
                made = _Use(kept=function, line=line, value=value, callers=(call,), below=True)
                _made(search, depth, made, line)
    for name in inputs:
        key = (use.kept.first, hash((use.kept.file, use.line)), name)
        if key in search.seen:
            continue
        search.seen.add(key)
        for one in _definitions(search.sources, use, name):
            _made(search, depth, one, one.line)


def _made(search: _Search, depth: int, use: _Use, line: int) -> None:
    """A place where the value is made, and its own inputs after it."""
    if _OPTIONS.search(ast.unparse(use.value)):
        return
    search.uses.append((depth + 1, use))
    called, inputs = _inputs(search.sources, use)
    of_rank = _of_rank(search, use)
    calls = (one for one in ast.walk(use.value) if isinstance(one, ast.Call))
    nothing = not inputs and all(one.args or one.keywords for one in calls)
    plain = isinstance(use.value, ast.Name | ast.Attribute | ast.Constant) or bool(called) or nothing
    plain = plain or _WORLD.search(ast.unparse(use.value)) is not None
    handed_on = not use.below and any(_is_given(search.sources, use, name) for name in inputs)
    if of_rank or not (plain or handed_on):
        place = Place(file=use.kept.file, line=line, function=function_name(use.kept))
        search.found.append((depth + (0 if of_rank else _FURTHER), of_rank, place))
        if called and not _of_rank(search, replace(use, value=_besides(use.value, called))):
            search.handed[place] = frozenset(_reached(search.sources, [function for function, _ in called]))


def _besides(value: ast.expr, called: Sequence[tuple[Source, _Use]]) -> ast.expr:
    """The names of an expression that stand outside of these calls."""
    calls = [call.value for _, call in called]
    inside = {id(each) for one in calls for each in ast.walk(one)}
    names = [one for one in ast.walk(value) if isinstance(one, ast.Name | ast.Attribute) and id(one) not in inside]
    return ast.Tuple(elts=list(names), ctx=ast.Load())


def _reached(sources: Sequence[Source], functions: Sequence[Source]) -> set[tuple[str, str]]:
    """File and name of these and of all that they call."""
    seen: set[tuple[str, str]] = set()
    waiting = list(functions)
    while waiting:
        one = waiting.pop()
        key = (one.file, function_name(one))
        if key not in seen:
            seen.add(key)
            calls = [each for each in ast.walk(parsed(one.text)) if isinstance(each, ast.Call)]
            waiting += [found for each in calls if (found := _function_called(sources, each))]
    return seen


def _inputs(sources: Sequence[Source], use: _Use) -> tuple[list[tuple[Source, _Use]], list[str]]:
    """Functions of the program that are called there, and what else is read: names, and attributes of `self`."""
    called: list[tuple[Source, _Use]] = []
    names: dict[str, None] = {}

    def visit(one: ast.AST) -> None:
        if isinstance(one, ast.Call):
            function = _function_called(sources, one)
            if function is not None:
                line = one.lineno + use.kept.first - 1
                called.append(
                    (function, _Use(kept=use.kept, line=line, value=one, callers=use.callers, outer=use.outer))
                )
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
            for each in ast.iter_child_nodes(one):
                visit(each)

    visit(use.value)
    known = {name for name, _, _ in _assignments(use.kept)}
    return called, [one for one in names if "." in one or one in known or _parameter(use.kept, one) is not None]


def _function_called(sources: Sequence[Source], call: ast.Call) -> Source | None:
    """The only function of that name that was kept."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
    same = [one for one in sources if function_name(one) == name]
    return same[0] if len(same) == 1 else None


def _agreed(function: Source) -> bool:
    """It asks the other ranks: what it gives is no rank's own."""
    return _COLLECTIVES.search(function.text) is not None


def _results(function: Source) -> Iterator[tuple[int, ast.expr]]:
    for one in _own_nodes(parsed(function.text)):
        if isinstance(one, ast.Return | ast.Yield | ast.YieldFrom) and one.value is not None:
            yield one.lineno + function.first - 1, one.value


def _own_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Of the function itself, in the order of its lines, without those of functions within it."""
    for one in ast.iter_child_nodes(tree):
        yield one
        if not isinstance(tree, Function) or not isinstance(one, Function | ast.Lambda):
            yield from _own_nodes(one)


def _definitions(sources: Sequence[Source], use: _Use, name: str) -> Iterator[_Use]:
    """Where the name got what it holds: in the function before, from a caller, or of `self` in other functions."""
    own = [one for one in _assignments(use.kept) if one[0] == name and one[1] <= use.line]
    if own:
        yield from (replace(use, line=line, value=value, handed=False) for line, value in _last(use, own))
    elif "." in name:
        yield from _attributes(sources, use, name)
    elif (at := _parameter(use.kept, name)) is not None:
        yield from _arguments(sources, use, name, at)


def _last(use: _Use, own: Sequence[tuple[str, int, ast.expr]]) -> Iterator[tuple[int, ast.expr]]:
    """The newest ones, back to the first that no condition left out; a mere counter where nothing else is."""
    around = {id(one) for one in holders(use.kept, use.line)}
    counters = [one for one in own if _counts(one[2])]
    for _, line, value in reversed(own if len(counters) == len(own) else [one for one in own if one not in counters]):
        yield line, value
        if all(id(one) in around for one in holders(use.kept, line)) and line < use.line:
            return


def _counts(value: ast.expr) -> bool:
    """What an `x += 1` gives."""
    return isinstance(value, ast.Constant) and isinstance(value.value, int)


def _assignments(kept: Source) -> Iterator[tuple[str, int, ast.expr]]:
    """Name, line and value of all that the function gives a name, in the order of the lines."""
    found: list[tuple[str, int, ast.expr]] = []
    for one in ast.walk(parsed(kept.text)):
        pairs: list[tuple[ast.expr, ast.expr]] = []
        if isinstance(one, ast.Assign):
            pairs = [(target, one.value) for target in one.targets]
        elif isinstance(one, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and one.value is not None:
            pairs = [(one.target, one.value)]
        elif isinstance(one, ast.For | ast.AsyncFor | ast.comprehension):
            pairs = [] if ast.unparse(one.iter).startswith("range(") else [(one.target, one.iter)]
        elif isinstance(one, ast.Expr) and isinstance(one.value, ast.Call) and _CHANCE.search(ast.unparse(one.value)):
            pairs = [(each, one.value) for each in one.value.args]  # random.shuffle(order)
        elif isinstance(one, ast.With):
            pairs = [(each.optional_vars, each.context_expr) for each in one.items if each.optional_vars]
        for target, value in pairs:
            line = (value if isinstance(one, ast.comprehension) else target).lineno + kept.first - 1
            found += [(name, line, each) for name, each in _bound(target, value)]
    return iter(sorted(found, key=lambda one: one[1]))


def _bound(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Tuple | ast.List):
        parts = value.elts if isinstance(value, ast.Tuple | ast.List) else ()
        alike = len(parts) == len(target.elts)
        for at, each in enumerate(target.elts):
            yield from _bound(each, parts[at] if alike else value)
    elif isinstance(target, ast.Name | ast.Attribute):
        yield ast.unparse(target), value


def _attributes(sources: Sequence[Source], use: _Use, name: str) -> Iterator[_Use]:
    found = [
        _Use(kept=kept, line=line, value=value, below=True)
        for kept in sources
        if kept.file == use.kept.file
        for other, line, value in _assignments(kept)
        if other == name
    ]
    yield from (one for one in found if not isinstance(one.value, ast.Constant) or _conditional(one))


def _parameter(kept: Source, name: str) -> int | None:
    """Its position, `self` not counted; -1 for what takes all the rest."""
    function = _definition(kept)
    if function is None:
        return None
    plain = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    plain = plain[1:] if plain[:1] in (["self"], ["cls"]) else plain
    rest = function.args.vararg
    if rest is not None and rest.arg == name:
        return -1
    words = [one.arg for one in function.args.kwonlyargs]
    return plain.index(name) if name in plain else len(plain) if name in words else None


def _definition(kept: Source) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    return next((one for one in ast.walk(parsed(kept.text)) if isinstance(one, Function)), None)


def _arguments(sources: Sequence[Source], use: _Use, name: str, at: int) -> Iterator[_Use]:
    """What the caller gave for the parameter: the caller that is known, else the only one."""
    for call in use.callers or tuple(_callers(sources, use)):
        if not isinstance(call.value, ast.Call):
            continue
        words = [one.value for one in call.value.keywords if one.arg == name]
        given = words or (call.value.args if at < 0 else call.value.args[at : at + 1])
        for value in given:
            line = value.lineno + call.kept.first - 1
            yield replace(call, line=line, value=value, below=use.below, handed=True)


def _is_given(sources: Sequence[Source], use: _Use, name: str) -> bool:
    position = _parameter(use.kept, name)
    return position is not None and next(_arguments(sources, use, name, position), None) is not None


def _callers(sources: Sequence[Source], use: _Use) -> Iterator[_Use]:
    name = function_name(use.kept)
    if use.outer:
        kept, line = excerpt(sources, use.outer[0].file, use.outer[0].line), use.outer[0].line
        yield from (one for one in _calls(kept, name, use.outer[1:]) if kept and kept.first and _holds(one, line))
        return
    found = [one for kept in sources for one in _calls(kept, name, ())]
    yield from found if len(found) == 1 else ()


def _holds(call: _Use, line: int | None) -> bool:
    last = (call.value.end_lineno or call.value.lineno) + call.kept.first - 1
    return line is not None and call.line <= line <= last


def _calls(kept: Source | None, name: str, outer: Chain) -> Iterator[_Use]:
    for one in ast.walk(parsed(kept.text)) if kept else ():
        named = isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute | ast.Name)
        if kept and named and name == (one.func.attr if isinstance(one.func, ast.Attribute) else one.func.id):  # type: ignore[attr-defined]
            yield _Use(kept=kept, line=one.lineno + kept.first - 1, value=one, outer=outer)  # type: ignore[attr-defined,arg-type]


def _of_rank(search: _Search, use: _Use) -> bool:
    """By what it is made under, or by its own words."""
    words = ast.unparse(use.value)
    by_words = _CHANCE.search(words) is not None or (search.own_rank and names_rank(words))
    return by_words or (not use.handed and _conditional(use))


def _conditional(use: _Use) -> bool:
    """Under a condition on the rank, or an `except`."""
    around = holders(use.kept, use.line)
    tests = [one.test for one in around if isinstance(one, ast.If)]
    handled = any(isinstance(one, ast.ExceptHandler) for one in around)
    return handled or any(asks_rank(parsed(use.kept.text), one) for one in tests)
