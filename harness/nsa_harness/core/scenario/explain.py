"""The output of `nsa-harness explain` about a scenario."""

from __future__ import annotations

import json
from collections.abc import Iterator

from nsa_harness.core.plan import RunSpec, Skip
from nsa_harness.core.scenario.checks import as_plain
from nsa_harness.core.scenario.scenario import Scenario
from nsa_harness.core.scenario.yaml_tree import Node, Origin, Plain, scalar

_COLUMN = 44
_BARE_WORD_STARTS = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ/.")


def scenario_lines(scenario: Scenario, tree: Node) -> Iterator[str]:
    """Yield a scenario as YAML with comments on the origin of each value in `tree`."""
    value = as_plain(scenario)
    assert isinstance(value, dict)
    for key, item in value.items():
        yield from _lines(key, item, _child(tree, key), indent="")


def resolved_lines(spec: RunSpec | Skip, command: str) -> Iterator[str]:
    """Yield YAML comments that describe the launch on this machine, or the reason why it is skipped."""
    if isinstance(spec, Skip):
        yield f"# on this machine: SKIP, {spec.reason}"
        return
    ranks = f"{spec.ranks} rank{'s' if spec.ranks > 1 else ''}"
    yield f"# on this machine: {ranks} · {spec.backend} · {spec.subject}"
    yield from (f"#   {note}" for note in spec.notes)
    if spec.not_covered:
        yield f"#   not covered: {' · '.join(spec.not_covered)}"
    yield f"#   spec_hash {spec.spec_hash}"
    yield f"#   {command}"


def _lines(key: str, value: Plain, node: Node | None, indent: str) -> Iterator[str]:
    if isinstance(value, dict) and value:
        yield f"{indent}{key}:"
        for name, item in value.items():
            yield from _lines(name, item, _child(node, name), indent + "  ")
        return
    origin = Origin(source="default") if node is None else node.origin
    place = origin.source if origin.line is None else f"{origin.source}:{origin.line}"
    yield f"{f'{indent}{key}: {_flow(value)}':<{_COLUMN}}  # {place}"


def _child(node: Node | None, key: str) -> Node | None:
    return node.content.get(key) if node is not None and isinstance(node.content, dict) else None


def _flow(value: Plain) -> str:
    """Return a value as a single line of YAML."""
    if isinstance(value, list):
        return f"[{', '.join(_flow(item) for item in value)}]"
    return value if isinstance(value, str) and _bare(value) else json.dumps(value)


def _bare(text: str) -> bool:
    """Return whether YAML reads `text` back unchanged if it is written without quotes."""
    plain_word = text[:1] in _BARE_WORD_STARTS and all(c.isalnum() or c in " _./+-" for c in text)
    return plain_word and text.isascii() and text == text.strip() and scalar(text) == text
