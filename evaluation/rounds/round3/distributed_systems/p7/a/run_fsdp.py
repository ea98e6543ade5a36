"""Fully sharded pretraining job (per-parameter sharding, one unit per block)."""
import logging
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from job_config import parse_config
from model import ModelArgs, Transformer

logger = logging.getLogger("run_fsdp")


class MetricsProcessor:
    def __init__(self, log_freq, tokens_per_step):
        self.log_freq = log_freq
        self.tokens_per_step = tokens_per_step
        self.is_writer = dist.get_rank() == 0
        self.last = time.perf_counter()

    def should_log(self, step):
        return step == 1 or step % self.log_freq == 0

    def log(self, step, loss, grad_norm, lr):
        now = time.perf_counter()
        tps = self.tokens_per_step * (1 if step == 1 else self.log_freq) / (now - self.last)
        self.last = now
        logger.info("step: %3d  loss: %7.4f  grad_norm: %6.3f  lr: %.2e  tps: %d",
                    step, loss, grad_norm, lr, tps)


EOS = 127


def counting_rows(n, seq_len, gen):
    """Sequences that count up by a stride, end with EOS and are padded with it."""
    start = torch.randint(0, 60, (n, 1), generator=gen)
    stride = torch.randint(2, 6, (n, 1), generator=gen)
    rows = start + stride * torch.arange(seq_len + 1)
    return rows.masked_fill(rows >= 100, EOS)


def training_batches(cfg, dp_rank):
    gen = torch.Generator().manual_seed(cfg.training.seed + 31 * (dp_rank + 1))
    while True:
        rows = counting_rows(cfg.training.local_batch_size, cfg.training.seq_len, gen)
        yield rows[:, :-1], rows[:, 1:]


class Generation:
    """Greedy continuation of held-out prompts, scored by exact match."""

    def __init__(self, cfg, rank, world, n_prompts=8, prompt_len=4):
        self.limit = cfg.training.seq_len
        self.prompt_len = prompt_len
        rows = counting_rows(n_prompts * world, self.limit, torch.Generator().manual_seed(999))
        # similar lengths next to each other, so that a batch carries little padding
        rows = rows[(rows != EOS).sum(1).argsort()]
        self.rows = rows[rank * n_prompts:(rank + 1) * n_prompts]

    @torch.no_grad()
    def evaluate(self, model):
        model.eval()
        out = self.rows[:, :self.prompt_len]
        done = torch.zeros(len(out), dtype=torch.bool)
        while out.shape[1] < self.limit:
            nxt = model(out)[:, -1].argmax(-1)
            nxt = torch.where(done, EOS, nxt)
            out = torch.cat([out, nxt[:, None]], 1)
            done |= nxt == EOS
            if done.all():
                break
        model.train()
        match = (out == self.rows[:, :out.shape[1]]).all(1).sum()
        score = torch.tensor([match.item(), len(out)])
        dist.all_reduce(score)
        return score[0].item() / score[1].item()


def parallelize(model, mesh):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def save_checkpoint(model, step, folder):
    """Full state, gathered parameter by parameter; written by the first rank."""
    state = {}
    for name, p in model.state_dict().items():
        full = p.full_tensor() if isinstance(p, DTensor) else p
        if dist.get_rank() == 0:
            state[name] = full.cpu()
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        torch.save(state, os.path.join(folder, f"step-{step}.pt"))
        logger.info("saved %d tensors at step %d", len(state), step)
    dist.barrier()


def main():
    cfg = parse_config()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING,
                        format="[job] %(asctime)s - %(levelname)s - %(message)s")
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))

    torch.manual_seed(cfg.training.seed)
    args = ModelArgs(max_seq_len=cfg.training.seq_len)
    model = parallelize(Transformer(args), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.optimizer.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1.0, (s + 1) / cfg.optimizer.warmup_steps))
    metrics = MetricsProcessor(cfg.metrics.log_freq,
                               world * cfg.training.local_batch_size * cfg.training.seq_len)
    data = training_batches(cfg, rank)
    generation = Generation(cfg, rank, world)

    for step in range(1, cfg.training.steps + 1):
        tokens, labels = next(data)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.training.max_norm)
        optimizer.step()
        schedule.step()

        if metrics.should_log(step):
            mean_loss = loss.detach().clone()
            dist.all_reduce(mean_loss)
            mean_loss /= world
            if metrics.is_writer:
                metrics.log(step, mean_loss.item(), float(grad_norm), schedule.get_last_lr()[0])
        if step % cfg.metrics.generate_freq == 0:
            exact = generation.evaluate(model)
            logger.info("step: %3d  exact match: %.3f", step, exact)
        if step % cfg.checkpoint.interval == 0:
            save_checkpoint(model, step, cfg.checkpoint.folder)

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
