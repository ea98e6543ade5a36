"""Paragraphs, labelled paragraphs and tables as lines of a given width.

A width is a number of screen columns; a wide character (East Asian) takes two. A word that is wider than the line stays
in one piece, because a broken path or command cannot be copied. The terminal wraps it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rich.cells import cell_len, set_cell_size

NO_WIDTH = 10_000  # columns of a pipe or file: no line is ever wrapped or cut
NARROW = 60  # columns; on a narrower screen, a label has a line of its own above its text
LABEL_WIDTH = 14
# Spaces that never become line breaks: before a separator, and between a number and its unit.
_GLUE = re.compile(r" (?=[·→] )|(?<=[0-9]) (?=(?:s|min|h|MB|GB|ranks?|steps?|tokens)\b)")


def paragraph(text: str, width: int, first: str = "", rest: str | None = None) -> Iterator[str]:
    """Yield the text as lines of at most `width` columns that start with `first`, and later with `rest` if given."""
    indent, hanging = first, first if rest is None else rest
    line = ""
    for part in _GLUE.sub("\N{NO-BREAK SPACE}", text).split(" "):
        word = part.replace("\N{NO-BREAK SPACE}", " ")
        longer = f"{line} {word}" if line else word
        if line and cell_len(indent + longer) > width:
            yield (indent + line).rstrip()
            indent, line = hanging, word
        else:
            line = longer
    yield (indent + line).rstrip()


def labelled(label: str, text: str, width: int, label_width: int = LABEL_WIDTH) -> Iterator[str]:
    """Yield lines such as "  cause        ready_twice (certain)", wrapped, or nothing if `text` is empty."""
    if text and width >= NARROW:
        yield from paragraph(text, width, f"  {label:<{label_width}}", " " * (label_width + 2))
    elif text:
        yield from (f"  {label}",) if label else ()
        yield from paragraph(text, width, "    ")


def command(label: str, text: str, width: int, label_width: int = LABEL_WIDTH) -> Iterator[str]:
    """Yield a labelled command or path, never wrapped so that it can be copied, or nothing if `text` is empty."""
    line = f"  {label:<{label_width}}{text}"
    if text and width >= NARROW and cell_len(line) <= width:
        yield line
    elif text:
        yield from (f"  {label}",) if label else ()
        yield f"    {text}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], width: int, indent: str = "  ") -> Iterator[str]:
    """Yield the lines of a table.

    `head`: the column names. A name that ends in a colon aligns its column to the right. A column with an empty name
    contains remarks. If the table is wider than `width`, each row becomes a list of "name  cell" lines.
    """
    names = [name.rstrip(":") for name in head]
    if table_width(head, rows, indent) > width:
        yield from _rows_as_lists(names, rows, width, indent)
        return
    columns = _column_widths(names, rows)
    for cells in (names, *rows):
        line = [
            padded(cell, column, right=name.endswith(":"))
            for cell, column, name in zip(cells, columns, head, strict=True)
        ]
        yield (indent + "   ".join(line)).rstrip()


def table_width(head: Sequence[str], rows: Sequence[Sequence[str]], indent: str = "  ") -> int:
    """Return the width of the table in screen columns."""
    columns = _column_widths([name.rstrip(":") for name in head], rows)
    return cell_len(indent) + sum(columns) + 3 * (len(columns) - 1)


def _column_widths(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(cell_len, column)) for column in zip(names, *rows, strict=True)]


def beside_or_below(row: str, remark: str, width: int, indent: str) -> Iterator[str]:
    """Yield a table row with a remark, which begins with spaces, beside it, or below it if both do not fit."""
    if cell_len(row + remark) <= width:
        yield (row + remark).rstrip()
    else:
        start = row[: len(row) - len(row.lstrip())]
        yield from paragraph(row.strip(), width, start, indent)
        yield from paragraph(remark.strip(), width, indent) if remark.strip() else ()


def cropped(text: str, width: int) -> str:
    """Return the text cut to `width` columns. If something is cut off, the result ends in "…"."""
    return text if cell_len(text) <= width else set_cell_size(text, max(width - 1, 0)) + "…"


def bar(share: float, columns: int) -> str:
    """Return a bar of "━" characters that fills the given share (0 to 1) of `columns`."""
    return "━" * max(1, round(min(max(share, 0.0), 1.0) * columns))


def padded(text: str, columns: int, *, right: bool = False) -> str:
    """Return the text padded with spaces to the width `columns`. `right`: put the spaces in front."""
    space = " " * (columns - cell_len(text))
    return space + text if right else text + space


def _rows_as_lists(names: Sequence[str], rows: Sequence[Sequence[str]], width: int, indent: str) -> Iterator[str]:
    """Yield each row of a table as a list, for a narrow screen."""
    label_width = max(map(cell_len, names[1:]), default=0) + 2
    for row in rows:
        remarks = [cell for name, cell in zip(names, row, strict=True) if cell and not name]
        yield " ".join((f"{indent}{names[0]} {row[0]}", *remarks))
        for name, cell in zip(names[1:], row[1:], strict=True):
            if cell and name:
                first = f"{indent}  {name:<{label_width}}"
                yield from paragraph(cell, width, first, " " * len(first))
