"""Rebuilds reports/sample and the README's excerpt of it: a real run of fault_deadlock, without this machine's names.

    python tools/make_sample.py

Takes about half a minute: it launches two ranks.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
SAMPLE = REPOSITORY / "reports" / "sample"
README = REPOSITORY / "README.md"
SCENARIO = "fault_deadlock"
HOST = "example"
HOME = "/home/user/nsa-harness"
# Binary, or the same as another file that stays.
DROPPED = ("boards", "logs", "evidence", "rank*/board", "dumps/*.json")
BEGIN, END = "<!-- sample: begin -->", "<!-- sample: end -->"
# The pieces of SUMMARY.md that the README shows: how the first line of each begins, and the last one.
PIECES = (("# HANG ", "Look at "), ("| rank | blocked in", "**Do:**"))


def main() -> None:
    sys.path.insert(0, str(REPOSITORY))
    with tempfile.TemporaryDirectory(prefix="nsa-harness-sample-") as work:
        run = _launched(Path(work))
        _slim(run / SCENARIO)
        _render_for_a_nameless_machine(run)
        _neutralize(run, _replacements(Path(work)))
        shutil.rmtree(SAMPLE, ignore_errors=True)
        shutil.copytree(run, SAMPLE)
    README.write_text(with_excerpt(README.read_text(), (SAMPLE / "SUMMARY.md").read_text()))
    print(f"{SAMPLE.relative_to(REPOSITORY)}: {sum(1 for path in SAMPLE.rglob('*') if path.is_file())} files")


def pieces(summary: str) -> list[str]:
    """What of SUMMARY.md the README shows, as whole lines. Raises SystemExit where the report has another form."""
    lines = summary.splitlines()
    return ["\n".join(lines[_line(lines, first) : _line(lines, last) + 1]) for first, last in PIECES]


def with_excerpt(readme: str, summary: str) -> str:
    """The README with the pieces, as a quotation, between its two comments. Links lead into the sample."""
    shown = "\n\n…\n\n".join(pieces(summary)).replace(f"]({SCENARIO}/", f"](reports/sample/{SCENARIO}/")
    # A heading of the first level is the README's own.
    quoted = "\n".join(f"> {line}".rstrip() for line in shown.removeprefix("# ").splitlines())
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{quoted}\n{END}{after}"


def _line(lines: list[str], begins: str) -> int:
    for number, line in enumerate(lines):
        if line.startswith(begins):
            return number
    raise SystemExit(f"reports/sample/SUMMARY.md: no line begins with {begins!r}; adapt PIECES in tools/make_sample.py")


def _launched(work: Path) -> Path:
    """The directory of a fresh run, which must have come out as the scenario announces."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NSA_")}
    code = "import sys; sys.argv[0] = 'nsa-harness'; from nsa_harness.cli.main import main; main()"
    command = [sys.executable, "-c", code, "run", SCENARIO]
    subprocess.run(
        command, cwd=work, env={**clean, "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": ""}, check=True
    )
    return (work / "reports" / "latest").resolve()


def _slim(attempt: Path) -> None:
    for path in [found for pattern in DROPPED for found in attempt.glob(pattern)]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _render_for_a_nameless_machine(run: Path) -> None:
    """The documents again, with another host name: a plain replacement could hit a word that is no name."""
    from nsa_harness.render.documents.documents import write_documents
    from nsa_harness.render.documents.report_json import from_json
    from nsa_harness.subject.playbook import PLAYBOOK
    from nsa_harness.supervisor.storage.rundir import RunDir

    stored = RunDir(run)
    report = from_json(stored.report.read_text())
    write_documents(stored, replace(report, machine=replace(report.machine, host=HOST)), PLAYBOOK)
    for path in run.rglob("*.json*"):
        text = re.sub(r'("host": ?)"[^"]*"', rf'\1"{HOST}"', path.read_text())
        path.write_text(re.sub(r'("kernel": ?)"[^"]*"', r'\1"(removed)"', text))


def _replacements(work: Path) -> tuple[tuple[str, str], ...]:
    """Longest first, so that the environment inside the checkout is not taken for the checkout."""
    places = {
        str(work.resolve()): "/home/user/work",
        sys.prefix: f"{HOME}/.venv",
        str(REPOSITORY): HOME,
        sys.base_prefix: "/usr",
    }
    return tuple(sorted(places.items(), key=lambda place: -len(place[0])))


def _neutralize(run: Path, replacements: tuple[tuple[str, str], ...]) -> None:
    for path in _files(run):
        text = path.read_text()
        for ours, neutral in replacements:
            text = text.replace(ours, neutral)
        path.write_text(text)


def _files(run: Path) -> Iterator[Path]:
    return (path for path in run.rglob("*") if path.is_file())


if __name__ == "__main__":
    main()
