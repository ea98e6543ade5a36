"""The page about torch.compile, DDP, FSDP2 and activation checkpointing: its code runs as it stands."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from documents import blocks

PAGE = "docs/internals/nsa/wrappers.md"
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("NSA_", "TORCH", "RANK", "WORLD"))}


def run(command: list[str], directory: Path, **environ: str) -> None:
    program = [sys.executable, *command]
    done = subprocess.run(program, cwd=directory, env=CLEAN | environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_its_code_runs_on_one_rank(tmp_path: Path) -> None:
    """With a backend of torch.compile that generates no C++, which takes a minute."""
    program = "\n".join(blocks(PAGE, "python"))
    assert program.count("compile(fullgraph=True)") == 1
    quick = program.replace("compile(fullgraph=True)", 'compile(fullgraph=True, backend="aot_eager")')
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    run(["-c", quick], tmp_path, **rank)


@pytest.mark.slow
def test_its_code_runs_on_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("\n".join(blocks(PAGE, "python")))
    (command,) = blocks(PAGE, "console")
    words = command.removeprefix("$ torchrun").split()
    run(["-m", "torch.distributed.run", *words], tmp_path)
