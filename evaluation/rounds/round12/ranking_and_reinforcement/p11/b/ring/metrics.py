import torch
import torch.distributed as dist


class RecallAtK:
    def __init__(self, k):
        self.k = k
        self.reset()

    def reset(self):
        self.state = torch.zeros(2, dtype=torch.float64)

    def update(self, logits):
        top = logits.topk(self.k, dim=1).indices
        want = torch.arange(len(logits)).unsqueeze(1)
        self.state += torch.tensor([(top == want).any(1).sum().item(), len(logits)], dtype=torch.float64)

    def compute(self):
        total = self.state.clone()
        dist.all_reduce(total)
        self.reset()
        return (total[0] / total[1]).item()
