"""The texts in causes.toml: what each cause means, how it is proven, what to do, and templates for sentences."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from nsa_harness.core.diagnosis.causes import Cause

LEFT_OPEN = "left_open"  # sections that belong to no cause
SHARED = "shared"


@cache
def sections() -> Mapping[str, Mapping[str, str]]:
    """Return all texts of causes.toml, by section and key. Line breaks within a text are removed."""
    tables = tomllib.loads(files(__package__).joinpath("causes.toml").read_text(encoding="utf-8"))
    return {section: {key: " ".join(text.split()) for key, text in texts.items()} for section, texts in tables.items()}


def text_of(code: str | None, key: str) -> str:
    """Return the text `key` of a cause, or "" if this cause has no such text. Templates are not rendered.

    `code`: the code of the cause. If it is unknown, for instance because another version wrote it, the texts of the
    cause `unknown` are used.
    """
    texts = sections()
    return texts.get(code or "", texts[Cause.UNKNOWN]).get(key, "")


def remedy(code: str | None) -> str:
    """Return what to do about a cause, with a capital letter at the start."""
    text = text_of(code, "remedy")
    return text[:1].upper() + text[1:]
