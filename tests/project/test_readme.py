"""Tests of the README: its commands work, and its pictures show what they claim to show."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from documents import REPOSITORY, SAMPLE, blocks, text, tool

from nsa_harness.core.report import HangKind, Status
from nsa_harness.errors import StoredRunError
from nsa_harness.render.documents.report_json import from_json
from nsa_harness.supervisor.storage.rundir import find_run

SVG = "{http://www.w3.org/2000/svg}"
MAIN = "import sys; sys.argv[0] = 'nsa-harness'; from nsa_harness.cli.main import main; main()"


def test_the_picture_in_the_readme_shows_the_answer_about_the_script_in_the_readme() -> None:
    readme, script = text("README.md"), tool("make_sample").HANG_PY
    assert blocks("README.md", "python")[0] == script
    assert "](docs/images/hang-terminal.svg)" in readme
    picture = ElementTree.fromstring(text("docs/images/hang-terminal.svg"))
    lines = [" ".join("".join(node.itertext()).split()) for node in picture.iter(f"{SVG}text")]
    screen = " ".join(line.replace("\N{NO-BREAK SPACE}", " ") for line in lines)
    barrier = script.splitlines().index("        dist.barrier()") + 1
    assert "HANG" in screen
    assert f"hang.py:{barrier}" in screen
    assert "rank0_only_collective" in screen


@pytest.mark.parametrize("document", ["README.md", "docs/internals/nsa/performance.md"])
def test_the_table_of_costs_is_the_one_that_was_measured(document: str) -> None:
    assert tool("make_costs").with_costs(document, text(document)) == text(document)
    assert "costs: begin -->\n| what |" in text(document)


EXAMPLES = [
    (document, number)
    for document in ("nsa/README.md", "docs/internals/nsa/other-packages.md")
    for number in range(len(blocks(document, "python")))
] + [("README.md", 1)]


def test_both_readmes_begin_with_the_same_ten_lines() -> None:
    ten_lines = blocks("README.md", "python")[1]
    assert ten_lines == blocks("nsa/README.md", "python")[0]
    assert len([line for line in ten_lines.splitlines() if line]) <= 10


@pytest.mark.parametrize(("document", "number"), EXAMPLES)
def test_the_examples_of_the_subject_s_documents_run(document: str, number: int) -> None:
    example = blocks(document, "python")[number]
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{example}\n{done.stderr[-3000:]}"


def test_the_sample_is_a_proven_hang_with_every_proof_in_place() -> None:
    report = from_json((SAMPLE / "report.json").read_text())
    (outcome,) = report.outcomes
    assert (outcome.verdict.status, outcome.verdict.kind, outcome.expected) == (Status.HANG, HangKind.DEADLOCK, True)
    assert all((SAMPLE / path).is_file() for finding in outcome.findings for path in finding.proof)


def test_the_sample_is_no_run_that_a_command_would_find(tmp_path: Path) -> None:
    shutil.copytree(SAMPLE, tmp_path / "reports" / "sample")
    with pytest.raises(StoredRunError, match="contains no run"):
        find_run(None, tmp_path / "reports")


def test_ci_installs_as_the_readme_says() -> None:
    installed = re.findall(r"\.venv/bin/pip install .*?\"\.\[test\]\"", text("README.md"))
    assert len(installed) == 2
    assert all(line in text(".ci/run") for line in installed)
    assert "run: .ci/run" in text(".github/workflows/ci.yml")


def readme_commands() -> list[list[str]]:
    lines = [line for block in blocks("README.md", "(?:sh|console)") for line in block.splitlines()]
    return [shlex.split(line) for line in lines if line.startswith("nsa-harness")]


def launches(command: list[str]) -> bool:
    return command[1] in ("run", "selftest") and "--dry-run" not in command


def type_in(commands: list[list[str]], place: Path) -> None:
    """Run them in order in a directory that holds what the README speaks of; each must exit with 0."""
    shutil.copy(REPOSITORY / "tests" / "programs" / "ddp_blocks.py", place / "train.py")
    (place / "scenarios").mkdir()
    (place / "scenarios" / "train_small.yaml").write_text(blocks("docs/scenarios.md", "yaml")[1])
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NSA_")}
    environ = {**clean, "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": ""}
    for command in commands:
        arguments = [sys.executable, "-c", MAIN, *command[1:]]
        done = subprocess.run(arguments, cwd=place, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def test_what_the_readme_says_to_type_works(tmp_path: Path) -> None:
    """Without what starts ranks: end_to_end/test_healthy.py types the first of those, the slow suite all."""
    (tmp_path / "hello.py").write_text("print('hello')\n")
    a_run = ["nsa-harness", "run", "--script", "hello.py"]
    type_in([a_run, *(command for command in readme_commands() if not launches(command))], tmp_path)
    assert (tmp_path / "reports" / "latest" / "SUMMARY.md").is_file()


@pytest.mark.slow
def test_everything_the_readme_says_to_type_works(tmp_path: Path) -> None:
    type_in(readme_commands(), tmp_path)
    names = [path.parent.name for path in (tmp_path / "reports").glob("2*/*/result.txt")]
    assert {"ddp_onestep", "fault_deadlock", "gc_baseline_full", "branch_sel_only", "train"} <= set(names)
