import logging
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import checkpoint
from data import TokenStream

log = logging.getLogger("cpt")


class Decoder(nn.Module):
    def __init__(self, vocab, hidden):
        super().__init__()
        self.emb = nn.Embedding(vocab, hidden)
        self.rnn = nn.GRU(hidden, hidden, batch_first=True)
        self.head = nn.Linear(hidden, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids[:, :-1]))[0])


class Stage:
    """One stage of pre-training on one domain, up to a total budget of tokens over all stages."""

    def __init__(self, args, domain, token_budget, folder):
        self.args, self.domain, self.budget, self.folder = args, domain, token_budget, folder
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(args.seed)
        raw = Decoder(args.vocab, args.hidden)
        self.optim = torch.optim.AdamW(raw.parameters(), lr=args.lr)
        self.progress = checkpoint.restore(folder, raw, self.optim)
        self.model = DDP(raw)
        make = lambda seed: TokenStream(domain, args.vocab, args.batch, args.seq, seed, self.rank)
        self.train_stream, self.eval_stream = make(args.seed), make(args.seed + 1)
        self.train_stream.skip(self.progress.step)

    def lr_at(self, tokens):
        frac = min(1.0, tokens / self.args.total_tokens)
        return self.args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * frac)))

    def loss(self, ids):
        return F.cross_entropy(self.model(ids).flatten(0, 1), ids[:, 1:].flatten())

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        losses = torch.stack([self.loss(self.eval_stream.next()) for _ in range(3)])
        dist.all_reduce(losses)
        self.model.train()
        return (losses / self.world).mean().item()

    def step(self):
        for group in self.optim.param_groups:
            group["lr"] = self.lr_at(self.progress.tokens)
        loss = self.loss(self.train_stream.next())
        self.optim.zero_grad()
        loss.backward()
        self.optim.step()
        self.progress.step += 1
        self.progress.tokens += self.args.batch * self.args.seq * self.world
        return loss.item()

    def run(self):
        while self.progress.tokens < self.budget:
            loss = self.step()
            if self.progress.step % self.args.eval_every == 0:
                value = self.evaluate()
                self.progress.best_eval = min(self.progress.best_eval, value)
                if self.rank == 0:
                    log.info("%s step %d tokens %d loss %.4f eval %.4f", self.domain, self.progress.step,
                             self.progress.tokens, loss, value)
        checkpoint.save(self.folder, self.model.module, self.optim, self.progress)
