"""GraphSAGE with neighbour sampling, one sampler process per rank.

The fanout grows over the epochs (cheap shallow neighbourhoods first).  Rank 0
scores the full graph in a helper process while the next epoch trains; the score
of epoch e is therefore looked at when epoch e+1 is done.
"""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from graph import FullGraphScorer, Graph, NeighbourSampler
from workers import LazyWorker, Worker

FANOUTS = [(3, 2), (5, 3), (6, 4), (8, 5)]
BATCH = 50
PATIENCE = 2


class Sage(nn.Module):
    def __init__(self, dim, hidden, classes):
        super().__init__()
        self.lin1 = nn.Linear(2 * dim, hidden)
        self.lin2 = nn.Linear(2 * hidden, classes)

    def forward(self, x0, x1, x2):
        # x0 [B,d]  x1 [B,k1,d]  x2 [B,k1,k2,d]
        h1 = F.relu(self.lin1(torch.cat([x1, x2.mean(2)], -1)))
        h0 = F.relu(self.lin1(torch.cat([x0, x1.mean(1)], -1)))
        return self.lin2(torch.cat([h0, h1.mean(1)], -1))


def sampled_batches(sampler, seeds):
    """keeps one request in flight ahead of the one being trained on"""
    chunks = [c for c in seeds.split(BATCH) if len(c) == BATCH]
    sampler.submit(chunks[0].numpy())
    for nxt in chunks[1:]:
        sampler.submit(nxt.numpy())
        yield sampler.result()
    yield sampler.result()


def weights_of(model):
    return {k: v.numpy().copy() for k, v in model.module.state_dict().items()}


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    graph = Graph(seed=11)
    feats, labels = torch.from_numpy(graph.x), torch.from_numpy(graph.y)
    mine = torch.from_numpy(graph.train[rank::world].copy())

    torch.manual_seed(5)
    model = DDP(Sage(graph.dim, 48, graph.classes))
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    scorer = LazyWorker(lambda: FullGraphScorer(graph), "scorer")
    best, since_best = 0.0, 0

    for epoch, fanouts in enumerate(FANOUTS):
        sampler = Worker(NeighbourSampler(graph, fanouts, seed=100 * epoch + rank), "sampler")
        gen = torch.Generator().manual_seed(1000 * epoch + rank)
        seeds = mine[torch.randperm(len(mine), generator=gen)]
        tot, cnt = torch.zeros(2), 0
        for ids, hop1, hop2 in sampled_batches(sampler, seeds):
            ids, hop1, hop2 = map(torch.from_numpy, (ids, hop1, hop2))
            out = model(feats[ids], feats[hop1], feats[hop2])
            loss = F.cross_entropy(out, labels[ids])
            opt.zero_grad()
            loss.backward()
            opt.step()
            tot += torch.tensor([loss.item(), (out.argmax(1) == labels[ids]).float().mean().item()])
            cnt += 1

        finished = scorer.drain()
        sampler.close()
        if rank == 0:
            scorer.submit((epoch, weights_of(model)))

        tot /= cnt
        dist.all_reduce(tot)
        stop = torch.zeros(1)
        for scored_epoch, acc in finished:
            since_best = 0 if acc > best else since_best + 1
            best = max(best, acc)
            stop[0] = float(since_best >= PATIENCE)
            print(f"  val acc of epoch {scored_epoch}: {acc:.4f}", flush=True)
        dist.broadcast(stop, src=0)
        if rank == 0:
            print(f"epoch {epoch} fanouts {fanouts} loss {tot[0] / world:.4f} acc {tot[1] / world:.4f}", flush=True)
        if stop.item():
            break

    for scored_epoch, acc in scorer.drain():
        print(f"  val acc of epoch {scored_epoch}: {acc:.4f} (best before {best:.4f})", flush=True)
    scorer.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
