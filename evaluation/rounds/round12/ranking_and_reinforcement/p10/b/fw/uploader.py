import json
import os
import queue
import threading
import time


class MetricUploader:
    """Sends metric records to the tracking folder from a thread of its own,
    so that the training loop does not wait for slow storage."""

    def __init__(self, folder, latency=0.02, size=64):
        os.makedirs(folder, exist_ok=True)
        self.path = os.path.join(folder, "metrics.jsonl")
        self.latency = latency
        self.queue = queue.Queue(size)
        self.lock = threading.Lock()
        self.sent, self.pending = 0, []
        self.thread = threading.Thread(target=self._work, name="uploader", daemon=True)
        self.thread.start()

    def _work(self):
        while True:
            record = self.queue.get()
            time.sleep(self.latency)
            with self.lock:
                self.pending.append(record)
                if len(self.pending) >= 8:
                    self._write()
            self.queue.task_done()

    def _write(self):
        with open(self.path, "a") as fh:
            for record in self.pending:
                fh.write(json.dumps(record) + "\n")
        self.sent += len(self.pending)
        self.pending.clear()

    def log(self, **record):
        self.queue.put(record)

    def flush(self):
        with self.lock:
            self.queue.join()
            self._write()
