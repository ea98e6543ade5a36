"""Count language errors in docstrings and names.

python tools/plain_english.py            print the counts for each folder
python tools/plain_english.py --list     also print every place
"""

# ruff: noqa: SIM905  (a list of words reads better as a text)
from __future__ import annotations

import argparse
import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("harness/nsa_harness", "nsa/nsa_attention", "tools", "benchmarks", "tests/support", "evaluation")
SKIPPED = ("evaluation/rounds", "evaluation/programs")  # programs that others wrote, or that need their own words

FRAGMENT = re.compile(
    r"(Of|What|Who|Whom|Where|Whether|When|As|By|Each|That|So|Behind|Beside|Besides|Without|Only)\b(?! docstring)"
)
_PRONOUNS = frozenset({"one", "it", "this", "that", "these", "those", "which", "what", "whom", "whose", "who", "so"})
_IRREGULAR = frozenset(
    "begun begun borne bought bound bred broken brought built caught chosen come cut done drawn driven eaten fallen "
    "fed felt fought found forgotten forked given gone grown had heard held hidden hung kept known laid led left lent "
    "lost made meant met paid put read run said seen sent set shown shut slept sold spent spoken split stood stuck "
    "sworn taken taught thought told torn understood won woken worn written".split()
)
# Nouns, adjectives, verbs in the imperative, and names that torch, pytest or the standard library prescribe.
_ALLOWED = frozenset(
    "bed need speed seed red feed embed exceed proceed succeed bleed shed weed deed breed greed indeed hundred "
    "cut put read run set split hidden come shut".split()
)


@dataclass(frozen=True, kw_only=True)
class LanguageFault:
    """A language error in a docstring or name, with its location."""

    kind: str
    path: str
    line: int
    text: str


def faults() -> Iterator[LanguageFault]:
    """Yield every language error in the code of this repository."""
    for folder in FOLDERS:
        classes: dict[str, list[tuple[str, int]]] = defaultdict(list)
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if name.startswith(SKIPPED) or "__pycache__" in name:
                continue
            tree = ast.parse(path.read_text(encoding="utf-8"))
            yield from _docstrings(tree, name)
            yield from _names(tree, name)
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    classes[node.name].append((name, node.lineno))
        for class_name, places in sorted(classes.items()):
            for name, line in places[1:]:
                yield LanguageFault(kind="class name used twice", path=name, line=line, text=class_name)


def count_docstrings() -> int:
    """Return the number of docstrings in the code of this repository."""
    return sum(
        ast.get_docstring(node) is not None
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if not path.relative_to(ROOT).as_posix().startswith(SKIPPED)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, _DOCUMENTED)
    )


_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _docstrings(tree: ast.Module, name: str) -> Iterator[LanguageFault]:
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED):
            text = ast.get_docstring(node) or ""
            is_claim = text.startswith("Whether ") and _returns_bool(node)
            if FRAGMENT.match(text) and not is_claim:
                line = node.body[0].lineno
                yield LanguageFault(
                    kind="docstring begins with a fragment", path=name, line=line, text=text.split("\n")[0]
                )


def _returns_bool(node: ast.AST) -> bool:
    return isinstance(returns := getattr(node, "returns", None), ast.Name) and returns.id == "bool"


def _names(tree: ast.Module, name: str) -> Iterator[LanguageFault]:
    for node in ast.walk(tree):
        for kind, text, line in _defined(node):
            words = text.strip("_").split("_")
            if len(words) == 1 and names_nothing(words[0]):
                yield LanguageFault(kind=f"{kind} names nothing", path=name, line=line, text=text)


def _defined(node: ast.AST) -> Iterator[tuple[str, str, int]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        if not _returns_bool(node):
            yield "function", node.name, node.lineno
    elif isinstance(node, ast.arg):
        if not (isinstance(node.annotation, ast.Name) and node.annotation.id == "bool"):
            yield "parameter", node.arg, node.lineno
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield "variable", node.id, node.lineno
    elif isinstance(node, ast.ClassDef):
        yield "class", node.name.lower(), node.lineno


def names_nothing(word: str) -> bool:
    """Return whether the word is only a participle or pronoun, and therefore says nothing as a name."""
    if word in _PRONOUNS or (word in _IRREGULAR and word not in _ALLOWED):
        return True
    return len(word) > 4 and word.endswith("ed") and word not in _ALLOWED


def main() -> None:
    """Print the number of language errors in each folder and, with `--list`, every error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print every place")
    places = list(faults())
    if parser.parse_args().list:
        for place in places:
            print(f"{place.path}:{place.line}: {place.kind}: {place.text}")
    counts = Counter((place.kind, next(f for f in FOLDERS if place.path.startswith(f))) for place in places)
    for (kind, folder), number in sorted(counts.items()):
        print(f"{number:5}  {folder:22} {kind}")
    print(f"{count_docstrings():5}  docstrings in all")


if __name__ == "__main__":
    main()
