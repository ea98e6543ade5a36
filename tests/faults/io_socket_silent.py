"""Rank 0 asks a metrics server for its answer; the server takes the connection and never says a word."""

import socket
import threading

from _job import FAULT, STEPS, Trainer, batch, begin, end

LABEL = {
    "verdict": "HANG", "cause": "blocked_io", "culprit": [0], "step": 3, "limits": {"open_wait_s": 6},
}  # fmt: skip

kept = []


def serve(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        kept.append(connection)
        if not FAULT:
            connection.sendall(b"ok")


def ask(address: tuple[str, int]) -> bytes:
    with socket.create_connection(address) as connection:
        return connection.recv(2)  # to blame


rank, _ = begin()
trainer = Trainer()
server = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=serve, args=(server,), daemon=True).start()
for step in range(1, STEPS + 1):
    loss = trainer.model(batch()).square().mean()
    if rank == 0 and step == 3:
        ask(server.getsockname())
    loss.backward()
    trainer.optimizer.step()
end()
