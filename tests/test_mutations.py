"""Tests are tested: each entry of mutations.json breaks the code of judging or attention, and its test must fail."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COPIED = ("benchmarks", "harness", "nsa", "scenarios", "tests", "pyproject.toml")
FAILED = 1  # pytest: tests ran, and some failed. Anything else is no answer.


@dataclass(frozen=True, kw_only=True)
class Mutation:
    file: str
    old: str
    new: str
    test: str

    @property
    def name(self) -> str:
        return f"{Path(self.file).stem}: {' '.join(self.old.split())[:60]}"


MUTATIONS = [Mutation(**one) for one in json.loads((ROOT / "tests/mutations.json").read_text())]
# Six a day, others tomorrow; the slow run tries them all.
TODAY = random.Random(datetime.now(UTC).date().toordinal()).sample(MUTATIONS, 6)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("mutated")
    ignored = shutil.ignore_patterns("__pycache__", ".hypothesis", "*.pyc")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, place / name, ignore=ignored)
        else:
            shutil.copy(source, place / name)
    return place


def run_test(copy: Path, test: str) -> subprocess.CompletedProcess[str]:
    # A slow test may be the one that notices.
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "", "-p", "no:cacheprovider", test]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(copy)}
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=250, check=False)


def survives(copy: Path, mutation: Mutation) -> str | None:
    """What pytest said, if the broken code passed its test."""
    path = copy / mutation.file
    whole = path.read_text()
    path.write_text(whole.replace(mutation.old, mutation.new))
    try:
        done = run_test(copy, mutation.test)
    finally:
        path.write_text(whole)
    return None if done.returncode == FAILED else done.stdout + done.stderr


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.name)
def test_a_mutation_names_a_place_that_exists_once_and_a_test_that_exists(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.new != mutation.old
    file, *_, function = mutation.test.split("::")
    assert f"def {function}(" in (ROOT / file).read_text()


@pytest.mark.parametrize("mutation", TODAY, ids=lambda one: one.name)
def test_broken_code_fails_its_test(mutation: Mutation, copy: Path) -> None:
    assert survives(copy, mutation) is None


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_mutation_is_noticed(copy: Path) -> None:
    assert [one.name for one in MUTATIONS if survives(copy, one) is not None] == []
