import os

import torch


class Snapshots:
    """Each rank keeps its own file: the labelled set and the queue differ from rank to rank."""

    def __init__(self, folder, rank, every):
        self.path = os.path.join(folder, f"rank{rank}.pt")
        self.every = every
        self.saved_at = 0

    def maybe_save(self, learner, acquired, next_round):
        if acquired - self.saved_at < self.every:
            return False
        self.saved_at = acquired
        tmp = self.path + ".tmp"
        torch.save({"learner": learner.state_dict(), "acquired": acquired, "next_round": next_round}, tmp)
        os.replace(tmp, self.path)
        return True

    def restore(self, learner):
        if not os.path.exists(self.path):
            return 0, 0
        blob = torch.load(self.path, weights_only=False)
        learner.load_state_dict(blob["learner"])
        self.saved_at = blob["acquired"]
        return blob["acquired"], blob["next_round"]
