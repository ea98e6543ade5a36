"""The distribution nsa-attention: the package alone, which needs torch and nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from documents import blocks

import nsa_attention

ROOT = Path(__file__).resolve().parents[2]
OWN = ROOT / "nsa"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(home)]  # the sdist, and the wheel from it
    subprocess.run(command, cwd=OWN, check=True, capture_output=True)
    (built,) = home.glob("nsa_attention-*.whl")
    return built


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def with_requirements(name: str) -> set[str]:
    """The distribution and those that it requires here, without extras."""
    found, waiting = set[str](), [name]
    while waiting:
        try:
            one = distribution(waiting.pop())
        except PackageNotFoundError:
            continue  # of another platform
        if (known := one.metadata["Name"].lower()) not in found:
            found.add(known)
            waiting += [re.split(r"[^\w.-]", text)[0] for text in one.requires or [] if "extra ==" not in text]
    return found


@pytest.fixture(scope="module")
def alone(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel, torch and what torch requires."""
    site = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    for name in with_requirements("torch"):
        for file in distribution(name).files or []:
            top = file.parts[0]
            if top not in ("..", "bin", "__pycache__") and not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution(name).locate_file(top))))
    return site


def run_alone(site: Path, code: str) -> str:
    path = f"import sys; sys.path.append({str(site)!r})\n"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", path + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "nsa_attention"]
    ours = subprocess.run(command, cwd=OWN, capture_output=True, text=True, check=True)
    assert names == set(ours.stdout.split())


def test_it_needs_torch_and_nothing_else(metadata: Message) -> None:
    needs = metadata.get_all("Requires-Dist") or []
    assert [text for text in needs if "extra ==" not in text] == ["torch>=2.11"]
    assert metadata["Version"] == nsa_attention.__version__


def test_its_license_is_that_of_the_project() -> None:
    assert (OWN / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_every_public_name_can_be_imported_with_torch_alone(alone: Path) -> None:
    code = """
import nsa_attention
assert "torch" not in sys.modules
for name in nsa_attention.__all__:
    getattr(nsa_attention, name)
print(nsa_attention.__file__)
print(*sorted({"numpy", "triton"} & set(sys.modules)))
"""
    assert run_alone(alone, code).splitlines() == [str(alone / "nsa_attention" / "__init__.py"), ""]


@pytest.mark.parametrize("number", range(len(blocks("nsa/README.md", "python"))))
def test_the_examples_of_the_readme_run_with_torch_alone(alone: Path, number: int) -> None:
    run_alone(alone, blocks("nsa/README.md", "python")[number])
