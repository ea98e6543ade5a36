"""Feature drift: population stability index of each feature against a reference, computed off the training path."""
import queue
import threading

import torch
import torch.distributed as dist


class DriftMonitor(threading.Thread):
    def __init__(self, reference, group=None, bins=20, alarm=0.25):
        super().__init__(name="drift-monitor", daemon=True)
        self.group, self.bins, self.alarm = group, bins, alarm
        self.inbox = queue.Queue(maxsize=64)
        self.edges = torch.quantile(reference, torch.linspace(0, 1, bins + 1)[1:-1], dim=0).T.contiguous()
        self.expected = self._histogram(reference)
        self.worst, self.alarms, self.seen = 0.0, 0, 0

    def _histogram(self, x):
        idx = torch.searchsorted(self.edges, x.T.contiguous())
        return torch.nn.functional.one_hot(idx, self.bins).sum(dim=1).double()

    def submit(self, x):
        self.inbox.put(x)

    def run(self):
        for x in iter(self.inbox.get, None):
            observed = self._histogram(x)
            dist.all_reduce(observed, group=self.group)
            p = (observed + 0.5) / (observed + 0.5).sum(dim=1, keepdim=True)
            q = (self.expected + 0.5) / (self.expected + 0.5).sum(dim=1, keepdim=True)
            psi = ((p - q) * (p / q).log()).sum(dim=1)
            self.worst = max(self.worst, psi.max().item())
            self.alarms += int((psi > self.alarm).sum())
            self.seen += 1

    def close(self):
        self.inbox.put(None)
        self.join()
