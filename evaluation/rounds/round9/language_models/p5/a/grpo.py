import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

from prompts import DIGITS, load_prompts, write_prompts
from rollout import Sampler

GROUP, PROMPTS_PER_STEP, EPOCHS, CLIP = 8, 2, 2, 0.2


class Policy(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.emb = nn.Embedding(DIGITS, dim)
        self.net = nn.Sequential(nn.Linear(2 * dim, 64), nn.Tanh(), nn.Linear(64, DIGITS))

    def forward(self, q):
        return self.net(self.emb(q).flatten(1))


def ppo_loss(model, groups, old):
    questions = torch.stack([g.question for g in groups])
    actions = torch.stack([g.actions for g in groups])
    advantages = torch.stack([g.advantages for g in groups])
    logp = model(questions).log_softmax(-1).gather(1, actions)
    ratio = (logp - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()


@torch.no_grad()
def old_logprobs(policy, groups):
    questions = torch.stack([g.question for g in groups])
    actions = torch.stack([g.actions for g in groups])
    return policy(questions).log_softmax(-1).gather(1, actions)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    box = [tempfile.mkdtemp(prefix="grpo_") if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    path = os.path.join(box[0], "prompts.jsonl")
    if rank == 0:
        write_prompts(path)
    dist.barrier()
    prompts = load_prompts(path, rank, world)

    torch.manual_seed(0)
    policy = Policy()
    model = DDP(policy)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    sampler = Sampler(policy, GROUP, torch.Generator().manual_seed(17 + rank))

    for step in range(len(prompts) // PROMPTS_PER_STEP):
        chunk = prompts[step * PROMPTS_PER_STEP:(step + 1) * PROMPTS_PER_STEP]
        groups = [sampler.group(p) for p in chunk]
        old = old_logprobs(policy, groups)
        for _ in range(EPOCHS):
            loss = ppo_loss(model, groups, old)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
        stats = torch.tensor([sum(g.rewards.sum().item() for g in groups), float(len(groups) * GROUP)])
        dist.all_reduce(stats)
        if rank == 0:
            print(f"step {step} mean reward {stats[0] / stats[1]:.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
