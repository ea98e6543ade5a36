import copy

import torch
import torch.nn.functional as F


class Reference:
    """Frozen copy of the policy, refreshed from checkpoints, for a KL penalty."""

    def __init__(self, model):
        self.model = copy.deepcopy(model).eval().requires_grad_(False)

    def refresh(self, path):
        blob = torch.load(path, weights_only=True)
        self.model.load_state_dict(blob["model"])
        return blob["step"]

    def kl(self, logits, ids):
        with torch.no_grad():
            ref = self.model(ids)
        return F.kl_div(ref.log_softmax(-1), logits.log_softmax(-1), log_target=True, reduction="batchmean")
