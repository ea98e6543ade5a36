import json
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from det.data import make_loader
from det.model import CenterDetector, detection_loss


class Meter:
    def __init__(self):
        self.sum, self.n = 0.0, 0

    def add(self, v):
        self.sum += v
        self.n += 1

    def global_mean(self):
        t = torch.tensor([self.sum, self.n])
        dist.all_reduce(t)
        self.sum, self.n = 0.0, 0
        return (t[0] / t[1]).item()


def main():
    with open(sys.argv[1] if len(sys.argv) > 1 else "config.json") as f:
        cfg = json.load(f)
    dist.init_process_group("gloo")
    torch.manual_seed(cfg["seed"])
    loader = make_loader(cfg)
    model = DDP(CenterDetector())
    opt = torch.optim.SGD(model.parameters(), cfg["lr"], momentum=0.9)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 5 * cfg["lr"], cfg["epochs"] * len(loader))
    meter = Meter()
    for epoch in range(cfg["epochs"]):
        loader.sampler.set_epoch(epoch)
        loader.dataset.epoch = epoch
        for step, (imgs, boxes) in enumerate(loader):
            heat, size = model(imgs)
            loss = detection_loss(heat, size, boxes, cfg["crop"])
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            meter.add(loss.item())
            if (step + 1) % cfg["log_every"] == 0:
                mean = meter.global_mean()
                if dist.get_rank() == 0:
                    print(f"epoch {epoch} step {step + 1} loss {mean:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
