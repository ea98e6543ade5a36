"""Correct mutations whose statements have been moved or renamed."""

from __future__ import annotations

import argparse
import ast
import functools
import keyword
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from mutating import (
    CUT,
    DEFINITIONS,
    ENTRIES,
    ROOT,
    SOURCES,
    Anchors,
    Change,
    Mutation,
    Statement,
    Unclear,
    cut,
    parsed,
    read,
    unparsed,
    unquoted,
    written,
)


def change_of(anchors: Anchors, node: ast.AST, do: str, is_common: Callable[[str], bool]) -> Change:
    """Return the shortest description of a change to `node` that identifies the node.

    `is_common` tells which statements occur in several places.
    """
    statement = next(one for one in anchors.statements if one.node is node or node in one.parts)
    change = Change(
        function=statement.function if is_common(statement.text) else "",
        statement=cut(statement.text),
        expression="" if node is statement.node else cut(unparsed(node)),
        do=do,
    )
    nodes = [found for one in anchors.matching(change) for found in one.nodes(change.expression)]
    return replace(change, nth=nodes.index(node) + 1 if len(nodes) > 1 else 0)


class Sources:
    """All source files that can be mutated."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        paths = sorted(path for folder in SOURCES for path in (root / folder).rglob("*.py"))
        self.files = {
            str(path.relative_to(root)): Anchors(ast.parse(path.read_text(encoding="utf-8"))) for path in paths
        }
        self._counts = Counter(unquoted(cut(one.text)) for anchors in self.files.values() for one in anchors.statements)

    def is_common(self, statement: str) -> bool:
        return self._counts[unquoted(cut(statement))] > 1

    def problem(self, mutation: Mutation) -> str | None:
        """Return the reason why the mutation does not match exactly one place in its file, or None if it does."""
        if (anchors := self.files.get(mutation.file)) is None:
            return "no such file"
        try:
            for change in mutation.changes:
                anchors.find(change)
        except Unclear as unclear:
            return str(unclear)
        return None

    def follow(self, mutation: Mutation, old: Anchors | None = None) -> Mutation | None:
        """Return the mutation adapted to the current code, or None unless exactly one place matches.

        The search looks for the statement in its own function and file, then in a function of the same name in another
        file, then in another function, and finally with other names. `old` is the file for which the entry was written.
        Without `old`, a renamed function with a changed header is not found.
        """
        for fit in (_fits_function, _fits_anywhere, functools.partial(_fits_renamed, old=old)):
            if found := self._refound(mutation, mutation.file, fit):
                return found
            others = [found for file in self.files if (found := self._refound(mutation, file, fit))]
            if len(others) > 1 and fit is not _fits_anywhere:
                others = _nearest(others, mutation.file)
            if len(others) == 1:
                return others[0]
        return None

    def _refound(self, mutation: Mutation, file: str, fit: Fit) -> Mutation | None:
        """Return the mutation adapted to the current code of `file`, or None if one of its changes does not match."""
        if (anchors := self.files.get(file)) is None:
            return None
        changes = [fit(anchors, change) for change in mutation.changes]
        if None in changes:
            return None
        again = tuple(change_of(anchors, anchors.find(one), one.do, self.is_common) for one in changes if one)
        return replace(mutation, file=file, changes=again)


Fit = Callable[[Anchors, Change], Change | None]


def _nearest(mutations: Sequence[Mutation], file: str) -> list[Mutation]:
    """Return the mutations whose file paths share the most trailing parts with `file`."""

    def likeness(mutation: Mutation) -> int:
        pairs = zip(reversed(Path(mutation.file).parts), reversed(Path(file).parts), strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    most = max(map(likeness, mutations))
    return [one for one in mutations if likeness(one) == most > 0]


def _fits_function(anchors: Anchors, change: Change) -> Change | None:
    try:
        anchors.find(change)
    except Unclear:
        return None
    return change


def _fits_anywhere(anchors: Anchors, change: Change) -> Change | None:
    return _fits_function(anchors, replace(change, function=""))


def _fits_renamed(anchors: Anchors, change: Change, *, old: Anchors | None) -> Change | None:
    """Return the change adapted to a statement that differs only in names, or None if there is no such statement."""
    was = _statement_of(old, change) if old else None
    fitting: dict[int, list[Change]] = {}
    for now in anchors.statements:
        if isinstance(now.node, DEFINITIONS):
            names = _renaming(was.whole, now.whole) if was and isinstance(was.node, type(now.node)) else None
        else:
            names = _renaming(change.statement, now.text)
        if names is not None:
            fitting.setdefault(len(names), []).append(
                Change(
                    function=now.function,
                    statement=cut(now.text),
                    expression=_renamed(change.expression, names),
                    nth=change.nth,
                    do=_renamed(change.do, names, after=len(change.do.partition(" ")[0])),
                )
            )
    best = fitting[min(fitting)] if fitting else []
    best = [one for one in best if one.function == change.function] or best
    return _fits_function(anchors, best[0]) if len(best) == 1 else None


def _statement_of(anchors: Anchors, change: Change) -> Statement | None:
    found = anchors.matching(change)
    return found[0] if len(found) == 1 else None


@functools.lru_cache(maxsize=100_000)
def _words(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\w+|[^\w\s]", text))


def _renaming(was: str, now: str) -> dict[str, str] | None:
    """Map each changed name to its new name, given two versions of a text, or return None if they differ too much."""
    old, new = _words(was.removesuffix(CUT)), _words(now)
    if was.endswith(CUT):
        old = old[:-1]
        new = new[: len(old)]
    if len(old) != len(new):
        return None
    names: dict[str, str] = {}
    for one, other in zip(old, new, strict=True):
        is_name = one.isidentifier() and other.isidentifier() and not {one, other} & set(keyword.kwlist)
        if names.setdefault(one, other) != other or (one != other and not is_name):
            return None
    known = [one for one in names if one.isidentifier() and not keyword.iskeyword(one)]
    changed = {one: names[one] for one in known if names[one] != one}
    return changed if 2 * len(changed) <= len(known) and len(set(names.values())) == len(names) else None


def _renamed(text: str, names: dict[str, str], *, after: int = 0) -> str:
    return text[:after] + re.sub(r"\w+", lambda word: names.get(word[0], word[0]), text[after:])


def _text_at(revision: str, file: str) -> str | None:
    done = subprocess.run(["git", "show", f"{revision}:{file}"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Check, sort and correct the entries of tests/mutations.json.")
    parser.add_argument("--fix", action="store_true", help="rewrite the entries whose statement is found elsewhere")
    parser.add_argument("--since", default="HEAD", metavar="REVISION", help="the tree that the entries fit")
    options = parser.parse_args(arguments)
    sources, entries, unclear = Sources(), [], 0
    for entry in read():
        problem = sources.problem(entry)
        text = _text_at(options.since, entry.file) if problem else None
        new = sources.follow(entry, parsed(text) if text else None) if problem else entry
        if new is None or (problem and not options.fix):
            unclear += 1
            print(f"{entry.file}: {problem}\n    {f'--fix: {new.name}' if new else entry.name}")
        elif problem:
            print(f"{entry.name}\n    now {new.name}")
        entries.append(new if new is not None and options.fix else entry)
    ENTRIES.write_text(written(entries), encoding="utf-8")
    print(f"{len(entries)} entries, {unclear} of them without a place")
    return 1 if unclear else 0
