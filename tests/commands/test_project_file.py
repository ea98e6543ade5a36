"""The table [tool.nsa-harness] of a user's pyproject.toml: defaults of options, and time limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsa_harness.cli import main as cli
from nsa_harness.commands.api import default_ranks, options_of_project, plan
from nsa_harness.commands.scheduler import RunRequest
from nsa_harness.core.plan import RunSpec
from nsa_harness.core.scenario.observed_job import observed_limits
from nsa_harness.supervisor.launch.project_file import project_limits, read_project_file
from nsa_harness.supervisor.storage.rundir import RunOptions

PROJECT = """\
[project]
name = "theirs"

[tool.nsa-harness]
ranks = 3
out = "build/reports"
probe = "board"
jobs = 2

[tool.nsa-harness.limits]
stall_s = 20
deadline_s = 600
"""
SCENARIO = "about: mine\nrun: {program: train.py, ranks: 2}\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "train.py").write_text("import torch\n")
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[RunRequest]:
    """The requests that `run` would carry out. Only this last stage is replaced."""
    taken: list[RunRequest] = []

    def take(request: RunRequest) -> int:
        taken.append(request)
        return 0

    monkeypatch.setattr("nsa_harness.commands.run.run_all", take)
    return taken


def the_spec(requests: list[RunRequest]) -> RunSpec:
    (spec,) = requests[-1].specs
    assert isinstance(spec, RunSpec)
    return spec


def test_the_project_sets_defaults_and_the_command_line_wins(project: Path, requests: list[RunRequest]) -> None:
    assert cli.run_command_line(["run", "train.py"]) == 0
    assert the_spec(requests).ranks == 3
    assert (the_spec(requests).limits.stall_s, the_spec(requests).limits.deadline_s) == (20.0, 600.0)
    options = requests[-1].options
    assert (options.out, options.probe, requests[-1].jobs) == (project / "build/reports", "board", 2)

    words = [
        "run",
        "train.py",
        "--ranks",
        "1",
        "--out",
        "here",
        "--probe",
        "full",
        "--jobs",
        "auto",
        "limits.stall_s=5",
    ]
    assert cli.run_command_line(words) == 0
    assert the_spec(requests).ranks == 1
    assert (the_spec(requests).limits.stall_s, the_spec(requests).limits.deadline_s) == (5.0, 600.0)
    options = requests[-1].options
    assert (options.out, options.probe, requests[-1].jobs) == (Path("here"), "full", None)


@pytest.mark.usefixtures("project")
def test_an_environment_variable_wins_over_the_project(
    requests: list[RunRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSA_HARNESS_RANKS", "2")
    assert cli.run_command_line(["run", "train.py"]) == 0
    assert the_spec(requests).ranks == 2


def test_a_directory_inside_the_project_has_its_defaults(
    project: Path, requests: list[RunRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "src").mkdir()
    monkeypatch.chdir(project / "src")
    assert cli.run_command_line(["run", "../train.py"]) == 0
    assert (the_spec(requests).ranks, requests[-1].options.out) == (3, project / "build/reports")


def test_a_scenario_keeps_its_own_limit(project: Path, requests: list[RunRequest]) -> None:
    (project / "own.yaml").write_text(f"name: own\n{SCENARIO}limits: {{stall_s: 77}}\n")
    assert cli.run_command_line(["run", "./own.yaml"]) == 0
    assert (the_spec(requests).limits.stall_s, the_spec(requests).limits.deadline_s) == (77.0, 600.0)


def test_watch_and_attach_take_the_limits_of_the_project(project: Path) -> None:
    limits = observed_limits(["limits.stall_s=9"], defaults=project_limits(project))
    assert (limits.stall_s, limits.deadline_s) == (9.0, 600.0)


def test_a_program_of_the_project_is_found_from_everywhere(project: Path) -> None:
    table = 'notify = ["exec ./page.sh --fast", "exec cat > file", "json://host/a/b", "exec hooks/page"]\n'
    (project / "pyproject.toml").write_text(f'[tool.nsa-harness]\n{table}on-hang = "exec ./page.sh"\n')
    settings = read_project_file(project / "inner")
    assert settings is not None
    assert settings.options() == {
        "notify": [
            f"exec {project}/page.sh --fast",
            "exec cat > file",
            "json://host/a/b",
            f"exec {project}/hooks/page",
        ],
        "on-hang": f"exec {project}/page.sh",
    }


def test_a_run_from_python_has_the_ranks_and_the_privacy_of_the_project(project: Path) -> None:
    (spec,) = plan(script="train.py")
    assert isinstance(spec, RunSpec)
    assert spec.ranks == 3
    assert options_of_project("x", None) == RunOptions(command="x")
    (project / "pyproject.toml").write_text("[tool.nsa-harness]\nno-values = true\ngit-diff = true\nno-redact = true\n")
    assert default_ranks(project) == 2
    expected = RunOptions(command="x", redact=False, reads_values=False, git_diff=True)
    assert options_of_project("x", None) == expected


@pytest.mark.usefixtures("project")
def test_explain_says_where_each_value_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_command_line(["explain", "train.py"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.split("\n")]
    assert '# --probe: "board" # pyproject.toml:7' in lines
    assert "ranks: 3 # pyproject.toml" in lines
    assert "stall_s: 20.0 # pyproject.toml:11" in lines
    assert cli.run_command_line(["explain", "train.py", "--ranks", "1", "limits.stall_s=4"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.split("\n")]
    assert "ranks: 1 # command line" in lines
    assert "stall_s: 4.0 # command line" in lines


def test_all_mistakes_are_told_at_once(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = 'ranks = 0\nout = ["a"]\nprobe = "boar"\nstrict = 3\njobs = "many"\nlimits = { stall_x = 3 }\nrank = 4\n'
    (project / "pyproject.toml").write_text(f"[tool.nsa-harness]\n{wrong}")
    assert cli.run_command_line(["run", "train.py"]) == 2
    errors = capsys.readouterr().err.strip().split("\n")
    assert errors == [
        "pyproject.toml:2:1: tool.nsa-harness.ranks: expected at least 1, got 0",
        "pyproject.toml:3:1: tool.nsa-harness.out: expected text, got a list",
        "pyproject.toml:4:1: tool.nsa-harness.probe: expected one of off, board, full,"
        ' got "boar"; did you mean "board"?',
        "pyproject.toml:5:1: tool.nsa-harness.strict: expected true or false, got 3",
        "pyproject.toml:6:1: tool.nsa-harness.jobs: expected a whole number of at least 1, or auto",
        'pyproject.toml:7:1: tool.nsa-harness.limits.stall_x: unknown key; did you mean "stall_s"?',
        'pyproject.toml:8:1: tool.nsa-harness.rank: unknown key; did you mean "ranks"?',
    ]
    assert not (project / "reports").exists()
    assert cli.run_command_line(["run", "--help"]) == 0  # help does not depend on the project


@pytest.mark.parametrize("text", ["tool = 3\n", "[tool.other]\nx = 1\n", "not TOML at all [", ""])
def test_a_file_without_the_table_is_ignored(project: Path, text: str) -> None:
    (project / "pyproject.toml").write_text(text)
    assert read_project_file(project) is None


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"[tool.nsa-harness]\nranks = \n", "pyproject.toml: Invalid value (at line 2, column 9)"),
        (b"[tool.nsa-harness]\nranks = '\xff'\n", "'utf-8' codec can't decode byte 0xff"),
        (b"[tool.nsa-harness]\n" + b"#" * 1_000_001, "larger than 1000000 bytes"),
        (b"tool.nsa-harness = 3\n", "tool.nsa-harness: expected a table"),
    ],
)
def test_an_unreadable_file_that_names_the_tool_is_an_error(
    project: Path, raw: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "pyproject.toml").write_bytes(raw)
    assert cli.run_command_line(["list"]) == 2
    assert message in capsys.readouterr().err


def test_the_search_ends_at_the_root_of_the_repository(project: Path) -> None:
    inner = project / "vendored"
    (inner / ".git").mkdir(parents=True)
    assert read_project_file(inner) is None
    (inner / ".git").rmdir()
    assert read_project_file(inner) is not None
