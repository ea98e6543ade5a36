"""GRPO on a toy arithmetic task: rollouts, group advantages, clipped policy updates."""
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

VOCAB, PROMPT, ANSWER = 14, 4, 1
PROMPTS, GROUP, ROUNDS, INNER = 2, 3, 24, 2
CLIP, KL = 0.2, 0.02


class Policy(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        return self.head(self.rnn(self.tok(ids))[0])


def make_prompts(gen):
    """Two digits framed by an opening and a closing token."""
    digits = torch.randint(0, 10, (PROMPTS, 2), generator=gen)
    first = torch.full((PROMPTS, 1), 10)
    last = torch.full((PROMPTS, 1), 11)
    return torch.cat([first, digits, last], 1)


def reward(prompts, answers):
    """A point for each answer token with the parity of the sum of the digits."""
    want = (prompts[:, 1] + prompts[:, 2]) % 2
    parity = answers % 2
    good = (parity == want[:, None]) & (answers < 10)
    return good.float().sum(1).round()


@torch.no_grad()
def rollout(policy, prompts, gen):
    ids = prompts.repeat_interleave(GROUP, 0)
    for _ in range(ANSWER):
        probs = policy(ids)[:, -1].softmax(-1)
        ids = torch.cat([ids, torch.multinomial(probs, 1, generator=gen)], 1)
    return ids


def answer_logps(logits, ids):
    lp = logits[:, PROMPT - 1 : -1].log_softmax(-1)
    return lp.gather(2, ids[:, PROMPT:, None]).squeeze(2)


def group_advantages(rewards):
    grouped = rewards.view(PROMPTS, GROUP)
    centred = grouped - grouped.mean(1, keepdim=True)
    spread = grouped.std(1, keepdim=True)
    useful = (spread > 1e-6).expand_as(grouped)
    return (centred / (spread + 1e-4)).flatten(), useful.flatten()


def policy_loss(model, ids, old, ref, adv, keep):
    new = answer_logps(model(ids), ids)
    ratio = (new - old).exp()
    gain = torch.minimum(ratio * adv[:, None], ratio.clamp(1 - CLIP, 1 + CLIP) * adv[:, None])
    gap = ref - new
    kl = gap.exp() - gap - 1
    per_row = (KL * kl - gain).mean(1)
    return (per_row * keep).sum() / keep.sum().clamp(min=1)


def train(rank, world):
    torch.manual_seed(1)
    model = DDP(Policy())
    reference = Policy()
    reference.load_state_dict(model.module.state_dict())
    opt = torch.optim.Adam(model.parameters(), lr=8e-3)
    gen = torch.Generator().manual_seed(60 + rank)
    history = []
    for turn in range(ROUNDS):
        prompts = make_prompts(gen)
        ids = rollout(model.module, prompts, gen)
        rewards = reward(ids[:, :PROMPT], ids[:, PROMPT:])
        history.append(rewards.mean().item())
        adv, useful = group_advantages(rewards)
        keep = useful.float()
        if not useful.any():
            continue
        with torch.no_grad():
            old = answer_logps(model.module(ids), ids)
            ref = answer_logps(reference(ids), ids)
        for _ in range(INNER):
            loss = policy_loss(model, ids, old, ref, adv, keep)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
        if turn % 6 == 5:
            recent = [None] * world
            dist.all_gather_object(recent, history[-6:])
            if rank == 0:
                mean = sum(map(sum, recent)) / sum(map(len, recent))
                print(f"round {turn + 1} reward {mean:.2f} kept {int(keep.sum())}", flush=True)


def main():
    dist.init_process_group("gloo")
    train(dist.get_rank(), dist.get_world_size())
    dist.barrier()
    time.sleep(0.3)  # log writers drain
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
