"""Gives a byte now and then, for so many seconds, to whoever reads: through a FIFO, or through a connection.

slow_source.py fifo PATH SECONDS
slow_source.py socket SECONDS        prints its port
"""

import socket
import sys
import time

PAUSE_S = 2.5


def trickle(send, seconds: float) -> None:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        send(b"x")
        time.sleep(PAUSE_S)


def main() -> None:
    kind, *rest = sys.argv[1:]
    if kind == "fifo":
        with open(rest[0], "wb", buffering=0) as pipe:
            trickle(pipe.write, float(rest[1]))
        return
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
        with connection:
            trickle(connection.sendall, float(rest[0]))


if __name__ == "__main__":
    main()
