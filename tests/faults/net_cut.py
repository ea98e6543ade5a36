"""The job lives in a network of its own; its interface goes down after the third step, and nobody has a fault."""

import ctypes
import fcntl
import os
import socket
import struct

import torch.distributed as dist
from _job import FAULT, Trainer, end

LABEL = {
    "verdict": "HANG",
    "cause": "transport",
    "culprit": [0, 1],
    "needs": ["root"],
    "limits": {"open_wait_s": 15},
}

NEW_NETWORK, GET_FLAGS, SET_FLAGS, UP = 0x40000000, 0x8913, 0x8914, 0x1


def switch(name: bytes, on: bool) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        flags = struct.unpack("16sh", fcntl.ioctl(control, GET_FLAGS, struct.pack("16sh", name, 0)))[1]
        fcntl.ioctl(control, SET_FLAGS, struct.pack("16sh", name, flags | UP if on else flags & ~UP))


rank = int(os.environ["RANK"])
libc = ctypes.CDLL(None, use_errno=True)
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
if rank == 0:
    assert libc.unshare(NEW_NETWORK) == 0, os.strerror(ctypes.get_errno())
    switch(b"lo", on=True)
    store.set("network", f"/proc/{os.getpid()}/ns/net")
else:
    with open(store.get("network")) as network:
        assert libc.setns(network.fileno(), NEW_NETWORK) == 0, os.strerror(ctypes.get_errno())
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
trainer = Trainer()
for step in range(1, 6):
    trainer.step()
    if FAULT and rank == 0 and step == 3:
        switch(b"lo", on=False)
end()
