"""Under which Python a program of somebody else's runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nsa_harness.errors import MissingTorch, UsageError
from nsa_harness.supervisor.launch.planning import find_interpreter

Made = Callable[[str, bool], Path]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """An environment with a python in it, with torch or without; returns its folder."""

    def environment(name: str, has_torch: bool) -> Path:
        python = tmp_path / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f"#!/bin/sh\nexit {0 if has_torch else 1}\n")
        python.chmod(0o755)
        return tmp_path / name

    return environment


def test_the_active_environment_comes_before_the_python_on_path(made: Made) -> None:
    active, other = made("active", True), made("other", True)
    environ = {"VIRTUAL_ENV": str(active), "PATH": str(other / "bin")}
    assert find_interpreter(None, environ, has_torch=True) == (
        f"{active}/bin/python",
        "the interpreter of the active virtual environment",
    )
    assert find_interpreter(None, {"PATH": str(other / "bin")}, has_torch=True) == (
        f"{other}/bin/python",
        "the python on PATH",
    )


def test_one_without_torch_is_passed_over_and_ours_is_the_last(made: Made) -> None:
    active, other = made("active", False), made("other", True)
    environ = {"VIRTUAL_ENV": str(active), "PATH": str(other / "bin")}
    assert find_interpreter(None, environ, has_torch=True)[0] == f"{other}/bin/python"
    assert find_interpreter(None, {"PATH": str(active / "bin")}, has_torch=True) == (None, "")


def test_an_active_environment_that_is_our_own_is_no_other_one() -> None:
    environ = {"VIRTUAL_ENV": str(Path(sys.executable).parents[1]), "PATH": ""}
    assert find_interpreter(None, environ, has_torch=True) == (None, "")


def test_no_torch_anywhere_is_said_with_the_command(made: Made) -> None:
    bare = made("bare", False)
    with pytest.raises(MissingTorch, match="-m pip install torch") as missing:
        find_interpreter(None, {"PATH": str(bare / "bin")}, has_torch=False)
    assert missing.value.exit_code == 125
    with pytest.raises(MissingTorch, match="has no torch"):
        find_interpreter(str(bare / "bin" / "python"), {}, has_torch=True)
    with pytest.raises(UsageError, match="no interpreter"):
        find_interpreter(str(bare / "bin" / "nothing"), {}, has_torch=True)
