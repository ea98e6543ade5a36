"""Select scenarios with names, tags and expressions on the command line."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol, TypeVar

from nsa_harness.core.scenario.yaml_tree import value_text
from nsa_harness.errors import UsageError, did_you_mean


class Selectable(Protocol):
    """The properties of a scenario that can be used to select it."""

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


Item = TypeVar("Item", bound=Selectable)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The command-line arguments that select scenarios."""

    patterns: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()  # a scenario needs at least one of them
    expression: str | None = None


def select_items(items: Sequence[Item], selection: Selection) -> tuple[Item, ...]:
    """Return the selected scenarios by pattern, priority and name. Raises UsageError if an argument matches none."""
    # Sorting is stable, so the variants of one scenario keep the order of its matrix.
    by_priority = sorted(items, key=lambda item: (-item.priority, item.family))
    selection_so_far = list(by_priority)
    if selection.patterns:
        selection_so_far = list(
            {id(item): item for word in selection.patterns for item in _matching(by_priority, word)}.values()
        )
    if selection.tags:
        _check_tags(items, selection.tags)
        selection_so_far = [item for item in selection_so_far if set(item.tags) & set(selection.tags)]
    if selection.expression is not None:
        expression = _Expression(selection.expression)
        selection_so_far = [item for item in selection_so_far if expression.matches(item)]
    if not selection_so_far:
        raise UsageError(f"nothing selected: none of {len(items)} scenarios matches {_selection_text(selection)}")
    return tuple(selection_so_far)


def _matching(items: Sequence[Item], word: str) -> list[Item]:
    """Return the scenarios that one pattern selects. Raise UsageError if there are none."""
    # A name takes precedence over an alias: a user's scenario may have a name that is the alias of a shipped scenario.
    exact = [item for item in items if word in (item.name, item.family)]
    matching = exact or [item for item in items if any(_matches(name, word) for name in _names(item))]
    if matching:
        return matching
    names = {name for item in items for name in _names(item)}
    hint = did_you_mean(word, sorted(names)) or "; `nsa-harness list` shows all scenarios"
    raise UsageError(f"no scenario named {value_text(word)}{hint}")


def _names(item: Selectable) -> tuple[str, ...]:
    return (item.name, item.family, *item.aliases)


def _matches(name: str, word: str) -> bool:
    return name == word or (any(c in word for c in "*?[") and fnmatchcase(name, word))


def _check_tags(items: Sequence[Selectable], tags: Sequence[str]) -> None:
    known_tags = sorted({tag for item in items for tag in item.tags})
    for tag in tags:
        if tag not in known_tags:
            hint = did_you_mean(tag, known_tags) or f"; known tags: {', '.join(known_tags)}"
            raise UsageError(f"no scenario has the tag {value_text(tag)}{hint}")


def _selection_text(selection: Selection) -> str:
    words = [
        *selection.patterns,
        *(f"-t {tag}" for tag in selection.tags),
        *([f"-k {value_text(selection.expression)}"] if selection.expression is not None else []),
    ]
    return " ".join(words) or "no pattern"


class _Expression:
    """A -k expression that selects scenarios, such as `ddp and not (gloo or nccl)`."""

    _TOKEN = re.compile(r"\s*([()]|[^\s()]+)")

    def __init__(self, text: str) -> None:
        self.text = text
        self._tokens: list[str] = []
        self._value(lambda _: False)  # raises UsageError now if the expression is invalid

    def matches(self, item: Selectable) -> bool:
        return self._value(lambda word: word in item.tags or any(word in name for name in _names(item)))

    def _value(self, word_matches: Callable[[str], bool]) -> bool:
        """Evaluate the expression. `word_matches` says which of its words are true."""
        self._tokens = [match[1] for match in self._TOKEN.finditer(self.text)]
        value = self._any_of(word_matches)
        if self._tokens:
            raise self._error(f"did not expect {value_text(self._tokens[0])}")
        return value

    def _any_of(self, word_matches: Callable[[str], bool]) -> bool:
        value = self._all_of(word_matches)
        while self._take("or"):
            value = self._all_of(word_matches) or value
        return value

    def _all_of(self, word_matches: Callable[[str], bool]) -> bool:
        value = self._term(word_matches)
        while self._take("and"):
            value = self._term(word_matches) and value
        return value

    def _term(self, word_matches: Callable[[str], bool]) -> bool:
        if self._take("not"):
            return not self._term(word_matches)
        if self._take("("):
            value = self._any_of(word_matches)
            if not self._take(")"):
                raise self._error('expected ")"')
            return value
        if not self._tokens or self._tokens[0] in (")", "and", "or"):
            actual = f", got {value_text(self._tokens[0])}" if self._tokens else " at the end"
            raise self._error(f"expected a word{actual}")
        return word_matches(self._tokens.pop(0))

    def _take(self, token: str) -> bool:
        if self._tokens and self._tokens[0] == token:
            self._tokens.pop(0)
            return True
        return False

    def _error(self, message: str) -> UsageError:
        return UsageError(f"-k {value_text(self.text)}: {message}; combine words with and, or, not and parentheses")
