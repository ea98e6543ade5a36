import os
import queue
import threading

import torch


class AsyncWriter:
    """Writes checkpoints behind the training loop and keeps the newest few of each kind."""

    def __init__(self, root, workers=1, keep=2):
        self.root, self.keep = root, keep
        self.jobs = queue.Queue()
        self.kept, self.lock = {}, threading.Lock()
        self.threads = [threading.Thread(target=self._loop, name=f"ckpt-{i}") for i in range(workers)]
        for t in self.threads:
            t.start()

    def submit(self, kind, step, state):
        self.jobs.put((kind, step, state))

    def _loop(self):
        while True:
            job = self.jobs.get()
            if job is None:
                return
            kind, step, state = job
            path = os.path.join(self.root, f"{kind}_{step:06d}.pt")
            torch.save(state, path + ".tmp")
            os.replace(path + ".tmp", path)
            with self.lock:
                paths = self.kept.setdefault(kind, [])
                paths.append(path)
                paths.sort()
                while len(paths) > self.keep:
                    os.remove(paths.pop(0))

    def drain(self):
        """No more jobs will come; the threads end after the queued ones."""
        for _ in self.threads:
            self.jobs.put(None)
