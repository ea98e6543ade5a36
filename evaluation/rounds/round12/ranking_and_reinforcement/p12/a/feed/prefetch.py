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
    """Prepares batches in a thread while the model is busy. It begins the
    source again when that has run out."""

    def __init__(self, source, depth=4):
        self.source = source
        self.queue = queue.Queue(depth)
        self.stopped = threading.Event()
        self.passes = 0
        threading.Thread(target=self._fill, daemon=True).start()

    def _fill(self):
        while not self.stopped.is_set():
            for rows in self.source:
                self.queue.put(collate(rows))
            self.passes += 1

    def __iter__(self):
        return self

    def __next__(self):
        return self.queue.get()

    def stop(self):
        self.stopped.set()
