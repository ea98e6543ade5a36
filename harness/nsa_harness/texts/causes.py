"""Texts of causes.toml: what each cause means, how it is proven, what to do, and the templates of its sentences."""

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
    """Return the texts of causes.toml by section and key, each on one line."""
    tables = tomllib.loads(files(__package__).joinpath("causes.toml").read_text(encoding="utf-8"))
    return {section: {key: " ".join(text.split()) for key, text in texts.items()} for section, texts in tables.items()}


def text_of(code: str | None, key: str) -> str:
    """Return one text of a cause; "" if it has none. A template is returned unrendered.

    A code that only another version knows has the texts of the cause `unknown`.
    """
    texts = sections()
    return texts.get(code or "", texts[Cause.UNKNOWN]).get(key, "")


def remedy(code: str | None) -> str:
    """Return the remedy of a cause as a sentence."""
    text = text_of(code, "remedy")
    return text[:1].upper() + text[1:]
