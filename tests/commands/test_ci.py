"""The workflows: sound as files, and the nightly's own steps run here over a small matrix, up to the summary."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from documents import REPOSITORY, text
from ruamel.yaml import YAML

from nsa_harness.cli.main import run_command_line
from nsa_harness.core.doctor import OLDEST_TORCH
from nsa_harness.core.plan import RunSpec
from nsa_harness.core.report import MachineFacts
from nsa_harness.supervisor.launch.planning import Invocation, plan_launches, select_shard
from nsa_harness.supervisor.storage.reports import matrix_jobs

WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
NIGHTLY = REPOSITORY / ".github" / "workflows" / "nightly-gpu.yml"
# Steps that this test leaves out: they install packages, or change a setting of the machine.
LEFT_OUT = {"Install", "Install without torch"}
LEFT_OUT_OF_A_BISECTION = {"Install for the bisection"}
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

Tree = dict[str, Any]
Command = Callable[..., subprocess.CompletedProcess[str]]


def workflow(path: Path) -> Tree:
    tree: Tree = YAML(typ="safe").load(path)
    return tree


def steps(path: Path) -> Iterator[tuple[str, Tree]]:
    for name, job in workflow(path)["jobs"].items():
        yield from ((name, step) for step in job["steps"])


def expressions(tree: object) -> Iterator[str]:
    """Every `${{ ... }}` of a workflow, and every bare `if:`."""
    if isinstance(tree, dict):
        for item in tree.values():
            yield from expressions(item)
    elif isinstance(tree, list):
        for item in tree:
            yield from expressions(item)
    elif isinstance(tree, str):
        yield from re.findall(r"\$\{\{\s*(.*?)\s*\}\}", tree)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actionlint_finds_nothing(path: Path) -> None:
    linter = shutil.which("actionlint")
    if linter is None:
        pytest.skip("needs actionlint, 1.6.23 or newer, on PATH; ci.yml runs it")
    done = subprocess.run([linter, str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_script_of_a_workflow_is_sound_bash(path: Path) -> None:
    scripts = [step["run"] for _, step in steps(path) if "run" in step]
    assert scripts
    for script in scripts:
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), script


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_no_expression_stands_inside_a_script_where_its_value_would_become_code(path: Path) -> None:
    assert [step["run"] for _, step in steps(path) if "${{" in step.get("run", "")] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_action_is_pinned_to_a_commit_and_every_job_has_a_limit_and_few_rights(path: Path) -> None:
    used = [line.split("uses:")[1].strip() for line in path.read_text().splitlines() if "uses:" in line]
    assert all(re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", word) for word in used)
    tree = workflow(path)
    assert tree["permissions"] == {"contents": "read"}
    assert "group" in tree["concurrency"]
    assert all("timeout-minutes" in job for job in tree["jobs"].values())


def test_one_action_has_one_version_in_all_workflows() -> None:
    used = set(re.findall(r"uses: (\S+?)@(\S+)", "".join(path.read_text() for path in WORKFLOWS)))
    assert len({action for action, _ in used}) == len(used) > 3


def test_ci_runs_on_every_python_that_the_package_claims() -> None:
    project = tomllib.loads(text("pyproject.toml"))["project"]
    claimed = [line.rsplit(" ", 1)[1] for line in project["classifiers"] if re.search(r":: 3\.\d+$", line)]
    assert workflow(WORKFLOWS[0])["jobs"]["cpu"]["strategy"]["matrix"]["python"] == claimed
    assert project["requires-python"] == f">={claimed[0]}"


def all_rows() -> list[Tree]:
    entries: list[Tree] = workflow(NIGHTLY)["jobs"]["scenarios"]["strategy"]["matrix"]["include"]
    return entries


def rows() -> list[Tree]:
    """The rows of the full matrix, without those for flash-attn and for a nightly torch."""
    return [row for row in all_rows() if not {"flash", "may_fail"} & set(row)]


def test_a_row_of_the_nightly_is_a_job_for_each_shard_backend_torch_and_number_of_gpus() -> None:
    torches = (f"{OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}", "2.13")
    assert re.search(rf"^torch=={torches[1]}\.", text("constraints.txt"), re.M), "the nightly tests the pinned torch"
    jobs = [(row["gpus"], row["backend"], row["shard"], row["torch"]) for row in rows()]
    assert sorted(jobs) == sorted(product((1, 2), ("gloo", "nccl"), ("1/2", "2/2"), torches))
    for row in rows():
        gpus, backend, shard, torch = row["gpus"], row["backend"], row["shard"].replace("/", "of"), row["torch"]
        assert row["name"] == f"{backend}-{gpus}gpu-torch{torch}-{shard}"
    tested = [(row["gpus"], row["torch"], row["tests"]) for row in rows() if row["tests"]]
    assert tested == [(gpus, torch, ("gpu", "gpu or multi_gpu")[gpus - 1]) for gpus, torch in product((1, 2), torches)]
    assert list(matrix_jobs(NIGHTLY)) == [row["name"] for row in all_rows()]


def test_one_job_has_flash_attn_and_one_a_nightly_torch_that_may_fail() -> None:
    flash, nightly = (row for row in all_rows() if row not in rows())
    assert (flash["flash"], flash.get("may_fail"), "gpu" in flash["tests"]) == (True, None, True)
    assert (nightly["torch"], nightly["may_fail"]) == ("nightly", True)
    job = workflow(NIGHTLY)["jobs"]["scenarios"]
    assert job["continue-on-error"] == "${{ matrix.may_fail || false }}"
    (install,) = [step for step in job["steps"] if step.get("if") == "${{ matrix.flash }}"]
    assert '-e ".[flash]"' in install["run"]


def test_the_nightly_uses_the_keys_of_its_rows() -> None:
    tree = workflow(NIGHTLY)["jobs"]["scenarios"]
    used = {name for found in expressions(tree) for name in re.findall(r"\bmatrix\.(\w+)", found)}
    assert all(set(row) == used - {"flash", "may_fail"} for row in rows())
    assert {name for row in all_rows() for name in row} == used


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_row_skips_the_scenario_of_the_other_backend_and_ends_before_its_limit(backend: str, gpus: int) -> None:
    facts = MachineFacts(host="runner", cpus=1, gpus=("GPU",) * gpus, torch="2.13")
    plan = Invocation(arguments=(), tags=("plan",), working_dir=REPOSITORY / "docs", environ={})
    named = {
        spec.scenario: dict(spec.settings).get("needs.backend", backend) for spec in plan_launches(plan, facts).specs
    }
    (other,) = {row["without"] for row in rows() if (row["backend"], row["gpus"]) == (backend, gpus)}
    assert [scenario for scenario, own in named.items() if own != backend] == [other]
    specs = [spec for spec in plan_launches(plan, facts).specs if spec.scenario != other]
    (limit,) = [step["timeout-minutes"] for _, step in steps(NIGHTLY) if step.get("name") == "Run the scenarios"]
    for shard in ("1/2", "2/2"):
        launches = [spec for spec in select_shard(specs, (int(shard[0]), 2)) if isinstance(spec, RunSpec)]
        assert launches
        assert sum((spec.limits.deadline_s or 0.0) + 60 for spec in launches) / 60 <= limit


def test_the_nightly_goes_on_after_a_failed_job_and_always_keeps_what_was_seen_and_sums_up() -> None:
    jobs = workflow(NIGHTLY)["jobs"]
    assert jobs["scenarios"]["strategy"]["fail-fast"] is False
    assert jobs["summary"]["if"] == "${{ always() }}"
    kept = [step for _, step in steps(NIGHTLY) if "upload-artifact" in step.get("uses", "")]
    assert [step["if"] for step in kept] == ["${{ always() }}"] * 3


def test_the_limits_of_the_steps_fit_into_that_of_the_job() -> None:
    minutes = [step.get("timeout-minutes", 0) for name, step in steps(NIGHTLY) if name == "scenarios"]
    assert sum(minutes) < workflow(NIGHTLY)["jobs"]["scenarios"]["timeout-minutes"] <= 360  # GitHub allows no more


def test_the_summary_installs_every_dependency_but_the_heavy_ones() -> None:
    needed = {
        re.split(r"[^\w.-]", line)[0] for line in tomllib.loads(text("pyproject.toml"))["project"]["dependencies"]
    }
    (install,) = [step for _, step in steps(NIGHTLY) if step.get("name") == "Install without torch"]
    assert set(install["env"]["LIGHT"].split()) == needed - {"torch", "numpy", "py-spy"}


# The command line.


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command in this process, in an empty directory, for what is no claim on how it starts."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        with monkeypatch.context() as patch:
            for name in os.environ.keys() - clean().keys():
                patch.delenv(name)
            for name, value in {**clean(), **environ}.items():
                patch.setenv(name, value)
            code = run_command_line(words)
        return subprocess.CompletedProcess(words, code, *capsys.readouterr())

    return run


def nsa_harness(*words: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["nsa-harness", *words], capture_output=True, text=True, cwd=cwd, env={**clean(), **environ}, check=False
    )


def clean() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NSA_", "TORCH_", "GITHUB_"))}
    return {**kept, "PATH": PATH, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (["matrix"], "list the jobs in the matrix of the workflow"),
        (["matrix", "--json", "-t", "ddp", "--shards", "3", "--cpu"], "list the jobs in the matrix of the workflow"),
        (["matcher"], "`run` prints annotations if GITHUB_ACTIONS is set"),
    ],
)
def test_what_ci_no_longer_does_is_answered_in_one_line(words: list[str], instead: str, here: Command) -> None:
    done = here("ci", *words, NSA_HARNESS_SHARDS="2")
    assert (done.returncode, "include" in done.stdout) == (2, False)
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"`nsa-harness ci {words[0]}` was removed: {instead}")


def test_a_summary_of_hostile_files_is_red_with_one_line_for_each_and_no_traceback(tmp_path: Path) -> None:
    whole = text("reports/sample/report.json")
    bad = {
        "cut": whole[: len(whole) // 2],
        "empty": "",
        "foreign": '{"tests": 12, "passed": 12}',
        "deep": "[" * 100_000,
        "lies": whole.replace('"verdict": "HANG"', '"verdict": "PASSED"'),
        "nan": whole.replace('"wall_s": ', '"wall_s": NaN, "x": ', 1),
    }
    for name, content in bad.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_text(content)
    done = nsa_harness("ci", "summary", ".", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (125, "")
    assert done.stdout.startswith(f"# RED: no report at all, {len(bad)} files unreadable\n")
    assert "PASS 0 · FAIL 0 · HANG 0 · SKIP 0 · ERROR 0" in done.stdout
    assert sorted(re.findall(r"^- `(\w+)/report.json`: .", done.stdout, re.M)) == sorted(bad)


def test_a_summary_can_be_kept_and_read_by_programs(tmp_path: Path) -> None:
    (tmp_path / "runs" / "job").mkdir(parents=True)
    shutil.copy(REPOSITORY / "reports/sample/report.json", tmp_path / "runs" / "job" / "report.json")
    done = nsa_harness("ci", "summary", "runs", "--json", "--out", "all.json", cwd=tmp_path)
    summary = json.loads(done.stdout)
    assert (done.returncode, summary["red"], summary["counts"]["HANG"]) == (0, False, 1)
    assert [job["job"] for job in summary["jobs"]] == ["job"]
    assert (tmp_path / "all.json").read_text() == done.stdout
    refused = nsa_harness("ci", "summary", "runs", "--out", "nowhere/all.md", cwd=tmp_path)
    assert (refused.returncode, refused.stderr) == (
        2,
        "--out nowhere/all.md: No such file or directory; name a file in a writable directory\n",
    )


# The nightly itself, without GitHub.


@dataclass(kw_only=True)
class Night:
    """A checkout in a directory of its own, and what GitHub would hold for the workflow that runs in it."""

    checkout: Path
    inputs: Mapping[str, str]
    contexts: dict[str, Any] = field(default_factory=dict)
    artifacts: dict[str, Path] = field(default_factory=dict)
    exits: dict[str, int] = field(default_factory=dict)  # of the step that ran last under each name
    said: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    also_left_out: frozenset[str] = frozenset()
    left_out: set[str] = field(default_factory=set)

    def scenarios(self, entry: Tree) -> None:
        self._job("scenarios", {"matrix": entry, "steps": {"install": {"outcome": "success"}}})

    def summary(self) -> str:
        self._file("GITHUB_STEP_SUMMARY").unlink(missing_ok=True)
        self._job("summary", {})
        return self._file("GITHUB_STEP_SUMMARY").read_text()

    def first_bad_commits(self) -> str:
        """Run the bisections that the summary asked for, and return what they add to the summary."""
        self._file("GITHUB_STEP_SUMMARY").unlink(missing_ok=True)
        for row in json.loads(self.outputs["rows"]):
            self._job("first-bad-commit", {"matrix": row})
        summary = self._file("GITHUB_STEP_SUMMARY")
        return summary.read_text() if summary.exists() else ""

    def _job(self, name: str, contexts: Mapping[str, Any]) -> None:
        tree = workflow(NIGHTLY)
        job = tree["jobs"][name]
        known = {"inputs": self.inputs, "vars": {}, **self.contexts, **contexts}
        for step in job["steps"]:
            if "if" in step and not self._value(step["if"], known):
                continue
            environ = {**tree.get("env", {}), **job.get("env", {}), **step.get("env", {})}
            filled = {key: self._filled(value, known) for key, value in environ.items()}
            if "run" in step:
                self._script(step, filled)
            else:
                self._action(step["uses"].split("@")[0], step.get("with", {}), known)

    def _script(self, step: Tree, environ: Mapping[str, str]) -> None:
        if step["name"] in LEFT_OUT | LEFT_OUT_OF_A_BISECTION | self.also_left_out:
            self.left_out.add(step["name"])
            return
        files = {
            name: str(self._file(name))
            for name in ("GITHUB_OUTPUT", "GITHUB_ENV", "GITHUB_STEP_SUMMARY", "GITHUB_PATH")
        }
        files["LAST"] = str(self._file("last"))
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=self.checkout,
            env={**clean(), "PATH": f"{self._file('bin')}{os.pathsep}{PATH}", **files, **environ},
            capture_output=True,
            text=True,
            check=False,
        )
        if self._file("GITHUB_OUTPUT").exists():
            self.outputs |= dict(line.split("=", 1) for line in self._file("GITHUB_OUTPUT").read_text().splitlines())
        self.exits[step["name"]], self.said[step["name"]] = done.returncode, done.stdout + done.stderr

    def _action(self, action: str, given: Mapping[str, str], known: Mapping[str, Any]) -> None:
        if action == "actions/upload-artifact" and given["name"] == "summary":
            shutil.copytree(self.checkout / "summary", self._file("last"), dirs_exist_ok=True)
        elif action == "actions/upload-artifact" and given["name"].startswith("bisect-"):
            shutil.rmtree(self.checkout / "out")
        elif action == "actions/upload-artifact":
            # An upload follows links, so `latest` would become a second copy of a run.
            name = self._filled(given["name"], known)
            kept = self.checkout.parent / "artifacts" / name
            self.artifacts[name] = Path(shutil.copytree(self.checkout / "out", kept))
            shutil.rmtree(self.checkout / "out")
        elif action == "actions/download-artifact":
            shutil.rmtree(self.checkout / given["path"], ignore_errors=True)
            for name, kept in self.artifacts.items():
                shutil.copytree(kept, self.checkout / given["path"] / name)

    def _file(self, name: str) -> Path:
        return self.checkout.parent / name

    def _filled(self, value: object, known: Mapping[str, Any]) -> str:
        return re.sub(r"\$\{\{\s*(.*?)\s*\}\}", lambda match: str(self._value(match[1], known)), str(value))

    def _value(self, expression: str, known: Mapping[str, Any]) -> object:
        """The few expressions that the nightly uses: names with dots, ==, !=, &&, ||, always() and cancelled()."""
        source = expression.removeprefix("${{").removesuffix("}}").strip()
        for theirs, ours in (("!cancelled()", "True"), ("always()", "True"), ("&&", "and"), ("||", "or")):
            source = source.replace(theirs, ours)
        source = re.sub(
            r"\b(?:matrix|needs|steps|inputs|vars|github)(?:\.\w+)+", lambda match: repr(_at(known, match[0])), source
        )
        return eval(source, {"__builtins__": {}})


def _at(known: Mapping[str, Any], name: str) -> object:
    """What a name with dots stands for; empty where there is nothing, as in GitHub's expressions."""
    value: Any = known
    for key in name.split("."):
        value = value.get(key, "") if isinstance(value, Mapping) else ""
    return value


PASSES = "{tags: [night], priority: 1, run: {ranks: 1, command: [sh, -c, 'echo loss 0.5']}}"
STEP = "{extends: base/ddp, tags: [night], priority: 1, train: {steps: 1}, expect: {missing_grads: 0}}"
SCENARIOS = {
    "a_passes": PASSES,
    "passes": PASSES,
    "wants_gpus": "{tags: [night], needs: {gpus: 8}, run: {ranks: 1, command: [sh, -c, 'exit 0']}}",
    "fails_as_known": "{tags: [night], run: {ranks: 1, command: [sh, -c, 'exit 3']}, expect: {verdict: FAIL}}",
}

# Three rows for a machine without a GPU.
SHARDS = [
    {**rows()[0], "name": f"cpu-{number}of3", "gpus": 0, "torch": "2.13", "shard": f"{number}/3", "tests": ""}
    for number in (1, 2, 3)
]


# What `gh` has: the summary of the last night, if there was one.
GH = """#!/bin/sh
case "$1 $2" in
  "run list") [ ! -d "$LAST" ] || echo 41 ;;
  "run download") [ "$3 $4 $5 $6" = "41 --name summary --dir" ] && cp -r "$LAST/." "$7" ;;
esac
"""


@pytest.fixture
def night(tmp_path: Path) -> Night:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "gh").write_text(GH)
    (tmp_path / "bin" / "gh").chmod(0o755)
    checkout = tmp_path / "checkout"
    (checkout / "scenarios").mkdir(parents=True)
    shutil.copy(REPOSITORY / "constraints.txt", checkout)
    for name, content in SCENARIOS.items():
        (checkout / "scenarios" / f"{name}.yaml").write_text(content)
    workflows = checkout / ".github" / "workflows"
    workflows.mkdir(parents=True)
    tree = workflow(NIGHTLY)
    tree["jobs"]["scenarios"]["strategy"]["matrix"]["include"] = SHARDS
    YAML(typ="safe").dump(tree, workflows / NIGHTLY.name)
    contexts = {"needs": {"scenarios": {"result": "success"}}, "github": {"token": "", "ref_name": "main"}}
    return Night(checkout=checkout, inputs={"tag": "night"}, contexts=contexts)


def run_through(night: Night) -> list[str]:
    """Run the whole nightly over three jobs; return their names."""
    for entry in SHARDS:
        night.scenarios(entry)
        assert night.exits["Run the scenarios"] == 0, night.said["Run the scenarios"]
        assert "torch==2.13.*" in (kept(night, entry["name"]) / "constraints.txt").read_text()
    return [entry["name"] for entry in SHARDS]


def kept(night: Night, job: str) -> Path:
    return night.artifacts[job] / job


def test_the_steps_of_the_nightly_run_over_three_jobs_and_merge_into_one_summary(night: Night) -> None:
    night.also_left_out = frozenset({"Doctor"})
    names = run_through(night)
    green = night.summary()
    assert night.exits["Summarise"] == 0, night.said
    assert green.startswith("# GREEN: every verdict is as expected\n")
    assert "4 verdicts from 3 jobs: PASS 2 · FAIL 1 · HANG 0 · SKIP 1 · ERROR 0. Exit code 0." in green
    assert "| wants_gpus | needs 8 GPUs; this machine has no GPU | " in green
    assert night.left_out == LEFT_OUT | {"Doctor"}
    summary = json.loads((night.checkout / "summary" / "summary.json").read_text())
    assert [job["job"] for job in summary["jobs"]] == names

    del night.artifacts[names[1]]
    night.contexts["needs"]["scenarios"]["result"] = "failure"
    red = night.summary()
    assert night.exits["Summarise"] == 125
    assert red.startswith("# RED: 1 job left no report\n")
    assert f"- {names[1]} left no report" in red
    assert "The jobs together ended as **failure**" in red


def git(checkout: Path, *words: str) -> str:
    identity = {f"GIT_{who}_{what}": "x@example.com" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    done = subprocess.run(
        ["git", *words], cwd=checkout, env={**clean(), **identity}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_three_nights_name_a_regression_a_flake_and_a_fix_once_and_find_the_first_bad_commit(night: Night) -> None:
    night.also_left_out = frozenset({"Doctor"})
    state = night.checkout.parent / "state"
    programs = {
        "regresses": "sh regresses.sh",
        "mended": "sh mended.sh",
        "flakes": f"if [ -e {state} ]; then rm {state}; exit 3; fi; echo loss 0.5",
        "good": "echo loss 0.5",
    }
    for scenario in SCENARIOS:
        (night.checkout / "scenarios" / f"{scenario}.yaml").unlink()
    for scenario, command in programs.items():
        (night.checkout / "scenarios" / f"{scenario}.yaml").write_text(
            json.dumps({"tags": ["night"], "run": {"ranks": 1, "command": ["sh", "-c", command]}})
        )
    (night.checkout / ".gitignore").write_text("/out/\n/runs/\n/summary/\n/before/\n/nights.txt\n")
    git(night.checkout, "init", "-q", "-b", "main")

    def commit(subject: str, regresses: str, mended: str) -> str:
        (night.checkout / "regresses.sh").write_text(f"# {subject}\n{regresses}\n")
        (night.checkout / "mended.sh").write_text(f"{mended}\n")
        git(night.checkout, "add", "-A")
        git(night.checkout, "commit", "-qm", subject)
        return git(night.checkout, "rev-parse", "HEAD")

    def pass_through() -> tuple[str, Tree]:
        shutil.rmtree(night.checkout.parent / "artifacts", ignore_errors=True)
        for entry in SHARDS:
            night.scenarios(entry)
        text = night.summary()
        return text, json.loads((night.checkout / "summary" / "summary.json").read_text())

    def named(values: Tree) -> dict[str, list[str]]:
        groups = ("new_failures", "flaky", "still_failing", "fixed")
        return {group: [item["scenario"] for item in values[group]] for group in groups if values[group]}

    good = commit("works", "echo loss 0.5", "exit 4")
    text, values = pass_through()
    assert named(values) == {"new_failures": ["mended"]}, text
    assert night.outputs["rows"] == "[]"  # no earlier night is known
    shutil.rmtree(night.checkout / "before")

    commit("harmless", "echo loss 0.4", "exit 4")
    culprit = commit("breaks it", "echo sorry >&2; exit 5", "echo loss 0.5")
    commit("harmless, too", "echo sorry >&2; exit 5", "echo loss 0.5")
    state.touch()
    text, values = pass_through()
    assert night.exits["Summarise"] == 1
    assert named(values) == {"new_failures": ["regresses"], "flaky": ["flakes"], "fixed": ["mended"]}, text
    assert f"commit {good[:12]}" in text
    assert "- Repeat: `nsa-harness run regresses`" in text
    (row,) = json.loads(night.outputs["rows"])
    assert (row["scenario"], row["good"], row["gpus"]) == ("regresses", good[:12], 0)
    answer = night.first_bad_commits()
    assert f"{culprit[:7]} breaks it" in answer, answer
    shutil.rmtree(night.checkout / "before")

    text, values = pass_through()
    assert named(values) == {"still_failing": ["regresses"]}, text
    assert text.count("mended") == text.count("flakes") == 0
    assert night.outputs["rows"] == "[]"


@pytest.mark.slow
def test_the_nightly_runs_with_its_doctor_and_real_steps_of_training(night: Night) -> None:
    for name in ("a_passes", "passes"):
        (night.checkout / "scenarios" / f"{name}.yaml").write_text(STEP)
    names = run_through(night)
    assert night.exits["Doctor"] in (0, 1)
    assert all("torch" in (kept(night, name) / "doctor.txt").read_text() for name in names)
    assert night.summary().startswith("# GREEN: every verdict is as expected\n")
    assert night.left_out == LEFT_OUT


def test_a_nightly_without_a_report_is_red_and_names_every_job(night: Night) -> None:
    night.contexts["needs"]["scenarios"]["result"] = "skipped"
    red = night.summary()
    assert night.exits["Summarise"] == 125
    assert red.startswith("# RED: no report at all, 3 jobs left no report\n") or "3 jobs left no report" in red


@pytest.mark.parametrize(("code", "step", "warned"), [(0, 0, False), (1, 1, False), (5, 0, True)])
def test_gpu_tests_that_fail_make_the_step_fail_and_none_at_all_is_a_warning(
    code: int, step: int, warned: bool, tmp_path: Path
) -> None:
    (tmp_path / "pytest").write_text(f"#!/bin/sh\nexit {code}\n")
    (tmp_path / "pytest").chmod(0o755)
    (script,) = [one["run"] for _, one in steps(NIGHTLY) if one.get("name") == "Tests that need a GPU"]
    done = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", script],
        env={**clean(), "PATH": f"{tmp_path}:{PATH}", "TESTS": "gpu", "OUT": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout == "::warning::no test is marked gpu\n") == (step, warned)
