"""Read YAML 1.2 into a tree that keeps the line and column of each value.

The tree is built from parser events, so that hostile text cannot expand aliases, construct objects or exhaust the
stack.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
    StreamStartEvent,
)

from nsa_harness.core.raw_bytes import with_raw_bytes

DEPTH_LIMIT = 16  # levels of nesting
NODE_LIMIT = 20_000  # keys and values in one file

Scalar = str | int | float | bool | None
Plain = Scalar | list["Plain"] | dict[str, "Plain"]


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The origin of a value: a position in a file, or a source such as "command line"."""

    source: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}:{self.column}"


@dataclass(frozen=True, kw_only=True)
class Node:
    """A value in a YAML file, with its line and column."""

    origin: Origin
    content: Scalar | tuple[Node, ...] | dict[str, Node]


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """An error in a file that the user has to fix."""

    origin: Origin
    key: str  # dotted; "" for the whole file
    message: str  # what is wrong, and what to do

    def __str__(self) -> str:
        return ": ".join(part for part in (str(self.origin), self.key, self.message) if part)


def in_order(mistakes: Iterable[Mistake]) -> tuple[Mistake, ...]:
    """Return the errors sorted by line and column."""
    return tuple(sorted(mistakes, key=lambda mistake: (mistake.origin.line or 0, mistake.origin.column or 0)))


@dataclass(frozen=True, kw_only=True)
class ParsedYaml:
    """The content of a YAML document, with the errors found in it."""

    root: Node | None  # None: the text is not YAML
    mistakes: tuple[Mistake, ...]


@lru_cache(maxsize=512)  # parsing is slow, and one command may read the same scenario files several times
def parse_yaml(text: str, source: str) -> ParsedYaml:
    """Parse a YAML document from the file `source`. Syntax errors and duplicate keys are returned."""
    return _build(_Builder(source), text)


def _build(builder: _Builder, text: str) -> ParsedYaml:
    try:
        root: Node | None = builder.document(text)
    except _UnreadableError as error:
        return ParsedYaml(root=None, mistakes=(*builder.mistakes, error.mistake))
    return ParsedYaml(root=root, mistakes=in_order(builder.mistakes))


def parse_verbatim(text: str, source: str) -> ParsedYaml:
    """Parse a YAML document, keeping every scalar as a string. Syntax errors are returned instead of raised."""
    return _build(_VerbatimBuilder(source), text)


def plain(node: Node) -> Plain:
    """Return the node as plain maps, lists and scalars, without lines and columns."""
    if isinstance(node.content, dict):
        return {key: plain(child) for key, child in node.content.items()}
    if isinstance(node.content, tuple):
        return [plain(child) for child in node.content]
    return node.content


def merge(under: Node, over: Node) -> Node:
    """Return a tree that merges two trees, in which values in `over` replace those in `under`."""
    if not (isinstance(under.content, dict) and isinstance(over.content, dict)):
        return over
    content = dict(under.content)
    for key, child in over.content.items():
        content[key] = merge(content[key], child) if key in content else child
    return replace(over, content=content)


def tree_of_key(key: str, value: Node) -> Node:
    """Return a tree that contains only the dotted key `key`, such as "gc.mode", with this value."""
    for name in reversed(key.split(".")):
        value = Node(origin=value.origin, content={name: value})
    return value


def without(node: Node, keys: Sequence[str]) -> Node:
    """Return a copy of the map `node` without the given top-level keys."""
    assert isinstance(node.content, dict)
    return replace(node, content={key: child for key, child in node.content.items() if key not in keys})


def origin_of(node: Node, location: Sequence[str | int]) -> Origin:
    """Return the origin of the value at `location`, or of its nearest existing parent."""
    for step in location:
        content = node.content
        if isinstance(content, dict) and step in content:
            node = content[str(step)]
        elif isinstance(content, tuple) and isinstance(step, int) and step < len(content):
            node = content[step]
        else:
            break
    return node.origin


def from_plain(value: Plain, origin: Origin) -> Node:
    """Return a tree for a plain value, in which every node has the same origin."""
    if isinstance(value, Mapping):
        return Node(origin=origin, content={str(key): from_plain(child, origin) for key, child in value.items()})
    if isinstance(value, list):
        return Node(origin=origin, content=tuple(from_plain(child, origin) for child in value))
    return Node(origin=origin, content=value)


class _UnreadableError(Exception):
    """Raised if a text is not a single valid YAML document."""

    def __init__(self, mistake: Mistake) -> None:
        self.mistake = mistake
        super().__init__(str(mistake))


class _Builder:
    """A builder that turns parser events into a YAML tree and limits the tree's size and depth."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.mistakes: list[Mistake] = []
        self._nodes = 0

    def document(self, text: str) -> Node:
        """Return the root node of a YAML document."""
        events = self._events(text)
        if isinstance(next(event for event in events if not isinstance(event, StreamStartEvent)), StreamEndEvent):
            raise self._unreadable(
                None, "the file is empty; `nsa-harness explain ddp_onestep` shows a complete scenario"
            )
        root = self._node(next(events), events, path=())
        next(events)  # the end of the document
        if isinstance(extra := next(events), DocumentStartEvent):
            raise self._unreadable(extra, "a second document begins here; write one scenario per file")
        return root

    def _events(self, text: str) -> Iterator[Event]:
        try:
            yield from YAML(typ="safe", pure=True).parse(text)
        except MarkedYAMLError as error:
            mark = error.problem_mark
            origin = self._origin(mark.line, mark.column) if mark else self._origin(0, 0)
            raise _UnreadableError(Mistake(origin=origin, key="", message=_syntax_message(error))) from None
        except (YAMLError, ValueError) as error:
            raise _UnreadableError(self._character_mistake(text, error)) from None

    def _character_mistake(self, text: str, error: Exception) -> Mistake:
        position = getattr(error, "position", 0)
        line = text.count("\n", 0, position)
        column = position - (text.rfind("\n", 0, position) + 1)
        character = text[position : position + 1]
        message = _refused_character(character) if character else "is not YAML"
        return Mistake(origin=self._origin(line, column), key="", message=message)

    def _node(self, event: Event, events: Iterator[Event], path: tuple[str, ...], at: Origin | None = None) -> Node:
        self._check(event, path)
        origin = at or self._origin(event.start_mark.line, event.start_mark.column)
        if isinstance(event, MappingStartEvent):
            return Node(origin=origin, content=self._mapping(events, path))
        if isinstance(event, SequenceStartEvent):
            return Node(origin=origin, content=tuple(self._items(events, path)))
        content = self._scalar(event)
        if isinstance(content, str) and "\0" in content:
            # The kernel ends a text at this character: no argument, environment variable or path can contain it.
            self.mistakes.append(Mistake(origin=origin, key=".".join(path), message=_refused_character("\0")))
        return Node(origin=origin, content=content)

    def _items(self, events: Iterator[Event], path: tuple[str, ...]) -> Iterator[Node]:
        index = 0
        while not isinstance(event := next(events), SequenceEndEvent):
            yield self._node(event, events, (*path, str(index)))
            index += 1

    def _mapping(self, events: Iterator[Event], path: tuple[str, ...]) -> dict[str, Node]:
        content: dict[str, Node] = {}
        while not isinstance(event := next(events), MappingEndEvent):
            self._check(event, path)
            if not isinstance(event, ScalarEvent):
                raise self._unreadable(event, "a key must be one word, not a list or a map")
            key, at = str(event.value), self._origin(event.start_mark.line, event.start_mark.column)
            value = self._node(next(events), events, (*path, key), at)
            if key in content:
                message = f"given twice, first in line {content[key].origin.line}; keep one"
                self.mistakes.append(Mistake(origin=at, key=".".join((*path, key)), message=message))
            else:
                content[key] = value
        return content

    def _check(self, event: Event, path: tuple[str, ...]) -> None:
        """Raise _UnreadableError if the document is too large or too deep, or uses anchors or tags."""
        self._nodes += 1
        if self._nodes > NODE_LIMIT:
            raise self._unreadable(event, f"more than {NODE_LIMIT} values; a scenario has a few dozen")
        if len(path) > DEPTH_LIMIT:
            raise self._unreadable(event, f"nested deeper than {DEPTH_LIMIT} levels; a scenario has at most five")
        if isinstance(event, AliasEvent) or getattr(event, "anchor", None):
            raise self._unreadable(event, "anchors and aliases are not supported; share keys with `extends: PARENT`")
        if tag := getattr(event, "tag", None):
            raise self._unreadable(event, f"the tag {value_text(str(tag))} is not supported; remove it")

    def _scalar(self, event: Event) -> Scalar:
        assert isinstance(event, ScalarEvent)
        is_plain = event.implicit[0] and not event.style
        try:
            return scalar(event.value) if is_plain else str(event.value)
        except ValueError:  # Python refuses to parse an integer with thousands of digits
            raise self._unreadable(event, "a number with too many digits") from None

    def _unreadable(self, event: Event | None, message: str) -> _UnreadableError:
        mark = event.start_mark if event is not None else None
        origin = self._origin(mark.line, mark.column) if mark else self._origin(0, 0)
        return _UnreadableError(Mistake(origin=origin, key="", message=message))

    def _origin(self, line: int, column: int) -> Origin:
        return Origin(source=self.source, line=line + 1, column=column + 1)


def _refused_character(character: str) -> str:
    return f"the character U+{ord(character):04X} is not allowed in a YAML file"


class _VerbatimBuilder(_Builder):
    """A builder of a YAML tree that keeps every scalar as a string."""

    def _scalar(self, event: Event) -> Scalar:
        assert isinstance(event, ScalarEvent)
        return str(event.value)


# The core schema of YAML 1.2. In it, `off`, `yes`, `0:6` and `1:30` are text.
_SCALARS: tuple[tuple[re.Pattern[str], Callable[[str], Scalar]], ...] = (
    (re.compile(r"~|null|Null|NULL|"), lambda _: None),
    (re.compile(r"true|True|TRUE"), lambda _: True),
    (re.compile(r"false|False|FALSE"), lambda _: False),
    (re.compile(r"[-+]?[0-9]+"), int),
    (re.compile(r"0o[0-7]+"), lambda text: int(text[2:], 8)),
    (re.compile(r"0x[0-9a-fA-F]+"), lambda text: int(text[2:], 16)),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
    (re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"), lambda text: float(text.replace(".", ""))),
)


def scalar(text: str) -> Scalar:
    """Return the value of an unquoted YAML scalar. Raise ValueError if an integer has too many digits."""
    for pattern, convert in _SCALARS:
        if pattern.fullmatch(text):
            return convert(text)
    return text


def value_text(value: object, limit: int = 60) -> str:
    """Return a value as text for a message: quoted, escaped, and cut after `limit` characters."""
    if isinstance(value, str):
        return f'"{visible(value, limit)}"'
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    return visible(str(value), limit)


def visible(text: str, limit: int = 200) -> str:
    """Return `text` on one line, with control characters escaped, cut off after `limit` characters."""
    cut = text[:limit] + "..." if len(text) > limit else text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in with_raw_bytes(cut)
    )


def _syntax_message(error: MarkedYAMLError) -> str:
    problem = visible(str(error.problem or "is not YAML"))
    if "'\\\\t'" in problem or "'\\t'" in problem:
        return "indented with a tab; YAML allows only spaces"
    if problem.startswith("mapping values"):
        return "a key is not allowed here; put a text that contains `: ` in quotes, or check the indentation"
    context = f" {visible(str(error.context))}" if error.context else ""
    return f"not YAML: {problem}{context}"
