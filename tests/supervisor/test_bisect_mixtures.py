"""What lies between two config files or two environments, made without touching either."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from nsa_harness.core.experiment.trial import SoughtFailure
from nsa_harness.core.report import MachineFacts
from nsa_harness.core.search.subject import SubjectForm
from nsa_harness.errors import UsageError
from nsa_harness.supervisor.experiments import intermediate_configs
from nsa_harness.supervisor.experiments.intermediate_configs import (
    CannotMixError,
    Mixtures,
    different_keys,
    mixed_text,
    read_environment,
)
from nsa_harness.supervisor.experiments.launches import (
    BisectRequest,
    CannotLaunchError,
    Launches,
    Templates,
    parse_templates,
)
from nsa_harness.supervisor.experiments.subjects import SubjectOptions, make_subject, program_arguments
from nsa_harness.supervisor.launch.planning import Invocation, Script
from nsa_harness.supervisor.storage.rundir import RunOptions

FACTS = MachineFacts(host="h", cpus=2, gpus=(), torch="2.13.0")
GOOD = """\
# how we train
lr: 1e-5
name: 'base'
optim: {kind: adam, betas: [0.9, 0.95]}
data:
  shards: 4      # of eight
  shuffle: yes
debug: true
"""
BAD = """\
lr: 1e-3
name: 'base'
optim: {kind: adam, betas: [0.9, 0.99]}
data:
  shards: 4
  shuffle: no
  workers: 2
"""


@pytest.fixture
def typed(tmp_path: Path) -> Invocation:
    (tmp_path / "train.py").write_text("print('trained')\n")
    (tmp_path / "good.yaml").write_text(GOOD)
    (tmp_path / "bad.yaml").write_text(BAD)
    script = Script(file="train.py", ranks=2, args=())
    return Invocation(arguments=(), working_dir=tmp_path, environ={}, script=script)


def _launches(question: Invocation, options: SubjectOptions, templates: Templates = Templates()) -> Launches:  # noqa: B008
    question, subject = make_subject(options, question, templated=bool(templates), facts=FACTS)
    request = BisectRequest(
        question=question, subject=subject, templates=templates.checked_for(subject),
        base_args=program_arguments(question),
        sought=SoughtFailure(), confidence=0.95, repeat=1, jobs=1, budget_s=None, fork=True,
        options=RunOptions(command=""),
    )  # fmt: skip
    return Launches(request=request, facts=FACTS)


def _refused(question: Invocation, options: SubjectOptions, templates: Templates = Templates()) -> str:  # noqa: B008
    with pytest.raises(UsageError) as refused:
        _launches(question, options, templates)
    return str(refused.value)


def test_two_config_files_differ_key_by_key_and_a_mixture_keeps_what_is_written(typed: Invocation) -> None:
    good, bad = typed.working_dir / "good.yaml", typed.working_dir / "bad.yaml"
    keys = {key.label: (key.good, key.bad) for key in different_keys(good, bad)}
    assert keys == {
        "lr": (1e-5, 1e-3),
        "optim.betas": ([0.9, 0.95], [0.9, 0.99]),
        "data.shuffle": ("yes", "no"),
        "data.workers": (None, 2),
        "debug": (True, None),
    }
    assert mixed_text(good, bad, ()) == GOOD
    mixed = mixed_text(good, bad, {"lr", "data.workers", "debug"})
    assert mixed.startswith("# how we train\nlr: 1e-3\nname: 'base'\n")
    assert "shuffle: yes\n  workers: 2" in mixed
    assert "debug" not in mixed


def test_one_true_and_a_text_of_it_are_three_values_and_json_stays_json(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text('{"a": 1, "b": 1, "c": 2, "d": {"e": 1}, "f": null}')
    bad.write_text('{"a": true, "b": "1", "c": 2, "d": 3}')
    assert [key.label for key in different_keys(good, bad)] == ["a", "b", "d", "f"]
    assert json.loads(mixed_text(good, bad, {"a", "d"})) == {"a": True, "b": 1, "c": 2, "d": 3, "f": None}


def test_a_program_is_given_its_own_files_at_both_ends_and_a_mixture_in_between(typed: Invocation) -> None:
    launches = _launches(typed, SubjectOptions(set="good.yaml,bad.yaml"), parse_templates(["--config={file}"], []))
    assert (launches.subject.form, len(launches.subject.items)) == (SubjectForm.FILE, 5)
    assert launches.spec(()).program[-1] == "--config=good.yaml"
    assert launches.command(range(5), None) == "nsa-harness run train.py --ranks 2 -- --config=bad.yaml"
    home = typed.working_dir / "run" / "mixtures"
    launches.use_mixtures(Mixtures(home=home))
    word = launches.spec((0,)).program[-1]
    path = Path(word.removeprefix("--config="))
    assert (path.parent, path.suffix) == (home, ".yaml")
    assert path.read_text() == mixed_text(typed.working_dir / "good.yaml", typed.working_dir / "bad.yaml", {"lr"})
    assert launches.command((0,), None) == f"nsa-harness run train.py --ranks 2 -- {word}"
    hashed = launches.spec(()).spec_hash
    with (typed.working_dir / "good.yaml").open("a") as file:
        file.write("seed: 3\n")
    launches.specs.clear()
    assert launches.spec(()).spec_hash != hashed


def test_files_that_are_no_configs_are_refused_with_the_way_that_works(typed: Invocation) -> None:
    templates = parse_templates(["--config={file}"], [])
    both = SubjectOptions(set="good.yaml,bad.yaml")
    assert "add --arg '--config={file}'" in _refused(typed, both)
    assert "nothing to bisect" in _refused(replace(typed, script=None), both, templates)
    assert "differ in no key" in _refused(typed, SubjectOptions(set="good.yaml,good.yaml"), templates)
    assert "no.yaml" in _refused(typed, SubjectOptions(set="good.yaml,no.yaml"), templates)
    assert "two files of one kind" in _refused(typed, SubjectOptions(set="good.yaml,train.py"), templates)
    assert "expected GOOD,BAD" in _refused(typed, SubjectOptions(set="good.yaml"), templates)
    (typed.working_dir / "list.yaml").write_text("- 1\n")
    (typed.working_dir / "torn.yaml").write_text("a: [1\n")
    assert "expected keys with values" in _refused(typed, SubjectOptions(set="good.yaml,list.yaml"), templates)
    assert "cannot be read" in _refused(typed, SubjectOptions(set="good.yaml,torn.yaml"), templates)
    assert 'did you mean "file"?' in _refused(typed, both, parse_templates(["--config={fil}"], []))


def _env_files(question: Invocation, good: str, bad: str) -> SubjectOptions:
    (question.working_dir / "good.env").write_text(good)
    (question.working_dir / "bad.env").write_text(bad)
    return SubjectOptions(env_file="good.env,bad.env")


def test_variables_of_two_files_are_set_one_by_one(typed: Invocation) -> None:
    good = "# both\nexport A=1\nSAME='x y'\nGONE=old # why\n\n"
    options = _env_files(typed, good, 'A="2"\nSAME="x y"\nNEW=a#b\n')
    launches = _launches(typed, options)
    assert launches.subject.labels == ("A", "GONE", "NEW")
    assert (launches.subject.noun, launches.subject.form) == ("variable", SubjectForm.KEYS)
    assert dict(launches.spec(()).env) == {"A": "1", "GONE": "old"}
    assert dict(launches.spec((0, 1, 2)).env) == {"A": "2", "NEW": "a#b"}
    assert "do not differ" in _refused(typed, _env_files(typed, "A=1\n", "A=1"))
    wrong = _refused(typed, _env_files(typed, "A=1\n-e git+x\n", "A=2"))
    assert "good.env:2: expected NAME=VALUE, name==version or name @ URL" in wrong
    assert "cannot be read" in _refused(typed, SubjectOptions(env_file="no.env,bad.env"))
    assert "not a virtual environment" in _refused(typed, SubjectOptions(env_file=".,bad.env"))


def _wheel(folder: Path, name: str, version: str) -> None:
    """A package of one module that says its version."""
    files = {
        f"{name}.py": f"VERSION = {version!r}\n",
        f"{name}-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{name}-{version}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b'=').decode()},"
        f"{len(text)}\n"
        for path, text in files.items()
    )
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in {**files, f"{name}-{version}.dist-info/RECORD": record}.items():
            wheel.writestr(path, text)


def _imported(python_path: str, module: str) -> str:
    code = f"import {module}; print({module}.VERSION)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env={"PYTHONPATH": python_path}, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


def _pinned(typed: Invocation) -> Launches:
    text = "nsa-probe-a==1.0\nnsa_probe.b==1\n", "Nsa_Probe_A==2.0\nnsa-probe-b==3 ; x\nV=1\n"
    return _launches(typed, _env_files(typed, *text))


def test_each_version_is_installed_once_and_only_what_a_configuration_has(
    typed: Invocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def pip(folder: Path, requirement: str, _: str) -> str:
        asked.append(requirement)
        if requirement.endswith("==3"):
            return "No matching distribution"
        folder.mkdir(parents=True)
        return ""

    monkeypatch.setattr(intermediate_configs, "_pip_install", pip)
    launches = _pinned(typed)
    assert launches.subject.labels == ("V", "nsa-probe-a", "nsa-probe-b")
    assert launches.subject.noun == "difference"
    assert "PYTHONPATH" not in dict(launches.spec(()).env)  # nothing is installed for a plan
    assert launches.hashes(()).isdisjoint(launches.hashes((1,)))
    home = typed.working_dir / "mixtures"
    launches.use_mixtures(Mixtures(home=home))
    for subset in ((2,), (1, 2)):
        with pytest.raises(CannotLaunchError, match="pip install nsa-probe-b==3: No matching distribution"):
            launches.spec(subset)
    path = dict(launches.spec((0, 1)).env)["PYTHONPATH"].split(":")
    assert [Path(one).name.rpartition("-")[0] for one in path] == ["nsa-probe-a", "nsa-probe-b"]
    launches.question = replace(launches.question, environ={"PYTHONPATH": "mine"})
    assert dict(launches.spec(()).env)["PYTHONPATH"].endswith(":mine")
    assert sorted(asked) == ["nsa-probe-a==1.0", "nsa-probe-a==2.0", "nsa-probe-b==1", "nsa-probe-b==3"]
    assert launches.command((0,), Path("p03/spec.json")) == "nsa-harness run p03/spec.json"


@pytest.mark.slow
def test_pip_installs_beside_it_or_says_why_not(typed: Invocation, monkeypatch: pytest.MonkeyPatch) -> None:
    _wheel(typed.working_dir, "nsa_probe_a", "2.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(typed.working_dir))
    made = Mixtures(home=typed.working_dir / "mixtures")
    (folder,) = made.python_path({"nsa-probe-a": "2.0"}, None)
    assert _imported(folder, "nsa_probe_a") == "2.0"
    with pytest.raises(CannotMixError, match="pip install nsa-probe-b==3: No matching distribution"):
        made.python_path({"nsa-probe-b": "3"}, None)


def test_a_package_that_is_there_is_used_and_one_that_is_not_to_be_there_is_covered(tmp_path: Path) -> None:
    made = Mixtures(home=tmp_path / "mixtures")
    there = intermediate_configs.installed_packages(sys.executable)
    assert made.python_path({"pytest": there["pytest"][0], "nsa-probe-none": None}, None) == ()
    (folder,) = made.python_path({"hypothesis": None}, None)
    assert _imported(folder, "hypothesis") == "ModuleNotFoundError: No module named 'hypothesis'"
    shared = {"a": ("1", ("ns", "a")), "b": ("1", ("ns",))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intermediate_configs, "installed_packages", lambda _: shared)
        with pytest.raises(CannotMixError, match="its module ns has other packages in it"):
            made.python_path({"a": None}, None)


def test_a_virtual_environment_is_read_by_its_own_python_and_runs_the_probes(
    typed: Invocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = {"good": {"x": ("1", ("x",))}, "bad": {"x": ("2", ("x",)), "y": ("1", ("y",))}}
    for name in listed:
        (typed.working_dir / name / "bin").mkdir(parents=True)
        (typed.working_dir / name / "bin" / "python").touch()
    monkeypatch.setattr(intermediate_configs, "installed_packages", lambda python: listed[Path(python).parents[1].name])
    question, subject = make_subject(SubjectOptions(env_file="good,bad"), typed, templated=False, facts=FACTS)
    assert question.python == str(typed.working_dir / "good" / "bin" / "python")
    assert (subject.labels, subject.good_values, subject.bad_values) == (("x", "y"), ("1", None), ("2", "1"))
    (typed.working_dir / "one.env").write_text("A=1\n")
    assert "two virtual environments or two files" in _refused(typed, SubjectOptions(env_file="good,one.env"))
    assert read_environment(typed.working_dir / "bad").packages == {"x": "2", "y": "1"}
