"""The fifteen lines of docs/your-repository.md in a repository of their own, each with four changes of the script."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from documents import text
from ruamel.yaml import YAML

from .conftest import COMMAND, LIMIT_S

PAGE = text("docs/your-repository.md")
URL = "https://hooks.example.org/training"
MODEL = "from torch import nn\n\n\ndef network():\n    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1))\n"
TRAIN = """\
import argparse
import torch
import torch.distributed as dist
from stranger.model import network

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
epochs = parser.parse_args().epochs
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(epochs):
    for step in range(6):
        inputs = torch.randn(4, 8)
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    total = loss.detach()
    dist.all_reduce(total)
dist.destroy_process_group()
"""
CHANGES = {
    "healthy": ("lr=0.01", "lr=0.02"),
    "hangs": ("        optimizer.step()\n", "        optimizer.step()\n        while dist.get_rank() and step == 3:\n"
              "            import threading; threading.Event().wait()\n"),
    "raises": ("(inputs).square()", "(inputs[:, dist.get_rank() :]).square()"),
    "communicates": ("optimizer.step()\n", "optimizer.step()\n        dist.all_reduce(loss.detach())\n"),
}  # fmt: skip


class Hook(ThreadingHTTPServer):
    """What the user's messages are sent to."""

    def __init__(self) -> None:
        self.got: list[str] = []
        super().__init__(("127.0.0.1", 0), _Request)


class _Request(BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        self.server.got.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def hook() -> Iterator[Hook]:
    with Hook() as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def files_of_the_page() -> dict[str, str]:
    """Return the content of each file that the page names in front of a block."""
    return dict(re.findall(r"^In `([^`]+)`[^\n]*\n\n```\w+\n(.*?)^```$", PAGE, re.M | re.S))


def bash(script: str, directory: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NSA_", "PYTEST_", "GITHUB_"))}
    path = f"{Path(COMMAND[0]).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script], cwd=directory,
        env={**kept, "PATH": path, **environ}, capture_output=True, text=True, check=False, timeout=LIMIT_S,
    )  # fmt: skip


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, hook: Hook) -> Path:
    """A stranger's repository with the fifteen lines; the last of them, the command, has been carried out."""
    root = tmp_path_factory.mktemp("theirs")
    for name, content in {
        "train.py": TRAIN, "stranger/__init__.py": "", "stranger/model.py": MODEL,
        "tests/test_model.py": "from stranger.model import network\n\ndef test_it():\n    assert len(network()) == 2\n",
        "pyproject.toml": '[project]\nname = "stranger"\n\n[tool.pytest.ini_options]\npythonpath = ["."]\n\n',
    }.items():  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    for name, content in files_of_the_page().items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        with (root / name).open("a") as file:
            file.write(content.replace(URL, f"http://127.0.0.1:{hook.server_port}/"))
    (root / "page.sh").chmod(0o755)
    assert bash("git init -q", root).returncode == 0
    (command,) = re.findall(r"with the other lines:\n\n```sh\n(.*?)\n```", PAGE)
    recorded = bash(command, root)
    assert recorded.returncode == 0, recorded.stdout + recorded.stderr
    assert "reports/" not in bash("git status --porcelain", root).stdout
    return root


def test_they_are_fifteen_lines() -> None:
    assert sum(len(content.splitlines()) for content in files_of_the_page().values()) + 1 == 15


def act(repository: Path, folder: Path) -> tuple[int, str, str]:
    """Run the script as the action does. Return the exit code, the job summary, and what was printed."""
    action = YAML(typ="safe").load(text("action.yml"))
    (step,) = YAML(typ="safe").load((repository / ".github/workflows/train.yml").read_text())
    given = {name: value.get("default", "") for name, value in action["inputs"].items()} | step["with"]
    (run,) = (one for one in action["runs"]["steps"] if one["name"] == "Run the script")
    environ = {
        name: re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda match: given[match[1]], value)
        for name, value in run["env"].items()
    }
    files = {"GITHUB_STEP_SUMMARY": str(folder / "summary"), "RUNNER_TEMP": str(folder)}
    done = bash(run["run"], repository, GITHUB_ACTIONS="true", GITHUB_WORKSPACE=str(repository), **environ, **files)
    return done.returncode, (folder / "summary").read_text(), done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "verdict", "code", "answer"),
    [
        ("healthy", "PASS", 0, None),
        ("hangs", "HANG", 124, "threading.Event().wait()"),
        ("raises", "FAIL", 1, "mat1 and mat2 shapes cannot be multiplied"),
        ("communicates", "FAIL", 1, "expectation_missed"),
    ],
)
def test_the_lines_do_what_the_page_says(
    change: str, verdict: str, code: int, answer: str | None, repository: Path, hook: Hook, tmp_path: Path
) -> None:
    old, new = CHANGES[change]
    assert old in TRAIN
    (repository / "train.py").write_text(TRAIN.replace(old, new))
    hook.got.clear()

    tested = bash(f"{sys.executable} -m pytest -p nsa_harness.pytest_plugin -p no:cacheprovider", repository)
    assert tested.returncode == (1 if code else 0), tested.stdout
    if answer:
        shown = tested.stdout[tested.stdout.index("Captured nsa-harness call") :]
        assert f"\n{verdict}  test_train " in shown, tested.stdout
        assert answer in shown, tested.stdout
        assert re.search(r"^  next      nsa-harness \w+ ", shown, re.M), shown
    assert hook.got == [], "a test sends no message"

    status, summary, printed = act(repository, tmp_path)
    assert (status, summary.startswith(f"# {verdict} train")) == (code, True), printed
    assert [f'"verdict": "{verdict}"' in message for message in hook.got[-1:]] == [True] * bool(code), printed
    if answer:
        assert answer in summary
    if change == "raises":
        line = TRAIN.splitlines().index("        loss = model(inputs).square().mean()") + 1
        assert f"::error file=train.py,line={line},title=FAIL train::" in printed
