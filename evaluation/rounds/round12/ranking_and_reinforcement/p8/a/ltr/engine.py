import torch
import torch.distributed as dist

from .losses import LOSSES, BadBatch


class Engine:
    def __init__(self, model, cfg):
        self.model, self.cfg = model, cfg
        self.params = list(model.parameters())
        self.loss_fn = LOSSES[cfg["loss"]]
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.skipped = 0
        for p in self.params:
            dist.broadcast(p.data, src=0)

    def reduce_grads(self):
        flat = torch.cat([p.grad.flatten() for p in self.params])
        dist.all_reduce(flat)
        flat /= self.world
        k = 0
        for p in self.params:
            p.grad.copy_(flat[k:k + p.numel()].view_as(p))
            k += p.numel()

    def scale(self, score):
        """Scores of all trainers get one common temperature."""
        mine = score.detach().std().reshape(1)
        parts = [torch.empty(1) for _ in range(self.world)]
        dist.all_gather(parts, mine)
        return score / torch.stack(parts).mean().clamp(min=0.5)

    def all_fine(self, fine):
        flag = torch.tensor([0 if fine else 1])
        dist.all_reduce(flag)
        return flag.item() == 0

    def train_batch(self, x, click, propensity):
        score = self.scale(self.model(x))
        self.model.zero_grad()
        loss = None
        try:
            loss = self.loss_fn(score, click, propensity)
        except BadBatch:
            self.skipped += 1
        if not self.all_fine(loss is not None):
            return None
        loss.backward()
        self.reduce_grads()
        with torch.no_grad():
            for p in self.params:
                p.sub_(self.cfg["lr"] * p.grad)
        return loss.item()

    def fit(self, log):
        for epoch in range(self.cfg["epochs"]):
            losses = [self.train_batch(*b) for b in log.batches(self.cfg["batch"])]
            done = [v for v in losses if v is not None]
            if self.rank == 0:
                print(f"epoch {epoch} loss {sum(done) / len(done):.4f} batches {len(done)} of {len(losses)}", flush=True)
