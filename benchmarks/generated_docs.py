"""Write the generated tables of docs/internals/nsa/performance.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

PAGE = "docs/internals/nsa/performance.md"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table. All columns but the first are aligned to the right."""
    yield f"| {' | '.join(head)} |"
    yield "|" + "|".join([" --- ", *(" ---: " for _ in head[1:])]) + "|"
    for cells in rows:
        yield f"| {' | '.join(cells)} |"


def write_page(page: Path, sections: Mapping[tuple[str, str], str]) -> None:
    """Replace the generated sections of a page, each of which lies between a pair of marks."""
    text = page.read_text(encoding="utf-8")
    for (begin, end), section in sections.items():
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{section}\n{end}{rest.partition(end)[2]}"
    page.write_text(text, encoding="utf-8")
