"""Group-relative policy optimisation on a toy string copying task.

    torchrun --nproc-per-node=2 train_grpo.py --iters 6
"""
import argparse
import json
import logging
import os
import time
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

log = logging.getLogger("grpo")

BOS, EOS, VOCAB = 0, 1, 16


@dataclass
class GRPOConfig:
    iters: int = 6
    prompts_per_iter: int = 8
    group_size: int = 6
    grad_accum: int = 4
    max_new_tokens: int = 6
    hidden: int = 48
    lr: float = 3e-3
    clip: float = 0.2
    kl_coef: float = 0.01
    seed: int = 11
    out: str = ""


class TinyLM(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, hidden)
        self.rnn = nn.GRU(hidden, hidden, batch_first=True)
        self.out = nn.Linear(hidden, VOCAB)

    def forward(self, tokens, state=None):
        h, state = self.rnn(self.emb(tokens), state)
        return self.out(h), state


class PromptPool:
    """Deterministic list of prompts; every rank walks its own stripe."""

    def __init__(self, size, seed):
        g = torch.Generator().manual_seed(seed)
        self.items = []
        for i in range(size):
            # a few prompts come from the older collection, which has no reference answer
            n = 0 if i % 20 == 11 else int(torch.randint(3, 7, (1,), generator=g))
            body = torch.randint(2, VOCAB, (max(n, 2),), generator=g)
            self.items.append({"prompt": body, "answer": body[:n]})

    def stripe(self, rank, world):
        return self.items[rank::world]


@torch.no_grad()
def sample_group(model, prompt, cfg):
    tokens = torch.cat([torch.tensor([BOS]), prompt, torch.tensor([EOS])])
    tokens = tokens.unsqueeze(0).repeat(cfg.group_size, 1)
    logits, state = model(tokens)
    steps = []
    for _ in range(cfg.max_new_tokens):
        nxt = torch.distributions.Categorical(logits=logits[:, -1]).sample()
        steps.append(nxt)
        logits, state = model(nxt.unsqueeze(1), state)
    return tokens, torch.stack(steps, dim=1)


def score(completions, answer):
    if len(answer) == 0:
        return torch.zeros(len(completions))
    n = min(len(answer), completions.shape[1])
    exact = (completions[:, :n] == answer[:n]).float().mean(dim=1)
    near = 1.0 / (1.0 + (completions[:, :n] - answer[:n]).abs().float().mean(dim=1))
    return exact + 0.5 * near


def token_logp(model, context, completions):
    full = torch.cat([context, completions], dim=1)
    logits, _ = model(full[:, :-1])
    logp = F.log_softmax(logits[:, context.shape[1] - 1:], dim=-1)
    return logp.gather(-1, completions.unsqueeze(-1)).squeeze(-1)


def reduce_grads(model, world):
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    flat = torch.cat([g.reshape(-1) for g in grads])
    dist.all_reduce(flat)
    flat /= world
    offset = 0
    for p in model.parameters():
        p.grad = flat[offset:offset + p.numel()].view_as(p).clone()
        offset += p.numel()


def run_iteration(it, model, ref, opt, batch, cfg, world):
    stats = {"reward": [], "kl": [], "flat_groups": 0, "opt_steps": 0}
    opt.zero_grad()
    for i, item in enumerate(batch):
        context, comp = sample_group(model, item["prompt"], cfg)
        rewards = score(comp, item["answer"])
        stats["reward"].append(rewards.mean().item())
        std = rewards.std()
        if std < 1e-6:
            # nothing to learn from a group whose members all score the same
            stats["flat_groups"] += 1
            continue
        adv = (rewards - rewards.mean()) / (std + 1e-4)
        with torch.no_grad():
            old = token_logp(model, context, comp)
            ref_logp = token_logp(ref, context, comp)
        new = token_logp(model, context, comp)
        ratio = (new - old).exp()
        surr = torch.min(ratio * adv[:, None], ratio.clamp(1 - cfg.clip, 1 + cfg.clip) * adv[:, None])
        kl = (ref_logp - new).exp() - (ref_logp - new) - 1
        loss = -(surr - cfg.kl_coef * kl).mean() / cfg.grad_accum
        loss.backward()
        stats["kl"].append(kl.mean().item())
        if (i + 1) % cfg.grad_accum == 0:
            reduce_grads(model, world)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
            stats["opt_steps"] += 1
    return stats


def summarise(stats, world):
    rows = [None] * world
    dist.all_gather_object(rows, stats)
    reward = sum(sum(r["reward"]) for r in rows) / max(1, sum(len(r["reward"]) for r in rows))
    kl = sum(sum(r["kl"]) for r in rows) / max(1, sum(len(r["kl"]) for r in rows))
    return {"reward": reward, "kl": kl, "flat": sum(r["flat_groups"] for r in rows)}


def main():
    ap = argparse.ArgumentParser()
    for k, v in asdict(GRPOConfig()).items():
        ap.add_argument("--" + k.replace("_", "-"), type=type(v), default=v)
    cfg = GRPOConfig(**vars(ap.parse_args()))

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING,
                        format=f"[r{rank}] %(asctime)s %(message)s")
    torch.set_num_threads(1)
    torch.manual_seed(cfg.seed)
    model, ref = TinyLM(cfg.hidden), TinyLM(cfg.hidden)
    ref.load_state_dict(model.state_dict())
    ref.requires_grad_(False)
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    prompts = PromptPool(cfg.iters * cfg.prompts_per_iter * world, cfg.seed).stripe(rank, world)
    torch.manual_seed(cfg.seed * 1000 + rank)

    history = []
    for it in range(cfg.iters):
        t0 = time.time()
        batch = prompts[it * cfg.prompts_per_iter:(it + 1) * cfg.prompts_per_iter]
        stats = run_iteration(it, model, ref, opt, batch, cfg, world)
        row = summarise(stats, world)
        history.append(row)
        log.info("iter %d reward %.4f kl %.5f flat %d (%.2fs)", it, row["reward"], row["kl"],
                 row["flat"], time.time() - t0)
    if rank == 0 and cfg.out:
        os.makedirs(cfg.out, exist_ok=True)
        torch.save(model.state_dict(), os.path.join(cfg.out, "policy.pt"))
        with open(os.path.join(cfg.out, "history.json"), "w") as f:
            json.dump(history, f)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
