import logging

import torch
from torch import nn

from .links import collect_rollouts, return_rewards
from .policy import VOCAB

log = logging.getLogger(__name__)


class RewardModel(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, width)
        self.enc = nn.GRU(width, width, batch_first=True)
        self.score = nn.Linear(width, 1)

    @torch.no_grad()
    def forward(self, prompt, completion):
        _, ctx = self.enc(self.emb(torch.tensor([prompt])))
        h, _ = self.enc(self.emb(torch.tensor([completion], dtype=torch.long)), ctx)
        return self.score(h[0, -1]).item()


class RewardWorker:
    def __init__(self, args, topo):
        self.args, self.topo = args, topo
        self.model = RewardModel().eval()
        self.scored = self.skipped = 0

    def score_rollouts(self, rollouts):
        return [self.model(s["prompt"], s["completion"]) for s in rollouts]

    def run(self):
        for step in range(self.args.steps):
            per_rank = collect_rollouts(self.topo, None)
            try:
                rewards = [self.score_rollouts(r) for r in per_rank]
            except (RuntimeError, IndexError, ValueError) as e:
                log.warning("step %d: cannot score this batch (%s)", step, e)
                self.skipped += 1
                rewards = [[self.args.missing_reward] * len(r) for r in per_rank]
            self.scored += sum(len(r) for r in rewards)
            return_rewards(self.topo, rewards)
        return {"role": "reward", "scored": self.scored, "skipped": self.skipped}
