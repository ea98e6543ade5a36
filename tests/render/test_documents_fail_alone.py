"""A document that cannot be made is said, and costs none of the others."""

from __future__ import annotations

from pathlib import Path

import pytest
from render_samples import MIXED

from nsa_harness.core.report import Trouble
from nsa_harness.render.documents import documents
from nsa_harness.subject.playbook import PLAYBOOK
from nsa_harness.supervisor.store.rundir import RunDir


@pytest.mark.parametrize(
    ("name", "file"), [("junit_xml", "junit.xml"), ("report_html", "report.html"), ("summary_md", "SUMMARY.md")]
)
def test_the_others_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, file: str) -> None:
    def broken(*_: object) -> str:
        raise ValueError("planted")

    monkeypatch.setattr(documents, name, broken)
    run = RunDir(tmp_path)
    assert documents.write_documents(run, MIXED, PLAYBOOK) == (Trouble(what=file, why="ValueError: planted"),)
    there = {path.name for path in (run.summary, run.report, run.junit, run.html) if path.is_file()}
    assert there == {"SUMMARY.md", "report.json", "junit.xml", "report.html"} - {file}
    assert f"{file} could not be written" in run.log.read_text()
