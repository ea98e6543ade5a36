"""Create pictures of terminal output (SVG) and HTML reports (PNG) for the documentation.

`tools/make_sample.py` uses this module. The PNG files need Chromium; without it, the old files are kept.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console

from nsa_harness.render.terminal.stream import Styles, styled

COLUMNS = 100  # of a terminal picture
_MAX_SVG_BYTES, _MAX_PNG_BYTES = 80_000, 150_000
_CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_CHROMIUM_OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
)  # fmt: skip
_TIMEOUT_S = 90
_FONTS = 'ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace'
# rich's SVG loads its font from the network; these pictures use the fonts of the reader's machine.
_FONT_FACE = re.compile(r"@font-face \{.*?\}\n\s*", re.DOTALL)


def save_terminal(lines: Iterable[str], styles: Styles, path: Path, *, command: str) -> None:
    """Save an SVG picture of a terminal that shows `lines`, with `command` in its title bar."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, highlight=False)
    for line in (*lines, ""):  # without an empty line at the end, the last line is clipped
        console.print(styled(line, styles), soft_wrap=True)
    svg = _FONT_FACE.sub("", console.export_svg(title=f"$ {command}", unique_id=path.stem))
    _write(path, svg.replace("font-family: Fira Code, monospace", f"font-family: {_FONTS}").encode(), _MAX_SVG_BYTES)


def save_page(page: Path, path: Path, *, width: int, height: int) -> None:
    """Save a PNG picture of the top part of an HTML page.

    The size is in pixels. Without Chromium, the old file is kept.
    """
    program = next((found for name in _CHROMIUM if (found := shutil.which(name))), None)
    if program is None:
        print(f"{path.name}: not drawn again, because no Chromium was found")
        return
    with tempfile.TemporaryDirectory(prefix="nsa-harness-chromium-") as folder:
        picture = Path(folder) / "picture.png"
        options = [f"--user-data-dir={folder}/profile", f"--window-size={width},{height}", f"--screenshot={picture}"]
        command = [program, *_CHROMIUM_OPTIONS, *options, page.resolve().as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S)
        _write(path, picture.read_bytes(), _MAX_PNG_BYTES)


def save_part(page: Path, pattern: str, path: Path, *, width: int, height: int) -> None:
    """Save a PNG picture of the part of an HTML page that matches a regular expression.

    Raises SystemExit if nothing on the page matches.
    """
    html = page.read_text()
    part = re.search(pattern, html, re.DOTALL)
    if part is None:
        raise SystemExit(f"{path.name}: report.html has no part that matches {pattern!r}")
    head = html[: html.index("<main")]
    with tempfile.TemporaryDirectory(prefix="nsa-harness-part-") as folder:
        excerpt = Path(folder) / "part.html"
        excerpt.write_text(f'{head}<main class="single" style="padding:1rem">{part.group()}</main></body></html>')
        save_page(excerpt, path, width=width, height=height)


def _write(path: Path, content: bytes, limit_bytes: int) -> None:
    """Write `content` to a file. Raise SystemExit if the content is too large."""
    if len(content) > limit_bytes:
        raise SystemExit(f"{path.name}: {len(content)} bytes, more than {limit_bytes}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    print(f"{path.name}: {len(content) // 1000} kB")
