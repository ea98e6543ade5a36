"""What others put into their CI: the GitHub action, the workflows of `ci init`, and the forms of docs/ci.md."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from documents import text
from ruamel.yaml import YAML

from nsa_harness.cli.main import run_command_line

PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

Tree = dict[str, Any]


def load(content: str) -> Tree:
    tree: Tree = YAML(typ="safe").load(content)
    return tree


def bash(script: str, cwd: Path, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NSA_", "TORCH_", "GITHUB_"))}
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
        cwd=cwd,
        env={**kept, "PATH": PATH, "CUDA_VISIBLE_DEVICES": "", **(environ or {})},
        capture_output=True,
        text=True,
        check=False,
    )


ACTION = load(text("action.yml"))
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"]}


def example(language: str, containing: str) -> str:
    """The block of docs/ci.md with this text."""
    blocks: list[str] = re.findall(rf"```{language}\n(.*?)```", text("docs/ci.md"), re.S)
    (block,) = (block for block in blocks if containing in block)
    return block


def test_the_action_is_a_sound_composite_action() -> None:
    assert ACTION["runs"]["using"] == "composite"
    assert {"name", "description", "inputs", "runs"} == set(ACTION)
    assert all(
        {"description"} < set(given) <= {"description", "required", "default"} for given in ACTION["inputs"].values()
    )
    for step in ACTION["runs"]["steps"]:
        assert ("run" in step) != ("uses" in step)
        if "run" in step:
            assert step["shell"] == "bash"
            assert "${{" not in step["run"], "its value would become code"
            assert subprocess.run(["bash", "-n"], input=step["run"], text=True, check=False).returncode == 0
        else:
            assert re.search(rf"uses: {re.escape(step['uses'])} # v\d", text("action.yml"))
            assert step["uses"] in text(".github/workflows/nightly-gpu.yml"), "another version than in the nightly"
    used = set(re.findall(r"inputs\.(\w+)", text("action.yml")))
    assert used == set(ACTION["inputs"])


def test_the_example_needs_three_lines() -> None:
    example_text = example("yaml", "uses: nsa-harness/nsa-harness")
    (step,) = load(example_text)
    assert (set(step), set(step["with"])) == ({"uses", "with"}, {"script"})
    assert set(step["with"]) <= set(ACTION["inputs"])


def run_action(repository: Path, **inputs: str) -> tuple[int, str, str]:
    """Run the step of the action that runs the script. Return its exit code, the job summary and its output."""
    values = {name: given.get("default", "") for name, given in ACTION["inputs"].items()} | inputs
    step = STEPS["Run the script"]
    environ = {
        name: re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda match: values[match[1]], value)
        for name, value in step["env"].items()
    }
    files = {"GITHUB_STEP_SUMMARY": str(repository.parent / "summary"), "RUNNER_TEMP": str(repository.parent / "temp")}
    (repository.parent / "temp").mkdir()
    github = {"GITHUB_ACTIONS": "true", "GITHUB_WORKSPACE": str(repository)}
    done = bash(step["run"], repository, {**environ, **files, **github})
    summary = repository.parent / "summary"
    return done.returncode, summary.read_text() if summary.exists() else "", done.stdout + done.stderr


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A stranger's repository with one script."""
    path = tmp_path / "repository"
    (path / ".git").mkdir(parents=True)
    (path / "train.py").write_text(
        "import sys\nprint('given', sys.argv[1:])\nif '--fail' in sys.argv:\n    raise ValueError('a wrong shape')\n"
    )
    return path


def test_the_action_puts_the_verdict_into_the_job_summary(repository: Path) -> None:
    code, summary, said = run_action(repository, script="train.py", ranks="1", args="--name 'two words'")
    assert (code, "PASS" in summary) == (0, True), said
    logs = (repository.parent / "temp" / "nsa-harness").resolve().rglob("*.log")
    assert "given ['--name', 'two words']" in "".join(log.read_text(errors="replace") for log in logs)


def test_the_action_fails_and_annotates_the_line_of_a_failure(repository: Path) -> None:
    code, summary, said = run_action(repository, script="train.py", ranks="1", args="--fail")
    assert (code, "FAIL" in summary, "a wrong shape" in summary) == (1, True, True), said
    assert re.search(r"^::error file=train.py,line=4,title=FAIL train::", said, re.M), said


def test_the_action_takes_the_ranks_of_the_project_and_passes_options(repository: Path) -> None:
    (repository / "pyproject.toml").write_text("[tool.nsa-harness]\nranks = 1\n")
    code, summary, said = run_action(repository, script="train.py", options="--strict limits.deadline_s=100")
    assert (code, "- 1 rank ·" in summary, "at most 1 min 40 s" in said) == (0, True, True), summary + said


def test_the_action_without_a_run_ends_with_the_reason(repository: Path) -> None:
    code, summary, said = run_action(repository, script="trian.py")
    assert (code, summary) == (2, "")
    assert 'no file "trian.py"' in said


# `ci init`.


@pytest.fixture
def there(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(repository)
    return repository


FILES = {"--github": ".github/workflows/nsa-harness.yml", "--gitlab": ".gitlab-ci.yml"}


def init(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = run_command_line(["ci", "init", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("host", FILES)
def test_init_shows_the_file_and_writes_it_only_if_asked(
    host: str, there: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = there / FILES[host]
    code, out, err = init(capsys, "train.py", host)
    assert (code, file.exists()) == (2, False)
    assert "nsa-harness run train.py --ranks 2 --out reports" in out
    assert err == "nothing was written: there is no terminal to ask on; --yes writes the file without asking\n"
    code, out, _ = init(capsys, "train.py", host, "--yes")
    assert (code, out.splitlines()[-1]) == (0, f"wrote {file}")
    assert file.read_text() in out
    assert init(capsys, "train.py", host, "--yes")[:2] == (
        0, f"{file} is there already, with the same content\n"
    )  # fmt: skip


@pytest.mark.parametrize("host", FILES)
@pytest.mark.parametrize("kind", ["other", "link", "directory", "no text"])
def test_init_never_overwrites(host: str, kind: str, there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = there / FILES[host]
    file.parent.mkdir(parents=True, exist_ok=True)
    if kind == "other":
        file.write_text("mine: yes\n")
    elif kind == "link":
        file.symlink_to(there / "nowhere")
    elif kind == "directory":
        file.mkdir()
    else:
        file.write_bytes(b"\xff\xfe")
    code, out, err = init(capsys, "train.py", host, "--yes")
    assert (code, out) == (2, "")
    assert f"{file} exists and is not changed" in err
    if kind == "other":
        assert "-mine: yes" in err
        assert file.read_text() == "mine: yes\n"
    assert not (there / "nowhere").exists()


@pytest.mark.parametrize(("answer", "is_written"), [("y\n", True), ("n\n", False), ("", False)])
def test_init_asks_on_a_terminal(
    answer: str, is_written: bool, there: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO(answer)
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdin", terminal)
    code, _, err = init(capsys, "train.py")
    assert (code == 0, (there / FILES["--github"]).exists()) == (is_written, is_written)
    assert f"Write {there / FILES['--github']}?" in err


def test_init_names_a_script_from_the_root_and_a_scenario_as_it_is(
    there: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = there / "a dir"
    inner.mkdir()
    (inner / "train it.py").write_text("")
    monkeypatch.chdir(inner)
    assert "nsa-harness run 'a dir/train it.py' --ranks 4 --out" in init(capsys, "train it.py", "--ranks", "4")[1]
    assert "nsa-harness run my_scenario --out" in init(capsys, "my_scenario")[1]
    assert init(capsys, "trian.py")[0] == 2
    (there.parent / "outside.py").write_text("")
    assert "no file ../../outside.py in the repository" in init(capsys, "../../outside.py")[2]


def test_the_github_workflow_is_sound_and_its_run_step_puts_the_verdict_into_the_summary(
    there: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    init(capsys, "train.py", "--ranks", "1", "--yes")
    written = (there / FILES["--github"]).read_text()
    tree = load(written)
    assert tree["permissions"] == {"contents": "read"}
    (job,) = tree["jobs"].values()
    assert "timeout-minutes" in job
    pinned = {line.split("uses: ")[1] for line in written.splitlines() if "uses: " in line}
    assert all(line in text(".github/workflows/nightly-gpu.yml") for line in pinned), "another version than the nightly"
    (step,) = (step for step in job["steps"] if step.get("name") == "Run")
    done = bash(step["run"], there, {"GITHUB_STEP_SUMMARY": str(there / "summary")})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS" in (there / "summary").read_text()


# What `pip` installs is installed here.
NO_INSTALLATION = "python() { [ \"$1 $2 $3\" = '-m pip install' ]; }\n"


@pytest.mark.slow
def test_the_gitlab_job_runs_in_bash_and_leaves_what_it_uploads(
    there: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    init(capsys, "train.py", "--ranks", "1", "--gitlab", "--yes")
    (job,) = load((there / FILES["--gitlab"]).read_text()).values()
    done = bash(NO_INSTALLATION + "\n".join(job["script"]), there)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(there.glob(job["artifacts"]["reports"]["junit"]))) == 1
    assert all((there / path).is_dir() for path in job["artifacts"]["paths"])
    (there / "train.py").write_text("raise ValueError('a wrong shape')\n")
    assert bash(NO_INSTALLATION + "\n".join(job["script"]), there).returncode == 1


@pytest.mark.slow
def test_the_nightly_forms_of_the_docs_compare_two_nights(there: Path) -> None:
    """The crontab and the GitLab job of docs/ci.md, each over two nights with a failure in the second."""
    project = there.rename(there.parent / "project")
    (project / "nightly.sh").write_text(example("bash", "# nightly.sh"))
    line = example("text", "# crontab").splitlines()[1]
    job = load(example("yaml", "nightly:"))["nightly"]
    for form in (line.split(None, 5)[5], NO_INSTALLATION + "\n".join(job["script"])):
        shutil.rmtree(project / "night", ignore_errors=True)
        for program, code, told in (
            ("print('loss 0.5')", 0, "0 new failures"),
            ("raise ValueError('a wrong shape')", 1, "1 new failures"),
        ):
            (project / "train.py").write_text(f"{program}\n")
            done = bash(form, project, {"HOME": str(project.parent)})
            assert done.returncode == code, done.stdout + done.stderr
            assert f"{told}, 0 flaky, 0 still failing, 0 fixed" in (project / "night" / "SUMMARY.md").read_text()
        assert all((project / path).is_dir() for path in job["cache"]["paths"] + job["artifacts"]["paths"])
