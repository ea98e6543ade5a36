"""What the tests of the subject share: one thread each, a tiny shape, and runs of the training program."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FunctionType

import pytest
import torch
from ranks import run_forks

from nsa_attention.config import CI, NSAConfig
from nsa_attention.train import main

ROOT = Path(__file__).resolve().parents[2]
Program = Callable[..., subprocess.CompletedProcess[str]]
Alone = Callable[..., tuple[int, str, str]]


def pytest_configure(config: pytest.Config) -> None:
    """Triton's interpreter must be asked for before kernels are decorated: by all tests but those that need a GPU."""
    if not re.search(r"(?<!not )\b(multi_)?gpu\b", str(config.getoption("markexpr"))):
        os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def language_patched_once() -> Iterator[None]:
    """Triton 3.7 interprets a kernel in a language that it patches, and patches it again for each device function.

    That changes nothing any more, and is two fifths of the time that a kernel takes.
    """
    from triton import language
    from triton.runtime import interpreter

    patch_language = interpreter._patch_lang

    def patch_unless_patched(function: FunctionType) -> object:
        # Device functions of Triton's own see no more than its core.
        seen = [one for one in function.__globals__.values() if one is language or one is language.core]
        fresh = any(language.core.is_builtin(one.load) for one in seen)
        return patch_language(function) if fresh else interpreter._LangPatchScope()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_unless_patched)
        yield


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def tiny() -> NSAConfig:
    """Odd numbers wherever the semantics allow them, and every branch has work at 40 tokens."""
    return replace(
        CI,
        name="tiny",
        vocab=17,
        dim=24,
        layers=2,
        heads=4,
        groups=2,
        d_k=6,
        d_v=5,
        block_len=6,
        block_stride=3,
        select_len=5,
        select_count=4,
        window=7,
        seq_len=40,
    )


def forked(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The training program on two ranks, forked from a process that has torch."""
    ranks = run_forks(2, str(ROOT / "nsa" / "nsa_attention"), *arguments, boards=None, cwd=directory)
    status = next((rank.status for rank in ranks if rank.status), 0)
    out, err = ("".join(said) for said in zip(*((rank.out, rank.err) for rank in ranks), strict=True))
    return subprocess.CompletedProcess(arguments, status, out, err)


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Run the training program in an empty directory: `program("--steps", "1", torchrun=2)`."""

    def run(*arguments: str, torchrun: int = 0) -> subprocess.CompletedProcess[str]:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={torchrun}"] if torchrun else []
        clean = {name: value for name, value in os.environ.items() if not name.startswith("NSA_") and name != "CONFIG"}
        return subprocess.run(
            [sys.executable, *launcher, str(ROOT / "nsa" / "nsa_attention"), *arguments],
            cwd=tmp_path,
            env=clean | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


@pytest.fixture
def two_ranks(request: pytest.FixtureRequest, tmp_path: Path) -> Program:
    """The training program on two ranks: quick tests fork them, slow ones start torchrun."""
    if request.node.get_closest_marker("slow") is None:
        return partial(forked, tmp_path)
    return partial(request.getfixturevalue("program"), torchrun=2)


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Alone:
    """Run the training program in this process, in an empty directory: exit status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("NSA_") or name in ("CONFIG", "RANK", "WORLD_SIZE")]:
        monkeypatch.delenv(name)

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(arguments)
        return (status, *capsys.readouterr())

    return run
