"""Per-stage files with names of the whole network, so that they can be merged later."""
import os

import torch


def rename_units(state, shift):
    out = {}
    for key, value in state.items():
        if key.startswith("units."):
            _, index, rest = key.split(".", 2)
            key = f"units.{int(index) + shift}.{rest}"
        out[key] = value
    return out


class BestKeeper:
    def __init__(self, folder, rank):
        self.path = os.path.join(folder, f"best.stage{rank}.pt")
        self.best = float("inf")
        os.makedirs(folder, exist_ok=True)

    def offer(self, score, stage, step):
        if score >= self.best:
            return False
        self.best = score
        torch.save({"step": step, "score": score,
                    "weights": rename_units(stage.state_dict(), stage.first_unit)}, self.path)
        return True

    def restore(self, stage):
        data = torch.load(self.path)
        stage.load_state_dict(rename_units(data["weights"], -stage.first_unit))
        return data["step"], data["score"]
