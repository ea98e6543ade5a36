"""A document that cannot be made is said, and costs none of the others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from render_samples import MIXED

from nsa_harness.core.report import Trouble
from nsa_harness.render.documents import documents
from nsa_harness.subject.playbook import PLAYBOOK
from nsa_harness.supervisor.storage.rundir import RunDir


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


_UPGRADED = """
import sys
import nsa_harness.render.documents.documents  # what the start of every attempt imports
sys.addaudithook(lambda event, given: event == "open" and str(given[0]).endswith(".j2") and sys.exit("read at the end"))
sys.path.insert(0, sys.argv[1])
from render_samples import MIXED
from nsa_harness.render.documents.html import report_html
from nsa_harness.subject.playbook import PLAYBOOK
assert report_html(MIXED, PLAYBOOK)
"""


def test_the_page_at_the_end_of_a_plan_is_that_of_the_harness_that_began_it() -> None:
    done = subprocess.run([sys.executable, "-c", _UPGRADED, str(Path(__file__).parent)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
