import logging
from collections import Counter

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

from ocr_data import Charset, LineImages, collate, contiguous_shard, scan_lines
from recognizer import Recognizer, greedy

log = logging.getLogger("ocr")


class OCRTrainer:
    def __init__(self, lines=432, batch=12, epochs=4, lr=6e-3, seed=17):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(seed)
        self.epochs, self.charset = epochs, Charset()
        self.counts = Counter()
        train = LineImages(contiguous_shard(scan_lines(lines, seed), self.rank, self.world), seed)
        self.loader = DataLoader(train, batch, shuffle=True, collate_fn=collate,
                                 generator=torch.Generator().manual_seed(seed + self.rank))
        self.model = DDP(Recognizer(train.height, len(self.charset)))
        self.ctc = nn.CTCLoss(zero_infinity=True)
        self.opt = torch.optim.Adam(self.model.parameters(), lr=lr)

    def step(self, image, width, texts):
        labels = [self.charset.encode(t) for t in texts]
        target = torch.tensor([k for ids in labels for k in ids])
        lengths = torch.tensor([len(ids) for ids in labels])
        log_probs = self.model(image)
        loss = self.ctc(log_probs.transpose(0, 1), target, width, lengths)
        self.opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.opt.step()
        read = greedy(log_probs.detach(), width)
        self.counts["exact"] += sum(a == b for a, b in zip(read, labels))
        self.counts["lines"] += len(labels)
        return loss.item()

    def epoch(self):
        total = 0.0
        for image, width, texts in self.loader:
            try:
                total += self.step(image, width, texts)
            except (KeyError, ValueError):
                self.counts["bad_batches"] += 1
                log.debug("unreadable batch, going on", exc_info=True)
        return total / len(self.loader)

    def report(self, number, loss):
        row = torch.tensor([loss, self.counts["exact"], self.counts["lines"], self.counts["bad_batches"]])
        dist.all_reduce(row)
        self.counts.clear()
        log.info("epoch %d: loss %.3f, exact lines %.3f, bad batches %d",
                 number, row[0] / self.world, row[1] / row[2], row[3])

    def fit(self):
        for number in range(self.epochs):
            self.report(number, self.epoch())


def main():
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO if dist.get_rank() == 0 else logging.ERROR, format="%(name)s: %(message)s")
    OCRTrainer().fit()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
