"""Rank 1 gets stuck where its Python stack alone does not tell why, while rank 0 waits for it in a collective."""

import ctypes
import os
import signal
import sys
import threading

import torch
import torch.distributed as dist

PR_SET_DUMPABLE = 4


def hold_the_gil() -> None:
    """A C function that sleeps without giving the interpreter's lock back."""
    ctypes.PyDLL(None).sleep(600)


def run_native_code() -> None:
    """A C function that computes for minutes, called as extensions do, without the interpreter's lock."""
    libc = ctypes.CDLL(None)
    values = ctypes.create_string_buffer(os.urandom(1 << 26))
    while True:
        libc.qsort(values, len(values) // 8, 8, libc.memcmp)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hide_and_lock() -> None:
    """A process that nobody without CAP_SYS_PTRACE may look into, in a lock it holds itself."""
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


STUCK = {"gil": hold_the_gil, "native": run_native_code, "stopped": stop, "hidden": hide_and_lock}


def main() -> None:
    dist.init_process_group("gloo")
    total = torch.ones(4)
    dist.all_reduce(total)
    if dist.get_rank() == 1:
        STUCK[sys.argv[1]]()
    dist.all_reduce(total)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
