from dataclasses import dataclass, field


@dataclass
class RLConfig:
    vocab: int = 40
    hidden: int = 32
    eos: int = 1
    max_new_tokens: int = 12
    rollouts_per_step: int = 6
    steps: int = 36
    actor_lr: float = 4e-3
    reward_lr: float = 1e-3
    entropy_coef: float = 0.01
    seed: int = 5
    actors: list = field(default_factory=lambda: [0, 1])
    scorers: list = field(default_factory=lambda: [2, 3])

    def partner(self, rank):
        """Actor i talks to scorer i."""
        if rank in self.actors:
            return self.scorers[self.actors.index(rank)]
        return self.actors[self.scorers.index(rank)]
