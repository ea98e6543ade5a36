"""Rebuild docs/internals/screens: what a person sees, from real runs in terminals of two widths and through a pipe.

    python tools/make_screens.py              all screens; takes about ten minutes
    python tools/make_screens.py hang list    some of them

Needs tmux. Directories of this machine and the names of runs are replaced by neutral ones.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from make_sample import HANG_PY, REPOSITORY, without_paths

SCREENS = REPOSITORY / "docs" / "internals" / "screens"
PIPE = 0  # in place of a width
_ROWS = 24
_LONGEST_S = 1200
_RUN_NAME = re.compile(r"\d{8}T\d{6}-[0-9a-f]{4}")
_START = """\
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
loss = torch.ones(1)
"""
PROGRAMS = {
    "hang.py": HANG_PY,
    "good.py": f"{_START}for step in range(100):\n    dist.all_reduce(loss)\ndist.destroy_process_group()\n",
    "crash.py": f"""{_START}table = torch.nn.Embedding(10, 4)
for step in range(100):
    tokens = torch.tensor([step % 8 + 3 * dist.get_rank()])
    dist.all_reduce(table(tokens).sum().detach())
""",
    "checkpoint.py": f"""{_START}for step in range(20):
    dist.all_reduce(loss)
    if step == 10 and "--write-checkpoints-to-the-shared-file-system" in sys.argv and dist.get_rank() == 0:
        raise RuntimeError("the checkpoint cannot be written: no space left on the shared file system")
dist.destroy_process_group()
""",
    "second.yaml": "name: second\nabout: Given first\nrun: {program: good.py, ranks: 2}\n",
    "first.yaml": "name: first\nabout: Given last\npriority: 9\nrun: {program: crash.py, ranks: 2}\n",
    "job.log": """\
[default0]:step 118 loss 2.31
[default1]:step 118 loss 2.31
[default0]:step 119 loss 2.30
W1128 03:14:15.926000 4711 torch/distributed/elastic/agent/server/api.py:739] Received 15 death signal
Traceback (most recent call last):
  File "/usr/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.api.SignalException: Process 4711 got signal: 15
""",
}


@dataclass(frozen=True)
class Screen:
    """A command whose output is recorded. `shows`: what a reader should look at."""

    name: str
    command: str
    shows: str
    widths: tuple[int, ...] = (80, 60)


_CLAIM = "checkpoint.py --pairs 5 --arg=--write-checkpoints-to-the-shared-file-system,--keep-them-in-memory"
ALL = (
    Screen(
        "hang", "run hang.py --ranks 2", "cause code, remedy, line, next command and page of a HANG", (80, 60, PIPE)
    ),
    Screen("crash", "run crash.py --ranks 2", "the same of a FAIL", (80, 60, PIPE)),
    Screen("pass", "run good.py --ranks 2", "a PASS: the page is named"),
    Screen("claim", f"claim {_CLAIM}", "each row shows how its run ended", (80, 60, PIPE)),
    Screen("bisect", "bisect fault_gc_layer --gc-range", "a key explains the signs; commands stay whole", (80, PIPE)),
    Screen("plan", "run ddp_nccl ddp_onestep single_no_gc", "notes appear once; nothing is proposed for the SKIP"),
    Screen("order", "run second.yaml first.yaml", "files run as given; progress in a pipe only grows", (80, PIPE)),
    Screen("read", "read job.log", "a cancelled job, with the last line of each rank"),
    Screen("explain", "explain rank0_only_collective", "explains the cause of `hang`"),
    Screen("list", "list", "the short list"),
    Screen("timeout", "run train.py --timeout 60", "the answer contains the command to type"),
    Screen("help", "--help", "all commands"),
    Screen("help-run", "run --help", "no option is broken at a hyphen"),
    Screen("help-watch", "watch --help", "what --deadline does"),
    Screen("help-claim", "claim --help", "long examples continue after a backslash"),
)


def main() -> None:
    wanted = sys.argv[1:]
    SCREENS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="nsa-harness-screens-") as folder:
        work = Path(folder) / "project"
        work.mkdir()
        for name, text in PROGRAMS.items():
            (work / name).write_text(text)
        for screen in ALL:
            for width in screen.widths if screen.name in wanted or not wanted else ():
                record: Callable[..., str] = _in_terminal if width else _through_pipe
                text = _RUN_NAME.sub("20261128T120000-5c1e", without_paths(record(work, screen, width), work))
                path = SCREENS / _file_name(screen, width)
                path.write_text(f"$ nsa-harness {screen.command}{'' if width else ' 2>&1 | cat'}\n{text.rstrip()}\n")
                print(path.relative_to(REPOSITORY), flush=True)
    (SCREENS / "README.md").write_text("\n".join(_index()) + "\n")


def _file_name(screen: Screen, width: int) -> str:
    return f"{screen.name}.{width or 'pipe'}.txt"


def _index() -> Iterator[str]:
    yield "# Screens"
    yield ""
    yield (
        "Each file is the real output of a command, in a terminal of 80 or 60 columns and 24 rows, or through a pipe.\n"
        "`python tools/make_screens.py` records them again. Read them after a change of what nsa-harness prints:\n"
        "nothing that a reader needs next may be cut, and every command must work as printed."
    )
    yield ""
    yield "| command | look at | files |"
    yield "| --- | --- | --- |"
    for screen in ALL:
        files = ", ".join(f"[{width or 'pipe'}]({_file_name(screen, width)})" for width in screen.widths)
        yield f"| `nsa-harness {screen.command}` | {screen.shows} | {files} |"


def _command(screen: Screen) -> str:
    start = "import sys; sys.argv[0] = 'nsa-harness'; from nsa_harness.cli.main import main; main()"
    return f"{shlex.join([sys.executable, '-c', start])} {screen.command}"


def _through_pipe(work: Path, screen: Screen, _: int) -> str:
    command = ["bash", "-c", f"({_command(screen)}; echo [exit $?]) 2>&1 | cat"]
    return subprocess.run(command, cwd=work, check=True, capture_output=True, text=True).stdout


def _in_terminal(work: Path, screen: Screen, width: int) -> str:
    """Run the command in a terminal of tmux, and return all that it showed."""
    done = work / "done"
    done.unlink(missing_ok=True)
    tmux = ["tmux", "-f", "/dev/null", "-L", f"{work.parent.name}-{screen.name}-{width}"]
    command = f"{_command(screen)}; echo [exit $?]; touch {done}; sleep 60"
    try:
        size = ["-x", str(width), "-y", str(_ROWS)]
        subprocess.run([*tmux, "new-session", "-d", *size, "-c", str(work), "bash", "-c", command], check=True)
        subprocess.run([*tmux, "set-option", "-g", "history-limit", "9999"], check=True)
        end_s = time.monotonic() + _LONGEST_S
        while not done.exists() and time.monotonic() < end_s:
            time.sleep(0.1)
        time.sleep(0.5)  # tmux still reads what was written
        return subprocess.run(
            [*tmux, "capture-pane", "-p", "-S", "-"], check=True, capture_output=True, text=True
        ).stdout
    finally:
        subprocess.run([*tmux, "kill-server"], check=False, capture_output=True)


if __name__ == "__main__":
    main()
