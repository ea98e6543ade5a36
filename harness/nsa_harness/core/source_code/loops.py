"""Decide whether a loop can make progress without another thread, or without anything outside the process."""

from __future__ import annotations

import ast
from functools import lru_cache

from nsa_harness.core.source_code.excerpt import parse_python

_MAX_TEXT = 4000
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
# Nodes of a condition that only reads objects of the process itself.
_READS = (
    ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Tuple, ast.List,
    ast.boolop, ast.unaryop, ast.cmpop, ast.expr_context,
)  # fmt: skip
_STEPS = (ast.While, ast.If, ast.Expr, ast.Pass, ast.Break, ast.Continue, ast.Return)
_REPORTING = (
    ast.Assign, ast.AugAssign, ast.BinOp, ast.operator, ast.JoinedStr, ast.FormattedValue, ast.Dict, ast.keyword,
    ast.With, ast.withitem,
)  # fmt: skip
_POLLS = frozenset({"sleep", "is_set", "len"})
# Functions that a reporting thread calls. None of these releases a lock or fills a queue.
_REPORTS = _POLLS | {
    "wait", "write", "writelines", "flush", "fsync", "fileno", "open", "write_text", "touch", "utime", "print", "debug",
    "info", "warning", "error", "log", "dump_traceback", "dumps", "format", "strftime", "isoformat", "now", "time",
    "monotonic", "perf_counter", "getpid", "getrusage", "str", "int", "float", "round", "repr", "send", "sendto",
    "sendall", "add_scalar", "gauge", "memory_allocated",
}  # fmt: skip
# Functions whose results change without any action of the process: files, connections, other programs, and clocks.
_OUTSIDE = frozenset({
    "exists", "lexists", "isfile", "is_file", "isdir", "is_dir", "stat", "lstat", "listdir", "scandir", "iterdir",
    "glob", "iglob", "rglob", "getmtime", "getsize", "open", "read", "readline", "read_text", "read_bytes", "connect",
    "connect_ex", "recv", "accept", "poll", "select", "urlopen", "run", "check_output", "system", "time", "time_ns",
    "monotonic", "monotonic_ns", "perf_counter", "now", "today", "is_alive", "pid_exists",
})  # fmt: skip
_tree = lru_cache(maxsize=64)(parse_python)
_SHARED = frozenset({"value"})  # attribute of multiprocessing.Value, which another process may set


def innermost_loop(text: str, line: int) -> str:
    """Return the source of the innermost loop that contains the line, or "" if there is none."""
    holders = (node for node in ast.walk(_tree(text)) if isinstance(node, (*_LOOPS, *_FUNCTIONS)))
    around = [node for node in holders if node.lineno <= line <= (node.end_lineno or 0)]
    inner = max(around, key=lambda node: (node.lineno, node.col_offset), default=None)
    text_of_loop = ast.unparse(inner) if isinstance(inner, _LOOPS) else ""
    return text_of_loop if len(text_of_loop) <= _MAX_TEXT else ""


def only_polls(loop: str) -> bool:
    """Return whether the loop only reads variables and sleeps. Only another thread can end such a loop."""
    return _contains_only(loop, (*_READS, *_STEPS), _POLLS)


def only_reports(loop: str) -> bool:
    """Return whether the loop only sleeps and writes reports. Only another thread can end such a loop.

    Reports go to a file, log or connection. The loop releases no lock, and the results of its calls decide nothing.
    """
    inside = list(ast.walk(_tree(loop)))
    tests = [
        node for branching in inside if isinstance(branching, ast.While | ast.If) for node in ast.walk(branching.test)
    ]
    called_names = {_function_name(test) for test in tests if isinstance(test, ast.Call)}
    assigned_names = {node.id for node in inside if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    decides_nothing = called_names <= {"is_set", "wait", "len"} and not assigned_names & {
        test.id for test in tests if isinstance(test, ast.Name)
    }
    takes_lock = any(isinstance(node, ast.withitem) and not isinstance(node.context_expr, ast.Call) for node in inside)
    return decides_nothing and not takes_lock and _contains_only(loop, (*_READS, *_STEPS, *_REPORTING), _REPORTS)


def looks_outside(loop: str) -> bool:
    """Return whether the loop calls a function that asks for files, connections, other programs or the time.

    Such a loop may end although nothing in the process changes.
    """
    return any(isinstance(node, ast.Call) and _function_name(node) in _OUTSIDE for node in ast.walk(_tree(loop)))


def _contains_only(loop: str, kinds: tuple[type[ast.AST], ...], calls: frozenset[str]) -> bool:
    body = _tree(loop).body
    inside = [node for statement in body for node in ast.walk(statement)]
    is_allowed = (
        _function_name(node) in calls if isinstance(node, ast.Call) else isinstance(node, kinds) for node in inside
    )
    reads_shared_value = any(isinstance(node, ast.Attribute) and node.attr in _SHARED for node in inside)
    return bool(body) and isinstance(body[0], ast.While) and not reads_shared_value and all(is_allowed)


def _function_name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
