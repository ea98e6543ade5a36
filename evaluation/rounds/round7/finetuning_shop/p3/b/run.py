import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from rewardlab.curriculum import Curriculum, CurriculumBatches
from rewardlab.model import RewardModel, ranking_loss
from rewardlab.pairs import build_pairs, local_pairs


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=60)
    ap.add_argument("--pairs", type=int, default=300)
    ap.add_argument("--dim", type=int, default=24)
    ap.add_argument("--batch-size", type=int, default=8)
    ap.add_argument("--start-level", type=float, default=0.45)
    ap.add_argument("--eval-every", type=int, default=20)
    return ap.parse_args()


@torch.no_grad()
def evaluate(model, pairs):
    model.eval()
    loss, acc = ranking_loss(model.module, pairs)
    model.train()
    out = torch.stack([loss, acc])
    dist.all_reduce(out)
    return (out / dist.get_world_size()).tolist()


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)

    pairs = build_pairs(args.pairs, args.dim)
    pool = local_pairs(pairs, rank, world)
    held_out = build_pairs(60, args.dim, seed=5)[rank::world]

    model = DDP(RewardModel(args.dim))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = CurriculumBatches(pool, Curriculum(args.start_level, args.steps), args.batch_size)

    for step in range(args.steps):
        batch = batches.draw(step)
        loss, _ = ranking_loss(model, batch)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if (step + 1) % args.eval_every == 0:
            vl, va = evaluate(model, held_out)
            if rank == 0:
                print(f"step {step + 1} level {batches.curriculum.level(step):.2f} "
                      f"eval loss {vl:.4f} acc {va:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
