"""Loops of the program in which a thread sleeps: their text, and whether another iteration can change anything."""

from __future__ import annotations

import ast
from functools import lru_cache

_MAX_TEXT = 4000
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
# Nodes of a condition that only reads objects of the process itself.
_READS = (
    ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Tuple, ast.List,
    ast.boolop, ast.unaryop, ast.cmpop, ast.expr_context,
)  # fmt: skip
_STEPS = (ast.While, ast.If, ast.Expr, ast.Pass, ast.Break, ast.Continue, ast.Return)
_SAYS = (
    ast.Assign, ast.AugAssign, ast.BinOp, ast.operator, ast.JoinedStr, ast.FormattedValue, ast.Dict, ast.keyword,
    ast.With, ast.withitem,
)  # fmt: skip
_LOOKS = frozenset({"sleep", "is_set", "len"})
# Calls of a thread that only reports. None of these releases a lock or fills a queue.
_REPORTS = _LOOKS | {
    "wait", "write", "writelines", "flush", "fsync", "fileno", "open", "write_text", "touch", "utime", "print", "debug",
    "info", "warning", "error", "log", "dump_traceback", "dumps", "format", "strftime", "isoformat", "now", "time",
    "monotonic", "perf_counter", "getpid", "getrusage", "str", "int", "float", "round", "repr", "send", "sendto",
    "sendall", "add_scalar", "gauge", "memory_allocated",
}  # fmt: skip
_SHARED = frozenset({"value"})  # of multiprocessing.Value, which another process may set


def innermost_loop(text: str, line: int) -> str:
    """Return the loop around the line, within one function; "" if there is none, or the text is no Python."""
    holders = (node for node in ast.walk(_tree(text)) if isinstance(node, (*_LOOPS, *_FUNCTIONS)))
    around = [one for one in holders if one.lineno <= line <= (one.end_lineno or 0)]
    inner = max(around, key=lambda one: (one.lineno, one.col_offset), default=None)
    found = ast.unparse(inner) if isinstance(inner, _LOOPS) else ""
    return found if len(found) <= _MAX_TEXT else ""


def only_looks(loop: str) -> bool:
    """Whether the loop only reads objects of the process and sleeps, so that only another thread can end it."""
    return _holds(loop, (*_READS, *_STEPS), _LOOKS)


def only_reports(loop: str) -> bool:
    """Whether each iteration only reports to a file, a log or a connection; only other threads can end such a loop."""
    inside = list(ast.walk(_tree(loop)))
    tests = [node for one in inside if isinstance(one, ast.While | ast.If) for node in ast.walk(one.test)]
    asked = {_called(test) for test in tests if isinstance(test, ast.Call)}
    given = {one.id for one in inside if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    decided = asked <= {"is_set", "wait", "len"} and not given & {
        test.id for test in tests if isinstance(test, ast.Name)
    }
    locked = any(isinstance(one, ast.withitem) and not isinstance(one.context_expr, ast.Call) for one in inside)
    return decided and not locked and _holds(loop, (*_READS, *_STEPS, *_SAYS), _REPORTS)


def _holds(loop: str, kinds: tuple[type[ast.AST], ...], calls: frozenset[str]) -> bool:
    body = _tree(loop).body
    inside = [node for statement in body for node in ast.walk(statement)]
    known = (_called(one) in calls if isinstance(one, ast.Call) else isinstance(one, kinds) for one in inside)
    shared = any(isinstance(one, ast.Attribute) and one.attr in _SHARED for one in inside)
    return bool(body) and isinstance(body[0], ast.While) and not shared and all(known)


def _called(one: ast.Call) -> str:
    return one.func.attr if isinstance(one.func, ast.Attribute) else getattr(one.func, "id", "")


@lru_cache(maxsize=64)
def _tree(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module(body=[], type_ignores=[])
