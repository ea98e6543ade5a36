"""Rank 0 waits for the handle of an asynchronous collective that rank 1 skips on its way to a barrier."""

import threading

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(4))
    if dist.get_rank() == 0:
        with threading.Lock():
            dist.all_reduce(torch.ones(4), async_op=True).wait()
    dist.barrier()


if __name__ == "__main__":
    main()
