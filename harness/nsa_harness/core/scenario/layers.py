"""Parse a choice of model layers such as `none`, `all`, `0:6` or `[2, 6]`."""

from __future__ import annotations

import re

from nsa_harness.core.scenario.yaml_tree import value_text

_RANGE = re.compile(r"(\d{1,4}):(\d{1,4})")
_LIST = re.compile(r"\d{1,4}(,\d{1,4})*")
_SPAN = re.compile(r"(\d{1,4})-(\d{1,4})")
FORMS = 'none, all, "start:stop" with start < stop, or a list such as [2, 6]'


def parse_layers(value: object) -> str:
    """Return a choice of layers as "none", "all", "0:6" or "2,6", or raise ValueError."""
    if value in ("none", "all"):
        return str(value)
    if isinstance(value, str):
        return _canonical_text(value)
    if isinstance(value, list | tuple):
        return ",".join(str(layer) for layer in sorted(_members(value)))
    raise ValueError(f"expected {FORMS}, got {value_text(value)}")


def layers_of(choice: str, layers: int) -> tuple[int, ...]:
    """Return the numbers of the chosen layers in a model with `layers` layers, for a choice such as "0:6"."""
    if choice == "none":
        return ()
    if choice == "all":
        return tuple(range(layers))
    if ":" in choice:
        start, stop = choice.split(":")
        return tuple(range(int(start), int(stop)))
    return tuple(int(layer) for layer in choice.split(","))


def numbered_layers(choice: str) -> tuple[int, ...]:
    """Return the layer numbers in a choice such as "0:6". The result is empty for "all" and "none"."""
    return () if choice in ("", "none", "all") else layers_of(choice, 0)


def _canonical_text(text: str) -> str:
    if _LIST.fullmatch(text):  # environment variables and stored scenarios have lists in this form
        return ",".join(str(layer) for layer in sorted({int(layer) for layer in text.split(",")}))
    bounds = _RANGE.fullmatch(text)
    if not bounds:
        raise ValueError(f"expected {FORMS}, got {value_text(text)}")
    start, stop = int(bounds[1]), int(bounds[2])
    if start >= stop:
        raise ValueError(f'expected "start:stop" with start < stop, got {value_text(text)}')
    return f"{start}:{stop}"


def _members(items: list[object] | tuple[object, ...]) -> set[int]:
    """Return the layer numbers in a list. An item such as "0-6" is an inclusive range."""
    members: set[int] = set()
    for item in items:
        span = _SPAN.fullmatch(item) if isinstance(item, str) else None
        first, last = (int(span[1]), int(span[2])) if span else (item, item)
        if (
            not isinstance(first, int)
            or not isinstance(last, int)
            or isinstance(item, bool)
            or first < 0
            or first > last
        ):
            raise ValueError(f"expected layer numbers such as 0, 1 or 4-6, got {value_text(item)} in the list")
        members.update(range(first, last + 1))
    if not members:
        raise ValueError("expected at least one layer in the list; write none for no layer")
    return members
