# Small IMPALA: rank 0 learns, all other ranks act.
import argparse
import collections
import datetime
import queue
import threading

import numpy as np
import torch
from torch import nn
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--updates", type=int, default=40)
    p.add_argument("--unroll", type=int, default=24)
    p.add_argument("--gamma", type=float, default=0.97)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--rho-bar", type=float, default=1.0)
    p.add_argument("--eval-episodes", type=int, default=5)
    p.add_argument("--seed", type=int, default=3)
    return p.parse_args()


class Corridor:
    """Walk right along a noisy corridor. Longer corridors are harder."""
    OBS, ACT = 4, 3
    def __init__(self, length, seed):
        self.length, self.rng = length, np.random.default_rng(seed)

    def reset(self):
        self.x, self.t, self.v = 0.0, 0, 0.0
        return self._obs()

    def _obs(self):
        return np.array([self.x / self.length, self.v, self.t / 50.0, self.rng.normal() * 0.1], np.float32)

    def step(self, a):
        self.v = 0.6 * self.v + 0.5 * (a - 1) + 0.05 * self.rng.normal()
        self.x = max(0.0, self.x + self.v)
        self.t += 1
        done = self.x >= self.length or self.t >= 4 * self.length
        return self._obs(), (1.0 if self.x >= self.length else -0.02), done


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(Corridor.OBS, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.pi, self.v = nn.Linear(32, Corridor.ACT), nn.Linear(32, 1)

    def forward(self, x):
        h = self.body(x)
        return self.pi(h), self.v(h).squeeze(-1)


# columns of a trajectory row: obs | action | reward | done | behaviour logp | episode return
ROW = Corridor.OBS + 5


class Actor:
    def __init__(self, rank, args, weights_pg, data_pg):
        self.args, self.weights_pg, self.data_pg = args, weights_pg, data_pg
        self.env = Corridor(length=4 + 3 * (rank - 1), seed=args.seed + rank)
        self.net = ActorCritic()
        self.obs, self.ret = self.env.reset(), 0.0

    def pull(self):
        flat = parameters_to_vector(self.net.parameters()).detach()
        dist.broadcast(flat, src=0, group=self.weights_pg)
        vector_to_parameters(flat, self.net.parameters())

    @torch.no_grad()
    def unroll(self):
        rows = torch.zeros(self.args.unroll, ROW)
        for t in range(self.args.unroll):
            x = torch.from_numpy(self.obs)
            d = torch.distributions.Categorical(logits=self.net(x)[0])
            a = d.sample()
            nxt, r, done = self.env.step(int(a))
            self.ret += r
            rows[t, :Corridor.OBS] = x
            rows[t, Corridor.OBS:] = torch.tensor([float(a), r, float(done), float(d.log_prob(a)), self.ret])
            self.obs = nxt
            if done:
                self.obs, self.ret = self.env.reset(), 0.0
        return rows

    def run(self):
        for _ in range(self.args.updates):
            self.pull()
            dist.send(self.unroll(), dst=0, group=self.data_pg)
        self.pull()


class Intake(threading.Thread):
    """Receives the unrolls of one actor and keeps its episode statistics."""

    def __init__(self, src, args, data_pg, out, board):
        super().__init__(daemon=True, name=f"intake-{src}")
        self.src, self.args, self.data_pg, self.out, self.board = src, args, data_pg, out, board

    def run(self):
        for _ in range(self.args.updates):
            rows = torch.empty(self.args.unroll, ROW)
            dist.recv(rows, src=self.src, group=self.data_pg)
            ends = rows[:, Corridor.OBS + 2] > 0
            finished = rows[ends, Corridor.OBS + 4].tolist()
            self.board[self.src].append((max(finished), len(finished)))
            self.out.put(rows)


class Learner:
    def __init__(self, args, world, weights_pg, data_pg):
        self.args, self.weights_pg = args, weights_pg
        self.net = ActorCritic()
        self.opt = torch.optim.RMSprop(self.net.parameters(), lr=args.lr, eps=1e-3)
        self.queues = {r: queue.Queue(4) for r in range(1, world)}
        self.board = collections.defaultdict(lambda: collections.deque(maxlen=20))
        self.intakes = [Intake(r, args, data_pg, q, self.board) for r, q in self.queues.items()]

    def push(self):
        flat = parameters_to_vector(self.net.parameters()).detach()
        dist.broadcast(flat, src=0, group=self.weights_pg)

    def vtrace(self, v, rew, done, rho):
        disc = self.args.gamma * (1 - done)
        nv = torch.cat([v[1:], v[-1:]])
        delta = rho * (rew + disc * nv - v)
        acc, out = torch.zeros(v.shape[1]), torch.zeros_like(v)
        for t in reversed(range(len(v))):
            acc = delta[t] + disc[t] * rho[t].clamp(max=1.0) * acc
            out[t] = v[t] + acc
        adv = rho * (rew + disc * torch.cat([out[1:], nv[-1:]]) - v)
        return out, adv

    def update(self, batch):
        obs = batch[..., :Corridor.OBS]
        act, rew, done, mu = batch[..., Corridor.OBS:Corridor.OBS + 4].unbind(-1)
        logits, v = self.net(obs)
        d = torch.distributions.Categorical(logits=logits)
        logp = d.log_prob(act)
        with torch.no_grad():
            rho = (logp - mu).exp().clamp(max=self.args.rho_bar)
            target, adv = self.vtrace(v, rew, done, rho)
        loss = -(logp * adv).mean() + 0.5 * (v - target).pow(2).mean() - 0.01 * d.entropy().mean()
        self.opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 5.0)
        self.opt.step()
        return loss.item()

    def run(self):
        for t in self.intakes:
            t.start()
        self.push()
        for u in range(self.args.updates):
            batch = torch.stack([self.queues[r].get() for r in sorted(self.queues)], dim=1)
            loss = self.update(batch)
            self.push()
            if u % 5 == 0:
                best = {r: round(max(b[0] for b in rows), 2) for r, rows in self.board.items() if rows}
                print(f"update {u:3d} loss {loss:.4f} best {best}", flush=True)
        for t in self.intakes:
            t.join()


def evaluate(net, args, rank):
    env, total = Corridor(5, 999 + rank), []
    for _ in range(args.eval_episodes):
        obs, done, ret = env.reset(), False, 0.0
        while not done:
            with torch.no_grad():
                a = int(net(torch.from_numpy(obs))[0].argmax())
            obs, r, done = env.step(a)
            ret += r
        total.append(ret)
    return float(np.mean(total))


def main():
    args = parse()
    dist.init_process_group("gloo", timeout=datetime.timedelta(hours=2))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed + rank)
    weights_pg = dist.new_group(list(range(world)))
    data_pg = dist.new_group(list(range(world)))
    role = Learner(args, world, weights_pg, data_pg) if rank == 0 else Actor(rank, args, weights_pg, data_pg)
    role.run()
    scores = [None] * world
    dist.all_gather_object(scores, evaluate(role.net, args, rank))
    if rank == 0:
        print(f"eval {np.round(scores, 3).tolist()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
