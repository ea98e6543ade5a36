import torch
import torch.distributed as dist

from config import frames_per_update
from env import Corridor
from policy import assign, flatten


class Actor:
    def __init__(self, cfg, model, rank):
        self.cfg = cfg
        self.model = model
        self.env = Corridor(cfg.env_size, seed=cfg.seed * 1000 + rank)
        self.obs = self.env.reset()
        self.gen = torch.Generator().manual_seed(cfg.seed + 17 * rank)
        self.rollouts = cfg.total_frames // frames_per_update(cfg, cfg.num_actors)

    @torch.no_grad()
    def unroll(self):
        rows = []
        for _ in range(self.cfg.unroll):
            obs = torch.from_numpy(self.obs)
            logits, _ = self.model(obs)
            action = torch.multinomial(logits.softmax(-1), 1, generator=self.gen).item()
            self.obs, reward, done = self.env.step(action)
            rows.append(torch.cat([obs, torch.tensor([float(action), reward, float(done)])]))
        return torch.stack(rows)

    def run(self):
        params = torch.empty_like(flatten(self.model))
        total = 0.0
        for _ in range(self.rollouts):
            traj = self.unroll()
            total += traj[:, -2].sum().item()
            dist.send(traj, dst=0)
            dist.recv(params, src=0)
            assign(self.model, params)
        return total
