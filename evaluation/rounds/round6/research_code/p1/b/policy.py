import torch
import torch.nn as nn
import torch.nn.functional as F


class ActorCritic(nn.Module):
    def __init__(self, obs_dim, hidden, actions=2):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs_dim, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.pi = nn.Linear(hidden, actions)
        self.v = nn.Linear(hidden, 1)

    def forward(self, obs):
        h = self.body(obs)
        return self.pi(h), self.v(h).squeeze(-1)


def flatten(model):
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def assign(model, vec):
    torch.nn.utils.vector_to_parameters(vec, model.parameters())


def returns_of(rewards, dones, bootstrap, gamma):
    out = torch.zeros_like(rewards)
    acc = bootstrap
    for t in reversed(range(rewards.shape[0])):
        acc = rewards[t] + gamma * acc * (1.0 - dones[t])
        out[t] = acc
    return out


def a2c_loss(model, batch, cfg):
    loss = 0.0
    for roll in batch:
        obs, act, rew, done = roll[:, :-3], roll[:, -3].long(), roll[:, -2], roll[:, -1]
        logits, value = model(obs)
        ret = returns_of(rew, done, value[-1].detach(), cfg.gamma)
        adv = ret - value
        logp = F.log_softmax(logits, -1)
        pg = -(logp.gather(1, act[:, None]).squeeze(1) * adv.detach()).mean()
        ent = -(logp.exp() * logp).sum(-1).mean()
        loss = loss + pg + 0.5 * adv.pow(2).mean() - cfg.entropy_cost * ent
    return loss / len(batch)
