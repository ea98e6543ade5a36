import torch
import torch.distributed as dist

from arl.actor import Actor
from arl.config import Config
from arl.learner import Learner
from arl.mailbox import Mailbox


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    cfg = Config()
    torch.manual_seed(cfg.seed + rank)
    mailbox = Mailbox()
    if rank == 0:
        role = Learner(cfg, list(range(1, world)), mailbox)
    else:
        role = Actor(cfg, rank, mailbox)
    count = role.run()
    counts = [None] * world
    dist.all_gather_object(counts, count)
    if rank == 0:
        print(f"published {counts[0]}, fetched {counts[1:]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
