"""Overrides: dotted keys that change a scenario, from its matrix, the environment or the command line."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from nsa_harness.core.scenario.checks import FILE_ONLY, axis_mistakes
from nsa_harness.core.scenario.yaml_tree import (
    Mistake,
    Node,
    Origin,
    from_plain,
    merge,
    parse_yaml,
    plain,
    tree_of_key,
    visible,
    without,
)
from nsa_harness.errors import UsageError

COMMAND_LINE = "command line"
_OVERRIDE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)*=", re.ASCII)
_NOT_HERE = (*FILE_ONLY, "name", "aliases")


@dataclass(frozen=True, kw_only=True)
class Override:
    """One dotted key and its value."""

    key: str
    value: Node


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One dotted key and the values of its matrix."""

    key: str
    values: tuple[Node, ...]


@dataclass(frozen=True, kw_only=True)
class Changes:
    """The changes that a command line makes to every scenario it selects."""

    overrides: tuple[Override, ...] = ()
    axes: tuple[Axis, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One combination of a scenario's matrix. The suffix is empty if the scenario has no matrix."""

    suffix: str
    tree: Node


def is_override(word: str) -> bool:
    """Whether the word is an override: `gc.layers=0:4` is, `ddp@gc.mode=reentrant` and `./a=b.yaml` are patterns."""
    return _OVERRIDE.match(word) is not None


def parse_override(word: str, source: str = COMMAND_LINE) -> Override:
    """Return the override that a word such as `gc.layers=0:4` describes. Raises UsageError."""
    key, text = word.split("=", 1)
    if key.split(".")[0] in _NOT_HERE:
        raise UsageError(f"{source}: {key}: can stand only in a scenario file")
    if not text:
        raise UsageError(f"{source}: {key}: no value after `=`; `{key}=null` takes the value away")
    parsed = parse_yaml(text, source)
    if parsed.root is None or parsed.mistakes:
        raise UsageError(f"{source}: {key}: {parsed.mistakes[0].what} in {visible(text, 60)}")
    return Override(key=key, value=from_plain(plain(parsed.root), Origin(source=source)))


def parse_axis(word: str, source: str = f"{COMMAND_LINE}: --matrix") -> Axis:
    """Return the axis that a word such as `gc.mode=reentrant,non_reentrant` describes. Raises UsageError."""
    if not is_override(word):
        raise UsageError(f"{source}: expected KEY=A,B such as gc.mode=reentrant,non_reentrant, got {visible(word, 60)}")
    key, text = word.split("=", 1)
    parsed = parse_override(f"{key}=[{text}]", source)
    values = parsed.value.content
    if not isinstance(values, tuple) or not values:
        raise UsageError(f"{source}: {key}: no value after `=`")
    axis = Axis(key=key, values=values)
    mistakes = list(matrix_mistakes(with_axes(Node(origin=parsed.value.origin, content={}), [axis])))
    if mistakes:
        raise UsageError("\n".join(str(mistake) for mistake in mistakes))
    return axis


def with_axes(tree: Node, axes: Sequence[Axis]) -> Node:
    """Return the tree with these axes added to its matrix. They replace the tree's own axes of the same keys."""
    for axis in axes:
        values = Node(origin=axis.values[0].origin, content=axis.values)
        own = Node(origin=values.origin, content={"matrix": Node(origin=values.origin, content={axis.key: values})})
        tree = merge(_without_axis(tree, axis.key), own)
    return tree


def with_overrides(tree: Node, overrides: Sequence[Override]) -> Node:
    """Return the tree with the overrides applied. An override of a matrix key removes that axis."""
    for override in overrides:
        tree = merge(_without_axis(tree, override.key), tree_of_key(override.key, override.value))
    return tree


def variants(tree: Node) -> Iterator[Variant]:
    """Yield each combination of the tree's matrix in the order written, or only the tree if it has no matrix."""
    axes = _axes(tree)
    bare = without(tree, ("matrix",)) if isinstance(tree.content, dict) else tree
    for values in itertools.product(*(items for _, items in axes)):
        chosen = [Override(key=key, value=value) for (key, _), value in zip(axes, values, strict=True)]
        suffix = ",".join(f"{override.key}={_value_text(override.value)}" for override in chosen)
        yield Variant(suffix=f"@{suffix}" if suffix else "", tree=with_overrides(bare, chosen))


def matrix_mistakes(tree: Node) -> Iterator[Mistake]:
    """Yield mistakes of axes: keys that only a file may have, and values that give the same name twice."""
    for key, items in _axes(tree):
        origin = items[0].origin
        if key.split(".")[0] in _NOT_HERE or not is_override(f"{key}="):
            yield Mistake(origin=origin, key=f"matrix.{visible(key)}", what="expected a dotted key such as gc.mode")
            continue
        yield from (mistake for item in items for mistake in axis_mistakes(key, item))
        texts = [_value_text(item) for item in items]
        for text in sorted({text for text in texts if texts.count(text) > 1}):
            yield Mistake(origin=origin, key=f"matrix.{visible(key)}", what=f"{text} is given twice; keep one")


def _axes(tree: Node) -> list[tuple[str, tuple[Node, ...]]]:
    matrix = tree.content.get("matrix") if isinstance(tree.content, dict) else None
    axes = matrix.content if matrix is not None and isinstance(matrix.content, dict) else {}
    return [(key, axis.content) for key, axis in axes.items() if isinstance(axis.content, tuple) and axis.content]


def _without_axis(tree: Node, key: str) -> Node:
    matrix = tree.content.get("matrix") if isinstance(tree.content, dict) else None
    if matrix is None or not isinstance(matrix.content, dict) or key not in matrix.content:
        return tree
    assert isinstance(tree.content, dict)
    return replace(tree, content={**tree.content, "matrix": without(matrix, (key,))})


def _value_text(value: Node) -> str:
    """Return a value as a part of a scenario's name, without characters that a directory name cannot have."""
    bare = plain(value)
    text = "+".join(str(item) for item in bare) if isinstance(bare, list) else str(bare)
    text = {"True": "true", "False": "false", "None": "null"}.get(text, text)
    return re.sub(r"[^A-Za-z0-9_.:+-]", "_", text)
