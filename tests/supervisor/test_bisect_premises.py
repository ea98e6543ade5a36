"""What a search rests on: each way in which a program changes is seen, nothing else is, and no secret is told."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import pytest
from attempts import spec

from nsa_harness.supervisor.experiments import cache_key
from nsa_harness.supervisor.experiments.cache_key import (
    PROGRAM_OUTPUT,
    Interpreter,
    LaunchedProgram,
    changed_entries,
    names_with_verb,
    variable_entries,
)
from nsa_harness.supervisor.launch.machine import package_version

HERE = Interpreter(version="3.11.7")
TRAIN = """
import importlib, json, subprocess, sys
from model import blocks
from lib.sub import tools
CONFIG = json.load(open("sizes.json"))
subprocess.run([sys.executable, "prepare.py"])
importlib.import_module(f"optimizers.{sys.argv[1]}")
"""
TREE = {
    "train.py": TRAIN,
    "sizes.json": "{}",
    "prepare.py": "import cleaning\n",
    "cleaning.py": "",
    "model/__init__.py": "from .heads import Head\n",
    "model/heads.py": "from ..common import x\n",
    "model/blocks.py": "from . import norms\nfrom .heads import Head\n",
    "model/norms.py": "def late():\n    import rarely\n",
    "rarely.py": "open('it ran', 'w')\n",
    "optimizers/__init__.py": "",
    "optimizers/adam.py": "",
    "elsewhere/lib/__init__.py": "",
    "elsewhere/lib/sub/tools.py": "broken syntax here\n",
    "shard.bin": "12",
    "data/one.txt": "1",
    "data/deep/two.txt": "2",
    "unrelated.py": "",
    "model/unrelated.py": "",
    "reports/latest.txt": "",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def program(
    tree: Path, *words: str, env: tuple[tuple[str, str], ...] = (), asked: Interpreter = HERE
) -> LaunchedProgram:
    paths = (("PYTHONPATH", "elsewhere"), *env)
    launched = spec(program=("train.py", *words), cwd=None, env=paths)
    return LaunchedProgram(specs=[launched], arguments=("data", "shard.bin"), interpreter=asked, working_dir=tree)


def edit(tree: Path, name: str) -> None:
    (tree / name).parent.mkdir(parents=True, exist_ok=True)
    with (tree / name).open("a") as file:
        file.write("# edited\n")


@pytest.mark.parametrize(
    ("edited", "seen"),
    [
        ("train.py", "train.py"),
        ("model/__init__.py", "model/__init__.py"),
        ("model/heads.py", "model/heads.py"),
        ("model/blocks.py", "model/blocks.py"),
        ("model/norms.py", "model/norms.py"),
        ("rarely.py", "rarely.py"),
        ("prepare.py", "prepare.py"),
        ("cleaning.py", "cleaning.py"),
        ("optimizers/adam.py", "optimizers/adam.py"),
        ("optimizers/sgd.py", "optimizers/sgd.py"),
        ("elsewhere/lib/__init__.py", "elsewhere/lib/__init__.py"),
        ("elsewhere/lib/sub/tools.py", "elsewhere/lib/sub/tools.py"),
        ("sizes.json", "sizes.json"),
        ("shard.bin", "shard.bin"),
        ("data/deep/two.txt", "data"),
        ("unrelated.py", None),
        ("model/unrelated.py", None),
        ("reports/latest.txt", None),
        ("model/__pycache__/heads.cpython-311.pyc", None),
        ("data/__pycache__/x.pyc", None),
    ],
)
def test_an_edited_file_is_seen_where_the_program_uses_it(tree: Path, edited: str, seen: str | None) -> None:
    before = program(tree, "adam").file_entries()
    edit(tree, edited)
    assert changed_entries(before, program(tree, "adam").file_entries()) == ((seen,) if seen else ())
    assert not (tree / "it ran").exists()


@pytest.mark.parametrize("words", [("--config=job.yaml",), ("--config", "job.yaml"), ("job.yaml",)])
def test_a_file_that_an_argument_names_is_seen(tree: Path, words: tuple[str, ...]) -> None:
    (tree / "job.yaml").write_text("layers: 8\n")
    before = program(tree, *words).file_entries()
    edit(tree, "job.yaml")
    assert changed_entries(before, program(tree, *words).file_entries()) == ("job.yaml",)


def test_so_is_one_that_a_variable_names_and_a_module_that_is_launched_as_one(tree: Path) -> None:
    (tree / "job.yaml").write_text("layers: 8\n")
    as_module = LaunchedProgram(
        specs=[spec(program=("-m", "model.blocks"), cwd=None, env=(("JOB", "job.yaml"),))],
        arguments=(), interpreter=HERE, working_dir=tree,
    )  # fmt: skip
    before = as_module.file_entries()
    edit(tree, "job.yaml")
    edit(tree, "model/norms.py")
    assert changed_entries(before, as_module.file_entries()) == ("job.yaml", "model/norms.py")


def test_a_project_that_is_installed_to_be_edited_counts_as_the_users(tree: Path) -> None:
    (tree / "project" / "src").mkdir(parents=True)
    (tree / "project" / "src" / "cleaning.py").write_text("")
    (tree / "cleaning.py").unlink()
    asked = Interpreter(version="3.11.7", folders=(tree / "project" / "src",))
    before = program(tree, asked=asked).file_entries()
    edit(tree, "project/src/cleaning.py")
    assert changed_entries(before, program(tree, asked=asked).file_entries()) == ("project/src/cleaning.py",)


def test_what_is_installed_is_known_by_its_version_and_never_read(tree: Path) -> None:
    (tree / "site-packages").mkdir()
    (tree / "site-packages" / "cleaning.py").write_text("")
    (tree / "cleaning.py").unlink()
    asked = Interpreter(version="3.11.7", folders=(tree / "site-packages",))
    assert not any("site-packages" in name for name in program(tree, asked=asked).file_entries())


def test_a_program_of_any_size_is_read_within_a_bound(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_key, "_MAX_FILES", 3)
    assert {"train.py", "model/__init__.py"} < set(program(tree).file_entries())
    assert "rarely.py" not in program(tree).file_entries()


def test_a_long_file_is_known_by_its_size_and_time(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_key, "_MAX_DIGEST_BYTES", 1)
    before = program(tree).file_entries()
    os.utime(tree / "shard.bin", ns=(1, 1))
    assert changed_entries(before, program(tree).file_entries()) == ("shard.bin",)


def test_nothing_is_opened_that_would_never_end(tree: Path) -> None:
    os.mkfifo(tree / "pipe.py")
    assert "pipe.py" not in program(tree, "--from=pipe.py", "\0", "x" * 5000).file_entries()


def test_what_the_program_writes_itself_says_nothing(tree: Path) -> None:
    (tree / "loss.csv").write_text("")
    before = program(tree, "--log=loss.csv", "--save=out").file_entries()
    edit(tree, "loss.csv")
    edit(tree, "out/step1.pt")
    kept = cache_key.mark_outputs(before, program(tree, "--log=loss.csv", "--save=out").file_entries())
    assert (kept["loss.csv"], kept["out"]) == (PROGRAM_OUTPUT, PROGRAM_OUTPUT)
    edit(tree, "loss.csv")
    edit(tree, "out/step2.pt")
    assert changed_entries(kept, program(tree, "--log=loss.csv", "--save=out").file_entries()) == ()
    edit(tree, "train.py")
    assert changed_entries(kept, program(tree, "--log=loss.csv", "--save=out").file_entries()) == ("train.py",)


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("NCCL_DEBUG", True), ("MY_LAYERS", True), ("PATH", True), ("WTF", True), ("LESSON", True), ("TERM", False),
        ("SSH_CLIENT", False), ("OLDPWD", False), ("HISTSIZE", False), ("SLURM_JOB_ID", False),
        ("NSA_HARNESS_BUDGET", False),
    ],
)  # fmt: skip
def test_a_variable_is_seen_unless_each_terminal_has_its_own(
    name: str, seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    before = variable_entries(spec())
    monkeypatch.setenv(name, "2")
    assert changed_entries(before, variable_entries(spec())) == ((f"variable {name}",) if seen else ())


def test_a_secret_is_told_neither_in_clear_nor_by_a_digest_that_a_list_of_passwords_finds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DB_PASSWORD", "hunter2")
    before = variable_entries(spec())
    kept = before["variable DB_PASSWORD"]
    quick = {hashlib.sha256(text.encode()).hexdigest() for text in ("hunter2", repr(("DB_PASSWORD", "hunter2")))}
    assert "hunter2" not in json.dumps(before)
    assert not any(one.startswith(kept) for one in quick)
    monkeypatch.setenv("DB_PASSWORD", "hunter3")
    assert changed_entries(before, variable_entries(spec())) == ("variable DB_PASSWORD",)


def test_an_interpreter_tells_its_version_and_every_package_of_it() -> None:
    said = cache_key.query_interpreter(None, os.environ)
    assert said.version == ".".join(map(str, sys.version_info[:3]))
    assert said.packages["torch"].split()[0] == package_version("torch")
    assert said.packages["pydantic"].split()[0] == package_version("pydantic")
    assert "package pytest" in said.key_entries


def _answers(tmp_path: Path, code: str) -> Interpreter:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{code}\n")
    python.chmod(0o755)
    return cache_key.query_interpreter(str(python), os.environ)


def test_it_is_that_of_the_program_that_is_asked(tmp_path: Path) -> None:
    said = _answers(tmp_path, """echo '{"version": "3.9", "packages": {"torch": "1.13 ab"}, "folders": []}'""")
    newer = _answers(tmp_path, """echo '{"version": "3.9", "packages": {"torch": "2.0 ab"}, "folders": []}'""")
    assert changed_entries(said.key_entries, newer.key_entries) == ("package torch",)


@pytest.mark.parametrize("code", ["exit 3", "echo no", "echo '{}'"])
def test_what_cannot_be_asked_is_never_the_same(tmp_path: Path, code: str) -> None:
    silent = _answers(tmp_path, code).key_entries
    assert changed_entries(silent, silent) == ("Python",)


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["a.py"], "a.py has"),
        (["a.py", "what is launched"], "a.py has"),
        (["what is launched"], "what is launched has"),
        (["a.py", "b.py", "Python"], "a.py, b.py and Python have"),
        (list("abcdef"), "a, b, c and 3 more have"),
    ],
)
def test_what_has_changed_is_named(names: list[str], sentence: str) -> None:
    assert names_with_verb(names) == sentence
