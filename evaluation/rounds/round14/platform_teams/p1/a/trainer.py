import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Trainer:
    def __init__(self, cfg, model, corpus, planner, callbacks):
        self.cfg = cfg
        self.rank = dist.get_rank()
        self.model = DDP(model)
        self.opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
        self.corpus = corpus
        self.planner = planner
        self.callbacks = callbacks
        self.step = 0
        self.epoch = 0
        self.last_tokens = 0

    def fire(self, hook, *args):
        for cb in self.callbacks:
            getattr(cb, hook)(self, *args)

    def train_step(self, tokens, targets):
        logits = self.model(tokens)
        loss = F.cross_entropy(logits, targets)
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.opt.step()
        self.step += 1
        self.last_tokens = tokens.numel()
        return loss.item(), (logits.argmax(-1) == targets).sum().item()

    def run_epoch(self):
        stats = torch.zeros(3, dtype=torch.float64)
        for indices in self.planner.shard(self.epoch):
            tokens, targets = self.corpus.collate(indices)
            loss, hits = self.train_step(tokens, targets)
            stats += torch.tensor([loss * len(indices), hits, len(indices)], dtype=torch.float64)
            self.fire("on_step_end", loss)
        gathered = [torch.zeros_like(stats) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, stats)
        total = torch.stack(gathered).sum(0)
        rows = max(total[2].item(), 1.0)
        return total[0].item() / rows, total[1].item() / rows, int(rows)

    def fit(self):
        for self.epoch in range(self.cfg.epochs):
            self.fire("on_epoch_end", self.run_epoch())
