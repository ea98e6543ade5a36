#!/usr/bin/env python
"""Fine-tune a multilingual character recogniser and report the WER of every language."""
import logging
import os
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

logger = logging.getLogger("finetune")

HPARAMS = dict(
    seed=1986,
    number_of_epochs=3,
    batch_size=4,
    lr=0.002,
    languages=["de", "fr", "it", "rw", "sw"],
    n_mels=12,
    emb_dim=28,
    vocab="_ abcdefghij",
    save_folder=os.path.join(os.path.dirname(os.path.abspath(__file__)), "results"),
)


def edit_distance(ref, hyp):
    row = list(range(len(hyp) + 1))
    for i, r in enumerate(ref, 1):
        prev, row[0] = row[0], i
        for j, h in enumerate(hyp, 1):
            prev, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, prev + (r != h))
    return row[-1]


class Manifest(Dataset):
    """Rows as prepare.py leaves them in the csv: the languages one after the other."""

    def __init__(self, counts, hparams, seed):
        g = torch.Generator().manual_seed(seed)
        self.rows = []
        for lang, n in counts.items():
            for i in range(n):
                words = [
                    "".join(hparams.vocab[int(c)] for c in torch.randint(2, len(hparams.vocab), (3,), generator=g))
                    for _ in range(int(torch.randint(1, 4, (1,), generator=g)))
                ]
                self.rows.append({"id": f"{lang}_{i:04d}", "lang": lang, "wrd": " ".join(words)})
        self.hparams = hparams

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        row = self.rows[i]
        chars = torch.tensor([self.hparams.vocab.index(c) for c in row["wrd"]])
        proto = torch.eye(len(self.hparams.vocab))[:, : self.hparams.n_mels]
        sig = proto[chars].repeat_interleave(4, 0)
        g = torch.Generator().manual_seed(i)
        return {**row, "sig": sig + 0.3 * torch.randn(sig.shape, generator=g), "chars": chars}


def padded_batch(items):
    feats = nn.utils.rnn.pad_sequence([x["sig"] for x in items], batch_first=True)
    chars = nn.utils.rnn.pad_sequence([x["chars"] for x in items], batch_first=True)
    return SimpleNamespace(
        id=[x["id"] for x in items],
        lang=[x["lang"] for x in items],
        wrd=[x["wrd"] for x in items],
        sig=feats,
        sig_lens=torch.tensor([len(x["sig"]) for x in items]),
        chars=chars,
        char_lens=torch.tensor([len(x["chars"]) for x in items]),
    )


class ErrorRateStats:
    def __init__(self):
        self.clear()

    def clear(self):
        self.errors, self.words = 0, 0

    def append(self, hyp, ref):
        self.errors += edit_distance(ref.split(), hyp.split())
        self.words += len(ref.split())


class ASR:
    def __init__(self, hparams):
        self.hparams = hparams
        self.rank = dist.get_rank()
        net = nn.ModuleDict(
            {
                "enc": nn.GRU(hparams.n_mels, hparams.emb_dim, batch_first=True, bidirectional=True),
                "lin": nn.Linear(2 * hparams.emb_dim, len(hparams.vocab)),
            }
        )

        class Wrapped(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = net

            def forward(self, x):
                return self.net["lin"](self.net["enc"](x)[0]).log_softmax(-1)

        self.modules = DistributedDataParallel(Wrapped())
        self.optimizer = torch.optim.Adam(self.modules.parameters(), lr=hparams.lr)

    def compute_objectives(self, logp, batch):
        return nn.functional.ctc_loss(logp.transpose(0, 1), batch.chars, batch.sig_lens, batch.char_lens, zero_infinity=True)

    def decode(self, logp, lens):
        out = []
        for seq, n in zip(logp.argmax(-1), lens):
            ids = torch.unique_consecutive(seq[:n]).tolist()
            out.append("".join(self.hparams.vocab[i] for i in ids if i != 0))
        return out

    def fit(self, train_set, valid_set):
        sampler = DistributedSampler(train_set, seed=self.hparams.seed)
        loader = DataLoader(train_set, self.hparams.batch_size, sampler=sampler, collate_fn=padded_batch)
        best = None
        for epoch in range(1, self.hparams.number_of_epochs + 1):
            sampler.set_epoch(epoch)
            self.modules.train()
            for step, batch in enumerate(loader):
                loss = self.compute_objectives(self.modules(batch.sig), batch)
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
            logger.info("epoch %d, train loss %.3f", epoch, loss.item())
            wers = self.evaluate(valid_set)
            best = self.checkpoint(epoch, wers, best)
        return best

    @torch.no_grad()
    def evaluate(self, dataset):
        part = range(self.rank, len(dataset), dist.get_world_size())
        loader = DataLoader(dataset, self.hparams.batch_size, sampler=list(part), collate_fn=padded_batch)
        self.modules.eval()
        stats = {}
        for batch in loader:
            hyps = self.decode(self.modules.module(batch.sig), batch.sig_lens)
            for lang, hyp, ref in zip(batch.lang, hyps, batch.wrd):
                stats.setdefault(lang, ErrorRateStats()).append(hyp, ref)
        wers = {}
        for lang, st in sorted(stats.items()):
            total = torch.tensor([st.errors, st.words], dtype=torch.int64)
            dist.all_reduce(total)
            wers[lang] = 100.0 * total[0].item() / max(total[1].item(), 1)
        return wers

    def checkpoint(self, epoch, wers, best):
        decision = [None]
        if self.rank == 0:
            mean = sum(wers.values()) / len(wers)
            decision = [min(mean, best) if best is not None else mean]
            logger.info("epoch %d: %s", epoch, " ".join(f"{k}={v:.1f}" for k, v in wers.items()))
            if best is None or mean < best:
                os.makedirs(self.hparams.save_folder, exist_ok=True)
                torch.save(self.modules.module.state_dict(), os.path.join(self.hparams.save_folder, "best.ckpt"))
        dist.broadcast_object_list(decision, src=0)
        return decision[0]


def main(overrides):
    values = dict(HPARAMS)
    for item in overrides:
        key, val = item.lstrip("-").split("=", 1)
        values[key] = type(values[key])(val)
    hparams = SimpleNamespace(**values)
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO if dist.get_rank() == 0 else logging.WARNING, format="%(name)s - %(message)s")
    torch.manual_seed(hparams.seed)
    train = Manifest({"de": 40, "fr": 40, "it": 24, "rw": 24, "sw": 12}, hparams, seed=1)
    valid = Manifest({"de": 9, "fr": 8, "it": 7, "rw": 8, "sw": 2}, hparams, seed=2)
    asr = ASR(hparams)
    best = asr.fit(train, valid)
    logger.info("best mean WER %.2f", best)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
