"""Intent classifier with a vocabulary counted over all processes."""
import logging
import os
import random
import tempfile
from collections import Counter
from dataclasses import dataclass
from typing import Dict, List, Tuple

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

LOGGER = logging.getLogger("intent")
INTENTS = ["weather", "music", "alarm", "news"]
PAD, UNK = 0, 1


@dataclass
class TrainConfig:
    utterances: int = 960
    vocab_size: int = 220
    max_len: int = 12
    dim: int = 32
    batch_size: int = 24
    epochs: int = 4
    lr: float = 4e-3
    seed: int = 13


def load_utterances(cfg: TrainConfig) -> List[Tuple[str, int]]:
    """The export of the annotation tool; each process has the whole of it."""
    rng = random.Random(cfg.seed)
    rows = []
    for _ in range(cfg.utterances):
        label = rng.randrange(len(INTENTS))
        topic = [f"{INTENTS[label]}{rng.randint(0, 45)}" for _ in range(3)]
        filler = [f"w{rng.randint(0, 70)}" for _ in range(rng.randint(2, 7))]
        words = topic + filler
        rng.shuffle(words)
        rows.append((" ".join(words), label))
    return rows


class Vocabulary:
    def __init__(self, words: List[str]):
        self.words = ["<pad>", "<unk>"] + words
        self.ids: Dict[str, int] = {w: i for i, w in enumerate(self.words)}

    def __len__(self):
        return len(self.words)

    def encode(self, text: str, max_len: int) -> List[int]:
        ids = [self.ids.get(w, UNK) for w in text.split()][:max_len]
        return ids + [PAD] * (max_len - len(ids))

    @classmethod
    def count(cls, texts: List[str], size: int) -> "Vocabulary":
        """Counts this process's part of `texts`, adds the counts of the others."""
        rank, world = dist.get_rank(), dist.get_world_size()
        counts = Counter()
        for text in texts[rank::world]:
            counts.update(text.split())
        parts = [None] * world
        dist.all_gather_object(parts, counts)
        for r, part in enumerate(parts):
            if r != rank:
                counts.update(part)
        ranked = sorted(counts.items(), key=lambda kv: (-kv[1], kv[0]))
        words = [w for w, _ in ranked[:size - 2]]
        LOGGER.info("vocabulary: %d of %d words kept", len(words), len(counts))
        return cls(words)


class Utterances(Dataset):
    def __init__(self, rows, vocab, max_len):
        self.x = torch.tensor([vocab.encode(t, max_len) for t, _ in rows])
        self.y = torch.tensor([l for _, l in rows])

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Classifier(nn.Module):
    def __init__(self, vocab_size, dim, n_classes):
        super().__init__()
        self.emb = nn.Embedding(vocab_size, dim, padding_idx=PAD)
        self.conv = nn.Conv1d(dim, dim, 3, padding=1)
        self.head = nn.Linear(dim, n_classes)

    def forward(self, x):
        h = torch.relu(self.conv(self.emb(x).transpose(1, 2)))
        return self.head(h.amax(-1))


class IntentTrainer:
    def __init__(self, cfg: TrainConfig):
        self.cfg = cfg
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        rows = load_utterances(cfg)
        cut = int(0.8 * len(rows))
        self.vocab = Vocabulary.count([t for t, _ in rows[:cut]], cfg.vocab_size)
        train = Utterances(rows[:cut], self.vocab, cfg.max_len)
        self.valid = Utterances(rows[cut:], self.vocab, cfg.max_len)
        self.sampler = DistributedSampler(train, self.world, self.rank, shuffle=True, seed=cfg.seed)
        self.loader = DataLoader(train, cfg.batch_size, sampler=self.sampler, drop_last=True)
        torch.manual_seed(cfg.seed)
        self.model = DDP(Classifier(len(self.vocab), cfg.dim, len(INTENTS)))
        self.opt = optim.Adam(self.model.parameters(), lr=cfg.lr)
        self.crit = nn.CrossEntropyLoss()
        self.outdir = tempfile.mkdtemp(prefix="intent-") if self.rank == 0 else None

    def run(self):
        for epoch in range(self.cfg.epochs):
            loss = self._epoch(epoch)
            acc = self._validate()
            if self.rank == 0:
                LOGGER.info("epoch %d loss %.4f valid acc %.3f", epoch, loss, acc)
                self._save(epoch)
        dist.barrier()

    def _epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        self.model.train()
        running = torch.zeros(1)
        for x, y in self.loader:
            self.opt.zero_grad()
            loss = self.crit(self.model(x), y)
            loss.backward()
            self.opt.step()
            running += loss.detach()
        dist.all_reduce(running)
        return running.item() / (len(self.loader) * self.world)

    @torch.no_grad()
    def _validate(self):
        self.model.eval()
        part = range(self.rank, len(self.valid), self.world)
        x, y = self.valid[list(part)]
        hits = torch.tensor([(self.model.module(x).argmax(-1) == y).sum().item(), len(y)])
        dist.all_reduce(hits)
        return hits[0].item() / hits[1].item()

    def _save(self, epoch):
        with open(os.path.join(self.outdir, "vocab.txt"), "w") as f:
            f.write("\n".join(self.vocab.words))
        torch.save({"model": self.model.module.state_dict(), "epoch": epoch}, os.path.join(self.outdir, "last.pt"))


def main():
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO, format=f"%(levelname)s r{dist.get_rank()} %(message)s")
    IntentTrainer(TrainConfig()).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
