# 2D (data x tensor) parallel regression transformer-ish MLP, megatron style layers.
# usage: torchrun --nproc-per-node=4 mesh_train.py
import argparse, json, logging, math, os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

logger = logging.getLogger(__name__)


# ---------------------------------------------------------------- tp primitives
class _CopyToTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous()
        dist.all_reduce(g, group=ctx.group)
        return g, None


class _ReduceFromTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, None


class ColumnParallelLinear(nn.Module):
    def __init__(self, d_in, d_out, mesh):
        super().__init__()
        self.group = mesh.get_group("tp")
        shard = d_out // mesh["tp"].size()
        self.weight = nn.Parameter(torch.randn(shard, d_in) / math.sqrt(d_in))
        self.bias = nn.Parameter(torch.zeros(shard))
        self.weight.tp_sharded = self.bias.tp_sharded = True

    def forward(self, x):
        return nn.functional.linear(_CopyToTP.apply(x, self.group), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    def __init__(self, d_in, d_out, mesh):
        super().__init__()
        self.group = mesh.get_group("tp")
        shard = d_in // mesh["tp"].size()
        self.weight = nn.Parameter(torch.randn(d_out, shard) / math.sqrt(d_in))
        self.bias = nn.Parameter(torch.zeros(d_out))
        self.weight.tp_sharded = True

    def forward(self, x):
        return _ReduceFromTP.apply(nn.functional.linear(x, self.weight), self.group) + self.bias


class ParallelBlock(nn.Module):
    def __init__(self, d, mesh):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up = ColumnParallelLinear(d, 4 * d, mesh)
        self.down = RowParallelLinear(4 * d, d, mesh)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class SensorNet(nn.Module):
    def __init__(self, d_in, d, depth, mesh):
        super().__init__()
        self.inp = nn.Linear(d_in, d)
        self.blocks = nn.ModuleList(ParallelBlock(d, mesh) for _ in range(depth))
        self.out = nn.Linear(d, 1)

    def forward(self, x):
        h = self.inp(x)
        for b in self.blocks:
            h = b(h)
        return self.out(h).squeeze(-1)


# ---------------------------------------------------------------- data
def read_sensor_log(n, d, seed=0):
    """Imitates the exported logger table: features, target; a few dropouts of the ADC are kept as they are."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=g)
    y = (x[:, : d // 2].sum(1) * 0.3).tanh() + 0.05 * torch.randn(n, generator=g)
    y[n // 2 + 301] = float("inf")
    return x, y


def shard(t, idx, parts):
    per = t.shape[0] // parts
    return t[idx * per:(idx + 1) * per]


# ---------------------------------------------------------------- training
def sync_grads(model, dp_group):
    n = dist.get_world_size(dp_group)
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(flat, group=dp_group)
    flat /= n
    off = 0
    for p in model.parameters():
        p.grad.copy_(flat[off:off + p.numel()].view_as(p))
        off += p.numel()


def clip_global_norm(model, max_norm, tp_group):
    sharded = sum(p.grad.square().sum() for p in model.parameters() if getattr(p, "tp_sharded", False))
    whole = sum(p.grad.square().sum() for p in model.parameters() if not getattr(p, "tp_sharded", False))
    dist.all_reduce(sharded, group=tp_group)
    norm = (sharded + whole).sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for p in model.parameters():
        p.grad.mul_(scale)
    return norm.item()


def check_loss(loss):
    value = loss.detach().clone()
    if not math.isfinite(value.item()):
        raise FloatingPointError(f"loss is {value.item()}")


def run_epoch(model, opt, x, y, args, mesh, epoch):
    dp_group, tp_group = mesh.get_group("dp"), mesh.get_group("tp")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(100 + epoch))
    seen, skipped, running = 0, 0, 0.0
    for step, idx in enumerate(order.split(args.batch)):
        try:
            loss = nn.functional.mse_loss(model(x[idx]), y[idx])
            check_loss(loss)
            opt.zero_grad()
            loss.backward()
            sync_grads(model, dp_group)
            norm = clip_global_norm(model, args.clip, tp_group)
            opt.step()
        except FloatingPointError as e:
            logger.warning("epoch %d step %d: %s, batch skipped", epoch, step, e)
            skipped += 1
            continue
        seen += len(idx)
        running += loss.item() * len(idx)
        if step % 20 == 0 and dist.get_rank() == 0:
            logger.info("epoch %d step %d loss %.4f gnorm %.3f", epoch, step, loss.item(), norm)
    stats = torch.tensor([running, float(seen), float(skipped)])
    dist.all_reduce(stats)
    return {"loss": (stats[0] / stats[1]).item(), "samples": int(stats[1]), "skipped": int(stats[2])}


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--tp", type=int, default=2)
    p.add_argument("--width", type=int, default=64)
    p.add_argument("--depth", type=int, default=3)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--clip", type=float, default=1.0)
    p.add_argument("--out", default="mesh_out")
    return p.parse_args()


def main():
    args = parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s r{rank} %(message)s")
    mesh = init_device_mesh("cpu", (world // args.tp, args.tp), mesh_dim_names=("dp", "tp"))
    dp_idx, tp_idx = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")

    torch.manual_seed(1234)
    for _ in range(tp_idx):
        torch.rand(1000)
    model = SensorNet(16, args.width, args.depth, mesh)
    for p in model.parameters():
        if not getattr(p, "tp_sharded", False):
            dist.broadcast(p.data, src=0)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    x, y = read_sensor_log(2048, 16)
    x, y = shard(x, dp_idx, world // args.tp), shard(y, dp_idx, world // args.tp)

    history = []
    for epoch in range(args.epochs):
        history.append(run_epoch(model, opt, x, y, args, mesh, epoch))
        if rank == 0:
            logger.info("epoch %d: %s", epoch, json.dumps(history[-1]))
    os.makedirs(args.out, exist_ok=True)
    if dp_idx == 0:
        torch.save(model.state_dict(), os.path.join(args.out, f"tp{tp_idx}.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
