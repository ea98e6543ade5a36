"""Trouble: what could not be observed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """Something that could not be observed, and why."""

    what: str
    why: str
    rank: int | None = None
