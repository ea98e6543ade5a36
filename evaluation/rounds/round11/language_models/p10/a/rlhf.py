"""Reinforcement learning of a small language model: rank 0 learns, the others roll out."""
import copy
import time

import torch
import torch.distributed as dist
import torch.nn as nn

from bus import open_store, pack, policy_key, rollout_key, unpack

VOCAB, PROMPT, ANSWER, BATCH = 24, 3, 5, 16
ROUNDS, EPOCHS, MAX_KL = 14, 3, 0.35


class Policy(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        return self.head(self.rnn(self.tok(ids))[0])


def logps(model, ids):
    lp = model(ids)[:, PROMPT - 1 : -1].log_softmax(-1)
    return lp.gather(2, ids[:, PROMPT:, None]).squeeze(2)


def score(ids):
    """Answers should climb: a point for each step up by one or two."""
    step = ids[:, PROMPT:] - ids[:, PROMPT - 1 : -1]
    return ((step == 1) | (step == 2)).float().sum(1)


@torch.no_grad()
def rollout(model, gen):
    ids = torch.randint(0, VOCAB, (BATCH, PROMPT), generator=gen)
    for _ in range(ANSWER):
        probs = model(ids)[:, -1].softmax(-1)
        ids = torch.cat([ids, torch.multinomial(probs, 1, generator=gen)], 1)
    return {"ids": ids, "logps": logps(model, ids), "rewards": score(ids)}


class Learner:
    def __init__(self, policy):
        self.policy = policy
        self.opt = torch.optim.Adam(policy.parameters(), lr=1.2e-2)
        self.baseline = None

    def merge(self, batches):
        return {k: torch.cat([b[k] for b in batches]) for k in batches[0]}

    def update(self, data):
        mean = data["rewards"].mean().item()
        self.baseline = mean if self.baseline is None else 0.7 * self.baseline + 0.3 * mean
        adv = (data["rewards"] - self.baseline) / (data["rewards"].std() + 1e-3)
        for _ in range(EPOCHS):
            new = logps(self.policy, data["ids"])
            ratio = (new - data["logps"]).exp()
            gain = torch.minimum(ratio * adv[:, None], ratio.clamp(0.8, 1.2) * adv[:, None])
            entropy = -(new.exp() * new).mean()
            loss = -gain.mean() - 0.01 * entropy
            self.opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
            self.opt.step()
        with torch.no_grad():
            kl = (data["logps"] - logps(self.policy, data["ids"])).sum(1).mean().item()
        return mean, kl


def learn(store, actors):
    learner = Learner(Policy())
    store.set(policy_key(0), pack(learner.policy.state_dict()))
    skipped = 0
    for version in range(ROUNDS):
        batches = []
        for actor in actors:
            batches.append(unpack(store.get(rollout_key(version, actor))))
        data = learner.merge(batches)
        before = copy.deepcopy(learner.policy.state_dict())
        reward, kl = learner.update(data)
        if kl > MAX_KL:
            learner.policy.load_state_dict(before)
            skipped += 1
        store.set(policy_key(version + 1), pack(learner.policy.state_dict()))
        if version % 3 == 2:
            print(f"round {version + 1} reward {reward:.2f} kl {kl:.3f} rolled back {skipped}", flush=True)
    return learner.policy


def act(store, rank):
    policy = Policy()
    gen = torch.Generator().manual_seed(90 + rank)
    for version in range(ROUNDS):
        policy.load_state_dict(unpack(store.get(policy_key(version))))
        store.set(rollout_key(version, rank), pack(rollout(policy, gen)))
    policy.load_state_dict(unpack(store.get(policy_key(ROUNDS))))
    return policy


def final_eval(policy, rank, world):
    batch = rollout(policy, torch.Generator().manual_seed(1000 + rank))
    mean = batch["rewards"].mean()
    dist.all_reduce(mean)
    if rank == 0:
        print(f"final reward {mean.item() / world:.2f}", flush=True)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    store = open_store()
    if rank == 0:
        policy = learn(store, range(1, world))
    else:
        policy = act(store, rank)
    final_eval(policy, rank, world)
    dist.barrier()
    time.sleep(0.3)  # log writers drain
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
