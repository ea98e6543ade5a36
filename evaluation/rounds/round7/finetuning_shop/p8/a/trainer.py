import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from stopper import EarlyStopper
from uploader import NullUploader, Uploader


class Trainer:
    def __init__(self, model, train, val, cfg):
        self.model, self.train_set, self.val_set, self.cfg = model, train, val, cfg
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.opt = torch.optim.Adam(model.parameters(), lr=cfg["lr"])
        self.stopper = EarlyStopper(cfg["patience"], cfg["min_delta"])
        self.uploader = Uploader(cfg["bucket"]) if self.rank == 0 else NullUploader()

    def checkpoint(self, epoch):
        state = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True))
        if self.rank == 0:
            path = f"adapter_{epoch:02d}.pt"
            torch.save(state, path)
            self.uploader.submit(path)

    def train_epoch(self, epoch):
        x, y = self.train_set
        g = torch.Generator().manual_seed(epoch)
        order = torch.randperm(len(x), generator=g)[self.rank::self.world]
        for idx in order.split(self.cfg["batch_size"]):
            loss = F.cross_entropy(self.model(x[idx]), y[idx])
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()

    @torch.no_grad()
    def validate(self):
        x, y = (t[self.rank::self.world] for t in self.val_set)
        loss = F.cross_entropy(self.model(x), y)
        dist.all_reduce(loss)
        return loss.item() / self.world

    def fit(self):
        for epoch in range(self.cfg["epochs"]):
            self.train_epoch(epoch)
            val = self.validate()
            self.checkpoint(epoch)
            if self.rank == 0:
                print(f"epoch {epoch} val {val:.4f}", flush=True)
            if self.stopper.update(val):
                if self.rank == 0:
                    print(f"stopping, best {self.stopper.best:.4f}", flush=True)
                break
        self.uploader.close()
        return self.stopper.best
