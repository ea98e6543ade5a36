"""Metric plumbing: the loop adds, the sinks drain every `log_every` steps."""
import collections
import json
import pathlib
import queue
import threading

import torch
from torch.distributed.tensor import DTensor


def scalar(value):
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        value = value.detach().item()
    return float(value)


class MetricBuffer:
    """Running window of recent values per metric name."""

    def __init__(self, window):
        self._rows = collections.defaultdict(lambda: collections.deque(maxlen=window))

    def add(self, **values):
        for name, value in values.items():
            self._rows[name].append(value.detach() if torch.is_tensor(value) else value)

    def mean(self):
        return {
            name: sum(scalar(v) for v in row) / len(row)
            for name, row in self._rows.items()
            if row
        }

    def clear(self):
        for row in self._rows.values():
            row.clear()


class JsonlSink:
    """Writes rows in a background thread, file systems here like to stall."""

    def __init__(self, folder):
        self.path = pathlib.Path(folder) / "metrics.jsonl"
        self.last = {}
        self._queue = queue.Queue()
        self._thread = threading.Thread(target=self._drain, daemon=True, name="jsonl")
        self._thread.start()

    def write(self, step, buffer):
        self.last = buffer.mean()
        self._queue.put({"step": step, **self.last})

    def _drain(self):
        with self.path.open("a") as f:
            for row in iter(self._queue.get, None):
                f.write(json.dumps(row) + "\n")
                f.flush()

    def close(self):
        self._queue.put(None)
        self._thread.join(timeout=5)
