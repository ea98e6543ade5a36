import queue
import threading

import torch


def collate(rows):
    size = max(len(r["history"]) for r in rows)
    hist = torch.full((len(rows), size), 60)
    for k, r in enumerate(rows):
        hist[k, :len(r["history"])] = torch.tensor(r["history"])
    item = torch.tensor([r["item"] for r in rows])
    click = torch.tensor([float(r["click"]) for r in rows])
    return hist, item, click


class Prefetcher:
    """Prepares batches in a thread while the model is busy."""

    def __init__(self, source, depth=4):
        self.source = source
        self.queue = queue.Queue(depth)
        self.stopped = threading.Event()
        threading.Thread(target=self._fill, daemon=True).start()

    def _fill(self):
        for rows in self.source:
            if self.stopped.is_set():
                return
            self.queue.put(collate(rows))

    def __iter__(self):
        return self

    def __next__(self):
        return self.queue.get()

    def stop(self):
        self.stopped.set()
