"""Actor-critic fine-tuning of a behaviour-cloned policy, data parallel over ranks."""
import argparse
import contextlib
import pathlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


@contextlib.contextmanager
def process_group():
    dist.init_process_group("gloo")
    try:
        yield dist.get_world_size()
        dist.barrier()
    finally:
        dist.destroy_process_group()


class Bandwalk:
    """Contextual chain: keep the phase of a drifting oscillator inside a band."""
    OBS, ACT = 5, 3

    def __init__(self, n, gen):
        self.n, self.gen = n, gen
        self.phase, self.drift, self.t = torch.zeros(3, n).unbind()
        self.reset(torch.ones(n, dtype=torch.bool))

    def reset(self, mask):
        k = int(mask.sum())
        self.phase[mask] = torch.rand(k, generator=self.gen) * 2 - 1
        self.drift[mask] = torch.randn(k, generator=self.gen) * 0.1
        self.t[mask] = 0

    def obs(self):
        return torch.stack([self.phase, self.drift, self.phase.sin(), self.phase.cos(), self.t / 32], 1)

    def expert(self):
        return torch.where(self.phase > 0.1, 0, torch.where(self.phase < -0.1, 2, 1))

    def step(self, a):
        self.phase += self.drift + 0.2 * (a.float() - 1)
        self.t += 1
        rew = 1 - self.phase.abs()
        done = (self.phase.abs() > 2) | (self.t >= 32)
        self.reset(done)
        return rew, done.float()


class ActorCritic(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.width = width
        self.trunk = nn.Sequential(nn.Linear(Bandwalk.OBS, width), nn.ELU(), nn.Linear(width, width), nn.ELU())
        self.actor = nn.Linear(width, Bandwalk.ACT)
        self.critic = nn.Linear(width, 1)

    def new_critic(self, layers=2):
        """The cloned policy never trained its critic; begin with a deeper, fresh one."""
        mods = []
        for _ in range(layers - 1):
            mods += [nn.Linear(self.width, self.width), nn.ELU()]
        self.critic = nn.Sequential(*mods, nn.Linear(self.width, 1))

    def forward(self, x):
        h = self.trunk(x)
        return self.actor(h), self.critic(h).squeeze(-1)


class Replicas:
    """Keeps the copies of a model alike: one broadcast at the start, averaged gradients later."""

    def __init__(self, model, bucket=4096):
        self.world = dist.get_world_size()
        self.buckets, size = [[]], 0
        for p in model.parameters():
            if size + p.numel() > bucket and self.buckets[-1]:
                self.buckets.append([])
                size = 0
            self.buckets[-1].append(p)
            size += p.numel()

    def broadcast(self):
        for bucket in self.buckets:
            for p in bucket:
                dist.broadcast(p.data, src=0)

    def average(self):
        pending = []
        for bucket in self.buckets:
            ps = [p for p in bucket if p.requires_grad]
            flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in ps])
            pending.append((ps, flat, dist.all_reduce(flat, async_op=True)))
        for ps, flat, work in pending:
            work.wait()
            flat.div_(self.world)
            for p, g in zip(ps, flat.split([p.numel() for p in ps])):
                p.grad = g.view_as(p)


class Finetuner:
    def __init__(self, args):
        self.args = args
        torch.manual_seed(args.seed + rank())
        self.gen = torch.Generator().manual_seed(args.seed + 77 * rank())
        self.env = Bandwalk(args.envs, self.gen)
        self.net = ActorCritic()
        self.replicas = Replicas(self.net)
        self.replicas.broadcast()
        self.clone_expert()
        self.net.new_critic()
        self.opt = torch.optim.Adam(self.net.parameters(), lr=args.lr)
        self.out = pathlib.Path(args.out)
        self.rows = []

    def clone_expert(self):
        gen = torch.Generator().manual_seed(self.args.seed)
        env = Bandwalk(64, gen)
        opt = torch.optim.Adam([*self.net.trunk.parameters(), *self.net.actor.parameters()], lr=3e-3)
        for _ in range(self.args.clone_steps):
            label = env.expert()
            loss = F.cross_entropy(self.net(env.obs())[0], label)
            opt.zero_grad()
            loss.backward()
            opt.step()
            env.step(label)

    def rollout(self):
        obs, act, rew, done = [], [], [], []
        with torch.no_grad():
            for _ in range(self.args.horizon):
                o = self.env.obs()
                a = torch.multinomial(self.net(o)[0].softmax(-1), 1, generator=self.gen).squeeze(1)
                r, d = self.env.step(a)
                for buf, x in zip((obs, act, rew, done), (o, a, r, d)):
                    buf.append(x)
            boot = self.net(self.env.obs())[1]
        ret = []
        for r, d in zip(reversed(rew), reversed(done)):
            boot = r + self.args.gamma * (1 - d) * boot
            ret.append(boot)
        return torch.stack(obs), torch.stack(act), torch.stack(ret[::-1]), torch.stack(rew).mean()

    def update(self):
        obs, act, ret, reward = self.rollout()
        logits, value = self.net(obs)
        logp = F.log_softmax(logits, -1)
        adv = (ret - value).detach()
        pg = -(logp.gather(-1, act.unsqueeze(-1)).squeeze(-1) * adv).mean()
        vf = F.mse_loss(value, ret)
        ent = -(logp.exp() * logp).sum(-1).mean()
        self.opt.zero_grad()
        (pg + 0.5 * vf - 0.01 * ent).backward()
        self.replicas.average()
        self.opt.step()
        return torch.stack([reward, vf.detach(), ent.detach()])

    def run(self):
        for it in range(self.args.iters):
            stat = self.update()
            dist.all_reduce(stat)
            stat /= dist.get_world_size()
            if rank() == 0:
                self.rows.append([it, *[round(x, 4) for x in stat.tolist()]])
                if it % self.args.log_every == 0:
                    print("iter %d reward %.4f vf %.4f ent %.4f" % tuple(self.rows[-1]), flush=True)
        if rank() == 0:
            self.save()

    def save(self):
        if self.args.out:
            self.out.mkdir(parents=True, exist_ok=True)
            torch.save({"net": self.net.state_dict(), "opt": self.opt.state_dict(), "rows": self.rows}, self.out / "last.pt")


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--iters", type=int, default=150)
    p.add_argument("--envs", type=int, default=16)
    p.add_argument("--horizon", type=int, default=16)
    p.add_argument("--gamma", type=float, default=0.95)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--clone-steps", type=int, default=60)
    p.add_argument("--log-every", type=int, default=25)
    p.add_argument("--seed", type=int, default=42)
    p.add_argument("--out", default="")
    with process_group():
        torch.set_num_threads(1)
        Finetuner(p.parse_args()).run()


if __name__ == "__main__":
    main()
