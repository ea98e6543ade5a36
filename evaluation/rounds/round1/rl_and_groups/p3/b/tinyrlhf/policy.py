import logging

import torch
from torch import nn
import torch.nn.functional as F

from .links import average_gradients, collect_rollouts, return_rewards

log = logging.getLogger(__name__)
VOCAB = 24


class Policy(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, x):
        return self.head(self.gru(self.emb(x))[0])


class PolicyWorker:
    def __init__(self, args, topo):
        self.args, self.topo = args, topo
        self.model = Policy()
        self.params = list(self.model.parameters())
        self.opt = torch.optim.Adam(self.params, lr=args.lr)
        self.gen = torch.Generator().manual_seed(args.seed * 100 + topo.rank)

    def prompts(self, step):
        # prompt length follows the saw-tooth curriculum of the data sheet
        span = self.args.max_prompt - self.args.min_prompt
        hi = self.args.min_prompt + round(span * (step % self.args.cycle + 1) / self.args.cycle)
        for i in range(self.args.rollouts):
            n = hi - (i + self.topo.rank) % 4
            yield torch.randint(2, VOCAB, (max(n, 2),), generator=self.gen)

    @torch.no_grad()
    def generate(self, prompt):
        seq, new = prompt.clone(), []
        while len(seq) < self.args.context:
            probs = self.model(seq[None])[0, -1].softmax(-1)
            tok = torch.multinomial(probs, 1, generator=self.gen)
            new.append(int(tok))
            seq = torch.cat([seq, tok])
            if new[-1] == 1:
                break
        return {"prompt": prompt.tolist(), "completion": new}

    def logprob(self, sample):
        seq = torch.tensor(sample["prompt"] + sample["completion"])
        n = len(sample["prompt"])
        logp = F.log_softmax(self.model(seq[None, :-1])[0, n - 1:], -1)
        return logp.gather(-1, seq[n:, None]).sum()

    def update(self, samples, rewards):
        adv = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        with torch.no_grad():
            old = torch.stack([self.logprob(s) for s in samples])
        for _ in range(self.args.ppo_epochs):
            new = torch.stack([self.logprob(s) for s in samples])
            ratio = (new - old).clamp(-5, 5).exp()
            loss = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
            self.opt.zero_grad()
            loss.backward()
            average_gradients(self.topo, self.params)
            self.opt.step()
        return loss.item()

    def run(self):
        mean = 0.0
        for step in range(self.args.steps):
            samples = [self.generate(p) for p in self.prompts(step)]
            collect_rollouts(self.topo, samples)
            rewards = torch.tensor(return_rewards(self.topo))
            loss = self.update(samples, rewards)
            mean = rewards.mean().item()
            if self.topo.rank == 0:
                log.info("step %d loss %.4f reward %.3f", step, loss, mean)
        return {"role": "policy", "reward": round(mean, 3)}
