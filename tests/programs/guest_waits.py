"""Three waits in a row, each over when a line comes in: for a key of a store, for a handle, inside new_group."""

import os
import sys
import threading

import torch
import torch.distributed as dist


def on_a_line(then) -> threading.Thread:
    def wait() -> None:
        sys.stdin.readline()
        then()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def wait_for_a_key(store: dist.Store) -> None:
    dist.PrefixStore("jobs", store).get("pg//cpu//0/1")


def wait_for_a_handle(received: torch.Tensor) -> None:
    dist.irecv(received, src=1).wait()


def main() -> None:
    dist.init_process_group("gloo")
    store = dist.FileStore(os.environ["STORE"], 2)
    received = torch.zeros(5)
    if dist.get_rank() == 0:
        setter = on_a_line(lambda: dist.FileStore(os.environ["STORE"], 2).set("jobs/pg//cpu//0/1", "here"))
        wait_for_a_key(store)
        setter.join()
        wait_for_a_handle(received)
    else:
        sys.stdin.readline()
        dist.send(received + 1, dst=0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
