import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from seqrec.batches import SequenceBatches
from seqrec.log import read_log
from seqrec.model import Caser
from seqrec.prepare import prepare
from seqrec.vocab import Vocab
from settings import CFG


def fit(model, batches, epochs, lr):
    for epoch in range(epochs):
        total = torch.zeros(2)
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(lr * p.grad)
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {total[0] / total[1]:.4f} over {int(total[1])} batches", flush=True)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        print("vocabulary:", prepare(CFG), "entries", flush=True)
    dist.barrier()
    vocab = Vocab.load(os.path.join(CFG["folder"], "vocab.json"))
    batches = SequenceBatches(read_log(CFG["log"]), vocab, rank, world, CFG["window"], CFG["batch"])
    torch.manual_seed(CFG["seed"])
    model = DDP(Caser(len(vocab), CFG["dim"], CFG["window"]))
    fit(model, batches, CFG["epochs"], CFG["lr"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
