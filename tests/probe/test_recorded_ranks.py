"""The recordings of real ranks: their communication, and that recording changes no result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from recorder_runs import BOOTSTRAP, in_function, trouble

from nsa_harness import protocol
from nsa_harness.core.recording.reading import read_recording
from nsa_harness.core.recording.recording import RankRecording

pytestmark = pytest.mark.slow

TRAINING = """
import os, sys, torch, torch.distributed as dist, torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

def main(rank, world_size):
    torch.manual_seed(rank)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    pair = dist.new_group([0, 1])
    numbers = torch.randn(3, 2)
    dist.broadcast(numbers, src=1, group=pair)
    if rank == 0:
        dist.send(numbers, dst=1, tag=7)
    else:
        dist.recv(numbers, src=0, tag=7)
    names = [None] * world_size
    dist.all_gather_object(names, {"rank": rank})
    net = DistributedDataParallel(nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 1)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        inputs = torch.randn(4, 2)
        if step % 2 == 0:
            with net.no_sync():
                net(inputs).sum().backward()
        loss = net(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    try:
        dist.all_reduce("no tensor")
    except TypeError:
        pass
    dist.barrier()
    dist.destroy_process_group()
    with open(f"losses{rank}", "w") as file:
        file.write(" ".join(losses))
"""
TORCHRUN = TRAINING + 'main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))\n'
SPAWN = (
    TRAINING
    + """
if __name__ == "__main__":
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
    torch.multiprocessing.spawn(main, (2,), 2)
"""
)


def run(program: str, directory: Path, settings: dict[str, object] | None, *launcher: str) -> list[str]:
    """Run a training of two ranks, and return the losses of each rank. Without settings, nothing is recorded."""
    directory.mkdir()
    (directory / "train.py").write_text(program)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(protocol.ENV_PREFIX)}
    environment |= {
        protocol.ENV_PROBE_DIRECTORY: str(directory),
        "PYTHONPATH": str(BOOTSTRAP),
        "OMP_NUM_THREADS": "1",
    }
    if settings is not None:
        environment[protocol.ENV_RECORD] = json.dumps(settings)
    command = [sys.executable, *(word.format(script="train.py") for word in launcher)]
    subprocess.run(command, cwd=directory, env=environment, check=True, timeout=200)
    return [(directory / f"losses{rank}").read_text() for rank in range(2)]


def recordings(directory: Path) -> list[RankRecording]:
    everything = [read_recording(file.read_bytes(), 0) for file in directory.glob("*.record")]
    return [recording for recording in everything if in_function(recording, "main")]


@pytest.mark.parametrize(
    ("program", "launcher"),
    [
        (TORCHRUN, ("-m", "torch.distributed.run", "--nproc-per-node", "2", "{script}")),
        (SPAWN, ("{script}", "29871")),
    ],
    ids=["torchrun", "spawn"],
)
def test_recording_changes_no_loss_and_has_all_communication(
    tmp_path: Path, program: str, launcher: tuple[str, ...]
) -> None:
    plain = run(program, tmp_path / "plain", None, *launcher)
    assert run(program, tmp_path / "recorded", {}, *launcher) == plain
    assert trouble(tmp_path / "recorded") == []
    first, second = recordings(tmp_path / "recorded")
    operations = []
    for recording in (first, second):
        assert recording.problems == ()
        assert recording.world_size == 2
        calls = [each for execution in in_function(recording, "main") for each in execution.communications]
        operations.append([each.operation for each in calls])
        broadcast = next(each for each in calls if each.operation == "broadcast")
        assert (broadcast.ranks, broadcast.root, broadcast.shape, broadcast.dtype) == ((0, 1), 1, (3, 2), "float32")
        transfer = next(each for each in calls if each.operation in ("send", "recv"))
        assert (transfer.peer, transfer.tag) == ((1, 7) if transfer.operation == "send" else (0, 7))
        failed = next(each for each in calls if each.error)
        assert (failed.operation, failed.error, failed.returned) == ("all_reduce", "TypeError", False)
        assert all(each.returned for each in calls if each is not failed)
    step = ["no_sync", "backward", "backward", "step", "backward", "step"]
    for found in operations:
        transfer = "send" if "send" in found else "recv"
        assert [name for name in found if name != "sync_buffers"] == [
            *("init_process_group", "new_group", "broadcast", transfer, "all_gather_object", "DistributedDataParallel"),
            *(step * 2),
            *("all_reduce", "barrier", "destroy_process_group"),
        ]
    draws = [draw[0] for execution in in_function(first, "main") for draw in execution.draws]
    assert set(draws) == {"torch"}
