import os
import tempfile

import torch
import torch.distributed as dist

from engine import PipelineEngine, SpikeGuard
from stages import Link, make_stage
from trajectories import ReplayBuffer

HIDDEN, BATCH, MICRO, EPOCHS = 64, 40, 5, 4


def save_stage(folder, rank, module, step):
    path = os.path.join(folder, f"stage{rank}.pt")
    torch.save({"step": step, "weights": module.state_dict()}, path)
    sizes = [None] * dist.get_world_size()
    dist.all_gather_object(sizes, os.path.getsize(path))
    return sum(sizes)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(40 + rank)
    buffer = ReplayBuffer()
    module = make_stage(rank, world, buffer.in_dim, HIDDEN, buffer.out_dim)
    link = Link(rank, world, BATCH // MICRO, HIDDEN)
    engine = PipelineEngine(module, link, torch.optim.Adam(module.parameters(), lr=2e-3), MICRO, SpikeGuard())
    step = 0
    with tempfile.TemporaryDirectory(prefix="arm_") as folder:
        for obs, goal in buffer.iterate(BATCH, EPOCHS):
            loss, norm = engine.train_batch(obs, goal)
            step += 1
            if step % 16 == 0:
                size = save_stage(folder, rank, module, step)
                if rank == world - 1:
                    print(f"step {step} loss {loss:.4f} norm {norm:.3f} rejected {engine.guard.rejected} "
                          f"checkpoint {size} bytes", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
