"""Two-stage curriculum: 'easy' from scratch, then 'hard' resumed from the first stage's checkpoint."""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from trainer import ckpt
from trainer.data import VOCAB, sequences
from trainer.tracker import BestTracker

STAGES = {"easy": dict(steps=10, length=16, lr=1e-2), "hard": dict(steps=16, length=24, lr=4e-3)}
EVAL_EVERY = 2
PATIENCE = 2


class Mixer(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        logits = self.out(self.rnn(self.emb(ids[:, :-1]))[0])
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def build(mesh):
    torch.manual_seed(0)
    model = Mixer()
    fully_shard(model.out, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@torch.no_grad()
def evaluate(model, stage, length):
    g = torch.Generator().manual_seed(999 + dist.get_rank())
    value = model(sequences(stage, 8, length, g)).detach().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def run_stage(stage, model, tracker, step):
    spec = STAGES[stage]
    opt = torch.optim.Adam(model.parameters(), lr=spec["lr"])
    g = torch.Generator().manual_seed(1234 * (dist.get_rank() + 1) + step)
    for i in range(spec["steps"]):
        loss = model(sequences(stage, 8, spec["length"], g))
        loss.backward()
        opt.step()
        opt.zero_grad()
        step += 1
        if (i + 1) % EVAL_EVERY == 0:
            value = evaluate(model, stage, spec["length"])
            stop = tracker.update(value)
            if dist.get_rank() == 0:
                print(f"[{stage}] step {step} val {value:.3f} best {tracker.best:.3f}", flush=True)
            if stop:
                break
    return step


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    control = dist.new_group(backend="gloo")
    where = [tempfile.mkdtemp(prefix="stages_") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(where, src=0)
    path = os.path.join(where[0], "last.pt")

    tracker = BestTracker(PATIENCE, min_delta=0.01)
    model = build(mesh)
    step = run_stage("easy", model, tracker, 0)
    ckpt.save(path, model, tracker, step, control)

    model, tracker = build(mesh), BestTracker(PATIENCE, min_delta=0.01)
    step = ckpt.restore(path, model, tracker)
    step = run_stage("hard", model, tracker, step)
    ckpt.save(path, model, tracker, step, control)
    if dist.get_rank() == 0:
        print(f"finished at step {step}, best {tracker.best:.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
