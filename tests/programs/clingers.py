"""Ranks that do not want to leave: rank 0 ignores every polite signal, rank 1 is stopped, both have a child elsewhere.

The children live in sessions of their own and ignore the same signals.
"""

import os
import signal
import subprocess

import torch
import torch.distributed as dist

POLITE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def main() -> None:
    dist.init_process_group("gloo")
    total = torch.ones(4)
    dist.all_reduce(total)
    for number in POLITE:
        signal.signal(number, signal.SIG_IGN)
    subprocess.Popen(["sleep", "600"], start_new_session=True)  # inherits what is ignored
    dist.barrier()
    if dist.get_rank() == 1:
        gone_on = []
        signal.signal(signal.SIGCONT, lambda *_: gone_on.append(True))
        while not gone_on:  # a stop that meets the one by which a debugger reads a stack is lost
            os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(total)


if __name__ == "__main__":
    main()
