"""Balancing task with stages, and a vector environment that runs copies in child processes."""
import multiprocessing as mp

import numpy as np

# (pole gain, wind, episode limit)
STAGES = [
    (0.8, 0.00, 20),
    (1.0, 0.02, 24),
    (1.2, 0.04, 28),
    (1.4, 0.06, 32),
    (1.5, 0.08, 36),
]


class StagedBalance:
    obs_dim, n_actions = 3, 2

    def __init__(self, seed, stage, episodes_per_stage):
        self.rng = np.random.default_rng(seed)
        self.stage, self.per_stage, self.episodes = stage, episodes_per_stage, 0

    def reset(self):
        self.gain, self.wind, self.limit = STAGES[self.stage]
        self.th, self.om, self.t, self.ret = self.rng.uniform(-0.1, 0.1), 0.0, 0, 0.0
        return self._obs()

    def _obs(self):
        return np.array([self.th, self.om, self.gain], dtype=np.float32)

    def step(self, action):
        push = 0.5 if action == 1 else -0.5
        self.om += 0.1 * (self.gain * np.sin(self.th) + push + self.wind * self.rng.normal())
        self.th += 0.1 * self.om
        self.t += 1
        out = abs(self.th) > 0.6
        rew = 1.0 - abs(self.th)
        self.ret += rew
        done = bool(out or self.t >= self.limit)
        info = {}
        if done:
            info = {"episode_return": self.ret, "stage": self.stage}
            self.episodes += 1
            if self.episodes % self.per_stage == 0:
                self.stage = min(self.stage + 1, len(STAGES) - 1)
        return self._obs(), rew, done, info


def _worker(remote, parent_remote, env_fn):
    parent_remote.close()
    env = env_fn()
    while True:
        try:
            cmd, data = remote.recv()
        except (EOFError, KeyboardInterrupt):
            break
        if cmd == "step":
            obs, rew, done, info = env.step(data)
            if done:
                obs = env.reset()
            remote.send((obs, rew, done, info))
        elif cmd == "reset":
            remote.send(env.reset())
        elif cmd == "close":
            remote.close()
            break


class SubprocVecEnv:
    def __init__(self, env_fns):
        ctx = mp.get_context("fork")
        self.remotes, self.procs = [], []
        for fn in env_fns:
            ours, theirs = ctx.Pipe()
            proc = ctx.Process(target=_worker, args=(theirs, ours, fn), daemon=True)
            proc.start()
            theirs.close()
            self.remotes.append(ours)
            self.procs.append(proc)

    def reset(self):
        for r in self.remotes:
            r.send(("reset", None))
        return np.stack([r.recv() for r in self.remotes])

    def step(self, actions):
        for r, a in zip(self.remotes, actions):
            r.send(("step", int(a)))
        obs, rew, done, infos = zip(*[r.recv() for r in self.remotes])
        return np.stack(obs), np.array(rew, np.float32), np.array(done, np.float32), infos

    def close(self):
        for r in self.remotes:
            r.send(("close", None))
        for p in self.procs:
            p.join()
