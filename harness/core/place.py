"""Place: where in a program something happened."""

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
