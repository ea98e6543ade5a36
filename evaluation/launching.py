"""Commands as a person gives them: in a folder whose name tells nothing, and ended with every process they began."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from nsa_harness.commands import misdiagnosis

TAG = "EVALUATION_TAG"
LEAVE_S = 120  # after Ctrl-C the harness ends its runs and writes what it knows; any other command gets a second


def harness() -> str:
    return str(Path(sys.executable).parent / "nsa-harness")


def without_paths(text: str, folder: Path, python: str = sys.executable) -> str:
    """Return the text without a directory of this machine: the program's folder becomes `project`."""
    places = ((str(folder), "project"), (str(folder.parent), ""), (str(Path(python).parents[1]), "/usr"))
    return misdiagnosis.without_paths(text, places)


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A command that has ended, or was ended."""

    code: int | None  # None: it did not end within its limit
    output: str
    seconds: float


@dataclass(kw_only=True)
class Place:
    """A stranger's folder, in which commands are given."""

    folder: Path
    tag: str = field(default_factory=lambda: os.urandom(8).hex())

    def environment(self, **more: str) -> dict[str, str]:
        outside = {name: value for name, value in os.environ.items() if not name.startswith(("NSA_", "_NSA_"))}
        path = f"{Path(harness()).parent}{os.pathsep}{os.environ['PATH']}"
        # What a program leaves in the folder for temporary files is no other program's business.
        own = {"PATH": path, "COLUMNS": "100", "TMPDIR": str(self.folder.parent / "tmp"), TAG: self.tag}
        return {**outside, **own, **more}

    def ran(self, command: str | Sequence[str], limit_s: float, **environment: str) -> Ran:
        """Run a command, in a shell if it is a text. At its limit it gets Ctrl-C; what is left of it is killed."""
        words = ["bash", "-c", command] if isinstance(command, str) else list(command)
        ours = any(word.split()[:1] and word.split()[0].endswith("nsa-harness") for word in words)
        began_s, ended = time.monotonic(), True
        log = self.folder.parent / "said.txt"
        with log.open("w") as out:
            process = subprocess.Popen(
                words, cwd=self.folder, env=self.environment(**environment), stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                ended = False
                os.killpg(process.pid, signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(LEAVE_S if ours else 1)
            finally:
                self.kill_all()
                process.wait(30)
        seconds = time.monotonic() - began_s
        return Ran(code=process.returncode if ended else None, output=log.read_text(errors="replace"), seconds=seconds)

    def kill_all(self) -> None:
        """Kill every process that a command in this place began, until none is left."""
        while pids := tagged(self.tag):
            with suppress(psutil.NoSuchProcess):
                left = [psutil.Process(pid) for pid in pids]
                for process in left:
                    process.kill()
                psutil.wait_procs(left, timeout=5)

    def newest(self) -> str:
        """The name of the newest run; "" if there is none."""
        link = self.folder / "reports" / "latest"
        return os.readlink(link) if link.is_symlink() else ""

    def stored(self, name: str) -> Any:
        """Return a document of the newest run, or None: its value if it is JSON, of JSON lines a list."""
        path = self.folder / "reports" / "latest" / name
        if not path.is_file():
            return None
        lines = path.read_text()
        return [json.loads(line) for line in lines.splitlines()] if path.suffix == ".jsonl" else json.loads(lines)


def tagged(tag: str) -> list[int]:
    """The processes that have the tag in their environment: torchrun's ranks have sessions of their own."""
    pids = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and f"{TAG}={tag}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                pids.append(int(entry.name))
    return pids


@contextmanager
def scratch(program: Path | None = None) -> Iterator[Place]:
    """Yield a folder with a copy of the program's folder, or an empty one, and remove it afterwards."""
    with tempfile.TemporaryDirectory(prefix="job") as home:
        place = Place(folder=Path(home) / "project")
        (Path(home) / "tmp").mkdir()
        if program is None:
            place.folder.mkdir()
        else:
            shutil.copytree(program, place.folder, ignore=shutil.ignore_patterns("__pycache__"))
        yield place
