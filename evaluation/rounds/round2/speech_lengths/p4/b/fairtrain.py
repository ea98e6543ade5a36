#!/usr/bin/env python3 -u
import argparse
import logging
import os
import re
import shutil
import sys
import time
from collections import OrderedDict
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

logger = logging.getLogger("speech_cli.train")


# ---------------------------------------------------------------- checkpoint utils
def torch_persistent_save(obj, filename):
    tmp = f"{filename}.tmp"
    torch.save(obj, tmp)
    os.replace(tmp, filename)


def checkpoint_paths(path, pattern=r"checkpoint(\d+)\.pt"):
    entries = []
    for f in os.listdir(path):
        m = re.fullmatch(pattern, f)
        if m is not None:
            entries.append((int(m.group(1)), os.path.join(path, f)))
    return [x[1] for x in sorted(entries, reverse=True)]


def save_checkpoint(cfg, trainer, epoch):
    torch_persistent_save(trainer.state_dict(), os.path.join(cfg.save_dir, f"checkpoint{epoch}.pt"))
    if cfg.keep_last_epochs > 0:
        for old in checkpoint_paths(cfg.save_dir)[cfg.keep_last_epochs :]:
            os.remove(old)


def average_checkpoints(inputs):
    params = OrderedDict()
    for path in inputs:
        state = torch.load(path, map_location="cpu")["model"]
        for k, v in state.items():
            params[k] = params.get(k, 0) + v.float() / len(inputs)
    return params


def write_average(cfg, last_epoch):
    names = checkpoint_paths(cfg.save_dir)[: cfg.average_last]
    try:
        averaged = average_checkpoints(names)
        torch_persistent_save({"model": averaged, "sources": [str(n) for n in names]}, cfg.average_path)
    except (OSError, RuntimeError) as e:
        logger.warning(f"could not average the last {cfg.average_last} checkpoints: {e}")
        return None
    logger.info(f"averaged {len(names)} checkpoints")
    return averaged


def read_average(cfg):
    # the save dir may be on NFS, where the file shows up some time after the rename
    while not cfg.average_path.exists():
        time.sleep(0.2)
    return torch.load(cfg.average_path, map_location="cpu")["model"]


# ---------------------------------------------------------------- task
class SpeechToUnitTask:
    def __init__(self, n_units, feat_dim):
        self.n_units, self.feat_dim = n_units, feat_dim
        g = torch.Generator().manual_seed(99)
        self.codebook = torch.randn(n_units, feat_dim, generator=g)

    def dataset(self, split, size):
        g = torch.Generator().manual_seed({"train": 5, "valid": 6}[split])
        items = []
        for _ in range(size):
            units = torch.randint(0, self.n_units, (int(torch.randint(6, 30, (1,), generator=g)),), generator=g)
            items.append((self.codebook[units] + 0.8 * torch.randn(len(units), self.feat_dim, generator=g), units))
        return sorted(items, key=lambda x: len(x[1]))

    def collater(self, samples):
        src = torch.nn.utils.rnn.pad_sequence([s[0] for s in samples], batch_first=True)
        tgt = torch.nn.utils.rnn.pad_sequence([s[1] for s in samples], batch_first=True, padding_value=-1)
        return {"src": src, "tgt": tgt, "ntokens": int((tgt >= 0).sum())}

    def batches_by_tokens(self, data, max_tokens, rank, world):
        batches, cur = [], []
        for item in data:
            if cur and len(item[1]) * (len(cur) + 1) > max_tokens:
                batches.append(cur)
                cur = []
            cur.append(item)
        batches.append(cur)
        # as a ShardedIterator with a fill value: a dummy batch for the ranks that get none
        per = (len(batches) + world - 1) // world
        mine = batches[rank::world]
        return [self.collater(b) for b in mine] + [None] * (per - len(mine))


class Trainer:
    def __init__(self, cfg, model):
        self.cfg, self.model = cfg, model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr, betas=(0.9, 0.98))
        self.num_updates = 0
        self._dummy = None

    def state_dict(self):
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict(), "num_updates": self.num_updates}

    def train_step(self, sample):
        self.model.train()
        self.optimizer.zero_grad()
        dummy = sample is None
        if self._dummy is None:
            self._dummy = sample
        sample = self._dummy if dummy else sample
        logits = self.model(sample["src"])
        loss = F.cross_entropy(logits.flatten(0, 1), sample["tgt"].flatten(), ignore_index=-1, reduction="sum")
        if dummy:
            loss = loss * 0
        loss.backward()
        log = torch.tensor([loss.item(), 0 if dummy else sample["ntokens"]], dtype=torch.float64)
        dist.all_reduce(log)
        flat = torch.cat([p.grad.flatten() for p in self.model.parameters()])
        dist.all_reduce(flat)
        flat /= log[1].item()
        off = 0
        for p in self.model.parameters():
            p.grad.copy_(flat[off : off + p.numel()].view_as(p))
            off += p.numel()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.clip_norm)
        self.optimizer.step()
        self.num_updates += 1
        return (log[0] / log[1]).item()


@torch.no_grad()
def unit_error_rate(model, batches):
    model.eval()
    counts = torch.zeros(2, dtype=torch.float64)
    for b in batches:
        if b is None:
            continue
        wrong = (model(b["src"]).argmax(-1) != b["tgt"]) & (b["tgt"] >= 0)
        counts += torch.tensor([wrong.sum().item(), b["ntokens"]], dtype=torch.float64)
    dist.all_reduce(counts)
    return 100 * (counts[0] / counts[1]).item()


def main(cfg):
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    is_master = rank == 0
    logging.basicConfig(
        format="%(asctime)s | %(levelname)s | %(name)s | %(message)s",
        level=logging.INFO if is_master else logging.WARNING,
        stream=sys.stdout,
    )
    torch.manual_seed(cfg.seed)
    cfg.save_dir = Path(cfg.save_dir)
    cfg.average_path = cfg.save_dir / "checkpoint_avg.pt"
    if is_master:
        shutil.rmtree(cfg.save_dir, ignore_errors=True)
        cfg.save_dir.mkdir(parents=True)
    dist.barrier()

    task = SpeechToUnitTask(n_units=20, feat_dim=16)
    train = task.batches_by_tokens(task.dataset("train", 150), cfg.max_tokens, rank, world)
    valid = task.batches_by_tokens(task.dataset("valid", 40), cfg.max_tokens, rank, world)
    model = torch.nn.Sequential(torch.nn.Linear(16, 48), torch.nn.GELU(), torch.nn.Linear(48, 20))
    trainer = Trainer(cfg, model)

    for epoch in range(1, cfg.max_epoch + 1):
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch)).tolist()
        for i in order:
            loss = trainer.train_step(train[i])
        uer = unit_error_rate(model, valid)
        logger.info(f"epoch {epoch:03d} | loss {loss:.3f} | valid_uer {uer:.2f} | num_updates {trainer.num_updates}")
        if is_master:
            save_checkpoint(cfg, trainer, epoch)

    averaged = write_average(cfg, cfg.max_epoch) if is_master else read_average(cfg)
    if averaged is not None:
        model.load_state_dict(averaged)
    uer = unit_error_rate(model, valid)
    logger.info(f"final valid_uer {uer:.2f}")
    dist.destroy_process_group()


def cli_main():
    p = argparse.ArgumentParser()
    p.add_argument("--save-dir", default=Path(__file__).resolve().parent / "checkpoints")
    p.add_argument("--max-epoch", type=int, default=6)
    p.add_argument("--max-tokens", type=int, default=120)
    p.add_argument("--keep-last-epochs", type=int, default=4)
    p.add_argument("--average-last", type=int, default=5)
    p.add_argument("--lr", type=float, default=5e-3)
    p.add_argument("--clip-norm", type=float, default=2.0)
    p.add_argument("--seed", type=int, default=1)
    torch.set_num_threads(1)
    main(p.parse_args())


if __name__ == "__main__":
    cli_main()
