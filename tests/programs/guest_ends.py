"""Rank 1 ends by an exception that only the program's own hook reports; rank 0 has gone before."""

import sys

import torch
import torch.distributed as dist


def report(kind: type, _error: BaseException, _traceback: object) -> None:
    print(f"the user's hook saw {kind.__name__}", flush=True)


def main() -> None:
    sys.excepthook = report
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    dist.barrier()
    if dist.get_rank() == 1:
        raise ValueError("the end")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
