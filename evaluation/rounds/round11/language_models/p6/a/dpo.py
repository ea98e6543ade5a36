"""DPO with an FSDP2-sharded policy and reference, and cached reference log-probabilities."""
import shutil
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from prefs import ReferenceCache, collate, load_shard, truncate

VOCAB, MAX_PROMPT, BATCH, BETA, EPOCHS = 48, 9, 6, 0.3, 2


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.ff = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim))

    def forward(self, x, mask):
        h = self.norm(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.ff(x)


class CausalLM(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, dim)
        self.pos = nn.Embedding(32, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(2))
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        T = ids.shape[1]
        mask = torch.triu(torch.full((T, T), float("-inf")), 1)
        x = self.tok(ids) + self.pos(torch.arange(T))
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


def answer_logps(model, ids, answer=4):
    logits = model(ids)[:, -answer - 1 : -1]
    lp = logits.log_softmax(-1).gather(2, ids[:, -answer:, None]).squeeze(2)
    return lp.sum(1).chunk(2)


def fill_cache(cache, reference, pairs, rank):
    todo = cache.missing(pairs)
    wanted = [None] * dist.get_world_size()
    dist.all_gather_object(wanted, len(todo))
    rounds = (max(wanted) + BATCH - 1) // BATCH
    for k in range(rounds):
        part = todo[k * BATCH : (k + 1) * BATCH] or pairs[:1]
        with torch.no_grad():
            chosen, rejected = answer_logps(reference, collate(part, MAX_PROMPT))
        for p, c, r in zip(part, chosen.tolist(), rejected.tolist()):
            cache.put(p, c, r)
    tables = [None] * dist.get_world_size()
    dist.all_gather_object(tables, cache.table)
    cache.merge(tables)
    if rank == 0:
        cache.write()
        print(f"reference cache: {len(cache.table)} pairs, {wanted} new", flush=True)


def reference_logps(cache, reference, pairs):
    if cache.missing(pairs):
        with torch.no_grad():
            return answer_logps(reference, collate(truncate(pairs, MAX_PROMPT), MAX_PROMPT))
    return cache.get(pairs)


def train(policy, reference, cache, pairs, rank, world):
    opt = torch.optim.AdamW(policy.parameters(), lr=2e-3)
    gen = torch.Generator().manual_seed(rank)
    for epoch in range(EPOCHS):
        order = torch.randperm(len(pairs), generator=gen).tolist()
        stats = torch.zeros(2)
        for at in range(0, len(order), BATCH):
            part = [pairs[i] for i in order[at : at + BATCH]]
            ref_c, ref_r = reference_logps(cache, reference, part)
            ids = collate(truncate(part, MAX_PROMPT), MAX_PROMPT)
            pol_c, pol_r = answer_logps(policy, ids)
            margin = BETA * ((pol_c - ref_c) - (pol_r - ref_r))
            loss = -F.logsigmoid(margin).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            stats += torch.tensor([loss.item(), (margin > 0).float().mean().item()])
        dist.all_reduce(stats)
        stats /= world * (len(pairs) // BATCH)
        if rank == 0:
            print(f"epoch {epoch} loss {stats[0]:.3f} accuracy {stats[1]:.2f}", flush=True)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    box = [tempfile.mkdtemp(prefix="dpo_") if rank == 0 else None]
    dist.broadcast_object_list(box, 0)
    torch.manual_seed(2)
    policy, reference = CausalLM(), CausalLM()
    reference.load_state_dict(policy.state_dict())
    fully_shard(policy, reshard_after_forward=True)
    fully_shard(reference, reshard_after_forward=True)
    pairs = load_shard(rank, VOCAB, MAX_PROMPT)
    cache = ReferenceCache(box[0])
    fill_cache(cache, reference, truncate(pairs, MAX_PROMPT), rank)
    train(policy, reference, cache, pairs, rank, world)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(box[0])
    time.sleep(0.3)  # log writers drain
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
