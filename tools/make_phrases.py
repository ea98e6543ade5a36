"""Rewrites docs/phrases.md: every sentence that a user can see, to be read from top to bottom.

python tools/make_phrases.py
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
DOCUMENT = REPOSITORY / "docs" / "phrases.md"
HARNESS = REPOSITORY / "harness"
# What these hold is for other programs, or is told in a table of its own (docs/findings.md has causes.py).
SILENT = ("probe/", "fork_server/", "faults/", "core/diagnosis/causes.py")
_WORD = re.compile(r"[A-Za-z]{2,}")
# Patterns, code and words for other programs: no sentence has these.
_CODE = re.compile(
    r"\(\?|\\[a-z.]|\[\^|\[0-9\]|^[\w.]+\(|^import |^from [\w.]+ import|; import|[<>]{3}|</?\w+>|^--?\w|^\W*$"
    r"|(?:\b[A-Z]+_[A-Z_]+ ?){3}|^\w+(?:, \w+)* = |^(?:for|if|with) .*:$"
)
_HEAD = """# Phrases

```text
python tools/make_phrases.py        after any change of what a user reads
```

Every phrase that a user can see, by the file that says it; `{...}` stands for a value. A test keeps this page current,
so that each change of wording is read once more, beside its neighbours. What is said of causes is in
[findings.md](findings.md).
"""


def main() -> None:
    DOCUMENT.write_text(page(), encoding="utf-8")


def page() -> str:
    parts = [_HEAD]
    for path in sorted(HARNESS.rglob("*.py")):
        name = path.relative_to(HARNESS).as_posix()
        found = list(dict.fromkeys(phrases(path.read_text(encoding="utf-8")))) if not name.startswith(SILENT) else []
        if found:
            parts.append("\n".join([f"## {name}", "", *(f"- {_shown(phrase)}" for phrase in found), ""]))
    return "\n".join(parts)


def phrases(source: str) -> Iterator[str]:
    """What reads like words for people: at least two of them, and no code."""
    tree = ast.parse(source)
    told = {id(one) for node in ast.walk(tree) for one in _no_phrases(node)}
    for node in _in_order(tree, told):
        text = " ".join(_text(node).split())
        if len(_WORD.findall(text.replace("{...}", ""))) >= 2 and " " in text and not _CODE.search(text):
            yield text


def _in_order(node: ast.AST, told: set[int]) -> Iterator[ast.AST]:
    """Strings, whole: the parts of one that is put together are not told again."""
    for child in ast.iter_child_nodes(node):
        if id(child) in told:
            continue
        if isinstance(child, ast.JoinedStr) or (isinstance(child, ast.Constant) and isinstance(child.value, str)):
            yield child
            yield from (one for part in ast.walk(child) if isinstance(part, ast.FormattedValue)
                        for one in _in_order(part.value, told))  # fmt: skip
        else:
            yield from _in_order(child, told)


def _no_phrases(node: ast.AST) -> Iterator[ast.AST]:
    """Docstrings, type annotations, and what a pattern is made of."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        first = node.body[0] if node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            yield first
    if isinstance(node, ast.AnnAssign | ast.arg) and node.annotation is not None and not isinstance(node, ast.arg):
        yield node.annotation
    if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re."):
        yield from node.args


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "{...}" for part in node.values)
    assert isinstance(node, ast.Constant)
    return node.value


def _shown(phrase: str) -> str:
    """As Markdown shows it literally."""
    fence = "``" if "`" in phrase else "`"
    return f"{fence} {phrase} {fence}" if "`" in phrase else f"{fence}{phrase}{fence}"


if __name__ == "__main__":
    main()
