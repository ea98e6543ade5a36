"""Rank 1 asks rank 0 for a word, with a time limit for each attempt and a line in its log; rank 0 never answers."""

import socket
import time

import torch.distributed as dist
from _job import FAULT, STEPS, Trainer, batch, begin, end

LABEL = {
    "verdict": "HANG", "kind": "livelock", "cause": "livelock", "culprit": [1], "step": 3,
    "limits": {"open_wait_s": 8},
}  # fmt: skip


def ask(connection: socket.socket) -> bytes:
    connection.settimeout(0.5)
    while True:
        try:
            return connection.recv(1)  # to blame
        except TimeoutError:
            print(f"{time.time():.0f} no answer yet", flush=True)


def connect() -> socket.socket:
    """Return a connection between the two ranks."""
    path = [None]
    server = socket.create_server(("127.0.0.1", 0)) if rank == 0 else None
    if server is not None:
        path = [server.getsockname()]
    dist.broadcast_object_list(path)
    return server.accept()[0] if server is not None else socket.create_connection(path[0])


rank, _ = begin()
trainer = Trainer()
connection = connect()
for step in range(1, STEPS + 1):
    loss = trainer.model(batch()).square().mean()
    if step == 3 and rank == 1:
        ask(connection)
    elif step == 3 and not FAULT:
        time.sleep(12)
        connection.sendall(b"x")
    loss.backward()
    trainer.optimizer.step()
end()
