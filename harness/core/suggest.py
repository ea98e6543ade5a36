"""The "did you mean" of every message about an unknown word."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A clause that names the closest known word, or an empty text when none is close."""
    by_small_letters = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(word[:100].lower(), by_small_letters, n=1, cutoff=0.6)
    return f'; did you mean "{by_small_letters[close[0]]}"?' if close else ""
