"""Rebuild the parts of the documentation that list causes of failures.

python tools/make_findings.py
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.report import HangKind, Severity, Status
from nsa_harness.texts.causes import text_of

REPOSITORY = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- causes: begin -->", "<!-- causes: end -->"
WIDTH = 120
_CODE = re.compile(r"`[^`]*`")
_SPACE, _UNBREAKABLE_SPACE = " ", "\0"


def main() -> None:
    for name in GENERATORS:
        document = REPOSITORY / name
        document.write_text(with_causes(name, document.read_text()))


def with_causes(name: str, document: str) -> str:
    """Return the document with its lists of causes updated."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    return "\n".join([f"{before}{BEGIN}", *GENERATORS[name](), f"{END}{after}"])


def _findings() -> Iterator[str]:
    yield from _table(["verdict", "kind", "causes"], _causes_by_verdict())
    for cause in Cause:
        yield ""
        yield f"## {cause}"
        yield ""
        for name, key in (("Meaning", "means"), ("Evidence", "proven_by"), ("What to try", "remedy")):
            text = text_of(cause, key)
            yield from _wrapped(f"- **{name}:** {text[:1].upper()}{text[1:]}", "  ")
    yield ""


def _causes_by_verdict() -> Iterator[tuple[str, str, str]]:
    """Yield the rows (verdict, kind of hang, links to causes) of the table of causes."""
    for status in Status:
        for kind in HangKind if status is Status.HANG else (None,):
            causes = [
                cause for cause in Cause if status in cause.row.verdicts and (kind is None or kind in cause.row.kinds)
            ]
            if causes:
                yield status, kind or "", _links(causes)
    noted = _links(cause for cause in Cause if cause.row.is_noted)
    yield "any", "", f"noted in addition to the cause, also if the run passed: {noted}"


def _severities() -> Iterator[str]:
    """Yield the lines of a table that groups findings by severity."""
    rows = [(cause, cause.row.severity, cause.row.ok_severity) for cause in Cause]
    warnings = [cause for cause, severity, ok_severity in rows if severity is ok_severity is Severity.WARNING]
    lowered = [cause for cause, *both in rows if both == [Severity.CRITICAL, Severity.WARNING]]
    infos = [cause for cause, severity, _ in rows if severity is Severity.INFO]
    yield from _table(
        ["severity", "findings"],
        [
            ("critical", "the cause of a FAIL or HANG"),
            (
                "warning",
                f"{_codes(warnings)}; {_codes(lowered)} if the run passed; and all other findings of a run with FAIL or"
                " HANG",
            ),
            ("info", f"{_codes(infos)}, and all other findings of a run without FAIL or HANG"),
        ],
    )


def _table(head: list[str], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"| {' | '.join('---' for _ in head)} |"
    yield from (f"| {' | '.join(row)} |" for row in rows)


def _codes(causes: Iterable[Cause]) -> str:
    return ", ".join(f"`{cause}`" for cause in causes)


def _links(causes: Iterable[Cause]) -> str:
    return " · ".join(f"[{cause}](#{cause})" for cause in causes)


def _wrapped(text: str, indent: str = "") -> list[str]:
    """Return the text as wrapped lines, without breaking any part in backticks."""
    one_line = " ".join(text.split())
    unbreakable = _CODE.sub(lambda code: code[0].replace(_SPACE, _UNBREAKABLE_SPACE), one_line)
    lines = textwrap.wrap(unbreakable, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return [line.replace(_UNBREAKABLE_SPACE, _SPACE) for line in lines]


GENERATORS: dict[str, Callable[[], Iterator[str]]] = {
    "docs/findings.md": _findings,
    "docs/internals/decisions.md": _severities,
}

if __name__ == "__main__":
    main()
