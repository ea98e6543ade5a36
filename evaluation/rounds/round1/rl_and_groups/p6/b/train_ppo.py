import argparse
import os
import random
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel as DDP

from envs import StagedBalance, SubprocVecEnv


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--exp-name", default=os.path.basename(__file__)[:-3])
    p.add_argument("--total-iters", type=int, default=30)
    p.add_argument("--num-envs", type=int, default=3)
    p.add_argument("--num-steps", type=int, default=48)
    p.add_argument("--update-epochs", type=int, default=2)
    p.add_argument("--num-minibatches", type=int, default=4)
    p.add_argument("--episodes-per-stage", type=int, default=10)
    p.add_argument("--gamma", type=float, default=0.98)
    p.add_argument("--gae-lambda", type=float, default=0.95)
    p.add_argument("--clip-coef", type=float, default=0.2)
    p.add_argument("--ent-coef", type=float, default=0.01)
    p.add_argument("--vf-coef", type=float, default=0.5)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--ckpt", default="")
    args = p.parse_args()
    args.batch = args.num_envs * args.num_steps
    args.minibatch = args.batch // args.num_minibatches
    return args


class Agent(nn.Module):
    def __init__(self, obs_dim, n_actions):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(obs_dim, 64), nn.Tanh(), nn.Linear(64, 1))
        self.actor = nn.Sequential(nn.Linear(obs_dim, 64), nn.Tanh(), nn.Linear(64, n_actions))

    def forward(self, x, action=None):
        d = Categorical(logits=self.actor(x))
        action = d.sample() if action is None else action
        return action, d.log_prob(action), d.entropy(), self.critic(x).squeeze(-1)


def gae(args, rew, done, val, last_val):
    adv, acc = torch.zeros_like(rew), 0.0
    for t in reversed(range(args.num_steps)):
        nxt = last_val if t == args.num_steps - 1 else val[t + 1]
        delta = rew[t] + args.gamma * nxt * (1 - done[t]) - val[t]
        acc = delta + args.gamma * args.gae_lambda * (1 - done[t]) * acc
        adv[t] = acc
    return adv, adv + val


if __name__ == "__main__":
    args = parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    seed = args.seed + 1000 * rank
    # later ranks begin further up, so that every stage is seen early on
    env_fns = [partial(StagedBalance, seed + i, rank % 3, args.episodes_per_stage) for i in range(args.num_envs)]
    envs = SubprocVecEnv(env_fns)

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(args.seed)
    agent = DDP(Agent(StagedBalance.obs_dim, StagedBalance.n_actions))
    opt = torch.optim.Adam(agent.parameters(), lr=args.lr, eps=1e-5)
    torch.manual_seed(seed)

    obs_buf = torch.zeros(args.num_steps, args.num_envs, StagedBalance.obs_dim)
    act_buf, logp_buf, rew_buf, done_buf, val_buf = (torch.zeros(args.num_steps, args.num_envs) for _ in range(5))
    obs = torch.from_numpy(envs.reset())

    for it in range(1, args.total_iters + 1):
        returns, stages = [], []
        for t in range(args.num_steps):
            with torch.no_grad():
                action, logp, _, value = agent.module(obs)
            obs_buf[t], act_buf[t], logp_buf[t], val_buf[t] = obs, action, logp, value
            nxt, rew, done, infos = envs.step(action.numpy())
            rew_buf[t], done_buf[t] = torch.from_numpy(rew), torch.from_numpy(done)
            obs = torch.from_numpy(nxt)
            for info in infos:
                if "episode_return" in info:
                    returns.append(info["episode_return"])
                    stages.append(info["stage"])
        with torch.no_grad():
            last = agent.module.critic(obs).squeeze(-1)
        adv, ret = gae(args, rew_buf, done_buf, val_buf, last)

        flat = [x.reshape(args.batch, *x.shape[2:]) for x in (obs_buf, act_buf, logp_buf, adv, ret)]
        for _ in range(args.update_epochs):
            for mb in torch.randperm(args.batch).split(args.minibatch):
                o, a, lp, ad, rt = (x[mb] for x in flat)
                ad = (ad - ad.mean()) / (ad.std() + 1e-8)
                _, newlp, ent, v = agent(o, a)
                ratio = (newlp - lp).exp()
                pg = torch.max(-ad * ratio, -ad * ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)).mean()
                loss = pg + args.vf_coef * 0.5 * (v - rt).pow(2).mean() - args.ent_coef * ent.mean()
                opt.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                opt.step()

        report = torch.tensor([sum(returns), len(returns), sum(stages)], dtype=torch.float64)
        dist.all_reduce(report)
        if rank == 0 and it % 3 == 0:
            n = max(1.0, report[1].item())
            print(f"{args.exp_name} iter={it} return={report[0] / n:.2f} stage={report[2] / n:.2f}", flush=True)
        if rank == 0 and args.ckpt and it % 10 == 0:
            torch.save(agent.module.state_dict(), f"{args.ckpt}/{args.exp_name}_{it}.pt")

    envs.close()
    dist.barrier()
    dist.destroy_process_group()
