import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from asr.data import DIM, Spoken, collate
from asr.evaluate import evaluate
from asr.text import ALPHABET

EPOCHS, BATCH = 3, 6


class CtcNet(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.conv = nn.Conv1d(DIM, width, 3, padding=1)
        self.head = nn.Linear(width, len(ALPHABET) + 1)

    def forward(self, x):
        h = torch.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        return self.head(h).log_softmax(-1)


def loader(ds, train):
    return DataLoader(ds, BATCH, sampler=DistributedSampler(ds, shuffle=train, drop_last=True), collate_fn=collate)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(format="%(message)s", level=logging.INFO if rank == 0 else logging.WARNING)
    torch.manual_seed(0)
    train, dev = loader(Spoken(180, seed=1), True), loader(Spoken(90, seed=2), False)
    model = DDP(CtcNet())
    opt = torch.optim.AdamW(model.parameters(), 8e-3)
    for epoch in range(EPOCHS):
        train.sampler.set_epoch(epoch)
        for x, xlen, y, ylen, _ in train:
            loss = nn.functional.ctc_loss(model(x).transpose(0, 1), y, xlen, ylen, zero_infinity=True)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            opt.step()
        wer, shown = evaluate(model.module, dev)
        if rank == 0:
            logging.info("epoch %d loss %.3f wer %.3f", epoch, loss.item(), wer)
    if rank == 0:
        for ref, hyp in shown:
            logging.info("  %-24s | %s", ref, hyp)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
