"""tools/rename.py over a small package: what names a module says the new name, a second run changes nothing."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

MAPPING = """
import ours -> theirs          # the folder stays
statements torches -> theirs.torches
alias _private -> ours
relative torches
ours.cli -> ours.cli.main
ours.run_judge -> ours.commands.judge
ours.judged -> ours.core.hang
ours.told -> ours.core.outcome
tests/test_judge.py -> tests/test_commands.py
"""

BEFORE = {
    "ours/__init__.py": '__version__ = "1"\n',
    "ours/protocol.py": "LIMIT_S = 3\n",
    "ours/cli.py": (
        "from ours import __version__, protocol, run_judge\n\n\n"
        "def main() -> str:\n    return f'{__version__} {protocol.LIMIT_S} {run_judge.judge()}'\n"
    ),
    "ours/run_judge.py": (
        "from ours.judged.wait import Wait\nfrom ours.told import told_of\n\n\n"
        "def judge() -> str:\n    return told_of(Wait())\n"
    ),
    "ours/told.py": (
        "from ours.judged import wait  # noqa: F401\n\n\ndef told_of(wait: object) -> str:\n    return f'{wait}'\n"
    ),
    "ours/judged/__init__.py": '"""Who waits."""\n',
    "ours/judged/wait.py": (
        "from .. import protocol\nfrom . import proof\n\n\n"
        "class Wait:\n    def __str__(self) -> str:\n        return f'{protocol.LIMIT_S} {proof.of()}'\n"
    ),
    "ours/judged/proof.py": "def of() -> str:\n    return 'proof'\n",
    "ours/judged/words.txt": "see ours/judged/wait.py\n",
    "torches/train.py": "from torches.config import STEPS\n\nPROGRAM = 'torches.train'\n",
    "torches/config.py": "STEPS = 4\n",
    "tests/ours/judged/note.md": "tests/ours/judged/note.md stays\n",
    "tests/test_judge.py": (
        "import subprocess\n\nfrom ours import run_judge\n\n\n"
        "def test_it(monkeypatch):\n"
        "    judge = run_judge.judge\n"
        "    monkeypatch.setattr('ours.run_judge.told_of', lambda _: 'a user has ours.py')\n"
        "    subprocess.run(['python', '-c', 'from ours.judged import wait; from _private.cli import main; main()'])\n"
        "    assert judge() == 'a user has ours.py'\n"
    ),
    "tests/places.json": '{"file": "ours/judged/wait.py", "test": "tests/test_judge.py::test_it"}\n',
    "reports/old.txt": "ours/judged/wait.py\n",
    "README.md": "`ours/judged/` and `ours.judged.proof`; ours.py; `told`\n",
}

AFTER = {
    "ours/__init__.py": '__version__ = "1"\n',
    "ours/protocol.py": "LIMIT_S = 3\n",
    "ours/cli/__init__.py": "",
    "ours/cli/main.py": (
        "from theirs import __version__, protocol\nfrom theirs.commands import judge\n\n\n"
        "def main() -> str:\n    return f'{__version__} {protocol.LIMIT_S} {judge.judge()}'\n"
    ),
    "ours/commands/__init__.py": "",
    "ours/commands/judge.py": (
        "from theirs.core.hang.wait import Wait\nfrom theirs.core.outcome import told_of\n\n\n"
        "def judge() -> str:\n    return told_of(Wait())\n"
    ),
    "ours/core/__init__.py": "",
    "ours/core/outcome.py": (
        "from theirs.core.hang import wait  # noqa: F401\n\n\ndef told_of(wait: object) -> str:\n    return f'{wait}'\n"
    ),
    "ours/core/hang/__init__.py": '"""Who waits."""\n',
    "ours/core/hang/wait.py": (
        "from ... import protocol\nfrom . import proof\n\n\n"
        "class Wait:\n    def __str__(self) -> str:\n        return f'{protocol.LIMIT_S} {proof.of()}'\n"
    ),
    "ours/core/hang/proof.py": "def of() -> str:\n    return 'proof'\n",
    "ours/core/hang/words.txt": "see ours/core/hang/wait.py\n",
    "torches/train.py": "from .config import STEPS\n\nPROGRAM = 'torches.train'\n",
    "torches/config.py": "STEPS = 4\n",
    "tests/ours/judged/note.md": "tests/ours/judged/note.md stays\n",
    "tests/test_commands.py": (
        "import subprocess\n\nfrom theirs.commands import judge as run_judge\n\n\n"
        "def test_it(monkeypatch):\n"
        "    judge = run_judge.judge\n"
        "    monkeypatch.setattr('theirs.commands.judge.told_of', lambda _: 'a user has ours.py')\n"
        "    subprocess.run(['python', '-c', "
        "'from theirs.core.hang import wait; from _private.cli.main import main; main()'])\n"
        "    assert judge() == 'a user has ours.py'\n"
    ),
    "tests/places.json": '{"file": "ours/core/hang/wait.py", "test": "tests/test_commands.py::test_it"}\n',
    "reports/old.txt": "ours/judged/wait.py\n",
    "README.md": "`ours/core/hang/` and `theirs.core.hang.proof`; ours.py; `told`\n",
}


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rename", REPOSITORY / "tools" / "rename.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rename"] = module  # where dataclasses look for the types of their fields
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in BEFORE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    return tmp_path


def files(root: Path) -> dict[str, str]:
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout
    return {name: (root / name).read_text() for name in listed.splitlines()}


def test_every_place_that_names_a_module_says_the_new_name(tool: ModuleType, root: Path) -> None:
    undecided = tool.rename(root, tool.read_moves(MAPPING))
    assert files(root) == AFTER
    assert [line for line in undecided if "__init__" not in line] == [
        "README.md:1: `told`: the module, which is `outcome` from now on?",
    ]


def test_a_second_run_changes_nothing(tool: ModuleType, root: Path) -> None:
    tool.rename(root, tool.read_moves(MAPPING))
    tool.rename(root, tool.read_moves(MAPPING))
    assert files(root) == AFTER


def test_what_comes_in_with_a_merge_is_rewritten_by_a_second_run(tool: ModuleType, root: Path) -> None:
    tool.rename(root, tool.read_moves(MAPPING))
    (root / "tests/late.py").write_text("import ours.judged.wait\nfrom ours.told import told_of\n")
    subprocess.run(["git", "add", "."], cwd=root, check=True)
    tool.rename(root, tool.read_moves(MAPPING))
    new = "import theirs.core.hang.wait\nfrom theirs.core.outcome import told_of\n"
    assert files(root) == {**AFTER, "tests/late.py": new}


def test_a_dry_run_touches_nothing(tool: ModuleType, root: Path) -> None:
    tool.rename(root, tool.read_moves(MAPPING), dry=True)
    assert files(root) == BEFORE


@pytest.mark.parametrize(
    ("mapping", "problem"),
    [
        ("ours.cli:main -> ours.cli:run", "line 1: 'ours.cli:main -> ours.cli:run' is no module"),
        ("ours.cli", "line 1: expected OLD -> NEW, got 'ours.cli'"),
        ("ours.cli -> ours.told", "ours/cli.py and ours/told.py would both be ours/told.py"),
        ("ours.cli -> ours.told\nours.told -> ours.cli", "another module takes the place of"),
    ],
)
def test_a_mapping_that_cannot_be_done_is_refused_before_anything_is_touched(
    tool: ModuleType, root: Path, mapping: str, problem: str
) -> None:
    with pytest.raises(tool.BadMapping, match=problem):
        tool.rename(root, tool.read_moves(mapping))
    assert files(root) == BEFORE
