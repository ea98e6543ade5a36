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
                    for no, line in enumerate(f, 1):
                        try:
                            rec = json.loads(line)
                        except ValueError as e:
                            log.debug("%s:%d %s", path, no, e)
                            continue
                        yield rec["feats"], rec["label"]

    def _run(self):
        rows = []
        for rec in self._records():
            rows.append(rec)
            if len(rows) == self.batch_size:
                feats, labels = zip(*rows)
                self.buffer.put((torch.tensor(feats), torch.tensor(labels)))
                rows = []

    def __iter__(self):
        return self

    def __next__(self):
        return self.buffer.get()
