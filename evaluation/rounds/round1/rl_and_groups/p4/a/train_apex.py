"""Ape-X DQN in one file.

rank 0      learner
rank 1      prioritised replay
rank 2..    actors (epsilon ladder)
"""
import argparse
import random
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn

LEARNER, REPLAY = 0, 1
OP_ADD, OP_SAMPLE, OP_PRIO, OP_BYE = range(4)
OBS, ACT = 6, 4
ITEM = 2 * OBS + 3  # s, s', a, r, done


def header(op, n=0):
    return torch.tensor([op, n], dtype=torch.int64)


def say(*a):
    print(f"{time.strftime('%H:%M:%S')} [{dist.get_rank()}]", *a, file=sys.stderr, flush=True)


class GridHunt:
    def __init__(self, seed, size=7):
        self.rng, self.size = random.Random(seed), size

    def reset(self):
        self.me = [self.rng.randrange(self.size) for _ in range(2)]
        self.goal = [self.rng.randrange(self.size) for _ in range(2)]
        self.t = 0
        return self.obs()

    def obs(self):
        d = [(g - m) / self.size for g, m in zip(self.goal, self.me)]
        return np.array([*[m / self.size for m in self.me], *d, self.t / 40, 1.0], np.float32)

    def step(self, a):
        dx, dy = ((1, 0), (-1, 0), (0, 1), (0, -1))[a]
        self.me = [min(self.size - 1, max(0, self.me[0] + dx)), min(self.size - 1, max(0, self.me[1] + dy))]
        self.t += 1
        hit = self.me == self.goal
        return self.obs(), 1.0 if hit else -0.01, hit or self.t >= 40


def q_net():
    return nn.Sequential(nn.Linear(OBS, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, ACT))


def sync_weights(net, pg):
    with torch.no_grad():
        for p in net.parameters():
            dist.broadcast(p, src=LEARNER, group=pg)


def act_loop(args, rank, pg):
    env, net = GridHunt(args.seed + rank), q_net()
    eps = 0.4 ** (1 + 3 * (rank - 2) / max(1, dist.get_world_size() - 3))
    obs, rng, wins = env.reset(), random.Random(rank), 0
    for it in range(args.iters):
        sync_weights(net, pg)
        chunk = []
        for _ in range(args.chunk):
            with torch.no_grad():
                a = int(net(torch.from_numpy(obs)).argmax()) if rng.random() > eps else rng.randrange(ACT)
            nxt, r, done = env.step(a)
            chunk.append(np.concatenate([obs, nxt, [a, r, float(done)]]).astype(np.float32))
            wins += r > 0
            obs = env.reset() if done else nxt
        dist.send(header(OP_ADD, len(chunk)), REPLAY)
        dist.send(torch.from_numpy(np.stack(chunk)), REPLAY)
    dist.send(header(OP_BYE), REPLAY)
    return {"wins": wins, "eps": round(eps, 3)}


class PrioritisedStore:
    def __init__(self, capacity, alpha=0.6):
        self.data, self.prio = torch.zeros(capacity, ITEM), torch.zeros(capacity)
        self.capacity, self.alpha, self.size, self.pos = capacity, alpha, 0, 0

    def add(self, items):
        for row in items:
            self.data[self.pos] = row
            self.prio[self.pos] = self.prio.max().clamp(min=1.0)
            self.pos = (self.pos + 1) % self.capacity
            self.size = min(self.size + 1, self.capacity)

    def sample(self, n):
        idx = torch.multinomial(self.prio[:self.size] ** self.alpha, n, replacement=True)
        return idx, self.data[idx]


def replay_loop(args, world):
    store, served = PrioritisedStore(args.capacity), 0
    peers = set(range(REPLAY + 1, world))
    while peers:
        head = header(0)
        src = dist.recv(head)
        op, n = head.tolist()
        if op == OP_ADD:
            rows = torch.empty(n, ITEM)
            dist.recv(rows, src)
            store.add(rows)
        elif op == OP_SAMPLE:
            ready = store.size >= args.warmup
            dist.send(header(op, n if ready else 0), src)
            if ready:
                idx, rows = store.sample(n)
                dist.send(idx, src)
                dist.send(rows, src)
                served += 1
        elif op == OP_PRIO:
            upd = torch.empty(n, 2)
            dist.recv(upd, src)
            store.prio[upd[:, 0].long()] = upd[:, 1] + 1e-3
        elif op == OP_BYE:
            peers.discard(src)
    return {"size": store.size, "served": served}


def fetch(n):
    while True:
        dist.send(header(OP_SAMPLE, n), REPLAY)
        head = header(0)
        dist.recv(head, REPLAY)
        if head[1] > 0:
            break
        time.sleep(0.01)
    idx, rows = torch.empty(n, dtype=torch.int64), torch.empty(n, ITEM)
    dist.recv(idx, REPLAY)
    dist.recv(rows, REPLAY)
    return idx, rows


def train_once(net, target, opt, args):
    idx, rows = fetch(args.batch)
    s, s2 = rows[:, :OBS], rows[:, OBS:2 * OBS]
    a, r, d = rows[:, -3].long(), rows[:, -2], rows[:, -1]
    with torch.no_grad():
        best = net(s2).argmax(1, keepdim=True)
        y = r + args.gamma * (1 - d) * target(s2).gather(1, best).squeeze(1)
    td = net(s).gather(1, a[:, None]).squeeze(1) - y
    loss = nn.functional.huber_loss(td, torch.zeros_like(td))
    opt.zero_grad()
    loss.backward()
    opt.step()
    dist.send(header(OP_PRIO, len(idx)), REPLAY)
    dist.send(torch.stack([idx.float(), td.detach().abs()], 1).contiguous(), REPLAY)
    return loss.item()


def learn_loop(args, pg):
    net, target = q_net(), q_net()
    opt = torch.optim.Adam(net.parameters(), lr=args.lr)
    for it in range(args.iters):
        sync_weights(net, pg)
        losses = [train_once(net, target, opt, args) for _ in range(args.updates)]
        target.load_state_dict(net.state_dict())
        if it % 5 == 0:
            say(f"iter {it} td-loss {np.mean(losses):.5f}")
    # the actors are through; keep fitting what is in the memory at a lower rate
    for g in opt.param_groups:
        g["lr"] = args.lr / 10
    tail = [train_once(net, target, opt, args) for _ in range(args.polish)]
    dist.send(header(OP_BYE), REPLAY)
    return {"loss": round(float(np.mean(tail)), 5)}


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    for name, default in (("iters", 20), ("chunk", 32), ("updates", 6), ("polish", 300), ("batch", 32),
                          ("warmup", 48), ("capacity", 2000), ("gamma", 0.95), ("lr", 1e-3), ("seed", 0)):
        ap.add_argument("--" + name, type=type(default), default=default)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    pg = dist.new_group([r for r in range(world) if r != REPLAY])
    roles = {LEARNER: lambda: learn_loop(args, pg), REPLAY: lambda: replay_loop(args, world)}
    out = roles.get(rank, lambda: act_loop(args, rank, pg))()
    table = [None] * world
    dist.all_gather_object(table, out)
    if rank == LEARNER:
        say("summary", table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
