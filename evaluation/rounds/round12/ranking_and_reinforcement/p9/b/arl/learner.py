import torch


class Learner:
    def __init__(self, cfg, actors, mailbox):
        self.cfg, self.actors, self.mailbox = cfg, actors, mailbox
        self.weights = torch.zeros(cfg.arms, cfg.context, requires_grad=True)
        self.baseline = 0.5
        self.published = 0

    def publish(self, round_):
        if round_ % self.cfg.publish_every == 0:
            self.mailbox.put(f"policy/{round_}", self.weights.detach())
            self.published += 1

    def collect(self, round_):
        parts = []
        for actor in self.actors:
            name = f"traj/{round_}/{actor}"
            parts.append(self.mailbox.take(name))
            self.mailbox.drop(name)
        return {k: torch.cat([p[k] for p in parts]) for k in parts[0]}

    def improve(self, t):
        logp = torch.log_softmax(t["x"] @ self.weights.t(), 1).gather(1, t["arm"].unsqueeze(1)).squeeze(1)
        ratio = (logp - t["logp"]).exp().clamp(max=2.0)
        gain = (ratio * (t["reward"] - self.baseline)).mean()
        (grad,) = torch.autograd.grad(gain, self.weights)
        with torch.no_grad():
            self.weights += self.cfg.lr * grad
        mean = t["reward"].mean().item()
        self.baseline += 0.1 * (mean - self.baseline)
        return mean

    def run(self):
        for round_ in range(self.cfg.rounds):
            self.publish(round_)
            reward = self.improve(self.collect(round_))
            if round_ % 6 == 0:
                print(f"round {round_:2d} reward {reward:.3f} baseline {self.baseline:.3f}", flush=True)
        return self.published
