from dataclasses import dataclass

import torch

MAX_RESAMPLE = 6


@dataclass
class Group:
    question: torch.Tensor
    actions: torch.Tensor
    rewards: torch.Tensor

    @property
    def advantages(self):
        return (self.rewards - self.rewards.mean()) / (self.rewards.std() + 1e-4)


class Sampler:
    def __init__(self, policy, group_size, generator):
        self.policy, self.group_size, self.generator = policy, group_size, generator

    @torch.no_grad()
    def _sample(self, question):
        probs = self.policy(question[None]).softmax(-1)
        return torch.multinomial(probs[0], self.group_size, replacement=True, generator=self.generator)

    def group(self, prompt):
        """Completions for one prompt; groups without any reward spread carry no signal and are redrawn."""
        question, target = torch.tensor(prompt[0]), prompt[1]
        for _ in range(MAX_RESAMPLE):
            actions = self._sample(question)
            rewards = (actions == target).float()
            if rewards.std() > 0:
                break
        return Group(question, actions, rewards)
