"""Rewrites what docs/findings.md and docs/internals/decisions.md say of causes, from the one table of them.

python tools/make_findings.py
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from nsa_harness.core.diagnosis.causes import CAUSES_OF_VERDICTS, Cause
from nsa_harness.core.report import HangKind, Severity, Status
from nsa_harness.texts.causes import text_of

REPOSITORY = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- causes: begin -->", "<!-- causes: end -->"
WIDTH = 120
_CODE = re.compile(r"`[^`]*`")
_BREAKABLE, _KEPT = " ", "\0"


def main() -> None:
    for name in MADE:
        document = REPOSITORY / name
        document.write_text(with_causes(name, document.read_text()))


def with_causes(name: str, document: str) -> str:
    """The document with what the table says between its two comments."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    return "\n".join([f"{before}{BEGIN}", *MADE[name](), f"{END}{after}"])


def _findings() -> Iterator[str]:
    yield from _table(["verdict", "kind", "causes"], _rows())
    yield ""
    yield from _wrapped(f"`expect.cause` of a scenario can be {_codes(CAUSES_OF_VERDICTS)}.")
    for cause in Cause:
        yield ""
        yield f"## {cause}"
        yield ""
        for name, key in (("Means", "means"), ("Proven by", "proven_by"), ("Try", "remedy")):
            yield from _wrapped(f"- **{name}:** {text_of(cause, key)}", "  ")
    yield ""


def _rows() -> Iterator[tuple[str, str, str]]:
    for status in Status:
        for kind in HangKind if status is Status.HANG else (None,):
            causes = [one for one in Cause if status in one.row.verdicts and (kind is None or kind in one.row.kinds)]
            if causes:
                yield status, kind or "", _codes(causes, " ")
    beside = _codes([one for one in Cause if one.row.beside], " ")
    yield "any", "", f"{beside} are noted beside the cause, a PASS included"


def _decisions() -> Iterator[str]:
    warnings = [one for one in Cause if one.row.severity is Severity.WARNING and one.row.unfailed is Severity.WARNING]
    passed = [one for one in Cause if one.row.severity is Severity.CRITICAL and one.row.unfailed is Severity.WARNING]
    unfailed = [one for one in Cause if one.row.severity is Severity.INFO]
    yield from _table(
        ["severity", "of which findings"],
        [
            ("critical", "the cause of a FAIL or HANG"),
            (
                "warning",
                f"{_codes(warnings)}; {_codes(passed)} of a run that passed; and what is noted beside the cause of"
                " a FAIL or HANG",
            ),
            (
                "info",
                f"{_codes(unfailed)}, and anything else of a run that neither failed nor hung",
            ),
        ],
    )


def _table(head: list[str], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"| {' | '.join('---' for _ in head)} |"
    yield from (f"| {' | '.join(row)} |" for row in rows)


def _codes(causes: Iterable[str], separator: str = ", ") -> str:
    return separator.join(f"`{cause}`" for cause in causes)


def _wrapped(text: str, indent: str = "") -> list[str]:
    """Lines of the width of a page; a word of code is not broken."""
    one_line = " ".join(text.split())
    kept = _CODE.sub(lambda code: code[0].replace(_BREAKABLE, _KEPT), one_line)
    lines = textwrap.wrap(kept, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return [line.replace(_KEPT, _BREAKABLE) for line in lines]


MADE: dict[str, Callable[[], Iterator[str]]] = {
    "docs/findings.md": _findings,
    "docs/internals/decisions.md": _decisions,
}

if __name__ == "__main__":
    main()
