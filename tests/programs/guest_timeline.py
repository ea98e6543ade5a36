"""Two ranks with one helper for two callers, a thread of their own, loaders and an evaluation: what the board tells."""

import sys
import threading

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader


def share(value: torch.Tensor) -> None:
    dist.all_reduce(value)


def train(model: torch.nn.Module, batch: torch.Tensor) -> None:
    loss = model(batch).sum()
    share(loss.detach())


def evaluate(model: torch.nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        share(torch.nn.functional.relu(model(torch.ones(2))).sum())
        torch.nn.BCEWithLogitsLoss()(torch.ones(2), torch.ones(2))


def beside(group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.ones(3), group=group)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    own = dist.new_group([0, 1])
    model = torch.nn.Linear(2, 1)
    loader = DataLoader(torch.ones(3, 2))
    for epoch in (1, 2):
        for number, batch in enumerate(loader):
            if (epoch, rank, number) == (2, 1, 1):
                break
            train(model, batch)
            if rank == 0 and (epoch, number) == (2, 0):
                break
    lasting = DataLoader(torch.ones(2, 2), num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    for _ in range(2 + rank):
        list(lasting)
    evaluate(model)
    thread = threading.Thread(target=beside, args=(own,))
    thread.start()
    thread.join()
    print("ready", flush=True)
    sys.stdin.readline()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
