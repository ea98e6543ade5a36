"""Read the text for each cause of failure from causes.toml."""

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
    """Return the contents of causes.toml: for each section, a mapping from key to text."""
    tables = tomllib.loads(files(__package__).joinpath("causes.toml").read_text(encoding="utf-8"))
    return {section: {key: " ".join(text.split()) for key, text in texts.items()} for section, texts in tables.items()}


def text_of(code: str | None, key: str) -> str:
    """Return the unrendered text under `key` for a cause, or "". Unknown causes get the texts of `unknown`."""
    texts = sections()
    return texts.get(code or "", texts[Cause.UNKNOWN]).get(key, "")


def remedy(code: str | None) -> str:
    """Return the advice for a cause, as a sentence."""
    text = text_of(code, "remedy")
    return text[:1].upper() + text[1:]
