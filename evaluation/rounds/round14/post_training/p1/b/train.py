import logging
import os
import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from config import SFTConfig
from data import build_loader
from model import TinyCausalLM

log = logging.getLogger("sft")


class SFTTrainer:
    def __init__(self, cfg, rank, world):
        self.cfg, self.rank, self.world = cfg, rank, world
        torch.manual_seed(cfg.seed)
        self.loader = build_loader(cfg, rank, world)
        self.model = DDP(TinyCausalLM(cfg.vocab_size, cfg.hidden))
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr)
        self.sched = torch.optim.lr_scheduler.LambdaLR(self.optim, lambda s: min(1.0, (s + 1) / cfg.warmup))
        self.step = 0

    def train_step(self, ids, labels):
        loss = self.model(ids, labels)
        self.optim.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.clip)
        self.optim.step()
        self.sched.step()
        self.step += 1
        return loss.item()

    def train_epoch(self, epoch):
        total, count = 0.0, 0
        for ids, labels in self.loader:
            loss = self.train_step(ids, labels)
            total, count = total + loss, count + 1
            if self.rank == 0 and self.step % self.cfg.log_every == 0:
                log.info("epoch %d step %d loss %.4f lr %.2e", epoch, self.step, loss, self.sched.get_last_lr()[0])
        summary = torch.tensor([total, float(count)])
        dist.all_reduce(summary)
        return (summary[0] / summary[1]).item()

    def save(self, folder, epoch):
        if self.rank == 0:
            torch.save({"model": self.model.module.state_dict(), "step": self.step},
                       os.path.join(folder, f"sft-epoch{epoch}.pt"))
        dist.barrier()

    def fit(self):
        with tempfile.TemporaryDirectory(prefix="sft-") as folder:
            for epoch in range(self.cfg.epochs):
                mean = self.train_epoch(epoch)
                if self.rank == 0:
                    log.info("epoch %d done: mean loss %.4f", epoch, mean)
                self.save(folder, epoch)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO, format=f"[r{rank}] %(asctime)s %(message)s")
    trainer = SFTTrainer(SFTConfig(), rank, world)
    log.info("%d packed blocks", len(trainer.loader.dataset))
    trainer.fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
