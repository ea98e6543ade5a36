import torch
import torch.distributed as dist
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel as DDP

from .agent import ActorCritic
from .env import SlateEnv
from .stats import approx_kl, explained_variance


class PPOTrainer:
    def __init__(self, cfg):
        self.cfg, self.rank = cfg, dist.get_rank()
        torch.manual_seed(cfg.seed)
        self.agent = ActorCritic()
        self.model = DDP(self.agent)
        self.opt = torch.optim.Adam(self.model.parameters(), lr=cfg.optim.lr)
        torch.manual_seed(cfg.seed + 100 + self.rank)
        self.env = SlateEnv(cfg.envs, cfg.seed + self.rank)
        self.obs = self.env.reset()

    @torch.no_grad()
    def rollout(self):
        rows = []
        for _ in range(self.cfg.horizon):
            action, logp, value = self.agent.act(self.obs)
            nxt, reward = self.env.step(action)
            rows.append((self.obs, action, logp, value, reward))
            self.obs = nxt
        obs, act, logp, val, rew = (torch.stack(c) for c in zip(*rows))
        ret, acc = torch.zeros_like(rew), torch.zeros(self.cfg.envs)
        for t in reversed(range(len(rew))):
            acc = rew[t] + self.cfg.gamma * acc
            ret[t] = acc
        return obs.flatten(0, 1), act.flatten(), logp.flatten(), val.flatten(), ret.flatten(), rew.mean().item()

    def update(self, batch):
        obs, act, logp, val, ret = batch
        adv = ret - val
        adv = (adv - adv.mean()) / (adv.std() + 1e-6)
        o = self.cfg.optim
        for epoch in range(o.epochs):
            logits, value = self.model(obs)
            pi = Categorical(logits=logits)
            new = pi.log_prob(act)
            if approx_kl(logp, new.detach()) > o.target_kl:
                break
            ratio = (new - logp).exp()
            gain = torch.min(ratio * adv, ratio.clamp(1 - o.clip, 1 + o.clip) * adv).mean()
            loss = -gain + 0.5 * (value - ret).pow(2).mean() / 10 - o.entropy * pi.entropy().mean()
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
        return epoch + 1

    def next_difficulty(self, reward):
        """The first worker decides how noisy the users become."""
        level = [min(0.5, 0.1 + max(0.0, reward))]
        dist.broadcast_object_list(level, src=0)
        self.env.difficulty = level[0]

    def train(self):
        for it in range(self.cfg.iterations):
            *batch, reward = self.rollout()
            epochs = self.update(batch)
            self.next_difficulty(reward)
            if self.rank == 0:
                ev = explained_variance(batch[3], batch[4])
                print(f"iter {it} reward {reward:+.3f} epochs {epochs} ev {ev:+.2f}", flush=True)
