"""REINFORCE with an evaluator beside it.

Rank 0 trains and publishes snapshots into a key-value store, the remaining rank
scores every snapshot, so that training never waits for an evaluation.
"""
import argparse
import io
import json
import os
import socket
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Normal


class Board:
    """Typed view of the store that trainer and evaluator share."""

    def __init__(self, store):
        self.store = store

    @classmethod
    def open(cls, rank):
        where = [None]
        server = None
        if rank == 0:
            server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False,
                                   timeout=timedelta(minutes=45))
            where = [("127.0.0.1", server.port, socket.gethostname())]
        dist.broadcast_object_list(where, src=0)
        host, port, _ = where[0]
        if server is None:
            server = dist.TCPStore(host, port, is_master=False, wait_for_workers=False,
                                   timeout=timedelta(minutes=45))
        return cls(server)

    def put_weights(self, version, model):
        buf = io.BytesIO()
        torch.save(model.state_dict(), buf)
        self.store.set(f"snapshot/{version}", buf.getvalue())

    def weights(self, version):
        return torch.load(io.BytesIO(self.store.get(f"snapshot/{version}")))

    def drop_weights(self, version):
        self.store.delete_key(f"snapshot/{version}")

    def put_score(self, version, row):
        self.store.set(f"score/{version}", json.dumps(row))

    def has_score(self, version):
        return self.store.check([f"score/{version}"])

    def score(self, version):
        return json.loads(self.store.get(f"score/{version}"))


class Spring:
    """Batch of damped springs that are to be held at zero."""

    def __init__(self, n, seed, stiff=1.0):
        self.n, self.stiff = n, stiff
        self.g = torch.Generator().manual_seed(seed)

    def reset(self):
        self.x = torch.randn(self.n, 2, generator=self.g)
        return self.x.clone()

    def step(self, u):
        p, v = self.x.unbind(1)
        v = v + 0.1 * (u.squeeze(1) - self.stiff * p - 0.1 * v)
        p = p + 0.1 * v
        self.x = torch.stack([p, v], 1)
        return self.x.clone(), -(p.pow(2) + 0.1 * v.pow(2) + 0.01 * u.squeeze(1).pow(2))


def make_policy():
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))


def episode(env, policy, horizon, std):
    obs, logps, rews = env.reset(), [], []
    for _ in range(horizon):
        d = Normal(policy(obs), std)
        u = d.sample()
        logps.append(d.log_prob(u).squeeze(1))
        obs, r = env.step(u)
        rews.append(r)
    return torch.stack(logps), torch.stack(rews)


def versions(args):
    return list(range(args.publish_every, args.updates + 1, args.publish_every))


def train(args, board):
    torch.manual_seed(args.seed)
    policy = make_policy()
    opt = torch.optim.Adam(policy.parameters(), lr=args.lr)
    env = Spring(args.envs, args.seed)
    for upd in range(1, args.updates + 1):
        logp, rew = episode(env, policy, args.horizon, args.std)
        togo = rew.flip(0).cumsum(0).flip(0)
        adv = (togo - togo.mean(1, keepdim=True)) / (togo.std(1, keepdim=True) + 1e-6)
        loss = -(logp * adv).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if upd % args.publish_every == 0:
            board.put_weights(upd, policy)
            old = upd - args.keep * args.publish_every
            if old > 0:
                board.drop_weights(old)
            print(f"[train] update {upd} return {rew.sum(0).mean():.2f}", flush=True)

    best = None
    for v in versions(args):
        row = board.score(v)
        if best is None or row["mean"] > best["mean"]:
            best = row
    path = os.path.join(args.out or tempfile.mkdtemp(prefix="spring_"), "final.pt")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    torch.save({"model": policy.state_dict(), "best": best}, path)
    print(f"[train] best snapshot {best}; wrote {path}", flush=True)


@torch.no_grad()
def evaluate(args, board):
    policy = make_policy()
    for v in versions(args):
        policy.load_state_dict(board.weights(v))
        t0, per_task = time.time(), []
        for k in range(args.eval_tasks):
            env = Spring(args.eval_envs, 7000 + k, stiff=0.5 + 0.1 * k)
            _, rew = episode(env, policy, args.eval_horizon, 0.01)
            per_task.append(rew.sum(0).mean().item())
        row = {"version": v, "mean": sum(per_task) / len(per_task), "worst": min(per_task)}
        board.put_score(v, row)
        print(f"[eval] snapshot {v} mean {row['mean']:.2f} worst {row['worst']:.2f} "
              f"({time.time() - t0:.2f}s)", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--updates", type=int, default=60)
    ap.add_argument("--publish-every", type=int, default=6)
    ap.add_argument("--keep", type=int, default=3)
    ap.add_argument("--envs", type=int, default=16)
    ap.add_argument("--horizon", type=int, default=20)
    ap.add_argument("--eval-envs", type=int, default=64)
    ap.add_argument("--eval-horizon", type=int, default=150)
    ap.add_argument("--eval-tasks", type=int, default=7)
    ap.add_argument("--std", type=float, default=0.3)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--out", default="")
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    board = Board.open(dist.get_rank())
    dist.barrier()
    if dist.get_rank() == 0:
        train(args, board)
    else:
        evaluate(args, board)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
