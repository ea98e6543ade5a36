import logging

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from data import ResumableBatches
from model import TelemetryAutoencoder, anomaly_score

log = logging.getLogger("telemetry")


class Trainer:
    def __init__(self, cfg, shard, holdout, ckpt):
        torch.manual_seed(cfg.seed)
        self.cfg, self.holdout, self.ckpt = cfg, holdout, ckpt
        self.net = TelemetryAutoencoder(cfg.channels)
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=cfg.lr)
        self.batches = ResumableBatches(shard, cfg.batch_size, cfg.seed)
        self.step = ckpt.load(self.net, self.opt, self.batches)
        self.ddp = DDP(self.net)

    def train_step(self, x):
        self.opt.zero_grad(set_to_none=True)
        loss = (self.ddp(x) - x).abs().mean()
        loss.backward()
        self.opt.step()
        self.step += 1
        return loss.item()

    def threshold(self):
        scores = anomaly_score(self.net, torch.from_numpy(self.holdout.values[self.holdout.ok]))
        stats = torch.tensor([scores.sum(), scores.pow(2).sum(), float(len(scores))], dtype=torch.float64)
        dist.all_reduce(stats)
        mean = stats[0] / stats[2]
        return (mean + 3 * (stats[1] / stats[2] - mean**2).clamp(min=0).sqrt()).item()

    def run(self, until):
        """Trains up to the global step `until` (the end of a spot window) and saves."""
        while self.step < until:
            for x in self.batches:
                loss = self.train_step(x)
                if self.step >= until:
                    break
            else:
                log.info("epoch %d: loss %.4f, threshold %.4f", self.batches.epoch, loss, self.threshold())
        self.ckpt.save(self.net, self.opt, self.batches, self.step)
