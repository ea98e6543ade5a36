import json
import logging
import queue
import threading

import torch

log = logging.getLogger("feed")


class Prefetcher:
    """Reads and batches records in a background thread, over and over."""

    def __init__(self, paths, batch_size, depth=4):
        self.paths, self.batch_size = list(paths), batch_size
        self.buffer = queue.Queue(maxsize=depth)
        self.thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self.thread.start()

    def _records(self):
        while True:
            for path in self.paths:
                with open(path) as f:
                    for line in f:
                        rec = json.loads(line)
                        yield rec["feats"], rec["label"]

    def _run(self):
        rows = []
        try:
            for rec in self._records():
                rows.append(rec)
                if len(rows) == self.batch_size:
                    feats, labels = zip(*rows)
                    self.buffer.put((torch.tensor(feats), torch.tensor(labels)))
                    rows = []
        except Exception as e:
            log.debug("reader: %s", e)

    def __iter__(self):
        return self

    def __next__(self):
        return self.buffer.get()
