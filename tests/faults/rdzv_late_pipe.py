"""Rank 2 waits for a word from its own helper before it joins, and the helper waits for rank 2 to close its end."""

import os
import subprocess

import torch.distributed as dist
from _job import FAULT, Trainer, end

LABEL = {
    "verdict": "HANG",
    "cause": "blocked_io",
    "culprit": [2],
    "ranks": 3,
    "limits": {"start_s": 45, "deadline_s": 180},
}


def prepare() -> bytes:
    helper = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    helper.stdin.write(b"ready\n")
    if not (FAULT and os.environ["RANK"] == "2"):
        helper.stdin.close()
    return helper.stdout.read()  # to blame


prepare()
dist.init_process_group("gloo")
Trainer().step()
end()
