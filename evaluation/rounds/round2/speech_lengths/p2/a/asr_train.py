"""CTC training of a small conv/LSTM recogniser, numel batches, one process per device."""
import argparse
import dataclasses
import logging
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel


@dataclasses.dataclass
class TrainerOptions:
    max_epoch: int = 3
    batch_bins: int = 6000
    grad_clip: float = 5.0
    log_interval: int = 4
    output_dir: Path = Path(__file__).resolve().parent / "exp_asr"
    keep_nbest: int = 2


class Reporter:
    def __init__(self):
        self.epochs = {}
        self._cur = None

    def start(self, epoch):
        self._cur = self.epochs[epoch] = defaultdict(list)

    def register(self, stats):
        for k, v in stats.items():
            self._cur[k].append(float(v))

    def mean(self, epoch, key):
        vals = [v for v in self.epochs[epoch][key] if np.isfinite(v)]
        return sum(vals) / max(len(vals), 1)


def build_corpus(n, n_vocab, seed):
    """Returns (utt id, number of frames, token ids); the lengths come from the segments file of the recipe."""
    rng = np.random.default_rng(seed)
    corpus = []
    for i in range(n):
        n_frames = int(rng.integers(60, 260))
        n_tokens = int(rng.integers(3, max(4, n_frames // 16)))
        if i % 97 == 61:
            # spelled-out account numbers, spoken fast
            n_frames, n_tokens = 90, 26
        corpus.append((f"utt{i:04d}", n_frames, rng.integers(1, n_vocab, n_tokens)))
    return corpus


class NumElementsBatches:
    """Minibatches of at most batch_bins padded elements; every rank takes its share of each minibatch."""

    def __init__(self, corpus, batch_bins, n_feat, rank, world_size):
        order = sorted(range(len(corpus)), key=lambda i: corpus[i][1])
        self.batches, cur = [], []
        for i in order:
            if len(cur) >= world_size and corpus[i][1] * n_feat * (len(cur) + 1) > batch_bins * world_size:
                self.batches.append(cur)
                cur = []
            cur.append(i)
        if len(cur) >= world_size:
            self.batches.append(cur)
        self.corpus, self.n_feat = corpus, n_feat
        self.rank, self.world_size = rank, world_size

    def __len__(self):
        return len(self.batches)

    def build_iter(self, epoch):
        for b in np.random.RandomState(epoch + 7).permutation(len(self.batches)):
            mine = self.batches[b][self.rank :: self.world_size]
            utts = [self.corpus[i] for i in mine]
            lens = torch.tensor([u[1] for u in utts])
            speech = torch.zeros(len(utts), int(lens.max()), self.n_feat)
            for row, (uid, n, _) in enumerate(utts):
                g = torch.Generator().manual_seed(int(uid[3:]))
                speech[row, :n] = torch.randn(n, self.n_feat, generator=g)
            text_lens = torch.tensor([len(u[2]) for u in utts])
            yield {
                "speech": speech,
                "speech_lengths": lens,
                "text": torch.from_numpy(np.concatenate([u[2] for u in utts])),
                "text_lengths": text_lens,
            }


class CTCModel(nn.Module):
    def __init__(self, n_feat, dim, n_vocab):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(n_feat, dim, 3, 2, 1), nn.ReLU(), nn.Conv1d(dim, dim, 3, 2, 1), nn.ReLU())
        self.lstm = nn.LSTM(dim, dim, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * dim, n_vocab)

    def forward(self, speech, speech_lengths, text, text_lengths):
        h = self.conv(speech.transpose(1, 2)).transpose(1, 2)
        olens = ((speech_lengths + 1) // 2 + 1) // 2
        h, _ = self.lstm(h)
        logp = self.out(h).log_softmax(-1).transpose(0, 1)
        loss = nn.functional.ctc_loss(logp, text, olens, text_lengths, reduction="none").mean()
        return loss, {"loss": loss.detach(), "frames": olens.sum()}


class Trainer:
    def __init__(self, options):
        self.options = options
        self.reporter = Reporter()
        self.rank = dist.get_rank()
        self.distributed = dist.get_world_size() > 1

    def run(self, model, optimizer, train_batches, valid_batches):
        dp_model = DistributedDataParallel(model) if self.distributed else model
        for epoch in range(1, self.options.max_epoch + 1):
            self.reporter.start(epoch)
            start = time.perf_counter()
            skipped = self.train_one_epoch(dp_model, optimizer, train_batches.build_iter(epoch))
            self.summarize(epoch, skipped, time.perf_counter() - start)
            self.validate_one_epoch(model, valid_batches.build_iter(0))
            if self.rank == 0:
                self.save(model, epoch)

    def train_one_epoch(self, model, optimizer, iterator):
        model.train()
        skipped = 0
        for iiter, batch in enumerate(iterator, 1):
            loss, stats = model(**batch)
            if not torch.isfinite(loss.detach()):
                logging.warning("The loss is %s. Skipping updating the model.", loss.item())
                skipped += 1
                optimizer.zero_grad()
                continue
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), self.options.grad_clip)
            optimizer.step()
            self.reporter.register(stats)
            if iiter % self.options.log_interval == 0:
                logging.info("%d batches, loss=%.3f", iiter, loss.item())
        return skipped

    def summarize(self, epoch, skipped, seconds):
        mine = {"loss": self.reporter.mean(epoch, "loss"), "skipped": skipped, "seconds": round(seconds, 2)}
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        if self.rank == 0:
            logging.info("epoch %d: %s", epoch, everyone)

    @torch.no_grad()
    def validate_one_epoch(self, model, iterator):
        model.eval()
        acc = torch.zeros(2)
        for batch in iterator:
            loss, _ = model(**batch)
            acc += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(acc)
        logging.info("valid loss=%.3f", (acc[0] / acc[1]).item())

    def save(self, model, epoch):
        self.options.output_dir.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), self.options.output_dir / f"{epoch}epoch.pth")
        old = self.options.output_dir / f"{epoch - self.options.keep_nbest}epoch.pth"
        old.unlink(missing_ok=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_epoch", type=int, default=3)
    parser.add_argument("--n_utts", type=int, default=120)
    parser.add_argument("--n_vocab", type=int, default=24)
    parser.add_argument("--n_feat", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level="INFO", format=f"[rank{rank}] %(asctime)s %(levelname)s: %(message)s")
    torch.manual_seed(args.seed)

    options = TrainerOptions(max_epoch=args.max_epoch)
    train = NumElementsBatches(build_corpus(args.n_utts, args.n_vocab, 1), options.batch_bins, args.n_feat, rank, world_size)
    valid = NumElementsBatches(build_corpus(20, args.n_vocab, 2), options.batch_bins, args.n_feat, rank, world_size)
    logging.info("%d training minibatches, %d for validation", len(train), len(valid))
    model = CTCModel(args.n_feat, 24, args.n_vocab)
    Trainer(options).run(model, torch.optim.Adam(model.parameters(), lr=2e-3), train, valid)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
