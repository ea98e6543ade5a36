"""Rank 1, or both, wait for something that is no collective: a pipe, a lock, a child, a worker, a partner, the clock.

    torchrun --nproc-per-node 2 waits.py KIND VALUE

VALUE is a path or a number for some kinds; for those that can hang, "well" does the same and ends after some seconds.
"""

import fcntl
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

WELL_S = 7.0
MEGABYTE = b"x" * (1 << 20)
LOCK = threading.Lock()


def read_the_pipe(path: str) -> None:
    """Nobody writes; both ends are held open here, so the open itself does not block."""
    os.read(os.open(path, os.O_RDWR), 1)


def read_what_is_written_slowly(path: str) -> None:
    """One byte now and then, from a writer outside the job."""
    with open(path, "rb", buffering=0) as pipe:
        while pipe.read(1):
            pass


def sleep_long(seconds: str) -> None:
    time.sleep(float(seconds))


def save(value: str) -> None:
    """Rank 0 writes a large checkpoint, a little at a time, to slow storage; the other one is at a barrier."""
    if dist.get_rank() == 0:
        path, seconds = value.split(",")
        end_s = time.monotonic() + float(seconds)
        with open(path, "wb") as file:
            while time.monotonic() < end_s:
                file.write(MEGABYTE)
                file.flush()
                os.fsync(file.fileno())
                time.sleep(2.5)
    dist.barrier()


def compile_long(seconds: str) -> None:
    """A compiler that says nothing and writes nothing until it is done."""
    source = "sum(n * n for n in range(100))\n" * 2000
    program = f"import time\nend_s = time.monotonic() + {float(seconds)}\nwhile time.monotonic() < end_s: "
    subprocess.run([sys.executable, "-c", f"{program}compile({source!r}, 'x', 'exec')"], check=True)


def receive_all(port: int) -> torch.Tensor:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while connection.recv(1 << 16):
            pass
    return torch.ones(1)


class Downloaded(Dataset):
    def __init__(self, port: int) -> None:
        self.port = port

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        return receive_all(self.port)


def download(port: str) -> None:
    next(iter(DataLoader(Downloaded(int(port)), num_workers=1)))


def fill_a_pipe(value: str) -> None:
    """Nobody else has the reading end. Well: a thread empties it later."""
    reader, writer = os.pipe()
    if value == "well":
        threading.Thread(target=lambda: (time.sleep(WELL_S), os.read(reader, len(MEGABYTE))), daemon=True).start()
    os.write(writer, MEGABYTE[: 80 << 10])


def wait_for_a_child_that_fills_a_pipe(value: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", f"print('x' * {len(MEGABYTE)})"], stdout=subprocess.PIPE)
    if value == "well":
        time.sleep(WELL_S)
        child.communicate()
    child.wait()


def wait_for_a_stopped_child(value: str) -> None:
    child = subprocess.Popen(["sleep", str(WELL_S) if value == "well" else "600"])
    if value != "well":
        os.kill(child.pid, signal.SIGSTOP)
    child.wait()


def take_the_lock() -> None:
    if LOCK.acquire(timeout=WELL_S) if sys.argv[2] == "well" else LOCK.acquire():
        LOCK.release()


def wait_for_a_forked_child(_: str) -> None:
    """The lock is held while the child is made, and the child has its own copy of it."""
    with LOCK:  # held while the child is forked
        child = multiprocessing.get_context("fork").Process(target=take_the_lock, daemon=True)
        child.start()
    child.join()


class Locked(Dataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        take_the_lock()
        return torch.ones(1)


def load_with_a_worker(_: str) -> None:
    with LOCK:  # held while the worker is forked
        batches = iter(DataLoader(Locked(), num_workers=1, multiprocessing_context="fork"))
    next(batches)


def wait_for_a_file_lock(path: str) -> None:
    """Held by somebody outside the job."""
    fcntl.flock(os.open(path, os.O_RDWR), fcntl.LOCK_EX)


def receive_from_each_other(value: str) -> None:
    other, told = 1 - dist.get_rank(), torch.zeros(1)
    if value == "well" and dist.get_rank() == 1:
        time.sleep(WELL_S)
        dist.send(told, other)
    else:
        dist.recv(told, other)


def wait_for_a_key(value: str) -> None:
    if dist.get_rank() == 0:
        dist.distributed_c10d._get_default_store().get("the key")
    elif value == "well":
        time.sleep(WELL_S)
        dist.distributed_c10d._get_default_store().set("the key", "1")


def make_a_group(value: str) -> None:
    """On rank 0 alone. Well: the other one comes later."""
    if dist.get_rank() == 0 or value == "well":
        time.sleep(WELL_S * dist.get_rank())
        dist.new_group([0, 1])


def lock_a_file_in_turn(value: str) -> None:
    """Rank 1 keeps the lock into the collective that rank 0 reaches only with it."""
    with open(os.path.join(tempfile.gettempdir(), f"waits-{os.environ['MASTER_PORT']}"), "w") as file:
        if dist.get_rank() == 1:
            fcntl.flock(file, fcntl.LOCK_EX)
        dist.barrier()
        if dist.get_rank() == 0:
            fcntl.flock(file, fcntl.LOCK_EX)
            fcntl.flock(file, fcntl.LOCK_UN)
        elif value == "well":
            time.sleep(WELL_S)
            fcntl.flock(file, fcntl.LOCK_UN)
        dist.all_reduce(torch.ones(1))


def lock_a_file_around_the_entrance(value: str) -> None:
    """Rank 0 keeps the lock while it waits for all; rank 1 wants the lock first."""
    with open(value, "w") as file:
        rank = int(os.environ["RANK"])
        if rank == 1:
            with open(f"{value}.locked") as told:
                told.read()
        fcntl.flock(file, fcntl.LOCK_EX)
        if rank == 0:
            with open(f"{value}.locked", "w") as tell:
                tell.write("locked")
        dist.init_process_group("gloo")


def await_one_too_many(_: str) -> None:
    dist.init_process_group("gloo", world_size=3, rank=int(os.environ["RANK"]), timeout=timedelta(seconds=5))


BEFORE = {"entrance": lock_a_file_around_the_entrance, "too_many": await_one_too_many}
ON_BOTH = {
    "transfer": receive_from_each_other,
    "key": wait_for_a_key,
    "group": make_a_group,
    "turns": lock_a_file_in_turn,
    "save": save,
}
ON_RANK_1 = {
    "pipe": read_the_pipe,
    "trickle": read_what_is_written_slowly,
    "sleep": sleep_long,
    "compile": compile_long,
    "download": download,
    "receive": lambda port: receive_all(int(port)),
    "full": fill_a_pipe,
    "child_full": wait_for_a_child_that_fills_a_pipe,
    "child_stopped": wait_for_a_stopped_child,
    "forked": wait_for_a_forked_child,
    "worker": load_with_a_worker,
    "locked": wait_for_a_file_lock,
}


def main() -> None:
    what, value = sys.argv[1:]
    if what in BEFORE:
        BEFORE[what](value)
    dist.init_process_group("gloo")
    total = torch.ones(4)
    dist.all_reduce(total)
    if what in ON_BOTH:
        ON_BOTH[what](value)
    elif dist.get_rank() == 1:
        ON_RANK_1[what](value)
    dist.all_reduce(total)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
