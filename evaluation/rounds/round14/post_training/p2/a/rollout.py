"""Sampling of responses and their collation into padded tensors."""
from dataclasses import dataclass

import torch


@dataclass
class Rollout:
    tokens: list
    finished: bool

    def __len__(self):
        return len(self.tokens)


class RolloutEngine:
    def __init__(self, policy, cfg, seed):
        self.policy, self.cfg = policy, cfg
        self.gen = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def sample_one(self):
        token, state, out = torch.zeros(1, 1, dtype=torch.long), None, []
        for _ in range(self.cfg.max_new_tokens):
            logits, state = self.policy.step(token, state)
            token = torch.multinomial(logits.softmax(-1), 1, generator=self.gen)
            if token.item() == self.cfg.eos:
                return Rollout(out, True)
            out.append(token.item())
        return Rollout(out, False)

    def collect(self):
        """One batch of responses; a response that is empty is replaced by a new sample."""
        batch = []
        while len(batch) < self.cfg.rollouts_per_step:
            rollout = self.sample_one()
            if len(rollout) > 0:
                batch.append(rollout)
        return batch


def pad(rollout, width):
    return torch.tensor(rollout.tokens + [0] * (width - len(rollout)))
