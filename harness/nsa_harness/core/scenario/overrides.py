"""Change the settings of a scenario with overrides such as `gc.layers=0:4`.

Overrides come from the matrix of a scenario file, from environment variables, or from arguments.
"""

from __future__ import annotations

import itertools
import math
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
    origin_of,
    parse_yaml,
    plain,
    tree_of_key,
    visible,
    without,
)
from nsa_harness.errors import UsageError

COMMAND_LINE = "command line"
VARIANT_LIMIT = 1000  # combinations of one matrix; a run with more would take days
_OVERRIDE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)*=", re.ASCII)
_NOT_HERE = (*FILE_ONLY, "name", "aliases")


@dataclass(frozen=True, kw_only=True)
class Override:
    """A setting of a scenario, given as a dotted key, with its new value."""

    key: str
    value: Node


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A setting that a scenario matrix varies, with its values."""

    key: str
    values: tuple[Node, ...]


@dataclass(frozen=True, kw_only=True)
class Changes:
    """The changes that the command line and the user's project make to every selected scenario."""

    overrides: tuple[Override, ...] = ()
    axes: tuple[Axis, ...] = ()
    defaults: Node | None = None  # settings of the project, which apply where the scenario sets nothing


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A scenario with one combination of values from its matrix. Without a matrix, `suffix` is ""."""

    suffix: str
    tree: Node


def is_override(word: str) -> bool:
    """Return whether an argument is an override such as `gc.layers=0:4` instead of a pattern for scenario names."""
    return _OVERRIDE.match(word) is not None


def parse_override(word: str, source: str = COMMAND_LINE) -> Override:
    """Parse an override such as `gc.layers=0:4`. Raise UsageError, naming `source`, if `word` is malformed."""
    key, text = word.split("=", 1)
    if key.split(".")[0] in _NOT_HERE:
        raise UsageError(f"{source}: {key}: can be set only in a scenario file")
    if not text:
        raise UsageError(f"{source}: {key}: no value after `=`; `{key}=null` removes the value")
    document = parse_yaml(text, source)
    if document.root is None or document.mistakes:
        raise UsageError(f"{source}: {key}: {document.mistakes[0].message} in {visible(text, 60)}")
    return Override(key=key, value=from_plain(plain(document.root), Origin(source=source)))


def parse_axis(word: str, source: str = f"{COMMAND_LINE}: --matrix") -> Axis:
    """Parse the values for a matrix, such as `gc.mode=reentrant,non_reentrant`, or raise UsageError."""
    if not is_override(word):
        raise UsageError(f"{source}: expected KEY=A,B such as gc.mode=reentrant,non_reentrant, got {visible(word, 60)}")
    key, text = word.split("=", 1)
    override = parse_override(f"{key}=[{text}]", source)
    values = override.value.content
    if not isinstance(values, tuple) or not values:
        raise UsageError(f"{source}: {key}: no value after `=`")
    axis = Axis(key=key, values=values)
    mistakes = list(matrix_mistakes(with_axes(Node(origin=override.value.origin, content={}), [axis])))
    if mistakes:
        raise UsageError("\n".join(str(mistake) for mistake in mistakes))
    return axis


def with_axes(tree: Node, axes: Sequence[Axis]) -> Node:
    """Return the scenario with the settings in `axes` added to its matrix."""
    for axis in axes:
        values = Node(origin=axis.values[0].origin, content=axis.values)
        own = Node(origin=values.origin, content={"matrix": Node(origin=values.origin, content={axis.key: values})})
        tree = merge(_without_axis(tree, axis.key), own)
    return tree


def with_overrides(tree: Node, overrides: Sequence[Override]) -> Node:
    """Return the scenario with the overrides applied."""
    for override in overrides:
        tree = merge(_without_axis(tree, override.key), tree_of_key(override.key, override.value))
    return tree


def matrix_size_mistake(tree: Node) -> Mistake | None:
    """Return the error in a matrix with too many combinations of values, or None if it can be expanded."""
    axes = _axes(tree)
    count = math.prod(len(items) for _, items in axes)
    if count <= VARIANT_LIMIT:
        return None
    factors = " x ".join(str(len(items)) for _, items in axes)
    message = f"{factors} = {count} combinations; at most {VARIANT_LIMIT}"
    return Mistake(origin=origin_of(tree, ("matrix",)), key="matrix", message=message)


def variants(tree: Node) -> Iterator[Variant]:
    """Yield a scenario for each combination of matrix values, or raise UsageError if there are too many."""
    if mistake := matrix_size_mistake(tree):
        raise UsageError(str(mistake))
    axes = _axes(tree)
    bare = without(tree, ("matrix",)) if isinstance(tree.content, dict) else tree
    for values in itertools.product(*(items for _, items in axes)):
        combination = [Override(key=key, value=value) for (key, _), value in zip(axes, values, strict=True)]
        suffix = ",".join(f"{override.key}={_value_text(override.value)}" for override in combination)
        yield Variant(suffix=f"@{suffix}" if suffix else "", tree=with_overrides(bare, combination))


def matrix_mistakes(tree: Node) -> Iterator[Mistake]:
    """Yield the errors in a matrix, such as invalid values or values that appear twice."""
    for key, items in _axes(tree):
        origin = items[0].origin
        if key.split(".")[0] in _NOT_HERE or not is_override(f"{key}="):
            yield Mistake(origin=origin, key=f"matrix.{visible(key)}", message="expected a dotted key such as gc.mode")
            continue
        yield from (mistake for item in items for mistake in axis_mistakes(key, item))
        texts = [_value_text(item) for item in items]
        for text in sorted({text for text in texts if texts.count(text) > 1}):
            yield Mistake(origin=origin, key=f"matrix.{visible(key)}", message=f"{text} appears twice; keep one")


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
    """Return a value as part of a scenario's name, using only characters allowed in a directory name."""
    bare = plain(value)
    text = "+".join(str(item) for item in bare) if isinstance(bare, list) else str(bare)
    text = {"True": "true", "False": "false", "None": "null"}.get(text, text)
    return re.sub(r"[^A-Za-z0-9_.:+-]", "_", text)
