"""A loader that is starved: it is named, it is no hang, and a thread of it that stands in a read keeps no process."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

import pytest
from ranks import wait_for

from .conftest import Workspace

# 256 records are read at once: 3328 tokens, for six steps.
BLOCK = (json.dumps({"text": "twelve bytes"}) + "\n").encode() * 256
SCENARIO = """
schema: 1
about: Twelve steps on a shard that is fed by hand
run: {ranks: 1, program: nsa.train, args: [--packing, stream, --layers, "1"]}
parallel: {wrapper: none}
trace: {grads: false}
train: {steps: 12, data: shards}
"""


def opened_for_writing(pipe: Path) -> int | None:
    """Once the loader has opened it for reading."""
    with suppress(OSError):
        return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    return None


@pytest.mark.slow
def test_a_run_whose_loader_is_starved_is_no_hang_and_names_it(workspace: Workspace) -> None:
    (workspace.directory / "shards").mkdir()
    pipe = workspace.directory / "shards" / "a.jsonl"
    os.mkfifo(pipe)
    workspace.scenario("starved", SCENARIO)
    process = workspace.start("run", "starved")
    feeder = wait_for(lambda: opened_for_writing(pipe), "the loader reads")
    os.write(feeder, BLOCK)
    said = workspace.directory / "err.txt", workspace.directory / "out.txt"
    # The next block comes only when the run is suspected to hang.
    wait_for(lambda: any("Ordered.__next__" in file.read_text() for file in said), "the stall is told")
    os.write(feeder, BLOCK)
    ran = workspace.finished(process)
    os.close(feeder)
    assert (ran.code, ran.outcome["verdict"]) == (0, "PASS"), ran.out + ran.err
    assert "progress again after" in ran.out + ran.err
    log = (ran.run_dir / "starved" / "output.log").read_text()
    assert "nsa.train loader ready in " in log
    assert "[DATA] rank=0 step 7 waited " in log
