"""Find the functions of the program that an installed framework calls: methods of classes that inherit from it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from nsa_harness.core.evidence.evidence import Source
from nsa_harness.core.source_code.excerpt import Function, calls_in, parse_python

_MAX_LINES = 400  # longest method that is stored


def hooks(texts: Mapping[str, str], package: str) -> Iterator[Source]:
    """Yield the methods that a framework calls, with their qualified names.

    These are the methods of classes that inherit from a class of `package`, unless the program calls a method of this
    name itself. `texts` has the text of each file of the program.
    """
    modules = {file: parse_python(text) for file, text in texts.items()}
    called = {name for module in modules.values() for _, name in calls_in(ast.walk(module))}
    for file, module in modules.items():
        lines, imported = texts[file].splitlines(), _imported_from(module, package)
        classes = (node for node in ast.walk(module) if isinstance(node, ast.ClassDef))
        for node in classes:
            if any(ast.unparse(base).partition(".")[0] in imported for base in node.bases):
                for method in node.body:
                    if isinstance(method, Function) and _is_hook(method, called):
                        text = "\n".join(lines[method.lineno - 1 : method.end_lineno])
                        yield Source(file=file, first=method.lineno, text=text, hook=f"{node.name}.{method.name}")


def _is_hook(method: Function, called: set[str]) -> bool:
    is_short = (method.end_lineno or 0) - method.lineno < _MAX_LINES
    return is_short and not method.name.startswith("_") and method.name not in called and not method.decorator_list


def _imported_from(module: ast.Module, package: str) -> set[str]:
    """Return the names that the file imports from `package`, and the names by which it refers to the package."""
    names: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == package and not node.level:
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            own = [alias for alias in node.names if alias.name.partition(".")[0] == package]
            names |= {alias.asname or package for alias in own}
    return names
