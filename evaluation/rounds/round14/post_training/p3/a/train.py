import argparse
import logging

import torch
import torch.distributed as dist

from generation import GenerationConfig, generate
from model import ShardedPolicy

log = logging.getLogger("grpo")


class PromptSource:
    def __init__(self, vocab, length, group_size, seed):
        self.vocab, self.length, self.group_size = vocab, length, group_size
        self.gen = torch.Generator().manual_seed(seed)

    def next(self):
        prompt = torch.randint(2, self.vocab, (1, self.length), generator=self.gen)
        return prompt.repeat(self.group_size, 1)


def reward_fn(ids, mask):
    """Rewards an answer whose tokens are even, with a price on its length."""
    good = ((ids % 2 == 0) & (ids > 0)).float() * mask
    return good.sum(1) / mask.sum(1).clamp(min=1) - 0.05 * mask.sum(1)


class GRPOTrainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        init = torch.Generator().manual_seed(args.seed)
        self.model = ShardedPolicy(args.vocab, args.hidden, args.window, init)
        self.prompts = PromptSource(args.vocab, args.window, args.group_size, args.seed + 100 * self.rank)
        self.sampler = torch.Generator().manual_seed(args.seed + 1000 + self.rank)
        self.optim = torch.optim.Adam(self.model.parameters(), lr=args.lr)
        self.config = GenerationConfig(max_new_tokens=args.max_new_tokens)

    def policy_loss(self, ids, mask, advantage):
        logp = self.model(ids)[:, :-1].log_softmax(-1)
        target = ids[:, self.model.window:]
        logp = logp.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        mask = mask[:, self.model.window:]
        return -(logp * advantage.unsqueeze(1) * mask).sum() / mask.sum()

    def step(self):
        ids, mask = generate(self.model, self.prompts.next(), self.config, self.sampler)
        reward = reward_fn(ids, mask)
        advantage = (reward - reward.mean()) / (reward.std() + 1e-4)
        loss = self.policy_loss(ids, mask, advantage)
        self.optim.zero_grad()
        loss.backward()
        self.optim.step()
        stats = torch.stack([reward.mean(), mask.sum(1).mean()])
        dist.all_reduce(stats)
        return stats / self.world

    def run(self):
        for it in range(self.args.iterations):
            reward, length = self.step().tolist()
            if self.rank == 0 and it % 6 == 0:
                log.info("it %d reward %.3f response length %.2f", it, reward, length)


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--iterations", type=int, default=30)
    p.add_argument("--vocab", type=int, default=8)
    p.add_argument("--hidden", type=int, default=32)
    p.add_argument("--window", type=int, default=4)
    p.add_argument("--group-size", type=int, default=3)
    p.add_argument("--max-new-tokens", type=int, default=8)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--seed", type=int, default=3)
    return p.parse_args()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO, format=f"[{dist.get_rank()}] %(message)s")
    GRPOTrainer(parse_args()).run()
    dist.barrier()
    dist.destroy_process_group()
