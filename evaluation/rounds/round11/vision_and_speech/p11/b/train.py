import argparse
import gc
import logging
import queue
import threading

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import images

log = logging.getLogger("loader")


class PrefetchLoader:
    """Decodes and augments in a background thread, a few batches ahead."""

    def __init__(self, shard, batch_size, batches, seed, depth=4, size=16):
        self.shard, self.batch_size, self.batches = shard, batch_size, batches
        self.seed, self.depth, self.size = seed, depth, size
        self.epoch = 0

    def __iter__(self):
        rng = np.random.default_rng((self.seed, self.epoch))
        order = rng.permutation(len(self.shard))
        ready = queue.Queue(maxsize=self.depth)

        def fill():
            xs, ys, made = [], [], 0
            try:
                for k in np.concatenate([order, order]):
                    blob, y = self.shard[k]
                    img = images.decode(blob, self.size)
                    xs.append(img.astype(np.float32) / 255 + 0.1 * rng.normal(size=img.shape))
                    ys.append(y)
                    if len(xs) == self.batch_size:
                        ready.put((np.stack(xs).astype(np.float32), np.array(ys)))
                        xs, ys, made = [], [], made + 1
                    if made == self.batches:
                        return
            except images.DecodeError as e:
                log.warning("sample %d: %s", k, e)

        threading.Thread(target=fill, daemon=True).start()
        for _ in range(self.batches):
            x, y = ready.get()
            yield torch.from_numpy(x).unsqueeze(1), torch.from_numpy(y)
        self.epoch += 1

    def __len__(self):
        return self.batches


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--images", type=int, default=60)
    p.add_argument("--batch-size", type=int, default=6)
    args = p.parse_args()
    logging.basicConfig(level=logging.ERROR)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(9)
    shard = images.make_shard(rank, args.images)
    loader = PrefetchLoader(shard, args.batch_size, args.images // args.batch_size, seed=rank)
    model = DDP(nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 4)))
    ema = torch.optim.swa_utils.AveragedModel(
        model.module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(args.epochs):
        score = torch.zeros(2)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            ema.update_parameters(model.module)
            with torch.no_grad():
                score += torch.tensor([(ema(x).argmax(1) == y).sum().item(), len(y)])
        dist.all_reduce(score)
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f} ema acc {(score[0] / score[1]).item():.3f}", flush=True)
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
