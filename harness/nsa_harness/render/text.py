"""Functions that make text from the tested program safe to display.

Messages, paths and source lines come from programs that nsa-harness does not trust. `escape` turns a text into one line
of bounded length without control characters, terminal sequences, text-direction overrides, invisible characters or lone
surrogates. The result contains no character that XML 1.0 forbids. Jinja and ElementTree add the escapes of HTML or XML.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import TypeVar, cast
from urllib.parse import quote

from nsa_harness.core.raw_bytes import with_raw_bytes
from nsa_harness.core.report import Place

LIMIT = 4000  # characters of one text; the log or evidence file contains the whole text
BLOCK_LINES = 40  # lines of source code that are kept

T = TypeVar("T")


def escape(text: str) -> str:
    """Return the text as one line that is safe to display, with long text cut and line breaks as " / "."""
    lines = _SEQUENCE.sub("", text).splitlines()
    return _cut(_visible(" / ".join(content for line in lines if (content := line.strip()))))


def escape_block(text: str) -> str:
    """Return text that is safe to display, with only its last `BLOCK_LINES` lines."""
    lines = _SEQUENCE.sub("", text).splitlines()
    safe_lines = [_cut(_visible(line.expandtabs(4).rstrip())) for line in lines[-BLOCK_LINES:]]
    return "\n".join(safe_lines).strip("\n")


def escaped(value: T) -> T:
    """Return a copy of the value with every string in it escaped, at any depth."""
    return cast(T, _escape_value(value))


def markdown(text: str) -> str:
    """Return Markdown that is rendered as exactly `text`, with so few escapes that it stays readable."""
    return _MARKDOWN_START.sub(r"\1\\\2", _escape_markdown(escape(text)))


def markdown_prose(text: str, *, in_table: bool = False) -> str:
    """Return Markdown for a sentence in which backticks mark code."""
    parts = [
        markdown_code(part, in_table=in_table) if is_code else _escape_markdown(part)
        for part, is_code in with_code(escape(text))
    ]
    return _MARKDOWN_START.sub(r"\1\\\2", "".join(parts))


def with_code(text: str) -> Iterator[tuple[str, bool]]:
    """Split the text at its backticks, and yield each piece and whether it is code. A lone backtick is text."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        yield text, False
        return
    yield from ((part, number % 2 == 1) for number, part in enumerate(parts) if part)


def markdown_link(text: str, target: str) -> str:
    """Return a Markdown link. The target is not escaped, so it must come from `link_target` or be fixed."""
    label = _MARKDOWN_LABEL.sub(_markdown_character, escape(text))
    return f"[{label}]({target})"


def markdown_code(text: str, *, in_table: bool = False) -> str:
    """Return the text as a code span. `in_table`: also escape "|", which would split the cell of a table."""
    text = escape(text) or " "
    fence = "`" * (_longest_backticks(text) + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    span = f"{fence}{pad}{text}{pad}{fence}"
    return span.replace("|", "\\|") if in_table else span


def markdown_fence(text: str, language: str) -> list[str]:
    """Return the lines of a fenced code block in Markdown."""
    fence = "`" * max(3, _longest_backticks(text) + 1)
    return [f"{fence}{language}", *escape_block(text).split("\n"), fence]


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table of Markdown cells. A name that ends in a colon aligns its column to the right."""
    rules = ["---:" if name.endswith(":") else "---" for name in head]
    cells = ([name.rstrip(":") for name in head], rules, *rows)
    return [f"| {' | '.join(row)} |" for row in cells]


def link_target(path: str) -> str | None:
    """Return the relative URL of a file, without a line number (":12"), or None if it is not in the run directory."""
    path = re.sub(r":[0-9]+$", "", path)
    if not path or path.startswith(("/", "\\")) or ".." in re.split(r"[/\\]", path):
        return None
    return quote(path)  # also quotes the colon of a scheme, so that "javascript:" becomes a file name


def ascii_only(text: str) -> str:
    """Return the text in ASCII, for terminals that cannot show symbols such as "▸"."""
    return text.translate(_ASCII).encode("ascii", "backslashreplace").decode("ascii")


# A terminal sequence ends at the first control character. A sequence without an end is therefore scanned only once.
_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x00-\x1f\x7f-\x9f]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-~]"
)
# Control characters, format characters (direction, zero width, tags), surrogates and non-characters.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\ufeff\ufff9-\ufffb\ufffe\uffff\ud800-\udfff\U000110bd\U000110cd\U00013430-\U0001343f"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e007f]"
)
# Characters that have a meaning in Markdown at their position. "all_reduce", "a -> b" and "\x1b" do not match.
_MARKDOWN = re.compile(
    r"[`*|~$<]|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z])|\\(?=[!-/:-@\[-`{-~]|$)|\](?=[(\[:])|&(?=#?[0-9A-Za-z]+;)"
)
_MARKDOWN_LABEL = re.compile(rf"{_MARKDOWN.pattern}|[\[\]]")
_MARKDOWN_START = re.compile(r"^([0-9]*)(>|[#+=-](?![0-9A-Za-z])|(?<=[0-9])[.)](?= |$))")
_ASCII = str.maketrans("━─│└▸◀·×→–—…■▒", "=-|`><-x>--~#+")


def _escape_markdown(text: str) -> str:
    return _MARKDOWN.sub(_markdown_character, text)


def _visible(text: str) -> str:
    """Return the text with unsafe characters replaced by backslash escapes."""
    return _UNSAFE.sub(_escape_character, with_raw_bytes(text).replace("\t", " "))


def _escape_character(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _cut(text: str) -> str:
    """Return the text, shortened in the middle if it is longer than `LIMIT` characters."""
    if len(text) <= LIMIT:
        return text
    head, tail = text[: LIMIT * 3 // 4].rstrip(), text[-LIMIT // 6 :].lstrip()
    return f"{head} … {len(text) - len(head) - len(tail)} characters cut … {tail}"


def _escape_value(value: object) -> object:
    match value:
        case Enum():
            return value
        case str():
            return escape(value)
        case tuple():
            return tuple(_escape_value(item) for item in value)
        case list():
            return [_escape_value(item) for item in value]
        case dict():
            return {_escape_value(key): _escape_value(item) for key, item in value.items()}
        case Place(text=str(text)):
            return replace(_escape_fields(replace(value, text=None)), text=escape_block(text))
    return _escape_fields(value) if is_dataclass(value) else value


def _escape_fields(value: T) -> T:
    changes = {field.name: _escape_value(getattr(value, field.name)) for field in fields(value)}  # type: ignore[arg-type]
    return replace(value, **changes)  # type: ignore[type-var]


def _markdown_character(match: re.Match[str]) -> str:
    return {"<": "&lt;", "&": "&amp;"}.get(match.group(), "\\" + match.group())


def _longest_backticks(text: str) -> int:
    return max((len(run) for run in re.findall(r"`+", text)), default=0)
