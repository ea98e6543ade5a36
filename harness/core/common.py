"""Values that evidence and report share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where in the program: a source line, and the module, layer and parameter it belongs to, as far as known."""

    file: str | None = None
    line: int | None = None
    function: str | None = None
    module: str | None = None
    layer: int | None = None
    parameter: str | None = None
    text: str | None = None  # the statement


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """Something that could not be observed, and why."""

    what: str
    why: str
    rank: int | None = None
