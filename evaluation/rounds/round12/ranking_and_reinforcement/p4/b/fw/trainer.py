import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Trainer:
    def __init__(self, model, loader, cfg):
        self.model = DDP(model)
        self.loader = loader
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=cfg["lr"])
        self.sched = torch.optim.lr_scheduler.StepLR(self.opt, step_size=2, gamma=0.7)
        self.epoch = 0
        self.history = []

    def state_dict(self):
        return {
            "model": self.model.module.state_dict(),
            "opt": self.opt.state_dict(),
            "sched": self.sched.state_dict(),
            "epoch": self.epoch,
            "history": list(self.history),
        }

    def load_state_dict(self, state):
        self.model.module.load_state_dict(state["model"])
        self.opt.load_state_dict(state["opt"])
        self.sched.load_state_dict(state["sched"])
        self.epoch = state["epoch"]
        self.history = state["history"]

    def run_epoch(self):
        self.loader.sampler.set_epoch(self.epoch)
        total = 0.0
        for seq, target in self.loader:
            loss = F.cross_entropy(self.model(seq), target)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            total += loss.item()
        self.sched.step()
        self.epoch += 1
        self.history.append(total / len(self.loader))

    def fit(self, until, on_epoch=None):
        while self.epoch < until:
            self.run_epoch()
            if dist.get_rank() == 0:
                print(f"epoch {self.epoch} loss {self.history[-1]:.4f} lr {self.sched.get_last_lr()[0]:.5f}", flush=True)
            if on_epoch:
                on_epoch(self)
