import torch

from .bandit import Bandit


class Actor:
    def __init__(self, cfg, index, mailbox):
        self.cfg, self.index, self.mailbox = cfg, index, mailbox
        self.bandit = Bandit(cfg, index)
        self.version, self.weights = None, None
        self.fetched = 0

    def sync(self, round_):
        """Policies are published at every `publish_every`-th round."""
        version = round_ - round_ % self.cfg.publish_every
        if version != self.version:
            self.weights = self.mailbox.take(f"policy/{version}")
            self.version = version
            self.fetched += 1

    def play(self):
        x = self.bandit.visitors(self.cfg.horizon)
        logits = x @ self.weights.t()
        arm = torch.distributions.Categorical(logits=logits).sample()
        logp = torch.log_softmax(logits, 1).gather(1, arm.unsqueeze(1)).squeeze(1)
        return {"x": x, "arm": arm, "logp": logp, "reward": self.bandit.reward(x, arm)}

    def run(self):
        for round_ in range(self.cfg.rounds):
            self.sync(round_)
            self.mailbox.put(f"traj/{round_}/{self.index}", self.play())
        return self.fetched
