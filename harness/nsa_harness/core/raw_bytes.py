"""Arguments and paths that are not UTF-8, such as a directory with a Latin-1 name.

Python reads such a byte, for example 0xE9, as half of a surrogate pair (U+DCE9). JSON parsers refuse it, so the values
of nsa-harness have the private character U+10FFE9 instead. The launcher turns the character into the byte again.
"""

from __future__ import annotations

import re

_FIRST, _LAST = 0x10FF80, 0x10FFFF
_PRIVATE = re.compile(f"[{chr(_FIRST)}-{chr(_LAST)}]")
_TO_SURROGATE = 0x10FF80 - 0xDC80
# In JSON: a whole surrogate pair, half of a pair that stands for a byte, or another escape sequence.
_ESCAPES = re.compile(r"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\u[dD][cC](?P<byte>[89a-fA-F][0-9a-fA-F])|\\.", re.DOTALL)


def readable_json(text: str) -> str:
    """Return JSON in which each byte that is not UTF-8 is a private character instead of half of a surrogate pair."""
    if "\\udc" not in text:
        return text
    return _ESCAPES.sub(
        lambda match: match[0] if match["byte"] is None else f"\\udbff\\udf{match['byte'].lower()}", text
    )


def with_raw_bytes(text: str) -> str:
    """Return the text as Python passes it to the system: with each private character replaced by its byte."""
    return _PRIVATE.sub(lambda match: chr(ord(match[0]) - _TO_SURROGATE), text)
