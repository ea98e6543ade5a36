"""Lines of a given width: paragraphs, labelled paragraphs and tables that fit 40, 80 or 120 columns.

Widths are columns on the screen: a wide character counts twice. A word wider than the line is not broken, because a
broken path or command cannot be copied; the terminal wraps it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rich.cells import cell_len, set_cell_size

NARROW = 60  # columns; on a narrower screen a text is below its label
LABEL_WIDTH = 14
# No line begins with a separator, and a unit stays with its number.
_GLUE = re.compile(r" (?=[·→] )|(?<=[0-9]) (?=(?:s|min|h|MB|GB|ranks?)\b)")


def paragraph(text: str, width: int, first: str = "", rest: str | None = None) -> Iterator[str]:
    """Yield lines of at most `width`; `first` indents the first line, `rest` the others."""
    indent, hanging = first, first if rest is None else rest
    line = ""
    for glued in _GLUE.sub("\N{NO-BREAK SPACE}", text).split(" "):
        word = glued.replace("\N{NO-BREAK SPACE}", " ")
        grown = f"{line} {word}" if line else word
        if line and cell_len(indent + grown) > width:
            yield (indent + line).rstrip()
            indent, line = hanging, word
        else:
            line = grown
    yield (indent + line).rstrip()


def labelled(label: str, text: str, width: int, label_width: int = LABEL_WIDTH) -> Iterator[str]:
    """Yield "  cause        ready_twice (certain)". On a narrow screen the text is below its label; "" yields none."""
    if text and width >= NARROW:
        yield from paragraph(text, width, f"  {label:<{label_width}}", " " * (label_width + 2))
    elif text:
        yield from (f"  {label}",) if label else ()
        yield from paragraph(text, width, "    ")


def command(label: str, text: str, width: int, label_width: int = LABEL_WIDTH) -> Iterator[str]:
    """Yield a command or path in one piece, so that it can be copied; "" yields no line."""
    line = f"  {label:<{label_width}}{text}"
    if text and width >= NARROW and cell_len(line) <= width:
        yield line
    elif text:
        yield from (f"  {label}",) if label else ()
        yield f"    {text}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], width: int, indent: str = "  ") -> Iterator[str]:
    """Yield a table. A head that ends in a colon aligns its column to the right; an empty head is a column of remarks.

    If the table is too wide, each row becomes a list.
    """
    names = [name.rstrip(":") for name in head]
    columns = [max(map(cell_len, column)) for column in zip(names, *rows, strict=True)]
    if cell_len(indent) + sum(columns) + 3 * (len(columns) - 1) > width:
        yield from _listed(names, rows, width, indent)
        return
    for cells in (names, *rows):
        line = [
            padded(cell, column, right=name.endswith(":"))
            for cell, column, name in zip(cells, columns, head, strict=True)
        ]
        yield (indent + "   ".join(line)).rstrip()


def cropped(text: str, width: int) -> str:
    """Return at most `width` columns of the text, for lines that must not wrap."""
    return text if cell_len(text) <= width else set_cell_size(text, max(width - 1, 0)) + "…"


def bar(share: float, columns: int) -> str:
    """Return a bar of at least one character, so that a short time is visible too."""
    return "━" * max(1, round(min(max(share, 0.0), 1.0) * columns))


def padded(text: str, columns: int, *, right: bool = False) -> str:
    space = " " * (columns - cell_len(text))
    return space + text if right else text + space


def _listed(names: Sequence[str], rows: Sequence[Sequence[str]], width: int, indent: str) -> Iterator[str]:
    label_width = max(map(cell_len, names[1:]), default=0) + 2
    for row in rows:
        remarks = [cell for name, cell in zip(names, row, strict=True) if cell and not name]
        yield " ".join((f"{indent}{names[0]} {row[0]}", *remarks))
        for name, cell in zip(names[1:], row[1:], strict=True):
            if cell and name:
                first = f"{indent}  {name:<{label_width}}"
                yield from paragraph(cell, width, first, " " * len(first))
