"""Finds and reads the report.json files below directories."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa_harness.core.ci import UnreadFile
from nsa_harness.core.scenario.yaml_tree import parse_yaml, plain
from nsa_harness.supervisor.storage.safe_directory import SafeDirectory

MAX_REPORT_BYTES = 64 << 20  # the report of a thousand scenarios is far smaller
_RUN_ID = re.compile(r"\d{8}T\d{6}-[0-9a-f]+|latest")
SUMMARY = "summary.json"
_REPORT, _RUN_RECORD = "report.json", "run.json"


@dataclass(frozen=True, kw_only=True)
class ReportText:
    """The text of one report.json, and the job to which its directory belongs."""

    job: str
    file: str
    text: str


@dataclass(frozen=True, kw_only=True)
class StoredReports:
    """The report.json files that were found, and the files that could not be read."""

    reports: tuple[ReportText, ...]
    unread: tuple[UnreadFile, ...]


def stored_reports(directories: Sequence[Path], expected_jobs: Sequence[str] = ()) -> StoredReports:
    """Return each report.json below the directories with its job, and the files that could not be read."""
    reports: dict[tuple[str, str], ReportText] = {}
    unread: list[UnreadFile] = []
    for directory in directories:
        for run, has_report in _runs(directory, unread):
            file = run / _REPORT
            job = _job(directory, run, expected_jobs)
            text = (
                _report_text(SafeDirectory(directory), file)
                if has_report
                else "the run started but has no report; it was ended before it was judged"
            )
            if not has_report or isinstance(text, UnreadFile):
                unread.append(text if isinstance(text, UnreadFile) else UnreadFile(file=str(file), why=text))
            else:
                # An upload may have replaced the link `reports/latest` by a second copy of the run.
                reports.setdefault((job, text), ReportText(job=job, file=str(file), text=text))
    return StoredReports(reports=tuple(reports.values()), unread=tuple(unread))


def summaries(directory: Path) -> StoredReports:
    """Return the summary.json files of `ci summary` below a directory, and those that could not be read."""
    texts = [
        _report_text(SafeDirectory(directory), Path(path) / SUMMARY)
        for path, _, files in os.walk(directory)
        if SUMMARY in files
    ]
    return StoredReports(
        reports=tuple(ReportText(job="", file=SUMMARY, text=text) for text in texts if isinstance(text, str)),
        unread=tuple(text for text in texts if isinstance(text, UnreadFile)),
    )


def matrix_jobs(file: Path) -> dict[str, Mapping[str, Any]] | UnreadFile:
    """Return each job in a CI workflow's matrix or in {"include": [...]}, with its row, or the reason why not."""
    text = _report_text(SafeDirectory(file.parent), file)
    if isinstance(text, UnreadFile):
        return text
    try:
        tree: Any = plain(parse_yaml(text, str(file)).root)  # type: ignore[arg-type]
        matrices = [job["strategy"]["matrix"] for job in tree.get("jobs", {}).values() if "strategy" in job] or [tree]
        # The rows of another job may be an expression that GitHub fills in.
        lists = [matrix["include"] for matrix in matrices if not isinstance(matrix["include"], str)]
        rows = {entry["name"]: entry for include in lists for entry in include}
    except (KeyError, TypeError, AttributeError):
        return UnreadFile(
            file=str(file), why="not a workflow with a `matrix: include`, so missing jobs are not noticed"
        )
    if not rows or not all(isinstance(name, str) and name for name in rows):
        return UnreadFile(file=str(file), why="names no job, so missing jobs are not noticed")
    return rows


def _runs(directory: Path, unread: list[UnreadFile]) -> Iterator[tuple[Path, bool]]:
    """Yield each run directory below `directory`, and whether it has a report."""

    def note_error(error: OSError) -> None:
        unread.append(UnreadFile(file=str(error.filename), why=error.strerror or "cannot be read"))

    for path, folders, files in os.walk(directory, onerror=note_error):
        folders.sort()
        directory_path = Path(path)
        # A directory named report.json is reported as unreadable.
        has_report = _REPORT in files or _REPORT in folders
        if has_report or _RUN_RECORD in files:
            yield directory_path, has_report
        if _RUN_RECORD in files:
            folders.clear()  # programs may write any files into the directories of their runs


def _report_text(directory: SafeDirectory, file: Path) -> str | UnreadFile:
    try:
        return _text_or_reason(directory, file)
    except OSError as error:
        reason = "not a file" if error.errno == errno.EINVAL else error.strerror
        return UnreadFile(file=str(file), why=reason or "cannot be read")
    except UnicodeDecodeError as error:
        return UnreadFile(file=str(file), why=f"not a text file: {error}")


def _text_or_reason(directory: SafeDirectory, file: Path) -> str | UnreadFile:
    with directory.open_file(file) as report:
        size = os.fstat(report.fileno()).st_size
        if size > MAX_REPORT_BYTES:
            return UnreadFile(file=str(file), why=f"{size} bytes, over the limit of {MAX_REPORT_BYTES} for a report")
        return report.read(MAX_REPORT_BYTES).decode("utf-8")


def _job(directory: Path, run: Path, expected_jobs: Sequence[str]) -> str:
    parts = run.absolute().parts
    expected_parts = [part for part in reversed(parts) if part in expected_jobs]
    if expected_parts:
        return expected_parts[0]
    relative_parts = run.relative_to(directory).parts
    if relative_parts and _RUN_ID.fullmatch(relative_parts[-1]):
        relative_parts = relative_parts[:-1]
    return "/".join(relative_parts) or directory.name or str(directory)
