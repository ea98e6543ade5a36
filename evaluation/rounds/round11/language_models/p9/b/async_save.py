"""Background writer of training snapshots, with a bounded backlog."""
import os
import queue
import threading

import torch


class SnapshotWriter:
    """Writes snapshots in a thread; `ledger` lists what was queued and what is on disk."""

    def __init__(self, folder, backlog=1, keep=3):
        self.folder, self.keep = folder, keep
        self.jobs = queue.Queue(maxsize=backlog)
        self.lock = threading.Lock()
        self.ledger = {"queued": [], "written": []}
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self):
        while True:
            job = self.jobs.get()
            if job is None:
                return
            step, blob = job
            path = os.path.join(self.folder, f"snap{step}.pt")
            torch.save(blob, path)
            with self.lock:
                self.ledger["queued"].remove(step)
                self.ledger["written"].append(step)
                self._prune()

    def _prune(self):
        while len(self.ledger["written"]) > self.keep:
            old = self.ledger["written"].pop(0)
            os.remove(os.path.join(self.folder, f"snap{old}.pt"))

    def submit(self, step, blob):
        copied = {k: v.detach().clone() for k, v in blob.items()}
        with self.lock:
            self.ledger["queued"].append(step)
            self.jobs.put((step, copied))

    def submit_many(self, step, parts):
        """Several blobs of the same step, as a burst of jobs."""
        for i, part in enumerate(parts):
            self.submit(step * 100 + i, part)

    def status(self):
        with self.lock:
            return {k: list(v) for k, v in self.ledger.items()}

    def close(self):
        self.jobs.put(None)
        self.thread.join()
