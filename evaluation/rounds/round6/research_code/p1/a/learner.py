import torch
import torch.distributed as dist

from config import frames_per_update
from policy import a2c_loss, flatten


class Learner:
    def __init__(self, cfg, model, actors):
        self.cfg = cfg
        self.model = model
        self.actors = list(actors)
        self.opt = torch.optim.Adam(model.parameters(), lr=cfg.lr)
        self.updates = cfg.total_frames // frames_per_update(cfg, len(self.actors))

    def collect(self):
        batch = []
        for src in self.actors:
            buf = torch.empty(self.cfg.unroll, self.cfg.env_size + 1 + 3)
            dist.recv(buf, src=src)
            batch.append(buf)
        return batch

    def publish(self):
        vec = flatten(self.model)
        for dst in self.actors:
            dist.send(vec, dst=dst)

    def run(self):
        for u in range(self.updates):
            batch = self.collect()
            loss = a2c_loss(self.model, batch, self.cfg)
            self.opt.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.opt.step()
            self.publish()
            if (u + 1) % self.cfg.log_every == 0:
                reward = torch.stack(batch)[:, :, -2].mean()
                print(f"[learner] update {u + 1} loss {loss.item():.4f} reward/frame {reward:.4f}", flush=True)
        return float(self.updates)
