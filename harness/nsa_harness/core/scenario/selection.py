"""Select scenarios by the words of a command line: names, aliases, globs, tags and -k expressions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol, TypeVar

from nsa_harness.core.scenario.yaml_tree import shown
from nsa_harness.errors import UsageError, did_you_mean


class Named(Protocol):
    """The properties of a scenario that a selection reads."""

    @property
    def name(self) -> str: ...
    @property
    def family(self) -> str: ...  # the name without its matrix suffix
    @property
    def aliases(self) -> tuple[str, ...]: ...
    @property
    def tags(self) -> tuple[str, ...]: ...
    @property
    def priority(self) -> int: ...


Item = TypeVar("Item", bound=Named)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The words that select scenarios.

    Results follow the order of the patterns. Within a pattern they are sorted by priority, name and matrix order.
    """

    patterns: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()  # any of them
    expression: str | None = None


def selected(items: Sequence[Item], selection: Selection) -> tuple[Item, ...]:
    """Return the selected items. Raises UsageError if a word, or all words together, match nothing."""
    # The variants of one scenario keep the order of its matrix.
    ordered = sorted(items, key=lambda item: (-item.priority, item.family))
    chosen = list(ordered)
    if selection.patterns:
        chosen = list({id(item): item for word in selection.patterns for item in _matching(ordered, word)}.values())
    if selection.tags:
        _check_tags(items, selection.tags)
        chosen = [item for item in chosen if set(item.tags) & set(selection.tags)]
    if selection.expression is not None:
        keep = _Expression(selection.expression)
        chosen = [item for item in chosen if keep.matches(item)]
    if not chosen:
        raise UsageError(
            f"nothing selected: {_selection_text(selection)} together match none of {len(items)} scenarios"
        )
    return tuple(chosen)


def _matching(items: Sequence[Item], word: str) -> list[Item]:
    # A name takes precedence over an alias: a user's scenario may have the name that a shipped one has as alias.
    named = [item for item in items if word in (item.name, item.family)]
    matching = named or [item for item in items if any(_matches(known, word) for known in _names(item))]
    if matching:
        return matching
    names = {names for item in items for names in _names(item)}
    hint = did_you_mean(word, sorted(names)) or "; `nsa-harness list` shows all"
    raise UsageError(f"no scenario named {shown(word)}{hint}")


def _names(item: Named) -> tuple[str, ...]:
    return (item.name, item.family, *item.aliases)


def _matches(name: str, word: str) -> bool:
    return name == word or (any(c in word for c in "*?[") and fnmatchcase(name, word))


def _check_tags(items: Sequence[Named], tags: Sequence[str]) -> None:
    known_tags = sorted({tag for item in items for tag in item.tags})
    for tag in tags:
        if tag not in known_tags:
            hint = did_you_mean(tag, known_tags) or f"; known tags: {', '.join(known_tags)}"
            raise UsageError(f"no scenario has the tag {shown(tag)}{hint}")


def _selection_text(selection: Selection) -> str:
    words = [
        *selection.patterns,
        *(f"-t {tag}" for tag in selection.tags),
        *([f"-k {shown(selection.expression)}"] if selection.expression is not None else []),
    ]
    return " ".join(words) or "no pattern"


class _Expression:
    """`ddp and not (gloo or nccl)`: a word matches a part of a name or alias, or a whole tag."""

    _TOKEN = re.compile(r"\s*([()]|[^\s()]+)")

    def __init__(self, text: str) -> None:
        self.text = text
        self._tokens: list[str] = []
        self._value(lambda _: False)  # checked before there is a scenario to match

    def matches(self, item: Named) -> bool:
        return self._value(lambda word: word in item.tags or any(word in name for name in _names(item)))

    def _value(self, holds: Callable[[str], bool]) -> bool:
        self._tokens = [match[1] for match in self._TOKEN.finditer(self.text)]
        value = self._any_of(holds)
        if self._tokens:
            raise self._error(f"did not expect {shown(self._tokens[0])}")
        return value

    def _any_of(self, holds: Callable[[str], bool]) -> bool:
        value = self._all_of(holds)
        while self._take("or"):
            value = self._all_of(holds) or value
        return value

    def _all_of(self, holds: Callable[[str], bool]) -> bool:
        value = self._one(holds)
        while self._take("and"):
            value = self._one(holds) and value
        return value

    def _one(self, holds: Callable[[str], bool]) -> bool:
        if self._take("not"):
            return not self._one(holds)
        if self._take("("):
            value = self._any_of(holds)
            if not self._take(")"):
                raise self._error('expected ")"')
            return value
        if not self._tokens or self._tokens[0] in (")", "and", "or"):
            got = f", got {shown(self._tokens[0])}" if self._tokens else " at the end"
            raise self._error(f"expected a word{got}")
        return holds(self._tokens.pop(0))

    def _take(self, token: str) -> bool:
        if self._tokens and self._tokens[0] == token:
            self._tokens.pop(0)
            return True
        return False

    def _error(self, what: str) -> UsageError:
        return UsageError(f"-k {shown(self.text)}: {what}; write words with and, or, not and brackets")
