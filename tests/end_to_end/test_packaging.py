"""What is installed: it works outside a checkout, and a project with our names for its own modules notices nothing."""

from __future__ import annotations

import configparser
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# A Python 3.11 before 3.11.4 has no filters.
SAFELY: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
REPOSITORY = Path(__file__).resolve().parents[2]
ALONE = ("run", "ddp_onestep", "run.ranks=1", "parallel.wrapper=none")  # without torchrun: one process loads torch
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py")
OWN = ("nsa", "harness", "scenarios", "tests", "tools")  # what a user's project has as well
TRAIN = """
import json, os, sys
import harness, nsa.part, scenarios.part, tests.part, tools.part
if "RANK" in os.environ:
    import torch.distributed as dist
    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()
own = [harness, nsa.part, scenarios.part, tests.part, tools.part]
ours = sorted(name for name in sys.modules if name.startswith(("nsa_harness", "nsa_attention", "harness.")))
print("seen " + json.dumps([[one.WHOSE for one in own], list(nsa.__path__), ours]), flush=True)
"""


@dataclass(frozen=True, kw_only=True)
class Installed:
    """An environment with the wheel in it; torch and what else the wheel needs are those of the tests."""

    home: Path
    site: Path
    wheel: Path

    @property
    def python(self) -> str:
        return str(self.home / "bin" / "python")

    @property
    def command(self) -> str:
        return str(self.home / "bin" / "nsa-harness")

    def ran(self, directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("NSA_", "PYTHONPATH"))}
        done = subprocess.run(words, cwd=directory, env=clean, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done


def built(target: str, tree: Path, home: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(home)]
    subprocess.run(command, cwd=tree, check=True, capture_output=True)
    (archive,) = home.iterdir()
    return archive


def without_links(tree: Path) -> Path:
    """Fill `tree` with the files of the repository as git checks them out where `core.symlinks` is false."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        source, target = REPOSITORY / name, tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.write_text(os.readlink(source))
        elif source.is_file():
            shutil.copyfile(source, target)
    return tree


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """A wheel built from a checkout without symbolic links, in a new environment with its console script."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, symlinks=True)
    (site,) = (home / "lib").glob("python3*/site-packages")
    tree = without_links(tmp_path_factory.mktemp("checkout"))
    wheel = built("wheel", tree, tmp_path_factory.mktemp("dist"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    for folder in {Path(str(importlib.util.find_spec(name).origin)).parents[1] for name in ("torch", "typer")}:
        for entry in folder.iterdir():
            link = site / entry.name
            if (
                entry.suffix != ".pth"
                and not entry.name.startswith(("nsa_harness", "nsa_attention", *OWN))
                and not link.exists()
            ):
                link.symlink_to(entry)
    (entry_points,) = site.glob("nsa_harness-*.dist-info/entry_points.txt")
    parser = configparser.ConfigParser()
    parser.read(entry_points)
    module, function = parser["console_scripts"]["nsa-harness"].split(":")
    script = home / "bin" / "nsa-harness"
    script.write_text(f"#!{home}/bin/python\nfrom {module} import {function}\n{function}()\n")
    script.chmod(0o755)
    return Installed(home=home, site=site, wheel=wheel)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A training project with our names for its own: namespace packages, and a module."""
    for name in OWN:
        (tmp_path / name).mkdir()
        (tmp_path / name / "part.py").write_text(f"WHOSE = {name!r}")
    (tmp_path / "harness.py").write_text("WHOSE = 'harness'")
    (tmp_path / "harness" / "part.py").unlink()
    (tmp_path / "harness").rmdir()
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def seen(text: str) -> list[object]:
    """What each rank printed of whose modules it has: the user's, where its nsa lies, which of ours are loaded."""
    return [json.loads(line.partition("seen ")[2]) for line in text.splitlines() if "seen " in line]


def only_its_own(project: Path) -> list[object]:
    return [["harness", "nsa", "scenarios", "tests", "tools"], [str(project / "nsa")], []]


def test_a_wheel_carries_everything_and_finds_its_scenarios_elsewhere(installed, tmp_path):
    installed.ran(tmp_path, installed.command, *ALONE)

    package = installed.site / "nsa_harness"
    spec = (tmp_path / "reports" / "latest" / "ddp_onestep" / "spec.json").read_text()
    assert str(installed.site / "nsa_attention") in spec
    assert str(REPOSITORY) not in spec
    shipped = {path.name for path in (REPOSITORY / "scenarios").iterdir()}
    assert {path.name for path in (package / "_scenarios").iterdir()} == shipped
    assert not (package / "_corpus").exists()


def test_a_wheel_has_two_names_to_import(installed):
    with zipfile.ZipFile(installed.wheel) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"nsa_harness", "nsa_attention"}


def test_a_wheel_built_from_the_sdist_is_the_one_built_from_the_checkout(installed, tmp_path):
    with tarfile.open(built("sdist", REPOSITORY, tmp_path / "sdist")) as archive:
        links = [member.name for member in archive if not (member.isfile() or member.isdir())]
        archive.extractall(tmp_path, **SAFELY)
    assert links == []

    (unpacked,) = tmp_path.glob("nsa_harness-*")
    with (
        zipfile.ZipFile(built("wheel", unpacked, tmp_path / "wheel")) as again,
        zipfile.ZipFile(installed.wheel) as first,
    ):
        assert {one.filename: one.CRC for one in again.infolist()} == {
            one.filename: one.CRC for one in first.infolist()
        }


def test_what_is_installed_can_be_imported_and_started_as_modules(installed, tmp_path):
    asked = "import nsa_harness; print(nsa_harness.run_one.__module__, nsa_harness.__file__)"
    imported = installed.ran(tmp_path, installed.python, "-c", asked).stdout.split()
    assert imported == ["nsa_harness.commands.api", str(installed.site / "nsa_harness" / "__init__.py")]
    assert installed.ran(tmp_path, installed.python, "-m", "nsa_harness", "--version").stdout == "nsa-harness 0.1.0\n"
    assert "--impl" in installed.ran(tmp_path, installed.python, "-m", "nsa_attention.train", "--help").stdout


def test_a_project_with_our_names_has_its_own_modules(installed, project):
    alone = installed.ran(project, installed.python, "train.py")
    watched = installed.ran(project, installed.command, "watch", "--", installed.python, "train.py")

    assert seen(alone.stdout) == seen(watched.stdout) == [only_its_own(project)]


def test_what_a_project_lacks_is_not_found_in_ours(installed, tmp_path):
    asked = f"import importlib.util as it; print([name for name in {OWN} if it.find_spec(name)])"
    bare = installed.ran(tmp_path, installed.python, "-c", asked)
    watched = installed.ran(tmp_path, installed.command, "watch", "--", installed.python, "-c", asked)
    assert bare.stdout == watched.stdout == "[]\n"


@pytest.mark.slow
def test_the_ranks_of_a_project_with_our_names_have_its_own_modules(installed, project):
    alone = installed.ran(project, installed.python, *TORCHRUN)
    watched = installed.ran(project, installed.command, "watch", "--", installed.python, *TORCHRUN)
    installed.ran(project, installed.command, "run", "--script", "train.py", "--ranks", "2")
    output = (project / "reports" / "latest" / "train" / "output.log").read_text()

    for text in (alone.stdout, watched.stdout, output):
        assert seen(text) == [only_its_own(project)] * 2
