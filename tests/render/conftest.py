"""Golden files: whole outputs, compared byte for byte, rewritten with `--update-golden`.

The style sheet of every page is one golden file, `report.css`; the pages hold a mark where it stands.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parents[1] / "golden" / "render"
_STYLE = re.compile(r"(?<=<style>).*?(?=</style>)", re.DOTALL)
_MARK = "{report.css}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/render from what is rendered")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with its golden file; with --update-golden, write it first."""

    def compare(name: str, text: str) -> None:
        if name.endswith(".html"):
            for style in _STYLE.findall(text):
                assert _MARK not in text
                compare("report.css", style)
            text = _STYLE.sub(_MARK, text)
        path = GOLDEN / name
        if request.config.getoption("--update-golden", default=False):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())
        assert text == path.read_bytes().decode(), (
            f"{name} differs: look at it, then pytest tests/render --update-golden"
        )

    return compare
