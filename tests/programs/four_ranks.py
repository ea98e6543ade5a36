"""Four ranks on two nodes, of which rank 3 does what the first argument says in its third step.

"wait" waits until the file in the second argument exists.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist


def act(what: str) -> None:
    if what == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()  # never released
    elif what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "sleep":
        time.sleep(8.0)
    elif what == "wait":
        while not Path(sys.argv[2]).exists():
            time.sleep(0.1)


def main() -> None:
    dist.init_process_group("gloo")
    for step in range(5):
        if step == 2 and dist.get_rank() == 3:
            act(sys.argv[1])
        dist.all_reduce(torch.ones(4))
    print(f"rank {dist.get_rank()} done", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
